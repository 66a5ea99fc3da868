"""Memory for what is encoded that is used again: fresh memory costs more than encoding into it."""

from __future__ import annotations

from lynx_gpu.ring import PinnedRing, ordinary_memory

__all__ = ["KeptMemory"]


class KeptMemory:
    """Ordinary host memory of which at most so many bytes are kept. For one thread at a time; views may end in any.

    Pages are written to for the first time when they are first used, and every 4 KiB then cost the kernel a fault.
    """

    def __init__(self, most_bytes: int) -> None:
        self._ring = PinnedRing(most_bytes, ordinary_memory)

    def take(self, size_bytes: int) -> memoryview:
        """A writable view of so many bytes with any content; used again when the last view of it is gone.

        What does not fit into what is kept is memory of its own.
        """
        if not size_bytes:
            return memoryview(bytearray())
        room = self._ring.take(size_bytes)
        if room is None and self._ring.grow():  # at no cost: it is there once it is written to
            room = self._ring.take(size_bytes)
        return memoryview(bytearray(size_bytes)) if room is None else room
