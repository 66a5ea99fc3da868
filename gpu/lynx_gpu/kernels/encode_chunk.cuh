// Four channels of a chunk: extremes, sums, fields, and codes.

#if LYNX
#define CELLS ((1 << CELL_BITS) + 1)
#define COPIES (CELL_BITS <= 8 ? 8 : 1) // of the search table: fewer reads of a warp meet in a bank
#define UNIT ((float)(1 << CELL_BITS))   // magnitudes are counted in cells of sigma
#else
#define CELLS 1
#define COPIES 1
#define LOG_START 0
#define LOG_SCALE 0
#define LOG_BASE 0
#define LOG_UNIT 0
#define DOUBT 1
#define QUICK_LEVELS 0
#endif
#define EXCESS 1.0004f     // a deviation may be so much of sigma before it must be cut off
#define LARGE 0x1p100f     // of up to so much, reciprocals in other units lose no bits
#define SAFE_SUM 0x1p122f  // up to here the sum of a chunk does not overflow

// What extremes are kept as while runs agree on them by atomics: integers of the same order.
typedef int Extreme;
__device__ __forceinline__ int ordered(float value)
{
    const int bits = (int)as_bits(value);
    return bits >= 0 ? bits : bits ^ 0x7FFFFFFF;
}

__device__ __forceinline__ float unordered(int order) { return as_float((u32)(order >= 0 ? order : order ^ 0x7FFFFFFF)); }

#if LYNX
static_assert(CHUNK == RUN); // a warp knows all of a chunk
#endif

// A whole number from 0 to 65535.
struct Whole {
    float value;
    u32 bits; // the lower 16 are the number
};

// The next whole number below (DOWN) or above one that is cut off at 0 and `top`.
template <bool DOWN> __device__ __forceinline__ Whole whole_of(float number, float top)
{
    constexpr float shift = 0x1p23f; // what is added to it has no fraction
    const float cut = fminf(fmaxf(number, 0.0f), top);
    const float sum = DOWN ? __fmaf_rd(cut, 1.0f, shift) : __fmaf_ru(cut, 1.0f, shift);
    return Whole{sum - shift, as_bits(sum)};
}

// The search table of `lynx`, in shared memory: what a magnitude must be added to, so that byte 2 of the sum, rounded down,
// is its level and 7 more (lynx_gpu/variants.py).
struct Cells {
    static constexpr u32 WHOLE = 0x4B000000u; // 2^23: added to a magnitude it leaves whole cells in the lowest bits
#ifdef __CUDA_ARCH__
    u32 first; // address of this lane's entry for no cells, less what WHOLE adds to it

    __device__ __forceinline__ Cells(const float *table, int lane)
        : first((u32)__cvta_generic_to_shared(table + lane % COPIES) - WHOLE * (4u * COPIES))
    {
    }

    __device__ __forceinline__ float entry(u32 whole) const
    {
        float entry;
        asm("ld.shared.f32 %0, [%1];" : "=f"(entry) : "r"(whole * (4u * COPIES) + first));
        return entry;
    }
#else
    const float *first;

    __device__ Cells(const float *table, int lane) : first(table + lane % COPIES) {}

    __device__ float entry(u32 whole) const { return first[(whole - WHOLE) * COPIES]; }
#endif

    // Byte 2 is the level of a magnitude, which is a product that is not rounded, and 7 more. CUT: it may be above UNIT.
    template <bool CUT> __device__ __forceinline__ u32 level(float size, float per_unit) const
    {
        u32 whole = as_bits(__fmaf_rz(size, per_unit, as_float(WHOLE)));
        if (CUT)
            whole = min(whole, WHOLE + CELLS - 1);
        const float sum = __fmaf_rd(size, per_unit, entry(whole));
        return as_bits(CUT ? fminf(sum, 255.0f) : sum);
    }

    // The same by a logarithm, of a magnitude counted in other units. Where the lower 16 bits are less than DOUBT, byte 2 may be
    // one too many (lynx_gpu/variants.py).
    static __device__ __forceinline__ u32 quick_level(float size, float per_unit)
    {
        const float logarithm = log2_of(__fmaf_rn(size, per_unit, as_float(LOG_START)));
        return as_bits(__fmaf_rn(logarithm, as_float(LOG_SCALE), as_float(LOG_BASE)));
    }
};

// Whether codes are those of two streams that have a way of their own into rows: 4 and 4 bits, or 3 and 5.
__device__ constexpr bool paired(int first, int second)
{
    return STREAMS == 2 && bits_of_stream(0) == first && bits_of_stream(STREAMS - 1) == second;
}

// In these, and where rows are aligned, codes of even channels and of odd ones lie together.
__device__ constexpr bool even_first(bool aligned)
{
    return aligned && (paired(4, 4) || paired(3, 5) || (STREAMS == 1 && bits_of_stream(0) == 4));
}

// Whether the first stream is one plane, of codes of 4 bits.
__device__ constexpr bool first_is_nibbles() { return even_first(true) && bits_of_stream(0) == 4; }

// The address itself, and not what it was computed from.
__device__ __forceinline__ u8 *opaque(u8 *address)
{
#ifdef __CUDA_ARCH__
    asm("" : "+l"(address));
#endif
    return address;
}

// A number likewise.
__device__ __forceinline__ float opaque(float value)
{
#ifdef __CUDA_ARCH__
    asm volatile("" : "+f"(value));
#endif
    return value;
}

#define RESIDUAL_FLIP (LYNX ? 0x07070707u : 0u) // 7 - level, modulo 16, is level ^ 7

// A number of each channel of a lane.
struct Four {
    float of[4];
};

__device__ __forceinline__ Four four_of(Quad quad)
{
    return Four{{low_of(quad.low), high_of(quad.low), low_of(quad.high), high_of(quad.high)}};
}

__device__ __forceinline__ Four four_of(const float *shared)
{
    const float4 all = *(const float4 *)shared;
    return Four{{all.x, all.y, all.z, all.w}};
}

// What the codes of a group of 8 channels of a chunk are made with; of `lynx`, with the base negated.
struct Units {
    float base[8], per_unit[8];
};

// Codes of a group of a token, a byte each, but for RESIDUAL_FLIP.
struct Codes {
    u32 first, second; // of channels 0 to 3 and 4 to 7, or of even and of odd ones
    u32 least;         // QUICK: of what may be doubtful in a level, in either half
};

__device__ __forceinline__ bool is_doubtful(u32 least) { return (least & 0xFFFFu) < DOUBT || least < (u32)DOUBT << 16; }

// CUT: values may lie outside of what the chunk's fields span. QUICK: codes may be doubtful; units are those of `quick_level`.
enum Way { CUT, EXACT, QUICK };

template <Way WAY, bool EVEN_FIRST>
__device__ __forceinline__ Codes codes_of(Quad low, Quad high, const Units &units, const Cells &cells)
{
    constexpr int step = EVEN_FIRST ? 2 : 1, other = EVEN_FIRST ? 1 : 4;
    const Four lower = four_of(low), upper = four_of(high);
    u32 codes[2], least = 0xFFFFFFFFu;
#if LYNX
    float centred[8];
    u32 levels[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        centred[i] = __fadd_rn(i < 4 ? lower.of[i] : upper.of[i - 4], units.base[i]); // never -0, as the base is not
        const float size = fabsf(centred[i]);
        levels[i] = WAY == QUICK ? Cells::quick_level(size, units.per_unit[i]) : cells.level<WAY == CUT>(size, units.per_unit[i]);
    }
    if (WAY == QUICK)
#pragma unroll
        for (int i = 0; i < 8; i += 2)
            least = __vminu2(least, __byte_perm(levels[i], levels[i + 1], 0x5410));
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float *const c = centred + i * other;
        const u32 *const l = levels + i * other;
        const u32 signs = sign_bytes(c[0], c[step], c[2 * step], c[3 * step]);
        codes[i] = third_bytes(l[0], l[step], l[2 * step], l[3 * step]) ^ (signs & 0xF0F0F0F0u);
    }
#else
    int levels[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float difference = __fsub_rn(i < 4 ? lower.of[i] : upper.of[i - 4], units.base[i]);
        const float level = __fadd_rn(__fmul_rn(difference, units.per_unit[i]), 0.5f);
        levels[i] = (int)(TOP < 255.0f ? fminf(level, TOP) : level);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int *const l = levels + i * other;
        codes[i] = pack_saturated(l[0], l[step], pack_saturated(l[2 * step], l[3 * step], 0));
    }
#endif
    return Codes{codes[0], codes[1], least};
}

// Sum of a chunk so far, weighted; four channels.
struct Sums {
    Four total = {};

    __device__ __forceinline__ void add(Quad x, float weight)
    {
        const Four values = four_of(x);
#pragma unroll
        for (int i = 0; i < 4; i++)
            total.of[i] = __fadd_rn(total.of[i], weight == 1.0f ? values.of[i] : __fmul_rn(values.of[i], weight));
    }

    __device__ __forceinline__ Four mean(float weight) const
    {
        Four means;
        for (int i = 0; i < 4; i++)
            means.of[i] = __fmul_rn(total.of[i], weight);
        return means;
    }
};

// Fields of the page of the channels of a tile, in shared memory, and how many levels fields of chunks have.
struct PageFields {
    float *inverse, *low, *step;
    float levels;
};

// Fields of a channel of a chunk, and what its codes are made with; `far`: a value lies outside of what they span.
struct Fields {
    Whole first, second;
    float base, per_unit;
    bool far;
};

__device__ __forceinline__ Fields fields_of(float low, float step, float inverse, float levels, float smallest,
                                            float largest, float mean)
{
    Fields fields;
#if LYNX
    fields.first = whole_of<true>(__fadd_rn(__fmul_rn(__fsub_rn(mean, low), inverse), 0.5f), levels);
    const float origin = __fadd_rn(low, __fmul_rn(step, fields.first.value));
    const float deviation = fmaxf(__fsub_rn(largest, origin), __fsub_rn(origin, smallest));
    fields.second = whole_of<false>(__fmul_rn(deviation, inverse), levels);
#else
    fields.first = whole_of<true>(__fmul_rn(__fsub_rn(smallest, low), inverse), levels);
    const float origin = __fadd_rn(low, __fmul_rn(step, fields.first.value));
    fields.second = whole_of<false>(__fmul_rn(__fsub_rn(largest, origin), inverse), levels);
#endif
    const float length = __fmul_rn(step, fields.second.value);
#if LYNX
    fields.base = __fsub_rn(0.0f, origin);
    // A power of two divided by it: no length is so small that to multiply it by another one rounds.
    fields.per_unit = length != 0.0f ? reciprocal(length * (1.0f / UNIT)) : 0.0f;
    fields.far = !(deviation * fields.per_unit <= UNIT * EXCESS && length <= LARGE);
#else
    fields.far = false;
    fields.base = origin;
    fields.per_unit = length != 0.0f ? __fdiv_rn(TOP, length) : 0.0f;
#endif
    return fields;
}

// Whether fields are too coarse for a channel of a chunk; there must be ESCAPE_TOKENS of them.
__device__ __forceinline__ bool too_coarse(float step, float second, float smallest, float largest)
{
    const float spread = __fsub_rn(largest, smallest), extent = spread > 0.0f ? spread : fabsf(smallest);
    return second > 0.0f && extent < __fmul_rn(ESCAPE_STEPS, step);
}
