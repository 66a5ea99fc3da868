"""A link at run time: what users, transfers and the pump call, and its own tasks."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from lynx_net.aio.events import LinkEvents
from lynx_net.aio.pump import LoopPump, Pump
from lynx_net.aio.recovery import FIRST_PAUSE_S, LaneRecovery
from lynx_net.aio.requests import IncomingRequest
from lynx_net.aio.threads import ThreadPump
from lynx_net.aio.timeline import has_exact
from lynx_net.aio.transfer import IncomingTransfer, Offer, OutgoingTransfer
from lynx_net.errors import (
    ConnectionLostError,
    LocalProtocolError,
    LynxError,
    PeerTimeoutError,
)
from lynx_net.wire.pacing import parse_rate

if TYPE_CHECKING:
    import threading
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from lynx_net.aio.events import MakeIncoming
    from lynx_net.aio.timeline import Observer, Timeline
    from lynx_net.transport import Lane
    from lynx_net.wire.bursts import SendBytes
    from lynx_net.wire.connection import LinkCore
    from lynx_net.wire.frames import SegmentHeader
    from lynx_net.wire.grants import Grant
    from lynx_net.wire.layout import CacheLayout
    from lynx_net.wire.sendqueue import Submitted
    from lynx_net.wire.stats import LaneStats

__all__ = ["Link", "LinkParts"]

logger = logging.getLogger("lynx_net")

CLOSE_S = 0.5
"""How long a closing link waits for its farewell to leave."""

MEASURED_BYTES = 4 << 20
"""A rate is measured once so much has been sent: less may only have filled the buffers of the sockets."""

SECOND_LOOK_S = 0.02
"""Before a peer is given up, what waits in the sockets is read: it may be this process that was stopped."""


@dataclass(frozen=True, slots=True)
class LinkParts:
    """What an endpoint makes a link of.

    Attributes:
        core: the protocol.
        lanes: with their handshakes done.
        lock: the endpoint's.
        clock: seconds, steady.
        peer_incarnation: who may re-open lanes of this link.
        dial: opens the next connection of a lane, given its number and how many frames have come on it; returns it with
            the peer's count. None at the side that waits for the other to do so.
        observers: are told what happens to it.
    """

    core: LinkCore
    lanes: Sequence[Lane]
    lock: threading.RLock
    clock: Callable[[], float]
    peer_incarnation: bytes
    dial: Callable[[int, int], Awaitable[tuple[Lane, int]]] | None
    observers: Sequence[Observer] = ()


class Link:
    """All lanes between two peers. Symmetric: either side sends, receives, asks and answers.

    Made by `connect` and `serve`. Iterating a link yields the transfers its peer offers. A link lives
    until `close`, until its peer says goodbye, or until an error, which then is what every waiter gets.
    """

    def __init__(self, parts: LinkParts, make_incoming: MakeIncoming, *, accept_in_threads: bool = False) -> None:
        core, lanes = parts.core, parts.lanes
        self.core = core
        self.lock = parts.lock
        self.clock = parts.clock
        self.peer = lanes[0].peer
        self.opened_at_s = self.clock()
        self._rate_mark = (0, 0.0)  # bytes sent and busy seconds when the rate was measured last
        self._measured_bps: float | None = None
        self.lanes = list(lanes)
        """The latest connection of each lane. They are the pump's to use; others may look at them."""
        self._observers = parts.observers
        self.error: LynxError | None = None
        self.peer_incarnation = parts.peer_incarnation
        self._pump: Pump = LoopPump(self) if any(lane.plain_socket is None for lane in lanes) else ThreadPump(self)
        self._recovery = LaneRecovery(self, self._pump, parts.dial)
        self.loop = asyncio.get_running_loop()
        self.events = LinkEvents(self, self._pump, make_incoming, accept_in_threads=accept_in_threads)
        self.post = self.events.post
        """Handles events of the core, for any thread."""
        self._waking = False
        self._waiting_for_room: set[int] = set()
        self._waiting_for_few: dict[int, int] = {}
        self._failure: asyncio.Future[LynxError] = self.loop.create_future()
        self._closing = False
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_failed(self) -> bool:
        """It cannot go on; that it has ended may not have been told yet."""
        return self._failure.done()

    @property
    def lane_count(self) -> int:
        """Connections the link has when all are up."""
        return len(self.lanes)

    # ---- what users call

    def __aiter__(self) -> AsyncIterator[IncomingTransfer]:
        return self.events.transfers.iterate()

    def requests(self) -> AsyncIterator[IncomingRequest]:
        """The peer's requests, one by one, until the link ends."""
        return self.events.requests.iterate()

    async def request(self, request_id: str, meta: dict[str, Any] | None = None) -> IncomingTransfer:
        """Ask the peer for a cache and return the transfer it offers.

        Cancelling stops the waiting; a transfer that is offered for it all the same is cancelled.

        Raises:
            RequestRefusedError: the peer will not serve it.
            LocalProtocolError: the same id is being asked for already.
            LynxError: the link ended.
        """
        self._check_open()

        def send() -> None:
            with self.lock:
                self.core.request(request_id, meta or {})
                self._pump.wake()

        return await self.events.asked.ask(request_id, send)

    def refuse(self, request_id: str, reason: str) -> None:
        """Answer a request with no."""
        self._check_open()
        with self.lock:
            self.core.outgoing.refuse(request_id, reason)
            self._pump.wake()

    def open_transfer(
        self,
        request_id: str,
        layout: CacheLayout,
        *,
        codec: str,
        codec_params: dict[str, Any],
        streams: int,
        stream_names: Sequence[str] | None = None,
        meta: dict[str, Any] | None = None,
        first_token: int | None = None,
    ) -> OutgoingTransfer:
        """Offer a transfer of encoded page streams and return its sending end at once.

        A last stream called "exact" goes after the other streams of all transfers of the link.
        """
        self._check_open()
        offer = Offer(request_id, layout, codec, codec_params, streams, meta or {}, first_token)
        with self.lock:
            transfer = self.core.outgoing.offer(
                request_id=request_id,
                layout=layout,
                codec=codec,
                codec_params=codec_params,
                streams=streams,
                meta=offer.meta,
                first_token=first_token,
                now=self.clock(),
                exact=has_exact(tuple(stream_names or ())),
            )
            stats = self.core.outgoing.stats(transfer)
            outgoing = self.events.outgoing[transfer] = OutgoingTransfer(self, transfer, offer, stats, stream_names)
            self._wake_soon()
        return outgoing

    def set_rate(self, rate: str | float | None) -> None:
        """Pace what this side sends, all lanes together, to another rate from now on; None does not pace.

        Segments keep the size that the rate at the start of the link gave them.
        """
        rate_bps = parse_rate(rate)
        with self.lock:
            self.core.set_rate(rate_bps, self.clock())
            self._pump.wake()

    async def close(self, reason: str = "closed") -> None:
        """Say goodbye and close every lane; open transfers fail. Takes at most `CLOSE_S`, also when cancelled."""
        if self._task is None or self._ended.is_set():
            return
        if not self._closing:
            self._closing = True
            with self.lock:
                self.core.bye(reason)
                self._pump.wake()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._pump.flushed()
        except TimeoutError:
            logger.debug("the farewell to %s did not leave in time", self.peer)
        finally:
            self.pump_failed(ConnectionLostError(f"the link to {self.peer} was closed on this side"))
            await self._ended.wait()

    async def closed(self) -> None:
        """Wait until the link has ended; raises nothing, `error` says why."""
        await self._ended.wait()

    @property
    def lane_stats(self) -> Sequence[LaneStats]:
        """What each lane has moved since the link began, also after its end; counters that go on counting."""
        return self.core.lane_stats

    @property
    def rate_bps(self) -> float | None:
        """What this side sends in a second, in bits: as measured while it had something to send, over the last 4 MiB or
        more since this was asked before, but not more than the rate that it is paced to. None where too little
        was sent to tell and no rate is set.
        """
        pacer = self.core.scheduler.pacer
        paced_bps = None if pacer is None else pacer.rate_bps
        now = self.clock()
        busy_s = [
            now - self.opened_at_s - lane.waited_s("idle", now) - lane.waited_s("credit", now)
            for lane in self.lane_stats
        ]
        sent_bytes = sum(lane.sent_bytes for lane in self.lane_stats)
        marked_bytes, marked_s = self._rate_mark
        if sent_bytes - marked_bytes >= MEASURED_BYTES and max(busy_s) > marked_s:
            self._measured_bps = (sent_bytes - marked_bytes) * 8 / (max(busy_s) - marked_s)
            self._rate_mark = sent_bytes, max(busy_s)
        known_bps = [bps for bps in (self._measured_bps, paced_bps) if bps is not None]
        return min(known_bps, default=None)

    @property
    def driver(self) -> str:
        """What moves the bytes: "blocking threads" or "the event loop"."""
        return self._pump.driver

    def timelines(self) -> list[Timeline]:
        """Of all transfers that have not ended, as they stand now. Call it in the event loop."""
        return [transfer.timeline() for transfer in (*self.events.outgoing.values(), *self.events.incoming.values())]

    # ---- what transfers call

    def submit(self, transfer: OutgoingTransfer, streams: Iterable[Submitted]) -> None:
        """Queue streams of pages, in order. Those before an error are queued."""
        with self.lock:
            if not self.core.outgoing.is_open(transfer.id):
                self.events.drain()  # why it has ended may not have been handled yet
                transfer.delivered.done()
            queued_bytes = self.core.outgoing.submit(transfer.id, streams, self.clock())
            if queued_bytes >= self.core.outgoing.queue_bytes:
                self._waiting_for_room.add(transfer.id)
                transfer.has_room(False)
            if not self._waking:
                self._wake_soon()

    def few_queued(self, transfer: OutgoingTransfer, most_bytes: int) -> bool:
        """Whether at most so many bytes of an outgoing transfer are queued; if not, it is told when that is so."""
        with self.lock:
            if self.core.outgoing.all_queued_bytes(transfer.id) <= most_bytes:
                return True
            self._waiting_for_few[transfer.id] = most_bytes
            return False

    def _wake_soon(self) -> None:
        """What one turn of the event loop queues leaves together. In the event loop, with the lock."""
        if not self._waking:
            self._waking = True
            self.loop.call_soon(self._wake_now)

    def _wake_now(self) -> None:
        with self.lock:
            self._waking = False
            self._pump.wake()

    def page_streams(self, transfer: IncomingTransfer, pages: Sequence[int], stream: int) -> list[list[memoryview]]:
        """The encoded streams 0 to `stream` of pages that have arrived; nothing if the transfer has ended.

        Those of a page are valid until `decoded` of its last stream.
        """
        with self.lock:
            state = self.core.incoming.state(transfer.id)
            return [] if state is None else [state.page_streams(page, stream) for page in pages]

    def decoded(self, transfer: IncomingTransfer, pages: Sequence[int], stream: int) -> None:
        """Pages of an incoming transfer are in place with streams 0 to `stream`."""
        with self.lock:
            if events := self.core.incoming.decoded(transfer.id, pages, stream):
                self.post(events)

    def abort(self, transfer: int, code: int, reason: str, error: LynxError | None = None) -> None:
        """Give up a transfer of either direction. For any thread; in the event loop its waiters know on return."""
        with self.lock:
            self.post(self.core.abort(transfer, code, reason, error))
            self._pump.wake()
        if self.events.in_loop:
            self.events.drain()

    def granted(self, grant: Grant) -> None:
        """The credit book grants something to the peer; called with the lock."""
        if grant.stream < 0 and (incoming := self.events.incoming.get(grant.transfer)) is not None:
            incoming.accepted_at_s = self.clock()
        self.core.incoming.apply_grant(grant)
        self._pump.wake()

    # ---- what the pump calls, beside `post`

    def sent(self, batch: Sequence[SendBytes]) -> None:
        """Frames left; writers that waited for room go on. Called with the lock, from any thread."""
        if not self._waiting_for_room and not self._waiting_for_few:
            return
        for transfer in {chosen.transfer for chosen in batch}:
            outgoing = None if transfer is None else self.events.outgoing.get(transfer)
            if transfer is None or outgoing is None:
                continue
            few = self._waiting_for_few.get(transfer)
            if few is not None and self.core.outgoing.all_queued_bytes(transfer) <= few:
                del self._waiting_for_few[transfer]
                self.loop.call_soon_threadsafe(outgoing.has_few)
            # Half empty, so that a fast writer is woken once for many segments.
            if (
                transfer in self._waiting_for_room
                and self.core.outgoing.queued_bytes(transfer, 0) <= self.core.outgoing.queue_bytes // 2
            ):
                self._waiting_for_room.discard(transfer)
                self.loop.call_soon_threadsafe(outgoing.has_room, True)

    def lane_ended(self, index: int, error: LynxError, unfinished: Sequence[SegmentHeader]) -> None:
        """A lane's connection was lost: it is re-opened within `resume_s`, or the link fails. In the event loop."""
        with self.lock:
            self.core.incoming.lost(unfinished)
        if self.is_failed or self._closing:
            return
        if self.core.config.resume_s:
            self._recovery.begin(index, error)
        else:
            self.pump_failed(error)

    async def detach(self, lane: int) -> int:
        """The peer opens a lane anew: end its old connection and return how many frames have come on it."""
        await self._pump.detach(lane)
        return self.core.received_frames(lane)

    def attach(self, index: int, lane: Lane, peer_received: int) -> None:
        """The peer has opened a lane anew, its handshake done; it has received so many frames on it."""
        self._recovery.attach(index, lane, peer_received)

    def pump_failed(self, error: LynxError) -> None:
        """The link cannot go on; the first reason counts. Called in the event loop."""
        if not self._failure.done():
            self._failure.set_result(error)

    # ---- the link's own tasks

    def start(self) -> Self:
        """Begin to move bytes; called once by `connect` and `serve`."""
        self._task = asyncio.create_task(self._run(), name=f"lynx_net link to {self.peer}")
        return self

    async def _run(self) -> None:
        for index, lane in enumerate(self.lanes):
            self._pump.attach(index, lane)
        self._tell(lambda observer: observer.link_opened(self))
        timer = asyncio.create_task(self._timer_loop())
        error: LynxError = ConnectionLostError(f"the link to {self.peer} was closed on this side")
        try:
            error = await self._failure
        finally:
            timer.cancel()
            self._recovery.stop()
            await self._pump.stop()
            self.events.drain()
            self.error = error
            receiving = list(self.events.incoming.values())
            with self.lock:
                self.post(self.core.fail_all(error))
            self.events.drain()
            self.events.asked.all_failed(error)
            self.events.transfers.end()
            self.events.requests.end()
            for incoming in receiving:
                await incoming.closed()
            self._log_end(error)
            self._tell(lambda observer: observer.link_ended(self))
            self._ended.set()

    async def _timer_loop(self) -> None:
        deadline_s = self.core.config.deadline_s
        while True:
            if self._recovery.lanes_down:
                await asyncio.sleep(FIRST_PAUSE_S)
                continue
            with self.lock:
                due = self.core.liveness.next_timer()
            await asyncio.sleep(max(due - self.clock(), 0))
            if self._silent():
                await asyncio.sleep(SECOND_LOOK_S)
                if self._silent():
                    reason = f"{self.peer} has been silent for {deadline_s:g} s; it hangs or is unreachable"
                    self.pump_failed(PeerTimeoutError(reason))
                    return
            with self.lock:
                self.post(self.core.timer(self.clock()))

    def _silent(self) -> bool:
        if self._recovery.lanes_down:
            return False
        with self.lock:
            return self.core.liveness.is_silent(self.clock())

    # ---- what its events call

    def make_request(self, request_id: str, meta: dict[str, Any]) -> IncomingRequest:
        """Hook for subclasses with a richer request."""
        return IncomingRequest(self, request_id, meta)

    def transfer_ended(self, transfer: IncomingTransfer | OutgoingTransfer, error: LynxError | None) -> None:
        """A transfer has ended, well or not: nobody waits for room in it, and observers are told. In the event loop."""
        transfer.ended_at_s = self.clock()
        transfer.error = error
        self._waiting_for_room.discard(transfer.id)
        self._waiting_for_few.pop(transfer.id, None)
        moved_nothing = error is None and not transfer.stats.total_bytes
        if not moved_nothing and not self._observers and not logger.isEnabledFor(logging.INFO):
            return
        timeline = transfer.timeline()
        if moved_nothing:
            logger.warning("%s, but it moved nothing: its layout has no values", timeline.describe())
        else:
            logger.info("%s", timeline.describe())
        self._tell(lambda observer: observer.transfer_ended(self, timeline))

    # ---- what is told of it

    def _log_end(self, error: LynxError) -> None:
        up_s = max(self.clock() - self.opened_at_s, 1e-9)
        sent, received = (
            f"{count / 1e6:.3f} MB ({count * 8 / up_s / 1e6:.1f} Mbit/s)"
            for count in (
                sum(lane.sent_bytes for lane in self.lane_stats),
                sum(lane.received_bytes for lane in self.lane_stats),
            )
        )
        logger.info(
            "link to %s ended after %.3f s over %d lanes: sent %s, received %s; %s",
            *(self.peer, up_s, len(self.lanes), sent, received, error),
        )

    def _tell(self, what: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                what(observer)
            except Exception:
                logger.exception("%r failed; the link to %s goes on", observer, self.peer)

    # ---- small things

    def _check_open(self) -> None:
        if self.error is not None:
            raise self.error
        if self._closing:
            raise LocalProtocolError(f"the link to {self.peer} is being closed")
