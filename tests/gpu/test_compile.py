"""Every kernel compiles for the machines that it is meant for, warnings being errors; no GPU is needed for that."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvrtc import NvrtcError, compile_file, find_nvrtc

import lynx_gpu

pytestmark = pytest.mark.skipif(find_nvrtc() is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc")

KERNELS = Path(lynx_gpu.__file__).parent / "kernels"
OPTIONS = ("--fmad=false", "-std=c++17", "-arch=sm_90", "--warning-as-error=all-warnings", "--device-int128")


@pytest.mark.parametrize("name", sorted(path.name for path in KERNELS.glob("*.cu")))
def test_kernels_compile(name: str):
    code = compile_file(KERNELS / name, OPTIONS)
    assert code[:4] == b"\x7fELF"


def test_errors_are_told(tmp_path: Path):
    path = tmp_path / "bad.cu"
    path.write_text('extern "C" __global__ void bad(int *out) { *out = missing; }\n')
    with pytest.raises(NvrtcError, match="missing"):
        compile_file(path, OPTIONS)
    path.write_text('extern "C" __global__ void unused(int *out) { int left; *out = 1; }\n')
    with pytest.raises(NvrtcError, match="never referenced"):
        compile_file(path, OPTIONS)
