"""Who is granted credit: one book for all links of a receiver, so that priority holds across senders.

Rules:

1. A transfer is granted nothing (beyond the initial credit) before its memory is reserved. Reservations are made in the
   order of the offers and never exceed `memory_bytes`; who does not fit waits, who can never fit is refused.
2. Stream 0 is granted up to its window. A later stream is granted only while no *other* link owes bytes of an earlier
   class (its number, or that of exact streams): a single sender keeps its own order (scheduler rule 2), several
   senders are kept in order here.
3. What the initial credit lets a waiting transfer send is reserved apart, up to `early_bytes` for all of them; who does
   not fit there either is refused, since its bytes may already be on their way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lynx_net.wire.pool import KEPT_BYTES, BufferPool

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from lynx_net.wire.receiving import ReceiveState

__all__ = ["EARLY_BYTES", "CreditBook", "Grant"]

EARLY_BYTES = 512 * 1024 * 1024


class Grant(NamedTuple):
    """Tell this link's peer that the stream may have sent `limit` bytes; stream -1: the transfer is accepted."""

    link: Hashable
    transfer: int
    stream: int
    limit: int


@dataclass(slots=True, eq=False)
class _Entry:
    link: Hashable
    state: ReceiveState
    need_bytes: int
    early_bytes: int = 0
    owed: set[int] = field(default_factory=set)
    """Streams for which this entry is counted in `CreditBook._owing`."""


class CreditBook:
    """Reservations and grants of one receiving process.

    Args:
        memory_bytes: bounds the encoded bytes that may be held for all accepted transfers together.
        early_bytes: bounds those of all transfers that wait to be accepted.
        kept_bytes: of memory that is kept for transfers to come.
    """

    def __init__(self, memory_bytes: int, early_bytes: int = EARLY_BYTES, kept_bytes: int = KEPT_BYTES) -> None:
        self.memory_bytes = memory_bytes
        self.pool = BufferPool(kept_bytes)
        """Where all transfers of the process take the buffers of their pages from."""
        self.early_bytes = early_bytes
        self.reserved_bytes = 0
        self.early_reserved_bytes = 0
        self.decoded_pages = 0
        """Pages decoded on all links, ever; shows whether the decoder moves."""
        self._entries: dict[tuple[Hashable, int], _Entry] = {}
        self._waiting: deque[_Entry] = deque()
        # class -> link -> how many of its accepted transfers owe bytes of a stream of that class
        self._owing: dict[int, dict[Hashable, int]] = {}

    def fits(self, need_bytes: int) -> bool:
        """Whether a transfer of this size can ever be accepted."""
        return need_bytes <= self.memory_bytes

    def add(self, link: Hashable, state: ReceiveState, need_bytes: int) -> list[Grant]:
        """Take up an offered transfer; returns what can be granted now."""
        entry = _Entry(link, state, need_bytes)
        self._entries[link, state.transfer] = entry
        self._waiting.append(entry)
        return self._admit()

    def reserve_early(self, link: Hashable, transfer: int, early_bytes: int) -> bool:
        """Reserve what a waiting transfer may send already (rule 3); False if that does not fit."""
        entry = self._entries[link, transfer]
        if self.early_reserved_bytes + early_bytes > self.early_bytes:
            return False
        self.early_reserved_bytes += early_bytes
        entry.early_bytes += early_bytes
        return True

    def remove(self, link: Hashable, transfer: int) -> list[Grant]:
        """A transfer is over; returns what others can be granted now."""
        entry = self._entries.pop((link, transfer), None)
        if entry is None:
            return []
        self.early_reserved_bytes -= entry.early_bytes
        freed = False
        if entry.state.accepted:
            self.reserved_bytes -= entry.need_bytes
            for stream in list(entry.owed):
                freed = self._settle(entry, stream) or freed
        else:
            self._waiting.remove(entry)
        grants = self._admit() if self._waiting else []
        return [*grants, *self._grants(self._entries.values())] if freed else grants

    def progressed(self, link: Hashable, transfer: int, *, stream_finished: bool) -> list[Grant]:
        """Bytes of a transfer arrived or were consumed; `stream_finished` if a whole stream of it is in."""
        entry = self._entries.get((link, transfer))
        if entry is None:
            return []
        if not stream_finished:
            for window in entry.state.windows:
                if window.grant_due:
                    return self._grants((entry,))
            return []
        freed = False
        for stream in list(entry.owed):
            if not entry.state.owes(stream):
                freed = self._settle(entry, stream) or freed
        return self._grants(self._entries.values() if freed else (entry,))

    def is_accepted(self, link: Hashable, transfer: int) -> bool:
        """Whether the memory of a transfer has been reserved."""
        entry = self._entries.get((link, transfer))
        return entry is not None and entry.state.accepted

    def withholds(self, link: Hashable, transfer: int) -> bool:
        """Whether rule 1 or rule 2 is why a transfer is granted nothing now."""
        entry = self._entries.get((link, transfer))
        if entry is None:
            return False
        return not entry.state.accepted or any(self._is_behind(entry, stream) for stream in entry.owed)

    def _admit(self) -> list[Grant]:
        grants: list[Grant] = []
        while self._waiting and self.reserved_bytes + self._waiting[0].need_bytes <= self.memory_bytes:
            entry = self._waiting.popleft()
            entry.state.accepted = True
            self.reserved_bytes += entry.need_bytes
            self.early_reserved_bytes -= entry.early_bytes
            entry.early_bytes = 0
            for stream in range(entry.state.streams):
                if entry.state.owes(stream):
                    entry.owed.add(stream)
                    owing = self._owing.setdefault(entry.state.classes[stream], {})
                    owing[entry.link] = owing.get(entry.link, 0) + 1
            grants += [Grant(entry.link, entry.state.transfer, -1, 0), *self._grants((entry,))]
        return grants

    def _settle(self, entry: _Entry, stream: int) -> bool:
        """The entry does not owe this stream any more; True if somebody may have waited for that (rule 2)."""
        entry.owed.discard(stream)
        class_ = entry.state.classes[stream]
        owing = self._owing[class_]
        owing[entry.link] -= 1
        if owing[entry.link]:
            return False
        del owing[entry.link]
        return any(later > class_ and links for later, links in self._owing.items())

    def is_behind(self, link: Hashable, class_: int) -> bool:
        """Whether another link owes bytes of a class before this one, so that this one is granted nothing (rule 2)."""
        return any(
            earlier < class_ and len(owing) > (1 if link in owing else 0) for earlier, owing in self._owing.items()
        )

    def _is_behind(self, entry: _Entry, stream: int) -> bool:
        return self.is_behind(entry.link, entry.state.classes[stream])

    def _grants(self, entries: Iterable[_Entry]) -> list[Grant]:
        grants: list[Grant] = []
        for entry in entries:
            for stream, window in enumerate(entry.state.windows):
                # The cheap question first: this runs for every segment, and a grant is seldom due.
                if not window.grant_due or stream not in entry.owed or self._is_behind(entry, stream):
                    continue
                limit = window.next_limit()
                if limit is not None:
                    grants.append(Grant(entry.link, entry.state.transfer, stream, limit))
        return grants
