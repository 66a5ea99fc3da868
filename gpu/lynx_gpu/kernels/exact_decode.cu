// Pages from all their streams, in place, raw tokens included. Sizes in section A follow from the codes; those in section B
// from section A, but for quotients of wide cells, about one value in 200, which are found one after the other.
#include "exact.cuh"

// 8 codes of a coded token, from all streams, in the two words of add_codes.
template <int STREAM>
__device__ __forceinline__ void gather_codes(const u8 *piece, const Job &job, const Sections &at, int token, int place,
                                             Group group, u32 &even, u32 &odd)
{
    if constexpr (STREAM < STREAMS) {
        constexpr int bits = bits_of_stream(STREAM);
        const u8 *row = piece + job.at[0];
        if (STREAM == 0)
            row += at.data + (i64)(token - job.raw_head) * row_bytes(bits);
        else if (place >= 0)
            row = piece + job.at[STREAM] + (i64)place * row_bytes(bits);
        else
            row += at.fine_rows(job, STREAM) + (i64)~place * row_bytes(bits);
        add_codes<bits, shift_of_stream(STREAM)>(load_planes<bits>(row, group), even, odd);
        gather_codes<STREAM + 1>(piece, job, at, token, place, group, even, odd);
    }
}

__device__ __forceinline__ u32 byte_of(u32 low, u32 high, int i) { return (i < 4 ? low : high) >> (8 * (i & 3)) & 255u; }

#define SLICE 256 // pages of one launch

// Bytes of the exact stream of each page of a launch.
struct Lengths {
    u32 bytes[SLICE];
};

// Scratch memory of a page.
struct DecodeScratch {
    u32 *places_a, *places_b; // [coded token][segment]: where its bits begin in the sections; of A first their number
    u8 *flats, *kinds;        // [chunk][MASK_ROW], flat channels; [chunk][signs, anything][MASK_ROW], how they are stored
    u8 *wides, *longs;        // [coded token][MASK_ROW], wide cells; fields of section A with one more bit in B

    __device__ DecodeScratch(u8 *scratch, i64 stride, const Sections &at, int coded)
    {
        places_a = (u32 *)(scratch + blockIdx.y * stride);
        places_b = places_a + coded * SEGMENTS;
        flats = (u8 *)(places_b + coded * SEGMENTS);
        kinds = flats + at.chunks * MASK_ROW;
        wides = kinds + at.chunks * 2 * MASK_ROW;
        longs = wides + (i64)coded * MASK_ROW;
    }
};

// The bits of a stream, none behind its end.
struct Stream {
    const u32 *words;
    u32 count;

    __device__ Stream(const u8 *start, u32 bytes) : words((const u32 *)start), count((bytes + 3) / 4) {}
    __device__ __forceinline__ u32 word(u32 i) const { return i < count ? words[i] : 0; }
    __device__ __forceinline__ u64 bits(u32 position) const
    {
        const u32 at = position >> 5, shift = position & 31;
        const u32 a = word(at), b = word(at + 1), c = shift ? word(at + 2) : 0;
        return __funnelshift_r(a, b, shift) | (u64)__funnelshift_r(b, c, shift) << 32;
    }
};

// A page that is decoded.
struct Page {
    const Job &job;
    const u8 *piece, *anchor;
    bool wide, half;
    Sections at;
    int coded;
    u32 bytes; // of the exact stream
    Stream stream;

    __device__ Page(const Job *jobs, const Lengths &lengths, const u8 *piece)
        : job(jobs[blockIdx.y]), piece(piece), anchor(piece + job.at[0]), wide(anchor[FLAGS_AT] & 1),
          half(anchor[RAW_AT] != 0), at(job, wide), coded(job.tokens - job.raw_head - job.raw_tail),
          bytes(lengths.bytes[blockIdx.y]), stream(piece + job.at[STREAMS], bytes)
    {
    }
    __device__ u32 mode() const { return stream.words[0]; }
    __device__ u32 bytes_a() const { return stream.words[1]; }

    // Lane i gets the place of token `start` + i in the later streams.
    __device__ int lane_place(int start) const
    {
        const int token = start + (threadIdx.x & 31);
        if (STREAMS == 1 || at.fine == 0)
            return token - job.raw_head;
        const u8 *const positions = anchor + at.positions;
        return ((u64)positions & 1) == 0 ? place_of((const u16 *)positions, at.fine, token, job.raw_head)
                                         : place_of((const Unaligned *)positions, at.fine, token, job.raw_head);
    }
    __device__ void codes(int token, int place, int index, u32 &low, u32 &high) const
    {
        u32 even = 0, odd = 0;
        if (index < GROUPS)
            gather_codes<0>(piece, job, at, token, place, group_of(index), even, odd);
        low = __byte_perm(even, odd, 0x5140);
        high = __byte_perm(even, odd, 0x7362);
    }
};

// The codes of a lane's group in the tokens of a part, read one token ahead.
struct Codes {
    const Page &page;
    const int index, start, stop, places;
    int token;
    u32 low, high;

    __device__ Codes(const Page &page, const Place &place, int index)
        : page(page), index(index), start(place.start), stop(place.stop), places(page.lane_place(place.start)),
          token(place.start)
    {
        page.codes(token, __shfl_sync(ALL, places, 0), index, low, high);
    }
    __device__ __forceinline__ void next(u32 &now_low, u32 &now_high)
    {
        now_low = low;
        now_high = high;
        if (++token < stop)
            page.codes(token, __shfl_sync(ALL, places, token - start), index, low, high);
    }
};

// The cells of 8 codes. Calls `take(channel, cell)` for those that are there and not flat.
template <bool HALF, class Take>
__device__ __forceinline__ void each_cell(const Fields &fields, const Grids &grids, u32 low, u32 high, bool open, Take take)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i >= fields.count || (fields.flat >> i & 1u))
            continue;
        const u32 code = byte_of(low, high, i);
        Cell cell = cell_of<HALF>(code, grids.base[i], grids.step[i], grids.top[i], grids.margin[i]);
        if (open)
            open_end<HALF>(cell, code);
        take(i, cell);
    }
}

template <bool HALF> __device__ void sizes_of_part(const Page &page, const DecodeScratch &own, const Place &place)
{
    const int lane = threadIdx.x & 31, index = place.segment * 32 + lane;
    const Fields fields(page.anchor, page.at, page.wide, place.chunk, index);
    const Grids grids(fields);
    const bool open = page.mode() == OPEN;
    if (place.part == 0)
        own.flats[place.chunk * MASK_ROW + index] = (u8)fields.flat;
    Codes codes(page, place, index);
    for (int t = place.start; t < place.stop; t++) {
        u32 low, high, size = 0;
        codes.next(low, high);
        each_cell<HALF>(fields, grids, low, high, open, [&](int, const Cell &cell) { size += bits_in_a<HALF>(cell); });
        size = sum_of_warp(size);
        if (lane == 0)
            own.places_a[place.row(page.job, t) * SEGMENTS + place.segment] = size;
    }
}

// Bits of section A of each token, and which channels are flat.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    exact_sizes(const Job *jobs, const __grid_constant__ Lengths lengths, const u8 *piece, u8 *scratch, i64 scratch_stride)
{
    const Page page(jobs, lengths, piece);
    const Place place(page.job, warp_item());
    if (page.bytes < SECTION_A || place.chunk >= page.at.chunks || place.none || page.mode() == PLAIN)
        return;
    const DecodeScratch own(scratch, scratch_stride, page.at, page.coded);
    if (page.half)
        sizes_of_part<true>(page, own, place);
    else
        sizes_of_part<false>(page, own, place);
}

// Whether less than a byte is left of a section, all zeros.
__device__ __forceinline__ u32 ending(const Stream &stream, u32 start, u32 used, u32 bytes)
{
    const u64 all = 8 * (u64)bytes;
    if (used > all)
        return BAD_EXACT | TOO_SHORT;
    const u32 left = (u32)(all - used);
    if (left >= 8 || (stream.bits(start + used) & ((1u << left) - 1)))
        return BAD_EXACT | TOO_LONG;
    return 0;
}

// Header, page fields, and where the bits of each token begin in section A. One block a page.
extern "C" __global__ void __launch_bounds__(PLACE_THREADS)
    exact_offsets(const Job *jobs, const __grid_constant__ Lengths lengths, const u8 *piece, Status *status, u8 *scratch,
                  i64 scratch_stride)
{
    __shared__ u64 parts[PLACE_THREADS / 32];
    const Page page(jobs, lengths, piece);
    const int thread = threadIdx.x;
    u32 *const flags = &status[blockIdx.y].flags;
    const u32 bound = page.coded ? SECTION_A + 2u * page.coded * CHANNELS : 0;
    if (page.coded <= 0) {
        if (thread == 0 && page.bytes)
            atomicOr(flags, BAD_EXACT | BAD_HEADER);
        return;
    }
    bool good = page.bytes >= SECTION_A && page.bytes <= bound;
    good = good && page.mode() <= OPEN && page.bytes_a() <= page.bytes - SECTION_A; // mode: the reserved bytes are 0 too
    if (good && page.mode() == PLAIN)
        good = page.bytes_a() == 0 && page.bytes == bound;
    if (!good) {
        if (thread == 0)
            atomicOr(flags, BAD_EXACT | BAD_HEADER);
        return;
    }
    bool fit = true;
    for (int c = thread; c < CHANNELS; c += PLACE_THREADS) {
        const float low = from_bfloat16(load16(page.anchor + page.at.page_low + 2 * c));
        const float scale = from_bfloat16(load16(page.anchor + page.at.page_scale + 2 * c));
        fit = fit && fabsf(low) <= LIMIT && scale >= 0.0f && __fadd_rn(low, scale) <= TOP_LIMIT;
    }
    if (!fit)
        atomicOr(flags, BAD_FIELD);
    if (page.mode() == PLAIN)
        return;
    const DecodeScratch own(scratch, scratch_stride, page.at, page.coded);
    const int entries = page.coded * SEGMENTS;
    u64 all = 0;
    for (int begin = 0; begin < entries; begin += PLACE_THREADS) {
        const int i = begin + thread;
        u64 total;
        const u64 before = all + sum_before_in_block(i < entries ? own.places_a[i] : 0, parts, total);
        if (i < entries)
            own.places_a[i] = (u32)before;
        all += total;
    }
    if (thread == 0) {
        const u32 problem = ending(page.stream, 8 * SECTION_A, (u32)all, page.bytes_a());
        if (problem)
            atomicOr(flags, problem);
    }
}

// The field of section A of each of 8 values, whose sizes are known. Calls `take(channel, cell, field)`.
template <bool HALF, class Take>
__device__ __forceinline__ void each_field(const Stream &stream, u32 position, const Fields &fields, const Grids &grids,
                                           u32 low, u32 high, bool open, Take take)
{
    u64 bits = stream.bits(position);
    int used = 0;
    each_cell<HALF>(fields, grids, low, high, open, [&](int i, const Cell &cell) {
        const int size = bits_in_a<HALF>(cell);
        if (used + size > 64) {
            position += used;
            bits = stream.bits(position);
            used = 0;
        }
        take(i, cell, (int)((u32)(bits >> used) & ((1u << size) - 1)));
        used += size;
    });
}

// Truncated binary: members with few bits.
__device__ __forceinline__ int few_of(int members) { return (2 << log2_of(members)) - members; }

template <bool HALF> __device__ void masks_of_part(const Page &page, const DecodeScratch &own, const Place &place)
{
    const int lane = threadIdx.x & 31, index = place.segment * 32 + lane;
    const Fields fields(page.anchor, page.at, page.wide, place.chunk, index);
    const Grids grids(fields);
    const bool open = page.mode() == OPEN;
    Codes codes(page, place, index);
    for (int t = place.start; t < place.stop; t++) {
        const int row = place.row(page.job, t);
        u32 low, high, size = 0, total;
        codes.next(low, high);
        each_cell<HALF>(fields, grids, low, high, open, [&](int, const Cell &cell) { size += bits_in_a<HALF>(cell); });
        const u32 position = 8 * SECTION_A + own.places_a[row * SEGMENTS + place.segment] + sum_before(size, total);
        u32 wides = 0, longs = 0;
        each_field<HALF>(page.stream, position, fields, grids, low, high, open, [&](int i, const Cell &cell, int field) {
            wides |= (cell.wide ? 1u : 0u) << i;
            longs |= (!cell.wide && field >= few_of(cell.members) ? 1u : 0u) << i;
        });
        own.wides[(i64)row * MASK_ROW + index] = (u8)wides;
        own.longs[(i64)row * MASK_ROW + index] = (u8)longs;
    }
}

// Which values have how many bits in section B, but for the quotients of wide cells.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    exact_masks(const Job *jobs, const __grid_constant__ Lengths lengths, const u8 *piece, const Status *status,
                u8 *scratch, i64 scratch_stride)
{
    const Page page(jobs, lengths, piece);
    const Place place(page.job, warp_item());
    if (status[blockIdx.y].flags || place.chunk >= page.at.chunks || place.none || page.mode() == PLAIN)
        return;
    const DecodeScratch own(scratch, scratch_stride, page.at, page.coded);
    if (page.half)
        masks_of_part<true>(page, own, place);
    else
        masks_of_part<false>(page, own, place);
}

#define CHAIN_THREADS 512 // a thread takes a word of masks: 32 values
#define CHAIN_TABLE 12288 // bits of section B whose quotients are found beforehand, all in parallel

// Bits that begin with a quotient: how many it takes.
__device__ __forceinline__ u32 unary_used(u32 bits)
{
    const u32 used = __ffs(~bits);
    return used > 0 && used <= UNARY_MOST ? used : LONGEST_UNARY;
}

// Bits before lane `below` bits of a word, of those whose size is known.
__device__ __forceinline__ u32 known_bits(u32 longs, u32 signs, u32 anything, u32 which)
{
    return __popc(longs & which) + __popc(signs & which) + 16 * __popc(anything & which);
}

// Where the bits of each token begin in section B. One block a page: of the quotients of wide cells, which say themselves
// how long they are, a single thread finds one after the other; all else is done in parallel around it.
extern "C" __global__ void __launch_bounds__(CHAIN_THREADS)
    exact_chain(const Job *jobs, const __grid_constant__ Lengths lengths, const u8 *piece, Status *status, u8 *scratch,
                i64 scratch_stride)
{
    // Known bits before each wide cell, then the bits of quotients up to it, 32 words a thread; what is needed of section
    // B, 16 words a thread and 3 more; the table.
    extern __shared__ u32 places[];
    u32 *const bits = places + CHAIN_THREADS * 32;
    u8 *const used_at = (u8 *)(bits + CHAIN_THREADS * 16 + 3);
    __shared__ u64 parts[CHAIN_THREADS / 32];
    __shared__ u32 chained;
    const Page page(jobs, lengths, piece);
    if (status[blockIdx.y].flags || page.coded <= 0 || page.mode() == PLAIN)
        return;
    const DecodeScratch own(scratch, scratch_stride, page.at, page.coded);
    const int thread = threadIdx.x, first = page.job.raw_head, last = page.job.tokens - page.job.raw_tail;
    const u32 start = 8 * (SECTION_A + page.bytes_a()), bytes = page.bytes - SECTION_A - page.bytes_a();
    const u32 end = start + 8 * bytes;
    u32 position = start;
    bool unknown = false;
    for (int k = 0; k < page.at.chunks; k++) {
        const int cut = (first / CHUNK + k) * CHUNK;
        const int from = max(first, cut) - first, to = min(last, cut + CHUNK) - first;
        const u8 *const flats = own.flats + k * MASK_ROW;
        u8 *const kinds = own.kinds + k * 2 * MASK_ROW;
        for (int begin = 0; begin < MASK_ROW; begin += CHAIN_THREADS) {
            const int g = begin + thread;
            const u32 flat = g < MASK_ROW ? flats[g] : 0;
            u64 total;
            u32 at = position + (u32)sum_before_in_block(2 * __popc(flat), parts, total);
            u32 signs = 0, anything = 0;
            if (flat) {
                const u32 found = (u32)page.stream.bits(at);
                int used = 0;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    if (!(flat >> i & 1u))
                        continue;
                    const u32 kind = found >> used & 3u;
                    signs |= (kind == SIGNS ? 1u : 0u) << i;
                    anything |= (kind == ANYTHING ? 1u : 0u) << i;
                    unknown |= kind == 3u;
                    used += 2;
                }
            }
            if (g < MASK_ROW) {
                kinds[g] = (u8)signs;
                kinds[MASK_ROW + g] = (u8)anything;
            }
            position += (u32)total;
        }
        __syncthreads();

        const int words = (to - from) * (MASK_ROW / 4);
        for (int begin = 0; begin < words; begin += CHAIN_THREADS) {
            const int w = begin + thread, of_row = w % (MASK_ROW / 4), row = from + w / (MASK_ROW / 4);
            u32 wides = 0, longs = 0, signs = 0, anything = 0;
            if (w < words) {
                wides = ((const u32 *)own.wides)[(i64)row * (MASK_ROW / 4) + of_row];
                longs = ((const u32 *)own.longs)[(i64)row * (MASK_ROW / 4) + of_row];
                signs = ((const u32 *)kinds)[of_row];
                anything = ((const u32 *)kinds)[MASK_ROW / 4 + of_row];
            }
            const u32 known = known_bits(longs, signs, anything, ALL);
            u64 total;
            const u64 before = sum_before_in_block(known | (u64)__popc(wides) << 32, parts, total);
            const u32 all_known = (u32)total, items = (u32)(total >> 32);
            u32 item = (u32)(before >> 32);
            for (u32 left = wides; left; left &= left - 1)
                places[item++] = (u32)before + known_bits(longs, signs, anything, (left & -left) - 1);
            if (items) {
                const u32 need = (all_known + items * LONGEST_UNARY) / 32 + 3;
                for (u32 i = thread; i < need; i += CHAIN_THREADS)
                    bits[i] = page.stream.word(position / 32 + i);
                __syncthreads();
                const u32 shift = position & 31;
                const bool tabled = 32 * (need - 1) <= CHAIN_TABLE;
                if (tabled) {
                    for (u32 i = thread; i < 32 * (need - 1); i += CHAIN_THREADS)
                        used_at[i] = (u8)unary_used(__funnelshift_r(bits[i / 32], bits[i / 32 + 1], i & 31));
                    __syncthreads();
                }
                if (thread == 0) {
                    u32 sum = 0;
                    for (u32 i = 0; i < items; i++) {
                        const u32 at = shift + places[i] + sum;
                        sum += tabled ? used_at[at] : unary_used(__funnelshift_r(bits[at / 32], bits[at / 32 + 1], at & 31));
                        places[i] = sum;
                    }
                    chained = sum;
                }
                __syncthreads();
            }
            if (w < words && of_row % 8 == 0) {
                const u32 wide_before = (u32)(before >> 32);
                own.places_b[row * SEGMENTS + of_row / 8] =
                    position - start + (u32)before + (wide_before ? places[wide_before - 1] : 0);
            }
            position += all_known + (items ? chained : 0);
            __syncthreads();
            if (position > end) { // the same in all threads
                if (thread == 0)
                    atomicOr(&status[blockIdx.y].flags, BAD_EXACT | TOO_SHORT);
                return;
            }
        }
    }
    if (unknown)
        atomicOr(&status[blockIdx.y].flags, BAD_EXACT | BAD_KIND);
    if (thread == 0) {
        const u32 problem = ending(page.stream, start, position - start, bytes);
        if (problem)
            atomicOr(&status[blockIdx.y].flags, problem);
    }
}

template <bool HALF>
__device__ void values_of_part(const View &view, const Page &page, const DecodeScratch &own, const Place &place, u32 *flags)
{
    constexpr int mantissa = Format<HALF>::mantissa;
    const int lane = threadIdx.x & 31, index = place.segment * 32 + lane;
    const Group group = group_of(index);
    const Fields fields(page.anchor, page.at, page.wide, place.chunk, index);
    const i64 column = column_of(view, group.head, group.number * LANE_CHANNELS);
    const u32 mode = page.mode();
    u32 problems = 0;
    const Grids grids(fields);
    const bool open = mode == OPEN;
    Codes codes(page, place, index);
    u32 signs = 0, anything = 0;
    if (mode != PLAIN) {
        const u8 *const kinds = own.kinds + place.chunk * 2 * MASK_ROW + index;
        signs = kinds[0];
        anything = kinds[MASK_ROW];
    }
    const u32 start_b = 8 * (SECTION_A + page.bytes_a());
    for (int t = place.start; t < place.stop; t++) {
        const int row = place.row(page.job, t);
        u32 patterns[8];
        if (mode == PLAIN) {
            const u8 *const from = (const u8 *)page.stream.words + SECTION_A +
                                   2 * ((i64)row * CHANNELS + group.head * SIZE + group.number * LANE_CHANNELS);
#pragma unroll
            for (int i = 0; i < 8; i++)
                patterns[i] = i < fields.count ? ((const u16 *)from)[i] : 0;
        } else {
            u32 low, high, size = 0, total;
            codes.next(low, high);
            each_cell<HALF>(fields, grids, low, high, open, [&](int, const Cell &cell) { size += bits_in_a<HALF>(cell); });
            const u32 position = 8 * SECTION_A + own.places_a[row * SEGMENTS + place.segment] + sum_before(size, total);
            // Of each value what its cell says, its field, and how many bits it takes in section B.
            int most[8], fieldss[8], few[8];
            u32 wides = 0, longs = 0, negatives = 0;
#pragma unroll
            for (int i = 0; i < 8; i++)
                most[i] = fieldss[i] = few[i] = 0;
            each_field<HALF>(page.stream, position, fields, grids, low, high, open, [&](int i, const Cell &cell, int field) {
                most[i] = cell.most;
                fieldss[i] = field;
                few[i] = few_of(cell.members);
                wides |= (cell.wide ? 1u : 0u) << i;
                longs |= (!cell.wide && field >= few[i] ? 1u : 0u) << i;
                negatives |= (cell.negative ? 1u : 0u) << i;
            });
            u32 at = start_b + own.places_b[row * SEGMENTS + place.segment] +
                     sum_before(known_bits(longs, signs, anything, 255u), total);
            // Lanes with wide cells move all behind them, one after the other.
            for (u32 left = __ballot_sync(ALL, wides != 0); left; left &= left - 1) {
                const int leader = __ffs(left) - 1;
                u32 moved = 0;
                if (lane == leader)
                    for (u32 which = wides; which; which &= which - 1) {
                        const u32 before = known_bits(longs, signs, anything, (which & -which) - 1);
                        moved += unary_used((u32)page.stream.bits(at + before + moved));
                    }
                moved = __shfl_sync(ALL, moved, leader);
                if (lane > leader)
                    at += moved;
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                patterns[i] = 0;
                if (i >= fields.count)
                    continue;
                const u32 found = (u32)page.stream.bits(at);
                if (fields.flat >> i & 1u) {
                    const u32 expected = nearest<HALF>(fields.base[i]);
                    if (anything >> i & 1u) {
                        patterns[i] = found & 0xFFFFu;
                        at += 16;
                    } else if (signs >> i & 1u) {
                        patterns[i] = (expected & 0x7FFFu) | (found & 1u) << 15;
                        at += 1;
                    } else {
                        patterns[i] = expected;
                    }
                } else if (wides >> i & 1u) {
                    const u32 used = unary_used(found);
                    const int quotient = used < LONGEST_UNARY ? used - 1 : UNARY_MOST + (found >> UNARY_MOST & 255u);
                    const int magnitude = most[i] - (quotient << mantissa | fieldss[i] >> 1);
                    problems |= magnitude < 0 ? LEFT_CELL : 0u;
                    patterns[i] = (magnitude & 0x7FFF) | (u32)(fieldss[i] & 1) << 15;
                    at += used;
                } else {
                    int which = fieldss[i];
                    if (longs >> i & 1u) {
                        which = 2 * which + (int)(found & 1u) - few[i];
                        at += 1;
                    }
                    patterns[i] = (u32)(most[i] - which) | (negatives >> i & 1u) << 15;
                }
            }
        }
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            problems |= (int)(patterns[i] & 0x7FFFu) > Format<HALF>::largest ? NOT_FINITE : 0u;
            values[i] = HALF ? from_half(patterns[i]) : from_bfloat16(patterns[i]);
        }
        if (fields.count > 0)
            store_values(view.pointer, row_of(view, page.job.start + t) + column, fields.count, values);
    }
    if (problems)
        atomicOr(flags, BAD_EXACT | problems);
}

// Raw tokens, `item` being one of segments and parts of them.
__device__ void raw_values(const View &view, const Page &page, int item, u32 *flags)
{
    const int index = item % SEGMENTS * 32 + (threadIdx.x & 31);
    const Group group = group_of(index);
    const int begin = item / SEGMENTS * PART, end = min(begin + PART, page.job.raw_head + page.job.raw_tail);
    const int count = index < GROUPS ? min(SIZE - group.number * LANE_CHANNELS, LANE_CHANNELS) : 0;
    if (count <= 0)
        return;
    const int channel = group.head * SIZE + group.number * LANE_CHANNELS;
    const i64 column = column_of(view, group.head, group.number * LANE_CHANNELS);
    bool finite = true;
    for (int row = begin; row < end; row++) {
        const int t = row < page.job.raw_head ? row : row + page.coded;
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 pattern = i < count ? load16(page.anchor + HEADER + 2 * (row * CHANNELS + channel + i)) : 0;
            values[i] = page.half ? from_half(pattern) : from_bfloat16(pattern);
            finite = finite && (as_bits(values[i]) & 0x7FFFFFFFu) < 0x7F800000u;
        }
        store_values(view.pointer, row_of(view, page.job.start + t) + column, count, values);
    }
    if (!finite)
        atomicOr(flags, BAD_RAW);
}

// All values of pages, raw tokens too. A page whose streams are damaged is left alone, or what was written is none of it.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    exact_values(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                 int block_tokens, const Job *jobs, const __grid_constant__ Lengths lengths, const u8 *piece, Status *status,
                 u8 *scratch, i64 scratch_stride)
{
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    const Page page(jobs, lengths, piece);
    u32 *const flags = &status[blockIdx.y].flags;
    if (*(volatile u32 *)flags & ~(LEFT_CELL | NOT_FINITE | BAD_EXACT | BAD_RAW))
        return;
    const int items = page.at.chunks * PARTS * SEGMENTS, item = warp_item();
    if (item >= items) {
        raw_values(view, page, item - items, flags);
        return;
    }
    const Place place(page.job, item);
    if (place.none)
        return;
    const DecodeScratch own(scratch, scratch_stride, page.at, page.coded);
    if (page.half)
        values_of_part<true>(view, page, own, place, flags);
    else
        values_of_part<false>(view, page, own, place, flags);
}
