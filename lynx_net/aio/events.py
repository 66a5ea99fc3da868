"""What a link does when its protocol core says that something has happened."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lynx_net.aio.inbox import Inbox
from lynx_net.aio.requests import Asked
from lynx_net.aio.timeline import has_exact
from lynx_net.aio.transfer import Offer
from lynx_net.errors import ConnectionLostError, LynxError, RequestRefusedError, TransferAbortedError
from lynx_net.wire.events import (
    LayerReady,
    OfferReceived,
    PageArrived,
    PagesArrived,
    PeerClosed,
    RequestReceived,
    RequestRefused,
    StreamReady,
    TransferAccepted,
    TransferComplete,
    TransferDelivered,
    TransferFailed,
)
from lynx_net.wire.messages import AbortCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lynx_net.aio.link import Link
    from lynx_net.aio.pump import Pump
    from lynx_net.aio.requests import IncomingRequest
    from lynx_net.aio.transfer import IncomingTransfer, OutgoingTransfer
    from lynx_net.wire.events import Event

__all__ = ["LinkEvents", "MakeIncoming"]

logger = logging.getLogger("lynx_net")


@dataclass(frozen=True, slots=True)
class _Taken:
    """An offer has its receiving end; who asked for it is to be told."""

    incoming: IncomingTransfer


@dataclass(frozen=True, slots=True)
class _Declined:
    """An offer has none."""

    transfer: int
    request_id: str
    error: LynxError


class MakeIncoming(Protocol):
    """Makes the receiving end of an offered transfer; raises LynxError to decline it.

    Called in the event loop; where the link accepts in threads, in any thread and with the lock of all links, so that
    the data behind an offer does not wait for the loop.
    """

    def __call__(self, link: Link, transfer: int, offer: Offer) -> IncomingTransfer: ...


class LinkEvents:
    """The events of a link, handled in order: some at once by the thread that posts them, all others in the event loop.

    Attributes:
        outgoing, incoming: transfers that have not ended, by their ids.
        asked: what this side has asked for.
        transfers, requests: what the peer offers and asks for, until the link ends.
        on_offer: where unasked transfers go; a server points it at its own queue.
    """

    def __init__(self, link: Link, pump: Pump, make_incoming: MakeIncoming, *, accept_in_threads: bool) -> None:
        self._link = link
        self._pump = pump
        self._make_incoming = make_incoming
        self._at_once = _AT_ONCE_IN_THREADS if accept_in_threads else _AT_ONCE
        self._loop_thread = threading.get_ident()
        self._waiting: deque[Event | _Taken | _Declined] = deque()
        self._draining = False
        self.outgoing: dict[int, OutgoingTransfer] = {}
        self.incoming: dict[int, IncomingTransfer] = {}
        self.asked = Asked()
        self.transfers: Inbox[IncomingTransfer] = Inbox()
        self.requests: Inbox[IncomingRequest] = Inbox()
        self.on_offer: Callable[[IncomingTransfer], None] = self.transfers.put

    def post(self, events: Sequence[Event | _Taken | _Declined]) -> None:
        """Handle events of the core, in order; arrived pages here, the rest in the event loop. For any thread."""
        link = self._link
        with link.lock:
            for event in events:
                act = self._at_once.get(type(event))
                if act is None:
                    self._waiting.append(event)
                else:
                    act(self, event)
            if self._pump.handling:
                return
            if link.core.scheduler.has_work():
                self._pump.wake()
            if not self._waiting or self._draining:
                return
            self._draining = True
        if self.in_loop:
            link.loop.call_soon(self.drain)
        else:
            link.loop.call_soon_threadsafe(self.drain)

    @property
    def in_loop(self) -> bool:
        """Whether the caller runs in the thread of the event loop."""
        return threading.get_ident() == self._loop_thread

    def drain(self) -> None:
        """Handle all events that wait for the event loop, in it."""
        self._draining = False
        while self._waiting:
            event = self._waiting.popleft()
            _IN_LOOP[type(event)](self, event)

    # At once and with the lock, in any thread: waking the loop for a page costs more than receiving it.

    def _page_arrived(self, event: PageArrived) -> None:
        if (incoming := self.incoming.get(event.transfer)) is not None:
            incoming.page_arrived(event.page, event.stream)

    def _pages_arrived(self, event: PagesArrived) -> None:
        if (incoming := self.incoming.get(event.transfer)) is not None:
            incoming.pages_arrived(event.pages, event.stream)

    def _accepted(self, event: TransferAccepted) -> None:
        if (outgoing := self.outgoing.get(event.transfer)) is not None:
            outgoing.accepted_at_s = self._link.clock()

    # In the event loop, in order.

    def _layer_ready(self, event: LayerReady) -> None:
        self.incoming[event.transfer].mark_layer(event.layer, event.stream)

    def _stream_ready(self, event: StreamReady) -> None:
        self.incoming[event.transfer].mark_stream(event.stream)

    def _complete(self, event: TransferComplete) -> None:
        incoming = self.incoming.pop(event.transfer)
        self._link.transfer_ended(incoming, None)
        incoming.mark_complete()

    def _delivered(self, event: TransferDelivered) -> None:
        outgoing = self.outgoing.pop(event.transfer)
        if outgoing.accepted_at_s is None:
            outgoing.accepted_at_s = self._link.clock()
        self._link.transfer_ended(outgoing, None)
        outgoing.delivered.set(self._link.clock())

    def _failed(self, event: TransferFailed) -> None:
        ended = self.outgoing.pop(event.transfer, None) or self.incoming.pop(event.transfer, None)
        if ended is not None:
            self._link.transfer_ended(ended, event.error)
            ended.fail(event.error)

    def _requested(self, event: RequestReceived) -> None:
        self.requests.put(self._link.make_request(event.request_id, event.meta))

    def _refused(self, event: RequestRefused) -> None:
        error = RequestRefusedError(f"request {event.request_id!r} was refused: {event.reason}")
        self.asked.failed(event.request_id, error)

    def _peer_closed(self, event: PeerClosed) -> None:
        self._link.pump_failed(ConnectionLostError(f"{self._link.peer} closed the link: {event.reason}"))

    def _take(self, event: OfferReceived) -> None:
        """Make the receiving end of an offer and accept it. In the event loop, or in any thread with the lock.

        Whoever calls it then handles the events that it adds.
        """
        link, message, layout = self._link, event.offer, event.layout
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
            incoming = self._make_incoming(link, message.transfer, offer)
        except LynxError as error:
            self._waiting.append(_Declined(message.transfer, message.request_id, error))
            return
        except Exception as error:
            # Not ours to handle, but neither peer must wait for an answer that never comes because of it.
            logger.exception("the application failed at the offer of request %r from %s", offer.request_id, link.peer)
            self._waiting.append(_Declined(message.transfer, message.request_id, TransferAbortedError(repr(error))))
            return
        with link.lock:
            self.incoming[message.transfer] = incoming
            self._waiting.append(_Taken(incoming))
            now, sizes, exact = link.clock(), incoming.sizes, has_exact(incoming.stream_names)
            if not layout.page_count:
                incoming.accepted_at_s = now  # there is nothing to reserve
            taken = link.core.incoming.take(
                *(message, layout, sizes, incoming.need_bytes, now, incoming.stats), exact=exact, pool=incoming.pool
            )
            if taken:
                self.post(taken)
            self._pump.wake()

    def _announce(self, event: _Taken) -> None:
        if not self.asked.offered(event.incoming):
            self.on_offer(event.incoming)

    def _decline(self, event: _Declined) -> None:
        transfer, request_id, error = event.transfer, event.request_id, event.error
        logger.warning("declined the transfer of request %r from %s: %s", request_id, self._link.peer, error)
        self._link.abort(transfer, AbortCode.RECEIVER_FAILED, f"declined by the receiver: {error}")
        self.asked.failed(request_id, error)


_AT_ONCE: dict[type, Callable[[LinkEvents, Any], None]] = {
    PageArrived: LinkEvents._page_arrived,
    PagesArrived: LinkEvents._pages_arrived,
    TransferAccepted: LinkEvents._accepted,
}
"""What is done about an event in the thread that posts it; all others wait for the loop."""

_AT_ONCE_IN_THREADS: dict[type, Callable[[LinkEvents, Any], None]] = {**_AT_ONCE, OfferReceived: LinkEvents._take}
"""Where offers are accepted in threads."""

_IN_LOOP: dict[type, Callable[[LinkEvents, Any], None]] = {
    LayerReady: LinkEvents._layer_ready,
    StreamReady: LinkEvents._stream_ready,
    TransferComplete: LinkEvents._complete,
    OfferReceived: LinkEvents._take,
    _Taken: LinkEvents._announce,
    _Declined: LinkEvents._decline,
    TransferDelivered: LinkEvents._delivered,
    TransferFailed: LinkEvents._failed,
    RequestReceived: LinkEvents._requested,
    RequestRefused: LinkEvents._refused,
    PeerClosed: LinkEvents._peer_closed,
}
"""What the loop does about an event."""
