"""What a lane sends: control frames, and segments of which several in a row are a burst."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from lynx_net.wire.frames import MAX_BURST, SegmentHeader, checksum, pack_segment_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["BURST_BYTES", "SendBytes", "seal", "seal_bursts"]

BURST_BYTES = 1 << 20
"""A burst ends with the segment that reaches this much: payloads are sent while they are in the cache."""


class SendBytes(NamedTuple):
    """A whole control frame (`transfer` is None), or the payload of a segment.

    The payload is that of bytes `offset` onward of a stream of `stream_bytes` of a page. Its `checksum`, where nobody
    knows it, is made when the payload is sent. A tuple, like headers, because one is made for every segment.
    """

    data: bytes | memoryview
    transfer: int | None = None
    page: int = 0
    stream: int = 0
    offset: int = 0
    stream_bytes: int = 0
    checksum: int | None = None


def seal(batch: Sequence[SendBytes], last: bool = False) -> list[bytes | memoryview]:
    """The buffers to put on a lane for these, in order; segments that follow one another become a burst.

    `last` says that nothing follows them at once. Makes checksums, so call it once and outside of any lock.
    """
    return [buffer for _, buffers in seal_bursts(batch, last) for buffer in buffers]


def seal_bursts(batch: Sequence[SendBytes], last: bool = False) -> Iterator[tuple[int, list[bytes | memoryview]]]:
    """The same burst by burst, each when it is asked for, with the number of frames in it. A control frame is alone."""
    at = 0
    while at < len(batch):
        if batch[at].transfer is None:
            yield 1, [batch[at].data]
            at += 1
            continue
        burst: list[SendBytes] = []
        room_bytes = BURST_BYTES
        for one in itertools.islice(batch, at, at + MAX_BURST):
            if one.transfer is None or room_bytes <= 0:
                break
            burst.append(one)
            room_bytes -= len(one.data)
        at += len(burst)
        headers = [
            pack_segment_header(
                SegmentHeader(
                    *(transfer, page, stream, offset, len(data), stream_bytes),
                    checksum(data) if known is None else known,
                ),
                following,
                last and at == len(batch) and not following,
            )
            for following, (data, transfer, page, stream, offset, stream_bytes, known) in zip(
                range(len(burst) - 1, -1, -1), burst, strict=True
            )
            if transfer is not None
        ]
        yield len(burst), [b"".join(headers), *(one.data for one in burst if len(one.data))]
