"""Bounded buffers that transfers share: pinned host memory, what overflows from it, and staging memory on a device.

Rules:

1. A piece of the ring is handed out as a memoryview. It is in use until the last view of it is gone, slices included:
   whoever sends bytes keeps a view for as long as it may have to send them again, and knows nothing of the ring.
2. Memory is allocated slab by slab, up to the limit, and kept. Nothing is freed while the ring is in use, since freeing
   makes every stream of a device wait.
3. A piece of staging memory is given back together with an event, and is free when that event has come. Whoever finds
   no room waits for the oldest event: the device alone makes that happen, so nobody waits for another waiter.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np

from lynx_codec.errors import LynxError
from lynx_gpu.arena import ALIGN_BYTES, Arena
from lynx_gpu.events import Memory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from lynx_gpu.events import Event

__all__ = ["SLAB_BYTES", "BufferTooLargeError", "PinnedRing", "Staging", "ordinary_memory"]

SLAB_BYTES = 128 * 1024 * 1024
"""What a ring grows by; no piece is larger."""


class BufferTooLargeError(LynxError):
    """A piece is larger than anything that the limit of the buffer allows, so that no wait would help."""


class Allocate(Protocol):
    """Allocates pinned memory or device memory."""

    def __call__(self, size_bytes: int) -> Memory: ...


def ordinary_memory(size_bytes: int) -> Memory:
    """Host memory that is not pinned, for a ring that takes what overflows from another."""
    owner = np.empty(size_bytes, np.uint8)
    return Memory(int(owner.__array_interface__["data"][0]), size_bytes, owner)


class PinnedRing:
    """Pinned host memory. `take` and views that go away are for any thread, the rest is for the event loop.

    Args:
        limit_bytes: never more than this is allocated.
        allocate: pinned memory; slow, called by `grow` alone.
        slab_bytes: what it grows by, at most.
    """

    def __init__(self, limit_bytes: int, allocate: Allocate, slab_bytes: int = SLAB_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.slab_bytes = min(slab_bytes, limit_bytes)
        self._allocate = allocate
        self._lock = threading.Lock()
        self._slabs: list[tuple[Memory, Arena]] = []
        # Filled by finalizers, which may run anywhere, also inside of `take`: they take no lock.
        self._returned: deque[tuple[Arena, int]] = deque()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._turn = asyncio.Lock()
        self._no_room_for: int | None = None
        """Pieces of this size or more do not fit as long as nothing comes back: many may be asked for in a row."""

    @property
    def allocated_bytes(self) -> int:
        """Pinned memory that there is."""
        return sum(arena.size_bytes for _, arena in self._slabs)

    @property
    def used_bytes(self) -> int:
        """How much of it is handed out."""
        with self._lock:
            self._reclaim()
            return sum(arena.used_bytes for _, arena in self._slabs)

    @property
    def contended(self) -> bool:
        """Whether somebody waits for room: whoever comes now waits behind."""
        return self._turn.locked()

    def take(self, size_bytes: int) -> memoryview | None:
        """A writable view of so many bytes with any content, or None if there is no room now. Never blocks."""
        with self._lock:
            self._reclaim()
            if self._no_room_for is not None and size_bytes >= self._no_room_for:
                return None
            for memory, arena in self._slabs:
                offset = arena.take(size_bytes)
                if offset is not None:
                    return self._view(memory, arena, offset, size_bytes)
            self._no_room_for = size_bytes
        return None

    def take_all(self, sizes_bytes: Sequence[int]) -> list[memoryview] | None:
        """`take` for several pieces: all of them or none."""
        pieces = []
        for size in sizes_bytes:
            piece = self.take(size)
            if piece is None:
                return None
            pieces.append(piece)
        return pieces

    def grow(self) -> bool:
        """Allocate a slab more; False at the limit. Blocks for some milliseconds, so call it in a thread."""
        size = min(self.slab_bytes, self.limit_bytes - self.allocated_bytes)
        if size <= 0:
            return False
        memory = self._allocate(size)
        with self._lock:
            self._slabs.append((memory, Arena(size)))
            self._no_room_for = None
        return True

    async def take_when_free(self, sizes_bytes: Sequence[int], grow: Callable[[], Awaitable[bool]]) -> list[memoryview]:
        """The same as `take_all`, but waits for its turn and for room. `grow` runs `self.grow` in a thread.

        Nothing is held while it waits, and cancelling loses nothing.

        Raises:
            BufferTooLargeError: together they are larger than a slab.
        """
        if sum(sizes_bytes) + ALIGN_BYTES * len(sizes_bytes) > self.slab_bytes:
            raise BufferTooLargeError(
                f"{sum(sizes_bytes)} bytes for one group of pages; pinned memory is cut into {self.slab_bytes} at most"
            )
        async with self._turn:
            room = asyncio.Event()
            self._waiter = (asyncio.get_running_loop(), room)
            try:
                while True:
                    room.clear()
                    pieces = self.take_all(sizes_bytes)
                    if pieces is not None:
                        return pieces
                    if not await grow():
                        await room.wait()
            finally:
                self._waiter = None

    def _view(self, memory: Memory, arena: Arena, offset: int, size_bytes: int) -> memoryview:
        """The exporter of the view is what the finalizer watches; it keeps the slab."""
        exporter = (ctypes.c_ubyte * size_bytes).from_address(memory.address + offset)
        finalizer = weakref.finalize(exporter, self._give_back, memory, arena, offset)
        finalizer.atexit = False
        return memoryview(exporter).cast("B")

    def _give_back(self, memory: Memory, arena: Arena, offset: int) -> None:
        self._returned.append((arena, offset))
        waiter = self._waiter
        if waiter is not None:
            loop, room = waiter
            loop.call_soon_threadsafe(room.set)

    def _reclaim(self) -> None:
        while self._returned:
            arena, offset = self._returned.popleft()
            arena.give(offset)
            self._no_room_for = None


class Staging:
    """Memory of one device that only streams touch. For one thread at a time.

    Args:
        limit_bytes: never more than this is allocated.
        allocate: device memory.
        slab_bytes: what it grows by, at most; the limit by default, so that there is one slab.
    """

    def __init__(self, limit_bytes: int, allocate: Allocate, slab_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._slab_bytes = min(slab_bytes or limit_bytes, limit_bytes)
        self._allocate = allocate
        self._slabs: list[tuple[Memory, Arena]] = []
        self._busy: deque[tuple[Event, int]] = deque()

    @property
    def allocated_bytes(self) -> int:
        """Device memory that there is."""
        return sum(arena.size_bytes for _, arena in self._slabs)

    def take(self, size_bytes: int) -> int:
        """Pointer to so many bytes, which are the caller's until `give`. May wait for the device.

        Raises:
            BufferTooLargeError: larger than a slab.
        """
        if size_bytes > self._slab_bytes:
            raise BufferTooLargeError(
                f"{size_bytes} bytes for one group of pages; the staging memory is cut into {self._slab_bytes} at most"
            )
        while True:
            while self._busy and self._busy[0][0].done():
                self._reclaim()
            for memory, arena in self._slabs:
                offset = arena.take(size_bytes)
                if offset is not None:
                    return memory.address + offset
            size = min(self._slab_bytes, self.limit_bytes - self.allocated_bytes)
            if size > 0:
                self._slabs.append((self._allocate(size), Arena(size)))
            elif self._busy:
                self._busy[0][0].wait()
            else:
                raise BufferTooLargeError(f"{size_bytes} bytes of staging memory wanted, all of it is being filled")

    def give(self, pointer: int, event: Event) -> None:
        """Nothing uses the piece any more once this event has come."""
        self._busy.append((event, pointer))

    def _reclaim(self) -> None:
        _, pointer = self._busy.popleft()
        for memory, arena in self._slabs:
            if 0 <= pointer - memory.address < memory.size_bytes:
                arena.give(pointer - memory.address)
