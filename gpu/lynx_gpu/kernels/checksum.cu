// xxh3-64 of whole streams of pages where they lie, so that nobody on the host has to read them for it. XXH3 of xxHash 0.8
// with its own secret and seed 0: eight sums take 64 bytes at once, and are scrambled after every 1,024. What is added between
// two scrambles does not depend on the sums, so many warps add, and one scrambles.
#include "batch.cuh"

#define STRIPE 64        // bytes that the sums take at once
#define STRIPES 16       // of them between two scrambles,
#define BLOCK (STRIPE * STRIPES)
#define ADDERS 8         // warps that add
#define EACH 4           // blocks of each of them
#define TURN (ADDERS * EACH)
#define SHORT 240        // streams of no more bytes have another hash, which is the host's to make
#define EXACT 0xFFFFFFFFu // as a length: what the status of the page says

struct Length {
    u32 narrow, wide;
};

__device__ const u64 SECRET[24] = {
    0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072, 0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82,
    0x8E2443F7744608B8, 0x4C263A81E69035E0, 0xCB00C391BB52283C, 0xA32E531B8B65D088, 0x4EF90DA297486471, 0xD8ACDEA946EF1938,
    0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9, 0x3159B4CD4BE0518A, 0x647378D9C97E9FC8, 0xC3EBD33483ACC5EA, 0xEB6313FAFFA081C5,
    0x49DAF0B751DD0D17, 0x9E68D429265516D3, 0xFCA1477D58BE162B, 0xCE31D07AD1B8F88F, 0x280416958F3ACB45, 0x7E404BBBCAFBD7AF,
};
__device__ const u64 BEGIN[8] = {
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
};

// Eight bytes from any place on; memory goes on to the next multiple of eight.
__device__ __forceinline__ u64 load(const u8 *at)
{
    const u64 *const from = (const u64 *)((u64)at & ~7ull);
    const int shift = (int)((u64)at & 7) * 8;
    return shift ? from[0] >> shift | from[1] << (64 - shift) : from[0];
}

__device__ __forceinline__ u64 secret(int at) { return load((const u8 *)SECRET + at); }

// What a value adds to its own sum; it is itself added to the sum beside that.
__device__ __forceinline__ u64 product(u64 value, u64 key)
{
    const u64 mixed = value ^ key;
    return (mixed & 0xFFFFFFFFu) * (mixed >> 32);
}

__device__ __forceinline__ u64 scrambled(u64 sum, u64 key) { return (sum ^ sum >> 47 ^ key) * 0x9E3779B1u; }

__device__ __forceinline__ u64 folded(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }

// A stream for each block, of the pages beside each other; [page][stream] to lengths and sums.
extern "C" __global__ void __launch_bounds__(32 * (ADDERS + 1))
    sum_streams(const Job *jobs, const Length *lengths, u8 *piece, const Status *status, u64 *sums)
{
    __shared__ u64 added[2][TURN][8];
    const int page = blockIdx.x, stream = blockIdx.y, at = page * gridDim.y + stream;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 bytes = status[page].flags & WIDE_PAGE ? lengths[at].wide : lengths[at].narrow;
    if (bytes == EXACT)
        bytes = status[page].exact_bytes;
    if (bytes <= SHORT)
        return;
    const u8 *const from = piece + jobs[page].at[stream];
    const u32 blocks = (bytes - 1) / BLOCK;
    const int number = lane & 7;
    u64 keys[STRIPES / 4], sum = BEGIN[number];
#pragma unroll
    for (int i = 0; i < STRIPES / 4; i++)
        keys[i] = SECRET[4 * i + lane / 8 + number];
    for (u32 turn = 0; turn * TURN < blocks; turn++) {
        if (warp) {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const u32 of_turn = (warp - 1) * EACH + i, block = turn * TURN + of_turn;
                if (block >= blocks)
                    break;
                u64 products = 0, values = 0;
#pragma unroll
                for (int k = 0; k < STRIPES / 4; k++) {
                    const u64 value = load(from + block * BLOCK + k * (BLOCK / 4) + lane * 8);
                    products += product(value, keys[k]);
                    values += value;
                }
                u64 total = products + __shfl_xor_sync(0xFFFFFFFFu, values, 1);
                total += __shfl_xor_sync(0xFFFFFFFFu, total, 8);
                total += __shfl_xor_sync(0xFFFFFFFFu, total, 16);
                if (lane < 8)
                    added[turn & 1][of_turn][lane] = total;
            }
        }
        __syncthreads(); // the others go on with the other half of what is shared
        if (warp == 0)
            for (u32 i = 0; i < min(blocks - turn * TURN, (u32)TURN); i++)
                sum = scrambled(sum + added[turn & 1][i][number], SECRET[STRIPES + number]);
    }
    if (warp)
        return;
    const u32 stripes = (bytes - 1) % BLOCK / STRIPE; // and one more, which ends where the stream does
    for (u32 i = 0; i <= stripes; i++) {
        const bool last = i == stripes;
        const u64 value = load(from + (last ? bytes - STRIPE : blocks * BLOCK + i * STRIPE) + 8 * number);
        sum += product(value, last ? secret(121 + 8 * number) : SECRET[i + number]);
        sum += __shfl_xor_sync(0xFFFFFFFFu, value, 1);
    }
    const u64 other = __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    u64 whole = number & 1 ? 0 : folded(sum ^ secret(11 + 8 * number), other ^ secret(19 + 8 * number));
    whole += __shfl_xor_sync(0xFFFFFFFFu, whole, 2);
    whole += __shfl_xor_sync(0xFFFFFFFFu, whole, 4);
    whole += bytes * 0x9E3779B185EBCA87ull;
    whole = (whole ^ whole >> 37) * 0x165667919E3779F9ull;
    if (lane == 0)
        sums[at] = whole ^ whole >> 32;
}
