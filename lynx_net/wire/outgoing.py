"""The transfers that one side of a link sends, and what its lanes send next.

States of a transfer here:  OFFERED -> OPEN -> DELIVERED,  and from the first two -> FAILED

One that the initial credit covers goes from OFFERED to DELIVERED: its receiver says nothing before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lynx_net.errors import LocalProtocolError, RemoteProtocolError
from lynx_net.wire.bursts import SendBytes
from lynx_net.wire.events import Event, RequestReceived, TransferAccepted, TransferDelivered
from lynx_net.wire.messages import MAX_STREAMS, OfferMessage, Refuse
from lynx_net.wire.sendqueue import NO_DEADLINE, SendQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lynx_net.wire.config import LinkConfig
    from lynx_net.wire.lanes import LaneRecord
    from lynx_net.wire.layout import CacheLayout
    from lynx_net.wire.liveness import Liveness
    from lynx_net.wire.scheduler import NothingToSend, Scheduler, WaitUntil
    from lynx_net.wire.sendqueue import Submitted
    from lynx_net.wire.stats import LaneStats, TransferStats, WaitReason

__all__ = ["Outgoing"]


class Outgoing:
    """The sending half of a `LinkCore`, whose parts it shares.

    Args:
        initiator: True at the side that connected; it numbers its transfers oddly, the other evenly.
        segment_bytes: of the transfers offered here.
        peer_initial_credit: from the peer's Hello.
    """

    def __init__(
        self,
        *,
        initiator: bool,
        config: LinkConfig,
        segment_bytes: int,
        peer_initial_credit: int,
        scheduler: Scheduler,
        liveness: Liveness,
        lanes: Sequence[LaneRecord],
        lane_stats: Sequence[LaneStats],
    ) -> None:
        self.segment_bytes = segment_bytes
        self.queue_bytes = config.send_queue_bytes * max(len(lanes) // 2, 1)
        """More queued than this in stream 0 of a transfer, and its writer should wait."""
        self._config = config
        self._peer_initial_credit = peer_initial_credit
        self._scheduler = scheduler
        self._liveness = liveness
        self._lanes = lanes
        self._lane_stats = lane_stats
        self._next_id = 1 if initiator else 2
        self._queues: dict[int, SendQueue] = {}
        self._asked_of_us: set[str] = set()

    # ---- for the application

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
        self._scheduler.control(
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
        self._queues[transfer] = queue
        self._liveness.sending[transfer] = now
        self._scheduler.open(queue)
        return transfer

    def submit(self, transfer: int, streams: Iterable[Submitted], now: float) -> int:
        """Queue streams of pages, in order; their data must stay unchanged until the transfer has ended.

        Returns the bytes of stream 0 that wait to be sent.

        Of what is queued in a stream the lowest rank goes first, equal ones in the order in which they came; a checksum
        is that of the data, if it is known (`Scheduler.submit`).

        Raises:
            LocalProtocolError: the transfer has ended, has no such page, or it was submitted before. Those before that
                one are queued.
            TypeError: the buffer is not contiguous.
        """
        queue = self._queues.get(transfer)
        if queue is None:
            raise LocalProtocolError(f"transfer {transfer} has ended")
        if not queue.waits_for_peer():
            self._liveness.sending[transfer] = now
        for page, stream, data, rank, checksum in streams:
            self._scheduler.submit(transfer, page, stream, data, rank, checksum)
        return queue.queued_bytes[0]

    def transfers(self) -> list[int]:
        """Ids of those that have not ended."""
        return list(self._queues)

    def is_open(self, transfer: int) -> bool:
        """Whether a transfer has not ended."""
        return transfer in self._queues

    def queued_bytes(self, transfer: int, stream: int) -> int:
        """Bytes of a stream that wait to be sent; 0 once the transfer has ended."""
        queue = self._queues.get(transfer)
        return 0 if queue is None else queue.queued_bytes[stream]

    def all_queued_bytes(self, transfer: int) -> int:
        """Bytes of all streams that wait to be sent; 0 once the transfer has ended."""
        queue = self._queues.get(transfer)
        return 0 if queue is None else sum(queue.queued_bytes)

    def stats(self, transfer: int) -> TransferStats:
        """What is counted of an open transfer; the object lives on when the transfer has ended."""
        return self._queues[transfer].stats

    def refuse(self, request_id: str, reason: str) -> None:
        """Answer a request of the peer with no."""
        self._asked_of_us.discard(request_id)
        self._scheduler.control(Refuse(request_id, reason))

    # ---- for the lanes

    def why_nothing(self) -> WaitReason:
        """Why a lane that got `NothingToSend` has nothing to send."""
        return "credit" if any(any(queue.pages) for queue in self._queues.values()) else "idle"

    def has_next(self, lane: int, now: float) -> bool:
        """Whether `next_send` would give this lane a segment now, were it not for control frames."""
        return bool(self._lanes[lane].resend) or self._scheduler.has_next(lane, now)

    def send_small(self, room_bytes: int, now: float) -> list[SendBytes]:
        """What `next_send` would answer for lane 0, as long as it is small (`Scheduler.small`) and fits into the room.

        Nothing while the lane sends frames again.
        """
        record, stats = self._lanes[0], self._lane_stats[0]
        if record.resend or not (chosen := self._scheduler.small(room_bytes, now)):
            return []
        record.sent_more(chosen)
        self._liveness.sent_at_s = now
        stats.sent_payload_bytes += sum([len(one.data) for one in chosen])
        for one in chosen:
            if one.transfer is None:
                stats.sent_control_frames += 1
            else:
                stats.sent_segments += 1
                self._liveness.sending[one.transfer] = now
        return chosen

    def batch_bytes(self, most_bytes: int) -> int:
        """How many bytes a lane may take together: `most_bytes`, but no more than its share of what can be sent.

        What others are sending counts as theirs. A segment is never too much.
        """
        if most_bytes <= self.segment_bytes:
            return self.segment_bytes
        lanes = len(self._lanes)
        taken_bytes = self._scheduler.running_bytes
        share_bytes = (self._scheduler.sendable_bytes(most_bytes * lanes) + taken_bytes) // lanes
        return max(min(share_bytes, most_bytes), self.segment_bytes)

    def next_send(self, lane: int, now: float) -> SendBytes | WaitUntil | NothingToSend:
        """What this lane sends now; see the scheduler's rules."""
        record, stats = self._lanes[lane], self._lane_stats[lane]
        chosen: SendBytes | WaitUntil | NothingToSend
        if record.resend:
            chosen = self._scheduler.again(record.resend[0], now)
            if isinstance(chosen, SendBytes):
                record.resend.popleft()
                stats.resent_frames += 1
                if chosen.transfer is not None:
                    self._queues[chosen.transfer].stats.resent_segments += 1
        else:
            chosen = self._scheduler.next(lane, now)
            if isinstance(chosen, SendBytes):
                record.sent(chosen)
        if isinstance(chosen, SendBytes):
            self._liveness.sent_at_s = now
            stats.sent_payload_bytes += len(chosen.data)
            if chosen.transfer is None:
                stats.sent_control_frames += 1
            else:
                stats.sent_segments += 1
                self._liveness.sending[chosen.transfer] = now
        return chosen

    def send_run(self, lane: int, room_bytes: int, most: int, now: float) -> list[SendBytes]:
        """Segments that `next_send` would answer the next times (`Scheduler.run`).

        Until `run_ended` it is asked nothing more for this lane. They count when that says that they have been sent.
        """
        record = self._lanes[lane]
        if record.resend or not (chosen := self._scheduler.run(lane, room_bytes, most, now)):
            return []
        record.sent_more(chosen)
        for transfer in {one.transfer for one in chosen}:
            assert transfer is not None
            self._liveness.sending[transfer] = now
        return chosen

    def run_ended(self, lane: int, run: Sequence[SendBytes], sent: int, now: float) -> None:
        """Of the run of a lane the first `sent` segments were sent; the others are to be chosen again."""
        stats = self._lane_stats[lane]
        stats.sent_payload_bytes += sum([len(one.data) for one in run[:sent]])
        stats.sent_segments += sent
        self._lanes[lane].not_sent(len(run) - sent)
        self._scheduler.run_ended(lane, run[sent:], now)

    # ---- for the link: what the peer says, and ends

    def accepted(self, transfer: int, now: float) -> list[Event]:
        """The peer has reserved the memory of a transfer."""
        if transfer not in self._queues:
            return []
        self._liveness.sending[transfer] = now
        return [TransferAccepted(transfer)]

    def credit(self, transfer: int, stream: int, limit: int, now: float) -> None:
        """The peer raises a limit, or repeats one."""
        queue = self._queues.get(transfer)
        if queue is None:
            return
        if stream >= len(queue.windows):
            raise RemoteProtocolError(f"credit for stream {stream} of transfer {transfer}, which has none")
        self._liveness.sending[transfer] = now
        self._scheduler.grant(transfer, stream, limit)

    def completed(self, transfer: int) -> list[Event]:
        """The peer has everything decoded in place."""
        queue = self._queues.get(transfer)
        if queue is not None and queue.unsent:
            raise RemoteProtocolError(f"transfer {transfer} is said to be complete, but was not sent whole")
        return [TransferDelivered(transfer)] if self.close(transfer) else []

    def requested(self, request_id: str, meta: dict[str, Any]) -> list[Event]:
        """The peer asks for a cache."""
        if request_id in self._asked_of_us:
            raise RemoteProtocolError(f"request {request_id!r:.100} was repeated before it was answered")
        if len(self._asked_of_us) >= self._config.max_pending_requests:
            self._scheduler.check_backlog()
            self._scheduler.control(Refuse(request_id, "too many requests wait for an answer"))
            return []
        self._asked_of_us.add(request_id)
        return [RequestReceived(request_id, meta)]

    def close(self, transfer: int) -> bool:
        """A transfer is over, and its buffers are used no more; False if it is none of these."""
        if self._queues.pop(transfer, None) is None:
            return False
        self._scheduler.close(transfer)
        del self._liveness.sending[transfer]
        for record in self._lanes:
            record.forget(transfer)
        return True

    def stalled(self, now: float) -> list[tuple[int, str]]:
        """Transfers of which the peer says nothing, and that in words (rule 4 of liveness.py)."""
        return self._liveness.stalled_outgoing(now, lambda transfer: self._queues[transfer].waits_for_peer())
