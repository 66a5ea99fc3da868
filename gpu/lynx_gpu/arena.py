"""Which bytes of one piece of memory are in use. Numbers only: it serves pinned memory and device memory alike."""

from __future__ import annotations

import bisect

__all__ = ["ALIGN_BYTES", "Arena"]

ALIGN_BYTES = 256
"""What every piece begins at a multiple of, as device memory does."""


class Arena:
    """First fit, with free neighbours joined. Not for use by two threads at once.

    Args:
        size_bytes: of the memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._taken: dict[int, int] = {}
        # Begins and ends of what is free, in order; never two that touch.
        self._begins = [0] if size_bytes else []
        self._ends = [size_bytes] if size_bytes else []

    def take(self, size_bytes: int) -> int | None:
        """Offset of a piece of at least so many bytes, or None if there is no room for it."""
        size = -(-max(size_bytes, 1) // ALIGN_BYTES) * ALIGN_BYTES
        for index, (begin, end) in enumerate(zip(self._begins, self._ends, strict=True)):
            if end - begin >= size:
                if end - begin == size:
                    del self._begins[index], self._ends[index]
                else:
                    self._begins[index] = begin + size
                self._taken[begin] = size
                self.used_bytes += size
                return begin
        return None

    def give(self, offset: int) -> None:
        """The piece that `take` gave is free again."""
        begin, end = offset, offset + self._taken.pop(offset)
        self.used_bytes -= end - begin
        at = bisect.bisect(self._begins, begin)
        if at < len(self._begins) and self._begins[at] == end:
            end = self._ends[at]
            del self._begins[at], self._ends[at]
        if at and self._ends[at - 1] == begin:
            self._ends[at - 1] = end
        else:
            self._begins.insert(at, begin)
            self._ends.insert(at, end)
