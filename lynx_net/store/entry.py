"""One entry: written from page streams as they come, read by any number of readers, also while it is being written."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_net.errors import EntryDamagedError, LocalProtocolError, StoreError
from lynx_net.store.format import (
    FIXED_BYTES,
    INDEX_RECORD,
    TRAILER_BYTES,
    EntryHead,
    checksum,
    pack_head,
    pack_tail,
    read_fixed,
    read_head,
    read_index,
    read_trailer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from lynx_net.store.storage import NewFile, OpenFile

__all__ = ["EntryWriter", "WrittenPages", "load_entry", "load_head"]


def load_head(file: OpenFile) -> tuple[EntryHead, int, int]:
    """The head of an entry, where its page streams begin, and the head's checksum; the trailer is checked as well.

    Raises:
        EntryDamagedError: it is no whole entry.
        StoreError: the disk fails.
    """
    length, head_sum = read_fixed(file.read(0, FIXED_BYTES))
    size_bytes = file.size_bytes
    if FIXED_BYTES + length + TRAILER_BYTES > size_bytes:
        raise EntryDamagedError(f"a file of {size_bytes} bytes is too short for its head")
    end = FIXED_BYTES + length
    head = read_head(file.read(FIXED_BYTES, length), head_sum)
    read_trailer(file.read(size_bytes - TRAILER_BYTES, TRAILER_BYTES), size_bytes, end, head_sum)
    return head, end, head_sum


def load_entry(file: OpenFile) -> tuple[EntryHead, WrittenPages]:
    """An entry with all that is known of its page streams, which are not read.

    Raises:
        EntryDamagedError: it is no whole entry.
        StoreError: the disk fails.
    """
    head, end, head_sum = load_head(file)
    size_bytes = file.size_bytes
    trailer = read_trailer(file.read(size_bytes - TRAILER_BYTES, TRAILER_BYTES), size_bytes, end, head_sum)
    index = read_index(file.read(trailer.index_offset, trailer.index_bytes), trailer, head, end)
    return head, WrittenPages(file, index, np.ones(index.shape, np.uint8))


class WrittenPages:
    """The page streams of an entry that are in its file.

    Args:
        file: `close` closes it.
        index: [streams, pages] of INDEX_RECORD.
        there: which of them are filled in.
    """

    def __init__(self, file: OpenFile, index: NDArray[Any], there: NDArray[np.uint8]) -> None:
        self.file = file
        self.index = index
        self.there = there
        self._sizes = index["bytes"]

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()

    def size(self, page: int, stream: int) -> int | None:
        """Bytes of a page stream; None if it is not there yet."""
        return int(self._sizes[stream, page]) if self.there[stream, page] else None

    def read(self, page: int, stream: int) -> bytes:
        """A page stream that is there.

        Raises:
            EntryDamagedError: it is not what was written.
            StoreError: the disk fails.
        """
        offset, length, own_sum = (int(value) for value in self.index[stream, page])
        data = self.file.read(offset, length)
        if len(data) != length or checksum(data) != own_sum:
            raise EntryDamagedError(f"the checksum of stream {stream} of page {page} does not match")
        return data


class EntryWriter:
    """Takes the page streams of an entry, in any order, and publishes it when all are there.

    One thread at a time writes; any may read `pages` meanwhile.

    Args:
        head: of the entry.
        create: begins its file, at the first page or at `publish`.
    """

    def __init__(self, head: EntryHead, create: Callable[[], NewFile]) -> None:
        self.head = head
        self._create = create
        self._file: NewFile | None = None
        self._packed_head = pack_head(head)
        self._end = 0
        shape = (head.streams, head.layout.page_count)
        self._index = np.zeros(shape, INDEX_RECORD)
        self._there = np.zeros(shape, np.uint8)
        self._missing = head.streams * head.layout.page_count
        self.pages: WrittenPages | None = None
        """What is written so far; None before the first page."""
        self.error: StoreError | None = None
        """Why there will be no more pages."""
        self.published = False
        self._holders = 1
        self._lock = threading.Lock()
        self._listeners: set[Callable[[], None]] = set()

    @property
    def overhead_bytes(self) -> int:
        """Bytes of the file that are no page streams."""
        return len(self._packed_head) + self._index.nbytes + TRAILER_BYTES

    @property
    def size_bytes(self) -> int:
        """Bytes written so far."""
        return self._end

    @property
    def complete(self) -> bool:
        """Whether every page stream is there."""
        return not self._missing

    def append(self, arrived: Iterable[tuple[int, int, bytes | memoryview]]) -> None:
        """Write page streams, each as (page, stream, bytes); they can be read when this returns.

        Raises:
            StoreError: the disk fails or is full.
            LocalProtocolError: there is no such page stream, or it was written before; nothing was written.
        """
        if self.error is not None:
            raise self.error
        chosen = list(arrived)
        streams, pages = self._there.shape
        if len({(page, stream) for page, stream, _ in chosen}) < len(chosen):
            raise LocalProtocolError("a page stream was given twice")
        for page, stream, _ in chosen:
            if not 0 <= stream < streams or not 0 <= page < pages or self._there[stream, page]:
                raise LocalProtocolError(f"stream {stream} of page {page} is not there to be written")
        file = self._begun()
        file.write([data for _, _, data in chosen])
        for page, stream, data in chosen:
            length = memoryview(data).nbytes
            self._index[stream, page] = (self._end, length, checksum(data))
            self._end += length
            self._there[stream, page] = 1
            self._missing -= 1
        self._tell()

    def publish(self) -> None:
        """Write the index and make the entry durable and visible; blocks until it is.

        Raises:
            StoreError: the disk fails or is full.
            LocalProtocolError: page streams are missing.
        """
        if self.error is not None:
            raise self.error
        if self._missing:
            raise LocalProtocolError(f"{self._missing} page streams were never written")
        file = self._begun()
        head_sum = int.from_bytes(self._packed_head[16:24], "little")
        tail = pack_tail(self._index, self._end, head_sum)
        file.write([tail])
        file.publish(self.head.key)
        self._end += len(tail)
        self.published = True
        self._tell()

    def fail(self, error: StoreError) -> None:
        """There will be no more pages: what was written is removed, and readers learn of it."""
        self.error = error
        if self._file is not None:
            self._file.discard()
        self._tell()

    def hold(self) -> None:
        """`pages` stay readable until one `close` more."""
        with self._lock:
            self._holders += 1

    def close(self) -> None:
        """Let go of the file; the last one closes it."""
        with self._lock:
            self._holders -= 1
            last = not self._holders
        if last and self.pages is not None:
            self.pages.close()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this, from whatever thread, when there is more to read or the end is known."""
        with self._lock:
            self._listeners.add(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Do not any more."""
        with self._lock:
            self._listeners.discard(listener)

    def _begun(self) -> NewFile:
        if self._file is None:
            file = self._create()
            file.write([self._packed_head])
            self._end = len(self._packed_head)
            self._file = file
            self.pages = WrittenPages(file, self._index, self._there)
        return self._file

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
