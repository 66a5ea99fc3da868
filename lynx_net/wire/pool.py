"""Buffers that are used again: fresh memory costs a page fault every 4 KiB, more than the copy into it."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KEPT_BYTES", "BufferPool"]

KEPT_BYTES = 1024 * 1024 * 1024
MAPPED_BYTES = 128 * 1024
"""From this size on a new buffer is mapped: its memory comes when it is written, not while somebody holds a lock."""


def _ordinary(size: int) -> memoryview:
    if size < MAPPED_BYTES:
        return memoryview(bytearray(size))
    # Private memory: the first touch of what is shared, which is the default, costs more.
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class BufferPool:
    """Hands out writable buffers by exact size and keeps at most `kept_bytes` of returned ones.

    Page streams of a cache come in a handful of sizes, so exact sizes are found again. A buffer must be
    given back only when nobody can write to it any more; one that is never given back is merely not reused.

    Args:
        kept_bytes: the most that is kept.
        allocate: makes a buffer of a size; ordinary memory by default.
    """

    lend_factor = 1
    """So many times as many of its buffers as usual are lent to lanes (lending.py)."""
    together_bytes = 1024 * 1024
    """What lanes receive into lent ones before one tells of all, at most, for each lane: those that are handed back
    soon are used again while they are in the caches."""

    def __init__(self, kept_bytes: int = KEPT_BYTES, allocate: Callable[[int], memoryview] = _ordinary) -> None:
        self._kept_limit = kept_bytes
        self._allocate = allocate
        self._kept: dict[int, list[memoryview]] = {}
        self.kept_bytes = 0

    def take(self, size: int) -> memoryview:
        """A buffer of `size` bytes with any content; it is the caller's until `give`."""
        kept = self._kept.get(size)
        if kept:
            self.kept_bytes -= size
            return kept.pop()
        return self._allocate(size)

    def give(self, buffer: memoryview) -> None:
        """Return a buffer that `take` handed out. The oldest sizes make room for it when the pool is full."""
        size = buffer.nbytes
        if size > self._kept_limit:
            return
        while self.kept_bytes + size > self._kept_limit:
            oldest, buffers = next(iter(self._kept.items()))
            if buffers:
                buffers.pop()
                self.kept_bytes -= oldest
            else:
                del self._kept[oldest]
        self._kept.setdefault(size, []).append(buffer)
        self.kept_bytes += size
