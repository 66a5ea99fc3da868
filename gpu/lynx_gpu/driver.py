"""Short calls of the CUDA driver, made without letting go of the interpreter lock.

CuPy releases the lock around every call. Where other threads are busy, getting it back takes up to a hundred
microseconds, and a group of pages needs a dozen calls that take one or two each. None of those here waits for a device:
they put something into a queue. What waits, or may (copies from memory that is not pinned), is left to CuPy.
"""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_gpu.modules import cupy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Driver", "driver", "launch"]

_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2
_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
_CALLS = {
    "cuDeviceGet": (_POINTER, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_POINTER, ctypes.c_int),
    "cuCtxPushCurrent_v2": (_POINTER,),
    "cuCtxPopCurrent_v2": (_POINTER,),
    "cuMemcpyHtoDAsync_v2": (_POINTER, _POINTER, _SIZE, _POINTER),
    "cuMemcpyDtoHAsync_v2": (_POINTER, _POINTER, _SIZE, _POINTER),
    "cuMemsetD8Async": (_POINTER, ctypes.c_ubyte, _SIZE, _POINTER),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventQuery": (_POINTER,),
    "cuStreamWaitEvent": (_POINTER, _POINTER, _INT),
    "cuLaunchKernel": (_POINTER, *(_INT,) * 7, _POINTER, _POINTER, _POINTER),
}
_NOT_READY = 600

_FORMATS: dict[type, str] = {np.uint64: "Q", np.int64: "q", np.int32: "i"}
"""Of arguments, for `Struct`."""

_MOST_ARGUMENT_BYTES = 4096


class _Arguments(threading.local):
    """Where arguments of kernels are packed; the driver reads them before a launch returns."""

    def __init__(self) -> None:
        self.packed = (ctypes.c_char * _MOST_ARGUMENT_BYTES)()
        self.size = ctypes.c_size_t()
        packed, size = ctypes.addressof(self.packed), ctypes.addressof(self.size)
        self.extra = (_POINTER * 5)(_BUFFER_POINTER, packed, _BUFFER_SIZE, size, None)


class _Current:
    """The context of a device, as long as a `with` block lasts."""

    __slots__ = ("_context", "_pop", "_popped", "_push")

    def __init__(self, push: Callable[[int | None], int], pop: Callable[[int], int], context: int | None) -> None:
        self._push, self._pop, self._context = push, pop, context
        self._popped = _POINTER()  # the context again

    def __enter__(self) -> None:
        _check(self._push(self._context))

    def __exit__(self, *_: object) -> None:
        _check(self._pop(ctypes.addressof(self._popped)))


class Driver:
    """The calls for one device. Streams and events are addresses; CuPy's are the driver's.

    Raises:
        cupy.cuda.driver.CUDADriverError: a call failed.
    """

    def __init__(self, library: ctypes.PyDLL, device: int) -> None:
        self._calls: dict[str, Any] = {}
        for name, arguments in _CALLS.items():
            call = self._calls[name] = getattr(library, name)
            call.argtypes, call.restype = arguments, ctypes.c_int
        number, context = ctypes.c_int(), _POINTER()
        self._call("cuDeviceGet", ctypes.addressof(number), device)
        # CuPy and torch use the primary context too. It is never given back: they live as long as the process.
        self._call("cuDevicePrimaryCtxRetain", ctypes.addressof(context), number.value)
        self._arguments = _Arguments()
        self.current = _Current(self._calls["cuCtxPushCurrent_v2"], self._calls["cuCtxPopCurrent_v2"], context.value)
        """Within it the device is the current one of this thread: needed around all calls."""

    def to_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy from the device to pinned memory."""
        self._call("cuMemcpyDtoHAsync_v2", target, source, size_bytes, stream)

    def to_device(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy from pinned memory to the device."""
        self._call("cuMemcpyHtoDAsync_v2", target, source, size_bytes, stream)

    def zero(self, target: int, size_bytes: int, stream: int) -> None:
        """Set bytes of the device to zero."""
        self._call("cuMemsetD8Async", target, 0, size_bytes, stream)

    def record(self, event: int, stream: int) -> None:
        """The event comes when the stream has done what it has now."""
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """What the stream gets from now on waits for the event."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def done(self, event: int) -> bool:
        """Whether the stream has got to the event."""
        result = self._calls["cuEventQuery"](event)
        if result != _NOT_READY:
            _check(result)
        return bool(result == 0)

    def launch(
        self,
        function: int,
        grid: Sequence[int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[np.generic[Any]],
        stream: int,
    ) -> None:
        """Launch a kernel (a CUfunction) with numpy scalars."""
        into = self._arguments
        layout = _layout(tuple(map(type, arguments)))
        if layout is not None:
            layout.pack_into(into.packed, 0, *arguments)
            into.size.value = layout.size
        else:
            packed = _packed(arguments)
            ctypes.memmove(into.packed, packed, len(packed))
            into.size.value = len(packed)
        x, y, z = (*grid, 1, 1)[:3]
        self._call("cuLaunchKernel", function, x, y, z, threads, 1, 1, shared_bytes, stream, None, into.extra)

    def _call(self, name: str, *arguments: Any) -> None:
        _check(self._calls[name](*arguments))


def _check(result: int) -> None:
    if result:
        raise cupy().cuda.driver.CUDADriverError(result)


@lru_cache(maxsize=64)
def _layout(types: tuple[type, ...]) -> Struct | None:
    """How scalars of these types lie in a kernel's parameters, each at a multiple of its alignment; None if others are
    among them."""
    if not _FORMATS.keys() >= {*types}:
        return None
    return Struct("@" + "".join(_FORMATS[one] for one in types))


def _packed(arguments: Sequence[np.generic[Any]]) -> bytes:
    """The same for any arguments."""
    packed = bytearray()
    for argument in arguments:
        kind = argument.dtype
        align = kind.alignment if kind.fields is None else max(of.base.alignment for of, *_ in kind.fields.values())
        packed += bytes(-len(packed) % align)
        packed += argument.tobytes()
    return bytes(packed)


@lru_cache(maxsize=64)
def driver(device: int) -> Driver | None:
    """The calls for a device; None where CuPy is none that works with the driver, as that of the tests."""
    if not hasattr(cupy().cuda, "driver"):
        return None
    try:
        library = ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return None
    return Driver(library, device)


def launch(
    device: int,
    kernel: Any,
    grid: Sequence[int],
    threads: int,
    shared_bytes: int,
    arguments: Sequence[np.generic[Any]],
    stream: Any,
) -> None:
    """Launch a kernel of `modules.kernel` on a CuPy stream of the device, which is the current one."""
    calls = driver(device)
    if calls is not None:
        calls.launch(kernel.kernel.ptr, grid, threads, shared_bytes, arguments, stream.ptr)
        return
    with stream:
        kernel(tuple(grid), (threads,), tuple(arguments), shared_mem=shared_bytes)
