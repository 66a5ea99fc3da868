// Exact streams from pages, behind the kernels of the other streams: sizes, then places, then bits. The piece must be
// device memory, and an exact stream begin at a multiple of 8 bytes and have room up to one. Pages are not float32.
#include "exact.cuh"

// 16 bits of 8 channels of a token, as many as there are.
struct Patterns {
    u32 words[4];
    __device__ __forceinline__ u32 operator[](int i) const { return words[i >> 1] >> (16 * (i & 1)) & 0xFFFFu; }
};

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
    const i64 at = row_of(view, job.start + token) + column_of(view, group.head, group.number * LANE_CHANNELS);
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
    Patterns row, next = load_patterns(view, job, place.start, index, fields.count);
    for (int t = place.start; t < place.stop; t++) {
        row = next;
        next = load_patterns(view, job, t + 1, index, t + 1 < place.stop ? fields.count : 0);
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
    Patterns row, next = load_patterns(view, job, place.start, index, fields.count);
    for (int t = place.start; t < place.stop; t++) {
        row = next;
        next = load_patterns(view, job, t + 1, index, t + 1 < place.stop ? fields.count : 0);
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
