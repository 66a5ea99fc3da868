"""What kernels take for granted of a device's approximate arithmetic, looked at for all numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lynx_gpu.modules import source
from lynx_gpu.variants import shape_defines

KERNELS = r"""
extern "C" __global__ void logarithm(u32 begin, u32 count, double *worst)
{
    double own = 0;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const float value = as_float(begin + i);
        const double exact = log2((double)value), off = fabs((double)log2_of(value) - exact);
        own = fmax(own, value > 0.5f && value < 2.0f ? off : off / fabs(exact));
    }
    atomicMax((unsigned long long *)worst, (unsigned long long)__double_as_longlong(own));
}

extern "C" __global__ void reciprocals(u32 begin, u32 count, u32 *different)
{
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const float value = as_float(begin + i);
        if (as_bits(reciprocal(value)) != as_bits(__frcp_rn(value)))
            atomicAdd(different, 1);
    }
}
"""
OCTAVE = 1 << 23

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("cupy", ["device"], indirect=True)]


def _kernel(cupy: Any, name: str) -> Any:
    defines = [f"-D{macro}={value}" for macro, value in shape_defines("bfloat16", 8, 128, True, 1)]
    options = ("--std=c++17", "--fmad=false", *defines)
    return cupy.RawModule(code=source("common.cuh") + KERNELS, options=options).get_function(name)


def _bits(value: float) -> np.uint32:
    return np.float32(value).view(np.uint32)


def test_logarithms_are_as_exact_as_is_said(cupy: Any) -> None:
    """All numbers from 1/2 to 2,048, which are more than the encoder has."""
    worst = cupy.zeros(1, cupy.float64)
    _kernel(cupy, "logarithm")((1024,), (256,), (_bits(0.5), np.uint32(12 * OCTAVE), worst))
    assert 2.0**-30 < float(worst[0]) <= 2.0**-22


@pytest.mark.parametrize("exponent", [-104, -1, 0, 60, 119])
def test_reciprocals_are_rounded_correctly(cupy: Any, exponent: int) -> None:
    different = cupy.zeros(1, cupy.uint32)
    _kernel(cupy, "reciprocals")((1024,), (256,), (_bits(2.0**exponent), np.uint32(OCTAVE), different))
    assert int(different[0]) == 0
