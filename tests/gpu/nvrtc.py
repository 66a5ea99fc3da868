"""Compiles CUDA files with NVRTC, which needs neither a GPU nor CuPy: the library of the wheel nvidia-cuda-nvrtc."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NvrtcError", "compile_text", "find_nvrtc"]


class NvrtcError(Exception):
    """What the compiler says."""


def find_nvrtc() -> Path | None:
    """The library in an installed wheel, or None."""
    spec = find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or ()) if spec] if spec else []
    found = [file for folder in folders for file in folder.glob("*/lib/libnvrtc.so.*")]
    return next((file for file in found if "builtins" not in file.name and "alt" not in file.name), None)


@lru_cache(maxsize=1)
def _nvrtc() -> ctypes.CDLL:
    path = find_nvrtc()
    if path is None:
        raise NvrtcError("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    for builtins in path.parent.glob("libnvrtc-builtins.so*"):  # older ones look for it elsewhere
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def compile_text(text: str, name: str, options: Sequence[str]) -> bytes:
    """Machine code (cubin) of a CUDA text, none for `-arch=compute_*`; messages call it `name`.

    Raises:
        NvrtcError: with the compiler's log, also if that holds but warnings.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None))
    try:
        words = [option.encode() for option in options]
        result = nvrtc.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
        size = ctypes.c_size_t()
        _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        # Not every NVRTC 13 has an option that makes warnings errors.
        if result or log.value.strip():
            raise NvrtcError(log.value.decode())
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        _check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))


def _check(result: int) -> None:
    if result:
        raise NvrtcError(_nvrtc().nvrtcGetErrorString(result).decode())
