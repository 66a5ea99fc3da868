"""Buffers for what arrives for a device: pinned memory as far as there is any, ordinary memory beyond that."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from lynx_net.wire.pool import BufferPool

if TYPE_CHECKING:
    from lynx_gpu.ring import PinnedRing

__all__ = ["ReceivePool", "piece_bytes", "pinned_address"]

SIZES_PER_DOUBLING = 8
"""Pieces come in so many sizes between one and twice as much; up to an eighth of one may lie idle."""

BLOCK_BYTES = 32 * 1024 * 1024
BLOCK_PIECES = 32
"""What is taken from the ring at once: so many pieces if they are small, else so many bytes, whatever the size of the
pieces, since blocks that are all a quarter of a slab leave no gaps that are too small for another. Pages come in
thousands, and to take a piece for each costs as much as to receive it, whenever one codec follows another."""


def pinned_address(buffer: memoryview) -> int | None:
    """Where a buffer begins that is a piece of a ring, or a part of one; None if it is another one, or empty."""
    if isinstance(buffer.obj, ctypes.Array) and buffer.nbytes:
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))
    return None


def piece_bytes(size: int) -> int:
    """How large a piece is of which a buffer of `size` bytes is the beginning."""
    step = max(1 << (size.bit_length() - 1), SIZES_PER_DOUBLING) // SIZES_PER_DOUBLING
    return -(-size // step) * step


class ReceivePool(BufferPool):
    """A `BufferPool` of pinned memory. Buffers of about the same size share their pieces of it; pieces of other sizes
    that nobody uses make room.

    Transfers of other codecs, layouts or lengths have pages of other sizes: what was kept for those before would else
    fill the ring for ever. What finds no room all the same is ordinary memory, which is kept apart.

    Args:
        ring: pinned memory, which may still grow. It has a block again when no piece of it is in use or kept.
    """

    lend_factor = 2
    together_bytes = 4 * 1024 * 1024
    """A device reads them, and most are kept for its decoder: none is in a cache when it comes back."""

    def __init__(self, ring: PinnedRing) -> None:
        super().__init__()
        self._ring = ring
        self._pinned: dict[int, list[memoryview]] = {}
        """Pieces that nobody uses by their size, that of which a block was cut last behind the others."""

    def take(self, size: int) -> memoryview:
        if not size:
            return super().take(size)
        room = piece_bytes(size)
        pieces = self._pinned.get(room) or self._cut(room)
        return pieces.pop()[:size] if pieces else super().take(size)

    def give(self, buffer: memoryview) -> None:
        address = pinned_address(buffer)
        if address is None:
            super().give(buffer)
            return
        owner: Any = buffer.obj
        block = memoryview(owner).cast("B")
        room, at = piece_bytes(buffer.nbytes), address - ctypes.addressof(owner)
        self._pinned.setdefault(room, []).append(block[at : at + room])

    def _cut(self, room: int) -> list[memoryview]:
        """Pieces of this size: those of a block, one where there is no room for that, none where there is none."""
        pieces = self._pinned[room] = self._pinned.pop(room, [])
        block = self._take_ring(self._block_bytes(room), room) or self._take_ring(room, room)
        if block is not None:
            pieces += [block[at : at + room] for at in range(0, block.nbytes - room + 1, room)]
        return pieces

    def _block_bytes(self, room: int) -> int:
        """Of a block of pieces of this size; those of one piece where a block of more would not fit into the ring."""
        block = min(BLOCK_PIECES * room, BLOCK_BYTES)
        if 2 * block > BLOCK_BYTES:
            block = BLOCK_BYTES
        return block if 2 * room <= block <= self._ring.slab_bytes else room

    def _take_ring(self, size: int, room: int) -> memoryview | None:
        """So much of the ring. What nobody uses of pieces of other sizes makes room for it."""
        taken = self._ring.take(size)
        others = [other for other in self._pinned if other != room]
        while taken is None and others:
            if self._pinned.pop(others.pop(0)):  # the ring has their blocks when the list is gone
                taken = self._ring.take(size)
        return taken
