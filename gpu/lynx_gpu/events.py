"""The few calls of CUDA that buffers and pipeline make, behind one small class for each device.

Nothing here waits for a whole device. Events are made for blocking waits: `Event.wait` sleeps in the driver without the
interpreter lock, so that a thread in it costs nothing (docs/gpu.md compares it with callbacks).
"""

from __future__ import annotations

import weakref
from collections import deque
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Event", "Memory", "Runtime"]

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
    """A point in a stream."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def pointer(self) -> int:
        """The cudaEvent_t."""
        return int(self._event.ptr)

    def done(self) -> bool:
        """Whether the stream has got there."""
        return bool(self._event.done)

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
        with self._cupy.cuda.Device(self.device):
            event = self._cupy.cuda.Event(block=True, disable_timing=True)
            event.record(stream)
        return Event(event)

    def after(self, stream: Any, event: Event) -> None:
        """What the stream is given from now on waits for the event; this thread does not."""
        with self._cupy.cuda.Device(self.device):
            self._calls.streamWaitEvent(stream.ptr, event.pointer)

    def after_caller(self, stream: Any, caller: int) -> None:
        """What the stream is given from now on waits for all that another stream (a cudaStream_t) has now."""
        with self._cupy.cuda.Device(self.device):
            event = self._cupy.cuda.Event(disable_timing=True)
            self._calls.eventRecord(event.ptr, caller)
            self._calls.streamWaitEvent(stream.ptr, event.ptr)

    def to_host(self, target: int, source: int, size_bytes: int, stream: Any) -> None:
        """Copy from device memory to host memory; asynchronous if that is pinned."""
        self._calls.memcpyAsync(target, source, size_bytes, _DEVICE_TO_HOST, stream.ptr)

    def to_device(self, target: int, source: int, size_bytes: int, stream: Any) -> None:
        """Copy from host memory to device memory; from memory that is not pinned the driver copies it away first."""
        self._calls.memcpyAsync(target, source, size_bytes, _HOST_TO_DEVICE, stream.ptr)
