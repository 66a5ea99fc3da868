"""One side of a link as a state machine: messages, segments and time in; events and bytes to send out.

Its halves are `Outgoing` and `Incoming`; the rules of time are in liveness.py, those of sending in scheduler.py, of
receiving in receiving.py, of credit in grants.py, of lost connections in lanes.py.

    message        at its receiver
    -------------  ------------------------------------------------------------------------------------------
    Offer          id must be of the peer's parity and above all before it; PENDING, or refused with Abort
    Accept         OFFERED -> OPEN; for an unknown or ended transfer: ignored (it crossed an Abort)
    Credit         raises a limit; ignored if the transfer has ended. One that raises nothing says: not forgotten
    Complete       OFFERED or OPEN -> DELIVERED, only when everything was sent; ignored if it has ended
    Abort          any open state -> FAILED, with the peer's reason; ignored if it has ended
    Request        an event for the application, which answers with an Offer of that request id or a Refuse;
                   refused here if too many wait for an answer; the id must not wait for one already
    Refuse         an event for the application
    Received       frames of a lane that need not be remembered any more (lanes.py)
    Ping           nothing; hearing it was its purpose
    Bye            the peer will send no more; what is still open fails
    Hello, Proof,  only before the link is up; here a RemoteProtocolError
    Reject
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lynx_net.errors import LynxError, RemoteProtocolError, TransferAbortedError
from lynx_net.wire.events import Event, PeerClosed, RequestRefused, TransferFailed
from lynx_net.wire.incoming import Incoming
from lynx_net.wire.lanes import LaneRecord
from lynx_net.wire.liveness import Liveness
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
    abort_message,
)
from lynx_net.wire.outgoing import Outgoing
from lynx_net.wire.pacing import TokenBucket
from lynx_net.wire.scheduler import Scheduler
from lynx_net.wire.stats import LaneStats

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from lynx_net.wire.config import LinkConfig
    from lynx_net.wire.grants import CreditBook, Grant

__all__ = ["LinkCore"]


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
            calls `incoming.apply_grant` of the link that the grant names.
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
        self.config = config
        self.scheduler = Scheduler(
            None if rate_bps is None else TokenBucket(rate_bps, now), urgent_lane=config.urgent_lane and lanes > 1
        )
        self.liveness = Liveness(
            deadline_s=config.deadline_s,
            peer_deadline_s=peer_deadline_s,
            progress_timeout_s=config.progress_timeout_s,
            now=now,
        )
        self.lane_stats = [LaneStats() for _ in range(lanes)]
        self.resent_frames = 0
        """Frames sent again because a connection was lost."""
        self._lanes = [LaneRecord() for _ in range(lanes)]
        self.outgoing = Outgoing(
            initiator=initiator,
            config=config,
            segment_bytes=min(config.segment_bytes_at(rate_bps), peer_segment_bytes),
            peer_initial_credit=peer_initial_credit,
            scheduler=self.scheduler,
            liveness=self.liveness,
            lanes=self._lanes,
            lane_stats=self.lane_stats,
        )
        self.incoming = Incoming(
            link=link,
            lanes=lanes,
            initiator=initiator,
            config=config,
            scheduler=self.scheduler,
            liveness=self.liveness,
            book=book,
            route_grant=route_grant,
        )

    def message(self, message: Message, now: float) -> list[Event]:
        """Handle a control message; see the table at the head of this file."""
        self.liveness.heard_at_s = now
        match message:
            case Credit(transfer, stream, limit):
                self.outgoing.credit(transfer, stream, limit, now)
            case Accept(transfer):
                return self.outgoing.accepted(transfer, now)
            case OfferMessage():
                return self.incoming.offered(message)
            case Complete(transfer):
                return self.outgoing.completed(transfer)
            case Abort(transfer, code, reason):
                return self._peer_aborted(transfer, code, reason)
            case Received(lane, frames):
                if lane >= len(self._lanes):
                    raise RemoteProtocolError(f"a count of lane {lane}, which the link has not")
                self._lanes[lane].confirm(frames)
            case Request(request_id, meta):
                return self.outgoing.requested(request_id, meta)
            case Refuse(request_id, reason):
                return [RequestRefused(request_id, reason)]
            case Bye(reason):
                return [PeerClosed(reason)]
            case Ping():
                pass
            case _:
                raise RemoteProtocolError(f"a {message.tag} message on a link that is already up")
        return []

    def request(self, request_id: str, meta: dict[str, Any]) -> None:
        """Ask the peer for a cache."""
        self.scheduler.control(Request(request_id, meta))

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

    def lane_reopened(self, lane: int, peer_received: int, now: float) -> None:
        """A lane has a new connection; the peer has received so many frames on it before.

        Raises:
            RemoteProtocolError: that cannot be.
        """
        self.resent_frames += self._lanes[lane].reopen(peer_received)
        self.lane_stats[lane].reopened += 1
        self.liveness.lane_reopened(now)

    # ---- ends and time

    def open_transfers(self) -> list[int]:
        """Ids of all transfers that have not ended."""
        return [*self.outgoing.transfers(), *self.incoming.transfers()]

    def abort(self, transfer: int, code: int, reason: str, error: LynxError | None = None) -> list[Event]:
        """Give up a transfer of either direction and tell the peer; nothing happens if it has ended."""
        if not self.outgoing.close(transfer):
            return self.incoming.abort(transfer, code, reason, error)
        self.scheduler.control(abort_message(transfer, code, reason))
        return [TransferFailed(transfer, error if error is not None else TransferAbortedError(reason))]

    def _peer_aborted(self, transfer: int, code: int, reason: str) -> list[Event]:
        if not self._close(transfer):
            return []
        if code == AbortCode.CANCELLED:
            reason = f"cancelled by the peer: {reason}"
        return [TransferFailed(transfer, TransferAbortedError(reason))]

    def fail_all(self, error: LynxError) -> list[Event]:
        """The link is gone: end every transfer with this error, and take its claims out of the credit book."""
        failed = self.open_transfers()
        for transfer in failed:
            self._close(transfer)
        return [TransferFailed(transfer, error) for transfer in failed]

    def _close(self, transfer: int) -> bool:
        return self.outgoing.close(transfer) or self.incoming.close(transfer)

    def timer(self, now: float) -> list[Event]:
        """Rules 2 to 4 of liveness.py, at its `next_timer`; rule 1 is the driver's, who first reads what waits in its
        sockets.
        """
        if self.liveness.reassurance_due(now):
            self.incoming.reassure(now)
        if self.liveness.ping_due(now) and not self.scheduler.has_control():
            self.scheduler.control(Ping())
        events: list[Event] = []
        for half in (self.incoming, self.outgoing):
            for transfer, reason in half.stalled(now):
                events += self.abort(transfer, AbortCode.STALLED, reason)
        return events
