"""The store itself: which entries there are, who reads them, and which have to go.

State of an entry:  WRITING -> STORED -> GONE,  and from WRITING -> GONE when its writer fails

Rules:

1. An entry is in the prefix index from `begin` until it is GONE; readers of one that is WRITING follow its writer.
2. What `finish` has returned for is on the disk for good, until it is evicted.
3. Entries go when the store would be larger than `max_bytes`, least recently used first, and when they were not used
   for `max_age_s`; never one that is WRITING or that somebody holds.
4. Bytes that do not match their checksums are not handed out: the file is put aside, the entry is GONE, and its readers
   get EntryDamagedError.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from lynx_net.errors import AlreadyStoredError, CodecError, EntryDamagedError, StoreError
from lynx_net.serdes.packed import PackedPages, page_order
from lynx_net.store.entry import EntryWriter, load_entry, load_head
from lynx_net.store.format import EntryHead
from lynx_net.store.held import HeldEntry, IndexedEntry
from lynx_net.store.index import PrefixIndex
from lynx_net.store.tokens import TokenPath

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from lynx_codec import PackedCache
    from lynx_net.store.entry import WrittenPages
    from lynx_net.store.storage import NewFile, Storage

__all__ = ["ContextStore", "EntryInfo"]

logger = logging.getLogger("lynx_net")

NO_ENTRY = "there is no such entry"

TOUCH_EVERY_S = 1.0
"""An entry that is read all the time need not have its file touched at every read."""


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """An entry as it stands.

    Attributes:
        key: its content address.
        head: what it is.
        size_bytes: of its file; what is written so far if it is being written.
        used_s: when it was used last, seconds since 1970.
        writing: it is being written.
        readers: who hold it.
    """

    key: str
    head: EntryHead
    size_bytes: int
    used_s: float
    writing: bool
    readers: int


class ContextStore:
    """Encoded caches by their tokens. For any threads; methods block on the disk where they say so.

    Args:
        storage: where the files lie.
        max_bytes: of all entries together; None: no limit.
        max_age_s: how long an entry stays without being used; None: for ever.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        max_bytes: int | None = None,
        max_age_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.storage = storage
        self.max_bytes = max_bytes
        self.max_age_s = max_age_s
        self._clock = clock
        self._lock = threading.RLock()
        self._entries: dict[str, IndexedEntry] = {}
        self._index: PrefixIndex[str] = PrefixIndex()
        self._trash: list[tuple[str, EntryDamagedError | None]] = []
        self._sweeping = threading.Lock()
        self.damaged: dict[str, str] = {}
        """Keys of files that `open` found damaged, with the reason."""

    # ---- life

    def open(self, *, readonly: bool = False) -> Self:
        """Take possession of the storage and read the head of every entry. Blocks.

        Damaged files are put aside with a log line; `readonly` leaves everything as it is.

        Raises:
            StoreError: the storage is in use by another process, or fails.
        """
        self.storage.open(readonly=readonly)
        for file in self.storage.files():
            try:
                opened = self.storage.read(file.key)
            except FileNotFoundError:
                continue
            try:
                head = load_head(opened)[0]
                if head.key != file.key:
                    raise EntryDamagedError(f"its name should be {head.key}")
                head.table()
            except EntryDamagedError as error:
                self.damaged[file.key] = str(error)
                if not readonly:
                    self._put_aside(file.key, error)
            except CodecError as error:
                logger.warning("store: %s cannot be used here: %s", file.key, error)
            else:
                self._add(IndexedEntry(head, file.size_bytes, head.created_s if file.used_s is None else file.used_s))
            finally:
                opened.close()
        if not readonly:
            self.evict()
        return self

    def close(self) -> None:
        """Let go of the storage. Nobody may write or read any more."""
        self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def now(self) -> float:
        """Seconds since 1970, by the store's clock."""
        return self._clock()

    # ---- looking

    def entries(self) -> list[EntryInfo]:
        """All entries, the least recently used first."""
        with self._lock:
            found = [
                EntryInfo(
                    entry.key,
                    entry.head,
                    entry.size_bytes if entry.writer is None else entry.writer.size_bytes,
                    entry.used_s,
                    entry.writer is not None,
                    entry.readers,
                )
                for entry in self._entries.values()
            ]
        return sorted(found, key=lambda one: one.used_s)

    @property
    def total_bytes(self) -> int:
        """Of all entries; of those that are being written what they may take."""
        with self._lock:
            return sum(entry.size_bytes for entry in self._entries.values())

    def hold(
        self, path: TokenPath, *, wanted: Callable[[EntryHead], bool] = lambda head: True, least_tokens: int = 1
    ) -> HeldEntry | None:
        """Hold the entry that has most of the first tokens of a prompt; None if no wanted one has so many.

        Of equal ones a stored one is taken before one that is being written, then the newest. It is not evicted until
        `release`. Does not touch the disk.
        """
        with self._lock:
            found = self._index.longest(path, lambda key: wanted(self._entries[key].head))
            if not found or found[0][0] < least_tokens:
                return None
            tokens = found[0][0]
            best = [self._entries[key] for common, key in found if common == tokens]
            entry = min(best, key=lambda one: (one.writer is not None, -one.used_s))
            return self._held(entry, tokens)

    def hold_key(self, key: str) -> HeldEntry | None:
        """Hold the entry with this content address; None if there is none."""
        with self._lock:
            entry = self._entries.get(key)
            return None if entry is None else self._held(entry, entry.head.path.count)

    def _held(self, entry: IndexedEntry, tokens: int) -> HeldEntry:
        entry.readers += 1
        entry.used_s = self._clock()
        return HeldEntry(self, entry, tokens)

    # ---- writing

    def begin(self, head: EntryHead, expected_bytes: int) -> EntryWriter:
        """Begin an entry. End it with `finish` or `abandon`. Does not touch the disk, its writer does.

        Args:
            head: what it is.
            expected_bytes: of its page streams, at most; room is made for them.

        Raises:
            AlreadyStoredError: it is stored or being written.
            StoreError: there is no room, and none can be made.
            CodecError: a codec that this side does not have.
        """
        head.table()
        with self._lock:
            if (known := self._entries.get(head.key)) is not None:
                known.used_s = self._clock()
                raise AlreadyStoredError(f"already {'being ' if known.writer else ''}stored: {head.key}")
            writer = EntryWriter(head, self._create)
            room_bytes = expected_bytes + writer.overhead_bytes
            self._choose(room_bytes)
            if self.max_bytes is not None and self.total_bytes + room_bytes > self.max_bytes:
                raise StoreError(
                    f"no room for {room_bytes} bytes: the store may hold {self.max_bytes} bytes, and "
                    f"{self.total_bytes} are being written or read"
                )
            self._add(IndexedEntry(head, room_bytes, self._clock(), writer))
            return writer

    def _create(self) -> NewFile:
        # What had to make room goes first; and an older file of the same key must not be removed later.
        self.sweep()
        return self.storage.create()

    def put(
        self,
        model: str,
        tokens: Sequence[int] | NDArray[np.integer[Any]],
        cache: PackedCache,
        *,
        sequence: int = 0,
        dtype: str = "float32",
        meta: dict[str, Any] | None = None,
    ) -> str:
        """Store a cache of this process; returns its content address when it is durable. Blocks.

        Args:
            model, tokens: as in `stored_as`.
            cache, sequence, dtype: as in `KVLink.send_packed`.
            meta: given to whoever gets the cache, as `offer.meta`.

        Raises:
            AlreadyStoredError, StoreError: as `begin` and `finish`.
            CodecError: the pages of the cache do not lie as those of a transfer, or lack streams.
        """
        pages = PackedPages(cache, sequence=sequence, dtype=dtype)
        path = TokenPath.of(model, tokens)
        names, params = pages.stream_names, pages.codec_params
        head = EntryHead(path, pages.layout, pages.codec, params, len(names), meta or {}, self._clock())
        wanted = [(page, stream) for stream in range(len(names)) for page in page_order(pages.layout, stream)]
        writer = self.begin(head, sum(pages.size(*one) for one in wanted))
        try:
            for page, stream in wanted:
                writer.append([(page, stream, data) for data in pages.read([(page, stream)])])
        except BaseException as error:
            self.abandon(
                writer, error if isinstance(error, StoreError) else StoreError(f"its writer failed: {error!r}")
            )
            raise
        self.finish(writer)
        return head.key

    def finish(self, writer: EntryWriter) -> None:
        """Publish an entry that has all its pages; blocks until it is durable.

        Raises:
            StoreError: the disk fails or is full; the entry is GONE then.
        """
        try:
            writer.publish()
        except StoreError as error:
            self.abandon(writer, error)
            raise
        with self._lock:
            entry = self._entries.get(writer.head.key)
            if entry is not None and entry.writer is writer:
                entry.writer = None
                entry.size_bytes = writer.size_bytes
                entry.used_s = entry.touched_s = self._clock()
                writer.close()
                return
            self._trash.append((writer.head.key, None))
        # A reader found damage in what was just published.
        self.sweep()
        raise writer.error or StoreError(f"{writer.head.key} was given up")

    def abandon(self, writer: EntryWriter, error: StoreError) -> None:
        """The entry will not be finished: its readers get this error, its file is removed."""
        with self._lock:
            entry = self._entries.get(writer.head.key)
            if entry is None or entry.writer is not writer:
                return
            self._forget(entry)
        try:
            writer.fail(error)
        finally:
            writer.close()

    # ---- removing

    def evict(self, *, max_bytes: int | None = None, max_age_s: float | None = None) -> list[str]:
        """Remove what is too old or too much (rule 3), by the store's limits or by these. Blocks.

        Returns:
            the keys of what was removed.
        """
        with self._lock:
            keys = self._choose(0, max_bytes=max_bytes, max_age_s=max_age_s)
        self.sweep()
        return keys

    def _choose(self, room_bytes: int, *, max_bytes: int | None = None, max_age_s: float | None = None) -> list[str]:
        """Forget entries so that `room_bytes` more have room; their files go with the next `sweep`."""
        now = self._clock()
        max_bytes = self.max_bytes if max_bytes is None else max_bytes
        max_age_s = self.max_age_s if max_age_s is None else max_age_s
        excess = 0 if max_bytes is None else self.total_bytes + room_bytes - max_bytes
        if excess <= 0 and max_age_s is None:
            return []
        free = [entry for entry in self._entries.values() if entry.writer is None and not entry.readers]
        keys = []
        for entry in sorted(free, key=lambda entry: entry.used_s):
            age_s = now - entry.used_s
            if excess <= 0 and (max_age_s is None or age_s <= max_age_s):
                break
            excess -= entry.size_bytes
            self._forget(entry)
            self._trash.append((entry.key, None))
            keys.append(entry.key)
            tokens = entry.head.path.count
            logger.info(
                "store: evicts %s, %d tokens, %d bytes, unused for %.0f s", entry.key, tokens, entry.size_bytes, age_s
            )
        return keys

    def remove(self, key: str) -> bool:
        """Remove one entry, unless it is written or held; says whether it was removed. Blocks."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.writer is not None or entry.readers:
                return False
            self._forget(entry)
            self._trash.append((key, None))
        self.sweep()
        return True

    def sweep(self) -> None:
        """Remove the files of entries that are GONE, and put damaged ones aside. Blocks."""
        with self._sweeping:
            while True:
                with self._lock:
                    if not self._trash:
                        return
                    key, error = self._trash.pop(0)
                if error is not None:
                    self._put_aside(key, error)
                    continue
                try:
                    self.storage.remove(key)
                except StoreError as failure:
                    logger.warning("store: %s; it comes back when the store is opened again", failure)

    def verify(self, key: str) -> str | None:
        """Read all of an entry and compare it with its checksums; what is wrong with it, or None. Blocks.

        Nothing is changed: `damage` puts an entry aside.
        """
        try:
            with closing(self.opened(key)) as pages:
                for stream, page in np.ndindex(pages.index.shape):
                    pages.read(page, stream)
        except FileNotFoundError:
            return NO_ENTRY
        except StoreError as error:
            return str(error)
        return None

    def opened(self, key: str) -> WrittenPages:
        """For `HeldEntry`: the pages of a stored entry, whose index is sound. Blocks.

        Raises:
            FileNotFoundError: there is no such file.
            StoreError: it is damaged, or the disk fails.
        """
        file = self.storage.read(key)
        try:
            head, pages = load_entry(file)
            if head.key != key:
                raise EntryDamagedError(f"its name should be {head.key}")
        except BaseException:
            file.close()
            raise
        return pages

    def touch(self, entry: IndexedEntry) -> None:
        """For `HeldEntry`: an entry is being used, and its file says so, too. Blocks."""
        if entry.used_s - entry.touched_s > TOUCH_EVERY_S:
            entry.touched_s = entry.used_s
            self.storage.touch(entry.key)

    def let_go(self, entry: IndexedEntry) -> None:
        """For `HeldEntry`: one reader less."""
        with self._lock:
            entry.readers -= 1

    def damage(self, key: str, error: EntryDamagedError) -> None:
        """An entry is damaged: put its file aside and forget it. Blocks."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return
            if entry.writer is None:
                self._forget(entry)
                self._trash.append((key, error))
        if entry.writer is None:
            self.sweep()
        else:
            logger.error("store: entry %s is damaged while it is being written: %s", key, error)
            self.abandon(entry.writer, error)

    def _put_aside(self, key: str, error: EntryDamagedError) -> None:
        try:
            where = self.storage.quarantine(key)
        except StoreError as failure:
            where = f"nowhere ({failure})"
        logger.error("store: entry %s is damaged and was put aside, to %s: %s", key, where, error)

    def _add(self, entry: IndexedEntry) -> None:
        with self._lock:
            self._entries[entry.key] = entry
            self._index.add(entry.key, entry.head.path)

    def _forget(self, entry: IndexedEntry) -> None:
        del self._entries[entry.key]
        self._index.remove(entry.key)
