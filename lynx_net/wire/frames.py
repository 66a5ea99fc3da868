"""Frames: a fixed 48-byte header, then the payload. framereader.py parses them.

Layout of the header, little-endian (docs/wire-format.md is normative):

    offset  size  field
         0     1  kind: 1 control, 2 segment
         1     1  stream of a segment (0 anchor, then what refines it); 0 in control frames
         2     2  segment headers that follow directly, before the payloads of all of them; 0 in control frames
         4     4  payload bytes
         8     8  transfer id of a segment
        16     4  page number of a segment
        20     4  offset of the payload inside the stream of that page
        24     4  bytes of the whole stream of that page
        28     4  flags; 1, in the last header of a burst: no segment follows at once
        32     8  xxh3-64 of the payload
        40     8  xxh3-64 of the 40 bytes before
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from lynx_net.errors import LocalProtocolError

__all__ = [
    "CONTROL",
    "HEADER",
    "HEADER_BYTES",
    "LAST",
    "MAX_BURST",
    "MAX_CONTROL_BYTES",
    "MAX_SEGMENT_BYTES",
    "MIN_SEGMENT_BYTES",
    "SEGMENT",
    "SUMMED_BYTES",
    "ControlFrame",
    "Frame",
    "SegmentFrame",
    "SegmentHeader",
    "SegmentStart",
    "checksum",
    "headers_following",
    "pack_control",
    "pack_segment_header",
]

HEADER_BYTES = 48
MAX_CONTROL_BYTES = 1 << 18
"""A request may carry the token ids of a long prompt in its metadata; nothing else comes near."""
MAX_SEGMENT_BYTES = 1 << 24
MAX_BURST = 256
"""Segments whose headers may come before their payloads."""
MIN_SEGMENT_BYTES = 4096
"""Of the segment size two peers use, not of a single segment: below it the headers would cost more than 1 %."""

CONTROL = 1
SEGMENT = 2

LAST = 1
"""Flag of the last header of a burst: the sender has nothing more that it may send on this lane now."""

HEADER = struct.Struct("<BBHIQIIIIQQ")
"""The fields in the order above."""
_SUMMED = struct.Struct("<BBHIQIIIIQ")
_SUM = struct.Struct("<Q")
_KIND = struct.Struct("<BBH")
SUMMED_BYTES = _SUMMED.size
"""Of a header, covered by its own checksum."""

assert HEADER.size == HEADER_BYTES


def checksum(data: bytes | bytearray | memoryview) -> int:
    """xxh3-64 of a contiguous buffer, seed 0."""
    return xxhash.xxh3_64_intdigest(data)


# The classes below are tuples because several are made for every segment: a frozen dataclass costs three times as much.


class SegmentHeader(NamedTuple):
    """Where a segment belongs: `length` bytes at `offset` of stream `stream` of page `page`."""

    transfer: int
    page: int
    stream: int
    offset: int
    length: int
    stream_bytes: int
    checksum: int


class SegmentStart(NamedTuple):
    """A segment header arrived; answer with `FrameReader.deliver_to` before more bytes are read."""

    header: SegmentHeader


class SegmentFrame(NamedTuple):
    """All bytes of a segment are in the buffer that `deliver_to` named; `None` if it was dropped.

    The checksum has not been verified yet: that is the owner's work, done once, while the bytes are warm.
    """

    header: SegmentHeader
    payload: memoryview | None


class ControlFrame(NamedTuple):
    """A whole control payload whose checksum matched."""

    payload: bytes


Frame = ControlFrame | SegmentFrame | SegmentStart


def headers_following(header: memoryview) -> int:
    """How many headers of its burst a whole header says come next, whether or not it can be believed."""
    kind, _, following = _KIND.unpack_from(header)
    return min(following, MAX_BURST - 1) if kind == SEGMENT else 0


def _seal(head: bytes) -> bytes:
    return head + _SUM.pack(checksum(head))


def pack_control(payload: bytes) -> bytes:
    """A whole control frame, header and payload."""
    if not 0 < len(payload) <= MAX_CONTROL_BYTES:
        raise LocalProtocolError(f"control message of {len(payload)} bytes, at most {MAX_CONTROL_BYTES} fit")
    return _seal(_SUMMED.pack(CONTROL, 0, 0, len(payload), 0, 0, 0, 0, 0, checksum(payload))) + payload


def pack_segment_header(header: SegmentHeader, following: int = 0, last: bool = False) -> bytes:
    """The 48 bytes that go before a segment's payload, and before the `following` headers of the same burst.

    `last` says that no segment follows at once, so that a reader does not wait for one.
    """
    transfer, page, stream, offset, length, stream_bytes, payload_sum = header
    flags = LAST if last else 0
    return _seal(
        _SUMMED.pack(SEGMENT, stream, following, length, transfer, page, offset, stream_bytes, flags, payload_sum)
    )
