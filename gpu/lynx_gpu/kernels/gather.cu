// Pieces of host memory, pinned, into device memory, all in one launch: a copy of its own for each costs the host far more
// than the bytes do. The table of pieces is read from pinned memory, too.
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256
#define AHEAD 8                     // reads of a thread that are under way at once: the link to the host takes long
#define PART (THREADS * AHEAD * 16) // bytes of a block

struct Span {
    u64 from, to, bytes;
};

template <typename Unit> __device__ __forceinline__ void copy(u64 from, u64 to, u32 bytes)
{
    const Unit *const source = (const Unit *)from;
    Unit *const target = (Unit *)to;
    const u32 count = bytes / sizeof(Unit);
    for (u32 first = threadIdx.x; first < count; first += THREADS * AHEAD) {
        Unit held[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + i * THREADS < count)
                held[i] = source[first + i * THREADS];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + i * THREADS < count)
                target[first + i * THREADS] = held[i];
    }
    const u32 rest = count * sizeof(Unit) + threadIdx.x;
    if (rest < bytes)
        ((u8 *)to)[rest] = ((const u8 *)from)[rest];
}

extern "C" __global__ void __launch_bounds__(THREADS) gather(const Span *spans)
{
    const Span span = spans[blockIdx.y];
    const u64 begin = (u64)blockIdx.x * PART;
    if (begin >= span.bytes)
        return;
    const u64 from = span.from + begin, to = span.to + begin;
    const u32 bytes = span.bytes - begin < PART ? (u32)(span.bytes - begin) : PART;
    if (((from | to) & 15) == 0)
        copy<uint4>(from, to, bytes);
    else if (((from | to) & 3) == 0)
        copy<u32>(from, to, bytes);
    else
        copy<u8>(from, to, bytes);
}
