"""CUDA side of the codecs. Importing it needs neither CuPy nor a GPU; `device_count` tells what is there."""

from __future__ import annotations

from importlib import import_module

__all__ = ["device_count"]


def device_count() -> int:
    """CUDA devices that CuPy can use; 0 where CuPy, the driver or a device is missing."""
    try:
        runtime = import_module("cupy").cuda.runtime
    except ImportError:
        return 0
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0
