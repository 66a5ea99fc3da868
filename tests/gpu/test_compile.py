"""Every kernel file compiles for the devices that it is meant for, warnings being errors; no GPU is needed for that."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from nvrtc import NvrtcError, compile_text, find_nvrtc

from lynx_codec import get_codec
from lynx_gpu.codec import codec_defines, shape_defines
from lynx_gpu.modules import OPTIONS, source

pytestmark = pytest.mark.skipif(find_nvrtc() is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc")

ARCHITECTURE = "-arch=sm_90"
WARNINGS = "--warning-as-error=all-warnings"
LYNX, NESTED = get_codec("lynx"), get_codec("nested", bits=[3, 5], chunk=48, exact=True)
CASES: dict[str, list[tuple[Any, tuple[str, int, int, bool, int], dict[str, Any]]]] = {
    "encode.cu": [(LYNX, ("bfloat16", 8, 128, True, 1), {}), (NESTED, ("float32", 3, 37, False, 2), {})],
    "decode.cu": [
        (LYNX, ("float32", 8, 128, True, 0), {"KNOWN": 2}),
        (NESTED, ("float16", 3, 37, False, 0), {"KNOWN": 1}),
    ],
    "raw.cu": [(get_codec("bf16"), ("bfloat16", 8, 128, True, 0), {})],
    "exact_encode.cu": [(NESTED, ("bfloat16", 9, 61, False, 2), {})],
    "exact_decode.cu": [(NESTED, ("float32", 1, 64, True, 1), {})],
}


def test_all_files_are_compiled():
    assert {file.name for file in (files("lynx_gpu") / "kernels").iterdir() if file.name.endswith(".cu")} == set(CASES)


@pytest.mark.parametrize(("name", "case"), [(name, i) for name, cases in CASES.items() for i in range(len(cases))])
def test_kernels_compile(name: str, case: int):
    codec, shape, more = CASES[name][case]
    defines = (*shape_defines(*shape), *codec_defines(codec), *more.items())
    code = compile_text(source(name), name, (*OPTIONS, ARCHITECTURE, WARNINGS, *[f"-D{k}={v}" for k, v in defines]))
    assert code[:4] == b"\x7fELF"


@pytest.mark.parametrize(("body", "message"), [("*out = missing;", "missing"), ("int left;", "never referenced")])
def test_errors_are_told(body: str, message: str):
    text = f'extern "C" __global__ void bad(int *out) {{ {body} }}\n'
    with pytest.raises(NvrtcError, match=message):
        compile_text(text, "bad.cu", (*OPTIONS, ARCHITECTURE, WARNINGS))
