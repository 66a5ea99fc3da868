"""Segments received into lent buffers and segments received one by one: the same bytes come to the same end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import queue
import random
import resource
import socket
import struct
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lendkit import (
    CONFIG,
    SEGMENT_BYTES,
    SIZES,
    STREAMS,
    Outcome,
    Receiver,
    burst_of,
    content_of,
    offer_of,
    segment_of,
    segments_of,
    size_of,
    until,
)

from hatch_build import SOURCE, compile_lanes, find_compiler
from lynx_net.aio import lane_io
from lynx_net.aio.endpoint import Endpoint
from lynx_net.aio.link import Link
from lynx_net.aio.teller import Teller
from lynx_net.aio.transfer import IncomingTransfer
from lynx_net.testing.relay import FaultyRelay
from lynx_net.wire.config import LinkConfig
from lynx_net.wire.frames import HEADER_BYTES, SegmentHeader, checksum, pack_control
from lynx_net.wire.layout import CacheLayout
from lynx_net.wire.messages import Abort, Ping, encode_message

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = {2: 40, 4: 20}
"""Of each transfer, by its id."""
BREAKS = ("", "payload", "header", "page", "offset", "length", "stream_bytes", "stream", "parity", "cut")


@pytest.fixture(scope="session")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The extension, built from the source that stands here."""
    target = tmp_path_factory.mktemp("lanes") / "_lanes.abi3.so"
    if problem := compile_lanes(ROOT / SOURCE, target):
        assert find_compiler() is None or "stable ABI" in problem or "Linux" in problem, problem
        pytest.skip(problem)
    spec = importlib.util.spec_from_file_location("lynx_net.aio._lanes", target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stream_of(seed: int, breaks: str, *, repeats: int, aborts: bool) -> bytes:
    """What a peer sends: two transfers with their segments in any order and in bursts, some twice, and one broken."""
    rng = random.Random(seed)
    distance = rng.choice((1, 4, 100))
    streams = [
        (transfer, page, stream) for transfer in PAGES for stream in range(STREAMS) for page in range(PAGES[transfer])
    ]
    ordered = sorted((place + rng.random() * distance, one) for place, one in enumerate(streams))
    segments = [segment for _, one in ordered for segment in segments_of(*one)]
    for _ in range(repeats):
        segments.insert(rng.randrange(len(segments) + 1), rng.choice(segments))
    at = rng.randrange(len(segments))
    segments[at] = broken(rng, breaks, *segments[at])
    frames = [offer_of(transfer, pages) for transfer, pages in PAGES.items()]
    while segments:
        count = rng.choice((1, 1, 2, 5, 9))
        frames.append(burst_of(segments[:count], rng.random() < 0.5))
        del segments[:count]
        if rng.random() < 0.1:
            frames.append(pack_control(encode_message(Ping())))
    if aborts:
        frames.insert(rng.randrange(3, len(frames) + 1), pack_control(encode_message(Abort(4, 1, "enough"))))
    if breaks == "header":
        at = rng.randrange(2, len(frames))
        frames[at] = frames[at][:20] + bytes([frames[at][20] ^ 1]) + frames[at][21:]
    stream = b"".join(frames)
    return stream[: rng.randrange(len(stream))] if breaks == "cut" else stream


def broken(rng: random.Random, how: str, header: SegmentHeader, payload: bytes) -> tuple[SegmentHeader, bytes]:
    match how:
        case "payload" if payload:
            at = rng.randrange(len(payload))
            return header, payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
        case "page":
            return header._replace(page=rng.choice((header.page + 4, PAGES[header.transfer], 1 << 31))), payload
        case "offset":
            return header._replace(offset=1, stream_bytes=header.stream_bytes + 1), payload
        case "length" if payload:
            return header._replace(length=header.length - 1), payload[:-1]
        case "stream_bytes":
            grown = header.stream_bytes + rng.choice((1, SEGMENT_BYTES))
            return header._replace(stream_bytes=grown), payload
        case "stream":
            return header._replace(stream=rng.choice((1 - header.stream, STREAMS, 255))), payload
        case "parity":
            return header._replace(transfer=rng.choice((1, 3, 5))), payload
    return header, payload


async def _receive(io: lane_io.LaneIo, lanes: int, stream: bytes, cuts: list[int]) -> Outcome:
    async with Receiver(io, lanes=lanes) as receiver:
        feeding = asyncio.create_task(receiver.feed(0, stream, cuts))
        await until(lambda: feeding.done() or receiver.owner.error is not None)
        if receiver.owner.error is not None:
            receiver.ends[0].shutdown(2)
        await feeding
        return await receiver.outcome()


MANY = 3
"""So many lanes have a teller."""

lent_ever: list[int] = []


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    breaks=st.sampled_from(BREAKS),
    repeats=st.sampled_from((0, 0, 3)),
    aborts=st.booleans(),
    of_lanes=st.sampled_from((1, MANY)),
    cuts=st.lists(st.floats(0, 1), max_size=3),
)
def test_the_same_bytes_come_to_the_same_end(
    lanes: ModuleType, seed: int, breaks: str, repeats: int, aborts: bool, of_lanes: int, cuts: list[float]
) -> None:
    stream = stream_of(seed, breaks, repeats=repeats, aborts=aborts)
    places = [int(cut * len(stream)) for cut in cuts]
    plain = asyncio.run(_receive(lane_io.PYTHON, of_lanes, stream, places))
    lent = asyncio.run(_receive(lane_io.native(lanes), of_lanes, stream, places))
    assert not plain.lent_segments
    lent_ever.append(lent.lent_segments)
    assert lent.error == plain.error
    for outcome in (plain, lent):
        for (transfer, page), streams in outcome.pages.items():
            assert streams == [content_of(transfer, page, stream) for stream in range(len(streams))]
    # More or fewer pages of a transfer that fails may have been decoded before. Headers of a burst are looked at before
    # its payloads here, after them there.
    whole = [
        {key: streams for key, streams in outcome.pages.items() if key[0] not in outcome.failed}
        for outcome in (plain, lent)
    ]
    if plain.error:
        assert all(len(whole[1][key]) >= len(streams) for key, streams in whole[0].items())
    else:
        assert whole[0] == whole[1]
        assert replace(lent, pages={}) == replace(plain, pages={})


def test_lent_buffers_were_used() -> None:
    assert sum(lent_ever) > 5 * len(lent_ever)


async def test_bulk_is_received_in_lent_buffers(lanes: ModuleType) -> None:
    """All but the first pages of each size, whatever the bursts."""
    async with Receiver(lane_io.native(lanes)) as receiver:
        stream = [offer_of(2, 400)]
        wanted = [page for page in range(400) if size_of(page, 0) >= 33_000]
        stream += [burst_of([segment_of(2, page, 0)]) for page in wanted if size_of(page, 0) <= SEGMENT_BYTES]
        await receiver.feed(0, b"".join(stream))
        outcome = await receiver.outcome()
        assert not outcome.error
        assert outcome.lent_segments > len(wanted) * 3 // 5
        assert len(outcome.pages) == len(stream) - 1


async def test_bursts_with_empty_pages_are_received_in_lent_buffers(lanes: ModuleType) -> None:
    """Of a page whose tokens are all fine nothing is left for later streams."""
    async with Receiver(lane_io.native(lanes)) as receiver:
        pages = [page for page in range(396) if size_of(page, 0) in (0, 33_000, 40_000, SEGMENT_BYTES)]
        at_once = 4 * sum(size in (0, 33_000, 40_000, SEGMENT_BYTES) for size in SIZES)
        bursts = [pages[at : at + at_once] for at in range(0, len(pages), at_once)]
        assert all(0 in [size_of(page, 0) for page in burst] for burst in bursts)
        bursts += [[page] for page in range(396, 440) if not size_of(page, 0)]
        await receiver.feed(0, offer_of(2, 440))
        for burst in bursts:  # it is the one before that lends for what comes next
            await receiver.feed(0, burst_of([segment_of(2, page, 0) for page in burst]))
            await until(lambda last=burst[-1]: (2, last) in receiver.owner.pages)
        outcome = await receiver.outcome()
        assert not outcome.error
        assert outcome.lent_segments == sum(map(len, bursts[1:]))
        assert all(content == [content_of(2, page, 0)] for (_, page), content in outcome.pages.items())
        assert len(outcome.pages) == sum(map(len, bursts))


@pytest.mark.parametrize("kind", ["Python", "C"])
async def test_more_than_was_granted_is_refused_in_both_ways(lanes: ModuleType, kind: str) -> None:
    io = lane_io.PYTHON if kind == "Python" else lane_io.native(lanes)
    config = replace(CONFIG, anchor_window_bytes=4 * SEGMENT_BYTES, initial_credit_bytes=2 * SEGMENT_BYTES)
    async with Receiver(io, config=config) as receiver:
        receiver.owner.decodes = False
        pages = [page for page in range(200) if size_of(page, 0) == SEGMENT_BYTES]
        stream = [offer_of(2, 200), *[burst_of([segment_of(2, page, 0)]) for page in pages]]
        feeding = asyncio.create_task(receiver.feed(0, b"".join(stream)))
        await until(lambda: receiver.owner.error is not None)
        receiver.ends[0].shutdown(2)
        await feeding
        assert "FlowControlError" in (await receiver.outcome()).error
        assert len(receiver.owner.pages) == 8  # a window in the air, and one that nobody decodes


async def test_a_lane_that_is_lost_gives_its_buffers_back(lanes: ModuleType) -> None:
    """What was in the middle of a burst comes again on another lane."""
    async with Receiver(lane_io.native(lanes), lanes=2) as receiver:
        bursts = [
            [segment_of(2, page, stream) for page in range(first, first + 4)]
            for first in (0, 44, 88)
            for stream in (0, 1)
        ]
        bursts = [burst for burst in bursts if all(len(payload) == header.stream_bytes for header, payload in burst)]
        sent = b"".join([offer_of(2, 132), *map(burst_of, bursts)])
        await receiver.feed(0, sent[:-100_000])
        receiver.ends[0].shutdown(socket.SHUT_RDWR)
        await until(lambda: 0 not in receiver.pump._connections)
        core = receiver.owner.core
        state = core.incoming.state(2)
        assert state is not None
        assert core.incoming.lender is not None
        stock = core.incoming.lender._stock
        for stream in range(STREAMS):
            free = stock.take_back(2, stream)
            assert sum(view.nbytes for view in free) == state.lent_bytes[stream], "a buffer was lost"
            stock.put(2, stream, free, 0)
        done = core.lane_stats[0].received_segments
        rest = [one for burst in bursts for one in burst][done:]
        assert 0 < len(rest) < 8
        await receiver.feed(1, b"".join(burst_of([one]) for one in rest))
        receiver.ends.pop(0).close()
        await receiver.outcome()
        assert {key[1] for key in receiver.owner.pages} == {header.page for burst in bursts for header, _ in burst}


class Keep(IncomingTransfer):
    """Takes pages of one size and keeps a checksum of each stream."""

    sums: dict[tuple[int, int], int]

    def sizes(self, page: int) -> list[frozenset[int]]:
        return [frozenset({size}) for size in self.offer.meta["bytes"]]

    @property
    def need_bytes(self) -> int:
        return self.offer.layout.page_count * int(sum(self.offer.meta["bytes"]))

    def page_arrived(self, page: int, stream: int) -> None:
        self.sums = getattr(self, "sums", {})
        for index, view in enumerate(self.link.page_streams(self, [page], stream)[0]):
            self.sums[page, index] = checksum(view)
        self.link.decoded(self, [page], stream)


async def test_connections_cut_in_the_middle_of_bulk() -> None:
    """Over several lanes and whatever moves the bytes here: every page comes once and whole."""
    config = LinkConfig(resume_s=5.0, segment_bytes=1 << 17)
    pages, sizes = 150, (100_000, 1 << 17)
    rng = random.Random(4)
    contents = [[rng.randbytes(size) for size in sizes] for _ in range(pages)]

    def side() -> Endpoint[Link]:
        return Endpoint(lambda parts: Link(parts, Keep, accept_in_threads=True), config=config, rate=None)

    receiving, sending = side(), side()
    server = await receiving.serve("tcp://127.0.0.1:0")
    host, _, port = server.url.removeprefix("tcp://").rpartition(":")
    async with FaultyRelay.to(host, int(port)) as relay:
        link = await sending.connect(relay.url, lanes=3)
        layout = CacheLayout(layers=1, tokens=pages, heads=1, key_size=1, value_size=0, page_tokens=1)
        outgoing = link.open_transfer(
            "bulk", layout, codec="none", codec_params={}, streams=2, meta={"bytes": list(sizes)}
        )
        incoming = await anext(aiter(server))
        assert isinstance(incoming, Keep)
        for page, streams in enumerate(contents):
            await outgoing.wait_for_room()
            for stream, content in enumerate(streams):
                outgoing.submit(page, stream, memoryview(content))
            if page in (40, 80, 120):
                relay.cut()
                await asyncio.sleep(0.01)
        await incoming.complete
        await outgoing.delivered
        assert sum(lane.reopened for lane in link.lane_stats) >= 3
        assert incoming.sums == {
            (page, stream): checksum(content)
            for page, streams in enumerate(contents)
            for stream, content in enumerate(streams)
        }
        await sending.close()
        await server.close()


def views(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def test_what_is_put_into_a_stock_can_be_taken_back(lanes: ModuleType) -> None:
    stock = lanes.Stock()
    first, second, other = views(10, 20, 10, 10), views(30), views(10)
    stock.put(1, 0, first, 0)
    stock.put(1, 1, second, 0)
    stock.put(2, 0, other, 0)
    assert {id(view) for view in stock.take_back(1, 0)} == {id(view) for view in first}
    assert stock.take_back(1, 0) == []
    assert stock.take_back(1, -1)[0] is second[0]
    assert stock.take_back(2, 0)[0] is other[0]
    many = views(*range(1, 300))
    stock.put(1 << 63, 15, many, 5)
    assert {id(view) for view in stock.take_back(1 << 63, -1)} == {id(view) for view in many}


def test_one_lane_tells_of_what_all_have_filled(lanes: ModuleType) -> None:
    """With the bytes of each, also of a segment that is not full; what is wrong stands alone."""
    stock = lanes.Stock()
    buffers = views(*[40_000] * 4)
    stock.put(2, 0, buffers, 1 << 20)
    segments = [segment_of(2, page, 0) for page in (4, 5, 6)]
    segments[1] = segments[1][0], bytes(40_000)
    frames = [burst_of([segment]) for segment in segments]
    pairs = [socket.socketpair() for _ in frames]
    try:
        for lane, (frame, (one, end)) in enumerate(zip(frames, pairs, strict=True)):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 2000))
            reader, left = stock.reader(7 * lane), len(frame) if lane < 2 else 1000
            end.sendall(frame[:left])
            while left:  # it comes back early when what is full should be told of
                left -= reader.receive(one.fileno(), 0.0)[0]
        del reader
        runs, counts = stock.take_full()
        assert counts == [(0, 1, len(frames[0])), (7, 1, len(frames[1])), (14, 0, 1000)]
        assert [(pages, sound) for *_, pages, _, sound in runs] == [([4], True), ([5], False)]
        assert bytes(runs[0][4][0]) == segments[0][1]
        assert stock.take_full() == ([], [])
    finally:
        for pair in pairs:
            for sock in pair:
                sock.close()
    # The reader that was in the middle of a page is gone, and its buffer with it.
    assert len(stock.take_back(2, -1)) == 1


def test_a_lane_fills_again_what_it_filled_last(lanes: ModuleType) -> None:
    """Whoever lends it, and in whatever order: its core may still have the memory."""
    stock = lanes.Stock()
    readers = [stock.reader(lane) for lane in range(3)]
    pairs = [socket.socketpair() for _ in readers]
    buffers = views(*[40_000] * 3)

    def fill(page: int) -> list[int]:
        """Which buffer each lane fills, one after the other."""
        for reader, (one, end) in zip(readers, pairs, strict=True):
            frame = burst_of([segment_of(2, page, 0)])
            end.sendall(frame)
            _receive_all(reader, one, len(frame))
        return [id(buffer) for run in stock.take_full()[0] for buffer in run[4]]

    try:
        for one, _ in pairs:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 2000))
        stock.put(2, 0, buffers, 1 << 20)
        first = fill(4)
        assert sorted(first) == sorted(map(id, buffers))
        for order in itertools.permutations(buffers):
            stock.put(2, 0, list(order), 1 << 20)
            assert fill(5) == first
    finally:
        for pair in pairs:
            for sock in pair:
                sock.close()


def _receive_all(reader: Any, one: socket.socket, left: int, come_back: Callable[[], object] = int) -> int:
    """Returns how many calls it takes."""
    calls = 0
    while left:
        with contextlib.suppress(BlockingIOError):
            left -= reader.receive(one.fileno(), 1.0)[0]
            calls += 1
            come_back()
    return calls


def test_lanes_stay_while_a_teller_waits(lanes: ModuleType) -> None:
    """And leave again when it is over."""
    stock = lanes.Stock()
    heard: list[int] = []
    ended = threading.Event()

    def tell() -> None:
        while stock.wait_full():
            heard.append(sum(len(run[3]) for run in stock.take_full()[0]))
        ended.set()

    def receive(come_back: Callable[[], object] = int) -> int:
        stock.put(2, 0, views(*[40_000] * 20), 80_000)
        one, end = socket.socketpair()
        with one, end:
            bursts = b"".join(burst_of([segment_of(2, 4 + page % 4, 0)]) for page in range(20))
            sending = threading.Thread(target=end.sendall, args=(bursts,))
            sending.start()
            calls = _receive_all(stock.reader(0), one, len(bursts), come_back)
            sending.join()
        return calls

    assert receive(stock.take_full) > 5
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    assert not ended.wait(0.05)
    assert receive() < 5
    assert not ended.is_set()
    stock.end_wait()
    assert ended.wait(5)
    teller.join()
    assert sum(heard) + sum(len(run[3]) for run in stock.take_full()[0]) == 20
    assert heard
    assert not stock.wait_full()
    assert receive(stock.take_full) > 5


def test_a_lane_waits_on_for_more_where_a_teller_tells(lanes: ModuleType) -> None:
    """Of a page that is the last for a while, whether or not more was to follow at once."""
    stock = lanes.Stock()
    heard: queue.Queue[list[int]] = queue.Queue()
    received: list[int] = []

    def tell() -> None:
        while stock.wait_full():
            if runs := stock.take_full()[0]:
                heard.put([page for run in runs for page in run[3]])

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    stock.put(2, 0, views(*[40_000] * 4), 1 << 20)
    data = [burst_of([segment_of(2, page, 0)]) for page in (4, 5, 6)]
    one, end = socket.socketpair()
    with one, end:
        reader = stock.reader(0)
        lane = threading.Thread(target=lambda: received.append(reader.receive(one.fileno(), 30.0)[0]), daemon=True)
        lane.start()
        for page, burst in zip((4, 5, 6), data, strict=True):
            end.sendall(burst)
            assert heard.get(timeout=5) == [page]
            assert lane.is_alive()
        end.shutdown(socket.SHUT_RDWR)
        lane.join(5)
    stock.end_wait()
    teller.join(5)
    assert received == [sum(map(len, data))]


async def test_what_a_teller_raises_is_told_and_lanes_tell_themselves(lanes: ModuleType) -> None:
    stock = lanes.Stock()
    failures: list[BaseException] = []

    def act() -> None:
        raise LookupError("in the teller")

    teller = Teller(stock, act, failures.append)
    stock.put(2, 0, views(*[40_000] * 4), 1)
    one, end = socket.socketpair()
    with one, end:
        data = b"".join(burst_of([segment_of(2, page, 0)]) for page in (4, 5, 6, 7))
        sending = asyncio.create_task(asyncio.to_thread(end.sendall, data))
        await asyncio.to_thread(_receive_all, stock.reader(0), one, len(data))
        await sending
    await until(lambda: bool(failures))
    assert str(failures[0]) == "in the teller"
    await teller.stop()
    assert sum(len(run[3]) for run in stock.take_full()[0]) == 4


async def test_a_link_of_many_lanes_leaves_no_teller(lanes: ModuleType) -> None:
    def tellers() -> int:
        return sum(thread.name == "lynx_net-tell" for thread in threading.enumerate())

    async with Receiver(lane_io.native(lanes), lanes=MANY) as receiver:
        assert tellers() == 1
        await receiver.feed(0, offer_of(2, 40))
    await until(lambda: tellers() == 0)
    async with Receiver(lane_io.native(lanes), lanes=MANY - 1):
        assert tellers() == 0


def test_a_lane_awaits_the_next_burst_only_where_one_follows(lanes: ModuleType) -> None:
    """A burst that took long to come is worth the longest pause."""
    stock = lanes.Stock()
    least_s: dict[bool, float] = {}
    for last in (False, True):
        times_s = []
        for page in range(20):
            stock.put(2, 0, views(40_000, 40_000), 1 << 20)
            one, end = socket.socketpair()
            with one, end:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 2000))
                reader = stock.reader(0)
                data = burst_of([segment_of(2, 4 + page % 4, 0)], last)
                end.sendall(data[:-1000])
                left = len(data) - reader.receive(one.fileno(), 0.0)[0]
                end.sendall(data[-left:])
                began_s = time.perf_counter()
                while left:
                    left -= reader.receive(one.fileno(), 0.0)[0]
                times_s.append(time.perf_counter() - began_s)
            (run,), _ = stock.take_full()
            assert run[3] == [4 + page % 4]
            stock.take_back(2, 0)
        least_s[last] = min(times_s)
    assert least_s[True] < 0.0003 <= least_s[False]


def test_wrong_arguments_of_a_stock(lanes: ModuleType) -> None:
    stock = lanes.Stock()
    good = bytearray(1000)
    for arguments, error in [
        ((1, 0, (memoryview(good),), 0), TypeError),
        ((1, 0, [5], 0), TypeError),
        ((1, 0, [b"read-only"], 0), BufferError),
        ((1, 0, [memoryview(good)[::2]], 0), BufferError),
        (("one", 0, [], 0), TypeError),
        ((1, 0, []), TypeError),
    ]:
        with pytest.raises(error):
            stock.put(*arguments)
    for arguments in ((1,), ("one", 0), (1, "none")):
        with pytest.raises(TypeError):
            stock.take_back(*arguments)
    with pytest.raises(TypeError):
        lanes.Reader()
    with pytest.raises(TypeError):
        lanes.Stock(5)
    for lane in (-1, 64):
        with pytest.raises(ValueError, match="one of 64 lanes"):
            stock.reader(lane)
    reader = stock.reader(0)
    one, other = socket.socketpair()
    with one, other:
        for wait_s in (-1.0, float("nan"), 1e9):
            with pytest.raises(ValueError, match="wait_s"):
                reader.receive(one.fileno(), wait_s)
        with pytest.raises(BlockingIOError):
            reader.receive(one.fileno(), 0.0)
        other.close()
        assert reader.receive(one.fileno(), 0.0) == (0, None, b"")
        assert stock.take_full() == ([], [])
    with pytest.raises(OSError, match="descriptor"):
        reader.receive(one.fileno(), 0.0)
    good.append(1)  # a bytearray that is exported cannot grow


def test_a_stock_and_its_readers_leak_nothing(lanes: ModuleType) -> None:
    buffer = memoryview(bytearray(40_000))
    header, payload = segment_of(2, 4, 0)
    assert len(payload) == 40_000
    frame, other = burst_of([(header, payload)]), pack_control(encode_message(Ping()))
    one, end = socket.socketpair()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 2000))

    def rounds(count: int) -> None:
        for _ in range(count):
            stock = lanes.Stock()
            reader = stock.reader(0)
            stock.put(2, 0, [buffer, buffer], 1 << 20)  # one after the other comes back
            end.sendall(frame + other)
            rest = b""
            while not rest:  # it may come back early to tell of the segment
                _, _, rest = reader.receive(one.fileno(), 0.0)
            assert rest == other[:HEADER_BYTES]
            runs, counts = stock.take_full()
            assert counts == [(0, 1, len(frame) + HEADER_BYTES)]
            assert runs == [(2, 0, 40_000, [4], [buffer], True)]
            assert runs[0][4][0] is buffer
            one.recv(len(other) - HEADER_BYTES)
            end.sendall(frame[: HEADER_BYTES + 5])
            assert reader.receive(one.fileno(), 0.0) == (HEADER_BYTES + 5, tuple(header), b"")
            if count % 2:
                assert reader.abandon() == [(2, 0, buffer)]

    with one, end:
        rounds(20)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        references = sys.getrefcount(buffer)
        rounds(100)
        assert sys.getrefcount(buffer) == references
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 2000
