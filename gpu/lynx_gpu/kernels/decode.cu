// Streams to pages, in place: the first KNOWN streams of codes. A lane takes 8 channels, a warp 32 tokens of 256 channels.
#include "common.cuh"
#include "pages.cuh"

#define WARPS 8
#define AHEAD 4 // tokens whose bytes are read before the first of them is used
#define FULL_LEVELS 256
#define ALL (KNOWN == STREAMS)
#define FIRST_SHIFT (shift_of_stream(0))
#define KNOWN_SHIFT (shift_of_stream(KNOWN - 1))

// The bytes of one token that a lane needs.
template <int STREAM> struct Row {
    Planes<bits_of_stream(STREAM)> planes;
    Row<STREAM + 1> later;
};
template <> struct Row<STREAMS> {};

template <int STREAM>
__device__ __forceinline__ void load_later(Row<STREAM> &row, const u8 *const *streams, const u8 *anchor,
                                           const int *fine_rows, int place, Group group)
{
    if constexpr (STREAM < STREAMS) {
        constexpr int bits = bits_of_stream(STREAM);
        if (STREAM < KNOWN || place < 0) {
            const u8 *from = place < 0 ? anchor + fine_rows[STREAM] + (i64)~place * row_bytes(bits)
                                       : streams[STREAM] + (i64)place * row_bytes(bits);
            row.planes = load_planes<bits>(from, group);
            load_later<STREAM + 1>(row.later, streams, anchor, fine_rows, place, group);
        }
    }
}

template <int STREAM>
__device__ __forceinline__ void add_later(const Row<STREAM> &row, int place, u32 &low, u32 &high)
{
    if constexpr (STREAM < STREAMS) {
        if (STREAM < KNOWN || place < 0) {
            add_codes<bits_of_stream(STREAM), shift_of_stream(STREAM)>(row.planes, low, high);
            add_later<STREAM + 1>(row.later, place, low, high);
        }
    }
}

// Where a code is read: in steps of the chunk's length, or of sigma.
__device__ __forceinline__ float position_of(u32 code, bool whole, const float *coarse, const float *full)
{
#if LYNX
    return ALL || whole ? full[code] : coarse[code >> FIRST_SHIFT];
#else
    if (ALL || whole)
        return (float)code;
#if POINTS_AT && KNOWN == 1
    return coarse[code >> FIRST_SHIFT];
#else
    return __fadd_rn((float)code, ((1 << KNOWN_SHIFT) - 1) / 2.0f);
#endif
#endif
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    decode_pages(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                 int block_tokens, const Job *jobs, const float *full_table, const u8 *piece, Status *status)
{
    __shared__ float coarse[1 << (POINTS_AT ? bits_of_stream(0) : 0)];
    __shared__ float full[LYNX ? FULL_LEVELS : 1];
    extern __shared__ int places[];
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    const Job &job = jobs[blockIdx.y];
    const u8 *const anchor = piece + job.at[0];
    const bool wide = anchor[FLAGS_AT] & 1, raw_half = anchor[RAW_AT];
    const Sections at(job, wide);
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int first = job.raw_head, stop = job.tokens - job.raw_tail;

    if (POINTS_AT && KNOWN == 1)
        for (int i = thread; i < 1 << bits_of_stream(0); i += 32 * WARPS)
            coarse[i] = from_half(load16(anchor + POINTS_AT + 2 * i));
    if (LYNX)
        for (int i = thread; i < FULL_LEVELS; i += 32 * WARPS)
            full[i] = full_table[i];
    if (STREAMS > 1) {
        const u8 *const positions = anchor + at.positions;
        if (at.fine == 0)
            for (int t = first + thread; t < stop; t += 32 * WARPS)
                places[t] = t - first;
        else if (((u64)positions & 1) == 0)
            for (int t = first + thread; t < stop; t += 32 * WARPS)
                places[t] = place_of((const u16 *)positions, at.fine, t, first);
        else
            for (int t = first + thread; t < stop; t += 32 * WARPS)
                places[t] = place_of((const Unaligned *)positions, at.fine, t, first);
    }
    __syncthreads();

    const int index = blockIdx.x * 32 + lane;
    if (index >= GROUPS)
        return;
    const Group group = group_of(index);
    const int position = group.number * LANE_CHANNELS, channel = group.head * SIZE + position;
    const int count = min(SIZE - position, LANE_CHANNELS);
    const i64 column = group.head * view.head_stride + position;
    const u8 *streams[STREAMS];
    int fine_rows[STREAMS];
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
        streams[s] = s ? (s < KNOWN ? piece + job.at[s] : nullptr) : anchor + at.data;
        fine_rows[s] = s ? at.fine_rows(job, s) : 0;
    }

    for (int begin = warp * RUN; begin < job.tokens; begin += WARPS * RUN) {
        const int end = min(begin + RUN, job.tokens);
        for (int t = begin; t < end;) {
            if (t < first || t >= stop) { // raw
                const int row = t < first ? t : t - stop + first;
                const u8 *const from = anchor + HEADER + 2 * (row * CHANNELS + channel);
                float values[LANE_CHANNELS];
                bool finite = true;
#pragma unroll
                for (int i = 0; i < LANE_CHANNELS; i++) {
                    const u32 half = i < count ? load16(from + 2 * i) : 0;
                    values[i] = raw_half ? from_half(half) : from_bfloat16(half);
                    finite &= (as_bits(values[i]) & 0x7FFFFFFFu) < 0x7F800000u;
                }
                if (!finite)
                    atomicOr(&status[blockIdx.y].flags, BAD_RAW);
                store_values(pointer, row_of(view, job.start + t) + column, count, values);
                t++;
                continue;
            }
            const int k = t / CHUNK - first / CHUNK;
            const int last = min(min((t / CHUNK + 1) * CHUNK, stop), end);
            float base[LANE_CHANNELS], delta[LANE_CHANNELS];
            bool good = true;
#pragma unroll
            for (int i = 0; i < LANE_CHANNELS; i++) {
                const int c = channel + (i < count ? i : 0), field = k * CHANNELS + c;
                const float low = as_float(load16(anchor + at.page_low + 2 * c) << 16);
                const float scale = as_float(load16(anchor + at.page_scale + 2 * c) << 16);
                good &= fabsf(low) <= LIMIT && scale >= 0.0f && __fadd_rn(low, scale) <= TOP_LIMIT;
                const float step = step_of(scale, wide ? 65535.0f : 255.0f);
                const u32 a = wide ? load16(anchor + at.chunk_low + 2 * field) : anchor[at.chunk_low + field];
                const u32 b = wide ? load16(anchor + at.chunk_scale + 2 * field) : anchor[at.chunk_scale + field];
                base[i] = __fadd_rn(low, __fmul_rn(step, (float)a));
                const float length = __fmul_rn(step, (float)b);
                delta[i] = LYNX ? length : __fdiv_rn(length, TOP);
            }
            if (!good)
                atomicOr(&status[blockIdx.y].flags, BAD_FIELD);
            for (; t < last; t += AHEAD) {
                Row<0> rows[AHEAD];
                int place[AHEAD];
#pragma unroll
                for (int j = 0; j < AHEAD; j++) {
                    if (t + j >= last)
                        break;
                    place[j] = STREAMS > 1 ? places[t + j] : 0;
                    rows[j].planes = load_planes<bits_of_stream(0)>(
                        streams[0] + (i64)(t + j - first) * row_bytes(bits_of_stream(0)), group);
                    load_later<1>(rows[j].later, streams, anchor, fine_rows, place[j], group);
                }
#pragma unroll
                for (int j = 0; j < AHEAD; j++) {
                    if (t + j >= last)
                        break;
                    u32 low = 0, high = 0;
                    add_codes<bits_of_stream(0), shift_of_stream(0)>(rows[j].planes, low, high);
                    add_later<1>(rows[j].later, place[j], low, high);
                    float values[LANE_CHANNELS];
#pragma unroll
                    for (int i = 0; i < LANE_CHANNELS; i++) {
                        const u32 code = (i < 4 ? low : high) >> 8 * (i & 3) & 0xFFu;
                        const float p = position_of(code, place[j] < 0, coarse, full);
                        values[i] = __fadd_rn(base[i], __fmul_rn(delta[i], p));
                    }
                    store_values(pointer, row_of(view, job.start + t + j) + column, count, values);
                }
            }
            t = last;
        }
    }
}
