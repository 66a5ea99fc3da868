"""CUDA side of the codecs. Importing it needs neither CuPy nor a GPU; `device_count` tells what is there."""

from __future__ import annotations

from importlib import import_module

from lynx_gpu.codec import DeviceCodec, has_kernels
from lynx_gpu.modules import BackendMissingError
from lynx_gpu.plan import BatchPlan, PageJob
from lynx_gpu.views import DeviceView, current_stream, device_view, is_device_array, paged_view

__all__ = [
    "BackendMissingError",
    "BatchPlan",
    "DeviceCodec",
    "DeviceView",
    "PageJob",
    "current_stream",
    "device_count",
    "device_view",
    "has_kernels",
    "is_device_array",
    "paged_view",
]


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
