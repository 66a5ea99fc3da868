// Pages to streams. A block takes 128 channels of one page: its threads bring every value to shared memory once, agree on the
// fields of chunks and page, and write codes. Pages of more tokens than a block takes at once are read twice, and so are runs
// of tokens that not all have codes.
//   WARPS            of a block; each takes 32 tokens at once
#include "common.cuh"
#include "pages.cuh"
#include "async.cuh"

#define THREADS (32 * WARPS)
#define RUN 32    // tokens of a warp at once
#define TILE 128  // channels of a block
#define GROUP_LANES (TILE / 8)       // that write a token
#define AT_ONCE (32 / GROUP_LANES)   // tokens that a warp writes
#define TILES ((GROUPS * 8 + TILE - 1) / TILE)
#define MIN_BLOCKS (KIND == FLOAT32 ? 1 : 3)
#define UNROLL (LYNX ? 16 : 8) // tokens of a run that have code of their own: more does not stay in the cache of instructions
#define RUN_BYTES (RUN * TILE * ITEM)

// Every lane of every block has four channels.
__device__ constexpr bool whole_tiles() { return SIZE % 8 == 0 && CHANNELS % TILE == 0; }

#include "encode_chunk.cuh"
#include "encode_tile.cuh"

// Ask for every STEP-th token of a run, from the I-th on, where tokens lie one behind the other.
template <int I, int STEP> __device__ __forceinline__ void ask_packed(u8 *to, const u8 *from)
{
    if constexpr (I < RUN) {
        copy_unit<16, false, I * TILE * ITEM, I * CHANNELS * ITEM>(to, from);
        ask_packed<I + STEP, STEP>(to, from);
    }
}

// Ask for a run of whole tiles whose heads begin at multiples of 16 bytes.
__device__ __forceinline__ void ask_run(const View &view, int token, int number, u8 *to, int lane)
{
    constexpr int units = TILE * ITEM / 16, step = 32 / units;
    const int channel = number * TILE + lane % units * (16 / ITEM);
    const u8 *const column = view.pointer + ITEM * column_of(view, channel / SIZE, channel % SIZE);
    const i64 own = row_of(view, token + (ROWS == PAGED ? lane : lane / units)); // PAGED: each lane knows another row
    to += 16 * lane;
    if constexpr (ROWS == PACKED)
        ask_packed<0, step>(to, column + ITEM * own);
    else
#pragma unroll
        for (int i = 0; i < RUN; i += step) {
            const i64 row = ROWS == PAGED ? __shfl_sync(0xFFFFFFFFu, own, i + lane / units) : own + i * view.token_stride;
            copy_unit<16>(to + i * TILE * ITEM, column + ITEM * row);
        }
    close_group();
}

// Bring a run to shared memory, wherever it lies.
__device__ __forceinline__ void fetch_run(const Tile &tile, int begin)
{
#pragma unroll 4
    for (int i = 0; i < RUN; i++)
        tile.own[i * (TILE / 4)] = tile.load(begin + i);
}

// Copies of the search table, whose entries come four times each.
__device__ __forceinline__ void copy_cells(float *cells, const float4 *cell_table)
{
    constexpr int fillers = COPIES >= 4 ? COPIES / 4 : 1; // threads that write the copies of an entry
#pragma unroll
    for (int i = 0; i < CELLS; i += THREADS / fillers) {
        const int cell = i + threadIdx.x / fillers;
        if (i + THREADS / fillers > CELLS && cell >= CELLS)
            break;
        const float4 entry = cell_table[cell];
        if (COPIES < 4)
            cells[cell] = entry.x;
        else
            *(float4 *)(cells + cell * COPIES + 4 * (threadIdx.x % fillers)) = entry;
    }
}

// Fields of the page from extremes of all chunks, written and kept.
template <bool WIDE>
__device__ __forceinline__ void make_page_fields(const Sections &at, u8 *anchor, int number, const Extreme *least,
                                                 const Extreme *most, const PageFields &page)
{
    for (u32 i = threadIdx.x; i < TILE; i += THREADS) {
        const int padded = number * TILE + (LYNX ? i % 32 * 4 + i / 32 : i), of_head = padded % PADDED; // as in Tile::field
        if (padded >= GROUPS * 8 || of_head >= SIZE)
            continue;
        Extreme lowest = least[i], highest = most[i];
        for (int k = 1; k < (LYNX ? 1 : at.chunks); k++) {
            lowest = min(lowest, least[k * TILE + i]);
            highest = max(highest, most[k * TILE + i]);
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
        page.low[i] = low;
        page.step[i] = step_of(scale, page.levels);
        page.inverse[i] = above ? __fdiv_rn(page.levels, scale) : 0.0f;
        const int channel = padded / PADDED * SIZE + of_head;
        store16(anchor + at.page_low + 2 * channel, upper);
        store16(anchor + at.page_scale + 2 * channel, above);
    }
}

// Fields of chunks from their extremes, written, and in the place of these what codes are made with.
template <bool WIDE>
__device__ __forceinline__ void make_chunk_fields(const Sections &at, const Job &job, Status *status, u8 *anchor, int number,
                                                  Extreme *least, Extreme *most, const PageFields &page)
{
    const int first = job.raw_head, stop = job.tokens - job.raw_tail;
    const int last = at.chunks - 1, coded_first = min(stop, (first / CHUNK + 1) * CHUNK) - first;
    const int coded_last = stop - max(first, (stop - 1) / CHUNK * CHUNK), apart = at.chunk_scale - at.chunk_low;
    bool escape = false;
    for (int i = threadIdx.x; i < at.chunks * TILE; i += THREADS) {
        const int k = i / TILE, c = i % TILE, padded = number * TILE + c, of_head = padded % PADDED;
        Fields fields = {};
        if (whole_tiles() || (padded < GROUPS * 8 && of_head < SIZE)) {
            const int coded = k == 0 ? coded_first : k == last ? coded_last : CHUNK;
            fields = fields_of(page.low[c], page.step[c], page.inverse[c], page.levels, unordered(least[i]), unordered(most[i]),
                               0.0f);
            escape |= coded >= ESCAPE_TOKENS
                      && too_coarse(page.step[c], fields.second.value, unordered(least[i]), unordered(most[i]));
            u8 *const to = anchor + at.chunk_low + (WIDE ? 2 : 1) * (k * CHANNELS + padded / PADDED * SIZE + of_head);
            if (WIDE) {
                store16(to, fields.first.bits);
                store16(to + apart, fields.second.bits);
            } else {
                to[0] = (u8)fields.first.bits;
                to[apart] = (u8)fields.second.bits;
            }
        }
        ((float *)least)[i] = fields.base;
        ((float *)most)[i] = fields.per_unit;
    }
    if (!WIDE && escape)
        atomicOr(&status->flags, WIDE_PAGE);
}

template <bool WIDE>
__device__ __forceinline__ void encode_tile(const View &view, const Job &job, int number, const int *fine_tokens,
                                            const u8 *header, const float4 *cell_table, u8 *piece, Status *status, bool in_units)
{
    extern __shared__ __align__(16) u8 shared[];
    __shared__ __align__(16) float page_fields[LYNX ? 1 : 3][TILE];
    __shared__ __align__(16) float cells[CELLS * COPIES];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    ASSUME(thread >= 0 && thread < THREADS && number >= 0 && number < TILES);
    const int first = job.raw_head, stop = job.tokens - job.raw_tail, tokens = job.tokens;
    const Sections at(job, WIDE);
    u8 *const anchor = piece + job.at[0];
    const int *const fine = fine_tokens + job.fine_at;
    const int fields = LYNX ? TILE : at.chunks * TILE;
    u8 *const own = shared + warp * RUN_BYTES;
    Extreme *const least = (Extreme *)(shared + WARPS * RUN_BYTES), *const most = least + fields;

    const int padded = number * TILE + 4 * lane, head = padded / PADDED, position = padded % PADDED;
    const Channels quad = {head * SIZE + position, head >= HEADS ? 0 : max(min(SIZE - position, 4), 0),
                           column_of(view, head, position)};
    const int index = number * GROUP_LANES + lane % GROUP_LANES;
    const Group group = group_of(index);
    const Channels octet = {group.head * SIZE + 8 * group.number, index < GROUPS ? min(SIZE - 8 * group.number, 8) : 0,
                            column_of(view, group.head, 8 * group.number)};
    const Cells search(cells, lane);
    u8 *rows[STREAMS] = {anchor + at.data};
#pragma unroll
    for (int s = 1; s < STREAMS; s++)
        rows[s] = piece + job.at[s];
    const Tile tile = {view, job,  at,    status, anchor, first, stop, lane, quad, octet, group, (Quad *)(own + 4 * ITEM * lane),
                       least, most, rows, search};
    // Those of `lynx` take the place of what they are made of.
    const PageFields page = {page_fields[0], LYNX ? (float *)least : page_fields[LYNX ? 0 : 1],
                             LYNX ? (float *)most : page_fields[LYNX ? 0 : 2], WIDE ? 65535.0f : 255.0f};
    const int runs = (tokens + RUN - 1) / RUN;
    const bool asks = in_units && whole_tiles(), asked = asks && tile.whole(warp * RUN);
    if (asked)
        ask_run(view, job.start + warp * RUN, number, own, lane);
    if (LYNX)
        copy_cells(cells, cell_table);
    for (int i = thread; i < fields; i += THREADS) {
        least[i] = 0x7FFFFFFF;
        most[i] = (int)0x80000000;
    }
    if (!WIDE && thread == 0)
        *status = Status{};
    const int own_fine = lane < at.fine ? fine[lane] : NOT_FINE;
    if (number == 0) {
        write_header(anchor, header, HEADER, job, WIDE, THREADS);
        if (STREAMS > 1)
            for (int i = thread; i < at.fine; i += THREADS)
                store16(anchor + at.positions + 2 * i, (u32)fine[i]);
    }
    wait_groups<0>();
    __syncthreads();

    const auto fetch = [&](int begin) {
        if (asks) {
            __syncwarp(); // the run before has been read
            ask_run(view, job.start + begin, number, own, lane);
            wait_groups<0>();
            __syncwarp();
        } else {
            fetch_run(tile, begin);
        }
    };
    Extremes found;
    for (int run = warp; run < runs; run += WARPS) {
        if (tile.whole(run * RUN)) {
            if (run != warp || !asked)
                fetch(run * RUN);
            tile.look_at_run<true>(run * RUN, found);
        } else {
            tile.look_at_part<true>(run * RUN, found);
        }
    }
    if (stop <= first)
        return;
    __syncthreads();

    make_page_fields<WIDE>(at, anchor, number, least, most, page);
    __syncthreads();
#if !LYNX
    make_chunk_fields<WIDE>(at, job, status, anchor, number, least, most, page);
    __syncthreads();
#endif

    for (int run = warp; run < runs; run += WARPS) {
        const int begin = run * RUN;
        if (begin >= stop || begin + RUN <= first)
            continue;
        const bool whole = tile.whole(begin);
        if (runs > WARPS && whole)
            fetch(begin);
        Units units = {};
        bool quick = whole_tiles() && whole; // rows of codes begin at multiples of 16 then (lynx_gpu/plan.py)
#if LYNX
        if (runs > WARPS && whole)
            tile.look_at_run<false>(begin, found);
        else if (runs > WARPS)
            tile.look_at_part<false>(begin, found);
        quick &= !__any_sync(0xFFFFFFFFu, tile.make_units<WIDE>(begin, page, found, units));
#endif
        const LaterRows later = tile.place_rows(find_fine(fine, own_fine, at.fine, begin, lane), begin);
        if (quick)
            tile.write_run(begin, units, later);
        else
            tile.write_part(begin, units, later);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    encode_pages(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                 int block_tokens, const Job *jobs, const int *fine, const u8 *header, const float4 *cells, u8 *piece,
                 Status *blocks, int in_units)
{
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    Status *const own = blocks + blockIdx.y * TILES + blockIdx.x; // so that nobody has to clear any before
    encode_tile<false>(view, jobs[blockIdx.y], blockIdx.x, fine, header, cells, piece, own, in_units);
}

// What all blocks of a page have found.
__device__ __forceinline__ Status whole_status(const Status *blocks)
{
    Status whole = {};
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        whole.flags |= blocks[tile].flags;
        whole.bad = max(whole.bad, blocks[tile].bad);
    }
    return whole;
}

// The status of pages from those of their blocks; pages that turned out to need 16-bit fields are made once more.
extern "C" __global__ void __launch_bounds__(THREADS)
    encode_wide_pages(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                      int block_tokens, const Job *jobs, const int *fine, const u8 *header, const float4 *cells, u8 *piece,
                      const Status *blocks, int in_units, Status *status, int pages)
{
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    const int step = gridDim.x;
    for (int from = blockIdx.x; from < pages; from += THREADS * step) {
        const int mine = from + threadIdx.x * step;
        Status whole = {};
        if (mine < pages)
            status[mine] = whole = whole_status(blocks + mine * TILES);
        if (!__syncthreads_count(whole.flags & WIDE_PAGE))
            continue;
        for (int page = from; page < min(from + THREADS * step, pages); page += step)
            for (int tile = 0; tile < TILES && status[page].flags & WIDE_PAGE; tile++) {
                encode_tile<true>(view, jobs[page], tile, fine, header, cells, piece, status + page, in_units);
                __syncthreads();
            }
    }
}
