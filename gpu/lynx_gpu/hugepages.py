"""Pinned memory in large pages, where the kernel has some: it is gone through from end to end, again and again, and
with pages of 4 KiB the lookups of addresses take part of the time of every copy, most of all in virtual machines."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from typing import Any

__all__ = ["LARGE_BYTES", "LargePages"]

LARGE_BYTES = 2 * 1024 * 1024
_PORTABLE = 1


class LargePages:
    """Memory of this process that every device can copy to and from, unpinned when this object goes.

    Raises what CuPy raises where the driver does not pin it.

    Args:
        size_bytes: how much.
        calls: `cupy.cuda.runtime`; the device that is current pins it.

    Attributes:
        ptr: its first byte.
    """

    def __init__(self, size_bytes: int, calls: Any) -> None:
        mapping = mmap.mmap(-1, size_bytes + LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without large pages gives small ones
            mapping.madvise(mmap.MADV_HUGEPAGE)
        begin = ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping))
        self.ptr = -(-begin // LARGE_BYTES) * LARGE_BYTES
        calls.hostRegister(self.ptr, size_bytes, _PORTABLE)
        weakref.finalize(self, _unpin, calls, self.ptr, mapping).atexit = False


def _unpin(calls: Any, address: int, mapping: mmap.mmap) -> None:
    calls.hostUnregister(address)
    mapping.close()
