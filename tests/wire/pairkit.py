"""Two protocol cores wired together without sockets: lanes are byte strings, time is a number, applications obey."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

from wirekit import LAYOUT, NEED_BYTES, STREAMS, page_bytes, page_sizes

from lynx_net.wire.bursts import SendBytes, seal
from lynx_net.wire.config import LinkConfig
from lynx_net.wire.connection import LinkCore
from lynx_net.wire.events import (
    Event,
    LayerReady,
    OfferReceived,
    PageArrived,
    PeerClosed,
    RequestReceived,
    RequestRefused,
    StreamReady,
    TransferComplete,
    TransferDelivered,
    TransferFailed,
)
from lynx_net.wire.framereader import FrameReader
from lynx_net.wire.frames import ControlFrame, SegmentFrame, SegmentHeader, SegmentStart, checksum
from lynx_net.wire.grants import CreditBook, Grant
from lynx_net.wire.incoming import SegmentAwaitsOffer
from lynx_net.wire.messages import decode_message

CONFIG = LinkConfig(
    deadline_s=6,
    progress_timeout_s=10_000,
    segment_bytes=4096,
    initial_credit_bytes=5000,
    anchor_window_bytes=8192,
    residual_window_bytes=8192,
    memory_bytes=2 * NEED_BYTES + 1,
    max_pending_offers=6,
    max_pending_requests=4,
)

Ended = TransferComplete | TransferDelivered | TransferFailed


@dataclass
class Wire:
    """One direction of one lane: bytes on their way, and the reader at their end."""

    lane: int
    data: bytearray
    reader: FrameReader
    waiting: SegmentHeader | None = None
    """A segment whose place is not known yet; nothing behind it can be read."""


class Side:
    """A core and an application that does what the test tells it, checking every event it gets."""

    def __init__(self, *, initiator: bool, lanes: int, config: LinkConfig, peer: LinkConfig) -> None:
        self.book = CreditBook(config.memory_bytes)
        self.now = 0.0
        self.core = LinkCore(
            link="the link",
            lanes=lanes,
            initiator=initiator,
            config=config,
            peer_segment_bytes=peer.segment_bytes,
            peer_initial_credit=peer.initial_credit_bytes,
            peer_deadline_s=peer.deadline_s,
            book=self.book,
            route_grant=self.route,
            rate_bps=None,
            now=0.0,
        )
        self.out = [Wire(lane, bytearray(), FrameReader()) for lane in range(lanes)]
        self.inbound: list[Wire] = []
        self.offers: list[OfferReceived] = []
        self.to_decode: list[PageArrived] = []
        self.handed_out: set[tuple[int, int, int]] = set()
        self.ready: set[LayerReady | StreamReady] = set()
        self.ended: dict[int, Ended] = {}
        self.requests: list[str] = []
        self.refused: list[str] = []
        self.log: list[Event] = []
        self.unsubmitted: dict[int, list[tuple[int, int]]] = {}
        self.runs: dict[int, tuple[list[SendBytes], int]] = {}
        """Of lanes that send some: the run, and how many of it have left."""

    def route(self, grant: Grant) -> None:
        assert grant.link == "the link"
        self.core.incoming.apply_grant(grant)

    # ---- the application

    def offer(
        self,
        *,
        request_id: str = "r",
        submit: bool = True,
        layout: Any = LAYOUT,
        streams: int = STREAMS,
        exact: bool = False,
    ) -> int:
        transfer = self.core.outgoing.offer(
            request_id=request_id,
            layout=layout,
            codec="none",
            codec_params={},
            streams=streams,
            meta={},
            first_token=None,
            now=self.now,
            exact=exact,
        )
        pages = range(layout.page_count)
        self.unsubmitted[transfer] = [(page, stream) for stream in range(streams) for page in pages]
        while submit and self.unsubmitted[transfer]:
            self.submit(transfer)
        return transfer

    def submit(self, transfer: int) -> None:
        page, stream = self.unsubmitted[transfer].pop(0)
        data = memoryview(page_bytes(transfer, page, stream))
        self.core.outgoing.submit(transfer, [(page, stream, data, (), None)], self.now)

    def take(self, index: int = 0, need_bytes: int = NEED_BYTES, *, exact: bool = False) -> int:
        event = self.offers.pop(index)
        streams = event.offer.streams
        sizes = partial(page_sizes, streams=streams)
        need_bytes = need_bytes * streams // STREAMS
        self.handle(self.core.incoming.take(event.offer, event.layout, sizes, need_bytes, self.now, exact=exact))
        return event.offer.transfer

    def decode(self, index: int = 0) -> None:
        event = self.to_decode.pop(index)
        state = self.core.incoming.state(event.transfer)
        if state is not None:
            for stream, data in enumerate(state.page_streams(event.page, event.stream)):
                assert bytes(data) == page_bytes(event.transfer, event.page, stream)
        self.handle(self.core.incoming.decoded(event.transfer, [event.page], event.stream))

    def abort(self, transfer: int, code: int = 1) -> None:
        self.handle(self.core.abort(transfer, code, "enough"))

    def timer(self) -> None:
        self.handle(self.core.timer(self.now))

    def handle(self, events: list[Event]) -> None:
        """Checks what holds for every run: each page once and in order, each readiness once, one end, then silence."""
        for event in events:
            self.log.append(event)
            match event:
                case OfferReceived():
                    self.offers.append(event)
                case PageArrived(transfer, page, stream):
                    assert transfer not in self.ended
                    assert (transfer, page, stream) not in self.handed_out
                    assert stream == 0 or (transfer, page, stream - 1) in self.handed_out
                    self.handed_out.add((transfer, page, stream))
                    self.to_decode.append(event)
                case LayerReady() | StreamReady():
                    assert event.transfer not in self.ended
                    assert event not in self.ready
                    self.ready.add(event)
                case TransferComplete() | TransferDelivered() | TransferFailed():
                    assert event.transfer not in self.ended, f"{event} after {self.ended[event.transfer]}"
                    self.ended[event.transfer] = event
                    self.offers = [offer for offer in self.offers if offer.offer.transfer != event.transfer]
                case RequestReceived(request_id):
                    self.requests.append(request_id)
                case RequestRefused(request_id):
                    self.refused.append(request_id)
                case PeerClosed():
                    pass

    # ---- the driver

    def send(self, lane: int, run_bytes: int = 0) -> bool:
        """Put the next frame of a lane on its wire, perhaps one of a run of so many bytes; False if there is none."""
        run, sent = self.runs.get(lane, ([], 0))
        if self.core.scheduler.stop_byte(lane)[0]:
            self.end_run(lane)
            run = []
        chosen = run[sent] if run else self.core.outgoing.next_send(lane, self.now)
        if not isinstance(chosen, SendBytes):
            return False
        for buffer in seal([chosen], not self.core.outgoing.has_next(lane, self.now)):
            self.out[lane].data += buffer
        if run:
            self.runs[lane] = run, sent + 1
            if sent + 1 == len(run):
                self.end_run(lane)
        elif run := self.core.outgoing.send_run(lane, run_bytes, 100, self.now):
            self.runs[lane] = run, 0
        return True

    def end_run(self, lane: int, *, lost: bool = False) -> None:
        """What a stopped lane has not sent goes back; what a lost one had is for it to send again."""
        if lane in self.runs:
            run, sent = self.runs.pop(lane)
            self.core.outgoing.run_ended(lane, run, len(run) if lost else sent, self.now)

    def receive(self, lane: int, count: int) -> bool:
        """Read up to `count` bytes of a lane; False if nothing can be read."""
        wire = self.inbound[lane]
        if wire.waiting is not None and not self.place(wire, wire.waiting):
            return False
        taken = min(count, len(wire.data))
        if not taken:
            return False
        rest = bytes(wire.data[:taken])
        used = 0
        while used < taken:
            self.core.liveness.heard(self.now, wire.reader.segment)
            filled = 0
            for view in wire.reader.buffers():
                part = rest[used + filled : used + filled + view.nbytes]
                view[: len(part)] = part
                filled += len(part)
            used += filled
            for frame in wire.reader.received(filled):
                match frame:
                    case ControlFrame(payload):
                        self.handle(self.core.message(decode_message(payload), self.now))
                        self.core.frames_received(lane, 1)
                    case SegmentStart(header):
                        if not self.place(wire, header):
                            del wire.data[:used]
                            return True
                    case SegmentFrame(header, payload):
                        self.arrive(header, payload)
                        self.core.frames_received(lane, 1)
        del wire.data[:used]
        return True

    def arrive(self, header: SegmentHeader, payload: memoryview | None) -> None:
        """A segment is in its place, or was dropped."""
        if payload is not None:
            self.handle(self.core.incoming.segment(header, checksum(payload), self.now))

    def place(self, wire: Wire, header: SegmentHeader) -> bool:
        try:
            view = self.core.incoming.place(header, self.now)
        except SegmentAwaitsOffer:
            wire.waiting = header
            return False
        wire.waiting = None
        for done in wire.reader.deliver_to(view):
            self.arrive(done.header, done.payload)
            self.core.frames_received(wire.lane, 1)
        return True


class Pair:
    """Two sides and the lanes between them."""

    def __init__(
        self, lanes: int = 1, seed: int = 0, config: LinkConfig = CONFIG, peer: LinkConfig | None = None
    ) -> None:
        self.random = random.Random(seed)
        self.lanes = lanes
        self.left = Side(initiator=True, lanes=lanes, config=config, peer=peer or config)
        self.right = Side(initiator=False, lanes=lanes, config=peer or config, peer=config)
        self.left.inbound, self.right.inbound = self.right.out, self.left.out
        self.sides = (self.left, self.right)

    def advance(self, seconds: float) -> None:
        for side in self.sides:
            side.now += seconds

    def move(self) -> bool:
        """One frame is sent or some bytes are read, on some lane of some side; False if nothing can move."""
        moves = [(side, lane, act) for side in self.sides for lane in range(self.lanes) for act in ("send", "receive")]
        self.random.shuffle(moves)
        for side, lane, act in moves:
            if act == "send":
                if side.send(lane, self.random.choice((0, 0, 10_000, 100_000))):
                    return True
            elif side.receive(lane, self.random.choice((1, 48, 700, 5000, 20_000))):
                return True
        return False

    def lose(self, lane: int) -> None:
        """The connection of a lane is lost with all that was on its way, and the lane is opened again."""
        for side in self.sides:
            side.end_run(lane, lost=True)
            wire = side.inbound[lane]
            side.core.incoming.lost(wire.reader.unfinished)
            wire.data.clear()
            wire.reader, wire.waiting = FrameReader(), None
        for side, other in (self.sides, self.sides[::-1]):
            side.core.lane_reopened(lane, other.core.received_frames(lane), side.now)

    def settle(self, *, take: bool = True, decode: bool = True) -> None:
        """Move and let both applications work until nothing happens any more."""
        while True:
            moved = self.move()
            for side in self.sides:
                while take and side.offers:
                    side.take()
                    moved = True
                while decode and side.to_decode:
                    side.decode(self.random.randrange(len(side.to_decode)))
                    moved = True
            if not moved:
                return

    def check_empty(self) -> None:
        """Nothing is left of any transfer, on either side."""
        for side in self.sides:
            assert side.core.open_transfers() == []
            assert not side.core.liveness.receiving
            assert not side.core.liveness.sending
            assert side.book.reserved_bytes == 0
            assert side.book.early_reserved_bytes == 0
            assert not side.book._entries
            assert not side.book._waiting
            assert not any(side.book._owing.values())
            assert not side.core.scheduler._queues
            assert not side.core.scheduler.has_work()
            assert not side.core.scheduler._order
            assert not side.core.scheduler.running_bytes
            for record in side.core._lanes:
                assert not record.resend
                assert all(frame.transfer is None for frame in record._log)
