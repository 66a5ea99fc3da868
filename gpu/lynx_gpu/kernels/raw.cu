// Pages as 16-bit floats (`bf16`): a thread takes 8 channels of one token.
#include "common.cuh"

#define THREADS 256
#define HEADER 32

__device__ __forceinline__ int channels_of(Group group) { return min(SIZE - group.number * 8, 8); }

extern "C" __global__ void __launch_bounds__(THREADS)
    encode_raw(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table, int block_tokens,
               const Job *jobs, const u8 *header, u8 *piece, Status *status)
{
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    const Job &job = jobs[blockIdx.y];
    u8 *const anchor = piece + job.at[0];
    if (blockIdx.x == 0)
        write_header(anchor, header, HEADER, job, false, THREADS);
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < job.tokens * GROUPS; i += gridDim.x * THREADS) {
        const int t = i / GROUPS;
        const Group group = group_of(i % GROUPS);
        const int count = channels_of(group), channel = group.head * SIZE + group.number * 8;
        const i64 from = row_of(view, job.start + t) + group.head * view.head_stride + group.number * 8;
        u32 pairs[4];
#if KIND != FLOAT32
        if (count == 8 && ((u64)(pointer + 2 * from) & 15) == 0) {
            const uint4 all = *(const uint4 *)(pointer + 2 * from);
            pairs[0] = all.x, pairs[1] = all.y, pairs[2] = all.z, pairs[3] = all.w;
            refuse_quad(status + blockIdx.y, t, channel, 4, Quad{pairs[0], pairs[1]});
            refuse_quad(status + blockIdx.y, t, channel + 4, 4, Quad{pairs[2], pairs[3]});
        } else
#endif
        {
            for (int j = 0; j < 2; j++) {
                const int there = max(min(count - 4 * j, 4), 0);
                const Quad quad = load_quad(pointer, from + 4 * j, there);
                refuse_quad(status + blockIdx.y, t, channel + 4 * j, there, quad);
                pairs[2 * j] = raw_pair(quad.low);
                pairs[2 * j + 1] = raw_pair(quad.high);
            }
        }
        u8 *const to = anchor + HEADER + 2 * ((i64)t * CHANNELS + channel);
        if (count == 8 && ((u64)to & 15) == 0) {
            *(uint4 *)to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (j < count) {
                    const u32 half = pairs[j / 2] >> 16 * (j & 1);
                    to[2 * j] = (u8)half;
                    to[2 * j + 1] = (u8)(half >> 8);
                }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_raw(u8 *pointer, i64 token_stride, i64 head_stride, i64 block_stride, const int *block_table, int block_tokens,
               const Job *jobs, const u8 *piece, Status *status)
{
    const View view = {pointer, token_stride, head_stride, block_stride, block_table, block_tokens};
    const Job &job = jobs[blockIdx.y];
    const u8 *const anchor = piece + job.at[0];
    const bool raw_half = anchor[RAW_AT];
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < job.tokens * GROUPS; i += gridDim.x * THREADS) {
        const int t = i / GROUPS;
        const Group group = group_of(i % GROUPS);
        const int count = channels_of(group), channel = group.head * SIZE + group.number * 8;
        const i64 at = row_of(view, job.start + t) + group.head * view.head_stride + group.number * 8;
        const u8 *const from = anchor + HEADER + 2 * ((i64)t * CHANNELS + channel);
        u32 pairs[4] = {0, 0, 0, 0};
        if (count == 8 && ((u64)from & 15) == 0) {
            const uint4 all = *(const uint4 *)from;
            pairs[0] = all.x, pairs[1] = all.y, pairs[2] = all.z, pairs[3] = all.w;
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (j < count)
                    pairs[j / 2] |= (from[2 * j] | (u32)from[2 * j + 1] << 8) << 16 * (j & 1);
        }
        float values[8];
        bool finite = true;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const u32 half = pairs[j / 2] >> 16 * (j & 1) & 0xFFFFu;
            values[j] = raw_half ? from_half(half) : from_bfloat16(half);
            finite &= (as_bits(values[j]) & 0x7FFFFFFFu) < 0x7F800000u;
        }
        if (!finite)
            atomicOr(&status[blockIdx.y].flags, BAD_RAW);
        store_values(pointer, at, count, values);
    }
}
