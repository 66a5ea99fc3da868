// Copies to shared memory that a thread asks for and waits for later, in groups.

// BYTES at multiples of BYTES, from and to offsets that the compiler knows. AROUND: the whole 256 bytes around them, where
// BYTES are 16, are brought to the cache.
template <int BYTES, bool AROUND = false, int TO = 0, int FROM = 0>
__device__ __forceinline__ void copy_unit(u8 *to, const u8 *from)
{
#ifdef __CUDA_ARCH__
    const u32 shared = (u32)__cvta_generic_to_shared(to);
    if constexpr (BYTES == 16 && AROUND)
        asm volatile("cp.async.cg.shared.global.L2::256B [%0+%2], [%1+%3], 16;" ::"r"(shared), "l"(from), "n"(TO), "n"(FROM)
                     : "memory");
    else if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0+%2], [%1+%3], 16;" ::"r"(shared), "l"(from), "n"(TO), "n"(FROM)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0+%2], [%1+%3], %4;" ::"r"(shared), "l"(from), "n"(TO), "n"(FROM),
                     "n"(BYTES)
                     : "memory");
#else
    for (int i = 0; i < BYTES; i += 4)
        *(u32 *)(to + TO + i) = *(const u32 *)(from + FROM + i);
#endif
}

__device__ __forceinline__ void close_group()
{
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait for all groups of this thread but the last LEFT.
template <int LEFT> __device__ __forceinline__ void wait_groups()
{
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}
