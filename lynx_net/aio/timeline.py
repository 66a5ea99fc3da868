"""The timeline of a transfer: what happened to it and when."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from lynx_codec.composite import EXACT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lynx_net.aio.link import Link

__all__ = ["Direction", "Observer", "Timeline", "has_exact", "last_lossy"]

Direction = Literal["incoming", "outgoing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A transfer as it stood at one moment. All times are seconds on the link's clock, None for what has not happened.

    Attributes:
        direction: "outgoing" at the sender, "incoming" at the receiver.
        peer: address of the other side.
        transfer: id of the transfer on its link.
        request_id, codec, tokens, layers: from the offer.
        stream_names: of the codec.
        stream_bytes, stream_segments: payload bytes and segments of each stream that were sent, or that arrived.
        offered_s: when the offer was made, or came.
        accepted_s: when the receiver had reserved the memory; at the sender, when it learned of it: of a transfer that
            the initial credit covers with its end.
        resent_segments: sent again because a connection was lost; outgoing only.
        first_segment_s, last_segment_s: when a lane took the first and the last segment; at the receiver, when the
            header of the first one arrived and when the last one was whole.
        layers_ready_s: for each stream and layer, when the layer was decoded with streams 0 to this one; incoming only.
        streams_ready_s: the same for all layers together.
        ended_s: when it was complete (incoming), delivered (outgoing) or failed.
        error_type, error: class and message of the error it failed with.
    """

    direction: Direction
    peer: str
    transfer: int
    request_id: str
    codec: str
    tokens: int
    layers: int
    stream_names: tuple[str, ...]
    stream_bytes: tuple[int, ...]
    stream_segments: tuple[int, ...]
    resent_segments: int
    offered_s: float
    accepted_s: float | None
    first_segment_s: float | None
    last_segment_s: float | None
    layers_ready_s: tuple[tuple[float | None, ...], ...]
    streams_ready_s: tuple[float | None, ...]
    ended_s: float | None
    error_type: str | None
    error: str | None

    @property
    def total_bytes(self) -> int:
        """Payload bytes of all streams."""
        return sum(self.stream_bytes)

    @property
    def anchor_ready_s(self) -> float | None:
        """When decoding could start on anchors; incoming only."""
        return self.streams_ready_s[0] if self.streams_ready_s else None

    @property
    def residual_ready_s(self) -> float | None:
        """When the cache was Q_full; incoming only. None for a codec without a residual."""
        last = last_lossy(self.stream_names)
        return self.streams_ready_s[last] if last and self.streams_ready_s else None

    @property
    def exact_ready_s(self) -> float | None:
        """When the cache had the bits of the sender's; incoming only. None for a codec without an exact stream."""
        return self.streams_ready_s[-1] if has_exact(self.stream_names) and self.streams_ready_s else None

    @property
    def rate_bps(self) -> float | None:
        """Payload bits a second from the first segment to the end: decoding counts, waiting for the accept does not."""
        if self.first_segment_s is None or self.ended_s is None or self.ended_s <= self.first_segment_s:
            return None
        return self.total_bytes * 8 / (self.ended_s - self.first_segment_s)

    def describe(self) -> str:
        """One line for a log."""
        toward = "to" if self.direction == "outgoing" else "from"
        how = "is under way" if self.ended_s is None else f"failed: {self.error}" if self.error_type else "is complete"
        rate = "" if self.rate_bps is None else f", {self.rate_bps / 1e6:.1f} Mbit/s"
        took = "" if self.ended_s is None else f" in {self.ended_s - self.offered_s:.3f} s"
        return (
            f"transfer {self.transfer} of request {self.request_id!r} {toward} {self.peer}: "
            f"{self.total_bytes / 1e6:.3f} MB{took}{rate}; it {how}"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return asdict(self)


def has_exact(stream_names: Sequence[str]) -> bool:
    """Whether the last of these streams of a codec is exact."""
    return stream_names[-1:] == (EXACT,)


def last_lossy(stream_names: Sequence[str]) -> int:
    """Number of the stream that makes the cache Q_full: the last one that is not exact."""
    return max(len(stream_names) - 1 - has_exact(stream_names), 0)


class Observer:
    """Is told what happens on the links of an endpoint: `connect(..., observers=[...])`, `serve(..., observers=[...])`.

    Override what is wanted. All methods are called in the event loop and must be quick; an exception they raise is
    logged and changes nothing else.
    """

    def link_opened(self, link: Link) -> None:
        """A link is up."""

    def transfer_ended(self, link: Link, timeline: Timeline) -> None:
        """A transfer is complete, delivered, or has failed."""

    def link_ended(self, link: Link) -> None:
        """A link has ended, and all its transfers before it; `link.error` says why."""
