// Runs CUDA kernels on the CPU, so that their bytes can be tested where there is no GPU. For tests only: it is slow.
//
// From Python (cuda_emulator.py beside this folder):
//
//   library = compile_kernels([path, ...], defines={"NAME": 1})    all kernels of these .cu files; includes are found beside them
//   library.launch("kernel", grid, block, args, shared_bytes=0, order=0)
//
// grid and block are whole numbers or tuples. args are numpy arrays (their address is passed), numpy scalars and arrays of
// structs (by value), and whole numbers (64 bits: an address, size_t or long long); their sizes are checked against the
// kernel's parameters. emulated_cupy.py gives all that the look of CuPy, so that whole launchers can be tested.
// `order` 0 runs the threads of a block, and the blocks, in order; 1 in reverse; others shuffle them with that seed: a
// kernel without races gives the same bytes in all orders. An error of the kernel (a barrier that not all threads reach,
// a warp operation whose lanes disagree, __trap, assert) raises EmulatorError. Shared memory holds garbage at first.
//
// How: every thread of a block is a fiber that runs until it needs others (a barrier or a warp operation); blocks run one
// after another, so a kernel must not wait for a block behind its own. Lanes do not run in lockstep: what a kernel may not
// rely on, it cannot. There is __global__, __device__, __constant__, static and dynamic shared memory, warp operations
// with `_sync`, atomics, the intrinsics below. Not there: cooperative groups, textures, inline PTX, launches from kernels,
// template kernels (write extern "C" ones), __activemask. LYNX_EMULATOR is defined. Do not name types uint32_t and the
// like: NVRTC has none, and <cstdint> is included here.
#pragma once

#include <fenv.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#define LYNX_EMULATOR 1
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__ __restrict
#define __grid_constant__
#define __shared__ static __attribute__((section("shared_memory")))
#ifndef LYNX_EMULATOR_LIST  // defined while Python looks for the names of kernels
#define __global__
#endif

using std::max;
using std::min;

struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
#define LYNX_VECTOR(T, name, n2, n4)                                                       \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                       \
  struct alignas(sizeof(T) * 4 > 16 ? 16 : sizeof(T) * 4) name##4 { T x, y, z, w; };       \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                               \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
LYNX_VECTOR(unsigned char, uchar, , )
LYNX_VECTOR(unsigned short, ushort, , )
LYNX_VECTOR(unsigned, uint, , )
LYNX_VECTOR(int, int, , )
LYNX_VECTOR(float, float, , )
LYNX_VECTOR(unsigned long long, ulonglong, , )
#undef LYNX_VECTOR

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// --- fibers ----------------------------------------------------------------------------------------------------------

extern char __start_shared_memory[] __attribute__((weak)), __stop_shared_memory[] __attribute__((weak));

namespace emulator {

enum Op { NONE, EXITED, BARRIER, COUNT, AND, OR, SYNC, SHUFFLE, BALLOT, ALL, ANY, MATCH, ADD, MIN, MAX, BITAND, BITOR, BITXOR };

struct Fiber {
  uint3 index;
  Op op = NONE;
  unsigned mask = 0;
  unsigned long long value = 0, result = 0;  // of the operation that it waits for
  int source = 0;
  bool started = false;
  jmp_buf context;
};

constexpr size_t STACK_BYTES = 64 << 10, MOST_THREADS = 1024, MOST_SHARED = 228 << 10;
static Fiber fibers[MOST_THREADS];
static unsigned threads;
static Fiber *current;
static jmp_buf scheduler;
static ucontext_t first_return;
static char *stacks;
alignas(128) static char dynamic[MOST_SHARED];
static char problem[256];
static void (*body)(void *);
static void *body_arguments;

inline unsigned lane(const Fiber &f) { return (&f - fibers) % 32; }

__attribute__((noinline)) static void leave() {  // back to the scheduler; returns when it resumes this fiber
  asm volatile("" ::: "memory");
  if (_setjmp(current->context) == 0) _longjmp(scheduler, 1);
  threadIdx = current->index;
  asm volatile("" ::: "memory");
}

[[noreturn]] __attribute__((noinline)) static void fail(const char *text) {
  if (!problem[0]) {
    snprintf(problem, sizeof problem, "%s (block %u,%u thread %u,%u)", text, blockIdx.x, blockIdx.y, threadIdx.x, threadIdx.y);
  }
  _longjmp(scheduler, 2);
}

static void enter() {
  threadIdx = current->index;
  body(body_arguments);
  current->op = EXITED;
  _longjmp(scheduler, 1);
}

static void resume(Fiber &f) {
  current = &f;
  if (f.started) _longjmp(f.context, 1);
  f.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks + (&f - fibers) * STACK_BYTES;
  context.uc_stack.ss_size = STACK_BYTES;
  context.uc_link = &first_return;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

// Completes the operation of a warp that `f` was the last to reach, if it was.
static void complete_warp(Fiber &f) {
  Fiber *warp = &f - lane(f);
  const unsigned left = fibers + threads - warp, mask = left < 32 ? f.mask & ((1u << left) - 1) : f.mask;
  for (unsigned l = 0; l < 32; ++l) {
    if (!(mask >> l & 1)) continue;
    if (warp[l].op == EXITED) fail("a warp operation names a lane that has left the kernel");
    if (warp[l].op <= OR || warp[l].mask != f.mask) return;
    if (warp[l].op != f.op) fail("the lanes of a warp meet at different operations");
  }
  unsigned long long ballot = 0, every = 0;
  bool first = true;
  for (unsigned l = 0; l < 32; ++l) {
    if (!(mask >> l & 1)) continue;
    unsigned long long v = warp[l].value;
    ballot |= (unsigned long long)(v != 0) << l;
    const unsigned a = every, b = v;
    switch (first ? NONE : f.op) {
      case ADD: every = a + b; break;
      case MIN: every = a < b ? a : b; break;
      case MAX: every = a > b ? a : b; break;
      case BITAND: every = a & b; break;
      case BITOR: every = a | b; break;
      case BITXOR: every = a ^ b; break;
      default: every = v;
    }
    first = false;
  }
  for (unsigned l = 0; l < 32; ++l) {
    if (!(mask >> l & 1)) continue;
    Fiber &g = warp[l];
    switch (g.op) {
      case SHUFFLE:
        if (!(mask >> g.source & 1)) fail("a shuffle reads from a lane outside its mask");
        g.result = warp[g.source].value;
        break;
      case BALLOT: g.result = ballot; break;
      case ALL: g.result = ballot == mask; break;
      case ANY: g.result = ballot != 0; break;
      case MATCH:
        g.result = 0;
        for (unsigned o = 0; o < 32; ++o)
          if (mask >> o & 1 && warp[o].value == g.value) g.result |= 1u << o;
        break;
      default: g.result = every;
    }
  }
  for (unsigned l = 0; l < 32; ++l)
    if (mask >> l & 1) warp[l].op = NONE;
}

inline unsigned long long warp_operation(Op op, unsigned mask, unsigned long long value, int source = 0) {
  Fiber &f = *current;
  if (!(mask >> lane(f) & 1)) fail("a warp operation by a lane outside its own mask");
  f.op = op, f.mask = mask, f.value = value, f.source = source;
  complete_warp(f);
  while (f.op != NONE) leave();
  return f.result;
}

inline int barrier(Op op, int value) {
  Fiber &f = *current;
  f.op = op, f.value = value != 0;
  leave();
  return f.result;
}

// Frees the threads that wait at a barrier, if all that run are there.
static bool complete_barrier() {
  Op op = NONE;
  unsigned set = 0, waiting = 0;
  for (unsigned i = 0; i < threads; ++i) {
    if (fibers[i].op == EXITED) continue;
    if (fibers[i].op < BARRIER || fibers[i].op > OR) return false;
    if (op != NONE && fibers[i].op != op) fail("threads wait at barriers of different kinds");
    op = fibers[i].op;
    set += fibers[i].value;
    ++waiting;
  }
  for (unsigned i = 0; i < threads; ++i) {
    if (fibers[i].op == EXITED) continue;
    fibers[i].op = NONE;
    fibers[i].result = op == COUNT ? set : op == AND ? set == waiting : set != 0;
  }
  return waiting != 0;
}

static bool run_block(std::vector<unsigned> &order) {
  for (unsigned i = 0; i < threads; ++i) {
    fibers[i].op = NONE, fibers[i].started = false;
    fibers[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
  }
  static volatile unsigned next, left;
  static volatile bool moved;
  const int why = _setjmp(scheduler);  // a fiber comes back here
  if (why == 2) return false;
  if (why == 0) next = 0, moved = false;
  for (;;) {
    for (; next < threads;) {
      Fiber &f = fibers[order[next]];
      next = next + 1;
      if (f.op != NONE) continue;
      moved = true;
      resume(f);
    }
    left = 0;
    for (unsigned i = 0; i < threads; ++i) left = left + (fibers[i].op != EXITED);
    if (!left) return true;
    if (!moved && !complete_barrier()) fail("threads wait for others that never come");
    next = 0, moved = false;
  }
}

static std::vector<unsigned> sequence(unsigned count, unsigned order) {
  std::vector<unsigned> all(count);
  for (unsigned i = 0; i < count; ++i) all[i] = order == 1 ? count - 1 - i : i;
  std::mt19937 random(order);
  if (order > 1) std::shuffle(all.begin(), all.end(), random);
  return all;
}

static const char *run(void (*what)(void *), void *arguments, const unsigned *shape, unsigned shared_bytes, unsigned order) {
  gridDim = {shape[0], shape[1], shape[2]};
  blockDim = {shape[3], shape[4], shape[5]};
  threads = blockDim.x * blockDim.y * blockDim.z;
  problem[0] = 0;
  if (!threads || threads > MOST_THREADS || shared_bytes > MOST_SHARED) return "a block of that size cannot be launched";
  if (!stacks) {
    stacks = (char *)mmap(nullptr, STACK_BYTES * MOST_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) return "no memory for the stacks of threads";
  }
  body = what, body_arguments = arguments;
  std::vector<unsigned> thread_order = sequence(threads, order);
  for (unsigned b : sequence(gridDim.x * gridDim.y * gridDim.z, order)) {
    blockIdx = {b % gridDim.x, b / gridDim.x % gridDim.y, b / gridDim.x / gridDim.y};
    memset(dynamic, 0xA5, shared_bytes);
    memset(__start_shared_memory, 0xA5, __stop_shared_memory - __start_shared_memory);
    if (!run_block(thread_order)) return problem;
  }
  return nullptr;
}

template <class... A>
struct Call {
  void (*kernel)(A...);
  void **arguments;
  template <size_t... I>
  void spread(std::index_sequence<I...>) { kernel(*(std::remove_reference_t<A> *)arguments[I]...); }
  static void go(void *call) { ((Call *)call)->spread(std::index_sequence_for<A...>()); }
};

template <class... A>
const char *launch(void (*kernel)(A...), const unsigned *shape, unsigned shared_bytes, unsigned order, void **arguments,
                   const unsigned *sizes, unsigned count) {
  const unsigned wanted[] = {sizeof(A)..., 0};
  if (count != sizeof...(A)) return "the kernel takes another number of arguments";
  for (unsigned i = 0; i < count; ++i) {
    if (sizes[i] != wanted[i]) {
      snprintf(problem, sizeof problem, "argument %u has %u bytes, the kernel takes %u", i, sizes[i], wanted[i]);
      return problem;
    }
  }
  Call<A...> call{kernel, arguments};
  return run(Call<A...>::go, &call, shape, shared_bytes, order);
}

template <class T>
unsigned long long pack(T value) {
  static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T>
T unpack(unsigned long long bits) {
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
T shuffle(unsigned mask, T value, int source) { return unpack<T>(warp_operation(SHUFFLE, mask, pack(value), source)); }

}  // namespace emulator

// --- barriers and warp operations ------------------------------------------------------------------------------------

inline void __syncthreads() { emulator::barrier(emulator::BARRIER, 0); }
inline int __syncthreads_count(int p) { return emulator::barrier(emulator::COUNT, p); }
inline int __syncthreads_and(int p) { return emulator::barrier(emulator::AND, p); }
inline int __syncthreads_or(int p) { return emulator::barrier(emulator::OR, p); }
inline void __syncwarp(unsigned mask = ~0u) { emulator::warp_operation(emulator::SYNC, mask, 0); }
inline unsigned __ballot_sync(unsigned mask, int p) { return emulator::warp_operation(emulator::BALLOT, mask, p != 0); }
inline int __all_sync(unsigned mask, int p) { return emulator::warp_operation(emulator::ALL, mask, p != 0); }
inline int __any_sync(unsigned mask, int p) { return emulator::warp_operation(emulator::ANY, mask, p != 0); }
template <class T> unsigned __match_any_sync(unsigned mask, T v) { return emulator::warp_operation(emulator::MATCH, mask, emulator::pack(v)); }
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) { return emulator::warp_operation(emulator::ADD, mask, v); }
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) { return emulator::warp_operation(emulator::MIN, mask, v); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) { return emulator::warp_operation(emulator::MAX, mask, v); }
inline unsigned __reduce_and_sync(unsigned mask, unsigned v) { return emulator::warp_operation(emulator::BITAND, mask, v); }
inline unsigned __reduce_or_sync(unsigned mask, unsigned v) { return emulator::warp_operation(emulator::BITOR, mask, v); }
inline unsigned __reduce_xor_sync(unsigned mask, unsigned v) { return emulator::warp_operation(emulator::BITXOR, mask, v); }
template <class T> T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
  const int l = emulator::lane(*emulator::current);
  return emulator::shuffle(mask, v, (l & ~(width - 1)) | (source & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int with, int width = 32) {
  const int l = emulator::lane(*emulator::current), s = l ^ with;
  return emulator::shuffle(mask, v, s < (l & ~(width - 1)) + width ? s : l);
}
template <class T> T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
  const int l = emulator::lane(*emulator::current), s = l - (int)by;
  return emulator::shuffle(mask, v, s >= (l & ~(width - 1)) ? s : l);
}
template <class T> T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
  const int l = emulator::lane(*emulator::current), s = l + (int)by;
  return emulator::shuffle(mask, v, s < (l & ~(width - 1)) + width ? s : l);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
[[noreturn]] inline void __trap() { emulator::fail("__trap"); }
#undef assert
#define assert(x) ((x) ? (void)0 : emulator::fail("assert " #x))

// --- atomics: blocks and threads take turns, so these are plain ------------------------------------------------------

#define LYNX_ATOMIC(name, expression)                                     \
  template <class T> T name(T *at, std::common_type_t<T> v) {             \
    const T old = *at;                                                    \
    *at = expression;                                                     \
    return old;                                                           \
  }                                                                       \
  template <class T> T name##_block(T *at, std::common_type_t<T> v) { return name(at, v); }
LYNX_ATOMIC(atomicAdd, old + v)
LYNX_ATOMIC(atomicSub, old - v)
LYNX_ATOMIC(atomicOr, old | v)
LYNX_ATOMIC(atomicAnd, old & v)
LYNX_ATOMIC(atomicXor, old ^ v)
LYNX_ATOMIC(atomicMin, old < v ? old : v)
LYNX_ATOMIC(atomicMax, old > v ? old : v)
LYNX_ATOMIC(atomicExch, v)
LYNX_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
#undef LYNX_ATOMIC
template <class T> T atomicCAS(T *at, std::common_type_t<T> expected, std::common_type_t<T> v) {
  const T old = *at;
  if (old == expected) *at = v;
  return old;
}

// --- arithmetic (compiled without contraction, so a * b + c is two roundings) ----------------------------------------

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
// As far off as lg2.approx.f32 may be by its documentation, in either direction.
inline float emulated_lg2(float a) {
  unsigned bits;
  memcpy(&bits, &a, sizeof bits);
  const double exact = log2((double)a), most = 0x1p-22 * (a >= 0.5f && a <= 2.0f ? 1.0 : fabs(exact));
  const float below = nextafterf((float)(exact - most), INFINITY), above = nextafterf((float)(exact + most), -INFINITY);
  return bits * 0x9E3779B1u >> 31 ? above : below;
}
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float fmaf_in(int direction, float a, float b, float c) {
  const int mode = fegetround();
  fesetround(direction);
  volatile float first = a, sum = fmaf(first, b, c);
  fesetround(mode);
  return sum;
}
inline float __fmaf_rd(float a, float b, float c) { return fmaf_in(FE_DOWNWARD, a, b, c); }
inline float __fmaf_ru(float a, float b, float c) { return fmaf_in(FE_UPWARD, a, b, c); }
inline float __fmaf_rz(float a, float b, float c) { return fmaf_in(FE_TOWARDZERO, a, b, c); }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline unsigned __float_as_uint(float a) { return emulator::unpack<unsigned>(emulator::pack(a)); }
inline int __float_as_int(float a) { return emulator::unpack<int>(emulator::pack(a)); }
inline float __uint_as_float(unsigned a) { return emulator::unpack<float>(a); }
inline float __int_as_float(int a) { return emulator::unpack<float>((unsigned)a); }
inline float __uint2float_rn(unsigned a) { return (float)a; }
inline float __int2float_rn(int a) { return (float)a; }
inline int __float2int_rz(float a) {  // as the GPU does: saturates, NaN is 0
  return a != a ? 0 : a >= 2147483648.0f ? 0x7FFFFFFF : a < -2147483648.0f ? (int)0x80000000 : (int)a;
}
inline int __float2int_rd(float a) { return __float2int_rz(floorf(a)); }
inline int __float2int_ru(float a) { return __float2int_rz(ceilf(a)); }
inline int __float2int_rn(float a) { return __float2int_rz(rintf(a)); }
inline unsigned __float2uint_rz(float a) { return !(a > 0) ? 0 : a >= 4294967296.0f ? ~0u : (unsigned)a; }
inline unsigned __float2uint_rn(float a) { return __float2uint_rz(rintf(a)); }
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
inline int __clz(int a) { return a ? __builtin_clz(a) : 32; }
inline int __clzll(long long a) { return a ? __builtin_clzll(a) : 64; }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline int __ffsll(long long a) { return __builtin_ffsll(a); }
inline unsigned __brev(unsigned a) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (a >> i & 1) << (31 - i);
  return r;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const unsigned long long all = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned char byte = all >> 8 * (s >> 4 * i & 7);
    r |= (unsigned)(s >> 4 * i & 8 ? (byte & 0x80 ? 0xFF : 0) : byte) << 8 * i;
  }
  return r;
}
inline unsigned __vminu2(unsigned a, unsigned b) {
  const unsigned low = std::min(a & 0xFFFFu, b & 0xFFFFu), high = std::min(a >> 16, b >> 16);
  return high << 16 | low;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { return ((unsigned long long)high << 32 | low) << (by & 31) >> 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return ((unsigned long long)high << 32 | low) >> (by & 31); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)a * b >> 64; }

// --- loads and stores with hints -------------------------------------------------------------------------------------

#define LYNX_LOAD(name) template <class T> T name(const T *at) { return *at; }
LYNX_LOAD(__ldg)
LYNX_LOAD(__ldca)
LYNX_LOAD(__ldcg)
LYNX_LOAD(__ldcs)
LYNX_LOAD(__ldlu)
LYNX_LOAD(__ldcv)
#undef LYNX_LOAD
#define LYNX_STORE(name) template <class T> void name(T *at, std::common_type_t<T> value) { *at = value; }
LYNX_STORE(__stwb)
LYNX_STORE(__stcg)
LYNX_STORE(__stcs)
LYNX_STORE(__stwt)
#undef LYNX_STORE
