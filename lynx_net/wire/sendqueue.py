"""What one transfer still has to send, and the credit it has for that. Its rules are those of scheduler.py."""

from __future__ import annotations

import bisect
import math
from collections import deque
from typing import NamedTuple, TypeAlias

from lynx_net.errors import LocalProtocolError
from lynx_net.wire.bursts import SendBytes
from lynx_net.wire.credit import SendWindow
from lynx_net.wire.stats import TransferStats

__all__ = ["EXACT_CLASS", "NO_DEADLINE", "SendQueue", "Submitted", "classes_of"]

MAX_STREAM_BYTES = (1 << 32) - 1
"""The header has 32 bits for the bytes of a page stream."""

NO_DEADLINE = math.inf
"""Deadline of a transfer that has none."""

EXACT_CLASS = 255
"""Class of an exact stream, behind all that make a cache fit to decode from."""


def classes_of(streams: int, *, exact: bool) -> list[int]:
    """Priority class of each stream of a transfer, 0 first; `exact` says that the last of several streams is exact."""
    classes = list(range(streams))
    if exact and streams > 1:
        classes[-1] = EXACT_CLASS
    return classes


Submitted: TypeAlias = "tuple[int, int, memoryview, tuple[int, ...], int | None]"
"""A stream of a page as it is queued: page, stream, data, rank, and xxh3-64 of the data if that is known."""


class _PageStream(NamedTuple):
    page: int
    data: memoryview
    rank: tuple[int, ...]
    checksum: int | None


_new_tuple = tuple.__new__
"""Makes a NamedTuple without the call of a Python function that its class makes of it: here it is one for a segment."""


class SendQueue:
    """Everything a transfer still has to send, per stream, with its credit."""

    def __init__(
        self,
        transfer: int,
        *,
        streams: int,
        page_count: int,
        segment_bytes: int,
        initial_credit: int,
        deadline_s: float = NO_DEADLINE,
        exact: bool = False,
    ) -> None:
        if math.isnan(deadline_s):
            raise LocalProtocolError("deadline_s must be a number")
        self.transfer = transfer
        self.segment_bytes = segment_bytes
        self.deadline_s = deadline_s
        self.pages: list[deque[_PageStream]] = [deque() for _ in range(streams)]
        self.classes = classes_of(streams, exact=exact)
        self.windows = [SendWindow(initial_credit if stream == 0 else 0) for stream in range(streams)]
        self.queued_bytes = [0] * streams
        self.stats = TransferStats.of(streams)
        self.unsent = streams * page_count
        """Page streams whose last segment has not been chosen yet, those not submitted yet included; and all segments
        that were given back."""
        self._begun = [0] * streams
        """Bytes of the first page of each stream that were cut already."""
        self._given_back: list[deque[SendBytes]] = [deque() for _ in range(streams)]
        self._submitted = [bytearray(page_count) for _ in range(streams)]

    def stream_in(self, class_: int) -> int:
        """The stream that is of a class: only the last one can have another class than its number."""
        return min(class_, len(self.pages) - 1)

    def append(
        self, page: int, stream: int, data: memoryview, rank: tuple[int, ...] = (), checksum: int | None = None
    ) -> None:
        """Queue one stream of one page; refuses what the receiver would."""
        if not 0 <= stream < len(self.pages) or not 0 <= page < len(self._submitted[stream]):
            raise LocalProtocolError(f"transfer {self.transfer} has no page {page} with a stream {stream}")
        length = data.nbytes
        if length > MAX_STREAM_BYTES:
            raise LocalProtocolError(f"a page stream of {length} bytes, at most {MAX_STREAM_BYTES} can be sent")
        submitted = self._submitted[stream]
        if submitted[page]:
            raise LocalProtocolError(f"stream {stream} of page {page} of transfer {self.transfer} was submitted before")
        view = data.cast("B") if length else memoryview(b"")
        submitted[page] = 1
        pages, added = self.pages[stream], _new_tuple(_PageStream, (page, view, rank, checksum))
        self.queued_bytes[stream] += length
        if not pages or pages[-1].rank <= rank:
            pages.append(added)
            return
        begun = 1 if self._begun[stream] else 0
        if begun < len(pages) and rank < pages[begun].rank:  # as every page is in the order of drafts' needs
            pages.insert(begun, added)
        else:
            pages.insert(bisect.bisect_right(pages, rank, lo=begun, key=lambda one: one.rank), added)

    def waits_for_peer(self) -> bool:
        """True if nothing can be sent before the receiver says something: it grants no credit, or it has everything."""
        queued = False
        for stream, pages in enumerate(self.pages):
            if pages or self._given_back[stream]:
                if self.sendable(stream):
                    return False
                queued = True
        return queued or not self.unsent

    def next_length(self, stream: int) -> int:
        """Payload bytes of the next segment of a stream that has any queued (rules 5 and 8)."""
        if given_back := self._given_back[stream]:
            return len(given_back[0].data)
        return min(self.segment_bytes, self.pages[stream][0].data.nbytes - self._begun[stream])

    def sendable(self, stream: int) -> bool:
        """Rule 4."""
        if not self.pages[stream] and not self._given_back[stream]:
            return False
        window = self.windows[stream]
        room_bytes = window.limit - window.sent
        return room_bytes >= self.segment_bytes or room_bytes >= self.next_length(stream)

    def cut(self, stream: int, room_bytes: int, most: int) -> list[SendBytes]:
        """The next segments of a stream, up to the one that fills the room; they count as sent.

        Fewer where queue or credit end: none if the stream is not sendable.
        """
        given_back, pages, window = self._given_back[stream], self.pages[stream], self.windows[stream]
        transfer, segment_bytes, offset = self.transfer, self.segment_bytes, self._begun[stream]
        credit = window.available
        chosen: list[SendBytes] = []
        cut_bytes = 0
        while cut_bytes < room_bytes and len(chosen) < most:
            if given_back:
                one = given_back[0]
                length = len(one.data)
                if cut_bytes + length > credit:
                    break
                given_back.popleft()
                self.unsent -= 1
            elif pages:
                page, data, _, known = pages[0]
                total = len(data)
                length = min(segment_bytes, total - offset)
                if cut_bytes + length > credit:
                    break
                payload, of_payload = (data, known) if length == total else (data[offset : offset + length], None)
                one = _new_tuple(SendBytes, (payload, transfer, page, stream, offset, total, of_payload))
                offset += length
                if offset == total:
                    pages.popleft()
                    offset = 0
                    self.unsent -= 1
            else:
                break
            cut_bytes += length
            chosen.append(one)
        self._begun[stream] = offset
        window.use(cut_bytes)
        self._count(stream, cut_bytes, len(chosen))
        return chosen

    def give_back(self, chosen: SendBytes) -> None:
        """A segment that `cut` gave has not been sent; of several the last one first."""
        self._given_back[chosen.stream].appendleft(chosen)
        self.unsent += 1
        self.stats.last_segment_s = None
        self.windows[chosen.stream].unuse(len(chosen.data))
        self._count(chosen.stream, -len(chosen.data), -1)

    def _count(self, stream: int, sent_bytes: int, segments: int) -> None:
        self.queued_bytes[stream] -= sent_bytes
        self.stats.stream_bytes[stream] += sent_bytes
        self.stats.stream_segments[stream] += segments
