"""Entries that somebody holds: they are read, and not evicted meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lynx_net.errors import EntryDamagedError

if TYPE_CHECKING:
    from lynx_net.store.entry import EntryWriter, WrittenPages
    from lynx_net.store.format import EntryHead

__all__ = ["HeldEntry", "Holder", "IndexedEntry"]


class IndexedEntry:
    """What the store knows of an entry. All of it under the store's lock."""

    def __init__(self, head: EntryHead, size_bytes: int, used_s: float, writer: EntryWriter | None = None) -> None:
        self.key = head.key
        self.head = head
        self.size_bytes = size_bytes
        self.used_s = used_s
        self.touched_s = used_s
        self.writer = writer
        self.readers = 0


class Holder(Protocol):
    """What a held entry asks of its store."""

    def opened(self, key: str) -> WrittenPages:
        """The pages of a stored entry, whose index is sound. Blocks; raises FileNotFoundError or StoreError."""
        ...

    def touch(self, entry: IndexedEntry) -> None:
        """An entry is being used: its file says so, too. Blocks."""

    def damage(self, key: str, error: EntryDamagedError) -> None:
        """An entry is damaged. Blocks."""

    def let_go(self, entry: IndexedEntry) -> None:
        """One reader less."""


class HeldEntry:
    """An entry that is not evicted while this is held. Made by `ContextStore.hold`; `release` it.

    Attributes:
        tokens: how many of its first tokens are those that were asked for.
        writer: its writer, if it was being written when it was held.
    """

    def __init__(self, store: Holder, entry: IndexedEntry, tokens: int) -> None:
        self.tokens = tokens
        self.writer = entry.writer
        self._store = store
        self._entry = entry
        self._pages: WrittenPages | None = None
        if self.writer is not None:
            self.writer.hold()
        self._released = False

    @property
    def key(self) -> str:
        """Content address."""
        return self._entry.key

    @property
    def head(self) -> EntryHead:
        """What it is."""
        return self._entry.head

    @property
    def pages(self) -> WrittenPages | None:
        """What can be read; None before `open`, or before the first page of an entry that is being written."""
        return self._pages if self.writer is None else self.writer.pages

    def open(self) -> None:
        """Open a stored entry and check its index. Blocks.

        Raises:
            EntryDamagedError: it is not what was written; it has been put aside.
            StoreError: the disk fails.
        """
        if self.writer is not None or self._pages is not None:
            return
        entry, store = self._entry, self._store
        try:
            self._pages = store.opened(entry.key)
            store.touch(entry)
        except FileNotFoundError:
            error = EntryDamagedError(f"the file of {entry.key} is gone")
            store.damage(entry.key, error)
            raise error from None
        except EntryDamagedError as error:
            store.damage(entry.key, error)
            raise

    def read(self, page: int, stream: int) -> bytes:
        """A page stream that `pages` has. Blocks.

        Raises:
            EntryDamagedError: it is not what was written; the entry has been put aside.
            StoreError: the disk fails.
        """
        pages = self.pages
        assert pages is not None
        try:
            return pages.read(page, stream)
        except EntryDamagedError as error:
            self._store.damage(self.key, error)
            raise

    def release(self) -> None:
        """Hold it no longer; only the first call counts."""
        if self._released:
            return
        self._released = True
        if self.writer is not None:
            self.writer.close()
        elif self._pages is not None:
            self._pages.close()
        self._store.let_go(self._entry)
