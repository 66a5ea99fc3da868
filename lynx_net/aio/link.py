"""A link at run time: the tasks that move bytes between the lanes and the protocol core."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol, Self

from lynx_net.aio.transfer import IncomingTransfer, Offer, OutgoingTransfer
from lynx_net.errors import (
    ConnectionLostError,
    LocalProtocolError,
    LynxError,
    PeerTimeoutError,
    RemoteProtocolError,
    RequestRefusedError,
)
from lynx_net.wire.connection import (
    OfferReceived,
    PeerClosed,
    RequestReceived,
    RequestRefused,
    SegmentAwaitsOffer,
    TransferDelivered,
    TransferFailed,
)
from lynx_net.wire.frames import ControlFrame, FrameReader, SegmentFrame, SegmentStart
from lynx_net.wire.messages import AbortCode, decode_message
from lynx_net.wire.receiving import LayerReady, PageArrived, StreamReady, TransferComplete
from lynx_net.wire.scheduler import NothingToSend, SendBytes, WaitUntil

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from lynx_net.transport import Lane
    from lynx_net.wire.connection import Event, LinkCore
    from lynx_net.wire.frames import SegmentHeader
    from lynx_net.wire.layout import CacheLayout

__all__ = ["IncomingRequest", "Link"]

logger = logging.getLogger("lynx_net")

CLOSE_S = 0.5
"""How long a closing link waits for its farewell to leave."""

SECOND_LOOK_S = 0.02
"""Before a peer is given up, what waits in the sockets is read: it may be this process that was stopped."""


class MakeIncoming(Protocol):
    """Makes the receiving end of an offered transfer; raises LynxError to decline it."""

    def __call__(self, link: Link, transfer: int, offer: Offer) -> IncomingTransfer: ...


class IncomingRequest:
    """The peer asks for a cache: answer with a transfer of the same request id, or refuse."""

    def __init__(self, link: Link, request_id: str, meta: dict[str, Any]) -> None:
        self.link = link
        self.id = request_id
        self.meta = meta

    def refuse(self, reason: str) -> None:
        """Say no; the asking side gets RequestRefusedError with this reason."""
        self.link.refuse(self.id, reason)


class _Inbox:
    """A queue that many tasks may iterate and that ends once."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._ended = False

    def put(self, item: object) -> None:
        self._queue.put_nowait(item)

    def end(self) -> None:
        self._ended = True
        self._queue.put_nowait(None)

    async def get(self) -> Any:
        """The next item, or None for ever after the end."""
        item = await self._queue.get()
        if item is None:
            self._queue.put_nowait(None)
        return item


class Link:
    """All lanes between two peers. Symmetric: either side sends, receives, asks and answers.

    Made by `connect` and `serve`. Iterating a link yields the transfers its peer offers. A link lives
    until `close`, until its peer says goodbye, or until an error, which then is what every waiter gets.
    """

    def __init__(
        self, core: LinkCore, lanes: Sequence[Lane], make_incoming: MakeIncoming, clock: Callable[[], float]
    ) -> None:
        self.core = core
        self.clock = clock
        self.peer = lanes[0].peer
        self.error: LynxError | None = None
        self._lanes = lanes
        self._make_incoming = make_incoming
        self._wake = [asyncio.Event() for _ in lanes]
        self._outgoing: dict[int, OutgoingTransfer] = {}
        self._incoming: dict[int, IncomingTransfer] = {}
        self._asked: dict[str, asyncio.Future[IncomingTransfer]] = {}
        self._transfers = _Inbox()
        self._requests = _Inbox()
        self._offers_changed = asyncio.Event()
        self._closing = False
        self._flushed = asyncio.Event()
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.on_offer: Callable[[IncomingTransfer], None] = self._transfers.put
        """Where unasked transfers go; a server points it at its own queue."""

    # ---- what users call

    def __aiter__(self) -> AsyncIterator[IncomingTransfer]:
        return self._iterate(self._transfers)

    def requests(self) -> AsyncIterator[IncomingRequest]:
        """The peer's requests, one by one, until the link ends."""
        return self._iterate(self._requests)

    async def request(self, request_id: str, meta: dict[str, Any] | None = None) -> IncomingTransfer:
        """Ask the peer for a cache and return the transfer it offers.

        Cancelling stops the waiting; a transfer that is offered for it all the same is cancelled.

        Raises:
            RequestRefusedError: the peer will not serve it.
            LocalProtocolError: the same id is being asked for already.
            LynxError: the link ended.
        """
        self._check_open()
        if request_id in self._asked:
            raise LocalProtocolError(f"request {request_id!r} is already waiting for an answer")
        future: asyncio.Future[IncomingTransfer] = asyncio.get_running_loop().create_future()
        self.core.request(request_id, meta or {})
        self._asked[request_id] = future
        self._kick()
        return await future

    def refuse(self, request_id: str, reason: str) -> None:
        """Answer a request with no."""
        self._check_open()
        self.core.refuse(request_id, reason)
        self._kick()

    def open_transfer(
        self,
        request_id: str,
        layout: CacheLayout,
        *,
        codec: str,
        codec_params: dict[str, Any],
        streams: int,
        meta: dict[str, Any] | None = None,
        first_token: int | None = None,
    ) -> OutgoingTransfer:
        """Offer a transfer of encoded page streams and return its sending end at once."""
        self._check_open()
        offer = Offer(request_id, layout, codec, codec_params, streams, meta or {}, first_token)
        transfer = self.core.offer(
            request_id=request_id,
            layout=layout,
            codec=codec,
            codec_params=codec_params,
            streams=streams,
            meta=offer.meta,
            first_token=first_token,
            now=self.clock(),
        )
        outgoing = self._outgoing[transfer] = OutgoingTransfer(self, transfer, offer)
        self._kick()
        return outgoing

    async def close(self, reason: str = "closed") -> None:
        """Say goodbye and close every lane; open transfers fail. Takes at most `CLOSE_S`, also when cancelled."""
        if self._task is None or self._ended.is_set():
            return
        if not self._closing:
            self._closing = True
            self.core.bye(reason)
            self._kick()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._flushed.wait()
        except TimeoutError:
            logger.debug("the farewell to %s did not leave in time", self.peer)
        finally:
            self._task.cancel()
            await self._ended.wait()

    async def closed(self) -> None:
        """Wait until the link has ended; raises nothing, `error` says why."""
        await self._ended.wait()

    # ---- what transfers call

    def submit(self, transfer: OutgoingTransfer, page: int, stream: int, data: memoryview) -> None:
        """Queue one stream of one page of an outgoing transfer."""
        transfer.delivered.done()
        self.core.submit(transfer.id, page, stream, data, self.clock())
        transfer.stats.stream_bytes[stream] += data.nbytes
        self._update_room(transfer)
        self._kick()

    def decoded(self, transfer: IncomingTransfer, page: int, stream: int) -> None:
        """A page of an incoming transfer is in place with streams 0 to `stream`."""
        self._dispatch(self.core.decoded(transfer.id, page, stream))

    def abort(self, transfer: int, code: int, reason: str, error: LynxError | None = None) -> None:
        """Give up a transfer of either direction."""
        self._dispatch(self.core.abort(transfer, code, reason, error))

    def wake(self) -> None:
        """The core has something new to send."""
        self._kick()

    # ---- the tasks

    def start(self) -> Self:
        """Begin to move bytes; called once by `connect` and `serve`."""
        self._task = asyncio.create_task(self._run(), name=f"lynx_net link to {self.peer}")
        return self

    async def _run(self) -> None:
        error: LynxError = ConnectionLostError(f"the link to {self.peer} was closed on this side")
        try:
            async with asyncio.TaskGroup() as group:
                for index, lane in enumerate(self._lanes):
                    group.create_task(self._send_loop(index, lane))
                    group.create_task(self._receive_loop(lane))
                group.create_task(self._timer_loop())
        except* LynxError as failures:
            error = _first(failures)
            if not self._closing:
                logger.info("link to %s ended: %s", self.peer, error)
        finally:
            self.error = error
            for lane in self._lanes:
                lane.close()
            receiving = list(self._incoming.values())
            self._dispatch(self.core.fail_all(error))
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(error)
            self._asked.clear()
            self._transfers.end()
            self._requests.end()
            self._offers_changed.set()
            for incoming in receiving:
                await incoming.closed()
            self._ended.set()

    async def _send_loop(self, index: int, lane: Lane) -> None:
        wake = self._wake[index]
        loop = asyncio.get_running_loop()
        while True:
            wake.clear()
            now = self.clock()
            match self.core.next_send(index, now):
                case SendBytes(buffers, transfer):
                    await lane.send(buffers)
                    outgoing = self._outgoing.get(transfer) if transfer is not None else None
                    if outgoing is not None:
                        outgoing.stats.segments += 1
                        self._update_room(outgoing)
                case WaitUntil(at_s):
                    timer = loop.call_later(at_s - now, wake.set)
                    await wake.wait()
                    timer.cancel()
                case NothingToSend():
                    if self._closing and index == 0:
                        self._flushed.set()
                    await wake.wait()

    async def _receive_loop(self, lane: Lane) -> None:
        reader = FrameReader()
        while True:
            count = await lane.receive_into(reader.buffers())
            if count == 0:
                raise ConnectionLostError(f"{lane.peer} closed the connection")
            self.core.heard(self.clock())
            for frame in reader.received(count):
                match frame:
                    case ControlFrame(payload):
                        self._dispatch(self.core.message(decode_message(payload), self.clock()))
                    case SegmentStart(header):
                        for done in reader.deliver_to(await self._place(header)):
                            self._segment_arrived(done)
                    case SegmentFrame():
                        self._segment_arrived(frame)

    async def _place(self, header: SegmentHeader) -> memoryview | None:
        while True:
            self._offers_changed.clear()
            try:
                return self.core.place(header, self.clock())
            except SegmentAwaitsOffer:
                try:
                    async with asyncio.timeout(self.core.config.deadline_s):
                        await self._offers_changed.wait()
                except TimeoutError:
                    raise RemoteProtocolError(f"data of transfer {header.transfer}, which was never offered") from None

    def _segment_arrived(self, frame: SegmentFrame) -> None:
        header = frame.header
        incoming = self._incoming.get(header.transfer)
        if incoming is not None and frame.payload is not None:
            incoming.stats.stream_bytes[header.stream] += header.length
            incoming.stats.segments += 1
        self._dispatch(self.core.segment(header, frame.payload, self.clock()))

    async def _timer_loop(self) -> None:
        deadline_s = self.core.config.deadline_s
        while True:
            await asyncio.sleep(max(self.core.next_timer() - self.clock(), 0))
            if self.core.silent_for(self.clock()) >= deadline_s:
                await asyncio.sleep(SECOND_LOOK_S)
                if self.core.silent_for(self.clock()) >= deadline_s:
                    raise PeerTimeoutError(
                        f"{self.peer} has been silent for {deadline_s:g} s; it hangs or is unreachable"
                    )
            self._dispatch(self.core.timer(self.clock()))

    # ---- events

    def _dispatch(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case PageArrived(transfer, page, stream):
                    self._incoming[transfer].page_arrived(page, stream)
                case LayerReady(transfer, layer, stream):
                    self._incoming[transfer].mark_layer(layer, stream)
                case StreamReady(transfer, stream):
                    self._incoming[transfer].mark_stream(stream)
                case TransferComplete(transfer):
                    self._incoming.pop(transfer).mark_complete()
                case OfferReceived():
                    self._offer_received(event)
                case TransferDelivered(transfer):
                    self._outgoing.pop(transfer).delivered.set(self.clock())
                case TransferFailed(transfer, error):
                    ended = self._outgoing.pop(transfer, None) or self._incoming.pop(transfer, None)
                    if ended is not None:
                        ended.fail(error)
                    self._offers_changed.set()
                case RequestReceived(request_id, meta):
                    self._requests.put(self.make_request(request_id, meta))
                case RequestRefused(request_id, reason):
                    future = self._asked.pop(request_id, None)
                    if future is not None and not future.done():
                        future.set_exception(RequestRefusedError(f"request {request_id!r} was refused: {reason}"))
                case PeerClosed(reason):
                    raise ConnectionLostError(f"{self.peer} closed the link: {reason}")
        self._kick()

    def make_request(self, request_id: str, meta: dict[str, Any]) -> IncomingRequest:
        """Hook for subclasses with a richer request."""
        return IncomingRequest(self, request_id, meta)

    def _offer_received(self, event: OfferReceived) -> None:
        message, layout = event.offer, event.layout
        offer = Offer(
            message.request_id,
            layout,
            message.codec,
            message.codec_params,
            message.streams,
            message.meta,
            message.first_token,
        )
        try:
            incoming = self._make_incoming(self, message.transfer, offer)
        except LynxError as error:
            self._decline(message.transfer, message.request_id, error)
            return
        self._incoming[message.transfer] = incoming
        future = self._asked.pop(message.request_id, None)
        if future is None:
            self.on_offer(incoming)
        elif not future.done():
            future.set_result(incoming)
        self._dispatch(self.core.take(message, layout, incoming.sizes, incoming.need_bytes, self.clock()))
        if future is not None and future.cancelled():
            incoming.cancel("nobody waits for it any more")
        self._offers_changed.set()

    def _decline(self, transfer: int, request_id: str, error: LynxError) -> None:
        logger.warning("declined the transfer of request %r from %s: %s", request_id, self.peer, error)
        self._dispatch(self.core.abort(transfer, AbortCode.RECEIVER_FAILED, f"declined by the receiver: {error}"))
        future = self._asked.pop(request_id, None)
        if future is not None and not future.done():
            future.set_exception(error)

    # ---- small things

    def _kick(self) -> None:
        if self._closing or self.core.scheduler.has_work():
            self._wake_lanes()

    def _wake_lanes(self) -> None:
        for wake in self._wake:
            wake.set()

    def _update_room(self, transfer: OutgoingTransfer) -> None:
        queued = self.core.queued_bytes(transfer.id, 0)
        transfer.has_room(queued < self.core.config.send_queue_bytes)

    def _check_open(self) -> None:
        if self.error is not None:
            raise self.error
        if self._closing:
            raise LocalProtocolError(f"the link to {self.peer} is being closed")

    async def _iterate(self, inbox: _Inbox) -> AsyncIterator[Any]:
        while (item := await inbox.get()) is not None:
            yield item


def _first(group: BaseExceptionGroup[LynxError]) -> LynxError:
    """The first leaf of an exception group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, LynxError)
    return error
