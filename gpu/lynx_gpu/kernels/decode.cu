// Streams to pages, in place: the first KNOWN streams of codes. A block takes 256 channels of up to 256 tokens, a lane 8
// channels, a warp 32 tokens. Blocks share what codes of a chunk are multiplied with and added to. Codes come through shared
// memory, asynchronously, from the moment on at which a block knows its page.
#include "common.cuh"
#include "pages.cuh"
#include "async.cuh"

#define WARPS 8
#define THREADS (32 * WARPS)
#define RUN 32                          // tokens of a warp
#define SLAB (WARPS * RUN)              // tokens of a block
#define TILE (32 * LANE_CHANNELS)       // channels of a block
#define SLAB_CHUNKS (SLAB % CHUNK ? SLAB / CHUNK + 2 : SLAB / CHUNK) // that it may have a part of
#define STAGE 8                         // tokens that a warp asks for at once; STAGES such parts are under way
#define FULL_LEVELS 256
#define ALL (KNOWN == STREAMS)
#define FIRST_SHIFT (shift_of_stream(0))
#define KNOWN_SHIFT (shift_of_stream(KNOWN - 1))

// Bytes of one asynchronous copy; heads are whole groups.
#define UNIT (CHANNELS % 128 == 0 ? 16 : 4)

// Bytes that a warp needs of a token's codes in the first COUNT streams.
__device__ constexpr int staged_bytes(int count)
{
    int bytes = 0;
    for (int stream = 0; stream < count; stream++)
        bytes += 32 * bits_of_stream(stream);
    return bytes;
}

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

// Row of a token in a later stream.
template <int STREAM> __device__ __forceinline__ const u8 *later_row(const Rows &rows, int place)
{
    const u8 *const first = place >= 0 ? rows.codes[STREAM] : rows.fine[STREAM];
    return first + (u32)(place >= 0 ? place : ~place) * (u32)row_bytes(bits_of_stream(STREAM));
}

template <int STREAM, int COUNT>
__device__ __forceinline__ void load_later(Row<STREAM> &row, const Rows &rows, int place, Group group)
{
    if constexpr (STREAM < COUNT) {
        row.planes = load_planes<bits_of_stream(STREAM)>(later_row<STREAM>(rows, place), group);
        load_later<STREAM + 1, COUNT>(row.later, rows, place, group);
    }
}

// A stage in shared memory holds, for each plane of each stream, STAGE rows of 32 groups. Ask for one plane of width WIDTH;
// `row_at` says where the row of a token is.
template <int WIDTH, class RowAt>
__device__ __forceinline__ void stage_plane(u8 *&to, int &skip, int lane, int groups, RowAt row_at)
{
    constexpr int units = 32 * WIDTH / UNIT;
#pragma unroll
    for (int i = 0; i < (STAGE * units + 31) / 32; i++) {
        const int number = 32 * i + lane, token = number / units, at = number % units * UNIT;
        if (token < STAGE && at < groups * WIDTH)
            copy_unit<UNIT, true>(to + number * UNIT, row_at(token) + skip + at); // blocks beside this one need the rest
    }
    to += STAGE * 32 * WIDTH;
    skip += plane_row(WIDTH);
}

// All planes of a stream for a stage. `tile` is the first group of the block, of which there are `groups`.
template <int STREAM, class RowAt>
__device__ __forceinline__ void stage_stream(u8 *to, int tile, int lane, int groups, RowAt row_at)
{
    constexpr int bits = bits_of_stream(STREAM);
    int skip = 0;
    to += STAGE * staged_bytes(STREAM);
    const auto plane_at = [&](int width) { return [=](int token) { return row_at(token) + tile * width; }; };
    if constexpr (bits == 8) {
        stage_plane<8>(to, skip, lane, groups, plane_at(8));
    } else {
        if constexpr ((bits & 4) != 0)
            stage_plane<4>(to, skip, lane, groups, plane_at(4));
        if constexpr ((bits & 2) != 0)
            stage_plane<2>(to, skip, lane, groups, plane_at(2));
        if constexpr ((bits & 1) != 0)
            stage_plane<1>(to, skip, lane, groups, plane_at(1));
    }
}

// What a lane needs of a staged token.
template <int STREAM, int COUNT>
__device__ __forceinline__ void load_staged(Row<STREAM> &row, const u8 *stage, int token, int lane)
{
    if constexpr (STREAM < COUNT) {
        constexpr int bits = bits_of_stream(STREAM);
        const u8 *from = stage + STAGE * staged_bytes(STREAM);
        if constexpr (bits == 8) {
            row.planes.eight = *(const u64 *)(from + (32 * token + lane) * 8);
        } else {
            if constexpr ((bits & 4) != 0)
                row.planes.four = *(const u32 *)(from + (32 * token + lane) * 4);
            from += (bits & 4) * STAGE * 32;
            if constexpr ((bits & 2) != 0)
                row.planes.two = *(const u16 *)(from + (32 * token + lane) * 2);
            from += (bits & 2) * STAGE * 32;
            if constexpr ((bits & 1) != 0)
                row.planes.one = from[32 * token + lane];
        }
        load_staged<STREAM + 1, COUNT>(row.later, stage, token, lane);
    }
}

// `BELOW`: the lowest of all bits becomes bit -BELOW.
template <int STREAM, int COUNT, int BELOW> __device__ __forceinline__ void add_later(const Row<STREAM> &row, u32 &even, u32 &odd)
{
    if constexpr (STREAM < COUNT) {
        add_codes<bits_of_stream(STREAM), shift_of_stream(STREAM) - BELOW>(row.planes, even, odd);
        add_later<STREAM + 1, COUNT, BELOW>(row.later, even, odd);
    }
}

// Codes of the first stream alone are looked up: they are made as multiples of 4, the size of an entry.
#define LOOKED_UP ((LYNX || POINTS_AT) && KNOWN == 1 && !ALL && bits_of_stream(0) <= 6)

// Where a code is read, of which the bits of all streams are known (WHOLE) or of KNOWN: in steps of the chunk's length, or
// of sigma.
template <bool WHOLE> __device__ __forceinline__ float position_of(u32 code, const float *coarse, const float *full)
{
    if constexpr (!WHOLE && LOOKED_UP)
        return *(const float *)((const u8 *)coarse + code);
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

// What a warp has asked for.
struct Ahead {
    u8 *stages;       // of this warp
    int tile, groups; // first group of the block, and how many there are
    int lane;

    __device__ __forceinline__ u8 *stage(int number) const
    {
        return stages + number % STAGES * STAGE * staged_bytes(KNOWN);
    }

    // Codes of the first stream; `row` is that of the run's first token.
    __device__ __forceinline__ void ask_first(const u8 *codes, int row, int number) const
    {
        const u8 *const from = codes + (i64)(row + number * STAGE) * row_bytes(bits_of_stream(0));
        stage_stream<0>(stage(number), tile, lane, groups,
                        [=](int token) { return from + token * row_bytes(bits_of_stream(0)); });
    }

    // Codes of the other streams; `places` are those of the run.
    template <int STREAM> __device__ __forceinline__ void ask_later(const Rows &rows, const int *places, int number) const
    {
        if constexpr (STREAM < KNOWN) {
            stage_stream<STREAM>(stage(number), tile, lane, groups, [=, &rows](int token) {
                return later_row<STREAM>(rows, places[number * STAGE + token]);
            });
            ask_later<STREAM + 1>(rows, places, number);
        }
    }
};

// What a block knows while it decodes.
struct Lane {
    const View &view;
    const Rows &rows;
    const float *coarse, *full;
    int start, first; // of the page in the view; coded token
    Group group;
    int count;        // channels of the group
    i64 column;

    template <bool WHOLE>
    __device__ __forceinline__ void read(float *values, u32 even, u32 odd, const float *base, const float *delta) const
    {
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            const u32 code = (i & 1 ? odd : even) >> 8 * (i / 2) & 0xFFu;
            values[i] = __fadd_rn(base[i], __fmul_rn(delta[i], position_of<WHOLE>(code, coarse, full)));
        }
    }

    template <int COUNT>
    __device__ __forceinline__ void read_row(float *values, const Row<0> &row, const float *base, const float *delta) const
    {
        constexpr bool whole = COUNT == STREAMS;
        constexpr int below = !whole && LOOKED_UP ? FIRST_SHIFT - 2 : 0;
        u32 even = 0, odd = 0;
        add_later<0, COUNT, below>(row, even, odd);
        read<whole>(values, even, odd, base, delta);
    }

    template <int COUNT> __device__ __forceinline__ Row<0> load(int token, int place) const
    {
        Row<0> row;
        row.planes = load_planes<bits_of_stream(0)>(
            rows.codes[0] + (i64)(token - first) * row_bytes(bits_of_stream(0)), group);
        load_later<1, COUNT>(row.later, rows, place, group);
        return row;
    }

    template <int COUNT>
    __device__ __forceinline__ void write(int token, const Row<0> &row, const float *base, const float *delta) const
    {
        float values[LANE_CHANNELS];
        read_row<COUNT>(values, row, base, delta);
        store_values(view.pointer, row_of(view, start + token) + column, count, values);
    }

    template <int COUNT>
    __device__ __forceinline__ void decode(int token, int place, const float *base, const float *delta) const
    {
        write<COUNT>(token, load<COUNT>(token, place), base, delta);
    }

    // One token with whatever is known of it.
    __device__ __forceinline__ void decode_token(int token, int place, const float *base, const float *delta) const
    {
        if (place < 0)
            decode<STREAMS>(token, place, base, delta);
        else
            decode<KNOWN>(token, place, base, delta);
    }

    // All tokens of a run are coded, and of one chunk. Those of `fine` are left out.
    __device__ __forceinline__ void decode_run(const Ahead &ahead, int begin, u32 fine, const int *places,
                                               const float *bases, const float *deltas) const
    {
        float base[LANE_CHANNELS], delta[LANE_CHANNELS];
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i += 4) {
            *(float4 *)(base + i) = *(const float4 *)(bases + i);
            *(float4 *)(delta + i) = *(const float4 *)(deltas + i);
        }
        u8 *to = ROWS == PAGED ? nullptr : view.pointer + ITEM * (row_of(view, start + begin) + column);
#pragma unroll 1
        for (int i = 0; i < RUN; i += STAGE) {
            wait_groups<STAGES - 1>();
            __syncwarp();
            const u8 *const stage = ahead.stage(i / STAGE);
#pragma unroll
            for (int j = 0; j < STAGE; j++) {
                Row<0> row;
                load_staged<0, KNOWN>(row, stage, j, ahead.lane);
                float values[LANE_CHANNELS];
                read_row<KNOWN>(values, row, base, delta);
                if (ROWS == PAGED)
                    to = view.pointer + ITEM * (row_of(view, start + begin + i + j) + column);
                if ((GROUPS % 32 == 0 || count) && (ALL || !(fine >> j & 1)))
                    store_group(to + (ROWS == PACKED ? j * ITEM * CHANNELS : 0), values);
                if (ROWS != PAGED && ROWS != PACKED)
                    to += ITEM * view.token_stride;
            }
            if (ROWS == PACKED)
                to += STAGE * ITEM * CHANNELS;
            fine >>= STAGE;
            __syncwarp();
            if (i + STAGES * STAGE < RUN) {
                ahead.ask_first(rows.codes[0], begin - first, i / STAGE + STAGES);
                ahead.ask_later<1>(rows, places, i / STAGE + STAGES);
            }
            close_group();
        }
    }

    __device__ __forceinline__ void decode_raw(int token, int row, const u8 *raw, bool half, u32 *flags) const
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
            atomicOr(flags, BAD_RAW);
        store_values(view.pointer, row_of(view, start + token) + column, count, values);
    }
};

#define MIN_BLOCKS 3                    // as many as lynx_gpu/variants.py allots memory for

#define QUADS (TILE / 4)                // of channels
#define FIELD_ROWS (THREADS / QUADS)    // chunks that are read at once
#define OWN_CHUNKS ((SLAB_CHUNKS + FIELD_ROWS - 1) / FIELD_ROWS)

// Four bytes, or four channels of which some are missing.
__device__ __forceinline__ u32 four_bytes(const u8 *from, const int *channels, bool words)
{
    if (words)
        return *(const u32 *)(from + channels[0]);
    u32 bytes = 0;
#pragma unroll
    for (int j = 0; j < 4; j++)
        bytes |= (channels[j] >= 0 ? (u32)from[channels[j]] : 0u) << 8 * j;
    return bytes;
}

// What codes of the block's chunks are multiplied with and added to. A thread takes four channels of some chunks. Returns
// whether theirs are fields of no page.
__device__ __forceinline__ bool read_fields(const u8 *anchor, const Sections &narrow, const Sections &at, bool wide,
                                            int first_chunk, int chunks, float *bases, float *deltas)
{
    const int thread = threadIdx.x, c = thread % QUADS * 4, row = thread / QUADS;
    int channels[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int place = blockIdx.x * TILE + c + j, head = place / PADDED, position = place % PADDED;
        channels[j] = head < HEADS && position < SIZE ? head * SIZE + position : -1;
    }
    if (channels[0] < 0)
        return false;
    const bool words = SIZE % 8 == 0 && (u64)(anchor + narrow.chunk_low) % 4 == 0;
    u32 lows[OWN_CHUNKS], lengths[OWN_CHUNKS], page_lows[4], page_scales[4];
#pragma unroll
    for (int i = 0; i < OWN_CHUNKS; i++) {
        const int chunk = first_chunk + min(row + i * FIELD_ROWS, chunks - 1);
        lows[i] = four_bytes(anchor + narrow.chunk_low + chunk * CHANNELS, channels, words);
        lengths[i] = four_bytes(anchor + narrow.chunk_scale + chunk * CHANNELS, channels, words);
    }
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        if (SIZE % 8 == 0 && (u64)(anchor + at.page_low) % 4 == 0) {
            const u32 low = *(const u32 *)(anchor + at.page_low + 2 * channels[j]);
            const u32 scale = *(const u32 *)(anchor + at.page_scale + 2 * channels[j]);
            page_lows[j] = low << 16, page_lows[j + 1] = low & 0xFFFF0000u;
            page_scales[j] = scale << 16, page_scales[j + 1] = scale & 0xFFFF0000u;
        } else {
            for (int i = j; i < j + 2; i++) {
                page_lows[i] = channels[i] < 0 ? 0 : load16(anchor + at.page_low + 2 * channels[i]) << 16;
                page_scales[i] = channels[i] < 0 ? 0 : load16(anchor + at.page_scale + 2 * channels[i]) << 16;
            }
        }
    }
    float steps[4];
    bool bad = false;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float low = as_float(page_lows[j]), scale = as_float(page_scales[j]);
        bad |= !(fabsf(low) <= LIMIT && scale >= 0.0f && __fadd_rn(low, scale) <= TOP_LIMIT);
        steps[j] = step_of(scale, wide ? 65535.0f : 255.0f);
    }
#pragma unroll
    for (int i = 0; i < OWN_CHUNKS; i++) {
        const int k = row + i * FIELD_ROWS;
        if (k >= chunks)
            break;
        float base[4], delta[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 a = lows[i] >> 8 * j & 0xFFu, b = lengths[i] >> 8 * j & 0xFFu;
            if (wide && channels[j] >= 0) {
                const int field = 2 * ((first_chunk + k) * CHANNELS + channels[j]);
                a = load16(anchor + at.chunk_low + field);
                b = load16(anchor + at.chunk_scale + field);
            }
            const float length = __fmul_rn(steps[j], (float)b);
            base[j] = __fadd_rn(as_float(page_lows[j]), __fmul_rn(steps[j], (float)a));
            delta[j] = LYNX ? length : __fdiv_rn(length, TOP);
        }
        *(float4 *)(bases + k * TILE + c) = make_float4(base[0], base[1], base[2], base[3]);
        *(float4 *)(deltas + k * TILE + c) = make_float4(delta[0], delta[1], delta[2], delta[3]);
    }
    return bad;
}

// Where the streams begin that are known, and what lies behind the codes of the first.
__device__ __forceinline__ Rows rows_of(const Job &job, const Sections &at, const u8 *piece)
{
    Rows rows;
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
        rows.codes[s] = piece + job.at[s] + (s ? 0 : at.data);
        rows.fine[s] = s ? piece + job.at[0] + at.fine_rows(job, s) : nullptr;
    }
    return rows;
}

// Whether all groups of all tokens begin at multiples of 16 bytes.
__device__ __forceinline__ bool are_aligned(const View &view)
{
    return ((u64)view.pointer | ITEM * (view.token_stride | view.head_stride | view.block_stride)) % 16 == 0;
}

// Whether known rows can be copied in units.
__device__ __forceinline__ bool are_aligned(const Rows &rows, bool fine)
{
    u64 bits = 0;
#pragma unroll
    for (int s = 0; s < KNOWN; s++)
        bits |= (u64)rows.codes[s] | (s && fine ? (u64)rows.fine[s] : 0);
    return SIZE % 8 == 0 && CHANNELS % 32 == 0 && bits % UNIT == 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    decode_pages(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                 int block_tokens, const Job *jobs, const float *full_table, const u8 *piece, u32 *flags)
{
    extern __shared__ __align__(16) u8 stages[]; // WARPS * STAGES * STAGE * staged_bytes(KNOWN)
    __shared__ float coarse[1 << (POINTS_AT ? bits_of_stream(0) : 0)];
    __shared__ float full[LYNX ? FULL_LEVELS : 1];
    __shared__ __align__(16) float bases[SLAB_CHUNKS * TILE];
    __shared__ __align__(16) float deltas[SLAB_CHUNKS * TILE];
    __shared__ int places[SLAB];
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    const Job &job = jobs[blockIdx.y];
    const u8 *const anchor = piece + job.at[0];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int first = job.raw_head, stop = job.tokens - job.raw_tail;
    const int slab = blockIdx.z * SLAB, slab_end = min(slab + SLAB, job.tokens);
    const int begin_coded = max(slab, first), end_coded = min(slab_end, stop);
    const int begin = slab + warp * RUN, end = min(begin + RUN, slab_end);
    flags += (blockIdx.y * gridDim.z + blockIdx.z) * gridDim.x + blockIdx.x; // of this block
    if (thread == 0)
        *flags = 0;
    if (slab >= job.tokens)
        return;

    // The page is taken for one with 8-bit fields until its flags are here.
    const Sections narrow(job, false);
    Rows rows = rows_of(job, narrow, piece);
    const Ahead ahead = {stages + warp * STAGES * STAGE * staged_bytes(KNOWN), (int)blockIdx.x * 32,
                         GROUPS - (int)blockIdx.x * 32, lane};
    bool whole = CHUNK % RUN == 0 && begin >= first && begin + RUN <= min(end, stop) && are_aligned(view)
                 && are_aligned(rows, narrow.fine);
    if (whole)
        for (int i = 0; i < STAGES; i++)
            ahead.ask_first(rows.codes[0], begin - first, i);
    const bool wide = anchor[FLAGS_AT] & 1, raw_half = anchor[RAW_AT];
    const Sections at(job, wide);

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
    const bool bad = chunks && read_fields(anchor, narrow, at, wide, first_chunk, chunks, bases, deltas);
    __syncthreads();
    if (bad)
        atomicOr(flags, BAD_FIELD);

    if (begin >= end)
        return;
    if (wide) {
        rows = rows_of(job, at, piece);
        if (whole) {
            close_group(); // what has been asked for must not come behind what is asked for now
            wait_groups<0>();
            __syncwarp();
            whole = are_aligned(rows, at.fine);
        }
        if (whole)
            for (int i = 0; i < STAGES; i++)
                ahead.ask_first(rows.codes[0], begin - first, i);
    }
    if (whole) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) {
            ahead.ask_later<1>(rows, places + (begin - slab), i);
            close_group();
        }
    }
    const int index = blockIdx.x * 32 + lane;
    const Group group = group_of(index);
    const int position = group.number * LANE_CHANNELS;
    const int count = index < GROUPS ? min(SIZE - position, LANE_CHANNELS) : 0;
    const Lane here = {view, rows, coarse, full, job.start, first, group, count, column_of(view, group.head, position)};
    const float *const base = bases + lane * LANE_CHANNELS, *const delta = deltas + lane * LANE_CHANNELS;
    if (whole) {
        const int k = (begin / CHUNK - first / CHUNK - first_chunk) * TILE;
        u32 fine = STREAMS > 1 && !ALL ? __ballot_sync(0xFFFFFFFFu, places[begin + lane - slab] < 0) : 0;
        Row<0> row; // of the next fine token, read early
        int t = begin + __ffs(fine) - 1;
        if (fine && count)
            row = here.load<STREAMS>(t, places[t - slab]);
        here.decode_run(ahead, begin, fine, places + (begin - slab), base + k, delta + k);
        while (fine && count) {
            here.write<STREAMS>(t, row, base + k, delta + k);
            fine &= fine - 1;
            t = begin + __ffs(fine) - 1;
            if (fine)
                row = here.load<STREAMS>(t, places[t - slab]);
        }
        return;
    }
    if (count == 0)
        return;
    for (int t = begin; t < end; t++) {
        if (t < first || t >= stop) {
            here.decode_raw(t, t < first ? t : t - stop + first, anchor + HEADER, raw_half, flags);
        } else {
            const int k = (t / CHUNK - first / CHUNK - first_chunk) * TILE;
            here.decode_token(t, STREAMS > 1 ? places[t - slab] : 0, base + k, delta + k);
        }
    }
}
