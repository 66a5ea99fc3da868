"""The two ends of a transfer, as the event loop sees them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lynx_net.aio.readiness import Readiness
from lynx_net.aio.timeline import Timeline, has_exact, last_lossy
from lynx_net.errors import LocalProtocolError
from lynx_net.wire.messages import AbortCode
from lynx_net.wire.stats import TransferStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lynx_net.aio.link import Link
    from lynx_net.aio.timeline import Direction
    from lynx_net.errors import LynxError
    from lynx_net.wire.layout import CacheLayout
    from lynx_net.wire.pagesizes import PageSizes
    from lynx_net.wire.pool import BufferPool
    from lynx_net.wire.sendqueue import Submitted

__all__ = ["IncomingTransfer", "Offer", "OutgoingTransfer"]


@dataclass(frozen=True, slots=True)
class Offer:
    """What the sender says about a transfer before its first byte.

    Attributes:
        request_id: chosen by the application; names the request, not the transfer.
        layout: shape of the cache.
        codec, codec_params: `lynx_codec.get_codec(codec, **codec_params)`; "plan" and a table of codecs, of layers
            that differ (`lynx_codec.CodecPlan`).
        streams: number of streams of the codec.
        meta: whatever the sender's application adds; plain msgpack values.
        first_token: first output token, computed by the prefill side; None if it was not sent.
    """

    request_id: str
    layout: CacheLayout
    codec: str
    codec_params: dict[str, Any]
    streams: int
    meta: dict[str, Any]
    first_token: int | None


class _Transfer:
    """What both ends of a transfer keep of it."""

    direction: Direction

    def __init__(
        self,
        link: Link,
        transfer: int,
        offer: Offer,
        stats: TransferStats,
        stream_names: Sequence[str] | None = None,
    ) -> None:
        self.stream_names = _checked_names(stream_names, offer.streams)
        """Of the codec, in order; "exact", if it is there, is the last."""
        self.link = link
        self.id = transfer
        self.offer = offer
        self.stats = stats
        self.offered_at_s = link.clock()
        self.accepted_at_s: float | None = None
        self.ended_at_s: float | None = None
        self.error: LynxError | None = None
        """What it failed with."""

    def timeline(self) -> Timeline:
        """What has happened to it so far, and when; costs nothing until it is called."""
        stats, error = self.stats, self.error
        return Timeline(
            direction=self.direction,
            peer=self.link.peer,
            transfer=self.id,
            request_id=self.offer.request_id,
            codec=self.offer.codec,
            tokens=self.offer.layout.tokens,
            layers=self.offer.layout.layers,
            stream_names=self.stream_names,
            stream_bytes=tuple(stats.stream_bytes),
            stream_segments=tuple(stats.stream_segments),
            resent_segments=stats.resent_segments,
            offered_s=self.offered_at_s,
            accepted_s=self.accepted_at_s,
            first_segment_s=stats.first_segment_s,
            last_segment_s=stats.last_segment_s,
            layers_ready_s=self._layers_ready_s(),
            streams_ready_s=self._streams_ready_s(),
            ended_s=self.ended_at_s,
            error_type=None if error is None else type(error).__name__,
            error=None if error is None else str(error),
        )

    def _layers_ready_s(self) -> tuple[tuple[float | None, ...], ...]:
        return ()

    def _streams_ready_s(self) -> tuple[float | None, ...]:
        return ()


class OutgoingTransfer(_Transfer):
    """The sending end. Made by `Link.open_transfer`; it deals in encoded page streams."""

    direction: Direction = "outgoing"

    def __init__(
        self,
        link: Link,
        transfer: int,
        offer: Offer,
        stats: TransferStats,
        stream_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(link, transfer, offer, stats, stream_names)
        self.delivered = Readiness()
        """Ready when the receiver has everything decoded in place."""
        self._has_room = True
        self._changed: asyncio.Event | None = None
        """Set when a writer that waits should look again; made when one does."""

    async def wait_for_room(self) -> None:
        """Return when less than the configured queue waits in stream 0; raises the transfer's error."""
        while not self.delivered.done() and not self._has_room:
            await self._change()

    @property
    def room(self) -> bool:
        """Whether `wait_for_room` would return at once, as far as is known now; for any thread."""
        return self._has_room

    async def wait_for_few(self, most_bytes: int) -> None:
        """Return when at most so many bytes of all streams together wait to be sent; raises the transfer's error.

        For who reads what it sends from somewhere and wants to hold little of it. One task at a time may wait.
        """
        while not self.delivered.done() and not self.link.few_queued(self, most_bytes):
            await self._change()

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.Event()
        self._changed.clear()
        await self._changed.wait()

    def _look_again(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def submit(self, page: int, stream: int, data: memoryview, rank: tuple[int, ...] = ()) -> None:
        """Queue one stream of one page; `data` must not change until the transfer has ended.

        Of what is queued in a stream the lowest rank goes first, equal ones in the order in which they came.

        Raises:
            TypeError: not contiguous host memory; nothing was queued.
            LynxError: the transfer has ended, has no such page, or it was submitted before.
        """
        self.link.submit(self, ((page, stream, _contiguous(data), rank, None),))

    def submit_all(self, streams: Iterable[Submitted]) -> None:
        """`submit` for many: page, stream, data, rank, and xxh3-64 if it is known. Those before an error are queued."""
        self.link.submit(
            self,
            [(page, stream, _contiguous(data), rank, checksum) for page, stream, data, rank, checksum in streams],
        )

    def cancel(self, reason: str = "cancelled by the sender") -> None:
        """Give up; the receiver's waiters get TransferAbortedError. Nothing happens if it has ended."""
        self.link.abort(self.id, AbortCode.CANCELLED, reason)

    def has_room(self, room: bool) -> None:
        """Called by the link as the queue of stream 0 shrinks and grows."""
        self._has_room = room
        if room:
            self._look_again()

    def has_few(self) -> None:
        """Called by the link when no more is queued than `wait_for_few` waits for."""
        self._look_again()

    def fail(self, error: LynxError) -> None:
        """Called by the link when the transfer has failed."""
        self.delivered.fail(error)
        self._look_again()


class IncomingTransfer(_Transfer):
    """The receiving end. Subclasses decode; this class keeps what is ready.

    Awaitables: `layer_ready(i, s)`, `stream_ready(s)`, `anchor_ready`, `residual_ready`, `exact_ready`, `complete`.
    Each raises the transfer's typed error when it cannot become true any more.
    """

    direction: Direction = "incoming"

    def __init__(self, link: Link, transfer: int, offer: Offer, *, stream_names: Sequence[str] | None = None) -> None:
        super().__init__(link, transfer, offer, TransferStats.of(offer.streams), stream_names)
        self.target: Any = None
        """Where it is decoded into: what `allocate(offer)` returned."""
        self.pool: BufferPool | None = None
        """Where the buffers of its pages come from, if not from where those of all transfers do."""
        self.complete = Readiness()
        """Ready when every stream is decoded in place; nothing is written to the target after that."""
        self._streams = [Readiness() for _ in range(offer.streams)]
        self._layers = [[Readiness() for _ in range(offer.layout.layers)] for _ in range(offer.streams)]

    def stream_ready(self, stream: int) -> Readiness:
        """The whole cache is decoded with streams 0 to `stream`; the last stream if there are fewer."""
        return self._streams[self._stream(stream)]

    def layer_ready(self, layer: int, stream: int = 0) -> Readiness:
        """One layer is decoded with streams 0 to `stream`; the last stream if there are fewer."""
        if not 0 <= layer < self.offer.layout.layers:
            raise LocalProtocolError(f"layer {layer} of a cache with {self.offer.layout.layers} layers")
        return self._layers[self._stream(stream)][layer]

    def _stream(self, stream: int) -> int:
        if stream < 0:
            raise LocalProtocolError(f"stream {stream}: streams are counted from 0")
        return min(stream, len(self._streams) - 1)

    @property
    def anchor_ready(self) -> Readiness:
        """Decoding can start, on anchors."""
        return self.stream_ready(0)

    @property
    def residual_ready(self) -> Readiness:
        """The cache is Q_full: decoded with every stream but an exact one."""
        return self._streams[last_lossy(self.stream_names)]

    @property
    def exact_ready(self) -> Readiness:
        """The cache has the bits that the sender has.

        Raises:
            LocalProtocolError: the codec has no exact stream.
        """
        if not has_exact(self.stream_names):
            raise LocalProtocolError(
                f"codec {self.offer.codec} of request {self.offer.request_id!r} has no exact stream"
            )
        return self._streams[-1]

    def cancel(self, reason: str = "cancelled by the receiver") -> None:
        """Give up; nothing is written to the target once `closed` has returned."""
        self.link.abort(self.id, AbortCode.CANCELLED, reason)

    async def closed(self) -> None:
        """Wait until the transfer has ended, well or badly, and no thread touches its target any more."""
        await self.complete.settled()

    # Called by the link.

    def sizes(self, page: int) -> Sequence[PageSizes]:
        """Byte sizes that each stream of a page may have."""
        raise LocalProtocolError("this transfer has no decoder")

    @property
    def need_bytes(self) -> int:
        """The most encoded bytes the transfer can take."""
        raise LocalProtocolError("this transfer has no decoder")

    def page_arrived(self, page: int, stream: int) -> None:
        """A page can be decoded with streams 0 to `stream`. Called with the link's lock, from any thread; be quick."""
        raise LocalProtocolError("this transfer has no decoder")

    def pages_arrived(self, pages: Sequence[int], stream: int) -> None:
        """The same of several pages."""
        for page in pages:
            self.page_arrived(page, stream)

    def mark_layer(self, layer: int, stream: int) -> None:
        """A layer is decoded."""
        self._layers[stream][layer].set(self.link.clock())

    def mark_stream(self, stream: int) -> None:
        """A stream is decoded."""
        self._streams[stream].set(self.link.clock())

    def mark_complete(self) -> None:
        """Everything is decoded."""
        self.complete.set(self.link.clock())

    def fail(self, error: LynxError) -> None:
        """The transfer has failed; everything that is not ready never will be."""
        for readiness in [*self._streams, *(one for layers in self._layers for one in layers), self.complete]:
            readiness.fail(error)

    def _layers_ready_s(self) -> tuple[tuple[float | None, ...], ...]:
        return tuple(tuple(one.at_s for one in layers) for layers in self._layers)

    def _streams_ready_s(self) -> tuple[float | None, ...]:
        return tuple(one.at_s for one in self._streams)


def _contiguous(data: memoryview) -> memoryview:
    view = memoryview(data)
    if not view.c_contiguous:
        raise TypeError("a page stream must be contiguous memory")
    return view


def _checked_names(names: Sequence[str] | None, streams: int) -> tuple[str, ...]:
    """Names for the streams of a transfer; where the codec is unknown, those of a codec without an exact stream."""
    if names is None:
        return (
            ("anchor", "residual")[:streams]
            if streams <= 2
            else ("anchor", *(f"residual{number}" for number in range(1, streams)))
        )
    if len(names) != streams:
        raise LocalProtocolError(f"streams: the offer has {streams}, the codec {len(names)}: {', '.join(names)}")
    return tuple(names)
