"""The emulator runs kernels as a GPU would, and tells what a kernel may not do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from cuda_emulator import EmulatorError, Library, compile_kernels

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = r"""
#include "emulated.cuh"
extern "C" { __constant__ unsigned table[4]; }

struct Job { unsigned long long out; int count, add; };

extern "C" __global__ void __launch_bounds__(256) sum(const float *in, float *out, int count, Job job) {
  extern __shared__ __align__(16) float part[];
  const int t = threadIdx.y * blockDim.x + threadIdx.x;
  const int i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x * blockDim.y + t;
  part[t] = i < count ? in[i] : 0.0f;
  for (int half = blockDim.x * blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) part[t] += part[t + half];
  }
  if (t == 0) atomicAdd(out, part[0]);
  if (i < job.count) reinterpret_cast<int *>(job.out)[i] = i + job.add + table[i & 3];
}

extern "C" __global__ void warps(unsigned *out) {
  const unsigned l = threadIdx.x & 31, w = threadIdx.x >> 5, all = ~0u;
  unsigned *row = out + threadIdx.x * 12;
  row[0] = __shfl_xor_sync(all, l * 3, 5);
  row[1] = __shfl_up_sync(all, l, 3);
  row[2] = __shfl_down_sync(all, l, 3);
  row[3] = __shfl_sync(all, l + 100 * w, 7);
  row[4] = __ballot_sync(all, l % 3 == w);
  row[5] = __any_sync(all, l == 40) + 2 * __all_sync(all, l < 32);
  row[6] = __shfl_down_sync(all, l, 1, 8);
  if (l >= 16) row[7] = __reduce_add_sync(0xFFFF0000u, l);
  else row[7] = __match_any_sync(0x0000FFFFu, l / 4);
  row[8] = inclusive(l + 1);
  row[9] = __syncthreads_count(l == 3);
  row[10] = __byte_perm(0x03020100, 0x07060504, 0x5240 + l % 2);
  row[11] = __popc(l) + 100 * __clz(l) + 10000 * __ffs(l);
}

extern "C" __global__ void arithmetic(const float *a, const unsigned short *half, float *out, unsigned short *bits) {
  const int i = threadIdx.x;
  out[4 * i] = a[i] * a[i] + a[i + 1];
  out[4 * i + 1] = __fadd_rn(__fmul_rn(a[i], a[i]), a[i + 1]);
  out[4 * i + 2] = __half2float(__ushort_as_half(half[i]));
  out[4 * i + 3] = __uint_as_float((unsigned)half[i] << 16);
  bits[2 * i] = __half_as_ushort(__float2half_rn(a[i]));
  bits[2 * i + 1] = __bfloat16_as_ushort(__float2bfloat16_rn(a[i]));
}

extern "C" __global__ void down(const float *a, float *out) {
  out[threadIdx.x] = __fmaf_rd(a[threadIdx.x], 1.0f, 128.0f);
}

extern "C" __global__ void never() { if (threadIdx.x) __syncthreads(); else __syncwarp(2); }
extern "C" __global__ void left_out() { if (threadIdx.x) __shfl_sync(~0u, 1, 0); }
extern "C" __global__ void mixed() { if (threadIdx.x) __shfl_sync(~0u, 1, 0); else __syncwarp(); }
extern "C" __global__ void trap() { __trap(); }
extern "C" __global__ void neighbours(int *out, int barrier) {
  __shared__ int places[32];
  places[threadIdx.x] = threadIdx.x;
  if (barrier) __syncthreads();
  out[threadIdx.x] = places[threadIdx.x ^ 1];
}
#define MADE(name) extern "C" __global__ void name(unsigned char *out) { out[threadIdx.x] = LEVEL; }
MADE(made)
"""
HEADER = r"""
#pragma once
__device__ __forceinline__ unsigned inclusive(unsigned value) {
  for (int by = 1; by < 32; by *= 2) {
    const unsigned other = __shfl_up_sync(~0u, value, by);
    if ((threadIdx.x & 31) >= by) value += other;
  }
  return value;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "emulated.cu").write_text("#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n" + SOURCE)
    (folder / "emulated.cuh").write_text(HEADER)
    return compile_kernels([folder / "emulated.cu"], {"LEVEL": 7})


@pytest.mark.parametrize("order", [0, 1, 5])
def test_blocks_shared_memory_and_arguments(library: Library, order: int):
    values = np.arange(1000, dtype=np.float32)
    total, numbers = np.zeros(1, np.float32), np.zeros(300, np.int32)
    library.memory("table", np.uint32, 4)[:] = 0, 10, 20, 30
    job = np.array((numbers.ctypes.data, 300, 5), dtype=[("out", "u8"), ("count", "i4"), ("add", "i4")])[()]
    library.launch("sum", (3, 2), (16, 16), [values, total, np.int32(1000), job], shared_bytes=1024, order=order)
    assert total[0] == values.sum()
    assert np.array_equal(numbers, np.arange(300) + 5 + np.arange(300) % 4 * 10)


@pytest.mark.parametrize("order", [0, 1, 5])
def test_warp_operations(library: Library, order: int):
    out = np.zeros((96, 12), np.uint32)
    library.launch("warps", 1, 96, [out], order=order)
    lane, warp = np.arange(96) % 32, np.arange(96) // 32
    assert np.array_equal(out[:, 0], (lane ^ 5) * 3)
    assert np.array_equal(out[:, 1], np.where(lane < 3, lane, lane - 3))
    assert np.array_equal(out[:, 2], np.where(lane > 28, lane, lane + 3))
    assert np.array_equal(out[:, 3], 7 + 100 * warp)
    assert np.array_equal(out[:, 4], [sum(1 << i for i in range(32) if i % 3 == w) for w in warp])
    assert set(out[:, 5]) == {2}
    assert np.array_equal(out[:, 6], np.where(lane % 8 == 7, lane, lane + 1))
    assert np.array_equal(out[:, 7], np.where(lane >= 16, sum(range(16, 32)), 15 << lane // 4 * 4))
    assert np.array_equal(out[:, 8], (lane + 1) * (lane + 2) // 2)
    assert set(out[:, 9]) == {3}
    assert np.array_equal(out[:, 10], np.where(lane % 2, 0x05020401, 0x05020400))
    bits = [int(i).bit_length() for i in lane]
    lowest = [(int(i) & -int(i)).bit_length() for i in lane]
    assert np.array_equal(
        out[:, 11],
        [int(i).bit_count() + 100 * (32 - b) + 10000 * f for i, b, f in zip(lane, bits, lowest, strict=True)],
    )


def test_arithmetic_rounds_every_operation(library: Library):
    rng = np.random.default_rng(0)
    values = rng.standard_normal(257).astype(np.float32)
    halves = rng.integers(0, 0x7C00, 256).astype(np.uint16)
    out, bits = np.zeros((256, 4), np.float32), np.zeros((256, 2), np.uint16)
    library.launch("arithmetic", 1, 256, [values, halves, out, bits])
    expected = values[:256] * values[:256] + values[1:]
    assert np.array_equal(out[:, 0], expected)
    assert np.array_equal(out[:, 1], expected)
    assert np.array_equal(out[:, 2], halves.view(np.float16).astype(np.float32))
    assert np.array_equal(out[:, 3], (halves.astype(np.uint32) << 16).view(np.float32))
    assert np.array_equal(bits[:, 0], values[:256].astype(np.float16).view(np.uint16))
    word = values[:256].view(np.uint32)
    assert np.array_equal(bits[:, 1], (word + 0x7FFF + (word >> 16 & 1)) >> 16)


def test_sums_are_rounded_down(library: Library):
    values = np.array([0.5, 2.0**-20, -(2.0**-20), 1 + 2.0**-17, 63.999996], np.float32)
    out = np.zeros(values.size, np.float32)
    library.launch("down", 1, values.size, [values, out])
    ulp = np.where(values < 0, 2.0**17, 2.0**16)  # below and above 128
    assert np.array_equal(out, np.floor((values.astype(np.float64) + 128) * ulp) / ulp)


def test_what_no_kernel_may_do(library: Library):
    cases = {
        "never": "outside its own mask",
        "left_out": "left the kernel|never come",
        "mixed": "different operations",
        "trap": "__trap",
    }
    for kernel, message in cases.items():
        for order in (0, 1):
            with pytest.raises(EmulatorError, match=message):
                library.launch(kernel, 1, 64, [], order=order)


def test_orders_tell_races(library: Library):
    """A missing barrier shows in the order of threads, and as garbage in shared memory."""
    expected = np.arange(32) ^ 1
    for barrier in (0, 1):
        for order in (0, 1, 9):
            out = np.zeros(32, np.int32)
            library.launch("neighbours", 1, 32, [out, np.int32(barrier)], order=order)
            assert np.array_equal(out, expected) == bool(barrier)


def test_macros_make_kernels(library: Library):
    out = np.zeros(3, np.uint8)
    library.launch("made", 1, 3, [out])
    assert out.tolist() == [7, 7, 7]


def test_arguments_are_checked(library: Library):
    with pytest.raises(EmulatorError, match="another number"):
        library.launch("trap", 1, 1, [np.int32(1)])
    with pytest.raises(EmulatorError, match="argument 2 has 8 bytes, the kernel takes 4"):
        library.launch("sum", 1, 1, [0, 0, 5, np.zeros((), "u8,u8")[()]])
    with pytest.raises(EmulatorError, match="no kernel 'nothing'"):
        library.launch("nothing", 1, 1, [])


def test_compiler_messages(tmp_path: Path):
    (tmp_path / "bad.cu").write_text('extern "C" __global__ void bad() { missing(); }\n')
    with pytest.raises(EmulatorError, match="missing"):
        compile_kernels([tmp_path / "bad.cu"])
