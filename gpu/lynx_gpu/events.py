"""The few calls of CUDA that buffers and pipeline make, behind one small class for each device.

Nothing here waits for a whole device. Events are made for blocking waits: `Event.wait` sleeps in the driver without the
interpreter lock, so that a thread in it costs nothing (docs/gpu.md compares it with callbacks).
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_gpu.driver import driver, launch
from lynx_gpu.modules import kernel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from lynx_gpu.driver import Driver

__all__ = ["SPAN", "Event", "Memory", "Runtime"]

SPAN = np.dtype([("source", "<u8"), ("target", "<u8"), ("bytes", "<u8")])
"""`Span` in kernels/gather.cu."""

_GATHER_THREADS = 256
_GATHER_PART_BYTES = 32 * 1024

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2


SPARE_BYTES = 2 * 1024 * 1024 * 1024
"""So much pinned memory that nobody uses any more is kept for whoever comes next."""


class Memory:
    """Memory that goes when this object does; pinned, or of a device.

    Attributes:
        address: its first byte.
        size_bytes: how many there are.
    """

    __slots__ = ("__weakref__", "_owner", "address", "size_bytes")

    def __init__(self, address: int, size_bytes: int, owner: object) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._owner = owner


class _Spare:
    """Pinned memory of closed endpoints: to free it makes all devices wait, to allocate it takes long."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[Any]] = {}
        self._kept_bytes = 0

    def take(self, size_bytes: int) -> Any:
        """An owner of so much, or None."""
        try:
            owner = self._kept[size_bytes].popleft()
        except (KeyError, IndexError):
            return None
        self._kept_bytes -= size_bytes
        return owner

    def give(self, owner: Any, size_bytes: int) -> None:
        """For finalizers, which may run anywhere: takes no lock."""
        if self._kept_bytes + size_bytes <= SPARE_BYTES:
            self._kept_bytes += size_bytes
            self._kept.setdefault(size_bytes, deque()).append(owner)


_SPARE = _Spare()


class Event:
    """A point in a stream. What CUDA made for it is used again when nobody has this object any more.

    Args:
        event: CuPy's.
        driver: of its device, if there is one.
        spare: where `event` goes then.
    """

    __slots__ = ("_driver", "_event", "_spare")

    def __init__(self, event: Any, driver: Driver | None, spare: deque[Any]) -> None:
        self._event, self._driver, self._spare = event, driver, spare

    def __del__(self) -> None:
        self._spare.append(self._event)

    @property
    def pointer(self) -> int:
        """The cudaEvent_t."""
        return int(self._event.ptr)

    def done(self) -> bool:
        """Whether the stream has got there."""
        return bool(self._event.done) if self._driver is None else self._driver.done(self._event.ptr)

    def wait(self) -> None:
        """Sleep until the stream has got there; other threads run meanwhile."""
        self._event.synchronize()


class Runtime:
    """One device.

    Args:
        device: its number.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self._cupy: ModuleType = import_module("cupy")
        self._calls: Any = self._cupy.cuda.runtime
        self._driver: Driver | None = driver(device)
        self._spare: deque[Any] = deque()
        """CuPy's events that nobody uses: to make one takes longer than all else that is done with it."""

    def here(self) -> AbstractContextManager[None]:
        """Within it this thread works on the device; entering it again costs next to nothing. Needed around `record`,
        `after` and all that copies."""
        return self._here() if self._driver is None else self._driver.current

    @contextmanager
    def _here(self) -> Iterator[None]:
        with self._cupy.cuda.Device(self.device):
            yield

    def pinned(self, size_bytes: int) -> Memory:
        """Host memory that every device of the process can copy to and from without another copy."""
        owner = _SPARE.take(size_bytes)
        if owner is None:
            with self._cupy.cuda.Device(self.device):
                owner = self._cupy.cuda.PinnedMemory(size_bytes, self._calls.hostAllocPortable)
        memory = Memory(owner.ptr, size_bytes, owner)
        weakref.finalize(memory, _SPARE.give, owner, size_bytes).atexit = False
        return memory

    def memory(self, size_bytes: int) -> Memory:
        """Memory of the device, not out of anybody's pool, so that what it takes is what is asked for."""
        with self._cupy.cuda.Device(self.device):
            owner = self._cupy.cuda.Memory(size_bytes)
        return Memory(owner.ptr, size_bytes, owner)

    def stream(self) -> Any:
        """A stream that does not wait for the default one: a `cupy.cuda.Stream`."""
        with self._cupy.cuda.Device(self.device):
            return self._cupy.cuda.Stream(non_blocking=True)

    def record(self, stream: Any) -> Event:
        """The point that a stream has reached with what it has been given so far."""
        return self._record(stream.ptr)

    def _record(self, stream: int) -> Event:
        """The same of a cudaStream_t."""
        try:
            event = self._spare.popleft()
        except IndexError:
            event = self._cupy.cuda.Event(block=True, disable_timing=True)
        if self._driver is not None:
            self._driver.record(event.ptr, stream)
        else:
            self._calls.eventRecord(event.ptr, stream)
        return Event(event, self._driver, self._spare)

    def after(self, stream: Any, event: Event) -> None:
        """What the stream is given from now on waits for the event; this thread does not."""
        if self._driver is not None:
            self._driver.wait(stream.ptr, event.pointer)
        else:
            self._calls.streamWaitEvent(stream.ptr, event.pointer)

    def after_caller(self, stream: Any, caller: int) -> None:
        """What the stream is given from now on waits for all that another stream (a cudaStream_t) has now."""
        with self.here():
            self.after(stream, self._record(caller))

    def to_host(self, target: int, source: int, size_bytes: int, stream: Any) -> None:
        """Copy from device memory to host memory; asynchronous if that is pinned."""
        self._calls.memcpyAsync(target, source, size_bytes, _DEVICE_TO_HOST, stream.ptr)

    def to_pinned(self, target: int, source: int, size_bytes: int, stream: Any) -> None:
        """Copy from device memory to host memory that is pinned."""
        if self._driver is not None:
            self._driver.to_host(target, source, size_bytes, stream.ptr)
        else:
            self.to_host(target, source, size_bytes, stream)

    def to_device(self, target: int, source: int, size_bytes: int, stream: Any) -> None:
        """Copy from host memory to device memory; from memory that is not pinned the driver copies it away first."""
        self._calls.memcpyAsync(target, source, size_bytes, _HOST_TO_DEVICE, stream.ptr)

    def gather(self, table: int, count: int, most_bytes: int, stream: Any) -> None:
        """Copy pieces of pinned memory to device memory, in one launch.

        Args:
            table: address, in pinned memory, of `count` entries of `SPAN`. It and the pieces must stay as they are
                until the stream has done this.
            most_bytes: of a piece.
        """
        if not count or not most_bytes:
            return
        grid = (-(-most_bytes // _GATHER_PART_BYTES), count)
        function = kernel(self.device, "gather.cu", "gather", ())
        launch(self.device, function, grid, _GATHER_THREADS, 0, (np.uint64(table),), stream)
