"""A CUDA that does nothing, in place of CuPy: what is left of `perf.gpu_pair --null` is what Python costs.

Device memory is address space that nobody touches, kernels and copies do nothing, events have come. Only the headers of
pages are written, where a kernel would have, so that the receiver's checks pass. Nothing of it is a figure of a GPU.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lynx_gpu import codec as device_codec
from lynx_gpu import events
from lynx_gpu.views import DeviceView

if TYPE_CHECKING:
    from lynx_codec import PageShape
    from lynx_codec.codecs import PageCodec
    from lynx_gpu.plan import BatchPlan
    from lynx_net.wire.layout import CacheLayout, Kind

__all__ = ["NullCache", "install"]

_DEVICE_TO_HOST = 2
_STATUS_BYTES = 16384
"""What the receiver copies back is less: how pages have fared."""


class _Context:
    ptr = 0
    compute_capability = "90"
    attributes: ClassVar = {"MaxSharedMemoryPerBlockOptin": 227 << 10, "MaxSharedMemoryPerMultiprocessor": 228 << 10}

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self) -> _Context:
        return self

    def __exit__(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...


class _Event(_Context):
    done = True


class _Memory:
    def __init__(self, size_bytes: int, *_: object) -> None:
        self.map = mmap.mmap(-1, size_bytes)
        self.ptr = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.map))


class _Array:
    def __init__(self, values: Any) -> None:
        self.values = np.ascontiguousarray(values)
        self.data = SimpleNamespace(ptr=self.values.ctypes.data)
        self.shape, self.dtype = self.values.shape, self.values.dtype

    def set(self, values: Any, stream: object = None) -> None:
        self.values[...] = values


class _Function:
    max_dynamic_shared_size_bytes = 1 << 20

    def __call__(self, *_: object, **__: object) -> None: ...


class NullCache:
    """Keys and values of all layers, all of them at the same addresses."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._memory = _Memory(max(math.prod(layout.array_shape("key")), 1) * 2)

    def view(self, layer: int, kind: Kind) -> DeviceView:
        tokens, heads, size = self._layout.array_shape(kind)
        return DeviceView(self._memory.ptr, "bfloat16", tokens, heads, size, heads * size, size, 0)


def install() -> None:
    """From now on `import cupy` gives this, and kernels are not compiled."""
    module: Any = ModuleType("cupy")
    encoded: dict[int, BatchPlan] = {}

    def copy(target: int, source: int, size_bytes: int, kind: int, stream: int) -> None:
        plan = encoded.pop(source, None) if kind == _DEVICE_TO_HOST else None
        if plan is None and kind == _DEVICE_TO_HOST and size_bytes <= _STATUS_BYTES:
            ctypes.memset(target, 0, size_bytes)
        if plan is not None:
            ctypes.memset(target, 0, plan.status_bytes)
            for job, spans in zip(plan.jobs, plan.spans, strict=True):
                head = _head(plan.codec, job.shape)
                ctypes.memmove(target + spans[0][0], head, len(head))

    runtime = SimpleNamespace(
        memcpyAsync=copy,
        memsetAsync=lambda *_: None,
        eventRecord=lambda *_: None,
        streamWaitEvent=lambda *_: None,
        getDeviceCount=lambda: 1,
        hostAllocPortable=1,
    )
    module.uint8, module.int32 = np.uint8, np.int32
    module.asarray = module.array = _Array
    module.empty = lambda shape, dtype: _Array(np.empty(shape, dtype))
    module.cuda = SimpleNamespace(
        Device=_Context, Stream=_Context, Event=_Event, PinnedMemory=_Memory, Memory=_Memory, runtime=runtime
    )
    sys.modules["cupy"] = module
    for user in (device_codec, events):
        user.kernel = lru_cache(lambda *_: _Function())  # type: ignore[attr-defined]
    encode = device_codec.DeviceCodec.encode

    def remember(
        self: Any, of: DeviceView, plan: BatchPlan, fine: Any, out: int, stream: Any, *, checksums: bool = False
    ) -> None:
        encode(self, of, plan, fine, out, stream, checksums=checksums)
        encoded[out] = plan

    device_codec.DeviceCodec.encode = remember  # type: ignore[method-assign, assignment]


@lru_cache(maxsize=64)
def _head(codec: PageCodec, shape: PageShape) -> bytes:
    """The header of a page of zeros with what stands before its codes."""
    outs = [memoryview(bytearray(size)) for size in codec.stream_bytes(shape, wide=True)]
    codec.encode(np.zeros(shape.array_shape, np.uint16), shape, outs)
    return bytes(outs[0][: codec.sections(shape, False).data if codec.row_bits else codec.header_bytes])
