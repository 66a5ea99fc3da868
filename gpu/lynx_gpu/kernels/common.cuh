// What all kernels share: types, elements of a page, 16-bit floats, rows of bit planes. Bit-exact with lynx_codec: float32
// operations rounded one by one (compiled with --fmad=false; what is fused says so), no subnormal number flushed.
//
// A kernel is compiled for one codec and one shape of heads, so these are macros:
//   KIND             elements of the page in device memory: 0 float32, 1 bfloat16, 2 float16
//   HEADS, SIZE      heads of a page, values of a head
//   VECTOR           rows are aligned: four neighbouring elements can be read at once
//   ROWS             how tokens lie: 0 a stride apart, 1 one behind the other, 2 in blocks that a table names

#include "batch.cuh"

#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2

#define LANE_CHANNELS 8                   // a head is cut into groups of so many channels; the last may be short
#define PADDED ((SIZE + 7) / 8 * 8)
#define GROUPS (HEADS * (PADDED / 8))     // of a token
#define CHANNELS (HEADS * SIZE)

#define LIMIT 0x1p126f                    // largest magnitude that an encoder takes
#define TOP_LIMIT (0x1p126f * (1.0f + 0x1p-6f))
#define FLAT 0x1p-80f                     // a page range below this is none
#define ESCAPE_STEPS 4.0f
#define ESCAPE_TOKENS 8

#define RAW_AT 6                          // offsets in the page header
#define FLAGS_AT 7
#define TOKENS_AT 8
#define HEADS_AT 10
#define SIZE_AT 12
#define RAW_HEAD_AT 14
#define RAW_TAIL_AT 16
#define FINE_AT 24

// Keys or values of one layer (lynx_gpu/views.py); strides in elements.
struct View {
    u8 *pointer;
    i64 token_stride, head_stride, block_stride;
    const int *block_table;
    int block_tokens;
};

__device__ __forceinline__ float as_float(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 as_bits(float value) { return __float_as_uint(value); }

#define PACKED 1
#define PAGED 2
#define ITEM (KIND == FLOAT32 ? 4 : 2)

// First element of a token.
__device__ __forceinline__ i64 row_of(const View &view, int token)
{
#if ROWS == PAGED
    const int block = token / view.block_tokens;
    return view.block_table[block] * view.block_stride + (token - block * view.block_tokens) * view.token_stride;
#elif ROWS == PACKED
    return (i64)token * CHANNELS;
#else
    return token * view.token_stride;
#endif
}

// First element of a channel in any token.
__device__ __forceinline__ i64 column_of(const View &view, int head, int position)
{
    return head * (ROWS == PACKED ? SIZE : view.head_stride) + position;
}

// ---- 16-bit floats

__device__ __forceinline__ float from_half(u32 half)
{
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)half));
    return value;
#else
    const u32 shifted = (half & 0x7FFFu) << 13, sign = (half & 0x8000u) << 16;
    if (shifted >= 31u << 23)
        return as_float((shifted + (224u << 23)) | sign);
    if (shifted >= 1u << 23)
        return as_float((shifted + (112u << 23)) | sign);
    return as_float(as_bits(as_float(shifted + (113u << 23)) - as_float(113u << 23)) | sign);
#endif
}

__device__ __forceinline__ float from_bfloat16(u32 half) { return as_float(half << 16); }

// Two finite numbers to the nearest bfloat16, ties to even; the first in the lower half.
__device__ __forceinline__ u32 to_bfloat16(float low, float high)
{
#ifdef __CUDA_ARCH__
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    const u32 a = as_bits(low), b = as_bits(high);
    return ((a + 0x7FFFu + (a >> 16 & 1u)) >> 16) | ((b + 0x7FFFu + (b >> 16 & 1u)) & 0xFFFF0000u);
#endif
}

// Two finite numbers to the nearest float16, ties to even, the largest magnitude being 65504.
__device__ __forceinline__ u32 to_half(float low, float high)
{
    low = fminf(fmaxf(low, -65504.0f), 65504.0f);
    high = fminf(fmaxf(high, -65504.0f), 65504.0f);
#ifdef __CUDA_ARCH__
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    u32 both = 0;
    for (int i = 0; i < 2; i++) {
        const u32 bits = as_bits(i ? high : low), size = bits & 0x7FFFFFFFu;
        const u32 rounded = size + 0xFFFu + (size >> 13 & 1u);
        const u32 tiny = as_bits(as_float(size) + 0.5f) - 0x3F000000u;
        const u32 half = size >= 0x38800000u ? (rounded - (112u << 23)) >> 13 : tiny;
        both |= (half | (bits >> 16 & 0x8000u)) << (16 * i);
    }
    return both;
#endif
}

// ---- pairs of neighbouring channels

#if KIND == FLOAT32
struct Pair {
    float low, high;
};
#else
typedef u32 Pair;
#endif

__device__ __forceinline__ float low_of(Pair pair)
{
#if KIND == FLOAT32
    return pair.low;
#elif KIND == BFLOAT16
    return as_float(pair << 16);
#else
    return from_half(pair & 0xFFFFu);
#endif
}

__device__ __forceinline__ float high_of(Pair pair)
{
#if KIND == FLOAT32
    return pair.high;
#elif KIND == BFLOAT16
    return as_float(pair & 0xFFFF0000u);
#else
    return from_half(pair >> 16);
#endif
}

__device__ __forceinline__ Pair no_pair()
{
#if KIND == FLOAT32
    return Pair{0.0f, 0.0f};
#else
    return 0;
#endif
}

// Four neighbouring channels of a token.
struct Quad {
    Pair low, high;
};

// Elements from `at` on, those that are there.
__device__ __forceinline__ Quad load_quad(const u8 *pointer, i64 at, int there)
{
#if VECTOR && KIND == FLOAT32
    if (there == 0)
        return Quad{no_pair(), no_pair()};
    const float4 all = *(const float4 *)(pointer + 4 * at);
    return Quad{Pair{all.x, all.y}, Pair{all.z, all.w}};
#elif VECTOR
    if (there == 0)
        return Quad{0, 0};
    const uint2 all = *(const uint2 *)(pointer + 2 * at);
    return Quad{all.x, all.y};
#elif KIND == FLOAT32
    const float *from = (const float *)pointer + at;
    return Quad{Pair{there > 0 ? from[0] : 0.0f, there > 1 ? from[1] : 0.0f},
                Pair{there > 2 ? from[2] : 0.0f, there > 3 ? from[3] : 0.0f}};
#else
    const u16 *from = (const u16 *)pointer + at;
    return Quad{(there > 0 ? from[0] : 0u) | (there > 1 ? (u32)from[1] << 16 : 0u),
                (there > 2 ? from[2] : 0u) | (there > 3 ? (u32)from[3] << 16 : 0u)};
#endif
}

// The pair as it travels raw: bfloat16, or float16 if the page is float16.
__device__ __forceinline__ u32 raw_pair(Pair pair)
{
#if KIND == FLOAT32
    return to_bfloat16(pair.low, pair.high);
#else
    return pair;
#endif
}

// Bytes 2 of four numbers.
__device__ __forceinline__ u32 third_bytes(u32 a, u32 b, u32 c, u32 d)
{
    return __byte_perm(__byte_perm(a, b, 0x0062), __byte_perm(c, d, 0x0062), 0x5410);
}

// Bits of `a` where the mask has ones, else of `b`.
__device__ __forceinline__ u32 choose(u32 mask, u32 a, u32 b)
{
#ifdef __CUDA_ARCH__
    u32 chosen;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(chosen) : "r"(a), "r"(b), "r"(mask)); // one instruction, not two
    return chosen;
#else
    return (a & mask) | (b & ~mask);
#endif
}

// A byte for each of four floats: 0xFF if its sign is set, else 0.
__device__ __forceinline__ u32 sign_bytes(float a, float b, float c, float d)
{
#ifdef __CUDA_ARCH__
    u32 first, second;
    asm("prmt.b32 %0, %1, %2, 0x00FB;" : "=r"(first) : "r"(as_bits(a)), "r"(as_bits(b)));
    asm("prmt.b32 %0, %1, %2, 0x00FB;" : "=r"(second) : "r"(as_bits(c)), "r"(as_bits(d)));
    return __byte_perm(first, second, 0x5410);
#else
    return (as_bits(a) >> 31) * 0xFFu | (as_bits(b) >> 31) * 0xFF00u | (as_bits(c) >> 31) * 0xFF0000u
           | (as_bits(d) >> 31) * 0xFF000000u;
#endif
}

#ifdef __CUDA_ARCH__
#define ASSUME(fact) __builtin_assume(fact)
#else
#define ASSUME(fact)
#endif

// Correctly rounded, of a number that is far from subnormal, as its reciprocal is: __frcp_rn without its check for others.
__device__ __forceinline__ float reciprocal(float value)
{
#ifdef __CUDA_ARCH__
    float guess;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(value));
    return __fmaf_rn(guess, -__fmaf_rn(value, guess, -1.0f), guess);
#else
    return 1.0f / value;
#endif
}

// About the logarithm (lynx_gpu/variants.py).
__device__ __forceinline__ float log2_of(float value)
{
#ifdef __CUDA_ARCH__
    float logarithm;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(value));
    return logarithm;
#else
    return emulated_lg2(value);
#endif
}

// Two whole numbers, cut off at 0 and 255, as the lower bytes of a word with `above` over them.
__device__ __forceinline__ u32 pack_saturated(int first, int second, u32 above)
{
#ifdef __CUDA_ARCH__
    u32 packed;
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(packed) : "r"(second), "r"(first), "r"(above));
    return packed;
#else
    const u32 a = (u32)min(max(first, 0), 255), b = (u32)min(max(second, 0), 255);
    return a | b << 8 | above << 16;
#endif
}

// The larger (MOST) or smaller of two pairs, channel by channel; NaN if either is one.
template <bool MOST> __device__ __forceinline__ Pair extreme(Pair a, Pair b)
{
#if defined(__CUDA_ARCH__) && KIND == FLOAT32
    Pair c;
    if constexpr (MOST) {
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(c.low) : "f"(a.low), "f"(b.low));
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(c.high) : "f"(a.high), "f"(b.high));
    } else {
        asm("min.NaN.f32 %0, %1, %2;" : "=f"(c.low) : "f"(a.low), "f"(b.low));
        asm("min.NaN.f32 %0, %1, %2;" : "=f"(c.high) : "f"(a.high), "f"(b.high));
    }
    return c;
#elif defined(__CUDA_ARCH__)
    u32 c;
    if constexpr (MOST && KIND == BFLOAT16)
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else if constexpr (MOST)
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else if constexpr (KIND == BFLOAT16)
        asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else
        asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
#else
    const auto is_first = [](float x, float y) { return y == y && !(MOST ? x <= y : x >= y); };
    const bool low = is_first(low_of(a), low_of(b)), high = is_first(high_of(a), high_of(b));
#if KIND == FLOAT32
    return Pair{low ? a.low : b.low, high ? a.high : b.high};
#else
    return ((low ? a : b) & 0xFFFFu) | ((high ? a : b) & 0xFFFF0000u);
#endif
#endif
}

__device__ __forceinline__ Pair without_signs(Pair pair)
{
#if KIND == FLOAT32
    return Pair{fabsf(pair.low), fabsf(pair.high)};
#else
    return pair & 0x7FFF7FFFu;
#endif
}

// The largest magnitudes of even and of odd channels; NaN if there is one.
__device__ __forceinline__ Pair magnitude_of(Quad a, Quad b)
{
    return extreme<true>(extreme<true>(without_signs(a.low), without_signs(a.high)),
                         extreme<true>(without_signs(b.low), without_signs(b.high)));
}

// Infinity in both channels, of either sign.
__device__ __forceinline__ Pair infinite_pair(bool negative)
{
#if KIND == FLOAT32
    const float value = as_float(negative ? 0xFF800000u : 0x7F800000u);
    return Pair{value, value};
#elif KIND == BFLOAT16
    return negative ? 0xFF80FF80u : 0x7F807F80u;
#else
    return negative ? 0xFC00FC00u : 0x7C007C00u;
#endif
}

__device__ __forceinline__ bool allowed(float value) { return value >= -LIMIT && value <= LIMIT; }

__device__ __forceinline__ bool allowed(Pair pair) { return allowed(low_of(pair)) && allowed(high_of(pair)); }

// Remember the first value of the page that an encoder refuses.
__device__ __forceinline__ void refuse(Status *status, int token, int channel, float value)
{
    const u32 position = (u32)token * CHANNELS + channel;
    atomicMax(&status->bad, (u64)~position << 32 | as_bits(value));
}

// Refuse what must be of the first channels that are there.
__device__ __forceinline__ void refuse_quad(Status *status, int token, int channel, int there, Quad quad)
{
    const Pair least = extreme<false>(quad.low, quad.high), most = extreme<true>(quad.low, quad.high);
    if (allowed(least) && allowed(most))
        return;
    const float values[4] = {low_of(quad.low), high_of(quad.low), low_of(quad.high), high_of(quad.high)};
    for (int i = 3; i >= 0; i--)
        if (i < there && !allowed(values[i]))
            refuse(status, token, channel + i, values[i]);
}

// The page header: what is the same for all pages of the codec, and what this page is.
__device__ __forceinline__ void write_header(u8 *to, const u8 *header, int bytes, const Job &job, bool wide, int threads)
{
    for (int i = threadIdx.x; i < bytes; i += threads) {
        u32 byte = header[i];
        if (i == RAW_AT)
            byte = KIND == FLOAT16;
        else if (i == FLAGS_AT)
            byte = wide;
        else if (i >= TOKENS_AT && i < TOKENS_AT + 2)
            byte = (u32)job.tokens >> 8 * (i - TOKENS_AT);
        else if (i >= HEADS_AT && i < HEADS_AT + 2)
            byte = (u32)HEADS >> 8 * (i - HEADS_AT);
        else if (i >= SIZE_AT && i < SIZE_AT + 2)
            byte = (u32)SIZE >> 8 * (i - SIZE_AT);
        else if (i >= RAW_HEAD_AT && i < RAW_HEAD_AT + 2)
            byte = (u32)job.raw_head >> 8 * (i - RAW_HEAD_AT);
        else if (i >= RAW_TAIL_AT && i < RAW_TAIL_AT + 2)
            byte = (u32)job.raw_tail >> 8 * (i - RAW_TAIL_AT);
        else if (i >= FINE_AT && i < FINE_AT + 2)
            byte = (u32)job.fine >> 8 * (i - FINE_AT);
        to[i] = (u8)byte;
    }
}

// ---- rows of codes: groups of 8 channels, one code a byte (lower channels in `low`), cut into bit planes

__host__ __device__ constexpr int plane_row(int width) { return HEADS * ((SIZE * width + 7) / 8); }

__host__ __device__ constexpr int row_bytes(int bits)
{
    return bits == 8 ? plane_row(8)
                     : (bits & 4 ? plane_row(4) : 0) + (bits & 2 ? plane_row(2) : 0) + (bits & 1 ? plane_row(1) : 0);
}

struct Group {
    int head, number; // of the group inside its head
};

__device__ __forceinline__ Group group_of(int index) { return Group{index / (PADDED / 8), index % (PADDED / 8)}; }

// Where a plane of a group lies in a row of that plane, and how many of its WIDTH bytes there are.
template <int WIDTH> __device__ __forceinline__ int plane_at(Group group)
{
    return group.head * ((SIZE * WIDTH + 7) / 8) + group.number * WIDTH;
}

template <int WIDTH> __device__ __forceinline__ int plane_bytes(Group group)
{
    const int left = (SIZE * WIDTH + 7) / 8 - group.number * WIDTH;
    return SIZE % 8 == 0 || left > WIDTH ? WIDTH : left;
}

// ALIGNED: rows and their planes are known to begin at multiples of 4, heads to be whole groups.
template <int WIDTH, bool ALIGNED> __device__ __forceinline__ void store_plane(u8 *row, Group group, u64 bits)
{
    u8 *to = row + plane_at<WIDTH>(group);
    const int count = ALIGNED ? WIDTH : plane_bytes<WIDTH>(group);
    if (ALIGNED || (count == WIDTH && ((u64)to & (WIDTH - 1)) == 0)) {
        if constexpr (WIDTH == 8)
            *(uint2 *)to = make_uint2((u32)bits, (u32)(bits >> 32));
        else if constexpr (WIDTH == 4)
            *(u32 *)to = (u32)bits;
        else if constexpr (WIDTH == 2)
            *(u16 *)to = (u16)bits;
        else
            *to = (u8)bits;
    } else {
        for (int i = 0; i < count; i++)
            to[i] = (u8)(bits >> (8 * i));
    }
}

template <int WIDTH> __device__ __forceinline__ u64 load_plane(const u8 *row, Group group)
{
    const u8 *from = row + plane_at<WIDTH>(group);
    const int count = plane_bytes<WIDTH>(group);
    if (count == WIDTH && ((u64)from & (WIDTH - 1)) == 0) {
        if constexpr (WIDTH == 8)
            return *(const u64 *)from;
        else if constexpr (WIDTH == 4)
            return *(const u32 *)from;
        else if constexpr (WIDTH == 2)
            return *(const u16 *)from;
        else
            return *from;
    }
    u64 bits = 0;
    for (int i = 0; i < count; i++)
        bits |= (u64)from[i] << (8 * i);
    return bits;
}

__device__ __forceinline__ u32 pack4(u32 codes)
{
    codes &= 0x0F0F0F0Fu;
    return codes | codes >> 4; // bytes 0 and 2
}

__device__ __forceinline__ u32 pack2(u32 codes)
{
    codes &= 0x03030303u;
    codes |= codes >> 6;
    return (codes | codes >> 12) & 0xFFu;
}

__device__ __forceinline__ u32 pack1(u32 codes)
{
    codes &= 0x01010101u;
    codes |= codes >> 7;
    return (codes | codes >> 14) & 0x0Fu;
}

// The BITS bits above bit SHIFT of 8 codes into their places in a row.
template <int BITS, int SHIFT, bool ALIGNED>
__device__ __forceinline__ void store_codes(u8 *row, Group group, u32 low, u32 high)
{
    if constexpr (BITS == 8) {
        store_plane<8, ALIGNED>(row, group, low | (u64)high << 32);
        return;
    }
    if constexpr ((BITS & 4) != 0) {
        const int shift = SHIFT + (BITS & 3);
        store_plane<4, ALIGNED>(row, group, __byte_perm(pack4(low >> shift), pack4(high >> shift), 0x6420));
        row += plane_row(4);
    }
    if constexpr ((BITS & 2) != 0) {
        const int shift = SHIFT + (BITS & 1);
        store_plane<2, ALIGNED>(row, group, pack2(low >> shift) | pack2(high >> shift) << 8);
        row += plane_row(2);
    }
    if constexpr ((BITS & 1) != 0)
        store_plane<1, ALIGNED>(row, group, pack1(low >> SHIFT) | pack1(high >> SHIFT) << 4);
}

// Planes as they lie in memory: read early, taken apart later.
template <int BITS> struct Planes {
    u64 eight;
    u32 four, two, one;
};

template <int BITS> __device__ __forceinline__ Planes<BITS> load_planes(const u8 *row, Group group)
{
    Planes<BITS> planes;
    if constexpr (BITS == 8) {
        planes.eight = load_plane<8>(row, group);
        return planes;
    }
    if constexpr ((BITS & 4) != 0) {
        planes.four = (u32)load_plane<4>(row, group);
        row += plane_row(4);
    }
    if constexpr ((BITS & 2) != 0) {
        planes.two = (u32)load_plane<2>(row, group);
        row += plane_row(2);
    }
    if constexpr ((BITS & 1) != 0)
        planes.one = (u32)load_plane<1>(row, group);
    return planes;
}

// Bits to the left, or to the right.
template <int BY> __device__ __forceinline__ u32 shifted(u32 bits) { return BY >= 0 ? bits << (BY & 31) : bits >> (-BY & 31); }

// Adds what the planes hold to 8 codes that have none of these bits, a byte each: those of channels 0, 2, 4, 6 in `even`,
// of the others in `odd`. The lowest bit of the planes becomes bit SHIFT.
template <int BITS, int SHIFT> __device__ __forceinline__ void add_codes(const Planes<BITS> &planes, u32 &even, u32 &odd)
{
    if constexpr (BITS == 8) {
        even = __byte_perm((u32)planes.eight, (u32)(planes.eight >> 32), 0x6420);
        odd = __byte_perm((u32)planes.eight, (u32)(planes.eight >> 32), 0x7531);
        return;
    }
    if constexpr ((BITS & 4) != 0) {
        constexpr int shift = SHIFT + (BITS & 3);
        even |= shifted<shift>(planes.four) & 0x0F0F0F0Fu << shift;
        odd |= shifted<shift - 4>(planes.four) & 0x0F0F0F0Fu << shift;
    }
    if constexpr ((BITS & 2) != 0) {
        constexpr int shift = SHIFT + (BITS & 1);
        // A nibble selects a byte that holds its two bits in their place.
        constexpr u32 table = (0x03020100u & 0x03030303u) << shift;
        even |= __byte_perm(table, 0, planes.two & 0x3333u);
        odd |= __byte_perm(table, 0, planes.two >> 2 & 0x3333u);
    }
    if constexpr ((BITS & 1) != 0) {
        // Copies 6 bits apart: bit 2 k of the first 8 comes to be the lowest of byte k; what meets does not reach there.
        even |= (planes.one & 0x55u) * (0x00041041u << SHIFT) & 0x01010101u << SHIFT;
        if constexpr (SHIFT > 0)
            odd |= (planes.one & 0xAAu) * (0x00041041u << (SHIFT - 1)) & 0x01010101u << SHIFT;
        else
            odd |= (planes.one >> 1 & 0x55u) * 0x00041041u & 0x01010101u;
    }
}

// 8 channels of a token at a multiple of 16 bytes, past the cache.
__device__ __forceinline__ void store_group(u8 *to, const float *values)
{
#if KIND == FLOAT32
    __stcs((float4 *)to, make_float4(values[0], values[1], values[2], values[3]));
    __stcs((float4 *)to + 1, make_float4(values[4], values[5], values[6], values[7]));
#else
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        pairs[i] = KIND == BFLOAT16 ? to_bfloat16(values[2 * i], values[2 * i + 1])
                                    : to_half(values[2 * i], values[2 * i + 1]);
    __stcs((uint4 *)to, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
#endif
}

// 8 channels of a token, as many as there are.
__device__ __forceinline__ void store_values(u8 *pointer, i64 at, int count, const float *values)
{
    u8 *const to = pointer + ITEM * at;
    if (count == LANE_CHANNELS && ((u64)to & 15) == 0) {
        store_group(to, values);
        return;
    }
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++)
        if (i < count) {
#if KIND == FLOAT32
            ((float *)to)[i] = values[i];
#else
            ((u16 *)to)[i] = (u16)(KIND == BFLOAT16 ? to_bfloat16(values[i], 0.0f) : to_half(values[i], 0.0f));
#endif
        }
}
