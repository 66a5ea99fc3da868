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
    u8 **later;           // rows in the later streams of a run of this warp, [stream - 1][token]
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

    // Where each token of a run has its rows in the later streams. Looked up even where no token is fine: code of its own for
    // such runs made this slower (docs/gpu.md).
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
    __device__ __forceinline__ u8 *row_ahead(int begin, int token, int ahead) const
    {
        constexpr int row = row_bytes(bits_of_stream(STREAM));
        if (STREAM == 0)
            return rows[0] + (token - first) * row + ahead * row;
        return later[(STREAM - 1) * RUN + token - begin + ahead];
    }

    template <int STREAM, bool ALIGNED>
    __device__ __forceinline__ void store_streams(int begin, int token, int ahead, u32 low, u32 high) const
    {
        if constexpr (STREAM < STREAMS) {
            u8 *const row = row_ahead<STREAM>(begin, token, ahead);
            store_codes<bits_of_stream(STREAM), shift_of_stream(STREAM), ALIGNED>(row, group, low, high);
            store_streams<STREAM + 1, ALIGNED>(begin, token, ahead, low, high);
        }
    }

    // Two lanes with four channels of two tokens each become two with eight channels of one, and write them.
    template <bool ALIGNED>
    __device__ __forceinline__ void store_tokens(int begin, int token, int ahead, bool store, u32 a, u32 b) const
    {
        const bool odd = lane & 1;
        const u32 mine = odd ? b : a, other = __shfl_xor_sync(0xFFFFFFFFu, odd ? a : b, 1);
        if constexpr (even_first(ALIGNED)) {
            // Codes of channels 0, 2, 4, 6, and of the others.
            const u32 evens = __byte_perm(mine, other, odd ? 0x1054 : 0x5410);
            const u32 odds = __byte_perm(mine, other, odd ? 0x3276 : 0x7632);
            u8 *const row = row_ahead<0>(begin, token, ahead), *const second = row_ahead<1>(begin, token, ahead);
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
        store_streams<0, ALIGNED>(begin, token, ahead, low, high);
    }

    // Codes of a run, whatever it is.
    __device__ __forceinline__ void write_part(int begin) const
    {
        for (int i = 0; i < RUN; i += 2) {
            u32 pair[2];
            for (int j = 0; j < 2; j++) {
                const int t = min(max(begin + i + j, first), stop - 1);
                pair[j] = codes_of<true, false>(load(t), units_of(t), cells);
            }
            const int t = begin + i + (lane & 1);
            const bool store = t >= first && t < stop && writes;
            store_tokens<false>(begin, t, 0, store, pair[0], pair[1]);
        }
    }

    __device__ __forceinline__ void write_run(int begin, const Quad *x) const
    {
        const Units units = units_of(begin);
        const int token = begin + (lane & 1);
#pragma unroll
        for (int i = 0; i < RUN; i += 2)
            store_tokens<true>(begin, token, i, true,
                               codes_of<false, even_first(true)>(x[i], units, cells),
                               codes_of<false, even_first(true)>(x[i + 1], units, cells));
    }
};
