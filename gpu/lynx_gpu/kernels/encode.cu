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
#define MIN_BLOCKS (KIND == FLOAT32 ? 1 : 2)

// Every lane of every block has four channels.
__device__ constexpr bool whole_tiles() { return SIZE % 8 == 0 && CHANNELS % TILE == 0; }

#include "encode_chunk.cuh"
#include "encode_tile.cuh"

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
                                            const u8 *header, const float4 *cell_table, u8 *piece, Status *status)
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
    constexpr int fillers = COPIES >= 4 ? COPIES / 4 : 1; // threads that write the copies of an entry
#pragma unroll
    for (int i = 0; i < CELLS; i += THREADS / fillers) {
        const int cell = i + thread / fillers;
        if (i + THREADS / fillers > CELLS && cell >= CELLS)
            break;
        const float4 entry = cell_table[cell];
        if (COPIES < 4)
            cells[cell] = entry.x;
        else
            *(float4 *)(cells + cell * COPIES + 4 * (thread % fillers)) = entry;
    }
#else
    for (int i = thread; i < fields; i += THREADS) {
        least[i] = 0x7FFFFFFF;
        most[i] = (int)0x80000000;
    }
#endif
    const int own_fine = lane < at.fine ? fine[lane] : NOT_FINE;
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
        if (STREAMS > 1)
            tile.place_rows(find_fine(fine, own_fine, at.fine, begin, lane), begin);
        if (!quick || !tile.whole(begin)) {
            tile.write_part(begin);
            continue;
        }
        if (runs > WARPS)
            load_run(tile, begin, x);
        tile.write_run(begin, x);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    encode_pages(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                 int block_tokens, const Job *jobs, const int *fine, const u8 *header, const float4 *cells, u8 *piece,
                 Status *status)
{
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    encode_tile<false>(view, jobs[blockIdx.y], blockIdx.x, fine, header, cells, piece, status + blockIdx.y);
}

// Pages that turned out to need 16-bit fields are made once more; each block looks at some of the flags.
extern "C" __global__ void __launch_bounds__(THREADS)
    encode_wide_pages(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table,
                      int block_tokens, const Job *jobs, const int *fine, const u8 *header, const float4 *cells, u8 *piece,
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
