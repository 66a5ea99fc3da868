"""One side of a link as a state machine: messages, segments and time in; events and bytes to send out.

States of a transfer at its sender:    OFFERED -> OPEN -> DELIVERED,  and from the first two -> FAILED
States of a transfer at its receiver:  PENDING -> ACCEPTED -> COMPLETE,  and from the first two -> FAILED

    message        at its receiver
    -------------  ------------------------------------------------------------------------------------------
    Offer          id must be of the peer's parity and above all before it; PENDING, or refused with Abort
    Accept         OFFERED -> OPEN; for an unknown or ended transfer: ignored (it crossed an Abort)
    Credit         raises a limit; ignored if the transfer has ended. One that raises nothing says: not forgotten
    Complete       OPEN -> DELIVERED, only when everything was sent; ignored if it has ended
    Abort          any open state -> FAILED, with the peer's reason; ignored if it has ended
    Request        an event for the application, which answers with an Offer of that request id or a Refuse;
                   refused here if too many wait for an answer; the id must not wait for one already
    Refuse         an event for the application
    Received       frames of a lane that need not be remembered any more (lanes.py)
    Ping           nothing; hearing it was its purpose
    Bye            the peer will send no more; what is still open fails
    Hello, Proof,  only before the link is up; here a RemoteProtocolError
    Reject

Rules of time (`now` is an argument everywhere):

1. Whatever arrives, one byte suffices, proves that the peer lives. Silence for `deadline_s` ends the link.
2. Whoever has sent nothing for a tenth of the smaller of both deadlines sends a Ping, so that a peer which falls silent
   is found between 0.9 and 1.0 deadlines later.
3. A transfer that holds credit and gets no byte for `progress_timeout_s` is aborted by its receiver; so is one whose
   bytes are here while nothing at all was decoded for that time. It is not its sender's fault, and the time does not
   run, while bytes of an earlier stream arrive on the link, or credit is withheld for those of another link.
4. A transfer that can send nothing before its receiver says something, and hears nothing of it for
   `progress_timeout_s`, is aborted by its sender. A receiver that withholds credit on purpose (grants rules 1 and 2)
   or whose decoder moves therefore repeats a Credit three times in a deadline.
5. These times do not run while a lane is down: when it is back, they begin anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from lynx_net.errors import IntegrityError, LocalProtocolError, LynxError, RemoteProtocolError, TransferAbortedError
from lynx_net.wire.events import (
    Event,
    OfferReceived,
    PeerClosed,
    RequestReceived,
    RequestRefused,
    TransferAccepted,
    TransferDelivered,
    TransferFailed,
)
from lynx_net.wire.frames import MIN_SEGMENT_BYTES
from lynx_net.wire.lanes import LaneRecord
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
    Received,
    Refuse,
    Request,
)
from lynx_net.wire.pacing import TokenBucket
from lynx_net.wire.receiving import PageSizes, ReceiveState
from lynx_net.wire.scheduler import NO_DEADLINE, NothingToSend, Scheduler, SendBytes, SendQueue, WaitUntil
from lynx_net.wire.stats import LaneStats

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from lynx_net.wire.config import LinkConfig
    from lynx_net.wire.frames import SegmentHeader
    from lynx_net.wire.grants import CreditBook, Grant
    from lynx_net.wire.lending import Lender, LentRun
    from lynx_net.wire.pool import BufferPool
    from lynx_net.wire.stats import TransferStats, WaitReason

__all__ = [
    "Arrived",
    "Event",
    "LinkCore",
    "OfferReceived",
    "PeerClosed",
    "RequestReceived",
    "RequestRefused",
    "SegmentAwaitsOffer",
    "TransferAccepted",
    "TransferDelivered",
    "TransferFailed",
]


MAX_STREAMS = 16
MAX_REASON = 1000
"""Characters of a reason that travel."""
MIN_PING_S = 0.01
MAX_CONTROL_BACKLOG_BYTES = 1 << 24
"""A peer that makes us answer and reads no answers is given up when this much waits for it."""


Arrived: TypeAlias = "tuple[SegmentHeader, int]"
"""A whole segment that lies in its place, and the checksum that its bytes have."""


class SegmentAwaitsOffer(Exception):
    """A segment overtook its offer on another lane: read on from this lane when the offer is there."""


class LinkCore:
    """The protocol of one link, for both of its sides.

    Args:
        link: key of this link in the credit book.
        lanes: how many the link has.
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
        lanes: int,
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
        self.scheduler = Scheduler(
            None if rate_bps is None else TokenBucket(rate_bps, now), urgent_lane=config.urgent_lane and lanes > 1
        )
        self.segment_bytes = min(config.segment_bytes_at(rate_bps), peer_segment_bytes)
        self.resent_frames = 0
        """Frames sent again because a connection was lost."""
        self.lender: Lender | None = None
        """Lends buffers to lanes that can receive into them."""
        self._lanes = [LaneRecord() for _ in range(lanes)]
        many = max(lanes // 2, 1)
        self.send_queue_bytes = config.send_queue_bytes * many
        self._anchor_window_bytes = config.anchor_window_bytes * many
        self.lane_stats = [LaneStats() for _ in range(lanes)]
        self._peer_initial_credit = peer_initial_credit
        shorter_s = min(peer_deadline_s, config.deadline_s)
        self._ping_every_s = max(shorter_s / 10, MIN_PING_S)
        self._reassure_every_s = max(min(shorter_s, config.progress_timeout_s) / 3, MIN_PING_S)
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
        self._stream_heard_s = [now] * MAX_STREAMS
        self._asked_of_us: set[str] = set()
        self._reassured_at_s = now
        self._decoded_pages_seen = book.decoded_pages
        self._decoder_moved_at_s = now
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
        exact: bool = False,
    ) -> int:
        """Begin a transfer and return its id. `deadline_s` orders it inside its class (scheduler rule 3).

        `exact` says that the last of several streams is exact: it goes after the other streams of all transfers.
        """
        if not 1 <= streams <= MAX_STREAMS:
            raise LocalProtocolError(f"a transfer has 1 to {MAX_STREAMS} streams, not {streams}")
        transfer = self._next_id
        queue = SendQueue(
            transfer,
            streams=streams,
            page_count=layout.page_count,
            segment_bytes=self.segment_bytes,
            initial_credit=self._peer_initial_credit,
            deadline_s=deadline_s,
            exact=exact,
        )
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
        self._asked_of_us.discard(request_id)
        self._sending[transfer] = queue
        self._send_progress_s[transfer] = now
        self.scheduler.open(queue)
        return transfer

    def submit(
        self, transfer: int, page: int, stream: int, data: memoryview, now: float, rank: tuple[int, ...] = ()
    ) -> int:
        """Queue one stream of one page; `data` must stay unchanged until the transfer has ended.

        Returns the bytes of stream 0 that wait to be sent.

        Of what is queued in a stream the lowest rank goes first, equal ones in the order in which they came.

        Raises:
            LocalProtocolError: the transfer has ended, has no such page, or it was submitted before.
            TypeError: the buffer is not contiguous.
        """
        queue = self._sending.get(transfer)
        if queue is None:
            raise LocalProtocolError(f"transfer {transfer} has ended")
        waited = queue.waits_for_peer()
        self.scheduler.submit(transfer, page, stream, data, rank)
        if not waited:
            self._send_progress_s[transfer] = now
        return queue.queued_bytes[0]

    def is_sending(self, transfer: int) -> bool:
        """Whether an outgoing transfer has not ended."""
        return transfer in self._sending

    def queued_bytes(self, transfer: int, stream: int) -> int:
        """Bytes of a stream that wait to be sent; 0 once the transfer has ended."""
        queue = self._sending.get(transfer)
        return 0 if queue is None else queue.queued_bytes[stream]

    def all_queued_bytes(self, transfer: int) -> int:
        """Bytes of all streams that wait to be sent; 0 once the transfer has ended."""
        queue = self._sending.get(transfer)
        return 0 if queue is None else sum(queue.queued_bytes)

    def send_stats(self, transfer: int) -> TransferStats:
        """What is counted of an open outgoing transfer; the object lives on when the transfer has ended."""
        return self._sending[transfer].stats

    def why_nothing(self) -> WaitReason:
        """Why a lane that got `NothingToSend` has nothing to send."""
        return "credit" if any(any(queue.pages) for queue in self._sending.values()) else "idle"

    def request(self, request_id: str, meta: dict[str, Any]) -> None:
        """Ask the peer for a cache."""
        self.scheduler.control(Request(request_id, meta))

    def refuse(self, request_id: str, reason: str) -> None:
        """Answer a request of the peer with no."""
        self._asked_of_us.discard(request_id)
        self.scheduler.control(Refuse(request_id, reason))

    def bye(self, reason: str) -> None:
        """Announce that nothing more will be sent."""
        self.scheduler.control(Bye(reason))

    def set_rate(self, rate_bps: float | None, now: float) -> None:
        """Pace to another rate from `now` on; None does not pace. What is owed to the old rate stays owed."""
        pacer = self.scheduler.pacer
        if rate_bps is None:
            self.scheduler.pacer = None
        elif pacer is None:
            self.scheduler.pacer = TokenBucket(rate_bps, now)
        else:
            pacer.set_rate(rate_bps, now)
        self.scheduler.stop_runs()

    def next_is_small(self, most_bytes: int) -> bool:
        """Whether lane 0 would send little next, see `Scheduler.next_is_small`; False while it sends frames again."""
        return not self._lanes[0].resend and self.scheduler.next_is_small(most_bytes)

    def batch_bytes(self, most_bytes: int) -> int:
        """How many bytes a lane may take together: `most_bytes`, but no more than its share of what can be sent.

        What others are sending counts as theirs. A segment is never too much.
        """
        if most_bytes <= self.segment_bytes:
            return self.segment_bytes
        lanes = len(self._lanes)
        taken_bytes = self.scheduler.running_bytes
        share_bytes = (self.scheduler.sendable_bytes(most_bytes * lanes) + taken_bytes) // lanes
        return max(min(share_bytes, most_bytes), self.segment_bytes)

    def next_send(self, lane: int, now: float) -> SendBytes | WaitUntil | NothingToSend:
        """What this lane sends now; see the scheduler's rules."""
        record, stats = self._lanes[lane], self.lane_stats[lane]
        chosen: SendBytes | WaitUntil | NothingToSend
        if record.resend:
            chosen = self.scheduler.again(record.resend[0], now)
            if isinstance(chosen, SendBytes):
                record.resend.popleft()
                stats.resent_frames += 1
                if chosen.transfer is not None:
                    self._sending[chosen.transfer].stats.resent_segments += 1
        else:
            chosen = self.scheduler.next(lane, now)
            if isinstance(chosen, SendBytes):
                record.sent(chosen)
        if isinstance(chosen, SendBytes):
            self._sent_at_s = now
            stats.sent_payload_bytes += len(chosen.data)
            if chosen.transfer is None:
                stats.sent_control_frames += 1
            else:
                stats.sent_segments += 1
                self._send_progress_s[chosen.transfer] = now
        return chosen

    def send_run(self, lane: int, room_bytes: int, most: int, now: float) -> list[SendBytes]:
        """Segments that `next_send` would answer the next times (`Scheduler.run`).

        Until `run_ended` it is asked nothing more for this lane. They count when that says that they have been sent.
        """
        record = self._lanes[lane]
        if record.resend or not (chosen := self.scheduler.run(lane, room_bytes, most, now)):
            return []
        record.sent_more(chosen)
        for transfer in {one.transfer for one in chosen}:
            assert transfer is not None
            self._send_progress_s[transfer] = now
        return chosen

    def run_ended(self, lane: int, run: Sequence[SendBytes], sent: int, now: float) -> None:
        """Of the run of a lane the first `sent` segments were sent; the others are to be chosen again."""
        stats = self.lane_stats[lane]
        stats.sent_payload_bytes += sum([len(one.data) for one in run[:sent]])
        stats.sent_segments += sent
        self._lanes[lane].not_sent(len(run) - sent)
        self.scheduler.run_ended(lane, run[sent:], now)

    # ---- lanes

    def frames_received(self, lane: int, count: int, control_frames: int = 0) -> None:
        """Whole frames, so many of them control frames, came on a lane and were acted on."""
        record, stats = self._lanes[lane], self.lane_stats[lane]
        stats.received_control_frames += control_frames
        stats.received_segments += count - control_frames
        if not record.count(count, stats.received_bytes, along=self.scheduler.has_control()):
            return
        self.scheduler.control(Received(lane, record.received))
        for other, (record, stats) in enumerate(zip(self._lanes, self.lane_stats, strict=True)):
            if record.count(0, stats.received_bytes, along=True):
                self.scheduler.control(Received(other, record.received))

    def received_frames(self, lane: int) -> int:
        """The count to state when the lane is re-opened; final once nobody reads its old connection any more."""
        return self._lanes[lane].received

    def lane_lost(self, unfinished: Sequence[SegmentHeader]) -> None:
        """A connection is gone, and with it the rest of these segments, which had been placed."""
        for header in unfinished:
            state = self._receiving.get(header.transfer)
            if state is not None:
                state.lost(header)

    def lane_reopened(self, lane: int, peer_received: int, now: float) -> None:
        """A lane has a new connection; the peer has received so many frames on it before.

        Raises:
            RemoteProtocolError: that cannot be.
        """
        self.resent_frames += self._lanes[lane].reopen(peer_received)
        self.lane_stats[lane].reopened += 1
        self.heard_at_s = self._decoder_moved_at_s = now
        for times in (self._receive_progress_s, self._send_progress_s):
            for transfer in times:
                times[transfer] = now

    # ---- receiving

    def take(
        self,
        offer: OfferMessage,
        layout: CacheLayout,
        sizes: Callable[[int], Sequence[PageSizes]],
        need_bytes: int,
        now: float,
        stats: TransferStats | None = None,
        *,
        exact: bool = False,
        pool: BufferPool | None = None,
    ) -> list[Event]:
        """Accept an offer as soon as its memory can be reserved; nothing happens if the transfer has ended.

        `sizes` gives the byte sizes each stream of a page may have, `need_bytes` the most the whole transfer can take;
        what arrives is counted in `stats`; `exact` says that the last of several streams is exact; buffers come from
        `pool`, by default the one that all transfers of the process share.
        """
        if not self._book.fits(need_bytes):
            reason = f"the transfer needs {need_bytes} bytes, this receiver holds at most {self._book.memory_bytes}"
            return self.abort(offer.transfer, AbortCode.TOO_LARGE, reason)
        if offer.transfer not in self._pending:
            return []
        config = self.config
        windows = [self._anchor_window_bytes] + [config.residual_window_bytes] * (offer.streams - 1)
        state = ReceiveState(
            offer.transfer,
            layout,
            offer.streams,
            offer.segment_bytes,
            sizes,
            windows,
            config.initial_credit_bytes,
            self._book.pool if pool is None else pool,
            early_window=config.early_residual_bytes,
            stats=stats,
            exact=exact,
        )
        self._receiving[offer.transfer] = state
        self._pending.discard(offer.transfer)
        self._receive_progress_s[offer.transfer] = now
        events: list[Event] = list(state.start())
        if state.complete:
            self.scheduler.control(Accept(offer.transfer))
            return events + self._finish_receiving(offer.transfer)
        self._send_grants(self._book.add(self.link, state, need_bytes))
        if not state.accepted:
            early_bytes = min(state.early_bytes(), need_bytes)
            if not self._book.reserve_early(self.link, offer.transfer, early_bytes):
                return self.abort(offer.transfer, AbortCode.OVERLOADED, "too many transfers wait at this receiver")
        return events

    def place(self, header: SegmentHeader, now: float) -> memoryview | None:
        """Where a segment's payload goes; None drops it (it came before, or its transfer has ended).

        Raises:
            SegmentAwaitsOffer: the offer is still on its way on another lane, or is being decided on.
            RemoteProtocolError: the segment breaks a rule.
        """
        state = self._receiving.get(header.transfer)
        if state is not None:
            view = state.place(header)
            if self.lender is not None:
                self.lender.segment_placed(state, header.stream)
            if state.stats.first_segment_s is None:
                state.stats.first_segment_s = now
            self._heard_segment(header.transfer, header.stream, now)
            return view
        if header.transfer % 2 != self._peer_parity:
            raise RemoteProtocolError(f"a segment of transfer {header.transfer}, which is not the peer's to send")
        if header.transfer > self._highest_offer or header.transfer in self._pending:
            raise SegmentAwaitsOffer
        return None

    def not_filled(self, lent: Sequence[tuple[int, int, memoryview]]) -> None:
        """A connection is gone, and with it what was to come into these buffers, each of a stream of a transfer."""
        for transfer, stream, buffer in lent:
            if (state := self._receiving.get(transfer)) is not None:
                state.take_back(stream, [buffer])

    def segment(self, header: SegmentHeader, payload_sum: int, now: float) -> list[Event]:
        """All bytes of a segment are in the place that `place` gave; `payload_sum` is the checksum they have."""
        events: list[Event] = []
        self.segments([(header, payload_sum)], now, events)
        return events

    def segments(self, arrived: Sequence[Arrived], now: float, events: list[Event]) -> None:
        """The same for several, in order; what is due is granted once for all of them. Adds to `events`."""
        finished: dict[int, bool] = {}
        for header, payload_sum in arrived:
            state = self._receiving.get(header.transfer)
            if state is None:
                continue
            self._heard_segment(header.transfer, header.stream, now)
            owed = state.owes(header.stream)
            try:
                events += state.segment_arrived(header, payload_sum)
            except IntegrityError as error:
                events += self.abort(header.transfer, AbortCode.INTEGRITY, str(error), error)
                continue
            self._came(state, header.stream, owed, now, finished)
        self._progressed(finished)

    def runs(self, runs: Sequence[LentRun], now: float, events: list[Event]) -> None:
        """The same for segments in lent buffers, which have not been placed.

        Raises:
            RemoteProtocolError: one of them breaks a rule. What came before it counts.
        """
        finished: dict[int, bool] = {}
        try:
            for run in runs:
                transfer, stream = run[:2]
                state = self._receiving.get(transfer)
                if state is None:
                    continue
                self._heard_segment(transfer, stream, now)
                if state.stats.first_segment_s is None:
                    state.stats.first_segment_s = now
                owed = state.owes(stream)
                try:
                    state.take_run(run, events)
                except IntegrityError as error:
                    events += self.abort(transfer, AbortCode.INTEGRITY, str(error), error)
                    continue
                self._came(state, stream, owed, now, finished)
        finally:
            self._progressed(finished)

    def _came(self, state: ReceiveState, stream: int, owed: bool, now: float, finished: dict[int, bool]) -> None:
        """Segments of a stream came that was owed before, or not; notes whether a whole stream is in."""
        if owed and not state.owes(stream):
            state.stats.last_segment_s = now
            finished[state.transfer] = True
        else:
            finished.setdefault(state.transfer, False)

    def _progressed(self, finished: dict[int, bool]) -> None:
        for transfer, stream_finished in finished.items():
            if grants := self._book.progressed(self.link, transfer, stream_finished=stream_finished):
                self._send_grants(grants)

    def lend(self, streams: Iterable[tuple[int, int]]) -> None:
        """Lend buffers for what may follow on segments of these transfers and streams.

        Last, when those of decoded pages are free again.
        """
        if self.lender is None:
            return
        for transfer, stream in streams:
            if (state := self._receiving.get(transfer)) is not None:
                self.lender.lend(state, stream)

    def receive_state(self, transfer: int) -> ReceiveState | None:
        """State of an incoming transfer that has not ended."""
        return self._receiving.get(transfer)

    def decoded(self, transfer: int, pages: Sequence[int], stream: int) -> list[Event]:
        """Pages are in place with streams 0 to `stream`; ignored if the transfer has ended meanwhile."""
        state = self._receiving.get(transfer)
        if state is None:
            return []
        events: list[Event] = [*state.all_decoded(pages, stream)]
        self._book.decoded_pages += len(pages)
        if grants := self._book.progressed(self.link, transfer, stream_finished=False):
            self._send_grants(grants)
        if state.complete:
            events += self._finish_receiving(transfer)
        return events

    def heard(self, now: float, segment: SegmentHeader | None = None) -> None:
        """Bytes arrived on any lane that complete nothing yet; `segment` is the one being read there, if any.

        Without it a segment that takes longer than the progress timeout would look like a stall.
        """
        self.heard_at_s = now
        if segment is not None and segment.transfer in self._receive_progress_s:
            self._receive_progress_s[segment.transfer] = now
            if segment.stream < MAX_STREAMS:
                self._stream_heard_s[segment.stream] = now

    def _heard_segment(self, transfer: int, stream: int, now: float) -> None:
        """The same of a segment that has a place."""
        self.heard_at_s = now
        self._receive_progress_s[transfer] = now
        self._stream_heard_s[stream] = now

    def message(self, message: Message, now: float) -> list[Event]:
        """Handle a control message; see the table at the head of this file."""
        self.heard_at_s = now
        match message:
            case Credit(transfer, stream, limit):
                queue = self._sending.get(transfer)
                if queue is not None:
                    if stream >= len(queue.windows):
                        raise RemoteProtocolError(f"credit for stream {stream} of transfer {transfer}, which has none")
                    self._send_progress_s[transfer] = now
                    self.scheduler.grant(transfer, stream, limit)
            case Accept(transfer):
                if transfer in self._sending:
                    self._send_progress_s[transfer] = now
                    return [TransferAccepted(transfer)]
            case OfferMessage():
                return self._offer_arrived(message)
            case Complete(transfer):
                queue = self._sending.get(transfer)
                if queue is not None and queue.unsent:
                    raise RemoteProtocolError(f"transfer {transfer} is said to be complete, but was not sent whole")
                if self._close_sending(transfer):
                    return [TransferDelivered(transfer)]
            case Abort(transfer, code, reason):
                return self._peer_aborted(transfer, code, reason)
            case Received(lane, frames):
                if lane >= len(self._lanes):
                    raise RemoteProtocolError(f"a count of lane {lane}, which the link has not")
                self._lanes[lane].confirm(frames)
            case Request(request_id, meta):
                return self._request_arrived(request_id, meta)
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
        # A reason may quote anything, also what UTF-8 cannot carry (a file name); that must not stop an abort.
        sendable = reason[:MAX_REASON].encode(errors="replace").decode()
        self.scheduler.control(Abort(transfer, code, sendable))
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

    def is_silent(self, now: float) -> bool:
        """Rule 1: nothing was heard of the peer for the deadline."""
        # The sum that `next_timer` gives: a difference may be rounded to less than the deadline.
        return now >= self.heard_at_s + self.config.deadline_s

    def next_timer(self) -> float:
        """When `timer` wants to be called next."""
        due = [self._sent_at_s + self._ping_every_s, self.heard_at_s + self.config.deadline_s]
        if self._receiving:
            due.append(self._reassured_at_s + self._reassure_every_s)
        for times in (self._receive_progress_s, self._send_progress_s):
            if times:
                due.append(min(times.values()) + self.config.progress_timeout_s)
        return min(due)

    def timer(self, now: float) -> list[Event]:
        """Rules 2 to 4; rule 1 is the driver's, who first reads what waits in its sockets."""
        events: list[Event] = []
        if now >= self._reassured_at_s + self._reassure_every_s:
            self._reassured_at_s = now
            self._reassure(now)
        if now >= self._sent_at_s + self._ping_every_s:
            if not self.scheduler.has_control():
                self.scheduler.control(Ping())
            self._sent_at_s = now
        limit_s = self.config.progress_timeout_s
        for transfer, since_s in list(self._receive_progress_s.items()):
            if now >= since_s + limit_s:
                since_s, what = self._stalled_since(transfer, now)
                self._receive_progress_s[transfer] = since_s
                if now >= since_s + limit_s:
                    events += self.abort(transfer, AbortCode.STALLED, f"{what} for {limit_s:g} s")
        for transfer, since_s in list(self._send_progress_s.items()):
            if now >= since_s + limit_s:
                if self._sending[transfer].waits_for_peer():
                    reason = f"the receiver said nothing about transfer {transfer} for {limit_s:g} s"
                    events += self.abort(transfer, AbortCode.STALLED, reason)
                else:
                    self._send_progress_s[transfer] = now
        return events

    def _reassure(self, now: float) -> None:
        """Rule 4, as the receiver. Nothing is said while the peer does not even read what was said before."""
        decoder_moves = self._book.decoded_pages != self._decoded_pages_seen
        if decoder_moves:
            self._decoded_pages_seen = self._book.decoded_pages
            self._decoder_moved_at_s = now
        if self.scheduler.has_control():
            return
        for transfer, state in self._receiving.items():
            decoding = decoder_moves and any(window.held for window in state.windows)
            if decoding or self._book.withholds(self.link, transfer):
                self.scheduler.control(Credit(transfer, 0, state.windows[0].limit))

    def _stalled_since(self, transfer: int, now: float) -> tuple[float, str]:
        """Since when a transfer could have moved and did not, and what did not happen (rule 3)."""
        state = self._receiving[transfer]
        since_s = self._receive_progress_s[transfer]
        if state.accepted:
            for stream, window in enumerate(state.windows):
                if window.held:
                    return max(since_s, self._decoder_moved_at_s), "this receiver decoded nothing"
                if state.owes(stream):
                    class_ = state.classes[stream]
                    if not window.outstanding or self._book.is_behind(self.link, class_):
                        break
                    return max([since_s, *self._stream_heard_s[:class_]]), f"no byte of transfer {transfer} arrived"
        return now, ""

    def _request_arrived(self, request_id: str, meta: dict[str, Any]) -> list[Event]:
        if request_id in self._asked_of_us:
            raise RemoteProtocolError(f"request {request_id!r:.100} was repeated before it was answered")
        if len(self._asked_of_us) >= self.config.max_pending_requests:
            self._check_backlog()
            self.scheduler.control(Refuse(request_id, "too many requests wait for an answer"))
            return []
        self._asked_of_us.add(request_id)
        return [RequestReceived(request_id, meta)]

    def _check_backlog(self) -> None:
        if self.scheduler.control_bytes > MAX_CONTROL_BACKLOG_BYTES:
            raise RemoteProtocolError("the peer asks without reading the answers")

    def _offer_arrived(self, offer: OfferMessage) -> list[Event]:
        if offer.transfer % 2 != self._peer_parity or offer.transfer <= self._highest_offer:
            raise RemoteProtocolError(f"offer with the transfer id {offer.transfer}, which cannot be the next one")
        self._check_backlog()
        self._highest_offer = offer.transfer
        self._pending.add(offer.transfer)
        try:
            layout = CacheLayout.from_wire(offer.layout)
        except LocalProtocolError as error:
            return self.abort(offer.transfer, AbortCode.MISUSE, str(error))
        largest = self.config.segment_bytes
        if not 1 <= offer.streams <= MAX_STREAMS or not MIN_SEGMENT_BYTES <= offer.segment_bytes <= largest:
            reason = f"streams must be 1 to {MAX_STREAMS}, segment_bytes {MIN_SEGMENT_BYTES} to {largest}"
            return self.abort(offer.transfer, AbortCode.MISUSE, reason)
        if len(self._pending) + len(self._receiving) > self.config.max_pending_offers:
            return self.abort(offer.transfer, AbortCode.OVERLOADED, "too many transfers are open on this link")
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
        if self._sending.pop(transfer, None) is None:
            return False
        for record in self._lanes:
            record.forget(transfer)
        return True

    def _close_receiving(self, transfer: int) -> bool:
        was_pending = transfer in self._pending
        self._pending.discard(transfer)
        self._receive_progress_s.pop(transfer, None)
        state = self._receiving.pop(transfer, None)
        if state is not None:
            if self.lender is not None:
                self.lender.end(state)
            state.release()
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
