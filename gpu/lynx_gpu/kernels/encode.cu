// Pages to streams. A block takes 128 channels of one page: its threads read every value once, keep it in registers, agree on
// the fields of chunks and page through shared memory, and write codes. Pages of more than 256 tokens are read twice, and so
// are runs of tokens that not all have codes.
#include "common.cuh"
#include "pages.cuh"

#define WARPS 8
#define THREADS (32 * WARPS)
#define RUN 32    // tokens of a warp
#define TILE 128  // channels of a block: four a lane
#define TILES ((GROUPS * 8 + TILE - 1) / TILE)
#if LYNX
#define CELLS ((1 << CELL_BITS) + 1)
#define COPIES (CELL_BITS <= 8 ? 32 : 1) // of the search table: with one for each lane, no two reads meet in a bank
#define UNIT ((float)(1 << CELL_BITS))   // magnitudes are counted in cells of sigma
#else
#define CELLS 1
#define COPIES 1
#endif
#define COPIED (COPIES < 4 ? COPIES : 4)  // entries that a thread writes at once
#define EXCESS 1.0004f     // a deviation may be so much of sigma before it must be cut off
#define SAFE_SUM 0x1p116f  // up to here the sum of a chunk does not overflow

#define MIN_BLOCKS (KIND == FLOAT32 ? 1 : 2)

// Every lane of every block has four channels, and rows of codes begin at multiples of 4.
__device__ constexpr bool whole_tiles() { return SIZE % 8 == 0 && CHANNELS % TILE == 0; }

// Order of floats as that of integers.
__device__ __forceinline__ int ordered(float value)
{
    const int bits = (int)as_bits(value);
    return bits >= 0 ? bits : bits ^ 0x7FFFFFFF;
}

__device__ __forceinline__ float unordered(int order) { return as_float((u32)(order >= 0 ? order : order ^ 0x7FFFFFFF)); }

__device__ __forceinline__ float clamp(float code, float top)
{
    code = code > 0.0f ? code : 0.0f;
    return code < top ? code : top;
}

// The search table of `lynx`, in shared memory: what a magnitude must be added to, so that byte 2 of the sum, rounded down,
// is its level and 7 more (lynx_gpu/codec.py).
struct Cells {
#ifdef __CUDA_ARCH__
    u32 first; // address of this lane's entry for no cells, less what WHOLE adds to it
    static constexpr u32 WHOLE = 0x4B000000u; // 2^23: added to a magnitude it leaves whole cells in the lowest bits

    __device__ __forceinline__ Cells(const float *table, int lane)
        : first((u32)__cvta_generic_to_shared(table + lane % COPIES) - WHOLE * (4u * COPIES))
    {
    }

    __device__ __forceinline__ float of(float magnitude) const
    {
        float entry;
        const u32 whole = as_bits(__fadd_rz(magnitude, as_float(WHOLE)));
        asm("ld.shared.f32 %0, [%1];" : "=f"(entry) : "r"(whole * (4u * COPIES) + first));
        return entry;
    }
#else
    const float *first;

    __device__ Cells(const float *table, int lane) : first(table + lane % COPIES) {}

    __device__ float of(float magnitude) const { return first[(int)magnitude * COPIES]; }
#endif
};

// Whether codes are those of two streams that have a way of their own into rows: 4 and 4 bits, or 3 and 5.
__device__ constexpr bool paired(int first, int second)
{
    return STREAMS == 2 && bits_of_stream(0) == first && bits_of_stream(STREAMS - 1) == second;
}

// In these, and where rows are aligned, codes of channels 0, 2, 1, 3 follow each other, else of 0, 1, 2, 3.
__device__ constexpr bool even_first(bool aligned) { return aligned && (paired(4, 4) || paired(3, 5)); }

#define RESIDUAL_FLIP (LYNX ? 0x07070707u : 0u) // 7 - level, modulo 16, is level ^ 7

// What four channels of a chunk are made with.
struct Units {
    float base[4], per_unit[4];
};

// Codes of four channels of a token, a byte each, but for RESIDUAL_FLIP. CUT: values may lie outside of what the chunk's
// fields span.
template <bool CUT, bool EVEN_FIRST> __device__ __forceinline__ u32 codes_of(Quad x, const Units &units, const Cells &cells)
{
    constexpr int second = EVEN_FIRST ? 2 : 1, third = 3 - second;
    float centred[4] = {low_of(x.low), high_of(x.low), low_of(x.high), high_of(x.high)};
#if LYNX
    u32 levels[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // The base is never +0, so the difference is never -0.
        centred[i] = __fsub_rn(centred[i], units.base[i]);
        const float scaled = __fmul_rn(fabsf(centred[i]), units.per_unit[i]), magnitude = CUT ? fminf(scaled, UNIT) : scaled;
        levels[i] = as_bits(__fadd_rd(magnitude, cells.of(magnitude)));
    }
    const u32 signs = sign_bytes(centred[0], centred[second], centred[third], centred[3]);
    return third_bytes(levels[0], levels[second], levels[third], levels[3]) ^ (signs & 0xF0F0F0F0u);
#else
    int levels[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float level = __fadd_rn(__fmul_rn(__fsub_rn(centred[i], units.base[i]), units.per_unit[i]), 0.5f);
        levels[i] = (int)(TOP < 255.0f ? fminf(level, TOP) : level);
    }
    return pack_saturated(levels[0], levels[second], pack_saturated(levels[third], levels[3], 0));
#endif
}

// Sum of the differences to the pivot in a chunk so far, weighted; four channels.
struct Sums {
    float pivot[4], total[4];
};

// What a block knows while it encodes a tile. `least` and `most` are [chunk][channel], as ordered integers.
struct Tile {
    const View &view;
    const Job &job;
    const Sections &at;
    Status *status;
    u8 *anchor;
    int first, stop;     // coded tokens
    int channel, there;  // first of the four channels of this lane, and how many there are
    i64 column;          // their place in a token
    int lane;
    int *least, *most;
    float *pivot, *total; // of means, likewise; what codes are made with takes the place of the extremes
    u8 *codes;            // rows of the first stream
    u8 *const *later;     // rows of all tokens in the others, [stream - 1][token]
    const Cells &cells;
    Group group;          // that this lane writes
    bool writes;

    __device__ __forceinline__ int field(int token) const { return (token / CHUNK - first / CHUNK) * TILE + 4 * lane; }

    __device__ __forceinline__ Quad load(int token) const
    {
        return load_quad(view.pointer, row_of(view, job.start + token) + column, whole_tiles() ? 4 : there);
    }

    __device__ __forceinline__ void add_extremes(int token, Quad low, Quad high) const
    {
        const int k = field(token);
        atomicMin(&least[k], ordered(low_of(low.low)));
        atomicMin(&least[k + 1], ordered(high_of(low.low)));
        atomicMin(&least[k + 2], ordered(low_of(low.high)));
        atomicMin(&least[k + 3], ordered(high_of(low.high)));
        atomicMax(&most[k], ordered(low_of(high.low)));
        atomicMax(&most[k + 1], ordered(high_of(high.low)));
        atomicMax(&most[k + 2], ordered(low_of(high.high)));
        atomicMax(&most[k + 3], ordered(high_of(high.high)));
        if (!allowed(low.low) || !allowed(low.high) || !allowed(high.low) || !allowed(high.high))
            for (int t = max(token / RUN * RUN, first); t < min(token / RUN * RUN + RUN, stop); t++)
                refuse_quad(status, t, channel, there, load(t)); // rare, so the run is read again
    }

    __device__ __forceinline__ Sums begin_sums(Quad x) const
    {
        return Sums{{low_of(x.low), high_of(x.low), low_of(x.high), high_of(x.high)}, {0.0f, 0.0f, 0.0f, 0.0f}};
    }

    __device__ __forceinline__ void store_sums(int token, const Sums &sums) const
    {
        for (int i = 0; i < 4; i++) {
            pivot[field(token) + i] = sums.pivot[i];
            total[field(token) + i] = sums.total[i];
        }
    }

    __device__ __forceinline__ void add(Sums &sums, Quad x, float weight) const
    {
        const float values[4] = {low_of(x.low), high_of(x.low), low_of(x.high), high_of(x.high)};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float difference = __fsub_rn(values[i], sums.pivot[i]);
            sums.total[i] = __fadd_rn(sums.total[i], weight == 1.0f ? difference : __fmul_rn(difference, weight));
        }
    }

    // Whether all tokens of a run are coded, and of one chunk.
    __device__ __forceinline__ bool whole(int begin) const
    {
        return CHUNK % RUN == 0 && begin >= first && begin + RUN <= stop;
    }

    // Extremes of the coded tokens of a run; raw ones are written.
    __device__ __forceinline__ void look_at_part(int begin) const
    {
        Quad low = {infinite_pair(false), infinite_pair(false)}, high = {infinite_pair(true), infinite_pair(true)};
        const int end = min(begin + RUN, job.tokens);
        for (int t = begin; t < end; t++) {
            const Quad x = load(t);
            if (t < first || t >= stop) {
                refuse_quad(status, t, channel, there, x);
                u8 *const to = anchor + HEADER + 2 * ((t < first ? t : t - stop + first) * CHANNELS + channel);
                const u32 raw[2] = {raw_pair(x.low), raw_pair(x.high)};
                for (int i = 0; i < there; i++)
                    store16(to + 2 * i, raw[i / 2] >> 16 * (i & 1) & 0xFFFFu);
                continue;
            }
            low = Quad{extreme<false>(low.low, x.low), extreme<false>(low.high, x.high)};
            high = Quad{extreme<true>(high.low, x.low), extreme<true>(high.high, x.high)};
            if (t + 1 == min(end, stop) || (t + 1) % CHUNK == 0) {
                add_extremes(t, low, high);
                low = Quad{infinite_pair(false), infinite_pair(false)};
                high = Quad{infinite_pair(true), infinite_pair(true)};
            }
        }
    }

    __device__ __forceinline__ void look_at_run(int begin, const Quad *x) const
    {
        Quad low = x[0], high = x[0];
#pragma unroll
        for (int i = 1; i < RUN; i++) {
            low = Quad{extreme<false>(low.low, x[i].low), extreme<false>(low.high, x[i].high)};
            high = Quad{extreme<true>(high.low, x[i].low), extreme<true>(high.high, x[i].high)};
        }
        add_extremes(begin, low, high);
    }

    // A mean is added up in the order of the tokens. A chunk of `lynx` is a run.
    __device__ __forceinline__ void add_part(int begin) const
    {
        const int from = max(begin, first), until = min(begin + RUN, stop);
        if (from >= until)
            return;
        Sums sums = begin_sums(load(from));
        for (int t = from; t < until; t++)
            add(sums, load(t), 1.0f / CHUNK);
        store_sums(from, sums);
    }

    __device__ __forceinline__ void add_run(int begin, const Quad *x) const
    {
        Sums sums = begin_sums(x[0]);
        // Weights of 2^-5 can wait unless a sum overflows: bits of differences of 16-bit floats, and of their sums, do not
        // reach down to where float32 ends.
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++)
            largest = fmaxf(largest, fmaxf(fabsf(unordered(least[field(begin) + i])), fabsf(unordered(most[field(begin) + i]))));
        if (KIND != FLOAT32 && largest <= SAFE_SUM) {
#pragma unroll
            for (int i = 0; i < RUN; i++)
                add(sums, x[i], 1.0f);
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums.total[i] *= 1.0f / CHUNK;
        } else {
#pragma unroll
            for (int i = 0; i < RUN; i++)
                add(sums, x[i], 1.0f / CHUNK);
        }
        store_sums(begin, sums);
    }

    __device__ __forceinline__ Units units_of(int token) const
    {
        Units units;
        *(float4 *)units.base = *(const float4 *)((const float *)least + field(token));
        *(float4 *)units.per_unit = *(const float4 *)((const float *)most + field(token));
        return units;
    }

    template <int STREAM, bool ALIGNED>
    __device__ __forceinline__ void store_later(int token, u32 low, u32 high) const
    {
        if constexpr (STREAM < STREAMS) {
            u8 *const row = later[(STREAM - 1) * job.tokens + token];
            store_codes<bits_of_stream(STREAM), shift_of_stream(STREAM), ALIGNED>(row, group, low, high);
            store_later<STREAM + 1, ALIGNED>(token, low, high);
        }
    }

    // Two lanes with four channels of two tokens each become two with eight channels of one, and write them.
    template <bool ALIGNED>
    __device__ __forceinline__ void store_tokens(u8 *row, int token, bool store, u32 a, u32 b) const
    {
        const bool odd = lane & 1;
        const u32 mine = odd ? b : a, other = __shfl_xor_sync(0xFFFFFFFFu, odd ? a : b, 1);
        if constexpr (even_first(ALIGNED)) {
            // Codes of channels 0, 2, 4, 6, and of the others.
            const u32 evens = __byte_perm(mine, other, odd ? 0x1054 : 0x5410);
            const u32 odds = __byte_perm(mine, other, odd ? 0x3276 : 0x7632);
            u8 *const second = later[token];
            if constexpr (paired(4, 4)) {
                const u32 upper = choose(0x0F0F0F0Fu, evens >> 4, odds);
                const u32 lower = choose(0x0F0F0F0Fu, evens, odds << 4) ^ RESIDUAL_FLIP * 17u;
                __stcs((u32 *)(row + plane_at<4>(group)), upper);
                __stcs((u32 *)(second + plane_at<4>(group)), lower);
            } else {
                const u32 fours = choose(0x0F0F0F0Fu, evens >> 1, odds << 3);
                u32 twos = choose(0x03030303u, evens >> 6, odds >> 4); // in the lower half of each byte
                twos = choose(0x000F000Fu, twos, twos >> 4);           // in bytes 0 and 2
                // Each product brings a bit of each byte to every other bit of byte 3.
                const u32 upper = (evens & 0x20202020u) * 0x00082082u + (odds & 0x20202020u) * 0x00104104u;
                const u32 lower = (evens & 0x01010101u) * 0x01041040u + (odds & 0x01010101u) * 0x02082080u;
                __stcs((u32 *)(second + plane_at<4>(group)), fours);
                *(u16 *)(row + plane_at<2>(group)) = (u16)__byte_perm(twos, 0, 0x4420);
                row[plane_row(2) + plane_at<1>(group)] = (u8)(upper >> 24);
                second[plane_row(4) + plane_at<1>(group)] = (u8)(lower >> 24);
            }
            return;
        }
        const u32 low = (odd ? other : mine) ^ RESIDUAL_FLIP, high = (odd ? mine : other) ^ RESIDUAL_FLIP;
        if (!store)
            return;
        store_codes<bits_of_stream(0), shift_of_stream(0), ALIGNED>(row, group, low, high);
        store_later<1, ALIGNED>(token, low, high);
    }

    // Codes of a run, whatever it is.
    __device__ __forceinline__ void write_part(int begin) const
    {
        for (int i = 0; i < RUN; i += 2) {
            u32 pair[2];
            for (int j = 0; j < 2; j++) {
                const int t = min(max(begin + i + j, first), stop - 1);
                pair[j] = codes_of<true, false>(load(t), units_of(t), cells);
            }
            const int t = begin + i + (lane & 1);
            const bool store = t >= first && t < stop && writes;
            store_tokens<false>(codes + (t - first) * row_bytes(bits_of_stream(0)), t, store, pair[0], pair[1]);
        }
    }

    __device__ __forceinline__ void write_run(int begin, const Quad *x) const
    {
        const Units units = units_of(begin);
        const int token = begin + (lane & 1);
        u8 *const row = codes + (token - first) * row_bytes(bits_of_stream(0));
#pragma unroll
        for (int i = 0; i < RUN; i += 2)
            store_tokens<true>(row + i * row_bytes(bits_of_stream(0)), token + i, true,
                               codes_of<false, even_first(true)>(x[i], units, cells),
                               codes_of<false, even_first(true)>(x[i + 1], units, cells));
    }
};

// Read all tokens of a run at once.
__device__ __forceinline__ void load_run(const Tile &tile, int begin, Quad *x)
{
    const int there = whole_tiles() ? 4 : tile.there;
#if ROWS == PAGED
    const i64 own = row_of(tile.view, tile.job.start + begin + tile.lane % RUN);
#pragma unroll
    for (int i = 0; i < RUN; i++)
        x[i] = load_quad(tile.view.pointer, __shfl_sync(0xFFFFFFFFu, own, i) + tile.column, there);
#else
    const u8 *row = tile.view.pointer + ITEM * (row_of(tile.view, tile.job.start + begin) + tile.column);
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        x[i] = load_quad(row, ROWS == PACKED ? i * CHANNELS : 0, there);
        if (ROWS != PACKED)
            row += ITEM * tile.view.token_stride;
    }
#endif
}

template <bool WIDE>
__device__ __forceinline__ void encode_tile(const View &view, const Job &job, int number, const int *fine_tokens,
                                            const u8 *header, const float *cell_table, u8 *piece, Status *status)
{
    extern __shared__ __align__(16) int shared[];
    __shared__ float page_low[TILE], page_step[TILE], page_inverse[TILE];
    __shared__ __align__(16) float cells[CELLS * COPIES];
    __shared__ bool cut;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int first = job.raw_head, stop = job.tokens - job.raw_tail, tokens = job.tokens;
    const Sections at(job, WIDE);
    u8 *const anchor = piece + job.at[0];
    const int *const fine = fine_tokens + job.fine_at;
    const int fields = at.chunks * TILE;
    int *const least = shared, *const most = least + fields;
    float *const pivot = (float *)(most + fields), *const total = pivot + fields;
    u8 **const later = (u8 **)(LYNX ? total + fields : pivot);

    const int quad = number * (TILE / 4) + lane, head = 4 * quad / PADDED, position = 4 * quad % PADDED;
    const int there = head >= HEADS ? 0 : max(min(SIZE - position, 4), 0);
    const int index = number * (TILE / 8) + lane / 2;
    const Cells search(cells, lane);
    const Tile tile = {view,  job,   at,    status, anchor, first, stop,  head * SIZE + position, there, column_of(view, head, position),
                       lane,  least, most,  pivot,  total,  anchor + at.data, later, search, group_of(index), index < GROUPS};
    const int runs = (tokens + RUN - 1) / RUN;
    Quad x[RUN];
    if (warp < runs && tile.whole(warp * RUN))
        load_run(tile, warp * RUN, x);

    for (int i = thread; i < fields; i += THREADS) {
        least[i] = 0x7FFFFFFF;
        most[i] = (int)0x80000000;
    }
    if (LYNX)
#pragma unroll
        for (int i = thread; i < CELLS * COPIES / COPIED; i += THREADS) {
            const float entry = cell_table[i / (COPIES / COPIED)];
            for (int j = 0; j < COPIED; j++)
                cells[i * COPIED + j] = entry;
        }
    if (STREAMS > 1)
        for (int t = first + thread; t < stop; t += THREADS) {
            const int place = place_of(fine, at.fine, t, first);
            for (int s = 1; s < STREAMS; s++) {
                const int row = row_bytes(bits_of_stream(s));
                later[(s - 1) * tokens + t] = place >= 0 ? piece + job.at[s] + place * row
                                                         : anchor + at.fine_rows(job, s) + ~place * row;
            }
        }
    if (thread == 0)
        cut = false;
    if (number == 0) {
        write_header(anchor, header, HEADER, job, WIDE, THREADS);
        if (STREAMS > 1)
            for (int i = thread; i < at.fine; i += THREADS)
                store16(anchor + at.positions + 2 * i, (u32)fine[i]);
    }
    __syncthreads();

    for (int run = warp; run < runs; run += WARPS) {
        if (tile.whole(run * RUN)) {
            if (run != warp)
                load_run(tile, run * RUN, x);
            tile.look_at_run(run * RUN, x);
        } else {
            tile.look_at_part(run * RUN);
        }
    }
    if (stop <= first)
        return;
    __syncthreads();
#if LYNX
    static_assert(CHUNK == RUN);
    for (int run = warp; run < runs; run += WARPS) {
        if (!tile.whole(run * RUN)) {
            tile.add_part(run * RUN);
            continue;
        }
        if (runs > WARPS)
            load_run(tile, run * RUN, x);
        tile.add_run(run * RUN, x);
    }
    __syncthreads();
#endif

    const float levels = WIDE ? 65535.0f : 255.0f;
    if (thread < TILE) {
        const int index = number * TILE + thread, of_head = index % PADDED;
        if (index < GROUPS * 8 && of_head < SIZE) {
            int lowest = least[thread], highest = most[thread];
            for (int k = 1; k < at.chunks; k++) {
                lowest = min(lowest, least[k * TILE + thread]);
                highest = max(highest, most[k * TILE + thread]);
            }
            const u32 bits = as_bits(unordered(lowest));
            u32 upper = bits >> 16;
            if ((bits & 0xFFFFu) && unordered(lowest) < 0.0f)
                upper += 1;
            if (upper == 0x8000u)
                upper = 0;
            const float low = as_float(upper << 16);
            u32 above = (as_bits(__fsub_rn(unordered(highest), low)) + 0xFFFFu) >> 16;
            if (as_float(above << 16) < FLAT)
                above = 0;
            const float scale = as_float(above << 16);
            page_low[thread] = low;
            page_step[thread] = step_of(scale, levels);
            page_inverse[thread] = above ? __fdiv_rn(levels, scale) : 0.0f;
            const int c = index / PADDED * SIZE + of_head;
            store16(anchor + at.page_low + 2 * c, upper);
            store16(anchor + at.page_scale + 2 * c, above);
        }
    }
    __syncthreads();

    float *const base = (float *)least, *const per_unit = (float *)most;
    bool escape = false, far = false;
    const int c = thread % TILE, channel = number * TILE + c, of_head = channel % PADDED;
    const bool is_there = whole_tiles() || (channel < GROUPS * 8 && of_head < SIZE);
    const float low = page_low[c], step = page_step[c], inverse = page_inverse[c];
    const int last = at.chunks - 1, coded_first = min(stop, (first / CHUNK + 1) * CHUNK) - first;
    const int coded_last = stop - max(first, (stop - 1) / CHUNK * CHUNK);
    const int field_bytes = WIDE ? 2 : 1, apart = at.chunk_scale - at.chunk_low;
    u8 *to = anchor + at.chunk_low + field_bytes * (thread / TILE * CHANNELS + channel / PADDED * SIZE + of_head);
    for (int k = thread / TILE; k <= last; k += THREADS / TILE, to += field_bytes * (THREADS / TILE * CHANNELS)) {
        const int i = k * TILE + c;
        if (!is_there) {
            base[i] = 0.0f;
            per_unit[i] = 0.0f;
            continue;
        }
        const float smallest = unordered(least[i]), largest = unordered(most[i]);
        const int coded = k == 0 ? coded_first : k == last ? coded_last : CHUNK;
#if LYNX
        const float share = coded == CHUNK ? total[i] : __fmul_rn(total[i], __fdiv_rn((float)CHUNK, (float)coded));
        const float mean = __fadd_rn(pivot[i], share);
        const float field1 = clamp(floorf(__fadd_rn(__fmul_rn(__fsub_rn(mean, low), inverse), 0.5f)), levels);
        const float origin = __fadd_rn(low, __fmul_rn(step, field1));
        const float deviation = fmaxf(__fsub_rn(largest, origin), __fsub_rn(origin, smallest));
        const float field2 = clamp(ceilf(__fmul_rn(deviation, inverse)), levels);
        const float units = UNIT;
#else
        const float field1 = clamp(floorf(__fmul_rn(__fsub_rn(smallest, low), inverse)), levels);
        const float origin = __fadd_rn(low, __fmul_rn(step, field1));
        const float field2 = clamp(ceilf(__fmul_rn(__fsub_rn(largest, origin), inverse)), levels);
        const float units = TOP;
#endif
        const float length = __fmul_rn(step, field2);
#if LYNX
        far |= length != 0.0f && !(deviation <= length * EXCESS);
#endif
        base[i] = LYNX && origin == 0.0f ? -0.0f : origin;
        per_unit[i] = length != 0.0f ? __fdiv_rn(units, length) : 0.0f;
        const float spread = __fsub_rn(largest, smallest), extent = spread > 0.0f ? spread : fabsf(smallest);
        escape |= coded >= ESCAPE_TOKENS && length > 0.0f && extent < __fmul_rn(ESCAPE_STEPS, step);
        if (WIDE) {
            store16(to, (u32)field1);
            store16(to + apart, (u32)field2);
        } else {
            to[0] = (u8)(u32)field1;
            to[apart] = (u8)(u32)field2;
        }
    }
    if (far)
        cut = true;
    if (!WIDE && escape)
        atomicOr(&status->flags, WIDE_PAGE);
    __syncthreads();

    u64 lowest_bits = (u64)(anchor + at.data);
#pragma unroll
    for (int s = 1; s < STREAMS; s++)
        lowest_bits |= (u64)(piece + job.at[s]) | (at.fine ? (u64)(anchor + at.fine_rows(job, s)) : 0);
    const bool quick = whole_tiles() && lowest_bits % (bits_of_stream(0) == 8 ? 8 : 4) == 0 && !cut;
    for (int run = warp; run < runs; run += WARPS) {
        const int begin = run * RUN;
        if (quick && tile.whole(begin)) {
            if (runs > WARPS)
                load_run(tile, begin, x);
            tile.write_run(begin, x);
        } else if (begin < stop && begin + RUN > first) {
            tile.write_part(begin);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    encode_pages(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                 int block_tokens, const Job *jobs, const int *fine, const u8 *header, const float *cells, u8 *piece,
                 Status *status)
{
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    encode_tile<false>(view, jobs[blockIdx.y], blockIdx.x, fine, header, cells, piece, status + blockIdx.y);
}

// Pages that turned out to need 16-bit fields are made once more; each block looks at some of the flags.
extern "C" __global__ void __launch_bounds__(THREADS)
    encode_wide_pages(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                      int block_tokens, const Job *jobs, const int *fine, const u8 *header, const float *cells, u8 *piece,
                      Status *status, int pages)
{
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    const int step = gridDim.x;
    for (int from = blockIdx.x; from < pages; from += THREADS * step) {
        const int mine = from + threadIdx.x * step;
        if (!__syncthreads_count(mine < pages && status[mine].flags & WIDE_PAGE))
            continue;
        for (int page = from; page < min(from + THREADS * step, pages); page += step)
            for (int tile = 0; tile < TILES && status[page].flags & WIDE_PAGE; tile++) {
                encode_tile<true>(view, jobs[page], tile, fine, header, cells, piece, status + page);
                __syncthreads();
            }
    }
}
