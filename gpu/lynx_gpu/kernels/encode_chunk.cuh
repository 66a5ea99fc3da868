// Four channels of a chunk: extremes, sums, fields, and codes.

#if LYNX
#define CELLS ((1 << CELL_BITS) + 1)
#define COPIES (CELL_BITS <= 8 ? 32 : 1) // of the search table: with one for each lane, no two reads meet in a bank
#define UNIT ((float)(1 << CELL_BITS))   // magnitudes are counted in cells of sigma
#else
#define CELLS 1
#define COPIES 1
#endif
#define EXCESS 1.0004f     // a deviation may be so much of sigma before it must be cut off
#define SAFE_SUM 0x1p122f  // up to here the sum of a chunk does not overflow

// What extremes of a chunk are kept as. Runs that share one agree by atomics, so floats are integers of the same order;
// a chunk of `lynx` is a run.
#if LYNX
static_assert(CHUNK == RUN);
typedef float Extreme;
__device__ __forceinline__ float ordered(float value) { return value; }
__device__ __forceinline__ float unordered(float order) { return order; }
#else
typedef int Extreme;
__device__ __forceinline__ int ordered(float value)
{
    const int bits = (int)as_bits(value);
    return bits >= 0 ? bits : bits ^ 0x7FFFFFFF;
}

__device__ __forceinline__ float unordered(int order) { return as_float((u32)(order >= 0 ? order : order ^ 0x7FFFFFFF)); }
#endif

__device__ __forceinline__ float clamp(float code, float top)
{
    code = code > 0.0f ? code : 0.0f;
    return code < top ? code : top;
}

// The search table of `lynx`, in shared memory: what a magnitude must be added to, so that byte 2 of the sum, rounded down,
// is its level and 7 more (lynx_gpu/codec.py).
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
};

// Whether codes are those of two streams that have a way of their own into rows: 4 and 4 bits, or 3 and 5.
__device__ constexpr bool paired(int first, int second)
{
    return STREAMS == 2 && bits_of_stream(0) == first && bits_of_stream(STREAMS - 1) == second;
}

// In these, and where rows are aligned, codes of channels 0, 2, 1, 3 follow each other, else of 0, 1, 2, 3.
__device__ constexpr bool even_first(bool aligned) { return aligned && (paired(4, 4) || paired(3, 5)); }

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

__device__ __forceinline__ void put_four(float *shared, Four four)
{
    *(float4 *)shared = make_float4(four.of[0], four.of[1], four.of[2], four.of[3]);
}

// What four channels of a chunk are made with; of `lynx`, with the base negated.
struct Units {
    Four base, per_unit;
};

// Codes of four channels of a token, a byte each, but for RESIDUAL_FLIP. CUT: values may lie outside of what the chunk's
// fields span.
template <bool CUT, bool EVEN_FIRST> __device__ __forceinline__ u32 codes_of(Quad x, const Units &units, const Cells &cells)
{
    constexpr int second = EVEN_FIRST ? 2 : 1, third = 3 - second;
    const Four values = four_of(x);
#if LYNX
    float centred[4];
    u32 levels[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        centred[i] = __fadd_rn(values.of[i], units.base.of[i]); // never -0, as the base is not
        levels[i] = cells.level<CUT>(fabsf(centred[i]), units.per_unit.of[i]);
    }
    const u32 signs = sign_bytes(centred[0], centred[second], centred[third], centred[3]);
    return third_bytes(levels[0], levels[second], levels[third], levels[3]) ^ (signs & 0xF0F0F0F0u);
#else
    int levels[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float difference = __fsub_rn(values.of[i], units.base.of[i]);
        const float level = __fadd_rn(__fmul_rn(difference, units.per_unit.of[i]), 0.5f);
        levels[i] = (int)(TOP < 255.0f ? fminf(level, TOP) : level);
    }
    return pack_saturated(levels[0], levels[second], pack_saturated(levels[third], levels[3], 0));
#endif
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

// Fields of a channel of a chunk, and what its codes are made with; `far`: a value lies outside of what they span.
struct Fields {
    float first, second, base, per_unit;
    bool far;
};

__device__ __forceinline__ Fields fields_of(float low, float step, float inverse, float levels, float smallest,
                                            float largest, float mean)
{
    Fields fields;
#if LYNX
    fields.first = clamp(floorf(__fadd_rn(__fmul_rn(__fsub_rn(mean, low), inverse), 0.5f)), levels);
    const float origin = __fadd_rn(low, __fmul_rn(step, fields.first));
    const float deviation = fmaxf(__fsub_rn(largest, origin), __fsub_rn(origin, smallest));
    fields.second = clamp(ceilf(__fmul_rn(deviation, inverse)), levels);
#else
    fields.first = clamp(floorf(__fmul_rn(__fsub_rn(smallest, low), inverse)), levels);
    const float origin = __fadd_rn(low, __fmul_rn(step, fields.first));
    fields.second = clamp(ceilf(__fmul_rn(__fsub_rn(largest, origin), inverse)), levels);
#endif
    const float length = __fmul_rn(step, fields.second);
#if LYNX
    fields.base = __fsub_rn(0.0f, origin);
    // A power of two divided by it: no length is so small that to multiply it by another one rounds.
    fields.per_unit = length != 0.0f ? __frcp_rn(length * (1.0f / UNIT)) : 0.0f;
    fields.far = !(deviation * fields.per_unit <= UNIT * EXCESS);
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
