"""Settings of a link, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lynx_net.errors import LocalProtocolError
from lynx_net.wire.frames import MAX_SEGMENT_BYTES, MIN_SEGMENT_BYTES
from lynx_net.wire.pool import KEPT_BYTES

__all__ = ["LinkConfig"]

PACED_SEGMENT_SECONDS = 0.0025
"""On a paced link a segment should take no longer than this, or priorities would act late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Settings of one side of a link; the peers need not agree on them.

    Attributes:
        deadline_s: silence after which a peer is given up; also the limit of a handshake. A peer that sends
            anything at all, however slowly, is not silent.
        urgent_lane: with more than one lane, lane 0 carries control frames and stream 0 only, so that nothing on it is
            ever ahead of an anchor. False uses it for all streams: faster where lanes have limits of their own.
        resume_s: how long a lost connection may take to be re-opened before the link fails. The peer's process
            may have died, so this is also how long it takes to find that out; 0 does not re-open.
        progress_timeout_s: how long an accepted transfer that holds credit may stay without a single byte
            before it is aborted (its link lives on).
        segment_bytes: the largest payload of one segment.
        initial_credit_bytes: what a peer may send of stream 0 with its offer, before it is accepted.
        anchor_window_bytes: granted ahead on stream 0 of a transfer, for every two lanes.
        residual_window_bytes: granted ahead on each later stream; small, since it cannot be recalled. As much again of
            any stream may have arrived and wait for its decoder before less is granted.
        early_residual_bytes: granted ahead on a later stream while bytes of an earlier one of the same transfer are
            owed: an anchor that another peer begins meanwhile finds this much ahead of itself. It is raised to two
            segments, and covers rate times round trip where a sender is to use a line that its anchors leave idle.
        memory_bytes: encoded bytes held at once for all incoming transfers of a process.
        kept_bytes: memory for encoded bytes that stays when transfers have ended, for what the next ones bring: the
            system takes longer to give memory than bytes take to come. More is used, if need be, and given back.
        max_pending_offers: incoming transfers of a link that may be open at once, those waiting for memory included;
            more are aborted.
        max_pending_requests: requests of a peer that may be unanswered; more are refused.
        send_queue_bytes: `write` waits while a transfer has more than this queued in stream 0, for every two lanes.
        lane_batch_bytes: what a lane that sends takes together, at most, where blocking threads drive it; on the event
            loop it takes one segment. Fewer visits to the core cost less; but pages beside each other arrive so far
            apart, which matters where they are decoded together.
    """

    deadline_s: float = 5.0
    urgent_lane: bool = True
    resume_s: float = 0.5
    progress_timeout_s: float = 30.0
    segment_bytes: int = 1024 * 1024
    initial_credit_bytes: int = 4 * 1024 * 1024
    anchor_window_bytes: int = 64 * 1024 * 1024
    residual_window_bytes: int = 4 * 1024 * 1024
    early_residual_bytes: int = 512 * 1024
    memory_bytes: int = 8 * 1024 * 1024 * 1024
    kept_bytes: int = KEPT_BYTES
    max_pending_offers: int = 256
    max_pending_requests: int = 1024
    send_queue_bytes: int = 64 * 1024 * 1024
    lane_batch_bytes: int = 32 * 1024 * 1024

    def __post_init__(self) -> None:
        if not self.deadline_s > 0 or not self.progress_timeout_s > 0:
            raise LocalProtocolError("deadline_s and progress_timeout_s must be positive")
        if not self.resume_s >= 0:
            raise LocalProtocolError("resume_s must not be negative")
        if not MIN_SEGMENT_BYTES <= self.segment_bytes <= MAX_SEGMENT_BYTES:
            raise LocalProtocolError(f"segment_bytes must be {MIN_SEGMENT_BYTES} to {MAX_SEGMENT_BYTES}")
        if min(self.anchor_window_bytes, self.residual_window_bytes) < 2 * self.segment_bytes:
            raise LocalProtocolError("a credit window must hold at least two segments")
        if min(self.initial_credit_bytes, self.early_residual_bytes, self.kept_bytes) < 0:
            raise LocalProtocolError("initial_credit_bytes, early_residual_bytes and kept_bytes must not be negative")
        if min(self.memory_bytes, self.max_pending_offers, self.max_pending_requests) < 1:
            raise LocalProtocolError("memory_bytes, max_pending_offers and max_pending_requests must be positive")
        if self.send_queue_bytes < 1 or self.lane_batch_bytes < 1:
            raise LocalProtocolError("send_queue_bytes and lane_batch_bytes must be positive")

    @classmethod
    def for_devices(cls, **others: Any) -> LinkConfig:
        """Settings for caches in the memory of accelerators on links above 10 Gbit/s (docs/gpu.md), for both sides.

        Streams of pages of 2,048 tokens (8 heads of 128) are one segment each, also of bf16, batches of residuals have
        room, all lanes carry them, and a sender need not wait for its first answer. Less is queued, since it lies in
        pinned memory, and lanes take less together, so that batches are soon whole.

        Args:
            others: attributes that shall be different.

        Raises:
            LocalProtocolError: these settings cannot work.
        """
        chosen: dict[str, Any] = {
            "segment_bytes": 17 << 18,
            "urgent_lane": False,
            "initial_credit_bytes": 16 << 20,
            "residual_window_bytes": 96 << 20,
            "early_residual_bytes": 8 << 20,
            "send_queue_bytes": 32 << 20,
            "lane_batch_bytes": 8 << 20,
        }
        return cls(**(chosen | others))

    def segment_bytes_at(self, rate_bps: float | None) -> int:
        """Segment size on a link paced to this rate."""
        if rate_bps is None:
            return self.segment_bytes
        wanted = int(rate_bps / 8 * PACED_SEGMENT_SECONDS) // MIN_SEGMENT_BYTES * MIN_SEGMENT_BYTES
        return max(MIN_SEGMENT_BYTES, min(self.segment_bytes, wanted))
