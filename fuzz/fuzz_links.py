"""Breaks links between two cores that really talk: `python fuzz/fuzz_links.py --seconds 60 --seed 1`.

Two sides greet each other, offer, send, grant, decode and abort over one to three lanes that are lost and opened again
now and then, and somebody sits between them.
What he does depends on the run: nothing ("honest": everything must arrive), flip bits and cut off ("noise": what is
handed out for decoding must be what was sent), or change frames and make their checksums right again, repeat them,
leave them out and move them to other lanes ("hostile"). The invariant of fuzz_frames.py holds for both sides: a
RemoteProtocolError or a correct parse, never anything else, and never more memory than was reserved.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from fuzz_frames import (
    CONFIG,
    Frame,
    InvariantBroken,
    Target,
    change_bytes,
    change_field,
    change_message,
    change_size,
    sizes_of,
    split,
)

from lynx_net.aio.handshake import answer_hello, make_hello
from lynx_net.errors import ConnectionLostError, HandshakeError, LocalProtocolError, RemoteProtocolError
from lynx_net.transport import Lane
from lynx_net.wire.bursts import SendBytes, seal
from lynx_net.wire.connection import LinkCore
from lynx_net.wire.events import Event, OfferReceived, PageArrived, RequestReceived, TransferDelivered
from lynx_net.wire.framereader import FrameReader
from lynx_net.wire.frames import ControlFrame, SegmentFrame, SegmentHeader, SegmentStart, pack_control
from lynx_net.wire.incoming import SegmentAwaitsOffer
from lynx_net.wire.layout import CacheLayout
from lynx_net.wire.messages import Hello, decode_message, encode_message

if TYPE_CHECKING:
    from collections.abc import Sequence

STREAMS = 2
LAYOUT = CacheLayout(layers=1, tokens=3, heads=1, key_size=3, value_size=2, page_tokens=2)
STEPS = 400
MODES = ("honest", "noise", "noise", "hostile", "hostile", "hostile")


def page_bytes(transfer: int, page: int, stream: int) -> bytes:
    """What a page stream contains: different for each."""
    size = min(sizes_of(page, STREAMS)[stream])
    return (bytes((transfer % 251, page % 251, stream, 7, 11)) * (size // 5 + 1))[:size]


@dataclass(eq=False)
class Wire:
    """One direction of one lane."""

    lane: int
    data: bytearray = field(default_factory=bytearray)
    reader: FrameReader = field(default_factory=FrameReader)
    waiting: SegmentHeader | None = None


class Side(Target):
    """A core whose application sends pages it can recognise."""

    def __post_init__(self) -> None:
        self.trusts_content = True
        self.delivered: set[int] = set()
        self.offered: list[int] = []
        self.waiting_requests: list[str] = []

    def greet(self, hello: Hello, *, initiator: bool, lanes: int) -> None:
        """Begin the link with what the peer's greeting says."""
        self.core = LinkCore(
            link="fuzz",
            lanes=lanes,
            initiator=initiator,
            config=CONFIG,
            peer_segment_bytes=hello.segment_bytes,
            peer_initial_credit=hello.initial_credit,
            peer_deadline_s=hello.deadline_ms / 1000,
            book=self.book,
            route_grant=self.route,
            rate_bps=None,
            now=self.now,
        )

    def offer(self, request_id: str = "r") -> None:
        transfer = self.core.outgoing.offer(
            request_id=request_id,
            layout=LAYOUT,
            codec="none",
            codec_params={},
            streams=STREAMS,
            meta={},
            first_token=None,
            now=self.now,
        )
        self.offered.append(transfer)
        for stream in range(STREAMS):
            for page in range(LAYOUT.page_count):
                data = memoryview(page_bytes(transfer, page, stream))
                self.core.outgoing.submit(transfer, [(page, stream, data, (), None)], self.now)

    def application(self, *, honest: bool) -> None:
        """One thing that an application may do at any time."""
        match self.rng.randrange(8):
            case 0 | 1 if len(self.offered) < 3:
                self.offer()
            case 2:
                self.core.request(f"request {self.now}", {}) if not honest else None
            case 3 if self.waiting_requests:
                self.core.outgoing.refuse(self.waiting_requests.pop(), "no")
            case 4 if not honest and self.core.open_transfers():
                self.handle(self.core.abort(self.rng.choice(self.core.open_transfers()), 1, "enough"))
            case 5:
                self.now += 0.01 if honest else self.rng.choice((0.1, 3, 40))
                self.handle(self.core.timer(self.now))

    def handle(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case OfferReceived(offer, layout) if layout == LAYOUT and offer.streams == STREAMS:
                    need = sum(max(size) for page in range(layout.page_count) for size in sizes_of(page, STREAMS))
                    sizes = partial(sizes_of, streams=STREAMS)
                    self.handle(self.core.incoming.take(offer, layout, sizes, need, self.now))
                case PageArrived(transfer, page, stream):
                    state = self.core.incoming.state(transfer)
                    if state is None:
                        continue
                    for index, data in enumerate(state.page_streams(page, stream)):
                        if self.trusts_content and bytes(data) != page_bytes(transfer, page, index):
                            raise InvariantBroken(f"wrong bytes in stream {index} of page {page} of {transfer}")
                    self.handle(self.core.incoming.decoded(transfer, [page], stream))
                case RequestReceived(request_id):
                    self.waiting_requests.append(request_id)
                case TransferDelivered(transfer):
                    self.delivered.add(transfer)
                case _:
                    super().handle([event])

    def read(self, wire: Wire, count: int) -> None:
        """Take some bytes of a wire."""
        if wire.waiting is not None:
            self.place(wire, wire.waiting)
            return
        taken = 0
        views = wire.reader.buffers()
        for view in views:
            part = wire.data[taken : min(taken + view.nbytes, count)]
            view[: len(part)] = part
            taken += len(part)
        del wire.data[:taken]
        self.core.liveness.heard(self.now, wire.reader.segment)
        for frame in wire.reader.received(taken):
            match frame:
                case ControlFrame(payload):
                    self.handle(self.core.message(decode_message(payload), self.now))
                    self.core.frames_received(wire.lane, 1)
                case SegmentStart(header):
                    self.place(wire, header)
                case SegmentFrame(header, payload):
                    self.arrive(header, payload)
                    self.core.frames_received(wire.lane, 1)
        self.check_memory()

    def place(self, wire: Wire, header: SegmentHeader) -> None:
        try:
            view = self.core.incoming.place(header, self.now)
        except SegmentAwaitsOffer:
            wire.waiting = header
            return
        wire.waiting = None
        for done in wire.reader.deliver_to(view):
            self.arrive(done.header, done.payload)
            self.core.frames_received(wire.lane, 1)


class ScriptedLane(Lane):
    """Gives what was prepared and then the end of the stream."""

    def __init__(self, data: bytes, rng: random.Random) -> None:
        self.peer = "fuzz"
        self._data = bytearray(data)
        self._rng = rng

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Our own greeting, or why we refuse."""

    async def receive_into(self, views: Sequence[memoryview]) -> int:
        room = sum(view.nbytes for view in views)
        count = min(room, len(self._data), self._rng.choice((1, 20, 1000)))
        at = 0
        for view in views:
            part = self._data[at : min(at + view.nbytes, count)]
            view[: len(part)] = part
            at += len(part)
        del self._data[:count]
        return count

    def close(self) -> None:
        """Nothing is open."""


def greeting(mode: str, rng: random.Random) -> Hello | None:
    """The Hello that comes through; None if the connection ends there."""
    data = pack_control(encode_message(make_hello(CONFIG, bytes(16), bytes(8), 0, 1, None, keyed=False)))
    if mode == "hostile" and rng.random() < 0.15:
        frames = split(data)
        for _ in range(rng.choice((1, 2))):
            rng.choice((change_message, change_message, change_field, change_size))(frames[0], rng)
        data = b"".join(frame.to_bytes() for frame in frames)
    elif mode == "noise" and rng.random() < 0.1:
        data = spoil(data, rng)
    try:
        answer_hello(ScriptedLane(data, rng), lambda hello: hello, None).send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except (HandshakeError, ConnectionLostError):
        return None
    raise InvariantBroken("a greeting waits for something else than bytes")


def spoil(data: bytes, rng: random.Random) -> bytes:
    """Flip a bit or cut the end off; no checksum is made right."""
    broken = bytearray(data)
    if rng.random() < 0.8:
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
    else:
        del broken[rng.randrange(len(broken)) :]
    return bytes(broken)


class Middle:
    """Who sits between the two sides."""

    def __init__(self, mode: str, rng: random.Random) -> None:
        self.mode = mode
        self.rng = rng
        self.kept: deque[Frame] = deque(maxlen=8)
        self.touched = False

    def put(self, data: bytes, wire: Wire, wires: list[Wire]) -> None:
        """Pass one frame on, in the way of the run."""
        rng = self.rng
        if self.mode == "honest" or rng.random() > 0.03:
            wire.data += data
            if self.mode == "hostile":
                self.kept += split(data)
            return
        self.touched = True
        if self.mode == "noise":
            wire.data += spoil(data, rng)
            return
        frame = split(data)[0]
        match rng.randrange(8):
            case 0:
                rng.choice(wires).data += data
            case 1:
                wire.data += data + data
            case 2:
                pass
            case 3 if self.kept:
                wire.data += rng.choice(self.kept).to_bytes() + data
            case 4:
                frame.keep_sums = True
                wire.data += frame.to_bytes()
            case _:
                change = change_message if frame.head[0] == 1 else rng.choice((change_field, change_bytes, change_size))
                change(frame, rng)
                wire.data += frame.to_bytes()


def run_one(seed: int) -> str:
    """One link from its greeting to its end; returns how it ended, with its mode before it."""
    rng = random.Random(seed)
    mode = rng.choice(MODES)
    hellos = [greeting(mode, rng) for _ in range(2)]
    if hellos[0] is None or hellos[1] is None:
        if mode == "honest":
            raise InvariantBroken("an honest greeting was refused")
        return f"{mode}: no link"
    sides = [Side(rng), Side(rng)]
    lanes = rng.choice((1, 2, 3))
    for side, hello in zip(sides, (hellos[1], hellos[0]), strict=True):
        side.trusts_content = mode != "hostile"
        side.greet(hello, initiator=side is sides[0], lanes=lanes)
    wires = [[Wire(lane) for lane in range(lanes)] for _ in sides]  # what each side sends
    middle = Middle(mode, rng)
    try:
        _talk(rng, mode, sides, wires, middle)
    except RemoteProtocolError:
        end = "refused"
        if mode == "honest":
            raise InvariantBroken("an honest peer was refused") from None
    else:
        end = "read"
        if mode == "honest":
            for side in sides:
                if side.delivered != set(side.offered):
                    raise InvariantBroken("an honest transfer was not delivered")
    for side in sides:
        side.core.fail_all(LocalProtocolError("the link is over"))
        if side.book.reserved_bytes or side.book.early_reserved_bytes or side.core.open_transfers():
            raise InvariantBroken("the end of the link left reservations behind")
    return f"{mode}: {end}"


def _talk(rng: random.Random, mode: str, sides: list[Side], wires: list[list[Wire]], middle: Middle) -> None:
    for _ in range(STEPS):
        index = rng.randrange(2)
        if rng.random() < 0.01:
            _lose(rng.randrange(len(wires[0])), sides, wires)
        match rng.randrange(6):
            case 0:
                sides[index].application(honest=mode == "honest")
            case 1 | 2:
                _send(rng.randrange(len(wires[index])), sides[index], wires[index], middle)
            case _:
                sides[index].read(rng.choice(wires[1 - index]), rng.choice((1, 48, 500, 5000, 100_000)))
    quiet = 0
    while quiet < 2:
        moved = False
        for index, side in enumerate(sides):
            for lane in range(len(wires[index])):
                moved |= _send(lane, side, wires[index], middle)
            for wire in wires[1 - index]:
                before = len(wire.data), wire.waiting
                side.read(wire, 100_000)
                moved |= (len(wire.data), wire.waiting) != before
        quiet = 0 if moved else quiet + 1


def _lose(lane: int, sides: list[Side], wires: list[list[Wire]]) -> None:
    """The connection of a lane is lost with all that was on its way, and the lane is opened again."""
    for side, sent in zip(sides, wires[::-1], strict=True):
        side.core.incoming.lost(sent[lane].reader.unfinished)
        sent[lane] = Wire(lane)
    for side, other in (sides, sides[::-1]):
        side.core.lane_reopened(lane, other.core.received_frames(lane), side.now)


def _send(lane: int, side: Side, wires: list[Wire], middle: Middle) -> bool:
    chosen = side.core.outgoing.next_send(lane, side.now)
    if not isinstance(chosen, SendBytes):
        return False
    middle.put(
        b"".join(bytes(part) for part in seal([chosen], not side.core.outgoing.has_next(lane, side.now))),
        wires[lane],
        wires,
    )
    return True


def fuzz(seconds: float, seed: int) -> dict[str, int]:
    """Run for some seconds of CPU time; returns how many links ended in which way."""
    rng = random.Random(seed)
    ends: Counter[str] = Counter()
    until = time.process_time() + seconds
    while time.process_time() < until:
        own_seed = rng.randrange(1 << 48)
        try:
            ends[run_one(own_seed)] += 1
        except Exception as error:
            again = f"run it again with --replay {own_seed}"
            raise InvariantBroken(f"after {ends.total()} links: {type(error).__name__}: {error}; {again}") from error
    return dict(ends)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Break links between two cores that really talk.")
    parser.add_argument("--seconds", type=float, default=60, help="CPU time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one link again")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        print(run_one(options.replay))
        return 0
    ends = fuzz(options.seconds, options.seed)
    total = sum(ends.values())
    print(f"{total} links, {total / options.seconds:.0f} a second:", end=" ")
    print(", ".join(f"{count} {end}" for end, count in sorted(ends.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
