"""Kernels: CUDA sources in this package, compiled for a device when they are first needed."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from lynx_codec import LynxError

__all__ = ["OPTIONS", "BackendMissingError", "cupy", "kernel", "source"]

OPTIONS = ("--fmad=false", "--ftz=false", "--std=c++17")
"""Of the compiler. No fused multiply-add, and subnormal numbers are kept: bytes must be those of the CPU."""

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


class BackendMissingError(LynxError):
    """CuPy, which runs the kernels, is not installed."""


def cupy() -> Any:
    """The module.

    Raises:
        BackendMissingError: it is not there.
    """
    if (module := sys.modules.get("cupy")) is not None:
        return module
    try:
        return import_module("cupy")
    except ImportError as error:
        raise BackendMissingError("CUDA kernels need CuPy: pip install lynx-net[gpu]") from error


@lru_cache
def source(name: str) -> str:
    """A kernel file with its includes in place, so that the text says all (CuPy keeps what it compiled by it)."""
    text = (files("lynx_gpu") / "kernels" / name).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda match: source(match[1]), text)


@lru_cache(maxsize=512)
def kernel(device: int, file: str, name: str, defines: tuple[tuple[str, int | str], ...]) -> Any:
    """A kernel of a file, compiled with these macros; seconds the first time, then from a cache on disk."""
    module = _module(device, file, defines)
    with cupy().cuda.Device(device):
        return module.get_function(name)


@lru_cache(maxsize=512)
def _module(device: int, file: str, defines: tuple[tuple[str, int | str], ...]) -> Any:
    options = OPTIONS + tuple(f"-D{macro}={value}" for macro, value in defines)
    with cupy().cuda.Device(device) as chosen:
        return cupy().RawModule(path=str(_compiled(source(file), file, options, str(chosen.compute_capability))))


def _compiled(text: str, name: str, options: tuple[str, ...], capability: str) -> Path:
    """Machine code of a kernel file for the current device, in `$LYNX_NET_CACHE` or `~/.cache/lynx_net`.

    CuPy's own modules are always compiled with -ftz=true, which would lose subnormal numbers.
    """
    known = repr((text, options, capability, cupy().cuda.nvrtc.getVersion()))
    chosen = os.environ.get("LYNX_NET_CACHE")
    folder = (Path(chosen) if chosen else Path.home() / ".cache" / "lynx_net") / "kernels"
    path = folder / f"{Path(name).stem}-{hashlib.sha256(known.encode()).hexdigest()[:32]}.cubin"
    if path.exists():
        return path
    code, _ = cupy().cuda.compiler.compile_using_nvrtc(text, options, None, name)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(code)
    os.replace(file.name, path)  # at once: others may be making the same
    return path
