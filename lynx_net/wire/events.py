"""What a link core tells its driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lynx_net.errors import LynxError
    from lynx_net.wire.layout import CacheLayout
    from lynx_net.wire.messages import OfferMessage

__all__ = [
    "Event",
    "LayerReady",
    "OfferReceived",
    "PageArrived",
    "PagesArrived",
    "PeerClosed",
    "RequestReceived",
    "RequestRefused",
    "StreamReady",
    "TransferAccepted",
    "TransferComplete",
    "TransferDelivered",
    "TransferFailed",
]


class PageArrived(NamedTuple):
    """Streams 0 to `stream` of a page are here and verified; answer with `decoded` when they are in place."""

    transfer: int
    page: int
    stream: int


class PagesArrived(NamedTuple):
    """The same of several pages."""

    transfer: int
    pages: list[int]
    stream: int


@dataclass(frozen=True, slots=True)
class LayerReady:
    """All pages of the layer are decoded with streams 0 to `stream`."""

    transfer: int
    layer: int
    stream: int


@dataclass(frozen=True, slots=True)
class StreamReady:
    """All layers are decoded with streams 0 to `stream`."""

    transfer: int
    stream: int


@dataclass(frozen=True, slots=True)
class TransferComplete:
    """Everything is decoded in place."""

    transfer: int


@dataclass(frozen=True, slots=True)
class OfferReceived:
    """The peer offers a transfer; answer with `Incoming.take` or `LinkCore.abort`."""

    offer: OfferMessage
    layout: CacheLayout


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """The peer asks for a cache."""

    request_id: str
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """The peer will not serve a request of ours."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class TransferAccepted:
    """The receiver has reserved the memory of a transfer that this side sends."""

    transfer: int


@dataclass(frozen=True, slots=True)
class TransferDelivered:
    """The receiver has everything decoded in place."""

    transfer: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """A transfer has ended badly; `error` is what its waiters get."""

    transfer: int
    error: LynxError


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The peer said goodbye."""

    reason: str


Event = (
    OfferReceived
    | RequestReceived
    | RequestRefused
    | TransferAccepted
    | TransferDelivered
    | TransferFailed
    | PeerClosed
    | PageArrived
    | PagesArrived
    | LayerReady
    | StreamReady
    | TransferComplete
)
