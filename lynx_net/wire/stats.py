"""What is counted of transfers and lanes: plain numbers that the code which moves the bytes adds to."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lynx_net.wire.frames import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["WAIT_REASONS", "LaneStats", "TransferStats", "WaitReason"]

WaitReason = Literal["idle", "credit", "pacing"]
WAIT_REASONS: tuple[WaitReason, ...] = ("idle", "credit", "pacing")
"""Why a lane sends nothing: nothing is queued; the receiver grants no credit; the rate has to be kept."""


@dataclass(slots=True)
class TransferStats:
    """What was sent or has arrived of one transfer so far.

    Attributes:
        stream_bytes: payload bytes of each stream, without the 48-byte header of each segment.
        stream_segments: segments of each stream. Outgoing ones count when a lane takes them, incoming ones when
            they are whole and their checksum is right.
        resent_segments: those that a sender sent again because a connection was lost; the other counts have them once.
        first_segment_s: when the first lane took a segment, or when the header of the first one arrived; seconds on
            the link's clock, None before.
        last_segment_s: when a lane took the last segment, or when the last one was whole; None before. While
            streams are still missing, an incoming transfer has here the end of the stream that ended last.
    """

    stream_bytes: list[int]
    stream_segments: list[int]
    resent_segments: int = field(default=0, compare=False)
    first_segment_s: float | None = field(default=None, compare=False)
    last_segment_s: float | None = field(default=None, compare=False)

    @classmethod
    def of(cls, streams: int) -> TransferStats:
        """All zero, for a transfer of so many streams."""
        return cls([0] * streams, [0] * streams)

    @property
    def total_bytes(self) -> int:
        """Payload bytes of all streams."""
        return sum(self.stream_bytes)

    @property
    def segments(self) -> int:
        """Segments of all streams."""
        return sum(self.stream_segments)


@dataclass(slots=True)
class LaneStats:
    """What one lane has moved since the link began, over all connections it has had.

    Each counter has one writer, the lane's sending or its receiving side. What was sent counts when it is
    handed to the lane.

    Attributes:
        sent_segments, received_segments: whole segments, those sent again and dropped ones included.
        sent_control_frames, received_control_frames: whole control frames.
        sent_payload_bytes: payloads of segments, and whole control frames.
        resent_frames: segments and control frames sent again because a connection was lost.
        received_bytes: everything, headers included.
        reopened: connections that took the place of lost ones.
    """

    sent_segments: int = 0
    sent_control_frames: int = 0
    sent_payload_bytes: int = 0
    resent_frames: int = 0
    received_segments: int = 0
    received_control_frames: int = 0
    received_bytes: int = 0
    reopened: int = 0
    _waited_s: dict[WaitReason, float] = field(default_factory=lambda: dict.fromkeys(WAIT_REASONS, 0.0))
    _waits: tuple[WaitReason, float] | None = None

    @property
    def sent_bytes(self) -> int:
        """Everything sent, headers included."""
        return self.sent_payload_bytes + HEADER_BYTES * self.sent_segments

    @contextlib.contextmanager
    def waiting(self, reason: WaitReason, clock: Callable[[], float]) -> Iterator[None]:
        """For the time of a block the sending side has nothing that it may send."""
        began_s = clock()
        self._waits = (reason, began_s)
        try:
            yield
        finally:
            self._waits = None
            self._waited_s[reason] += clock() - began_s

    def waited_s(self, reason: WaitReason, now: float) -> float:
        """Seconds the sending side has waited for this reason, a wait that lasts until now included."""
        waits = self._waits
        running_s = now - waits[1] if waits is not None and waits[0] == reason else 0.0
        return self._waited_s[reason] + running_s
