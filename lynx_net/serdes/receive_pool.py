"""Buffers for what arrives for a device: pinned memory as far as there is any, ordinary memory beyond that."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from lynx_net.wire.pool import BufferPool

if TYPE_CHECKING:
    from lynx_gpu.ring import PinnedRing

__all__ = ["ReceivePool", "pinned_address"]


def pinned_address(buffer: memoryview) -> int | None:
    """Where a buffer lies that `ReceivePool` has taken from its ring, or None if it is another one."""
    piece = buffer.obj
    if isinstance(piece, ctypes.Array) and ctypes.sizeof(piece) == buffer.nbytes:
        return ctypes.addressof(piece)
    return None


class ReceivePool(BufferPool):
    """A `BufferPool` of pieces of a ring. Buffers of other sizes that nobody uses make room in it.

    Transfers of another codec or layout have pages of other sizes: what was kept for those before would else fill the
    ring for ever. What finds no room all the same is ordinary memory, which is kept apart.

    Args:
        ring: pinned memory, which may still grow.
    """

    def __init__(self, ring: PinnedRing) -> None:
        super().__init__()
        self._ring = ring
        self._pinned: dict[int, list[memoryview]] = {}

    def take(self, size: int) -> memoryview:
        kept = self._pinned.get(size)
        if kept:
            return kept.pop()
        if not size:
            return super().take(size)
        piece = self._ring.take(size)
        if piece is None:
            piece = self._make_room(size)
        return super().take(size) if piece is None else piece

    def give(self, buffer: memoryview) -> None:
        if isinstance(buffer.obj, ctypes.Array):
            self._pinned.setdefault(buffer.nbytes, []).append(buffer)
        else:
            super().give(buffer)

    def _make_room(self, size: int) -> memoryview | None:
        """Give kept buffers of other sizes back to the ring, until a piece of this size fits into it."""
        for other in list(self._pinned):
            if self._pinned.pop(other):  # the ring has them when the list is gone
                piece = self._ring.take(size)
                if piece is not None:
                    return piece
        return None
