// Pages to streams. A block takes 128 channels of one page: its threads read every value once, keep it in registers, agree on
// the fields of chunks and page through shared memory, and write codes. Pages of more than 256 tokens are read twice, and so
// are runs of tokens that not all have codes.
#include "common.cuh"
#include "pages.cuh"

#define WARPS 8
#define THREADS (32 * WARPS)
#define RUN 32    // tokens of a warp
#define TILE 128  // channels of a block: four a lane
#define TILES ((GROUPS * 8 + TILE - 1) / TILE)
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

#define MIN_BLOCKS (KIND == FLOAT32 ? 1 : 2)

// Every lane of every block has four channels.
__device__ constexpr bool whole_tiles() { return SIZE % 8 == 0 && CHANNELS % TILE == 0; }

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

// The tokens of a run that are fine, a bit each, and how many there are before it.
struct FineTokens {
    u32 bits;
    int before;
};

// `positions` are in order. All lanes of a warp ask together.
__device__ __forceinline__ FineTokens find_fine(const int *positions, int count, int begin, int lane)
{
    FineTokens fine = {};
    for (int i = 0; i < count; i += 32) {
        const int position = i + lane < count ? positions[i + lane] : 0x7FFFFFFF;
        fine.before += __popc(__ballot_sync(0xFFFFFFFFu, position < begin));
        for (u32 left = __ballot_sync(0xFFFFFFFFu, (u32)(position - begin) < RUN); left; left &= left - 1)
            fine.bits |= 1u << (__shfl_sync(0xFFFFFFFFu, position, __ffs(left) - 1) - begin);
    }
    return fine;
}

// What a block knows while it encodes a tile. `least` and `most` are [chunk][channel].
struct Tile {
    const View &view;
    const Job &job;
    const Sections &at;
    Status *status;
    u8 *anchor;
    int first, stop;     // coded tokens
    int channel, there;  // first of the four channels of this lane, and how many there are
    i64 column;          // their place in a token
    int lane;
    Extreme *least, *most; // what codes are made with takes their place
    float *mean;           // likewise
    u8 *const *rows;      // where codes of each stream begin, but for those of fine tokens
    u8 **later;           // rows in the later streams of a run of this warp, [stream - 1][token], if some are fine
    const Cells &cells;
    Group group;          // that this lane writes
    bool writes;

    __device__ __forceinline__ int field(int token) const { return (token / CHUNK - first / CHUNK) * TILE + 4 * lane; }

    __device__ __forceinline__ Quad load(int token) const
    {
        return load_quad(view.pointer, row_of(view, job.start + token) + column, whole_tiles() ? 4 : there);
    }

    // Extremes of four channels in a run.
    __device__ __forceinline__ void add_extremes(int token, Quad low, Quad high) const
    {
        const Four lows = four_of(low), highs = four_of(high);
        const int k = field(token);
#if LYNX
        put_four(least + k, lows);
        put_four(most + k, highs);
#else
#pragma unroll
        for (int i = 0; i < 4; i++) {
            atomicMin(&least[k + i], ordered(lows.of[i]));
            atomicMax(&most[k + i], ordered(highs.of[i]));
        }
#endif
        if (!allowed(magnitude_of(low, high)))
            for (int t = max(token / RUN * RUN, first); t < min(token / RUN * RUN + RUN, stop); t++)
                refuse_quad(status, t, channel, there, load(t)); // rare, so the run is read again
    }

    // Whether all tokens of a run are coded, and of one chunk.
    __device__ __forceinline__ bool whole(int begin) const
    {
        return CHUNK % RUN == 0 && begin >= first && begin + RUN <= stop;
    }

    // Extremes of the coded tokens of a run; raw ones are written.
    __device__ __forceinline__ void look_at_part(int begin) const
    {
        Quad low = {infinite_pair(false), infinite_pair(false)}, high = {infinite_pair(true), infinite_pair(true)};
        const int end = min(begin + RUN, job.tokens);
        for (int t = begin; t < end; t++) {
            const Quad x = load(t);
            if (t < first || t >= stop) {
                refuse_quad(status, t, channel, there, x);
                u8 *const to = anchor + HEADER + 2 * ((t < first ? t : t - stop + first) * CHANNELS + channel);
                const u32 raw[2] = {raw_pair(x.low), raw_pair(x.high)};
                for (int i = 0; i < there; i++)
                    store16(to + 2 * i, raw[i / 2] >> 16 * (i & 1) & 0xFFFFu);
                continue;
            }
            low = Quad{extreme<false>(low.low, x.low), extreme<false>(low.high, x.high)};
            high = Quad{extreme<true>(high.low, x.low), extreme<true>(high.high, x.high)};
            if (t + 1 == min(end, stop) || (t + 1) % CHUNK == 0) {
                add_extremes(t, low, high);
                low = Quad{infinite_pair(false), infinite_pair(false)};
                high = Quad{infinite_pair(true), infinite_pair(true)};
            }
        }
    }

    __device__ __forceinline__ void look_at_run(int begin, const Quad *x) const
    {
        Quad low = x[0], high = x[0];
#pragma unroll
        for (int i = 1; i < RUN; i++) {
            low = Quad{extreme<false>(low.low, x[i].low), extreme<false>(low.high, x[i].high)};
            high = Quad{extreme<true>(high.low, x[i].low), extreme<true>(high.high, x[i].high)};
        }
        add_extremes(begin, low, high);
        if (LYNX)
            add_run(begin, x, magnitude_of(low, high));
    }

    // A mean is added up in the order of the tokens.
    __device__ __forceinline__ void add_part(int begin) const
    {
        const int from = max(begin, first), until = min(begin + RUN, stop);
        if (from >= until)
            return;
        Sums sums;
        for (int t = from; t < until; t++)
            sums.add(load(t), 1.0f / CHUNK);
        put_four(mean + field(from), sums.mean(until - from == CHUNK ? 1.0f : __fdiv_rn((float)CHUNK, (float)(until - from))));
    }

    __device__ __forceinline__ void add_run(int begin, const Quad *x, Pair largest) const
    {
        Sums sums;
        // Weights of 2^-5 can wait unless a sum overflows: bits of 16-bit floats, and of their sums, do not reach down to
        // where float32 ends.
        const bool wait = KIND != FLOAT32 && low_of(largest) <= SAFE_SUM && high_of(largest) <= SAFE_SUM;
        if (wait) {
#pragma unroll
            for (int i = 0; i < RUN; i++)
                sums.add(x[i], 1.0f);
        } else {
#pragma unroll
            for (int i = 0; i < RUN; i++)
                sums.add(x[i], 1.0f / CHUNK);
        }
        put_four(mean + field(begin), sums.mean(wait ? 1.0f / CHUNK : 1.0f));
    }

    // Fields of four channels of a chunk of `lynx`, written, and what codes are made with in the place of its extremes; whether
    // values are far.
    template <bool WIDE>
    __device__ __forceinline__ bool make_units(int begin, const float *page_low, const float *page_step,
                                               const float *page_inverse, float levels) const
    {
        const int from = max(begin, first), coded = min(begin + RUN, stop) - from, k = field(from);
        const Four low = four_of(page_low + 4 * lane), step = four_of(page_step + 4 * lane);
        const Four inverse = four_of(page_inverse + 4 * lane), means = four_of(mean + k);
        const Four smallest = four_of((const float *)least + k), largest = four_of((const float *)most + k);
        Units units;
        bool far = false, narrow = false;
        u32 firsts[4], seconds[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool is_there = whole_tiles() || i < there;
            const Fields fields = fields_of(low.of[i], step.of[i], inverse.of[i], levels, smallest.of[i], largest.of[i],
                                            means.of[i]);
            far |= is_there && fields.far;
            narrow |= is_there && largest.of[i] - smallest.of[i] < ESCAPE_STEPS * step.of[i];
            units.base.of[i] = is_there ? fields.base : 0.0f;
            units.per_unit.of[i] = is_there ? fields.per_unit : 0.0f;
            firsts[i] = (u32)fields.first;
            seconds[i] = (u32)fields.second;
        }
        put_four((float *)least + k, units.base);
        put_four((float *)most + k, units.per_unit);
        u8 *const to = anchor + at.chunk_low + (WIDE ? 2 : 1) * ((from / CHUNK - first / CHUNK) * CHANNELS + channel);
        store_fields<WIDE>(to, firsts);
        store_fields<WIDE>(to + at.chunk_scale - at.chunk_low, seconds);
        if (!WIDE && narrow && coded >= ESCAPE_TOKENS) { // rare
            bool escape = false;
#pragma unroll
            for (int i = 0; i < 4; i++)
                escape |= (whole_tiles() || i < there)
                          && too_coarse(step.of[i], (float)seconds[i], smallest.of[i], largest.of[i]);
            if (escape)
                atomicOr(&status->flags, WIDE_PAGE);
        }
        return far;
    }

    template <bool WIDE> __device__ __forceinline__ void store_fields(u8 *to, const u32 *fields) const
    {
        if (!WIDE && whole_tiles() && ((u64)to & 3) == 0) {
            *(u32 *)to = fields[0] | fields[1] << 8 | fields[2] << 16 | fields[3] << 24;
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (whole_tiles() || i < there) {
                if (WIDE)
                    store16(to + 2 * i, fields[i]);
                else
                    to[i] = (u8)fields[i];
            }
    }

    __device__ __forceinline__ Units units_of(int token) const
    {
        return Units{four_of((const float *)least + field(token)), four_of((const float *)most + field(token))};
    }

    // Where each token of a run has its rows in the later streams, if some are fine.
    __device__ __forceinline__ void place_rows(FineTokens fine, int begin) const
    {
        const int fine_before = fine.before + __popc(fine.bits & ((1u << lane) - 1));
        __syncwarp(); // the run before has been written
#pragma unroll
        for (int s = 1; s < STREAMS; s++) {
            const int row = row_bytes(bits_of_stream(s));
            later[(s - 1) * RUN + lane] = fine.bits >> lane & 1 ? anchor + at.fine_rows(job, s) + fine_before * row
                                                                : rows[s] + (begin + lane - first - fine_before) * row;
        }
        __syncwarp();
    }

    // The row in a stream of the token that is so many tokens ahead of another of its run.
    template <int STREAM>
    __device__ __forceinline__ u8 *row_ahead(FineTokens fine, int begin, int token, int ahead) const
    {
        constexpr int row = row_bytes(bits_of_stream(STREAM));
        if (STREAM == 0)
            return rows[0] + (token - first) * row + ahead * row;
        return fine.bits ? later[(STREAM - 1) * RUN + token - begin + ahead]
                         : rows[STREAM] + (token - first - fine.before) * row + ahead * row;
    }

    template <int STREAM, bool ALIGNED>
    __device__ __forceinline__ void store_streams(FineTokens fine, int begin, int token, int ahead, u32 low, u32 high) const
    {
        if constexpr (STREAM < STREAMS) {
            u8 *const row = row_ahead<STREAM>(fine, begin, token, ahead);
            store_codes<bits_of_stream(STREAM), shift_of_stream(STREAM), ALIGNED>(row, group, low, high);
            store_streams<STREAM + 1, ALIGNED>(fine, begin, token, ahead, low, high);
        }
    }

    // Two lanes with four channels of two tokens each become two with eight channels of one, and write them.
    template <bool ALIGNED>
    __device__ __forceinline__ void store_tokens(FineTokens fine, int begin, int token, int ahead, bool store, u32 a,
                                                 u32 b) const
    {
        const bool odd = lane & 1;
        const u32 mine = odd ? b : a, other = __shfl_xor_sync(0xFFFFFFFFu, odd ? a : b, 1);
        if constexpr (even_first(ALIGNED)) {
            // Codes of channels 0, 2, 4, 6, and of the others.
            const u32 evens = __byte_perm(mine, other, odd ? 0x1054 : 0x5410);
            const u32 odds = __byte_perm(mine, other, odd ? 0x3276 : 0x7632);
            u8 *const row = row_ahead<0>(fine, begin, token, ahead), *const second = row_ahead<1>(fine, begin, token, ahead);
            if constexpr (paired(4, 4)) {
                const u32 upper = choose(0x0F0F0F0Fu, evens >> 4, odds);
                const u32 lower = choose(0x0F0F0F0Fu, evens, odds << 4) ^ RESIDUAL_FLIP * 17u;
                __stcs((u32 *)(row + plane_at<4>(group)), upper);
                __stcs((u32 *)(second + plane_at<4>(group)), lower);
            } else {
                const u32 fours = choose(0x0F0F0F0Fu, evens >> 1, odds << 3);
                u32 twos = choose(0x03030303u, evens >> 6, odds >> 4); // in the lower half of each byte
                twos = choose(0x000F000Fu, twos, twos >> 4);           // in bytes 0 and 2
                // Each product brings a bit of each byte to every other bit of byte 3.
                const u32 upper = (evens & 0x20202020u) * 0x00082082u + (odds & 0x20202020u) * 0x00104104u;
                const u32 lower = (evens & 0x01010101u) * 0x01041040u + (odds & 0x01010101u) * 0x02082080u;
                __stcs((u32 *)(second + plane_at<4>(group)), fours);
                *(u16 *)(row + plane_at<2>(group)) = (u16)__byte_perm(twos, 0, 0x4420);
                row[plane_row(2) + plane_at<1>(group)] = (u8)(upper >> 24);
                second[plane_row(4) + plane_at<1>(group)] = (u8)(lower >> 24);
            }
            return;
        }
        const u32 low = (odd ? other : mine) ^ RESIDUAL_FLIP, high = (odd ? mine : other) ^ RESIDUAL_FLIP;
        if (!store)
            return;
        store_streams<0, ALIGNED>(fine, begin, token, ahead, low, high);
    }

    // Codes of a run, whatever it is.
    __device__ __forceinline__ void write_part(FineTokens fine, int begin) const
    {
        for (int i = 0; i < RUN; i += 2) {
            u32 pair[2];
            for (int j = 0; j < 2; j++) {
                const int t = min(max(begin + i + j, first), stop - 1);
                pair[j] = codes_of<true, false>(load(t), units_of(t), cells);
            }
            const int t = begin + i + (lane & 1);
            const bool store = t >= first && t < stop && writes;
            store_tokens<false>(fine, begin, t, 0, store, pair[0], pair[1]);
        }
    }

    __device__ __forceinline__ void write_run(FineTokens fine, int begin, const Quad *x) const
    {
        const Units units = units_of(begin);
        const int token = begin + (lane & 1);
#pragma unroll
        for (int i = 0; i < RUN; i += 2)
            store_tokens<true>(fine, begin, token, i, true,
                               codes_of<false, even_first(true)>(x[i], units, cells),
                               codes_of<false, even_first(true)>(x[i + 1], units, cells));
    }
};

// Read all tokens of a run at once.
__device__ __forceinline__ void load_run(const Tile &tile, int begin, Quad *x)
{
    const int there = whole_tiles() ? 4 : tile.there;
#if ROWS == PAGED
    const i64 own = row_of(tile.view, tile.job.start + begin + tile.lane % RUN);
#pragma unroll
    for (int i = 0; i < RUN; i++)
        x[i] = load_quad(tile.view.pointer, __shfl_sync(0xFFFFFFFFu, own, i) + tile.column, there);
#else
    const u8 *row = tile.view.pointer + ITEM * (row_of(tile.view, tile.job.start + begin) + tile.column);
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        x[i] = load_quad(row, ROWS == PACKED ? i * CHANNELS : 0, there);
        if (ROWS != PACKED)
            row += ITEM * tile.view.token_stride;
    }
#endif
}

template <bool WIDE>
__device__ __forceinline__ void encode_tile(const View &view, const Job &job, int number, const int *fine_tokens,
                                            const u8 *header, const float *cell_table, u8 *piece, Status *status)
{
    extern __shared__ __align__(16) int shared[];
    __shared__ __align__(16) float page_low[TILE], page_step[TILE], page_inverse[TILE];
    __shared__ __align__(16) float cells[CELLS * COPIES];
    __shared__ u8 *later[WARPS][STREAMS > 1 ? STREAMS - 1 : 1][RUN];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int first = job.raw_head, stop = job.tokens - job.raw_tail, tokens = job.tokens;
    const Sections at(job, WIDE);
    u8 *const anchor = piece + job.at[0];
    const int *const fine = fine_tokens + job.fine_at;
    const int fields = at.chunks * TILE;
    Extreme *const least = (Extreme *)shared, *const most = least + fields;
    float *const mean = (float *)(most + fields);

    const int quad = number * (TILE / 4) + lane, head = 4 * quad / PADDED, position = 4 * quad % PADDED;
    const int there = head >= HEADS ? 0 : max(min(SIZE - position, 4), 0);
    const int index = number * (TILE / 8) + lane / 2;
    const Cells search(cells, lane);
    u8 *rows[STREAMS] = {anchor + at.data};
#pragma unroll
    for (int s = 1; s < STREAMS; s++)
        rows[s] = piece + job.at[s];
    const Tile tile = {view,  job,   at,    status, anchor, first, stop,  head * SIZE + position, there, column_of(view, head, position),
                       lane,  least, most,  mean,   rows, later[warp][0], search, group_of(index), index < GROUPS};
    const int runs = (tokens + RUN - 1) / RUN;
    Quad x[RUN];
    if (warp < runs && tile.whole(warp * RUN))
        load_run(tile, warp * RUN, x);

#if LYNX
#pragma unroll 1
    for (int i = thread; i < CELLS; i += THREADS) {
        const float entry = cell_table[i];
        float *const copies = cells + i * COPIES;
        if (COPIES == 1)
            *copies = entry;
#pragma unroll
        for (int j = 0; j < COPIES / 4 * 4; j += 4) // neighbours begin at different banks
            *(float4 *)(copies + (j ^ 4 * thread % COPIES)) = make_float4(entry, entry, entry, entry);
    }
#else
    for (int i = thread; i < fields; i += THREADS) {
        least[i] = 0x7FFFFFFF;
        most[i] = (int)0x80000000;
    }
#endif
    FineTokens fine_of_run = find_fine(fine, at.fine, warp * RUN, lane);
    if (number == 0) {
        write_header(anchor, header, HEADER, job, WIDE, THREADS);
        if (STREAMS > 1)
            for (int i = thread; i < at.fine; i += THREADS)
                store16(anchor + at.positions + 2 * i, (u32)fine[i]);
    }
    if (!LYNX)
        __syncthreads();

    for (int run = warp; run < runs; run += WARPS) {
        if (tile.whole(run * RUN)) {
            if (run != warp)
                load_run(tile, run * RUN, x);
            tile.look_at_run(run * RUN, x);
        } else {
            tile.look_at_part(run * RUN);
            if (LYNX)
                tile.add_part(run * RUN);
        }
    }
    if (stop <= first)
        return;
    __syncthreads();

    const float levels = WIDE ? 65535.0f : 255.0f;
    if (thread < TILE) {
        const int index = number * TILE + thread, of_head = index % PADDED;
        if (index < GROUPS * 8 && of_head < SIZE) {
            Extreme lowest = least[thread], highest = most[thread];
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

#if !LYNX
    const int c = thread % TILE, channel = number * TILE + c, of_head = channel % PADDED;
    const bool is_there = whole_tiles() || (channel < GROUPS * 8 && of_head < SIZE);
    const int last = at.chunks - 1, coded_first = min(stop, (first / CHUNK + 1) * CHUNK) - first;
    const int coded_last = stop - max(first, (stop - 1) / CHUNK * CHUNK);
    const int field_bytes = WIDE ? 2 : 1, apart = at.chunk_scale - at.chunk_low;
    bool escape = false;
    u8 *to = anchor + at.chunk_low + field_bytes * (thread / TILE * CHANNELS + channel / PADDED * SIZE + of_head);
    for (int k = thread / TILE; k <= last; k += THREADS / TILE, to += field_bytes * (THREADS / TILE * CHANNELS)) {
        const int i = k * TILE + c;
        Fields fields = {};
        if (is_there) {
            const int coded = k == 0 ? coded_first : k == last ? coded_last : CHUNK;
            fields = fields_of(page_low[c], page_step[c], page_inverse[c], levels, unordered(least[i]), unordered(most[i]),
                               0.0f);
            escape |= coded >= ESCAPE_TOKENS && too_coarse(page_step[c], fields.second, unordered(least[i]), unordered(most[i]));
            if (WIDE) {
                store16(to, (u32)fields.first);
                store16(to + apart, (u32)fields.second);
            } else {
                to[0] = (u8)(u32)fields.first;
                to[apart] = (u8)(u32)fields.second;
            }
        }
        ((float *)least)[i] = fields.base;
        ((float *)most)[i] = fields.per_unit;
    }
    if (!WIDE && escape)
        atomicOr(&status->flags, WIDE_PAGE);
    __syncthreads();
#endif

    for (int run = warp; run < runs; run += WARPS) {
        const int begin = run * RUN;
        if (begin >= stop || begin + RUN <= first)
            continue;
        bool quick = whole_tiles(); // rows of codes begin at multiples of 16 then (lynx_gpu/plan.py)
        if (LYNX)
            quick &= !__any_sync(0xFFFFFFFFu, tile.make_units<WIDE>(begin, page_low, page_step, page_inverse, levels));
        if (runs > WARPS)
            fine_of_run = find_fine(fine, at.fine, begin, lane);
        if (fine_of_run.bits)
            tile.place_rows(fine_of_run, begin);
        if (!quick || !tile.whole(begin)) {
            tile.write_part(fine_of_run, begin);
            continue;
        }
        if (runs > WARPS)
            load_run(tile, begin, x);
        if (STREAMS > 1 && fine_of_run.bits)
            tile.write_run(fine_of_run, begin, x);
        else
            tile.write_run({0, fine_of_run.before}, begin, x);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    encode_pages(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                 int block_tokens, const Job *jobs, const int *fine, const u8 *header, const float *cells, u8 *piece,
                 Status *status)
{
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    encode_tile<false>(view, jobs[blockIdx.y], blockIdx.x, fine, header, cells, piece, status + blockIdx.y);
}

// Pages that turned out to need 16-bit fields are made once more; each block looks at some of the flags.
extern "C" __global__ void __launch_bounds__(THREADS)
    encode_wide_pages(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                      int block_tokens, const Job *jobs, const int *fine, const u8 *header, const float *cells, u8 *piece,
                      Status *status, int pages)
{
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    const int step = gridDim.x;
    for (int from = blockIdx.x; from < pages; from += THREADS * step) {
        const int mine = from + threadIdx.x * step;
        if (!__syncthreads_count(mine < pages && status[mine].flags & WIDE_PAGE))
            continue;
        for (int page = from; page < min(from + THREADS * step, pages); page += step)
            for (int tile = 0; tile < TILES && status[page].flags & WIDE_PAGE; tile++) {
                encode_tile<true>(view, jobs[page], tile, fine, header, cells, piece, status + page);
                __syncthreads();
            }
    }
}
