// Pages to streams. A block takes 64 channels of one page: its threads read every value once, keep it in registers, agree on
// the fields of chunks and page through shared memory, and write codes. Pages of more than 256 tokens are read twice.
#include "common.cuh"
#include "pages.cuh"

#define WARPS 8
#define TILE 64
#define TILES ((GROUPS * 8 + TILE - 1) / TILE)
#define CELL_SHIFT 14
#define CELLS 1025
#define UNIT 16777216.0f

#ifndef MIN_BLOCKS
#define MIN_BLOCKS (KIND == FLOAT32 ? 2 : 4)
#endif

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

// Code of a value, the fraction cut off.
__device__ __forceinline__ u32 code_of(float value, float base, float per_unit, const int *cells)
{
#if LYNX
    const float centred = __fsub_rn(value, base);
    const float units = fminf(__fmul_rn(fabsf(centred), per_unit), UNIT);
    const int q = (int)units;
    const int level = ((cells[q >> CELL_SHIFT] + (q & ((1 << CELL_SHIFT) - 1))) >> CELL_SHIFT) + 7;
    const u32 sign = centred < 0.0f ? 0xF0u : 0u;
    return ((u32)(level & 0xF0) ^ sign) | ((u32)(7 - level) & 15u);
#else
    const float level = __fadd_rn(__fmul_rn(__fsub_rn(value, base), per_unit), 0.5f);
    return (u32)fminf(fmaxf(level, 0.0f), TOP);
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

template <int STREAM>
__device__ __forceinline__ void store_streams(u8 *const *rows, const int *fine_rows, int place, u8 *anchor, Group group,
                                              u32 low, u32 high)
{
    if constexpr (STREAM < STREAMS) {
        constexpr int bits = bits_of_stream(STREAM);
        u8 *row = place >= 0 ? rows[STREAM] + (i64)place * row_bytes(bits)
                             : anchor + fine_rows[STREAM] + (i64)~place * row_bytes(bits);
        store_codes<bits, shift_of_stream(STREAM)>(row, group, low, high);
        store_streams<STREAM + 1>(rows, fine_rows, place, anchor, group, low, high);
    }
}

template <bool WIDE>
__device__ __forceinline__ void encode_tile(const View &view, const Job &job, int tile, const int *fine_tokens,
                                            const u8 *header, const int *cell_table, u8 *piece, Status *status)
{
    extern __shared__ int shared[];
    __shared__ float page_low[TILE], page_step[TILE], page_inverse[TILE];
    __shared__ int cells[LYNX ? CELLS : 1];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int first = job.raw_head, stop = job.tokens - job.raw_tail;
    const Sections at(job, WIDE);
    // [chunk][channel]: the extremes, then what codes are made with; the means; then places of tokens in later streams.
    int *const least = shared, *const most = least + at.chunks * TILE;
    float *const base = (float *)least, *const per_unit = (float *)most;
    float *const mean = (float *)(most + at.chunks * TILE);
    int *const places = LYNX ? (int *)(mean + at.chunks * TILE) : (int *)mean;
    u8 *const anchor = piece + job.at[0];
    const int *const fine = fine_tokens + job.fine_at;

    for (int i = thread; i < at.chunks * TILE; i += 32 * WARPS) {
        least[i] = 0x7FFFFFFF;
        most[i] = (int)0x80000000;
    }
    if (LYNX)
        for (int i = thread; i < CELLS; i += 32 * WARPS)
            cells[i] = cell_table[i];
    if (STREAMS > 1)
        for (int t = first + thread; t < stop; t += 32 * WARPS)
            places[t] = place_of(fine, at.fine, t, first);
    if (tile == 0) {
        if (STREAMS > 1)
            for (int i = thread; i < at.fine; i += 32 * WARPS)
                store16(anchor + at.positions + 2 * i, (u32)fine[i]);
        write_header(anchor, header, HEADER, job, WIDE, 32 * WARPS);
    }
    __syncthreads();

    // Two channels of this thread: the same for all its tokens.
    const int pair = tile * (TILE / 2) + lane, head = 2 * pair / PADDED, position = 2 * pair % PADDED;
    const int there = head >= HEADS || position >= SIZE ? 0 : position + 1 < SIZE ? 2 : 1;
    const int channel = head * SIZE + position;
    const i64 column = head * view.head_stride + position;
    const int runs = (job.tokens + RUN - 1) / RUN;
    Pair x[RUN];

    for (int run = warp; run < runs; run += WARPS) {
        const int begin = run * RUN;
        if (begin + RUN <= job.tokens) {
#pragma unroll
            for (int i = 0; i < RUN; i++)
                x[i] = load_pair(view.pointer, row_of(view, job.start + begin + i) + column, there);
        } else {
#pragma unroll
            for (int i = 0; i < RUN; i++)
                x[i] = begin + i < job.tokens
                           ? load_pair(view.pointer, row_of(view, job.start + begin + i) + column, there)
                           : no_pair();
        }
        const int from = first > begin ? first - begin : 0;
        const int until = stop - begin < RUN ? stop - begin : RUN;
        const bool full = from == 0 && until == RUN;
        Pair low = infinite_pair(false), high = infinite_pair(true);
#if CHUNK % RUN == 0
        if (full) {
#pragma unroll
            for (int i = 0; i < RUN; i++) {
                low = least_pair(low, x[i]);
                high = most_pair(high, x[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < RUN; i++)
                if (i >= from && i < until) {
                    low = least_pair(low, x[i]);
                    high = most_pair(high, x[i]);
                }
        }
        bool good = allowed(low_of(low)) && allowed(high_of(low)) && allowed(low_of(high)) && allowed(high_of(high));
        if (until > from && !good) {
            // The empty half of a lone last channel holds zeros, so what is wrong is a value of the page.
#pragma unroll
            for (int i = 0; i < RUN; i++)
                if (i >= from && i < until) {
                    if (!allowed(high_of(x[i])))
                        refuse(status, begin + i, channel + 1, high_of(x[i]));
                    if (!allowed(low_of(x[i])))
                        refuse(status, begin + i, channel, low_of(x[i]));
                }
        }
        if (until > from) {
            const int k = (begin / CHUNK - first / CHUNK) * TILE + 2 * lane;
            atomicMin(&least[k], ordered(low_of(low)));
            atomicMin(&least[k + 1], ordered(high_of(low)));
            atomicMax(&most[k], ordered(low_of(high)));
            atomicMax(&most[k + 1], ordered(high_of(high)));
        }
#else
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            if (i < from || i >= until)
                continue;
            if (there == 2 && !allowed(high_of(x[i])))
                refuse(status, begin + i, channel + 1, high_of(x[i]));
            if (!allowed(low_of(x[i])))
                refuse(status, begin + i, channel, low_of(x[i]));
            low = least_pair(low, x[i]);
            high = most_pair(high, x[i]);
            if (i + 1 < until && (begin + i + 1) % CHUNK != 0)
                continue;
            const int k = ((begin + i) / CHUNK - first / CHUNK) * TILE + 2 * lane;
            atomicMin(&least[k], ordered(low_of(low)));
            atomicMin(&least[k + 1], ordered(high_of(low)));
            atomicMax(&most[k], ordered(low_of(high)));
            atomicMax(&most[k + 1], ordered(high_of(high)));
            low = infinite_pair(false);
            high = infinite_pair(true);
        }
#endif
#if LYNX
        if (until > from) { // a chunk is a run: its mean, added up in the order of its tokens
            float low_pivot = low_of(x[0]), high_pivot = high_of(x[0]), low_total = 0.0f, high_total = 0.0f;
#pragma unroll
            for (int i = 1; i < RUN; i++)
                if (i == from) {
                    low_pivot = low_of(x[i]);
                    high_pivot = high_of(x[i]);
                }
#pragma unroll
            for (int i = 0; i < RUN; i++)
                if (full || (i >= from && i < until)) {
                    low_total = __fadd_rn(low_total, __fmul_rn(__fsub_rn(low_of(x[i]), low_pivot), 1.0f / RUN));
                    high_total = __fadd_rn(high_total, __fmul_rn(__fsub_rn(high_of(x[i]), high_pivot), 1.0f / RUN));
                }
            const float scale = __fdiv_rn((float)RUN, (float)(until - from));
            const int k = (run - first / RUN) * TILE + 2 * lane;
            mean[k] = __fadd_rn(low_pivot, __fmul_rn(low_total, scale));
            mean[k + 1] = __fadd_rn(high_pivot, __fmul_rn(high_total, scale));
        }
#endif
        if (!full && there) { // raw tokens
#pragma unroll
            for (int i = 0; i < RUN; i++) {
                const int t = begin + i;
                if (t >= job.tokens || (i >= from && i < until))
                    continue;
                if (!allowed(low_of(x[i])))
                    refuse(status, t, channel, low_of(x[i]));
                if (there == 2 && !allowed(high_of(x[i])))
                    refuse(status, t, channel + 1, high_of(x[i]));
                const int row = t < first ? t : t - stop + first;
                u8 *const to = anchor + HEADER + 2 * (row * CHANNELS + channel);
                const u32 both = raw_pair(x[i]);
                store16(to, both & 0xFFFFu);
                if (there == 2)
                    store16(to + 2, both >> 16);
            }
        }
    }
    if (stop <= first)
        return;
    __syncthreads();

    const float levels = WIDE ? 65535.0f : 255.0f;
    if (thread < TILE) {
        const int index = tile * TILE + thread, of_head = index % PADDED;
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
    for (int i = thread; i < at.chunks * TILE; i += 32 * WARPS) {
        const int k = i / TILE, c = i % TILE, index = tile * TILE + c, of_head = index % PADDED;
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
        base[i] = origin;
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

    u8 *rows[STREAMS];
    int fine_rows[STREAMS];
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
        rows[s] = s ? piece + job.at[s] : anchor + at.data;
        fine_rows[s] = s ? at.fine_rows(job, s) : 0;
    }
    const int index = tile * (TILE / 8) + (lane >> 2);
    const Group group = group_of(index);
    for (int run = warp; run < runs; run += WARPS) {
        const int begin = run * RUN;
        if (runs > WARPS) {
#pragma unroll
            for (int i = 0; i < RUN; i++)
                x[i] = begin + i < job.tokens
                           ? load_pair(view.pointer, row_of(view, job.start + begin + i) + column, there)
                           : no_pair();
        }
#if CHUNK % RUN == 0
        const int k = max(begin / CHUNK - first / CHUNK, 0) * TILE + 2 * lane;
        const bool any = begin < stop && begin + RUN > first;
        const float2 origin = any ? *(const float2 *)(base + k) : float2{0.0f, 0.0f};
        const float2 units = any ? *(const float2 *)(per_unit + k) : float2{0.0f, 0.0f};
#endif
#pragma unroll
        for (int i = 0; i < RUN; i += 4) {
            u32 codes[8];
#pragma unroll
            for (int j = 0; j < 4; j++) {
#if CHUNK % RUN != 0
                const int t = min(max(begin + i + j, first), stop - 1);
                const int k = (t / CHUNK - first / CHUNK) * TILE + 2 * lane;
                const float2 origin = *(const float2 *)(base + k), units = *(const float2 *)(per_unit + k);
#endif
                codes[2 * j] = code_of(low_of(x[i + j]), origin.x, units.x, cells);
                codes[2 * j + 1] = code_of(high_of(x[i + j]), origin.y, units.y, cells);
            }
            const u32 a = __byte_perm(codes[0] | codes[1] << 8, codes[2] | codes[3] << 8, 0x5410);
            const u32 b = __byte_perm(codes[4] | codes[5] << 8, codes[6] | codes[7] << 8, 0x5410);
            u32 low, high;
            gather_token(a, b, lane, low, high);
            const int t = begin + i + (lane & 3);
            if (t < first || t >= stop || index >= GROUPS)
                continue;
            store_codes<bits_of_stream(0), shift_of_stream(0)>(
                rows[0] + (i64)(t - first) * row_bytes(bits_of_stream(0)), group, low, high);
            if constexpr (STREAMS > 1)
                store_streams<1>(rows, fine_rows, places[t], anchor, group, low, high);
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
    encode_pages(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                 int block_tokens, const Job *jobs, const int *fine, const u8 *header, const int *cells, u8 *piece,
                 Status *status)
{
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    encode_tile<false>(view, jobs[blockIdx.y], blockIdx.x, fine, header, cells, piece, status + blockIdx.y);
}

// Pages that turned out to need 16-bit fields are made once more.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
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
