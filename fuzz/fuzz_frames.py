"""Throws broken byte streams at the wire core: `python fuzz/fuzz_frames.py --seconds 60 --seed 1`.

The invariant: whatever a peer sends is a RemoteProtocolError or a correct parse, never anything else, and never
makes us hold more memory than was reserved for it.

Streams of the corpus (fuzz/corpus, what the two sides of a real link said) are cut into frames, mutated, mostly with
their checksums made right again so that the damage gets past the first gate, and fed in portions of any size to a
FrameReader, decode_message and a LinkCore that is sending and receiving, some segments in lent buffers. A failing
stream is kept in fuzz/failures and is run again with `--replay FILE`.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import struct
import sys
import time
import tracemalloc
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from lynx_net.errors import LocalProtocolError, LynxError, RemoteProtocolError
from lynx_net.wire.bursts import SendBytes
from lynx_net.wire.config import LinkConfig
from lynx_net.wire.connection import LinkCore
from lynx_net.wire.events import Event, OfferReceived, PageArrived, PagesArrived, RequestReceived, TransferFailed
from lynx_net.wire.framereader import FrameReader
from lynx_net.wire.frames import (
    HEADER_BYTES,
    LAST,
    MAX_CONTROL_BYTES,
    SEGMENT,
    ControlFrame,
    SegmentFrame,
    SegmentHeader,
    SegmentStart,
    checksum,
    headers_following,
)
from lynx_net.wire.frames import Frame as Parsed
from lynx_net.wire.grants import CreditBook, Grant
from lynx_net.wire.incoming import SegmentAwaitsOffer
from lynx_net.wire.layout import CacheLayout
from lynx_net.wire.lending import Lender, LentRun
from lynx_net.wire.messages import decode_message

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent
SIZES = (4097, 0, 4096, 10_000, 1, 9000, 4095, 8192)
CONFIG = LinkConfig(
    segment_bytes=4096,
    initial_credit_bytes=5000,
    anchor_window_bytes=8192,
    residual_window_bytes=8192,
    memory_bytes=300_000,
    max_pending_offers=4,
    max_pending_requests=4,
)
EARLY_BYTES = 60_000
CONTROL_MEMORY_BYTES = 96 * MAX_CONTROL_BYTES
"""What unpacking one control message may take for a moment: the smallest values cost most."""

HEAD = struct.Struct("<BBHIQIIIIQ")
FIELDS = {"kind": 0, "stream": 1, "length": 3, "transfer": 4, "page": 5, "offset": 6, "stream_bytes": 7, "sum": 9}
NUMBERS = (0, 1, 2, 3, 4, 7, 8, 255, 4095, 4096, 4097, 8192, 10_000, 1 << 16, 1 << 18, 1 << 24, (1 << 32) - 1)
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    -1,
    (1 << 63) - 1,
    1 << 63,
    True,
    None,
    0.5,
    "",
    "x" * 300,
    b"\xff" * 16,
    [],
    {},
    {"a": [1, [2, [3, [4]]]]},
    [[[[[[[[[[]]]]]]]]]],
)


class InvariantBroken(Exception):
    """The core did something else than parse or refuse."""


@dataclass
class Frame:
    """One frame of a corpus stream: the ten fields of its header, and its payload."""

    head: list[int]
    payload: bytes
    keep_sums: bool = False
    """Leave the checksums as they are, right or wrong."""

    def to_bytes(self) -> bytes:
        head = list(self.head)
        if not self.keep_sums:
            head[9] = checksum(self.payload)
        packed = HEAD.pack(*head)
        own_sum = checksum(packed) if not self.keep_sums else checksum(packed) ^ 1
        return packed + struct.pack("<Q", own_sum) + self.payload


def split(stream: bytes) -> list[Frame]:
    """The frames of a stream that is sound."""
    frames = []
    at = 0
    while at < len(stream):
        head = list(HEAD.unpack_from(stream, at))
        at += HEADER_BYTES
        frames.append(Frame(head, stream[at : at + head[3]]))
        at += head[3]
    return frames


def load_corpus(folder: Path) -> list[list[Frame]]:
    """All streams of a folder, cut into frames."""
    return [split(path.read_bytes()) for path in sorted(folder.glob("*.bin"))]


# ---- mutations


def change_field(frame: Frame, rng: random.Random) -> None:
    name = rng.choice(list(FIELDS))
    limit = {"kind": 8, "stream": 8, "transfer": 64, "sum": 64}.get(name, 32)
    value = rng.choice(NUMBERS) if rng.random() < 0.7 else frame.head[FIELDS[name]] + rng.choice((-1, 1, 4096))
    frame.head[FIELDS[name]] = value % (1 << limit)


def change_message(frame: Frame, rng: random.Random) -> None:
    try:
        data = msgpack.unpackb(frame.payload)
    except (ValueError, msgpack.exceptions.UnpackException):
        return
    if not isinstance(data, dict) or not data:
        return
    target = data
    inner = [value for value in data.values() if isinstance(value, dict) and value]
    if inner and rng.random() < 0.5:
        target = rng.choice(inner)
    key = rng.choice(list(target))
    match rng.randrange(8):
        case 0:
            del target[key]
        case 1:
            target["surprise"] = rng.choice(VALUES)
        case 2:
            target[key] = [target[key]] * rng.choice((1, 100))
        case 3 if isinstance(target[key], int):
            target[key] = max(target[key] + rng.choice((-2, -1, 1, 2)), 0)
        case _:
            target[key] = rng.choice(VALUES)
    set_payload(frame, msgpack.packb(data))


def change_bytes(frame: Frame, rng: random.Random) -> None:
    payload = bytearray(frame.payload)
    for _ in range(rng.choice((1, 1, 3))):
        if payload:
            payload[rng.randrange(len(payload))] = rng.randrange(256)
    set_payload(frame, bytes(payload))


def change_size(frame: Frame, rng: random.Random) -> None:
    size = rng.choice((0, 1, len(frame.payload) // 2, len(frame.payload) + 1, rng.choice(NUMBERS[:14])))
    set_payload(frame, (frame.payload + bytes(size))[:size])


def set_payload(frame: Frame, payload: bytes) -> None:
    frame.payload = payload
    frame.head[3] = len(payload)


def mutate(corpus: list[list[Frame]], rng: random.Random) -> bytes:
    """One broken stream."""
    frames = [Frame(list(frame.head), frame.payload) for frame in rng.choice(corpus)]
    for _ in range(rng.choice((0, 1, 1, 2, 4, 8))):
        at = rng.randrange(len(frames) + 1)
        match rng.randrange(10):
            case 0:
                other = rng.choice(rng.choice(corpus))
                frames.insert(at, Frame(list(other.head), other.payload))
            case 1 if at < len(frames):
                del frames[at]
            case 2 if at < len(frames):
                frames.insert(rng.randrange(len(frames) + 1), Frame(list(frames[at].head), frames[at].payload))
            case 3:
                rng.shuffle(frames)
            case 4 if at < len(frames):
                frames[at].keep_sums = True
            case 5 | 6 if at < len(frames):
                change_field(frames[at], rng)
            case 7 if at < len(frames):
                (change_bytes if rng.random() < 0.5 else change_size)(frames[at], rng)
            case _ if at < len(frames):
                change_message(frames[at], rng)
    stream = bytearray(b"".join(frame.to_bytes() for frame in frames))
    if stream and rng.random() < 0.1:
        stream[rng.randrange(len(stream))] ^= 1 << rng.randrange(8)
    if stream and rng.random() < 0.1:
        del stream[rng.randrange(len(stream)) :]
    return bytes(stream)


# ---- the target


class Shelves:
    """Lent buffers, and what a lane does that has them: takes whole page streams without asking for their places."""

    def __init__(self) -> None:
        self.lent: list[tuple[int, int, memoryview]] = []

    def put(self, transfer: int, stream: int, buffers: list[memoryview], together_bytes: int, /) -> None:
        self.lent += [(transfer, stream, buffer) for buffer in buffers]

    def take_back(self, transfer: int, stream: int, /) -> list[memoryview]:
        taken = [one for one in self.lent if one[0] == transfer and stream in (-1, one[1])]
        self.lent = [one for one in self.lent if one not in taken]
        return [buffer for _, _, buffer in taken]

    def read(self, stream: bytes, at: int) -> LentRun | None:
        """The segment that begins there, in a lent buffer, if it is whole and there is one for it."""
        if len(stream) - at < HEADER_BYTES or checksum(stream[at : at + 40]) != int.from_bytes(
            stream[at + 40 : at + 48], "little"
        ):
            return None
        kind, number, following, length, transfer, page, offset, stream_bytes, flags, wanted = HEAD.unpack_from(
            stream, at
        )
        payload = stream[at + HEADER_BYTES : at + HEADER_BYTES + length]
        if kind != SEGMENT or following or offset or flags > LAST or not len(payload) == length == stream_bytes:
            return None
        for index, (of, in_stream, buffer) in enumerate(self.lent):
            if (of, in_stream, buffer.nbytes) == (transfer, number, length):
                del self.lent[index]
                buffer[:] = payload
                return transfer, number, length, [page], [buffer], checksum(payload) == wanted
        return None


@dataclass
class Target:
    """A core that sends two transfers and receives what it is offered, driven by one stream of bytes."""

    rng: random.Random
    book: CreditBook = field(default_factory=lambda: CreditBook(CONFIG.memory_bytes, EARLY_BYTES))
    now: float = 0.0

    def __post_init__(self) -> None:
        self.reader = FrameReader()
        self.core = LinkCore(
            link="fuzz",
            lanes=2,
            initiator=self.rng.random() < 0.5,
            config=CONFIG,
            peer_segment_bytes=4096,
            peer_initial_credit=self.rng.choice((0, 5000)),
            peer_deadline_s=5,
            book=self.book,
            route_grant=self.route,
            rate_bps=None,
            now=0.0,
        )
        self.shelves = Shelves()
        self.core.incoming.lender = Lender(self.shelves, least_bytes=1)
        layout = CacheLayout(layers=1, tokens=2, heads=1, key_size=3, value_size=0, page_tokens=1)
        for _ in range(2):
            transfer = self.core.outgoing.offer(
                request_id="mine",
                layout=layout,
                codec="none",
                codec_params={},
                streams=2,
                meta={},
                first_token=None,
                now=0.0,
            )
            for page in range(layout.page_count):
                for stream in range(2):
                    self.core.outgoing.submit(transfer, [(page, stream, memoryview(bytes(5000)), (), None)], 0.0)

    def route(self, grant: Grant) -> None:
        self.core.incoming.apply_grant(grant)

    def run(self, stream: bytes) -> str:
        """Feed the stream; returns how it ended."""
        at = 0
        while at < len(stream):
            if self.reader.idle and self.shelves.lent:
                at = self.read_lent(stream, at)
            portion = stream[at : at + self.rng.choice((1, 47, 48, 500, 5000, 100_000))]
            while portion:
                ahead = self.reader.idle and self.rng.random() < 0.3
                views = [self.reader.ahead()] if ahead else self.reader.buffers()
                if self.shelves.lent and not ahead and len(views) > 1:
                    views.pop()  # there may be a lent buffer for what comes next
                filled = put(portion, views)
                if not ahead and filled == sum(map(len, views)) and len(views[-1]) == HEADER_BYTES:
                    room = self.reader.header_room()[: HEADER_BYTES * headers_following(views[-1])]
                    filled += put(portion[filled:], [room])
                at += filled
                portion = portion[filled:]
                self.core.liveness.heard(self.now, self.reader.segment)
                frames = self.reader.received_ahead(filled) if ahead else self.reader.received(filled)
                while frames:
                    if not self.act_on(frames):
                        return "waits for an offer"
                    frames = self.reader.received_ahead()
                if self.reader.idle and self.shelves.lent:
                    break
            self.act()
        return "read" if self.reader.idle else "truncated"

    def read_lent(self, stream: bytes, at: int) -> int:
        """Segments for which there are lent buffers; returns where they end."""
        runs: list[LentRun] = []
        segments = 0
        while (one := self.shelves.read(stream, at)) is not None:
            at += HEADER_BYTES + one[2]
            segments += 1
            if runs and one[-1] and runs[-1][-1] and runs[-1][:3] == one[:3]:
                runs[-1][3].extend(one[3])
                runs[-1][4].extend(one[4])
            else:
                runs.append(one)
        events: list[Event] = []
        try:
            self.core.incoming.runs(runs, self.now, events)
        finally:
            self.handle(events)
        self.core.frames_received(0, segments)
        self.core.incoming.lend({run[:2] for run in runs})
        self.check_memory()
        return at

    def act_on(self, frames: Sequence[Parsed]) -> bool:
        """False where the offer of a segment has not come."""
        for frame in frames:
            match frame:
                case ControlFrame(payload):
                    self.handle(self.core.message(decode_message(payload), self.now))
                    self.core.frames_received(0, 1)
                case SegmentStart(header):
                    try:
                        place = self.core.incoming.place(header, self.now)
                    except SegmentAwaitsOffer:
                        return False
                    self.check_memory()
                    for done in self.reader.deliver_to(place):
                        self.arrive(done.header, done.payload)
                case SegmentFrame(header, payload):
                    self.arrive(header, payload)
                    self.core.frames_received(0, 1)
        return True

    def arrive(self, header: SegmentHeader, payload: memoryview | None) -> None:
        """A segment is in its place, or was dropped."""
        if payload is not None:
            self.handle(self.core.incoming.segment(header, checksum(payload), self.now))
            self.core.incoming.lend([(header.transfer, header.stream)])

    def act(self) -> None:
        """Our own side: sends, lets time pass, gives transfers up."""
        self.now += self.rng.choice((0, 0, 0.1, 3, 40))
        self.handle(self.core.timer(self.now))
        for lane in (0, 1):
            while isinstance(self.core.outgoing.next_send(lane, self.now), SendBytes):
                pass
        if self.rng.random() < 0.05 and self.core.open_transfers():
            self.handle(self.core.abort(self.rng.choice(self.core.open_transfers()), 1, "enough"))
        self.check_memory()

    def handle(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case OfferReceived(offer, layout):
                    if layout.page_count > 200 or self.rng.random() < 0.1:
                        self.handle(self.core.abort(offer.transfer, 3, "declined"))
                        continue
                    streams = offer.streams
                    need = sum(max(size) for page in range(layout.page_count) for size in sizes_of(page, streams))
                    sizes = partial(sizes_of, streams=streams)
                    self.handle(self.core.incoming.take(offer, layout, sizes, need, self.now))
                    state = self.core.incoming.state(offer.transfer)
                    if state is not None and self.core.incoming.lender is not None:
                        for stream in range(streams):
                            self.core.incoming.lender.lend(state, stream)
                case PageArrived(transfer, page, stream):
                    state = self.core.incoming.state(transfer)
                    if state is not None and self.rng.random() < 0.9:
                        for data in state.page_streams(page, stream):
                            bytes(data)
                        self.handle(self.core.incoming.decoded(transfer, [page], stream))
                case PagesArrived(transfer, pages, stream):
                    self.handle([PageArrived(transfer, page, stream) for page in pages])
                case RequestReceived(request_id):
                    if self.rng.random() < 0.5:
                        self.core.outgoing.refuse(request_id, "no")
                case TransferFailed(transfer, error):
                    if transfer in self.core.open_transfers() or not isinstance(error, LynxError):
                        raise InvariantBroken(f"transfer {transfer} failed with {error!r} and is still open")

    def check_memory(self) -> None:
        """Never more than was reserved: each transfer by itself, and all together."""
        held = 0
        for transfer, state in self.core.incoming._states.items():
            entry = self.book._entries["fuzz", transfer]
            mine = sum(
                stream.data.nbytes for page in state._pages.values() for stream in page.streams if stream is not None
            )
            mine += sum(state.lent_bytes)
            if mine > (entry.need_bytes if state.accepted else entry.early_bytes):
                raise InvariantBroken(f"transfer {transfer} holds {mine} bytes, more than was reserved")
            held += mine
        if held > self.book.reserved_bytes + self.book.early_reserved_bytes:
            raise InvariantBroken("more is held than was reserved")
        if self.book.reserved_bytes > CONFIG.memory_bytes or self.book.early_reserved_bytes > EARLY_BYTES:
            raise InvariantBroken("more is reserved than the settings allow")


def put(data: bytes, views: Sequence[memoryview]) -> int:
    """Fill the views in order; returns how many bytes there were."""
    filled = 0
    for view in views:
        part = data[filled : filled + view.nbytes]
        view[: len(part)] = part
        filled += len(part)
    return filled


def sizes_of(page: int, streams: int) -> list[frozenset[int]]:
    """Sizes a page may have; the corpus was made with the first of them."""
    return [frozenset({SIZES[(3 * page + stream) % len(SIZES)], 20_000}) for stream in range(streams)]


def run_one(stream: bytes, seed: int, *, measure: bool = False) -> str:
    """Run one stream and return how it ended; raises InvariantBroken if it ended in any other way."""
    target = Target(random.Random(seed))
    if measure:
        tracemalloc.start()
    try:
        return target.run(stream)
    except RemoteProtocolError:
        target.core.fail_all(LocalProtocolError("the link is over"))
        if target.book.reserved_bytes or target.book.early_reserved_bytes or target.core.open_transfers():
            raise InvariantBroken("the end of the link left reservations behind") from None
        return "refused"
    except InvariantBroken:
        raise
    except Exception as error:
        raise InvariantBroken(f"{type(error).__name__}: {error}") from error
    finally:
        if measure:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            allowed = CONFIG.memory_bytes + EARLY_BYTES + CONTROL_MEMORY_BYTES
            if peak > allowed:
                raise InvariantBroken(f"{peak} bytes were allocated at once, {allowed} are allowed")


def fuzz(seconds: float, seed: int, corpus: list[list[Frame]], failures: Path | None = None) -> dict[str, int]:
    """Run for some seconds of CPU time; returns how many streams ended in which way."""
    rng = random.Random(seed)
    ends: dict[str, int] = {}
    runs = 0
    until = time.process_time() + seconds
    while time.process_time() < until:
        stream, own_seed = mutate(corpus, rng), rng.randrange(1 << 32)
        try:
            end = run_one(stream, own_seed, measure=runs % 200 == 0)
        except InvariantBroken as error:
            where = ""
            if failures is not None:
                failures.mkdir(parents=True, exist_ok=True)
                kept = failures / f"{hashlib.sha256(stream).hexdigest()[:12]}-{own_seed}.bin"
                kept.write_bytes(stream)
                where = f"; run it again with --replay {kept}"
            raise InvariantBroken(f"after {runs} streams of seed {seed}: {error}{where}") from error
        ends[end] = ends.get(end, 0) + 1
        runs += 1
    return ends


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Throw broken byte streams at the wire core.")
    parser.add_argument("--seconds", type=float, default=60, help="CPU time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus")
    parser.add_argument("--failures", type=Path, default=HERE / "failures")
    parser.add_argument("--replay", type=Path, help="run one kept stream")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        print(run_one(options.replay.read_bytes(), int(options.replay.stem.rpartition("-")[2]), measure=True))
        return 0
    corpus = load_corpus(options.corpus)
    if not corpus:
        parser.error(f"no streams in {options.corpus}")
    ends = fuzz(options.seconds, options.seed, corpus, options.failures)
    total = sum(ends.values())
    print(f"{total} streams, {total / options.seconds:.0f} a second:", end=" ")
    print(", ".join(f"{count} {end}" for end, count in sorted(ends.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
