"""The parser: turns received bytes into frames. It owns headers only.

1. A header is believed only if its own checksum matches and every field is within the limits; anything else
   is a RemoteProtocolError, and the connection cannot be read on.
2. Nothing is allocated for a segment here: the caller is asked where its payload goes, or that it be dropped.
3. A control payload is at most `MAX_CONTROL_BYTES`; it is checked against its checksum before it is decoded.
4. What a reader allocates never exceeds its bound: the headers of one burst, one control payload twice, one buffer of
   64 KiB into which dropped payloads are read, one of 32 KiB for reading ahead.
5. Segments may come in bursts: all their headers, counting down how many follow, then all their payloads. A reader
   then knows the places of many payloads and takes them with one system call.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from lynx_net.errors import LocalProtocolError, RemoteProtocolError
from lynx_net.wire.frames import (
    CONTROL,
    HEADER,
    HEADER_BYTES,
    LAST,
    MAX_BURST,
    MAX_CONTROL_BYTES,
    MAX_SEGMENT_BYTES,
    SEGMENT,
    SUMMED_BYTES,
    ControlFrame,
    SegmentFrame,
    SegmentHeader,
    SegmentStart,
    checksum,
    headers_following,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lynx_net.wire.frames import Frame

__all__ = ["FrameReader"]

_DISCARD_BYTES = 1 << 16
_AHEAD_BYTES = 1 << 15
"""A few small transfers; of a large payload this much is copied once more, and its checksum takes another pass."""
_SMALL_BYTES = _AHEAD_BYTES // 2


class _Incoming:
    """A payload on its way: of a segment, or of a control frame where `header` is None."""

    __slots__ = ("filled", "header", "length", "view")

    def __init__(self, header: SegmentHeader | None, view: memoryview | None, length: int) -> None:
        self.header = header
        self.view = view
        self.length = length
        self.filled = 0


class FrameReader:
    """Turns received bytes into frames without ever copying a segment's payload.

    Fill the views of `buffers()` in order, report how many bytes came with `received()`, and act
    on the frames it returns. For each `SegmentStart`, in order, call `deliver_to()` before anything else.

    Args:
        max_control_bytes: a smaller limit than `MAX_CONTROL_BYTES`, for peers that are not known yet.
    """

    def __init__(self, max_control_bytes: int = MAX_CONTROL_BYTES) -> None:
        self._max_control_bytes = min(max_control_bytes, MAX_CONTROL_BYTES)
        self._headers = memoryview(bytearray(HEADER_BYTES * MAX_BURST))
        self._room, self._no_room = self._headers[HEADER_BYTES:], self._headers[:0]
        self._headers_filled = 0
        self._following = 0
        """Segment headers of this burst that have not come yet."""
        self._started: list[SegmentHeader] = []
        """Segments of a burst whose headers are still coming."""
        self._undecided: deque[SegmentHeader] = deque()
        self._incoming: deque[_Incoming] = deque()
        self._room_bytes = HEADER_BYTES
        self._control_sum = 0
        self._error: RemoteProtocolError | None = None
        self._scratch: memoryview | None = None
        self._ahead: memoryview | None = None
        self.small = True
        """The last segment that had any bytes was a small one: reading ahead may save more than it costs."""
        self._ahead_at = self._ahead_end = 0
        """What of it has not been looked at."""

    @property
    def idle(self) -> bool:
        """True between two frames: the only place where a connection may end cleanly."""
        if self._headers_filled or self._started or self._undecided or self._incoming:
            return False
        return self._ahead_at == self._ahead_end

    @property
    def segment(self) -> SegmentHeader | None:
        """The segment whose payload is being read now."""
        return self._incoming[0].header if self._incoming else None

    @property
    def unfinished(self) -> list[SegmentHeader]:
        """Segments that have a place and are not complete; of interest when the connection ends here."""
        return [one.header for one in self._incoming if one.header is not None and one.view is not None]

    def buffers(self) -> list[memoryview]:
        """Views to be filled next, in order: what is missing of the payloads and, behind them, the next header."""
        self._check_usable()
        if self._ahead_at < self._ahead_end:
            raise LocalProtocolError("what was read ahead has not been looked at")
        views: list[memoryview] = []
        for incoming in self._incoming:
            missing = incoming.length - incoming.filled
            if incoming.view is not None:
                views.append(incoming.view[incoming.filled :] if incoming.filled else incoming.view)
            else:
                if self._scratch is None:
                    self._scratch = memoryview(bytearray(_DISCARD_BYTES))
                views.append(self._scratch[: min(missing, _DISCARD_BYTES)])
                if missing > _DISCARD_BYTES:
                    break
        else:
            views.append(self._headers[self._headers_filled : HEADER_BYTES * (self._following or 1)])
        self._room_bytes = sum(map(len, views))
        return views

    def header_room(self) -> memoryview:
        """Room behind the last of `buffers()`, for a caller that looks at the header which fills it.

        If that is the first header of a burst, those that it says follow may be put here as far as they have come; they
        count as received. Empty where the last view is not such a header.
        """
        return self._no_room if self._following else self._room

    def received_headers(self, headers: bytes) -> list[Frame]:
        """Headers that somebody else has read, all of one frame or burst, between two frames; as `received` of them."""
        self.buffers()
        if not self.idle or not HEADER_BYTES <= len(headers) <= len(self._headers):
            raise LocalProtocolError(f"{len(headers)} bytes of headers that do not begin a frame")
        self._headers[: len(headers)] = headers
        return self.received(len(headers))

    def ahead(self) -> memoryview:
        """A buffer for whatever comes next, many small frames at once, instead of `buffers()`; between two frames only.

        Report what came with `received_ahead()`.
        """
        self._check_usable()
        if not self.idle:
            raise LocalProtocolError("reading ahead begins between two frames")
        if self._ahead is None:
            self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._room_bytes = 0
        return self._ahead

    def received_ahead(self, count: int = 0) -> list[Frame]:
        """The frames that `count` bytes written into `ahead()` completed, up to the next `SegmentStart`.

        When that has been answered, call it again without bytes until nothing is returned. The payloads of segments are
        copied to their places. Raises as `received` does.
        """
        if self._undecided:
            return []
        self._check_usable()
        if count:
            if not self.idle or self._ahead is None or not 0 < count <= len(self._ahead):
                raise LocalProtocolError(f"{count} bytes reported that were not read ahead")
            self._ahead_at, self._ahead_end = 0, count
        frames: list[Frame] = []
        try:
            while self._ahead_at < self._ahead_end and not self._undecided:
                self._look_ahead(frames)
        except RemoteProtocolError as error:
            self._error = error
            if not frames:
                raise
        return frames

    def _look_ahead(self, frames: list[Frame]) -> None:
        """Take the next bytes read ahead for what they are: what is there whole, where it lies."""
        assert self._ahead is not None
        ahead, at, end = self._ahead, self._ahead_at, self._ahead_end
        first = self._incoming[0] if self._incoming else None
        if first is not None and first.header is not None and at + first.length - first.filled <= end:
            self._ahead_at = at + first.length - first.filled
            if first.view is not None:
                view = first.view[first.filled :] if first.filled else first.view
                view[:] = ahead[at : self._ahead_at]
            self._incoming.popleft()
            frames.append(SegmentFrame(first.header, first.view))
            frames += self._empty_segments()
        elif first is None and not (self._headers_filled or self._following) and at + HEADER_BYTES <= end:
            self._ahead_at = at = at + HEADER_BYTES
            if length := self._parse_header(ahead, at - HEADER_BYTES, frames):
                if at + length <= end:
                    self._ahead_at = at + length
                    frames.append(self._finish_control(bytes(ahead[at : at + length])))
                else:
                    self._begin_control(length)
        else:
            self._look_at_part(frames)

    def _look_at_part(self, frames: list[Frame]) -> None:
        """Put the next bytes read ahead where `buffers()` would have them."""
        assert self._ahead is not None
        at, left = self._ahead_at, self._ahead_end - self._ahead_at
        if self._incoming:
            first = self._incoming[0]
            count = min(left, first.length - first.filled)
            if first.view is not None:
                first.view[first.filled : first.filled + count] = self._ahead[at : at + count]
        else:
            filled = self._headers_filled
            count = min(left, HEADER_BYTES * (self._following or 1) - filled)
            self._headers[filled : filled + count] = self._ahead[at : at + count]
        self._ahead_at += count
        self._parse(count, frames)

    def deliver_to(self, view: memoryview | None) -> list[SegmentFrame]:
        """Say where the payload of the next segment that started goes; `None` drops it.

        `view` is writable, contiguous bytes of exactly the segment's length and belongs to the reader until
        the `SegmentFrame` comes. Segments without payload whose turn it is are complete at once and returned here.

        Raises:
            LocalProtocolError: no segment waits, or the view does not fit; the reader is as it was.
        """
        if not self._undecided:
            raise LocalProtocolError("no segment waits for a destination")
        segment = self._undecided[0]
        if view is not None:
            if view.nbytes != segment.length:
                raise LocalProtocolError(f"a buffer of {view.nbytes} bytes for a segment of {segment.length}")
            if view.readonly or view.ndim != 1 or view.itemsize != 1 or not view.c_contiguous:
                raise LocalProtocolError("a segment needs a writable one-dimensional buffer of bytes")
        self._undecided.popleft()
        self._incoming.append(_Incoming(segment, view, segment.length))
        self._room_bytes += segment.length
        return [] if self._undecided else [*self._empty_segments()]

    def received(self, count: int) -> list[Frame]:
        """Account for `count` bytes written into the latest `buffers()`; returns what they completed, in order.

        Raises:
            RemoteProtocolError: rule 1 or 3 is broken. What was complete before is returned first; then this and
                every later call raises.
        """
        self._check_usable()
        if not 0 <= count <= self._room_bytes + self._following_bytes(count):
            raise LocalProtocolError(f"{count} bytes reported, there was room for {self._room_bytes}")
        self._room_bytes = max(self._room_bytes - count, 0)
        frames: list[Frame] = []
        try:
            self._parse(count, frames)
        except RemoteProtocolError as error:
            self._error = error
            if not frames:
                raise
        return frames

    def _following_bytes(self, count: int) -> int:
        """Of the headers that may be in `header_room` if so many bytes have come."""
        if self._following or count <= self._room_bytes:
            return 0
        return HEADER_BYTES * headers_following(self._headers)

    def _check_usable(self) -> None:
        if self._undecided:
            raise LocalProtocolError("the destination of a segment has not been given")
        if self._error is not None:
            raise self._error

    def _parse(self, count: int, frames: list[Frame]) -> None:
        while count and self._incoming:
            first = self._incoming[0]
            taken = min(count, first.length - first.filled)
            first.filled += taken
            count -= taken
            if first.filled < first.length:
                return
            self._incoming.popleft()
            if first.header is None:
                assert first.view is not None
                frames.append(self._finish_control(bytes(first.view)))
            else:
                frames.append(SegmentFrame(first.header, first.view))
                frames += self._empty_segments()
        self._headers_filled += count
        wanted = self._following or 1
        if self._headers_filled < HEADER_BYTES * wanted:
            return
        at = 0
        while wanted and self._headers_filled - at >= HEADER_BYTES * wanted:
            end = at + HEADER_BYTES * wanted
            for place in range(at, end, HEADER_BYTES):
                if length := self._parse_header(self._headers, place, frames):
                    self._begin_control(length)
            at, wanted = end, self._following
        self._headers_filled -= at
        if self._headers_filled:  # some that follow came along with the first
            self._headers[: self._headers_filled] = self._headers[at : at + self._headers_filled]

    def _empty_segments(self) -> Iterator[SegmentFrame]:
        while self._incoming and not self._incoming[0].length:
            empty = self._incoming.popleft()
            assert empty.header is not None
            yield SegmentFrame(empty.header, empty.view)

    def _begin_control(self, length: int) -> None:
        self._incoming.append(_Incoming(None, memoryview(bytearray(length)), length))

    def _finish_control(self, payload: bytes) -> ControlFrame:
        if checksum(payload) != self._control_sum:
            raise RemoteProtocolError("control frame with a wrong checksum")
        return ControlFrame(payload)

    def _parse_header(self, headers: memoryview, at: int, frames: list[Frame]) -> int:
        """Take up the header that lies here; returns the bytes of the payload of a control frame, 0 for a segment."""
        length: int
        kind, stream, following, length, transfer, page, offset, stream_bytes, flags, payload_sum, own_sum = (
            HEADER.unpack_from(headers, at)
        )
        if checksum(headers[at : at + SUMMED_BYTES]) != own_sum:
            raise RemoteProtocolError("these bytes are not a lynx_net frame: the header checksum does not match")
        if flags > (LAST if kind == SEGMENT and not following else 0):
            raise RemoteProtocolError("a header with flags that it cannot have")
        if kind == CONTROL:
            if not 0 < length <= self._max_control_bytes:
                raise RemoteProtocolError(
                    f"control frame of {length} bytes, allowed are 1 to {self._max_control_bytes}"
                )
            if stream or following or transfer or page or offset or stream_bytes:
                raise RemoteProtocolError("a control frame with fields of a segment")
            if self._following:
                raise RemoteProtocolError("a control frame inside a burst of segments")
            self._control_sum = payload_sum
            return length
        if kind != SEGMENT:
            raise RemoteProtocolError(f"unknown frame kind {kind}")
        if length > MAX_SEGMENT_BYTES or offset + length > stream_bytes or (length == 0 and stream_bytes):
            raise RemoteProtocolError(f"segment of {length} bytes at {offset} of {stream_bytes} is out of range")
        if following >= MAX_BURST or (self._following and following != self._following - 1):
            raise RemoteProtocolError(f"a burst of segments miscounts: {following} are said to follow")
        self._started.append(SegmentHeader(transfer, page, stream, offset, length, stream_bytes, payload_sum))
        self._following = following
        if length:
            self.small = length <= _SMALL_BYTES
        if not following:
            frames += map(SegmentStart, self._started)
            self._undecided.extend(self._started)
            self._started.clear()
        return 0
