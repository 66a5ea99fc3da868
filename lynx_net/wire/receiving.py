"""The receiving half of one transfer: where bytes go, what has arrived, and what is ready.

Rules:

1. A page stream gets its buffer when its first segment arrives, of the size that segment names, which must be one of
   the sizes the codec can produce for that page (of a stream whose size depends on the values: any up to a bound):
   nothing is allocated beyond what was reserved for the offer.
2. Segments begin at multiples of the offer's segment size; each is taken once, a repeated one is dropped.
3. Bytes count against the stream's credit when their segment begins.
4. A page stream is handed out for decoding when all its segments are in and verified, and every earlier stream of that
   page has been handed out before it. Its buffer lives until the last stream of the page is decoded.
5. A layer is ready at stream s when all its pages are decoded with streams 0 to s; the transfer is ready at s when all
   layers are; it is complete when it is ready at its last stream. A transfer without pages is complete at once.
6. A sender begins a page only when it has sent all of the page before in that stream. Until the transfer is accepted,
   the buffers of all pages but the largest therefore fit into the initial credit; more is a RemoteProtocolError.
7. The windows of later streams are narrow until every earlier stream of the transfer is in: they keep an idle line
   busy, but what is granted cannot be recalled when another peer begins an anchor. The streams behind the first one
   that is owed share `early_window`, the next first, as much as it has bytes; each has two segments at least.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lynx_net.errors import FlowControlError, IntegrityError, LocalProtocolError, RemoteProtocolError
from lynx_net.wire.credit import ReceiveWindow
from lynx_net.wire.events import PageArrived, PagesArrived
from lynx_net.wire.frames import SegmentHeader
from lynx_net.wire.layout import WaitingOrder
from lynx_net.wire.loans import Loans
from lynx_net.wire.pagesizes import page_bounds, sizes_in
from lynx_net.wire.pool import BufferPool
from lynx_net.wire.progress import Progress
from lynx_net.wire.sendqueue import classes_of
from lynx_net.wire.stats import TransferStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lynx_net.wire.events import Event
    from lynx_net.wire.layout import CacheLayout
    from lynx_net.wire.lending import LentRun
    from lynx_net.wire.pagesizes import PageSizes
    from lynx_net.wire.progress import Ready

__all__ = ["ReceiveState"]


class _PageStream:
    """One stream of one page on its way in: its bytes, how far each segment is, and how many are missing."""

    __slots__ = ("data", "missing", "segments")

    def __init__(self, data: memoryview, segments: int) -> None:
        """Bytes that come in so many segments; 0 if they are there."""
        self.data = data
        self.missing = segments
        self.segments = bytearray(segments) if segments else _WHOLE


_STARTED = 1
_ARRIVED = 2
_WHOLE = bytearray((_ARRIVED,))


class _Page:
    __slots__ = ("decoded", "handed_out", "streams")

    def __init__(self, streams: int) -> None:
        self.streams: list[_PageStream | None] = [None] * streams
        self.handed_out = 0
        self.decoded = 0


class ReceiveState:
    """State of one incoming transfer; knows neither codec nor clock.

    Args:
        transfer: its id.
        layout: of the cache.
        streams: number of streams of its codec.
        segment_bytes: segment size of the offer.
        sizes: page number to the byte sizes each stream of that page may have.
        windows: the credit window of each stream, bytes.
        initial_credit: granted for stream 0 by the handshake.
        pool: where the buffers of page streams come from and go back to.
        early_window: of later streams while an earlier one is owed (rule 7); None: the same as afterwards.
        exact: the last of several streams is exact, and in the class of exact streams.
        stats: where what arrives is counted.
    """

    def __init__(
        self,
        transfer: int,
        layout: CacheLayout,
        streams: int,
        segment_bytes: int,
        sizes: Callable[[int], Sequence[PageSizes]],
        windows: Sequence[int],
        initial_credit: int,
        pool: BufferPool | None = None,
        *,
        early_window: int | None = None,
        stats: TransferStats | None = None,
        exact: bool = False,
    ) -> None:
        self.classes = classes_of(streams, exact=exact)
        """Priority class of each stream."""
        self.stats = TransferStats.of(streams) if stats is None else stats
        self.pool = BufferPool() if pool is None else pool
        """Where the buffers of its pages come from."""
        self.transfer = transfer
        self.layout = layout
        self.streams = streams
        self.segment_bytes = segment_bytes
        self.accepted = False
        """Set by the credit book when the memory of the transfer is reserved."""
        self._initial_credit = initial_credit
        self._early_bytes = 0
        self._early_largest = 0
        self._sizes = sizes
        self._page_count = layout.page_count
        self._largest_bytes, most_bytes = page_bounds(layout, streams, sizes)
        self._full_windows = windows
        self.windows = [ReceiveWindow(size, most=most) for size, most in zip(windows, most_bytes, strict=True)]
        self.windows[0].limit = initial_credit
        self.covered = streams == 1 and most_bytes[0] is not None and most_bytes[0] <= initial_credit
        """The sender needs no more than the initial credit."""
        self._early_window = early_window if streams > 1 else None
        self._pages: dict[int, _Page] = {}
        self._done = _Page(streams)
        """Stands for every page that is decoded whole: there may be many, and the collector looks at each object."""
        self._done.handed_out = self._done.decoded = streams
        self._begun_pages = [0] * streams
        self._arrived_pages = [0] * streams
        # Anchors come in the order of the pages, what waits behind them in another.
        order = WaitingOrder(layout)
        self._loans = [
            Loans(
                self._page_count,
                order.page if stream else int,
                order.place if stream else int,
                partial(sizes_in, sizes, stream),
            )
            for stream in range(streams)
        ]
        self._progress = Progress(transfer, streams, layout)
        if self._early_window is not None:
            self._set_windows(self._early_window)

    def start(self) -> list[Ready]:
        """What is ready before any byte has come (rule 5)."""
        return self._progress.without_pages()

    def owes(self, stream: int) -> bool:
        """True until every page of the stream has arrived."""
        return self._arrived_pages[stream] < self._page_count

    def early_bytes(self) -> int:
        """The most that the initial credit makes us hold before the transfer is accepted (rule 6)."""
        return self._initial_credit + self._largest_page(0)

    def _largest_page(self, stream: int) -> int:
        """The most bytes that a page can have in this stream."""
        return self._largest_bytes[stream]

    def largest_segment(self, stream: int) -> int:
        """The most bytes that a segment of this stream can have."""
        return min(self.segment_bytes, self._largest_page(stream))

    def _set_windows(self, room_bytes: int) -> None:
        """Whole windows up to the first stream that is owed; those behind it share so much (rule 7)."""
        behind = False
        for stream, full in enumerate(self._full_windows):
            window = full
            if behind:
                largest = self._largest_page(stream)
                window = min(max(room_bytes, 2 * self.largest_segment(stream)), full)
                room_bytes = max(room_bytes - largest * self._page_count, 0)
            self.windows[stream].window = window
            behind = behind or self.owes(stream)

    @property
    def complete(self) -> bool:
        """True when everything is decoded."""
        return self._progress.complete

    def place(self, header: SegmentHeader) -> memoryview | None:
        """Where the payload of this segment goes; None if it came before (rules 1 to 3).

        The view is the caller's to fill until `segment_arrived`.
        """
        _, index, stream, offset, length, stream_bytes, _ = header
        if stream >= self.streams or index >= self._page_count:
            raise RemoteProtocolError(
                f"segment for page {index}, stream {stream} of a transfer with "
                f"{self._page_count} pages, {self.streams} streams"
            )
        if offset % self.segment_bytes:
            raise RemoteProtocolError(f"a segment begins at {offset}, off the grid of {self.segment_bytes}")
        if length != min(self.segment_bytes, stream_bytes - offset):
            raise RemoteProtocolError(f"a segment of {length} bytes at {offset} of {stream_bytes}")
        page = self._pages.get(index)
        if page is None:
            page = self._pages[index] = _Page(self.streams)
        page_stream = page.streams[stream]
        if page_stream is None:
            if page.handed_out > stream:
                return None
            sizes = self._sizes(index)[stream]
            if stream_bytes not in sizes:
                raise RemoteProtocolError(f"stream {stream} of page {index} cannot have {stream_bytes} bytes")
            self.windows[stream].receive(length)
            if not self.accepted:
                self._count_early(stream_bytes)
            segments = max(-(-stream_bytes // self.segment_bytes), 1)
            page_stream = _PageStream(self.pool.take(stream_bytes), segments)
            page.streams[stream] = page_stream
            self._begun_pages[stream] += 1
            self._loans[stream].begins(index, sizes)
        elif stream_bytes != page_stream.data.nbytes:
            raise RemoteProtocolError(f"the size of stream {stream} of page {index} changed")
        elif page_stream.segments[offset // self.segment_bytes]:
            return None
        else:
            self.windows[stream].receive(length)
        page_stream.segments[offset // self.segment_bytes] = _STARTED
        return page_stream.data if length == stream_bytes else page_stream.data[offset : offset + length]

    def lend(self, stream: int, least_bytes: int, most_bytes: int, most_pages: int = 0) -> list[memoryview]:
        """Buffers for the next pages of a stream that have not begun, within credit and segment (lending.py).

        A quarter of the credit is left for what comes in other sizes, and of each no more is lent than `most_bytes` or
        `most_pages`, whichever is more.
        """
        loans = self._loans[stream]
        room_bytes = self.windows[stream].outstanding * 3 // 4 - loans.lent_bytes
        room_pages = self._page_count - self._begun_pages[stream] - loans.lent_pages
        if not self.accepted or room_bytes < least_bytes:
            return []

        def has_begun(index: int) -> bool:
            page = self._pages.get(index)
            return page is not None and (page.streams[stream] is not None or page.handed_out > stream)

        sizes = range(least_bytes, self.segment_bytes + 1)
        chosen = loans.next(has_begun, room_bytes, room_pages, sizes, most_bytes, most_pages)
        return [self.pool.take(size) for size in chosen]

    @property
    def lent_bytes(self) -> list[int]:
        """Of buffers lent to lanes (lending.py), by stream."""
        return [loans.lent_bytes for loans in self._loans]

    def lent_too_much(self, stream: int) -> bool:
        """More is lent in a stream than credit and pages are left for."""
        pages = self._page_count - self._begun_pages[stream]
        loans = self._loans[stream]
        return loans.lent_bytes > self.windows[stream].outstanding or loans.lent_pages > pages

    def take_run(self, run: LentRun, events: list[Event]) -> None:
        """A lane hands back buffers that hold whole page streams: as `place` and `segment_arrived` of each, in order.

        Adds to `events`, also before it raises.

        Raises:
            RemoteProtocolError: a segment breaks a rule.
            IntegrityError: its bytes do not match its checksum.
        """
        _, stream, size, pages, buffers, sound = run
        loans = self._loans[stream]
        loans.came_back(size, len(pages))
        window, count, others = self.windows[stream], 0, []
        is_last = stream + 1 == self.streams
        ready: list[int] = []
        try:
            for index, buffer in zip(pages, buffers, strict=True):
                page = self._pages.get(index)
                if page is None and index < self._page_count:
                    page = self._pages[index] = _Page(self.streams)
                if (
                    page is None
                    or not sound
                    or page.handed_out > stream
                    or page.streams[stream] is not None
                    or size > window.limit - window.received
                    or size not in (sizes := self._sizes(index)[stream])
                ):
                    self._take_other(index, stream, buffer, events, sound=sound)
                    continue
                window.received += size
                page.streams[stream] = _PageStream(buffer, 0)
                count += 1
                loans.begins(index, sizes)
                if page.handed_out == stream and (is_last or page.streams[stream + 1] is None):
                    page.handed_out += 1
                    ready.append(index)
                else:
                    others.append(index)
        finally:
            if count:
                self._begun_pages[stream] += count
                self.stats.stream_bytes[stream] += size * count
                self.stats.stream_segments[stream] += count
                self._whole(stream, count, size * count)
            if ready:
                events.append(PagesArrived(self.transfer, ready, stream))
            for index in others:
                events += self._hand_out(self._pages[index], index)

    def _take_other(self, index: int, stream: int, buffer: memoryview, events: list[Event], *, sound: bool) -> None:
        """A lent buffer comes back with what came before, has another size than it may have, or is wrong otherwise."""
        size = buffer.nbytes
        header = SegmentHeader(self.transfer, index, stream, 0, size, size, 0)
        view = self.place(header)  # which knows what is wrong, unless the bytes are
        if view is not None:
            view[:] = buffer
        self.pool.give(buffer)
        if view is not None:
            events += self.segment_arrived(header, 0 if sound else 1)

    def take_back(self, stream: int, buffers: Sequence[memoryview]) -> None:
        """Lent buffers of a stream are free again."""
        for buffer in buffers:
            self._loans[stream].came_back(buffer.nbytes, 1)
            self.pool.give(buffer)

    def _count_early(self, size: int) -> None:
        self._early_bytes += size
        self._early_largest = max(self._early_largest, size)
        if self._early_bytes - self._early_largest > self._initial_credit:
            raise FlowControlError("the peer begins more pages than its initial credit can finish")

    def segment_arrived(self, header: SegmentHeader, payload_sum: int) -> list[PageArrived]:
        """A segment whose bytes have this checksum lies in its place; returns what can be decoded now (rule 4).

        Raises:
            IntegrityError: its bytes do not match its checksum.
        """
        page = self._pages.get(header.page)
        page_stream = page.streams[header.stream] if page is not None else None
        segment = header.offset // self.segment_bytes
        if page is None or page_stream is None or page_stream.segments[segment] != _STARTED:
            raise LocalProtocolError(f"a segment of page {header.page} arrived that was not placed")
        if payload_sum != header.checksum:
            page_ref = self.layout.page(header.page)
            raise IntegrityError(self.transfer, page_ref.layer, page_ref.kind, header.stream)
        page_stream.segments[segment] = _ARRIVED
        page_stream.missing -= 1
        self.stats.stream_bytes[header.stream] += header.length
        self.stats.stream_segments[header.stream] += 1
        if page_stream.missing:
            return []
        self._whole(header.stream, 1, header.stream_bytes)
        return self._hand_out(page, header.page)

    def _whole(self, stream: int, pages: int, total_bytes: int) -> None:
        """The last segments of a stream of so many pages are in, of so many bytes together."""
        self._arrived_pages[stream] += pages
        if self._early_window is not None and not self.owes(stream):
            self._set_windows(self._early_window)
        self.windows[stream].hold(total_bytes)

    def _hand_out(self, page: _Page, index: int) -> list[PageArrived]:
        """What can be decoded of a page, one stream of which is whole now."""
        events: list[PageArrived] = []
        while page.handed_out < self.streams:
            following = page.streams[page.handed_out]
            if following is None or following.missing:
                break
            events.append(PageArrived(self.transfer, index, page.handed_out))
            page.handed_out += 1
        return events

    def lost(self, header: SegmentHeader) -> None:
        """The rest of a segment that was placed will not come: it counts as never begun, and will be sent again."""
        page = self._pages.get(header.page)
        page_stream = page.streams[header.stream] if page is not None else None
        segment = header.offset // self.segment_bytes
        if page_stream is not None and page_stream.segments[segment] == _STARTED:
            page_stream.segments[segment] = 0
            self.windows[header.stream].unreceive(header.length)

    def page_streams(self, page: int, stream: int) -> list[memoryview]:
        """The bytes of streams 0 to `stream` of a page that has been handed out; read-only by agreement."""
        held = self._handed_out(page, stream).streams[: stream + 1]
        return [page_stream.data for page_stream in held if page_stream is not None]

    def _handed_out(self, page_index: int, stream: int) -> _Page:
        page = self._pages.get(page_index)
        if page is None or stream >= page.handed_out:
            raise LocalProtocolError(f"stream {stream} of page {page_index} has not been handed out")
        return page

    def decoded(self, page: int, stream: int) -> list[Ready]:
        """The page is in place with streams 0 to `stream`; decoding may skip to the last stream handed out."""
        return self.all_decoded((page,), stream)

    def all_decoded(self, pages: Sequence[int], stream: int) -> list[Ready]:
        """The same of several pages, in order."""
        events: list[Ready] = []
        for index in pages:
            page = self._handed_out(index, stream)
            while page.decoded <= stream:
                done = page.decoded
                page.decoded += 1
                if (page_stream := page.streams[done]) is not None:
                    self.windows[done].consume(page_stream.data.nbytes)
                self._progress.page_decoded(index, done, events)
            if page.decoded == self.streams:
                self._give_back(page)
                self._pages[index] = self._done
        return events

    def release(self) -> None:
        """The transfer has ended: its buffers may be used again, but for those that are still written or read.

        A segment is being read into the ones; a decoder has been handed the others and has not said that it is done.
        """
        for page in self._pages.values():
            if page.decoded == page.handed_out:
                self._give_back(page)
        self._pages.clear()

    def _give_back(self, page: _Page) -> None:
        for page_stream in page.streams:
            if page_stream is not None and _STARTED not in page_stream.segments:
                self.pool.give(page_stream.data)
        page.streams = [None] * self.streams
