// What a warp does with a run of 32 tokens of 128 channels: looks for extremes and means, and writes codes.

// The tokens of a run that are fine, a bit each, and how many there are before it.
struct FineTokens {
    u32 bits;
    int before;
};

#define NOT_FINE 0x7FFFFFFF // a position that no token has

// `positions` are in order; of the first 32, each lane has read its own. All lanes of a warp ask together.
__device__ __forceinline__ FineTokens find_fine(const int *positions, int position, int count, int begin, int lane)
{
    FineTokens fine = {};
    for (int i = 0; i < count; i += 32) {
        if (i)
            position = i + lane < count ? positions[i + lane] : NOT_FINE;
        fine.before += __popc(__ballot_sync(0xFFFFFFFFu, position < begin));
        for (u32 left = __ballot_sync(0xFFFFFFFFu, (u32)(position - begin) < RUN); left; left &= left - 1)
            fine.bits |= 1u << (__shfl_sync(0xFFFFFFFFu, position, __ffs(left) - 1) - begin);
    }
    return fine;
}

// Extremes of four channels of a chunk, and their means (`lynx`).
struct Extremes {
    Quad low, high;
    Four mean;

    __device__ __forceinline__ void reset()
    {
        low = Quad{infinite_pair(false), infinite_pair(false)};
        high = Quad{infinite_pair(true), infinite_pair(true)};
    }

    __device__ __forceinline__ void add(Quad x)
    {
        low = Quad{extreme<false>(low.low, x.low), extreme<false>(low.high, x.high)};
        high = Quad{extreme<true>(high.low, x.low), extreme<true>(high.high, x.high)};
    }
};

// Channels beside each other that a lane looks at or writes, of one head.
struct Channels {
    int first, there; // there: how many of them there are
    i64 column;       // place of the first in a token
};

// Where each token of a run has its rows in the later streams: each lane knows those of one, as offsets from the first stream.
struct LaterRows {
    u32 at[STREAMS > 1 ? STREAMS - 1 : 1];
};

// What a block knows while it encodes a tile. A lane looks at four channels of each token of a run, and writes eight channels,
// a group, of every other token.
struct Tile {
    const View &view;
    const Job &job;
    const Sections &at;
    Status *status;
    u8 *anchor;
    int first, stop; // coded tokens
    int lane;
    Channels quad, octet;
    Group group;           // the octet
    Quad *own;             // the four channels in a run of this warp, in shared memory; tokens are TILE / 4 apart
    Extreme *least, *most; // [chunk][channel]; of `lynx` of the page alone. What codes are made with takes the place of the former
    u8 *const *rows;       // where codes of each stream begin, but for those of fine tokens
    const Cells &cells;

    // Where extremes of channel `i` of a lane lie, and fields of a page. Of `lynx` lanes beside each other use banks beside each
    // other; other codecs read eight channels of a chunk at once.
    __device__ __forceinline__ int field(int token, int i) const
    {
        return LYNX ? i * 32 + lane : (token / CHUNK - first / CHUNK) * TILE + 4 * lane + i;
    }

    __device__ __forceinline__ Quad read(int i) const { return own[i * (TILE / 4)]; }

    // The group that this lane writes, of the first of two tokens of the run.
    __device__ __forceinline__ const Quad *own_group() const
    {
        return own - lane + lane % GROUP_LANES * 2 + lane / GROUP_LANES * (TILE / 4);
    }

    static __device__ __forceinline__ void read_group(const Quad *from, Quad &low, Quad &high)
    {
#if KIND == FLOAT32
        low = from[0], high = from[1];
#else
        const uint4 all = *(const uint4 *)from;
        low = Quad{all.x, all.y}, high = Quad{all.z, all.w};
#endif
    }

    __device__ __forceinline__ Quad load(int token) const
    {
        return load_quad(view.pointer, row_of(view, job.start + token) + quad.column, whole_tiles() ? 4 : quad.there);
    }

    // Extremes of four channels in a run, told to the block; values that must not be are refused.
    __device__ __forceinline__ void tell_extremes(int token, const Extremes &found) const
    {
        const Four lows = four_of(found.low), highs = four_of(found.high);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            atomicMin(&least[field(token, i)], ordered(lows.of[i]));
            atomicMax(&most[field(token, i)], ordered(highs.of[i]));
        }
        if (!allowed(magnitude_of(found.low, found.high)))
            for (int t = max(token / RUN * RUN, first); t < min(token / RUN * RUN + RUN, stop); t++)
                refuse_quad(status, t, quad.first, quad.there, load(t)); // rare, so the run is read again
    }

    // Whether all tokens of a run are coded, and of one chunk.
    __device__ __forceinline__ bool whole(int begin) const
    {
        return CHUNK % RUN == 0 && begin >= first && begin + RUN <= stop;
    }

    // Extremes and means of the coded tokens of a run; with TELL the block is told, and raw tokens are written.
    template <bool TELL> __device__ __forceinline__ void look_at_part(int begin, Extremes &found) const
    {
        const int from = max(begin, first), until = min(begin + RUN, stop), end = min(begin + RUN, job.tokens);
        Sums sums;
        found.reset();
        for (int t = begin; t < end; t++) {
            const Quad x = load(t);
            if (t < first || t >= stop) {
                if (!TELL)
                    continue;
                refuse_quad(status, t, quad.first, quad.there, x);
                u8 *const to = anchor + HEADER + 2 * ((t < first ? t : t - stop + first) * CHANNELS + quad.first);
                const u32 raw[2] = {raw_pair(x.low), raw_pair(x.high)};
                for (int i = 0; i < quad.there; i++)
                    store16(to + 2 * i, raw[i / 2] >> 16 * (i & 1) & 0xFFFFu);
                continue;
            }
            found.add(x);
            if (LYNX)
                sums.add(x, 1.0f / CHUNK);
            if (TELL && (t + 1 == until || (t + 1) % CHUNK == 0)) {
                tell_extremes(t, found);
                if (!LYNX)
                    found.reset();
            }
        }
        if (LYNX && from < until)
            found.mean = sums.mean(until - from == CHUNK ? 1.0f : __fdiv_rn((float)CHUNK, (float)(until - from)));
    }

    template <bool TELL> __device__ __forceinline__ void look_at_run(int begin, Extremes &found) const
    {
        Sums sums;
        found.low = found.high = read(0);
#pragma unroll UNROLL
        for (int i = 0; i < RUN; i++) {
            const Quad x = read(i);
            found.add(x);
            if (LYNX)
                sums.add(x, KIND == FLOAT32 ? 1.0f / CHUNK : 1.0f);
        }
        // Weights of 2^-5 can wait unless a sum overflows: bits of 16-bit floats, and of their sums, do not reach down to
        // where float32 ends.
        const Pair largest = magnitude_of(found.low, found.high);
        bool waited = KIND != FLOAT32;
        if (LYNX && waited && !(low_of(largest) <= SAFE_SUM && high_of(largest) <= SAFE_SUM)) { // rare
            sums = Sums();
#pragma unroll 1
            for (int i = 0; i < RUN; i++)
                sums.add(read(i), 1.0f / CHUNK);
            waited = false;
        }
        if (LYNX)
            found.mean = sums.mean(waited ? 1.0f / CHUNK : 1.0f);
        if (TELL)
            tell_extremes(begin, found);
    }

    // Fields of four channels of a chunk of `lynx`, written, and what codes are made with; whether values are far.
    template <bool WIDE>
    __device__ __forceinline__ bool make_units(int begin, const PageFields &page, const Extremes &found, Units &units) const
    {
        const int from = max(begin, first), coded = min(begin + RUN, stop) - from;
        const Four means = found.mean, smallest = four_of(found.low), largest = four_of(found.high);
        bool far = false, narrow = false;
        u32 firsts[4], seconds[4];
        float base[4], per_unit[4], step[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool is_there = whole_tiles() || i < quad.there;
            const int at = field(begin, i);
            step[i] = page.step[at];
            const Fields fields = fields_of(page.low[at], step[i], page.inverse[at], page.levels, smallest.of[i], largest.of[i],
                                            means.of[i]);
            far |= is_there && fields.far;
            narrow |= is_there && largest.of[i] - smallest.of[i] < ESCAPE_STEPS * step[i];
            base[i] = is_there ? fields.base : 0.0f;
            per_unit[i] = is_there ? fields.per_unit : 0.0f;
            firsts[i] = fields.first.bits;
            seconds[i] = fields.second.bits;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) { // of the group that this lane writes
            units.base[i] = __shfl_sync(0xFFFFFFFFu, base[i % 4], lane % GROUP_LANES * 2 + i / 4);
            units.per_unit[i] = __shfl_sync(0xFFFFFFFFu, per_unit[i % 4], lane % GROUP_LANES * 2 + i / 4);
        }
        u8 *const to = anchor + at.chunk_low + (WIDE ? 2 : 1) * ((from / CHUNK - first / CHUNK) * CHANNELS + quad.first);
        store_fields<WIDE>(to, firsts);
        store_fields<WIDE>(to + at.chunk_scale - at.chunk_low, seconds);
        if (!WIDE && narrow && coded >= ESCAPE_TOKENS) { // rare
            bool escape = false;
#pragma unroll
            for (int i = 0; i < 4; i++)
                escape |= (whole_tiles() || i < quad.there)
                          && too_coarse(step[i], (float)(u8)seconds[i], smallest.of[i], largest.of[i]);
            if (escape)
                atomicOr(&status->flags, WIDE_PAGE);
        }
        return far;
    }

    template <bool WIDE> __device__ __forceinline__ void store_fields(u8 *to, const u32 *fields) const
    {
        if (!WIDE && whole_tiles() && ((u64)to & 3) == 0) {
            const u32 low = __byte_perm(fields[0], fields[1], 0x0040), high = __byte_perm(fields[2], fields[3], 0x0040);
            *(u32 *)to = __byte_perm(low, high, 0x5410);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (whole_tiles() || i < quad.there) {
                if (WIDE)
                    store16(to + 2 * i, fields[i]);
                else
                    to[i] = (u8)fields[i];
            }
    }

    __device__ __forceinline__ Units units_of(int token) const
    {
        const int at = (token / CHUNK - first / CHUNK) * TILE + lane % GROUP_LANES * 8;
        Units units;
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const Four base = four_of((const float *)least + at + i), per_unit = four_of((const float *)most + at + i);
            for (int j = 0; j < 4; j++)
                units.base[i + j] = base.of[j], units.per_unit[i + j] = per_unit.of[j];
        }
        return units;
    }

    // Looked up even where no token is fine: code of its own for such runs made this slower (docs/gpu.md).
    __device__ __forceinline__ LaterRows place_rows(FineTokens fine, int begin) const
    {
        const int fine_before = fine.before + __popc(fine.bits & ((1u << lane) - 1));
        const bool is_fine = fine.bits >> lane & 1;
        LaterRows later = {};
#pragma unroll
        for (int s = 1; s < STREAMS; s++) {
            const int row = row_bytes(bits_of_stream(s));
            later.at[s - 1] = is_fine ? (u32)(at.fine_rows(job, s) + fine_before * row)
                                      : (u32)(rows[s] - anchor) + (u32)((begin + lane - first - fine_before) * row);
        }
        return later;
    }

    // Token `i` of a run has its row of the first stream at `row`.
    template <int STREAM, bool ALIGNED>
    __device__ __forceinline__ void store_streams(u8 *row, const LaterRows &later, int i, bool store, u32 low, u32 high) const
    {
        if constexpr (STREAM < STREAMS) {
            constexpr int number = STREAM ? STREAM - 1 : 0;
            u8 *const to = STREAM ? anchor + __shfl_sync(0xFFFFFFFFu, later.at[number], i) : row;
            if (store)
                store_codes<bits_of_stream(STREAM), shift_of_stream(STREAM), ALIGNED>(to, group, low, high);
            store_streams<STREAM + 1, ALIGNED>(row, later, i, store, low, high);
        }
    }

    // Codes of a run, whatever it is.
    __device__ __forceinline__ void write_part(int begin, const Units &units, const LaterRows &later) const
    {
        for (int from = 0; from < RUN; from += AT_ONCE) {
            const int i = from + lane / GROUP_LANES, token = begin + i, coded = min(max(token, first), stop - 1);
            const i64 place = row_of(view, job.start + coded) + octet.column;
            const Quad low = load_quad(view.pointer, place, min(octet.there, 4));
            const Quad high = load_quad(view.pointer, place + 4, max(octet.there - 4, 0));
            const Codes codes = codes_of<CUT, false>(low, high, LYNX ? units : units_of(coded), cells);
            u8 *const row = rows[0] + (coded - first) * row_bytes(bits_of_stream(0));
            store_streams<0, false>(row, later, i, coded == token && octet.there > 0, codes.first ^ RESIDUAL_FLIP,
                                    codes.second ^ RESIDUAL_FLIP);
        }
    }

    // Codes of a run of whole tiles in shared memory.
    __device__ __forceinline__ void write_run(int begin, const Units &of_chunk, const LaterRows &later) const
    {
        constexpr int row_size = row_bytes(bits_of_stream(0));
        constexpr Way way = QUICK_LEVELS ? QUICK : EXACT;
        Units units = LYNX ? of_chunk : units_of(begin);
        if (way == QUICK)
#pragma unroll
            for (int i = 0; i < 8; i++)
                units.per_unit[i] = opaque(units.per_unit[i] * as_float(LOG_UNIT)); // once, not for each value again
        const Quad *from = own_group();
        const int second = lane / GROUP_LANES;
        u8 *row = rows[0] + (begin + second - first) * row_size + (first_is_nibbles() ? plane_at<4>(group) : 0);
        u8 *const four = opaque(anchor + plane_at<4>(group)), *const one = opaque(anchor + plane_row(4) + plane_at<1>(group));
#pragma unroll 1
        for (int i = second; i < RUN; i += UNROLL, from += UNROLL * (TILE / 4), row += UNROLL * row_size) {
            u8 *const here = opaque(row);
            u32 least[UNROLL / AT_ONCE];
#pragma unroll
            for (int j = 0; j < UNROLL; j += AT_ONCE)
                least[j / AT_ONCE] =
                    write_tokens<way>(from + j * (TILE / 4), here + j * row_size, units, later, i + j, four, one);
            if (way == QUICK)
                write_doubtful(least, from, row, units, later, i, four, one);
        }
    }

    // Codes of a group of AT_ONCE tokens; returns what may be doubtful.
    template <Way WAY>
    __device__ __forceinline__ u32 write_tokens(const Quad *from, u8 *row, const Units &units, const LaterRows &later, int i,
                                                u8 *four, u8 *one) const
    {
        Quad low, high;
        read_group(from, low, high);
        const Codes codes = codes_of<WAY, even_first(true)>(low, high, units, cells);
        write_group(row, later, i, four, one, codes);
        return codes.least;
    }

    // Codes once more, of those of UNROLL tokens that are doubtful in any lane.
    __device__ __forceinline__ void write_doubtful(const u32 *least, const Quad *from, u8 *row, Units units, const LaterRows &later,
                                                   int i, u8 *four, u8 *one) const
    {
        u32 of_all = least[0];
#pragma unroll
        for (int j = 1; j < UNROLL / AT_ONCE; j++)
            of_all = __vminu2(of_all, least[j]);
        if (!__any_sync(0xFFFFFFFFu, is_doubtful(of_all)))
            return;
        u32 left = 0;
#pragma unroll
        for (int j = 0; j < UNROLL / AT_ONCE; j++)
            left |= (u32)is_doubtful(least[j]) << j * AT_ONCE;
#pragma unroll
        for (int k = 0; k < 8; k++)
            units.per_unit[k] *= 1.0f / as_float(LOG_UNIT);
#pragma unroll 1
        for (left = __reduce_or_sync(0xFFFFFFFFu, left); left; left &= left - 1) {
            const int j = __ffs(left) - 1;
            u8 *const again = row + j * row_bytes(bits_of_stream(0));
            write_tokens<EXACT>(from + j * (TILE / 4), again, units, later, i + j, four, one);
        }
    }

    // `row` is that of the token, or what this lane writes of it if the first stream is nibbles. `four` and `one` are where the
    // planes of this lane were in the second stream if its rows began at `anchor`.
    __device__ __forceinline__ void write_group(u8 *row, const LaterRows &later, int i, u8 *four, u8 *one, Codes codes) const
    {
        if constexpr (!even_first(true)) {
            store_streams<0, true>(row, later, i, true, codes.first ^ RESIDUAL_FLIP, codes.second ^ RESIDUAL_FLIP);
            return;
        }
        const u32 evens = codes.first, odds = codes.second;
        if constexpr (STREAMS == 1) { // of 4 bits
            __stcs((u32 *)row, evens + (odds << 4));
            return;
        }
        const u32 later_row = __shfl_sync(0xFFFFFFFFu, later.at[0], i);
        if constexpr (paired(4, 4)) {
            const u32 upper = choose(0x0F0F0F0Fu, evens >> 4, odds);
            const u32 lower = choose(0x0F0F0F0Fu, evens, odds << 4) ^ RESIDUAL_FLIP * 17u;
            __stcs((u32 *)row, upper);
            __stcs((u32 *)(four + later_row), lower);
        } else {
            const u32 fours = choose(0x0F0F0F0Fu, evens >> 1, odds << 3);
            u32 twos = choose(0x03030303u, evens >> 6, odds >> 4); // in the lower half of each byte
            twos = choose(0x000F000Fu, twos, twos >> 4);           // in bytes 0 and 2
            // Each product brings a bit of each byte to every other bit of byte 3.
            const u32 upper = (evens & 0x20202020u) * 0x00082082u + (odds & 0x20202020u) * 0x00104104u;
            const u32 lower = (evens & 0x01010101u) * 0x01041040u + (odds & 0x01010101u) * 0x02082080u;
            __stcs((u32 *)(four + later_row), fours);
            *(u16 *)(row + plane_at<2>(group)) = (u16)__byte_perm(twos, 0, 0x4420);
            row[plane_row(2) + plane_at<1>(group)] = (u8)(upper >> 24);
            one[later_row] = (u8)(lower >> 24);
        }
    }
};
