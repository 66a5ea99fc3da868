// Pages to streams. A block takes 64 channels of one page: its threads read every value once, keep it in registers, agree on
// the fields of chunks and page through shared memory, and write codes. Pages of more than 256 tokens are read twice.
#include "common.cuh"
#include "pages.cuh"

#define WARPS 8
#define THREADS (32 * WARPS)
#define TILE 64
#define TILES ((GROUPS * 8 + TILE - 1) / TILE)
#define CELL_SHIFT 14
#define CELLS 1025
#define UNIT 16777216.0f
#define SAFE_SUM 0x1p120f // up to here the sum of a run does not overflow

#ifndef MIN_BLOCKS
#define MIN_BLOCKS (KIND == FLOAT32 ? 2 : 4)
#endif

// Every lane of every block has two channels, and rows of codes begin at multiples of 4.
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

// Code of a value, the fraction cut off; not yet limited to 0 .. 255 in the even codecs. `base` is never +0 in `lynx`, so
// that the difference never is -0.
__device__ __forceinline__ int code_of(float value, float base, float per_unit, const int *cells)
{
#if LYNX
    const float centred = __fsub_rn(value, base);
    const int q = (int)fminf(__fmul_rn(fabsf(centred), per_unit), UNIT);
    const int level = (cells[q >> CELL_SHIFT] + q) >> CELL_SHIFT;
    return level ^ ((int)as_bits(centred) >> 31 & 0xF0); // the lower four bits are still those of the level
#else
    const float level = __fadd_rn(__fmul_rn(__fsub_rn(value, base), per_unit), 0.5f);
    return (int)(TOP < 255.0f ? fminf(level, TOP) : level);
#endif
}

// Codes of two tokens, two channels each: bytes.
__device__ __forceinline__ u32 codes_of(Pair first, Pair second, float2 base, float2 per_unit, const int *cells)
{
    const int a = code_of(low_of(first), base.x, per_unit.x, cells), b = code_of(high_of(first), base.y, per_unit.y, cells);
    const int c = code_of(low_of(second), base.x, per_unit.x, cells), d = code_of(high_of(second), base.y, per_unit.y, cells);
#if LYNX
    // 7 - level, modulo 16, is level ^ 7.
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410) ^ 0x07070707u;
#else
    return pack_saturated(a, b, pack_saturated(c, d, 0));
#endif
}

// Four tokens of two channels each, from four neighbouring lanes, become 8 channels of one token.
__device__ __forceinline__ void gather_token(u32 a, u32 b, int lane, u32 &low, u32 &high)
{
    const bool upper = lane & 2, odd = lane & 1;
    const u32 other = __shfl_xor_sync(0xFFFFFFFFu, upper ? a : b, 2);
    const u32 own = upper ? b : a;
    const u32 mine = __byte_perm(own, other, odd ? 0x7632 : 0x5410);
    const u32 theirs = __shfl_xor_sync(0xFFFFFFFFu, __byte_perm(own, other, odd ? 0x5410 : 0x7632), 1);
    const u32 first = odd ? 0x1054 : 0x5410, second = odd ? 0x3276 : 0x7632;
    low = __byte_perm(mine, theirs, upper ? second : first);
    high = __byte_perm(mine, theirs, upper ? first : second);
}

// Where the rows of each stream begin, and those of its fine tokens.
struct Rows {
    u8 *codes[STREAMS], *fine[STREAMS];
};

// What a block knows while it encodes a tile.
struct Tile {
    const View &view;
    const Job &job;
    const Sections &at;
    Status *status;
    u8 *piece, *anchor;
    int first, stop;         // coded tokens
    int channel, there;      // first of the two channels of this lane, and how many there are
    i64 column;              // their place in a token
    int lane;
    int *least, *most;       // [chunk][channel], as ordered integers
    float *mean, *base, *per_unit;
    int *places;
    const int *cells;
    Group group;             // that this lane writes
    bool writes;

    __device__ int chunk_of(int token) const { return token / CHUNK - first / CHUNK; }

    __device__ Pair load(int token) const
    {
        return load_pair(view.pointer, row_of(view, job.start + token) + column, whole_tiles() ? 2 : there);
    }

    __device__ __forceinline__ void add_extremes(int token, Pair low, Pair high) const
    {
        const int k = chunk_of(token) * TILE + 2 * lane;
        atomicMin(&least[k], ordered(low_of(low)));
        atomicMin(&least[k + 1], ordered(high_of(low)));
        atomicMax(&most[k], ordered(low_of(high)));
        atomicMax(&most[k + 1], ordered(high_of(high)));
        if (!allowed(low_of(low)) || !allowed(high_of(low)) || !allowed(low_of(high)) || !allowed(high_of(high)))
            refuse_run(token / RUN * RUN);
    }

    // Find what is wrong in a run: rare, so it is read again.
    __device__ void refuse_run(int begin) const
    {
        for (int t = max(begin, first); t < min(begin + RUN, stop); t++)
            refuse_pair(t, load(t));
    }

    __device__ void refuse_pair(int token, Pair pair) const
    {
        if (there > 0 && !allowed(low_of(pair)))
            refuse(status, token, channel, low_of(pair));
        if (there > 1 && !allowed(high_of(pair)))
            refuse(status, token, channel + 1, high_of(pair));
    }

    __device__ void set_mean(int token, float low_pivot, float high_pivot, float low_total, float high_total, int tokens) const
    {
        const float scale = __fdiv_rn((float)RUN, (float)tokens);
        const int k = chunk_of(token) * TILE + 2 * lane;
        mean[k] = __fadd_rn(low_pivot, __fmul_rn(low_total, scale));
        mean[k + 1] = __fadd_rn(high_pivot, __fmul_rn(high_total, scale));
    }

    // The tokens of a run that not all have codes, or whose chunks end inside of it; raw ones are written.
    __device__ __forceinline__ void look_at_part(int begin) const
    {
        Pair low = infinite_pair(false), high = infinite_pair(true);
        float low_pivot = 0.0f, high_pivot = 0.0f, low_total = 0.0f, high_total = 0.0f;
        const int end = min(begin + RUN, job.tokens), from = max(begin, first), until = min(end, stop);
        for (int t = begin; t < end; t++) {
            const Pair x = load(t);
            if (t < first || t >= stop) {
                refuse_pair(t, x);
                const int row = t < first ? t : t - stop + first;
                u8 *const to = anchor + HEADER + 2 * (row * CHANNELS + channel);
                const u32 both = raw_pair(x);
                if (there > 0)
                    store16(to, both & 0xFFFFu);
                if (there > 1)
                    store16(to + 2, both >> 16);
                continue;
            }
            low = least_pair(low, x);
            high = most_pair(high, x);
            if (LYNX) {
                if (t == from) {
                    low_pivot = low_of(x);
                    high_pivot = high_of(x);
                }
                low_total = __fadd_rn(low_total, __fmul_rn(__fsub_rn(low_of(x), low_pivot), 1.0f / RUN));
                high_total = __fadd_rn(high_total, __fmul_rn(__fsub_rn(high_of(x), high_pivot), 1.0f / RUN));
            }
            if (t + 1 == until || (t + 1) % CHUNK == 0) {
                add_extremes(t, low, high);
                low = infinite_pair(false);
                high = infinite_pair(true);
            }
        }
        if (LYNX && until > from)
            set_mean(from, low_pivot, high_pivot, low_total, high_total, until - from);
    }

    // All tokens of a run have codes, of one chunk.
    __device__ __forceinline__ void look_at_run(int begin, const Pair *x) const
    {
        Pair low = x[0], high = x[0];
#pragma unroll
        for (int i = 1; i < RUN; i++) {
            low = least_pair(low, x[i]);
            high = most_pair(high, x[i]);
        }
        add_extremes(begin, low, high);
        if (!LYNX)
            return;
        // Added up in the order of the tokens, with weights of 2^-5: these can wait unless the sum overflows, as the bits
        // of a difference of 16-bit floats do not reach down to where float32 ends.
        const float low_pivot = low_of(x[0]), high_pivot = high_of(x[0]);
        float low_total = 0.0f, high_total = 0.0f;
        const float largest = fmaxf(fmaxf(fabsf(low_of(low)), fabsf(high_of(low))), fmaxf(fabsf(low_of(high)), fabsf(high_of(high))));
        if (KIND != FLOAT32 && largest <= SAFE_SUM) {
#pragma unroll
            for (int i = 1; i < RUN; i++) {
                low_total = __fadd_rn(low_total, __fsub_rn(low_of(x[i]), low_pivot));
                high_total = __fadd_rn(high_total, __fsub_rn(high_of(x[i]), high_pivot));
            }
            low_total *= 1.0f / RUN;
            high_total *= 1.0f / RUN;
        } else {
#pragma unroll
            for (int i = 1; i < RUN; i++) {
                low_total = __fadd_rn(low_total, __fmul_rn(__fsub_rn(low_of(x[i]), low_pivot), 1.0f / RUN));
                high_total = __fadd_rn(high_total, __fmul_rn(__fsub_rn(high_of(x[i]), high_pivot), 1.0f / RUN));
            }
        }
        set_mean(begin, low_pivot, high_pivot, low_total, high_total, RUN);
    }

    template <int STREAM, bool ALIGNED>
    __device__ __forceinline__ void store_later(const Rows &rows, int place, u32 low, u32 high) const
    {
        if constexpr (STREAM < STREAMS) {
            constexpr int bits = bits_of_stream(STREAM);
            u8 *const first_row = place >= 0 ? rows.codes[STREAM] : rows.fine[STREAM];
            u8 *const row = first_row + (u32)(place >= 0 ? place : ~place) * (u32)row_bytes(bits);
            store_codes<bits, shift_of_stream(STREAM), ALIGNED>(row, group, low, high);
            store_later<STREAM + 1, ALIGNED>(rows, place, low, high);
        }
    }

    template <bool ALIGNED>
    __device__ __forceinline__ void store_token(const Rows &rows, u8 *row, int place, u32 low, u32 high) const
    {
        store_codes<bits_of_stream(0), shift_of_stream(0), ALIGNED>(row, group, low, high);
        store_later<1, ALIGNED>(rows, place, low, high);
    }

    // Codes of a run, whatever it is.
    __device__ __forceinline__ void write_part(int begin, const Rows &rows) const
    {
        for (int i = 0; i < RUN; i += 4) {
            u32 codes[4];
            for (int j = 0; j < 4; j++) {
                const int t = min(max(begin + i + j, first), stop - 1), k = chunk_of(t) * TILE + 2 * lane;
                const Pair x = load(t);
                codes[j] = codes_of(x, x, *(const float2 *)(base + k), *(const float2 *)(per_unit + k), cells);
            }
            u32 low, high;
            gather_token(__byte_perm(codes[0], codes[1], 0x5410), __byte_perm(codes[2], codes[3], 0x5410), lane, low, high);
            const int t = begin + i + (lane & 3);
            if (t >= first && t < stop && writes)
                store_token<false>(rows, rows.codes[0] + (t - first) * row_bytes(bits_of_stream(0)),
                                   STREAMS > 1 ? places[t] : 0, low, high);
            __syncwarp();
        }
    }

    __device__ __forceinline__ void write_run(int begin, const Pair *x, const Rows &rows) const
    {
        const int k = chunk_of(begin) * TILE + 2 * lane;
        const float2 origin = *(const float2 *)(base + k), units = *(const float2 *)(per_unit + k);
        u8 *const row = rows.codes[0] + (begin + (lane & 3) - first) * row_bytes(bits_of_stream(0));
        const int *const place = places + begin + (lane & 3);
#pragma unroll
        for (int i = 0; i < RUN; i += 4) {
            u32 low, high;
            gather_token(codes_of(x[i], x[i + 1], origin, units, cells), codes_of(x[i + 2], x[i + 3], origin, units, cells),
                         lane, low, high);
            store_token<true>(rows, row + i * row_bytes(bits_of_stream(0)), STREAMS > 1 ? place[i] : 0, low, high);
        }
    }
};

// Read all tokens of a run at once.
__device__ __forceinline__ void load_run(const Tile &tile, int begin, Pair *x)
{
#if ROWS == PAGED
    const i64 own = row_of(tile.view, tile.job.start + begin + tile.lane);
#pragma unroll
    for (int i = 0; i < RUN; i++)
        x[i] = load_pair(tile.view.pointer, __shfl_sync(0xFFFFFFFFu, own, i) + tile.column, whole_tiles() ? 2 : tile.there);
#else
    const u8 *row = tile.view.pointer + ITEM * (row_of(tile.view, tile.job.start + begin) + tile.column);
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        x[i] = load_pair(row, ROWS == PACKED ? i * CHANNELS : 0, whole_tiles() ? 2 : tile.there);
        if (ROWS != PACKED)
            row += ITEM * tile.view.token_stride;
    }
#endif
}

template <bool WIDE>
__device__ __forceinline__ void encode_tile(const View &view, const Job &job, int number, const int *fine_tokens,
                                            const u8 *header, const int *cell_table, u8 *piece, Status *status)
{
    extern __shared__ int shared[];
    __shared__ float page_low[TILE], page_step[TILE], page_inverse[TILE];
    __shared__ int cells[LYNX ? CELLS : 1];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int first = job.raw_head, stop = job.tokens - job.raw_tail, tokens = job.tokens;
    const Sections at(job, WIDE);
    u8 *const anchor = piece + job.at[0];
    const int *const fine = fine_tokens + job.fine_at;
    // The extremes, which what codes are made with takes the place of; the means; places of tokens in later streams.
    int *const least = shared, *const most = least + at.chunks * TILE;
    float *const base = (float *)least, *const per_unit = (float *)most;
    float *const mean = (float *)(most + at.chunks * TILE);
    int *const places = LYNX ? (int *)(mean + at.chunks * TILE) : (int *)mean;

    for (int i = thread; i < at.chunks * TILE; i += THREADS) {
        least[i] = 0x7FFFFFFF;
        most[i] = (int)0x80000000;
    }
    if (LYNX)
        for (int i = thread; i < CELLS; i += THREADS)
            cells[i] = cell_table[i] - (i << CELL_SHIFT) + (7 << CELL_SHIFT);
    if (STREAMS > 1)
        for (int t = first + thread; t < stop; t += THREADS)
            places[t] = place_of(fine, at.fine, t, first);
    if (number == 0) {
        write_header(anchor, header, HEADER, job, WIDE, THREADS);
        if (STREAMS > 1)
            for (int i = thread; i < at.fine; i += THREADS)
                store16(anchor + at.positions + 2 * i, (u32)fine[i]);
    }
    __syncthreads();

    const int pair = number * (TILE / 2) + lane, head = 2 * pair / PADDED, position = 2 * pair % PADDED;
    const int there = head >= HEADS || position >= SIZE ? 0 : position + 1 < SIZE ? 2 : 1;
    const int index = number * (TILE / 8) + (lane >> 2);
    const Tile tile = {view,  job,  at,       status, piece, anchor, first,           stop,          head * SIZE + position,
                       there, column_of(view, head, position), lane, least, most, mean, base, per_unit, places, cells,
                       group_of(index), index < GROUPS};
    const int runs = (tokens + RUN - 1) / RUN;
    Pair x[RUN];

    for (int run = warp; run < runs; run += WARPS) {
        const int begin = run * RUN;
        if (CHUNK % RUN == 0 && begin >= first && begin + RUN <= stop) {
            load_run(tile, begin, x);
            tile.look_at_run(begin, x);
        } else {
            tile.look_at_part(begin);
        }
    }
    if (stop <= first)
        return;
    __syncthreads();

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

    bool escape = false;
    for (int i = thread; i < at.chunks * TILE; i += THREADS) {
        const int k = i / TILE, c = i % TILE, index = number * TILE + c, of_head = index % PADDED;
        if (index >= GROUPS * 8 || of_head >= SIZE) {
            base[i] = 0.0f;
            per_unit[i] = 0.0f;
            continue;
        }
        const float low = page_low[c], step = page_step[c], inverse = page_inverse[c];
        const float smallest = unordered(least[i]), largest = unordered(most[i]);
#if LYNX
        const float field1 = clamp(floorf(__fadd_rn(__fmul_rn(__fsub_rn(mean[i], low), inverse), 0.5f)), levels);
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
        base[i] = LYNX && origin == 0.0f ? -0.0f : origin;
        per_unit[i] = length != 0.0f ? __fdiv_rn(units, length) : 0.0f;
        const int cut = (first / CHUNK + k) * CHUNK;
        const int tokens = min(stop, cut + CHUNK) - max(first, cut);
        const float spread = __fsub_rn(largest, smallest), extent = spread > 0.0f ? spread : fabsf(smallest);
        escape |= tokens >= ESCAPE_TOKENS && length > 0.0f && extent < __fmul_rn(ESCAPE_STEPS, step);
        const int where = k * CHANNELS + index / PADDED * SIZE + of_head;
        if (WIDE) {
            store16(anchor + at.chunk_low + 2 * where, (u32)field1);
            store16(anchor + at.chunk_scale + 2 * where, (u32)field2);
        } else {
            anchor[at.chunk_low + where] = (u8)(u32)field1;
            anchor[at.chunk_scale + where] = (u8)(u32)field2;
        }
    }
    if (!WIDE && escape)
        atomicOr(&status->flags, WIDE_PAGE);
    __syncthreads();

    Rows rows;
    u64 lowest_bits = 0;
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
        rows.codes[s] = s ? piece + job.at[s] : anchor + at.data;
        rows.fine[s] = s ? anchor + at.fine_rows(job, s) : nullptr;
        lowest_bits |= (u64)rows.codes[s] | (s && at.fine ? (u64)rows.fine[s] : 0);
    }
    const bool aligned = whole_tiles() && CHUNK % RUN == 0 && lowest_bits % (bits_of_stream(0) == 8 ? 8 : 4) == 0;
    for (int run = warp; run < runs; run += WARPS) {
        const int begin = run * RUN;
        if (aligned && begin >= first && begin + RUN <= stop) {
            if (runs > WARPS)
                load_run(tile, begin, x);
            tile.write_run(begin, x, rows);
        } else if (begin < stop && begin + RUN > first) {
            tile.write_part(begin, rows);
        }
    }
}

// Ask for the tokens of a tile that a later block takes, a row each thread.
__device__ __forceinline__ void prefetch_tile(const View &view, const Job *jobs)
{
    const u32 later = blockIdx.y * gridDim.x + blockIdx.x + PREFETCH_BLOCKS;
    if (PREFETCH_BLOCKS == 0 || !whole_tiles() || ROWS == PAGED || later >= gridDim.x * gridDim.y)
        return;
    const Job &job = jobs[later / gridDim.x];
    const int token = threadIdx.x, channel = later % gridDim.x * TILE;
    const u8 *const from = view.pointer
                           + ITEM * (row_of(view, job.start + token) + column_of(view, channel / SIZE, channel % SIZE));
    if (token < job.tokens && (u64)from % 16 == 0 && SIZE % TILE == 0)
        prefetch(from, TILE * ITEM);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    encode_pages(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                 int block_tokens, const Job *jobs, const int *fine, const u8 *header, const int *cells, u8 *piece,
                 Status *status)
{
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    prefetch_tile(view, jobs);
    encode_tile<false>(view, jobs[blockIdx.y], blockIdx.x, fine, header, cells, piece, status + blockIdx.y);
}

// Pages that turned out to need 16-bit fields are made once more.
extern "C" __global__ void __launch_bounds__(THREADS)
    encode_wide_pages(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                      int block_tokens, const Job *jobs, const int *fine, const u8 *header, const int *cells, u8 *piece,
                      Status *status)
{
    if (!(status[blockIdx.x].flags & WIDE_PAGE))
        return;
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    for (int tile = 0; tile < TILES; tile++) {
        encode_tile<true>(view, jobs[blockIdx.x], tile, fine, header, cells, piece, status + blockIdx.x);
        __syncthreads();
    }
}
