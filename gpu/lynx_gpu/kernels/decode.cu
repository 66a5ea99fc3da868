// Streams to pages, in place: the first KNOWN streams of codes. A block takes 256 channels of up to 256 tokens, a lane 8
// channels, a warp 32 tokens. Blocks share what codes of a chunk are multiplied with and added to.
#include "common.cuh"
#include "pages.cuh"

#define WARPS 8
#define THREADS (32 * WARPS)
#define RUN 32                          // tokens of a warp
#define SLAB (WARPS * RUN)              // tokens of a block
#define TILE (32 * LANE_CHANNELS)       // channels of a block
#define SLAB_CHUNKS (SLAB / CHUNK + 2)  // that it may have a part of
#define AHEAD 8                         // tokens whose bytes are read before the first of them is used
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

// Where the rows of each stream begin, and those of its fine tokens.
struct Rows {
    const u8 *codes[STREAMS], *fine[STREAMS];
};

template <int STREAM, int COUNT, bool ALIGNED>
__device__ __forceinline__ void load_later(Row<STREAM> &row, const Rows &rows, int place, Group group)
{
    if constexpr (STREAM < COUNT) {
        constexpr int bits = bits_of_stream(STREAM);
        const u8 *const first = place >= 0 ? rows.codes[STREAM] : rows.fine[STREAM];
        const u8 *const from = first + (u32)(place >= 0 ? place : ~place) * (u32)row_bytes(bits);
        row.planes = load_planes<bits, ALIGNED>(from, group);
        load_later<STREAM + 1, COUNT, ALIGNED>(row.later, rows, place, group);
    }
}

template <int STREAM, int COUNT> __device__ __forceinline__ void add_later(const Row<STREAM> &row, u32 &low, u32 &high)
{
    if constexpr (STREAM < COUNT) {
        add_codes<bits_of_stream(STREAM), shift_of_stream(STREAM)>(row.planes, low, high);
        add_later<STREAM + 1, COUNT>(row.later, low, high);
    }
}

// Where a code is read, of which the bits of all streams are known (WHOLE) or of KNOWN: in steps of the chunk's length, or
// of sigma.
template <bool WHOLE> __device__ __forceinline__ float position_of(u32 code, const float *coarse, const float *full)
{
#if LYNX
    return WHOLE ? full[code] : coarse[code >> FIRST_SHIFT];
#else
    if (WHOLE)
        return (float)code;
#if POINTS_AT && KNOWN == 1
    return coarse[code >> FIRST_SHIFT];
#else
    return __fadd_rn((float)code, ((1 << KNOWN_SHIFT) - 1) / 2.0f);
#endif
#endif
}

// What a block knows while it decodes.
struct Lane {
    const View &view;
    const Job &job;
    const Rows &rows;
    const float *coarse, *full;
    int first;        // coded token
    Group group;
    int count;        // channels of the group
    i64 column;

    template <bool WHOLE>
    __device__ __forceinline__ void store(int token, u32 low, u32 high, const float *base, const float *delta) const
    {
        float values[LANE_CHANNELS];
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            const u32 code = (i < 4 ? low : high) >> 8 * (i & 3) & 0xFFu;
            values[i] = __fadd_rn(base[i], __fmul_rn(delta[i], position_of<WHOLE>(code, coarse, full)));
        }
        store_values(view.pointer, row_of(view, job.start + token) + column, count, values);
    }

    template <int COUNT>
    __device__ __forceinline__ void decode(int token, int place, const float *base, const float *delta) const
    {
        Row<0> row;
        u32 low = 0, high = 0;
        row.planes = load_planes<bits_of_stream(0), false>(
            rows.codes[0] + (i64)(token - first) * row_bytes(bits_of_stream(0)), group);
        load_later<1, COUNT, false>(row.later, rows, place, group);
        add_codes<bits_of_stream(0), shift_of_stream(0)>(row.planes, low, high);
        add_later<1, COUNT>(row.later, low, high);
        store<COUNT == STREAMS>(token, low, high, base, delta);
    }

    // One token with whatever is known of it.
    __device__ __forceinline__ void decode_token(int token, int place, const float *base, const float *delta) const
    {
        if (place < 0)
            decode<STREAMS>(token, place, base, delta);
        else
            decode<KNOWN>(token, place, base, delta);
    }

    // All tokens of a run are coded, and of one chunk; `places` are those of the run. If some are fine, the bits that only
    // these have are not looked at.
    __device__ __forceinline__ void decode_run(int begin, const int *places, const float *base, const float *delta) const
    {
        const u8 *const codes = rows.codes[0] + (i64)(begin - first) * row_bytes(bits_of_stream(0));
        for (int i = 0; i < RUN; i += AHEAD) {
            Row<0> ahead[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                ahead[j].planes = load_planes<bits_of_stream(0), true>(codes + (i + j) * row_bytes(bits_of_stream(0)), group);
                load_later<1, KNOWN, true>(ahead[j].later, rows, KNOWN > 1 ? places[i + j] : 0, group);
            }
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                u32 low = 0, high = 0;
                add_codes<bits_of_stream(0), shift_of_stream(0)>(ahead[j].planes, low, high);
                add_later<1, KNOWN>(ahead[j].later, low, high);
                store<ALL>(begin + i + j, low, high, base, delta);
            }
        }
    }

    __device__ __forceinline__ void decode_raw(int token, int row, const u8 *raw, bool half, Status *status) const
    {
        const u8 *const from = raw + 2 * (row * CHANNELS + group.head * SIZE + group.number * LANE_CHANNELS);
        float values[LANE_CHANNELS];
        bool finite = true;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            const u32 bits = i < count ? load16(from + 2 * i) : 0;
            values[i] = half ? from_half(bits) : from_bfloat16(bits);
            finite &= (as_bits(values[i]) & 0x7FFFFFFFu) < 0x7F800000u;
        }
        if (!finite)
            atomicOr(&status->flags, BAD_RAW);
        store_values(view.pointer, row_of(view, job.start + token) + column, count, values);
    }
};

#ifndef MIN_BLOCKS
#define MIN_BLOCKS (KIND == FLOAT32 ? 3 : 4)
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    decode_pages(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                 int block_tokens, const Job *jobs, const float *full_table, const u8 *piece, Status *status)
{
    __shared__ float coarse[1 << (POINTS_AT ? bits_of_stream(0) : 0)];
    __shared__ float full[LYNX ? FULL_LEVELS : 1];
    __shared__ __align__(16) float bases[SLAB_CHUNKS * TILE];
    __shared__ __align__(16) float deltas[SLAB_CHUNKS * TILE];
    __shared__ int places[SLAB];
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    const Job &job = jobs[blockIdx.y];
    const u8 *const anchor = piece + job.at[0];
    const bool wide = anchor[FLAGS_AT] & 1, raw_half = anchor[RAW_AT];
    const Sections at(job, wide);
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int first = job.raw_head, stop = job.tokens - job.raw_tail;
    const int slab = blockIdx.z * SLAB, slab_end = min(slab + SLAB, job.tokens);
    const int begin_coded = max(slab, first), end_coded = min(slab_end, stop);
    if (slab >= job.tokens)
        return;

    if (POINTS_AT && KNOWN == 1)
        for (int i = thread; i < 1 << bits_of_stream(0); i += THREADS)
            coarse[i] = from_half(load16(anchor + POINTS_AT + 2 * i));
    if (LYNX)
        for (int i = thread; i < FULL_LEVELS; i += THREADS)
            full[i] = full_table[i];
    if (STREAMS > 1) {
        const Unaligned *const positions = (const Unaligned *)(anchor + at.positions);
        for (int t = begin_coded + thread; t < end_coded; t += THREADS)
            places[t - slab] = place_of(positions, at.fine, t, first);
    }
    const int first_chunk = begin_coded < end_coded ? begin_coded / CHUNK - first / CHUNK : 0;
    const int chunks = begin_coded < end_coded ? (end_coded - 1) / CHUNK - first / CHUNK - first_chunk + 1 : 0;
    {
        const int index = blockIdx.x * TILE + thread, head = index / PADDED, position = index % PADDED;
        if (head < HEADS && position < SIZE && chunks) {
            const int channel = head * SIZE + position;
            const float low = as_float(load16(anchor + at.page_low + 2 * channel) << 16);
            const float scale = as_float(load16(anchor + at.page_scale + 2 * channel) << 16);
            if (!(fabsf(low) <= LIMIT && scale >= 0.0f && __fadd_rn(low, scale) <= TOP_LIMIT))
                atomicOr(&status[blockIdx.y].flags, BAD_FIELD);
            const float step = step_of(scale, wide ? 65535.0f : 255.0f);
            for (int k = 0; k < chunks; k++) {
                const int field = (first_chunk + k) * CHANNELS + channel;
                const u32 a = wide ? load16(anchor + at.chunk_low + 2 * field) : anchor[at.chunk_low + field];
                const u32 b = wide ? load16(anchor + at.chunk_scale + 2 * field) : anchor[at.chunk_scale + field];
                const float length = __fmul_rn(step, (float)b);
                bases[k * TILE + thread] = __fadd_rn(low, __fmul_rn(step, (float)a));
                deltas[k * TILE + thread] = LYNX ? length : __fdiv_rn(length, TOP);
            }
        }
    }
    __syncthreads();

    const int begin = slab + warp * RUN, end = min(begin + RUN, slab_end);
    if (begin >= end)
        return;
    const bool is_fine = STREAMS > 1 && !ALL && begin + lane >= first && begin + lane < min(end, stop)
                         && places[begin + lane - slab] < 0;
    u32 fine = __ballot_sync(0xFFFFFFFFu, is_fine);
    const int index = blockIdx.x * 32 + lane;
    if (index >= GROUPS)
        return;
    Rows rows;
    u64 lowest_bits = 0;
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
        rows.codes[s] = s ? (s < KNOWN ? piece + job.at[s] : nullptr) : anchor + at.data;
        rows.fine[s] = s ? anchor + at.fine_rows(job, s) : nullptr;
        if (s < KNOWN)
            lowest_bits |= (u64)rows.codes[s] | (s && at.fine ? (u64)rows.fine[s] : 0);
    }
    const Group group = group_of(index);
    const int position = group.number * LANE_CHANNELS;
    const Lane here = {view, job, rows, coarse, full, first, group, min(SIZE - position, LANE_CHANNELS),
                       column_of(view, group.head, position)};
    const bool aligned = SIZE % 8 == 0 && CHANNELS % 32 == 0 && lowest_bits % (bits_of_stream(0) == 8 ? 8 : 4) == 0;
    const float *const base = bases + lane * LANE_CHANNELS, *const delta = deltas + lane * LANE_CHANNELS;
    if (CHUNK % RUN == 0 && aligned && begin >= first && begin + RUN <= min(end, stop)) {
        const int k = (begin / CHUNK - first / CHUNK - first_chunk) * TILE;
        float own_base[LANE_CHANNELS], own_delta[LANE_CHANNELS];
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i += 4) {
            *(float4 *)(own_base + i) = *(const float4 *)(base + k + i);
            *(float4 *)(own_delta + i) = *(const float4 *)(delta + k + i);
        }
        here.decode_run(begin, places + (begin - slab), own_base, own_delta);
        for (; fine; fine &= fine - 1) {
            const int t = begin + __ffs(fine) - 1;
            here.decode<STREAMS>(t, places[t - slab], base + k, delta + k);
        }
        return;
    }
    for (int t = begin; t < end; t++) {
        if (t < first || t >= stop) {
            here.decode_raw(t, t < first ? t : t - stop + first, anchor + HEADER, raw_half, &status[blockIdx.y]);
        } else {
            const int k = (t / CHUNK - first / CHUNK - first_chunk) * TILE;
            here.decode_token(t, STREAMS > 1 ? places[t - slab] : 0, base + k, delta + k);
        }
    }
}
