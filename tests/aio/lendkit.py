"""The receiving side of a link in blocking threads, fed with bytes over real sockets, and what became of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lynx_net.aio import lane_io
from lynx_net.aio.threads import ThreadPump
from lynx_net.transport.tcp import SocketLane
from lynx_net.wire.config import LinkConfig
from lynx_net.wire.connection import LinkCore
from lynx_net.wire.events import OfferReceived, PageArrived, PagesArrived, TransferFailed
from lynx_net.wire.frames import SegmentHeader, checksum, pack_control, pack_segment_header
from lynx_net.wire.grants import CreditBook, Grant
from lynx_net.wire.layout import CacheLayout
from lynx_net.wire.messages import OfferMessage, encode_message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lynx_net.aio.lane_io import LaneIo
    from lynx_net.errors import LynxError
    from lynx_net.wire.bursts import SendBytes
    from lynx_net.wire.events import Event

SEGMENT_BYTES = 64 * 1024
SIZES = (SEGMENT_BYTES, 40_000, 33_000, SEGMENT_BYTES, 150_000, 40_000, 33_000, SEGMENT_BYTES, 2000, 40_000, 0)
"""Of pages, by their number: mostly whole segments, for which buffers are lent, and what is received in other ways."""
STREAMS = 2


def size_of(page: int, stream: int) -> int:
    return SIZES[(page // 4 + stream) % len(SIZES)]


def content_of(transfer: int, page: int, stream: int) -> bytes:
    seed = bytes((transfer % 251, page % 251, stream, page // 251, 11))
    return (seed * (size_of(page, stream) // 5 + 1))[: size_of(page, stream)]


def offer_of(transfer: int, pages: int) -> bytes:
    layout = CacheLayout(layers=1, tokens=pages, heads=1, key_size=1, value_size=0, page_tokens=1)
    message = OfferMessage(transfer, "r", layout.to_wire(), "none", {}, STREAMS, SEGMENT_BYTES, {}, None)
    return pack_control(encode_message(message))


def segment_of(transfer: int, page: int, stream: int, at: int = 0) -> tuple[SegmentHeader, bytes]:
    content = content_of(transfer, page, stream)
    payload = content[at : at + SEGMENT_BYTES]
    return SegmentHeader(transfer, page, stream, at, len(payload), len(content), checksum(payload)), payload


def segments_of(transfer: int, page: int, stream: int) -> list[tuple[SegmentHeader, bytes]]:
    starts = range(0, size_of(page, stream), SEGMENT_BYTES) or (0,)
    return [segment_of(transfer, page, stream, at) for at in starts]


def burst_of(segments: Sequence[tuple[SegmentHeader, bytes]], last: bool = False) -> bytes:
    """All headers, then all payloads; `last` says that nothing follows at once."""
    following = range(len(segments) - 1, -1, -1)
    headers = [
        pack_segment_header(header, count, last and not count)
        for count, (header, _) in zip(following, segments, strict=True)
    ]
    return b"".join([*headers, *[payload for _, payload in segments]])


class Owner:
    """What a pump needs of its link: takes every offer, and decodes every page when it comes."""

    def __init__(self, lanes: int, config: LinkConfig) -> None:
        self.book = CreditBook(config.memory_bytes)
        self.lock = threading.RLock()
        self.clock = time.monotonic
        self.core = LinkCore(
            link="the link",
            lanes=lanes,
            initiator=True,
            config=config,
            peer_segment_bytes=SEGMENT_BYTES,
            peer_initial_credit=0,
            peer_deadline_s=60,
            book=self.book,
            route_grant=self.route,
            rate_bps=None,
            now=self.clock(),
        )
        self.pump: ThreadPump | None = None
        self.pages: dict[tuple[int, int], list[bytes]] = {}
        self.failed: dict[int, LynxError] = {}
        self.error: LynxError | None = None
        self.decodes = True

    def route(self, grant: Grant) -> None:
        self.core.incoming.apply_grant(grant)

    def post(self, events: Sequence[Event]) -> None:
        with self.lock:
            for event in events:
                match event:
                    case OfferReceived(offer, layout):
                        need = sum(
                            size_of(page, stream) for page in range(layout.page_count) for stream in range(STREAMS)
                        )
                        self.post(self.core.incoming.take(offer, layout, self.sizes, need, self.clock()))
                        if self.pump is not None:
                            self.pump.wake()
                    case PageArrived(transfer, page, stream):
                        state = self.core.incoming.state(transfer)
                        if state is None:
                            continue
                        self.pages[transfer, page] = [bytes(view) for view in state.page_streams(page, stream)]
                        if self.decodes:
                            self.post(self.core.incoming.decoded(transfer, [page], stream))
                    case PagesArrived(transfer, pages, stream):
                        self.post([PageArrived(transfer, page, stream) for page in pages])
                    case TransferFailed(transfer, error):
                        self.failed[transfer] = error
            self.check()
            if self.core.scheduler.has_work() and self.pump is not None:
                self.pump.wake()

    def check(self) -> None:
        """What is lent is within credit and pages: never more is held than was granted and reserved."""
        for state in self.core.incoming._states.values():
            for stream, lent_bytes in enumerate(state.lent_bytes):
                assert 0 <= lent_bytes <= state.windows[stream].outstanding
                assert state._begun_pages[stream] + state._loans[stream].lent_pages <= state.layout.page_count

    @staticmethod
    def sizes(page: int) -> list[frozenset[int]]:
        return [frozenset({size_of(page, stream)}) for stream in range(STREAMS)]

    def sent(self, batch: Sequence[SendBytes]) -> None:
        """Only control frames are."""

    def lane_ended(self, index: int, error: LynxError, unfinished: Sequence[SegmentHeader]) -> None:
        with self.lock:
            self.core.incoming.lost(unfinished)

    def pump_failed(self, error: LynxError) -> None:
        self.error = self.error or error


@dataclass
class Outcome:
    """What became of the bytes."""

    pages: dict[tuple[int, int], list[bytes]]
    failed: dict[int, str]
    error: str
    received: list[tuple[int, int, int]]
    stats: dict[int, tuple[list[int], list[int]]]
    open_transfers: list[int]
    lent_segments: int = field(compare=False)


CONFIG = LinkConfig(
    segment_bytes=SEGMENT_BYTES,
    deadline_s=20,
    initial_credit_bytes=200_000,
    anchor_window_bytes=1 << 23,
    residual_window_bytes=1 << 23,
    early_residual_bytes=1 << 23,
)


class Receiver:
    """A pump in threads over socket pairs. Use `async with`; write to `ends`."""

    def __init__(self, io: LaneIo, lanes: int = 1, config: LinkConfig = CONFIG) -> None:
        self._io = io
        self.owner = Owner(lanes, config)
        self.ends: list[socket.socket] = []
        self.lent_segments = 0

    async def __aenter__(self) -> Receiver:
        before, lane_io.IN_USE = lane_io.IN_USE, self._io
        try:
            self.pump = ThreadPump(self.owner)
            self.owner.pump = self.pump
            for index in range(len(self.owner.core.lane_stats)):
                self.attach(index)
        finally:
            lane_io.IN_USE = before
        core_runs = self.owner.core.incoming.runs

        def count(runs, now, events):  # type: ignore[no-untyped-def]
            self.lent_segments += sum(len(run[3]) for run in runs)
            core_runs(runs, now, events)

        self.owner.core.incoming.runs = count  # type: ignore[method-assign]
        return self

    def attach(self, index: int) -> None:
        end, sock = socket.socketpair()
        threading.Thread(target=_read_all, args=(end,), daemon=True).start()
        self.ends[index : index + 1] = [end]
        self.pump.attach(index, SocketLane(sock, "peer"))

    async def __aexit__(self, *_: object) -> None:
        await self.pump.stop()
        for end in self.ends:
            end.close()

    async def feed(self, lane: int, data: bytes, cuts: Sequence[int] = ()) -> None:
        """Write bytes to a lane, with a pause at each cut, so that they come in parts."""

        def write() -> None:
            with contextlib.suppress(OSError):  # a link that fails reads no further
                at = 0
                for cut in [*sorted(cuts), len(data)]:
                    self.ends[lane].sendall(data[at:cut])
                    time.sleep(0.002 if cut < len(data) else 0)
                    at = max(at, cut)

        await asyncio.to_thread(write)

    async def outcome(self) -> Outcome:
        """End all lanes and wait until what was sent has been read."""
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_WR)
        await until(lambda: not self.pump._connections)
        if self.pump._receiver._teller is not None:  # it may have something to say yet
            await self.pump._receiver._teller.stop()
        owner, core = self.owner, self.owner.core
        states = {transfer: core.incoming.state(transfer) for transfer in sorted(core.incoming._states)}
        outcome = Outcome(
            pages=owner.pages,
            failed={transfer: f"{type(error).__name__}: {error}" for transfer, error in owner.failed.items()},
            error="" if owner.error is None else f"{type(owner.error).__name__}: {owner.error}",
            received=[
                (lane.received_segments, lane.received_control_frames, core.received_frames(index))
                for index, lane in enumerate(core.lane_stats)
            ],
            stats={
                transfer: (list(state.stats.stream_bytes), list(state.stats.stream_segments))
                for transfer, state in states.items()
                if state is not None
            },
            open_transfers=core.open_transfers(),
            lent_segments=self.lent_segments,
        )
        core.fail_all(LookupError("over"))  # type: ignore[arg-type]
        for state in states.values():
            assert state is not None
            assert owner.error is not None or state.lent_bytes == [0] * STREAMS, "something is still lent"
        return outcome


async def until(happened: Callable[[], bool]) -> None:
    """Look again and again, for up to ten seconds: what is waited for happens in threads."""
    async with asyncio.timeout(10):
        while True:
            if happened():
                return
            await asyncio.sleep(0.001)


def _read_all(end: socket.socket) -> None:
    """What the receiver says is not looked at."""
    with contextlib.suppress(OSError):
        while end.recv(1 << 16):
            pass
