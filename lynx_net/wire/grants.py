"""Who is granted credit: one book for all links of a receiver, so that priority holds across senders.

Rules:

1. A transfer is granted nothing (beyond the initial credit) before its memory is reserved. Reservations are made in the
   order of the offers and never exceed `memory_bytes`; who does not fit waits, who can never fit is refused.
2. Stream 0 is granted up to its window. Stream s > 0 is granted only while no *other* link owes bytes of an earlier
   stream: a single sender keeps its own order (scheduler rule 2), several senders are kept in order here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from lynx_net.wire.receiving import ReceiveState

__all__ = ["CreditBook", "Grant"]


@dataclass(frozen=True, slots=True)
class Grant:
    """Tell this link's peer that the stream may have sent `limit` bytes; stream -1: the transfer is accepted."""

    link: Hashable
    transfer: int
    stream: int
    limit: int


@dataclass(slots=True)
class _Entry:
    link: Hashable
    state: ReceiveState
    need_bytes: int
    accepted: bool = False


class CreditBook:
    """Reservations and grants of one receiving process.

    `memory_bytes` bounds the encoded bytes that may be held for all accepted transfers together.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.reserved_bytes = 0
        self._entries: dict[tuple[Hashable, int], _Entry] = {}
        self._waiting: deque[_Entry] = deque()

    def fits(self, need_bytes: int) -> bool:
        """Whether a transfer of this size can ever be accepted."""
        return need_bytes <= self.memory_bytes

    def add(self, link: Hashable, state: ReceiveState, need_bytes: int) -> list[Grant]:
        """Take up an offered transfer; returns what can be granted now."""
        entry = _Entry(link, state, need_bytes)
        self._entries[link, state.transfer] = entry
        self._waiting.append(entry)
        return self._admit()

    def remove(self, link: Hashable, transfer: int) -> list[Grant]:
        """A transfer is over; returns what others can be granted now."""
        entry = self._entries.pop((link, transfer), None)
        if entry is None:
            return []
        if entry.accepted:
            self.reserved_bytes -= entry.need_bytes
        else:
            self._waiting.remove(entry)
        return [*self._admit(), *self._grants(self._entries.values())]

    def progressed(self, link: Hashable, transfer: int, *, stream_finished: bool) -> list[Grant]:
        """Bytes of a transfer arrived or were consumed; `stream_finished` if a whole stream of it is in."""
        if stream_finished:
            return self._grants(self._entries.values())
        entry = self._entries.get((link, transfer))
        return self._grants([entry]) if entry is not None else []

    def is_accepted(self, link: Hashable, transfer: int) -> bool:
        """Whether the memory of a transfer has been reserved."""
        entry = self._entries.get((link, transfer))
        return entry is not None and entry.accepted

    def _admit(self) -> list[Grant]:
        grants: list[Grant] = []
        while self._waiting and self.reserved_bytes + self._waiting[0].need_bytes <= self.memory_bytes:
            entry = self._waiting.popleft()
            entry.accepted = True
            self.reserved_bytes += entry.need_bytes
            grants.append(Grant(entry.link, entry.state.transfer, -1, 0))
            grants += self._grants([entry])
        return grants

    def _grants(self, entries: Iterable[_Entry]) -> list[Grant]:
        grants: list[Grant] = []
        owing = self._owing_links()
        for entry in entries:
            if not entry.accepted:
                continue
            state = entry.state
            earlier: set[Hashable] = set()
            for stream in range(state.streams):
                if stream:
                    earlier |= owing.get(stream - 1, set())
                if earlier - {entry.link}:
                    break
                if state.owes(stream) and (limit := state.windows[stream].next_limit()) is not None:
                    grants.append(Grant(entry.link, state.transfer, stream, limit))
        return grants

    def _owing_links(self) -> dict[int, set[Hashable]]:
        owing: dict[int, set[Hashable]] = {}
        for entry in self._entries.values():
            if entry.accepted:
                for stream in range(entry.state.streams):
                    if entry.state.owes(stream):
                        owing.setdefault(stream, set()).add(entry.link)
        return owing
