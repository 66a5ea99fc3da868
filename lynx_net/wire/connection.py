"""One side of a link as a state machine: messages, segments and time in; events and bytes to send out.

States of a transfer at its sender:    OFFERED -> OPEN -> DELIVERED,  and from the first two -> FAILED
States of a transfer at its receiver:  PENDING -> ACCEPTED -> COMPLETE,  and from the first two -> FAILED

    message        at its receiver
    -------------  ------------------------------------------------------------------------------------------
    Offer          id must be of the peer's parity and above all before it; PENDING, or refused with Abort
    Accept         OFFERED -> OPEN; for an unknown or ended transfer: ignored (it crossed an Abort)
    Credit         raises a limit; ignored if the transfer has ended
    Complete       OPEN -> DELIVERED; ignored if it has ended
    Abort          any open state -> FAILED, with the peer's reason; ignored if it has ended
    Request        an event for the application, which answers with an Offer of that request id or a Refuse
    Refuse         an event for the application
    Ping           nothing; hearing it was its purpose
    Bye            the peer will send no more; what is still open fails
    Hello, Reject  only before the link is up; here a RemoteProtocolError

Rules of time (`now` is an argument everywhere):

1. Whatever arrives, one byte suffices, proves that the peer lives. Silence for `deadline_s` ends the link.
2. Whoever has sent nothing for a third of the peer's deadline sends a Ping.
3. A transfer that holds credit and gets no byte for `progress_timeout_s` is aborted by its receiver; one whose
   receiver has granted nothing new for that time although bytes are queued is aborted by its sender.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lynx_net.errors import IntegrityError, LocalProtocolError, LynxError, RemoteProtocolError, TransferAbortedError
from lynx_net.wire.layout import CacheLayout
from lynx_net.wire.messages import (
    Abort,
    AbortCode,
    Accept,
    Bye,
    Complete,
    Credit,
    Message,
    OfferMessage,
    Ping,
    Refuse,
    Request,
)
from lynx_net.wire.pacing import TokenBucket
from lynx_net.wire.receiving import LayerReady, PageArrived, ReceiveState, StreamReady, TransferComplete
from lynx_net.wire.scheduler import NO_DEADLINE, NothingToSend, Scheduler, SendBytes, SendQueue, WaitUntil

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from lynx_net.wire.config import LinkConfig
    from lynx_net.wire.frames import SegmentHeader
    from lynx_net.wire.grants import CreditBook, Grant

__all__ = [
    "Event",
    "LinkCore",
    "OfferReceived",
    "PeerClosed",
    "RequestReceived",
    "RequestRefused",
    "SegmentAwaitsOffer",
    "TransferDelivered",
    "TransferFailed",
]


@dataclass(frozen=True, slots=True)
class OfferReceived:
    """The peer offers a transfer; answer with `LinkCore.take` or `LinkCore.abort`."""

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


class SegmentAwaitsOffer(Exception):
    """A segment overtook its offer on another lane: read on from this lane when the offer is there."""


Event = (
    OfferReceived
    | RequestReceived
    | RequestRefused
    | TransferDelivered
    | TransferFailed
    | PeerClosed
    | PageArrived
    | LayerReady
    | StreamReady
    | TransferComplete
)


class LinkCore:
    """The protocol of one link, for both of its sides.

    Args:
        link: key of this link in the credit book.
        initiator: True at the side that connected; it numbers its transfers oddly, the other evenly.
        config: this side's settings.
        peer_segment_bytes, peer_initial_credit, peer_deadline_s: from the peer's Hello.
        book: the credit book shared by all links of the process.
        route_grant: called with every grant the book makes, which may be for another link; it
            calls `apply_grant` of the link that the grant names.
        rate_bps: pacing of all lanes together, or None.
        now: the current time, seconds.
    """

    def __init__(
        self,
        *,
        link: Hashable,
        initiator: bool,
        config: LinkConfig,
        peer_segment_bytes: int,
        peer_initial_credit: int,
        peer_deadline_s: float,
        book: CreditBook,
        route_grant: Callable[[Grant], None],
        rate_bps: float | None,
        now: float,
    ) -> None:
        self.link = link
        self.config = config
        self.scheduler = Scheduler(None if rate_bps is None else TokenBucket(rate_bps, now))
        self.segment_bytes = min(config.segment_bytes_at(rate_bps), peer_segment_bytes)
        self._peer_initial_credit = peer_initial_credit
        self._ping_every_s = min(peer_deadline_s, config.deadline_s) / 3
        self._book = book
        self._route_grant = route_grant
        self._next_id = 1 if initiator else 2
        self._peer_parity = 0 if initiator else 1
        self._highest_offer = 0
        self._sending: dict[int, SendQueue] = {}
        self._send_progress_s: dict[int, float] = {}
        self._receiving: dict[int, ReceiveState] = {}
        self._pending: set[int] = set()
        self._receive_progress_s: dict[int, float] = {}
        self.heard_at_s = now
        self._sent_at_s = now

    # ---- sending

    def offer(
        self,
        *,
        request_id: str,
        layout: CacheLayout,
        codec: str,
        codec_params: dict[str, Any],
        streams: int,
        meta: dict[str, Any],
        first_token: int | None,
        now: float,
        deadline_s: float = NO_DEADLINE,
    ) -> int:
        """Begin a transfer and return its id. `deadline_s` orders it inside its class (scheduler rule 3)."""
        transfer = self._next_id
        self.scheduler.control(
            OfferMessage(
                transfer,
                request_id,
                layout.to_wire(),
                codec,
                codec_params,
                streams,
                self.segment_bytes,
                meta,
                first_token,
            )
        )
        self._next_id += 2
        queue = SendQueue(transfer, streams, self.segment_bytes, self._peer_initial_credit, deadline_s)
        self._sending[transfer] = queue
        self._send_progress_s[transfer] = now
        self.scheduler.open(queue)
        return transfer

    def submit(self, transfer: int, page: int, stream: int, data: memoryview, now: float) -> None:
        """Queue one stream of one page; `data` must stay unchanged until the transfer has ended."""
        queue = self._sending.get(transfer)
        if queue is None:
            raise LocalProtocolError(f"transfer {transfer} has ended")
        if not any(queue.pages):
            self._send_progress_s[transfer] = now
        self.scheduler.submit(transfer, page, stream, data)

    def queued_bytes(self, transfer: int, stream: int) -> int:
        """Bytes of a stream that wait to be sent; 0 once the transfer has ended."""
        queue = self._sending.get(transfer)
        return 0 if queue is None else queue.queued_bytes[stream]

    def sent_bytes(self, transfer: int) -> list[int]:
        """Payload bytes sent of each stream of an open transfer."""
        return list(self._sending[transfer].sent_bytes)

    def request(self, request_id: str, meta: dict[str, Any]) -> None:
        """Ask the peer for a cache."""
        self.scheduler.control(Request(request_id, meta))

    def refuse(self, request_id: str, reason: str) -> None:
        """Answer a request of the peer with no."""
        self.scheduler.control(Refuse(request_id, reason))

    def bye(self, reason: str) -> None:
        """Announce that nothing more will be sent."""
        self.scheduler.control(Bye(reason))

    def next_send(self, lane: int, now: float) -> SendBytes | WaitUntil | NothingToSend:
        """What this lane sends now; see the scheduler's rules."""
        chosen = self.scheduler.next(lane, now)
        if isinstance(chosen, SendBytes):
            self._sent_at_s = now
            if chosen.transfer is not None:
                self._send_progress_s[chosen.transfer] = now
        return chosen

    # ---- receiving

    def take(
        self,
        offer: OfferMessage,
        layout: CacheLayout,
        sizes: Callable[[int], Sequence[frozenset[int]]],
        need_bytes: int,
        now: float,
    ) -> list[Event]:
        """Accept an offer as soon as its memory can be reserved.

        `sizes` gives the byte sizes each stream of a page may have, `need_bytes` the most the whole transfer can take.
        """
        if not self._book.fits(need_bytes):
            reason = f"the transfer needs {need_bytes} bytes, this receiver holds at most {self._book.memory_bytes}"
            return self.abort(offer.transfer, AbortCode.TOO_LARGE, reason)
        config = self.config
        windows = [config.anchor_window_bytes] + [config.residual_window_bytes] * (offer.streams - 1)
        state = ReceiveState(
            offer.transfer, layout, offer.streams, offer.segment_bytes, sizes, windows, config.initial_credit_bytes
        )
        self._receiving[offer.transfer] = state
        self._pending.discard(offer.transfer)
        self._receive_progress_s[offer.transfer] = now
        events: list[Event] = list(state.start())
        if state.complete:
            self.scheduler.control(Accept(offer.transfer))
            return events + self._finish_receiving(offer.transfer)
        self._send_grants(self._book.add(self.link, state, need_bytes))
        return events

    def place(self, header: SegmentHeader, now: float) -> memoryview | None:
        """Where a segment's payload goes; None drops it (it came before, or its transfer has ended).

        Raises:
            SegmentAwaitsOffer: the offer is still on its way on another lane, or is being decided on.
            RemoteProtocolError: the segment breaks a rule.
        """
        state = self._receiving.get(header.transfer)
        if state is not None:
            self._receive_progress_s[header.transfer] = now
            return state.place(header)
        if header.transfer % 2 != self._peer_parity:
            raise RemoteProtocolError(f"a segment of transfer {header.transfer}, which is not the peer's to send")
        if header.transfer > self._highest_offer or header.transfer in self._pending:
            raise SegmentAwaitsOffer
        return None

    def segment(self, header: SegmentHeader, payload: memoryview | None, now: float) -> list[Event]:
        """All bytes of a segment are in their place."""
        state = self._receiving.get(header.transfer)
        if state is None or payload is None:
            return []
        self._receive_progress_s[header.transfer] = now
        owed = state.owes(header.stream)
        try:
            events: list[Event] = list(state.segment_arrived(header, payload))
        except IntegrityError as error:
            return self.abort(header.transfer, AbortCode.INTEGRITY, str(error), error)
        finished = owed and not state.owes(header.stream)
        self._send_grants(self._book.progressed(self.link, header.transfer, stream_finished=finished))
        return events

    def receive_state(self, transfer: int) -> ReceiveState | None:
        """State of an incoming transfer that has not ended."""
        return self._receiving.get(transfer)

    def decoded(self, transfer: int, page: int, stream: int) -> list[Event]:
        """A page is in place with streams 0 to `stream`; ignored if the transfer has ended meanwhile."""
        state = self._receiving.get(transfer)
        if state is None:
            return []
        events: list[Event] = list(state.decoded(page, stream))
        self._send_grants(self._book.progressed(self.link, transfer, stream_finished=False))
        if state.complete:
            events += self._finish_receiving(transfer)
        return events

    def heard(self, now: float) -> None:
        """Bytes arrived on any lane."""
        self.heard_at_s = now

    def message(self, message: Message, now: float) -> list[Event]:
        """Handle a control message; see the table at the head of this file."""
        match message:
            case Credit(transfer, stream, limit):
                self._send_progress_s.update({transfer: now} if transfer in self._sending else {})
                self.scheduler.grant(transfer, stream, limit)
            case Accept(transfer):
                self._send_progress_s.update({transfer: now} if transfer in self._sending else {})
            case OfferMessage():
                return self._offer_arrived(message)
            case Complete(transfer):
                if self._close_sending(transfer):
                    return [TransferDelivered(transfer)]
            case Abort(transfer, code, reason):
                return self._peer_aborted(transfer, code, reason)
            case Request(request_id, meta):
                return [RequestReceived(request_id, meta)]
            case Refuse(request_id, reason):
                return [RequestRefused(request_id, reason)]
            case Bye(reason):
                return [PeerClosed(reason)]
            case Ping():
                pass
            case _:
                raise RemoteProtocolError(f"a {message.tag} message on a link that is already up")
        return []

    # ---- ends and time

    def abort(self, transfer: int, code: int, reason: str, error: LynxError | None = None) -> list[Event]:
        """Give up a transfer of either direction and tell the peer; nothing happens if it has ended."""
        if not self._close_sending(transfer) and not self._close_receiving(transfer):
            return []
        self.scheduler.control(Abort(transfer, code, reason[:1000]))
        return [TransferFailed(transfer, error if error is not None else TransferAbortedError(reason))]

    def open_transfers(self) -> list[int]:
        """Ids of all transfers that have not ended."""
        return [*self._sending, *self._receiving, *self._pending]

    def fail_all(self, error: LynxError) -> list[Event]:
        """The link is gone: end every transfer with this error, and take its claims out of the credit book."""
        failed = self.open_transfers()
        for transfer in failed:
            if not self._close_sending(transfer):
                self._close_receiving(transfer)
        return [TransferFailed(transfer, error) for transfer in failed]

    def silent_for(self, now: float) -> float:
        """Seconds since the peer was heard."""
        return now - self.heard_at_s

    def next_timer(self) -> float:
        """When `timer` wants to be called next."""
        return min(self._sent_at_s + self._ping_every_s, self.heard_at_s + self.config.deadline_s, *self._stall_times())

    def timer(self, now: float) -> list[Event]:
        """Rules 2 and 3; rule 1 is the driver's, who first reads what waits in its sockets."""
        events: list[Event] = []
        if now >= self._sent_at_s + self._ping_every_s:
            if not self.scheduler.has_control():
                self.scheduler.control(Ping())
            self._sent_at_s = now
        limit_s = self.config.progress_timeout_s
        for transfer, since_s in list(self._receive_progress_s.items()):
            if now - since_s >= limit_s:
                if self._owed_to_us(transfer):
                    reason = f"no byte of transfer {transfer} arrived for {limit_s:g} s"
                    events += self.abort(transfer, AbortCode.STALLED, reason)
                else:
                    self._receive_progress_s[transfer] = now
        for transfer, since_s in list(self._send_progress_s.items()):
            if now - since_s >= limit_s:
                if any(self._sending[transfer].pages):
                    reason = f"the receiver granted transfer {transfer} nothing for {limit_s:g} s"
                    events += self.abort(transfer, AbortCode.STALLED, reason)
                else:
                    self._send_progress_s[transfer] = now
        return events

    def _stall_times(self) -> list[float]:
        limit_s = self.config.progress_timeout_s
        return [
            since + limit_s for times in (self._receive_progress_s, self._send_progress_s) for since in times.values()
        ]

    def _owed_to_us(self, transfer: int) -> bool:
        state = self._receiving[transfer]
        accepted = self._book.is_accepted(self.link, transfer)
        return accepted and any(
            state.owes(stream) and window.outstanding > 0 for stream, window in enumerate(state.windows)
        )

    def _offer_arrived(self, offer: OfferMessage) -> list[Event]:
        if offer.transfer % 2 != self._peer_parity or offer.transfer <= self._highest_offer:
            raise RemoteProtocolError(f"offer with the transfer id {offer.transfer}, which cannot be the next one")
        self._highest_offer = offer.transfer
        self._pending.add(offer.transfer)
        try:
            layout = CacheLayout.from_wire(offer.layout)
        except LocalProtocolError as error:
            return self.abort(offer.transfer, AbortCode.MISUSE, str(error))
        if not 1 <= offer.streams <= 8 or not 1 <= offer.segment_bytes <= self.config.segment_bytes:
            return self.abort(
                offer.transfer, AbortCode.MISUSE, "streams or segment_bytes of the offer are out of range"
            )
        if len(self._pending) + len(self._receiving) > self.config.max_pending_offers:
            return self.abort(offer.transfer, AbortCode.TOO_LARGE, "too many transfers are open on this link")
        return [OfferReceived(offer, layout)]

    def _peer_aborted(self, transfer: int, code: int, reason: str) -> list[Event]:
        if not self._close_sending(transfer) and not self._close_receiving(transfer):
            return []
        if code == AbortCode.CANCELLED:
            reason = f"cancelled by the peer: {reason}"
        return [TransferFailed(transfer, TransferAbortedError(reason))]

    def _finish_receiving(self, transfer: int) -> list[Event]:
        self._close_receiving(transfer)
        self.scheduler.control(Complete(transfer))
        return []

    def _close_sending(self, transfer: int) -> bool:
        self.scheduler.close(transfer)
        self._send_progress_s.pop(transfer, None)
        return self._sending.pop(transfer, None) is not None

    def _close_receiving(self, transfer: int) -> bool:
        was_pending = transfer in self._pending
        self._pending.discard(transfer)
        self._receive_progress_s.pop(transfer, None)
        state = self._receiving.pop(transfer, None)
        if state is not None:
            self._send_grants(self._book.remove(self.link, transfer))
        return was_pending or state is not None

    def _send_grants(self, grants: list[Grant]) -> None:
        for grant in grants:
            self._route_grant(grant)

    def apply_grant(self, grant: Grant) -> None:
        """Tell the peer of a grant that the book made for this link."""
        if grant.stream < 0:
            self.scheduler.control(Accept(grant.transfer))
        else:
            self.scheduler.control(Credit(grant.transfer, grant.stream, grant.limit))
