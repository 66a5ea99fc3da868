"""Frames: a fixed 48-byte header, then the payload. The parser owns headers only.

Layout of the header, little-endian (docs/wire-format.md is normative):

    offset  size  field
         0     1  kind: 1 control, 2 segment
         1     1  stream of a segment (0 anchor, 1 residual, 2 exact); 0 in control frames
         2     2  zero
         4     4  payload bytes
         8     8  transfer id of a segment
        16     4  page number of a segment
        20     4  offset of the payload inside the stream of that page
        24     4  bytes of the whole stream of that page
        28     4  zero
        32     8  xxh3-64 of the payload
        40     8  xxh3-64 of the 40 bytes before

Rules of the parser:

1. A header is believed only if its own checksum matches and every field is within the limits; anything else
   is a RemoteProtocolError, and the connection cannot be read on.
2. Nothing is allocated for a segment here: the caller is asked where its payload goes, or that it be dropped.
3. A control payload is at most `MAX_CONTROL_BYTES`; it is checked against its checksum before it is decoded.
4. What a reader allocates never exceeds its bound: one header, one control payload twice, one buffer of 64 KiB into
   which dropped payloads are read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from lynx_net.errors import LocalProtocolError, RemoteProtocolError

__all__ = [
    "CONTROL",
    "HEADER_BYTES",
    "MAX_CONTROL_BYTES",
    "MAX_SEGMENT_BYTES",
    "MIN_SEGMENT_BYTES",
    "SEGMENT",
    "ControlFrame",
    "FrameReader",
    "SegmentFrame",
    "SegmentHeader",
    "SegmentStart",
    "checksum",
    "pack_control",
    "pack_segment_header",
]

HEADER_BYTES = 48
MAX_CONTROL_BYTES = 1 << 18
"""A request may carry the token ids of a long prompt in its metadata; nothing else comes near."""
MAX_SEGMENT_BYTES = 1 << 24
MIN_SEGMENT_BYTES = 4096
"""Of the segment size two peers use, not of a single segment: below it the headers would cost more than 1 %."""

CONTROL = 1
SEGMENT = 2

_HEADER = struct.Struct("<BBHIQIIIIQ")
_SUM = struct.Struct("<Q")
_DISCARD_BYTES = 1 << 16

assert _HEADER.size + _SUM.size == HEADER_BYTES


def checksum(data: bytes | bytearray | memoryview) -> int:
    """xxh3-64 of a contiguous buffer, seed 0."""
    return xxhash.xxh3_64_intdigest(data)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Where a segment belongs: `length` bytes at `offset` of stream `stream` of page `page`."""

    transfer: int
    page: int
    stream: int
    offset: int
    length: int
    stream_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class SegmentStart:
    """A segment header arrived; answer with `FrameReader.deliver_to` before more bytes are read."""

    header: SegmentHeader


@dataclass(frozen=True, slots=True)
class SegmentFrame:
    """All bytes of a segment are in the buffer that `deliver_to` named; `None` if it was dropped.

    The checksum has not been verified yet: that is the owner's work, done once, while the bytes are warm.
    """

    header: SegmentHeader
    payload: memoryview | None


@dataclass(frozen=True, slots=True)
class ControlFrame:
    """A whole control payload whose checksum matched."""

    payload: bytes


def _seal(head: bytes) -> bytes:
    return head + _SUM.pack(checksum(head))


def pack_control(payload: bytes) -> bytes:
    """A whole control frame, header and payload."""
    if not 0 < len(payload) <= MAX_CONTROL_BYTES:
        raise LocalProtocolError(f"control message of {len(payload)} bytes, at most {MAX_CONTROL_BYTES} fit")
    return _seal(_HEADER.pack(CONTROL, 0, 0, len(payload), 0, 0, 0, 0, 0, checksum(payload))) + payload


def pack_segment_header(header: SegmentHeader) -> bytes:
    """The 48 bytes that go before a segment's payload."""
    return _seal(
        _HEADER.pack(
            SEGMENT,
            header.stream,
            0,
            header.length,
            header.transfer,
            header.page,
            header.offset,
            header.stream_bytes,
            0,
            header.checksum,
        )
    )


class FrameReader:
    """Turns received bytes into frames without ever copying a segment's payload.

    Fill the views of `buffers()` in order, report how many bytes came with `received()`, and act
    on the frames it returns. After a `SegmentStart`, call `deliver_to()` first.

    Args:
        max_control_bytes: a smaller limit than `MAX_CONTROL_BYTES`, for peers that are not known yet.
    """

    def __init__(self, max_control_bytes: int = MAX_CONTROL_BYTES) -> None:
        self._max_control_bytes = min(max_control_bytes, MAX_CONTROL_BYTES)
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._header_filled = 0
        self._payload: memoryview | None = None
        self._payload_filled = 0
        self._payload_length = 0
        self._segment: SegmentHeader | None = None
        self._control_sum = 0
        self._undecided = False
        self._error: RemoteProtocolError | None = None
        self._scratch: memoryview | None = None

    @property
    def idle(self) -> bool:
        """True between two frames: the only place where a connection may end cleanly."""
        return self._header_filled == 0 and self._payload_length == 0 and self._segment is None

    @property
    def segment(self) -> SegmentHeader | None:
        """The segment whose payload is being read now."""
        return self._segment

    def buffers(self) -> list[memoryview]:
        """Views to be filled next, in order: the rest of a payload and, behind it, the next header."""
        self._check_usable()
        views: list[memoryview] = []
        missing = self._payload_length - self._payload_filled
        if missing:
            if self._payload is not None:
                views.append(self._payload[self._payload_filled :])
            else:
                if self._scratch is None:
                    self._scratch = memoryview(bytearray(_DISCARD_BYTES))
                views.append(self._scratch[: min(missing, _DISCARD_BYTES)])
                if missing > _DISCARD_BYTES:
                    return views
        views.append(self._header[self._header_filled :])
        return views

    def deliver_to(self, view: memoryview | None) -> list[SegmentFrame]:
        """Say where the payload of the segment that just started goes; `None` drops it.

        `view` is writable, contiguous bytes of exactly the segment's length and belongs to the reader until
        the `SegmentFrame` comes. A segment without payload is complete at once and returned here.

        Raises:
            LocalProtocolError: no segment waits, or the view does not fit; the reader is as it was.
        """
        segment = self._segment
        if segment is None or not self._undecided:
            raise LocalProtocolError("no segment waits for a destination")
        if view is not None:
            if view.nbytes != segment.length:
                raise LocalProtocolError(f"a buffer of {view.nbytes} bytes for a segment of {segment.length}")
            if view.readonly or view.ndim != 1 or view.itemsize != 1 or not view.c_contiguous:
                raise LocalProtocolError("a segment needs a writable one-dimensional buffer of bytes")
        self._undecided = False
        self._payload = view
        self._payload_length = segment.length
        self._payload_filled = 0
        return [] if segment.length else [self._finish_segment(segment)]

    def received(self, count: int) -> list[ControlFrame | SegmentFrame | SegmentStart]:
        """Account for `count` bytes written into `buffers()`; returns what they completed, in order.

        Raises:
            RemoteProtocolError: rule 1 or 3 is broken. What was complete before is returned first; then this and
                every later call raises.
        """
        self._check_usable()
        if not 0 <= count <= self._room():
            raise LocalProtocolError(f"{count} bytes reported, there was room for {self._room()}")
        frames: list[ControlFrame | SegmentFrame | SegmentStart] = []
        try:
            self._parse(count, frames)
        except RemoteProtocolError as error:
            self._error = error
            if not frames:
                raise
        return frames

    def _check_usable(self) -> None:
        if self._undecided:
            raise LocalProtocolError("the destination of a segment has not been given")
        if self._error is not None:
            raise self._error

    def _room(self) -> int:
        missing = self._payload_length - self._payload_filled
        if self._payload is None and missing > _DISCARD_BYTES:
            return _DISCARD_BYTES
        return missing + HEADER_BYTES - self._header_filled

    def _parse(self, count: int, frames: list[ControlFrame | SegmentFrame | SegmentStart]) -> None:
        missing = self._payload_length - self._payload_filled
        if missing:
            taken = min(count, missing)
            self._payload_filled += taken
            count -= taken
            if self._payload_filled == self._payload_length:
                frames.append(self._finish_payload())
        self._header_filled += count
        if self._header_filled == HEADER_BYTES:
            self._header_filled = 0
            start = self._parse_header()
            if start is not None:
                frames.append(start)

    def _finish_payload(self) -> ControlFrame | SegmentFrame:
        if self._segment is not None:
            return self._finish_segment(self._segment)
        assert self._payload is not None
        payload = bytes(self._payload)
        self._payload = None
        self._payload_length = self._payload_filled = 0
        if checksum(payload) != self._control_sum:
            raise RemoteProtocolError("control frame with a wrong checksum")
        return ControlFrame(payload)

    def _finish_segment(self, segment: SegmentHeader) -> SegmentFrame:
        frame = SegmentFrame(segment, self._payload)
        self._segment = self._payload = None
        self._payload_length = self._payload_filled = 0
        return frame

    def _parse_header(self) -> SegmentStart | None:
        head = self._header[: _HEADER.size]
        (own_sum,) = _SUM.unpack_from(self._header, _HEADER.size)
        if checksum(head) != own_sum:
            raise RemoteProtocolError("these bytes are not a lynx_net frame: the header checksum does not match")
        kind, stream, zero, length, transfer, page, offset, stream_bytes, zero_too, payload_sum = _HEADER.unpack(head)
        if zero or zero_too:
            raise RemoteProtocolError("a reserved header field is not zero")
        if kind == CONTROL:
            if not 0 < length <= self._max_control_bytes:
                raise RemoteProtocolError(
                    f"control frame of {length} bytes, allowed are 1 to {self._max_control_bytes}"
                )
            if stream or transfer or page or offset or stream_bytes:
                raise RemoteProtocolError("a control frame with fields of a segment")
            self._control_sum = payload_sum
            self._payload = memoryview(bytearray(length))
            self._payload_length = length
            self._payload_filled = 0
            return None
        if kind != SEGMENT:
            raise RemoteProtocolError(f"unknown frame kind {kind}")
        if length > MAX_SEGMENT_BYTES or offset + length > stream_bytes or (length == 0 and stream_bytes):
            raise RemoteProtocolError(f"segment of {length} bytes at {offset} of {stream_bytes} is out of range")
        self._segment = SegmentHeader(transfer, page, stream, offset, length, stream_bytes, payload_sum)
        self._undecided = True
        return SegmentStart(self._segment)
