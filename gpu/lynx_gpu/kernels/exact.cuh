// What exact_encode.cu and exact_decode.cu share: the exact stream (docs/codec.md) of pages whose other streams are there.
//
// A warp takes 256 channels of 8 tokens of a chunk: a lane has one group of 8 channels, computes their cells, and the warp
// agrees on the places of their bits. Where the bits of each token begin depends on all tokens before it: one block a page
// finds that, between two such passes. Pages have scratch memory of their own, `scratch_stride` bytes apart (lynx_gpu/exact.py).
#include "common.cuh"
#include "pages.cuh"

#define WARPS 4
#define PART 8                             // tokens that a warp takes
#define PARTS ((CHUNK + PART - 1) / PART) // of a chunk
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
        start = chunk_start + part * PART;
        stop = min(end, start + PART);
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
