"""Every kernel file compiles for the devices that it is meant for, warnings being errors; no GPU is needed for that."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from nvrtc import NvrtcError, compile_text, find_nvrtc

from lynx_codec import get_codec
from lynx_gpu.modules import OPTIONS, source
from lynx_gpu.variants import codec_defines, shape_defines

pytestmark = pytest.mark.skipif(find_nvrtc() is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc")

WHOLE, UNOPTIMISED, FRONT = ("-arch=sm_90",), ("-arch=sm_90", "-G"), ("-arch=compute_90", "-G")
"""To machine code as users have it; to machine code in less time; what a compiler says before it makes machine code."""

LYNX, NESTED = get_codec("lynx"), get_codec("nested", bits=[3, 5], chunk=48, exact=True)
CASES: list[tuple[str, tuple[str, ...], Any, tuple[str, int, int, bool, int], dict[str, Any]]] = [
    ("encode.cu", WHOLE, LYNX, ("bfloat16", 8, 128, True, 1), {"WARPS": 8}),
    ("encode.cu", FRONT, NESTED, ("float32", 3, 37, False, 2), {"WARPS": 4}),
    ("decode.cu", WHOLE, LYNX, ("float32", 8, 128, True, 0), {"KNOWN": 2, "STAGES": 3}),
    ("decode.cu", FRONT, NESTED, ("float16", 3, 37, False, 0), {"KNOWN": 1, "STAGES": 4}),
    ("raw.cu", WHOLE, get_codec("bf16"), ("bfloat16", 8, 128, True, 0), {}),
    ("gather.cu", WHOLE, None, None, {}),
    ("checksum.cu", WHOLE, None, None, {}),
    ("exact_encode.cu", WHOLE, NESTED, ("bfloat16", 9, 61, False, 2), {}),
    ("exact_encode.cu", FRONT, NESTED, ("float16", 1, 64, True, 1), {}),
    ("exact_decode.cu", UNOPTIMISED, NESTED, ("float32", 1, 64, True, 1), {}),
    ("exact_decode.cu", FRONT, NESTED, ("bfloat16", 9, 61, False, 0), {}),
]


def test_all_files_are_compiled():
    there = {file.name for file in (files("lynx_gpu") / "kernels").iterdir() if file.name.endswith(".cu")}
    assert there == {name for name, *_ in CASES}


@pytest.mark.parametrize(("name", "how", "codec", "shape", "more"), CASES)
def test_kernels_compile(name: str, how: tuple[str, ...], codec: Any, shape: Any, more: dict[str, Any]):
    defines = () if codec is None else (*shape_defines(*shape), *codec_defines(codec), *more.items())
    code = compile_text(source(name), name, (*OPTIONS, *how, *[f"-D{k}={v}" for k, v in defines]))
    assert bool(code) == (how != FRONT)


@pytest.mark.parametrize("how", [WHOLE, FRONT])
@pytest.mark.parametrize(("body", "message"), [("*out = missing;", "missing"), ("int left;", "never referenced")])
def test_errors_are_told(how: tuple[str, ...], body: str, message: str):
    text = f'extern "C" __global__ void bad(int *out) {{ {body} }}\n'
    with pytest.raises(NvrtcError, match=message):
        compile_text(text, "bad.cu", (*OPTIONS, *how))
