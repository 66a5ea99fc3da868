// The exact stream (docs/codec.md) of pages whose other streams are there. A warp takes 256 channels of 8 tokens of a chunk:
// a lane has one group of 8 channels, computes their cells, and the warp agrees on the places of their bits. What depends on
// all of a page, where each token's bits begin, is found by one block a page between two such passes.
//
// Pages of one launch have scratch memory of their own, `scratch_stride` bytes apart; lynx_gpu/exact.py knows its size.
// The piece must be device memory, and the exact stream of a page begin at a multiple of 8 bytes and have room up to one.
#include "common.cuh"
#include "pages.cuh"

#define WARPS 4
#define ROWS 8
#define PARTS ((CHUNK + ROWS - 1) / ROWS) // of a chunk
#define SEGMENTS ((GROUPS + 31) / 32)     // of a token
#define MASK_ROW (SEGMENTS * 32)          // bytes of a row of masks, one a group
#define PLACE_THREADS 512                // of a block that works for a page
#define SECTION_A 8                       // offset in the stream
#define ALL 0xFFFFFFFFu

#define PLAIN 0u
#define CLOSED 1u
#define OPEN 2u
#define SIGNS 1 // kinds of flat channels
#define ANYTHING 2
#define UNARY_MOST 7
#define LONGEST_UNARY 15

#define BAD_EXACT 8u // flags of Status (lynx_gpu/plan.py): the first, and why
#define BAD_HEADER 0x10u
#define TOO_SHORT 0x20u
#define TOO_LONG 0x40u
#define BAD_KIND 0x80u
#define LEFT_CELL 0x100u
#define NOT_FINITE 0x200u

template <bool HALF> struct Format {
    static constexpr int mantissa = HALF ? 10 : 7, largest = HALF ? 0x7BFF : 0x7F7F;
};

// ---- where a warp works

struct Place {
    int chunk, part, segment, start, stop; // tokens of the page: those of this part
    int chunk_start;
    bool none;

    __device__ Place(const Job &job, int item)
    {
        const int first = job.raw_head, last = job.tokens - job.raw_tail;
        segment = item % SEGMENTS;
        part = item / SEGMENTS % PARTS;
        chunk = item / (SEGMENTS * PARTS);
        const int cut = (first / CHUNK + chunk) * CHUNK, end = min(last, cut + CHUNK);
        chunk_start = max(first, cut);
        start = chunk_start + part * ROWS;
        stop = min(end, start + ROWS);
        none = start >= stop;
    }

    // Place of a token among the coded tokens; with a line before each chunk, for its flat channels.
    __device__ int row(const Job &job, int token) const { return token - job.raw_head; }
    __device__ int line(const Job &job, int token) const { return token - job.raw_head + chunk + 1; }
};

__device__ __forceinline__ int warp_item() { return blockIdx.x * WARPS + (threadIdx.x >> 5); }

// Sums over the lanes before this one, and over all.
__device__ __forceinline__ u32 sum_before(u32 value, u32 &total)
{
    const int lane = threadIdx.x & 31;
    u32 sum = value;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const u32 other = __shfl_up_sync(ALL, sum, by);
        if (lane >= by)
            sum += other;
    }
    total = __shfl_sync(ALL, sum, 31);
    return sum - value;
}

__device__ __forceinline__ u32 sum_of_warp(u32 value)
{
#pragma unroll
    for (int by = 16; by > 0; by /= 2)
        value += __shfl_xor_sync(ALL, value, by);
    return value;
}

// Sums over the threads of a block before this one, and over all. `parts` has one place a warp.
__device__ u64 sum_before_in_block(u64 value, u64 *parts, u64 &total)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    u64 sum = value;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const u64 other = __shfl_up_sync(ALL, sum, by);
        if (lane >= by)
            sum += other;
    }
    if (lane == 31)
        parts[warp] = sum;
    __syncthreads();
    u64 before = 0;
    total = 0;
    for (int w = 0; w < warps; w++) {
        before += w < warp ? parts[w] : 0;
        total += parts[w];
    }
    __syncthreads();
    return before + sum - value;
}

// ---- fields and cells

// What the codes of a group in one chunk share, and which channels there are.
struct Fields {
    float base[8], length[8];
    int count; // of channels, from the first
    u32 flat;  // bits of channels of length 0

    __device__ Fields(const u8 *anchor, const Sections &at, bool wide, int chunk, int index)
    {
        const Group group = group_of(index);
        count = index < GROUPS ? min(SIZE - group.number * 8, 8) : 0;
        const int channel = group.head * SIZE + group.number * 8;
        const float levels = wide ? 65535.0f : 255.0f;
        flat = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            base[i] = length[i] = 0.0f;
            if (i >= count)
                continue;
            const int c = channel + i, where = chunk * CHANNELS + c;
            const float low = from_bfloat16(load16(anchor + at.page_low + 2 * c));
            const float step = step_of(from_bfloat16(load16(anchor + at.page_scale + 2 * c)), levels);
            const u32 field1 = wide ? load16(anchor + at.chunk_low + 2 * where) : anchor[at.chunk_low + where];
            const u32 field2 = wide ? load16(anchor + at.chunk_scale + 2 * where) : anchor[at.chunk_scale + where];
            base[i] = __fadd_rn(low, __fmul_rn(step, (float)field1));
            length[i] = __fmul_rn(step, (float)field2);
            flat |= (length[i] == 0.0f ? 1u : 0u) << i;
        }
    }
};

// The same, ready for cells.
struct Grids {
    float base[8], step[8], top[8], margin[8];

    __device__ explicit Grids(const Fields &fields)
    {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            base[i] = fields.base[i];
            step[i] = __fdiv_rn(fields.length[i], 255.0f);
            top[i] = __fadd_rn(fields.base[i], fields.length[i]);
            margin[i] = __fmul_rn(fmaxf(fabsf(base[i]), fabsf(top[i])), 0x1p-19f);
        }
    }
};

// Magnitude of the largest 16-bit float that is not above a value >= 0, and of the smallest that is not below.
template <bool HALF> __device__ __forceinline__ int magnitude_below(float value)
{
    const u32 bits = as_bits(value);
    if (!HALF)
        return (int)(bits >> 16);
    const int tiny = (int)__fmul_rn(fminf(value, 1.0f), 0x1p24f);
    return value < 0x1p-14f ? tiny : ((int)bits - (112 << 23)) >> 13;
}

template <bool HALF> __device__ __forceinline__ int magnitude_above(float value)
{
    const u32 bits = as_bits(value);
    if (!HALF)
        return (int)((bits + 0xFFFFu) >> 16);
    const int tiny = (int)ceilf(__fmul_rn(fminf(value, 1.0f), 0x1p24f));
    return value < 0x1p-14f ? tiny : ((int)bits + 0x1FFF - (112 << 23)) >> 13;
}

struct Cell {
    int most, members;
    bool negative, wide;
};

template <bool HALF>
__device__ __forceinline__ Cell cell_of(u32 code, float base, float step, float top, float margin)
{
    const float level = (float)code;
    const float under = code == 0 ? base : __fadd_rn(base, __fmul_rn(step, __fsub_rn(level, 0.5f)));
    const float over = code == 255 ? top : __fadd_rn(base, __fmul_rn(step, __fadd_rn(level, 0.5f)));
    const float low = __fsub_rn(under, margin), high = __fadd_rn(over, margin);
    const float a = fabsf(low), b = fabsf(high);
    Cell cell;
    cell.most = min(magnitude_below<HALF>(fmaxf(a, b)), Format<HALF>::largest);
    const int members = cell.most - magnitude_above<HALF>(fminf(a, b)) + 1;
    cell.members = max(members, 1);
    cell.negative = low < 0.0f;
    cell.wide = (low <= 0.0f && high >= 0.0f) || members > (2 << Format<HALF>::mantissa);
    return cell;
}

// The first and last cell of a page of open ends.
template <bool HALF> __device__ __forceinline__ void open_end(Cell &cell, u32 code)
{
    if (code == 0 || code == 255) {
        cell.wide = true;
        cell.most = Format<HALF>::largest;
    }
}

__device__ __forceinline__ int log2_of(int count) { return 31 - __clz(count); }

// Bits of section A of a value that is not flat.
template <bool HALF> __device__ __forceinline__ int bits_in_a(const Cell &cell)
{
    return cell.wide ? Format<HALF>::mantissa + 1 : log2_of(cell.members);
}

// The 16-bit float next to the base of a chunk, ties to even.
template <bool HALF> __device__ __forceinline__ u32 nearest(float base)
{
    return (HALF ? to_half(base, 0.0f) : to_bfloat16(base, 0.0f)) & 0xFFFFu;
}

// 8 codes of a coded token, from all streams, in the low and high word.
template <int STREAM>
__device__ __forceinline__ void gather_codes(const u8 *piece, const Job &job, const Sections &at, int token, int place,
                                             Group group, u32 &low, u32 &high)
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
        add_codes<bits, shift_of_stream(STREAM)>(load_planes<bits>(row, group), low, high);
        gather_codes<STREAM + 1>(piece, job, at, token, place, group, low, high);
    }
}

__device__ __forceinline__ u32 byte_of(u32 low, u32 high, int i) { return (i < 4 ? low : high) >> (8 * (i & 3)) & 255u; }

// 16 bits of 8 channels of a token, as many as there are.
struct Patterns {
    u32 words[4];
    __device__ __forceinline__ u32 operator[](int i) const { return words[i >> 1] >> (16 * (i & 1)) & 0xFFFFu; }
};

// ---- encoding

#if KIND != FLOAT32
#define SOURCE_HALF (KIND == FLOAT16)

// Scratch memory of a page.
struct EncodeScratch {
    u32 *outside, *mode, *bytes_a; // outside: bit 0 in closed cells, bit 1 also in open ones
    u8 *kinds;                     // [chunk][signs, anything][MASK_ROW]
    uint2 *lines;                  // [line][segment]: bits of A and B in both modes, then where they begin in their sections

    __device__ EncodeScratch(u8 *scratch, i64 stride, const Sections &at)
    {
        u8 *const own = scratch + blockIdx.y * stride;
        outside = (u32 *)own;
        mode = outside + 1;
        bytes_a = outside + 2;
        kinds = own + 16;
        lines = (uint2 *)(kinds + at.chunks * 2 * MASK_ROW);
    }
};

__device__ __forceinline__ Patterns load_patterns(const View &view, const Job &job, int token, int index, int count)
{
    const Group group = group_of(index);
    Patterns found = {{0, 0, 0, 0}};
    if (count <= 0)
        return found;
    const i64 at = row_of(view, job.start + token) + group.head * view.head_stride + group.number * 8;
    const u8 *from = view.pointer + 2 * at;
    if (count == 8 && ((u64)from & 15) == 0) {
        const uint4 all = *(const uint4 *)from;
        found.words[0] = all.x;
        found.words[1] = all.y;
        found.words[2] = all.z;
        found.words[3] = all.w;
        return found;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count)
            found.words[i >> 1] |= (u32)((const u16 *)from)[i] << (16 * (i & 1));
    return found;
}

// How flat channels are stored, a warp for a segment of a chunk. Also makes the scratch memory of the page ready.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    exact_kinds(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                int block_tokens, const Job *jobs, const u8 *piece, const Status *status, u8 *scratch, i64 scratch_stride)
{
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    const Job &job = jobs[blockIdx.y];
    const bool wide = status[blockIdx.y].flags & WIDE_PAGE;
    const Sections at(job, wide);
    const EncodeScratch own(scratch, scratch_stride, at);
    const int item = warp_item(), lane = threadIdx.x & 31;
    if (item == 0 && lane == 0)
        *own.outside = 0;
    const int chunk = item / SEGMENTS, segment = item % SEGMENTS, index = segment * 32 + lane;
    if (chunk >= at.chunks)
        return;
    const Fields fields(piece + job.at[0], at, wide, chunk, index);
    u32 signs = 0, anything = 0;
    if (fields.flat) {
        u32 expected[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            expected[i] = nearest<SOURCE_HALF>(fields.base[i]);
        const int cut = (job.raw_head / CHUNK + chunk) * CHUNK;
        const int start = max(job.raw_head, cut), stop = min(job.tokens - job.raw_tail, cut + CHUNK);
        for (int t = start; t < stop; t++) {
            const Patterns row = load_patterns(view, job, t, index, fields.count);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const u32 difference = row[i] ^ expected[i];
                anything |= ((difference & 0x7FFFu) ? 1u : 0u) << i;
                signs |= (difference ? 1u : 0u) << i;
            }
        }
        anything &= fields.flat;
        signs &= fields.flat & ~anything;
    }
    u8 *const kinds = own.kinds + chunk * 2 * MASK_ROW + index;
    kinds[0] = (u8)signs;
    kinds[MASK_ROW] = (u8)anything;
}

// Bits of 8 values for both sections, in two halves of 4 values.
struct Bits {
    u64 a[2], b[2];
    int size_a[2], size_b[2];

    __device__ Bits() : a{0, 0}, b{0, 0}, size_a{0, 0}, size_b{0, 0} {}
    __device__ __forceinline__ void put_a(int half, u32 value, int size)
    {
        a[half] |= (u64)value << size_a[half];
        size_a[half] += size;
    }
    __device__ __forceinline__ void put_b(int half, u32 value, int size)
    {
        b[half] |= (u64)value << size_b[half];
        size_b[half] += size;
    }
};

// Bits of a quotient in section B.
__device__ __forceinline__ int unary_size(int quotient) { return quotient < UNARY_MOST ? quotient + 1 : LONGEST_UNARY; }

__device__ __forceinline__ u32 unary(int quotient)
{
    return quotient < UNARY_MOST ? (1u << quotient) - 1u : 127u | (u32)(quotient - UNARY_MOST) << UNARY_MOST;
}

// Sizes of one value in both sections, A in the lower half; sets `outside` if the cell does not hold it.
__device__ __forceinline__ u32 sizes_of(const Cell &cell, u32 pattern, bool &outside)
{
    constexpr int mantissa = Format<SOURCE_HALF>::mantissa;
    const int index = cell.most - (int)(pattern & 0x7FFFu);
    const bool negative = pattern >> 15;
    outside = index < 0 || (!cell.wide && (index >= cell.members || negative != cell.negative));
    if (cell.wide)
        return (mantissa + 1) | (u32)unary_size(index >> mantissa) << 16;
    const int bits = log2_of(cell.members), few = (2 << bits) - cell.members;
    return bits | (index >= few ? 1u << 16 : 0u);
}

__device__ __forceinline__ u32 code_of(u32 pattern, float base, float per_unit)
{
    const float value = SOURCE_HALF ? from_half(pattern) : from_bfloat16(pattern);
    const float level = __fadd_rn(__fmul_rn(__fsub_rn(value, base), per_unit), 0.5f);
    return (u32)fminf(fmaxf(level, 0.0f), 255.0f);
}

__device__ __forceinline__ void units_of(const Fields &fields, float *per_unit)
{
#pragma unroll
    for (int i = 0; i < 8; i++)
        per_unit[i] = fields.length[i] != 0.0f ? __fdiv_rn(255.0f, fields.length[i]) : 0.0f;
}

// Bits of each line in both modes, and whether cells hold all values.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    exact_measure(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                  int block_tokens, const Job *jobs, const u8 *piece, const Status *status, u8 *scratch,
                  i64 scratch_stride)
{
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    const Job &job = jobs[blockIdx.y];
    const bool wide = status[blockIdx.y].flags & WIDE_PAGE;
    const Sections at(job, wide);
    const EncodeScratch own(scratch, scratch_stride, at);
    const Place place(job, warp_item());
    if (place.chunk >= at.chunks || place.none)
        return;
    const int lane = threadIdx.x & 31, index = place.segment * 32 + lane;
    const Fields fields(piece + job.at[0], at, wide, place.chunk, index);
    const Grids grids(fields);
    float per_unit[8];
    units_of(fields, per_unit);
    const u8 *const kinds = own.kinds + place.chunk * 2 * MASK_ROW + index;
    const u32 signs = kinds[0], anything = kinds[MASK_ROW];
    const u32 flat_bits = (u32)(__popc(signs) + 16 * __popc(anything)) << 16;
    if (place.part == 0) {
        const u32 sum = sum_of_warp((u32)__popc(fields.flat) << 17);
        if (lane == 0)
            own.lines[(place.line(job, place.start) - 1) * SEGMENTS + place.segment] = make_uint2(sum, sum);
    }
    u32 outside = 0;
    for (int t = place.start; t < place.stop; t++) {
        const Patterns row = load_patterns(view, job, t, index, fields.count);
        u32 closed = flat_bits, open = flat_bits;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i >= fields.count || (fields.flat >> i & 1u))
                continue;
            const u32 code = code_of(row[i], grids.base[i], per_unit[i]);
            Cell cell = cell_of<SOURCE_HALF>(code, grids.base[i], grids.step[i], grids.top[i], grids.margin[i]);
            bool out;
            u32 sizes = sizes_of(cell, row[i], out);
            closed += sizes;
            outside |= out ? 1u : 0u;
            if (code == 0 || code == 255) {
                open_end<SOURCE_HALF>(cell, code);
                sizes = sizes_of(cell, row[i], out);
            }
            open += sizes;
            outside |= out ? 2u : 0u;
        }
        closed = sum_of_warp(closed);
        open = sum_of_warp(open);
        if (lane == 0)
            own.lines[place.line(job, t) * SEGMENTS + place.segment] = make_uint2(closed, open);
    }
    if (outside)
        atomicOr(own.outside, outside);
}

// Mode, places of all lines, header and length; zeros where bits will be added. One block a page.
extern "C" __global__ void __launch_bounds__(PLACE_THREADS)
    exact_place(const Job *jobs, u8 *piece, Status *status, u8 *scratch, i64 scratch_stride)
{
    __shared__ u64 parts[PLACE_THREADS / 32];
    const Job &job = jobs[blockIdx.y];
    const Sections at(job, status[blockIdx.y].flags & WIDE_PAGE);
    const EncodeScratch own(scratch, scratch_stride, at);
    const int coded = job.tokens - job.raw_head - job.raw_tail, thread = threadIdx.x;
    if (coded <= 0) {
        if (thread == 0)
            status[blockIdx.y].exact_bytes = 0;
        return;
    }
    const u32 outside = *own.outside, bound = SECTION_A + 2u * coded * CHANNELS;
    u32 mode = !(outside & 1u) ? CLOSED : !(outside & 2u) ? OPEN : PLAIN;
    u32 size = bound, bytes_a = 0;
    if (mode != PLAIN) {
        const int entries = (coded + at.chunks) * SEGMENTS;
        u64 all = 0; // bits of A in the lower half, of B in the upper one
        for (int begin = 0; begin < entries; begin += PLACE_THREADS) {
            const int i = begin + thread;
            const uint2 both = i < entries ? own.lines[i] : make_uint2(0, 0);
            const u32 sizes = mode == CLOSED ? both.x : both.y;
            u64 total;
            const u64 before = all + sum_before_in_block((sizes & 0xFFFFu) | (u64)(sizes >> 16) << 32, parts, total);
            if (i < entries)
                own.lines[i] = make_uint2((u32)before, (u32)(before >> 32));
            all += total;
        }
        bytes_a = ((u32)all + 7u) / 8u;
        const u32 bytes_b = ((u32)(all >> 32) + 7u) / 8u;
        if ((u64)SECTION_A + bytes_a + bytes_b >= bound) {
            mode = PLAIN;
            bytes_a = 0;
        } else {
            size = SECTION_A + bytes_a + bytes_b;
        }
    }
    u32 *const stream = (u32 *)(piece + job.at[STREAMS]);
    if (mode != PLAIN)
        for (u32 i = SECTION_A / 4 + thread; i < (size + 3) / 4; i += PLACE_THREADS)
            stream[i] = 0;
    if (thread == 0) {
        stream[0] = mode;
        stream[1] = bytes_a;
        *own.mode = mode;
        *own.bytes_a = bytes_a;
        status[blockIdx.y].exact_bytes = size;
    }
}

// Adds up to 64 bits to words at a bit position.
__device__ __forceinline__ void deposit(u32 *words, u32 position, u64 bits, int size)
{
    if (size == 0)
        return;
    const u32 word = position >> 5, shift = position & 31;
    const u64 low = bits << shift;
    atomicOr(&words[word], (u32)low);
    if (low >> 32)
        atomicOr(&words[word + 1], (u32)(low >> 32));
    const u32 high = shift ? (u32)(bits >> (64 - shift)) : 0;
    if (high)
        atomicOr(&words[word + 2], high);
}

#define STAGE_A (256 * 11 / 32 + 3)
#define STAGE_B (256 * 16 / 32 + 3)

// Adds what a warp has staged for one section to the stream, from bit `place` of it on, and clears it.
__device__ __forceinline__ void flush(u32 *stage, u32 *stream, u32 place, u32 size)
{
    if (size == 0)
        return;
    const u32 words = ((place & 31) + size + 31) / 32;
    for (u32 i = threadIdx.x & 31; i < words; i += 32) {
        if (stage[i])
            atomicOr(&stream[place / 32 + i], stage[i]);
        stage[i] = 0;
    }
}

// The sections.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    exact_write(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                int block_tokens, const Job *jobs, u8 *piece, const Status *status, u8 *scratch, i64 scratch_stride)
{
    __shared__ u32 stages_a[WARPS][STAGE_A], stages_b[WARPS][STAGE_B];
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    const Job &job = jobs[blockIdx.y];
    const bool wide = status[blockIdx.y].flags & WIDE_PAGE;
    const Sections at(job, wide);
    const EncodeScratch own(scratch, scratch_stride, at);
    const Place place(job, warp_item());
    if (place.chunk >= at.chunks || place.none)
        return;
    const int lane = threadIdx.x & 31, index = place.segment * 32 + lane;
    const Fields fields(piece + job.at[0], at, wide, place.chunk, index);
    u8 *const stream = piece + job.at[STREAMS];
    const u32 mode = *own.mode;
    if (mode == PLAIN) {
        const Group group = group_of(index);
        for (int t = place.start; t < place.stop; t++) {
            const Patterns row = load_patterns(view, job, t, index, fields.count);
            const i64 first = (i64)place.row(job, t) * CHANNELS + group.head * SIZE + group.number * 8;
            u8 *const to = stream + SECTION_A + 2 * first;
            if (fields.count == 8 && ((u64)to & 7) == 0) {
                ((uint2 *)to)[0] = make_uint2(row.words[0], row.words[1]);
                ((uint2 *)to)[1] = make_uint2(row.words[2], row.words[3]);
                continue;
            }
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i < fields.count)
                    ((u16 *)to)[i] = (u16)row[i];
        }
        return;
    }

    u32 *const stage_a = stages_a[threadIdx.x >> 5], *const stage_b = stages_b[threadIdx.x >> 5];
    for (int i = lane; i < STAGE_A; i += 32)
        stage_a[i] = 0;
    for (int i = lane; i < STAGE_B; i += 32)
        stage_b[i] = 0;
    __syncwarp();
    const u32 first_a = 8 * SECTION_A, first_b = 8 * (SECTION_A + *own.bytes_a);
    const Grids grids(fields);
    float per_unit[8];
    units_of(fields, per_unit);
    const u8 *const kinds = own.kinds + place.chunk * 2 * MASK_ROW + index;
    const u32 signs = kinds[0], anything = kinds[MASK_ROW];
    if (place.part == 0) {
        Bits bits;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (fields.flat >> i & 1u)
                bits.put_b(0, (signs >> i & 1u) * SIGNS + (anything >> i & 1u) * ANYTHING, 2);
        u32 total;
        const u32 before = sum_before(bits.size_b[0], total);
        const uint2 line = own.lines[(place.line(job, place.start) - 1) * SEGMENTS + place.segment];
        deposit(stage_b, ((first_b + line.y) & 31) + before, bits.b[0], bits.size_b[0]);
        __syncwarp();
        flush(stage_b, (u32 *)stream, first_b + line.y, total);
        __syncwarp();
    }
    constexpr int mantissa = Format<SOURCE_HALF>::mantissa;
    for (int t = place.start; t < place.stop; t++) {
        const Patterns row = load_patterns(view, job, t, index, fields.count);
        Bits bits;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i >= fields.count)
                continue;
            const u32 pattern = row[i], negative = pattern >> 15;
            if (fields.flat >> i & 1u) {
                if (anything >> i & 1u)
                    bits.put_b(i >> 2, pattern, 16);
                else if (signs >> i & 1u)
                    bits.put_b(i >> 2, negative, 1);
                continue;
            }
            const u32 code = code_of(pattern, grids.base[i], per_unit[i]);
            Cell cell = cell_of<SOURCE_HALF>(code, grids.base[i], grids.step[i], grids.top[i], grids.margin[i]);
            if (mode == OPEN)
                open_end<SOURCE_HALF>(cell, code);
            const int which = cell.most - (int)(pattern & 0x7FFFu);
            if (cell.wide) {
                bits.put_a(i >> 2, negative | (which & ((1 << mantissa) - 1)) << 1, mantissa + 1);
                bits.put_b(i >> 2, unary(which >> mantissa), unary_size(which >> mantissa));
            } else {
                const int size = log2_of(cell.members), few = (2 << size) - cell.members;
                const bool more = which >= few;
                bits.put_a(i >> 2, more ? (which + few) >> 1 : which, size);
                bits.put_b(i >> 2, (which + few) & (more ? 1 : 0), more ? 1 : 0);
            }
        }
        const u32 own_a = bits.size_a[0] + bits.size_a[1], own_b = bits.size_b[0] + bits.size_b[1];
        u32 total;
        const u32 before = sum_before(own_a | own_b << 16, total);
        const uint2 line = own.lines[place.line(job, t) * SEGMENTS + place.segment];
        const u32 a = first_a + line.x, b = first_b + line.y;
        const u32 at_a = (a & 31) + (before & 0xFFFFu), at_b = (b & 31) + (before >> 16);
        deposit(stage_a, at_a, bits.a[0], bits.size_a[0]);
        deposit(stage_a, at_a + bits.size_a[0], bits.a[1], bits.size_a[1]);
        deposit(stage_b, at_b, bits.b[0], bits.size_b[0]);
        deposit(stage_b, at_b + bits.size_b[0], bits.b[1], bits.size_b[1]);
        __syncwarp();
        flush(stage_a, (u32 *)stream, a, total & 0xFFFFu);
        flush(stage_b, (u32 *)stream, b, total >> 16);
        __syncwarp();
    }
}
#endif

// ---- decoding

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
        low = high = 0;
        if (index < GROUPS)
            gather_codes<0>(piece, job, at, token, place, group_of(index), low, high);
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
    const int places = page.lane_place(place.start);
    for (int t = place.start; t < place.stop; t++) {
        u32 low, high, size = 0;
        page.codes(t, __shfl_sync(ALL, places, t - place.start), index, low, high);
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
    const int places = page.lane_place(place.start);
    for (int t = place.start; t < place.stop; t++) {
        const int row = place.row(page.job, t);
        u32 low, high, size = 0, total;
        page.codes(t, __shfl_sync(ALL, places, t - place.start), index, low, high);
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
    // B, 16 words a thread and 3 more.
    extern __shared__ u32 places[];
    u32 *const bits = places + CHAIN_THREADS * 32;
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
                if (thread == 0)
                    chained = 0;
                __syncthreads();
                if (thread == 0) {
                    const u32 shift = position & 31;
                    u32 sum = 0;
                    for (u32 i = 0; i < items; i++) {
                        const u32 at = shift + places[i] + sum;
                        sum += unary_used(__funnelshift_r(bits[at / 32], bits[at / 32 + 1], at & 31));
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
    const i64 column = group.head * view.head_stride + group.number * LANE_CHANNELS;
    const u32 mode = page.mode();
    u32 problems = 0;
    const Grids grids(fields);
    const bool open = mode == OPEN;
    const int places = page.lane_place(place.start);
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
            page.codes(t, __shfl_sync(ALL, places, t - place.start), index, low, high);
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
    const int begin = item / SEGMENTS * ROWS, end = min(begin + ROWS, page.job.raw_head + page.job.raw_tail);
    const int count = index < GROUPS ? min(SIZE - group.number * LANE_CHANNELS, LANE_CHANNELS) : 0;
    if (count <= 0)
        return;
    const int channel = group.head * SIZE + group.number * LANE_CHANNELS;
    const i64 column = group.head * view.head_stride + group.number * LANE_CHANNELS;
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
