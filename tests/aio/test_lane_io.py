"""Both implementations of a lane's bursts, over real sockets: the same bytes, the same sums, the same ends."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import itertools
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatch_build import SOURCE, compile_lanes, find_compiler
from lynx_net.aio import lane_io
from lynx_net.wire.bursts import BURST_BYTES, SendBytes, seal
from lynx_net.wire.framereader import FrameReader
from lynx_net.wire.frames import (
    HEADER_BYTES,
    ControlFrame,
    SegmentFrame,
    SegmentStart,
    checksum,
    pack_control,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from lynx_net.aio.lane_io import LaneIo

ROOT = Path(__file__).parents[2]
WAIT_S = 0.05
NO_ROOM = memoryview(bytearray())
"""For the headers that follow a first one."""


def make_pair(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        pair = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            one = socket.create_connection(server.getsockname())
            pair = one, server.accept()[0]
    for sock in pair:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, int(WAIT_S * 1e6)))
    return pair


@pytest.fixture(params=["tcp", "unix"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = make_pair(request.param)
    with closing(one), closing(other):
        yield one, other


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


@pytest.fixture(params=["Python", "C"])
def io(request: pytest.FixtureRequest) -> LaneIo:
    if request.param == "Python":
        return lane_io.PYTHON
    return lane_io.native(request.getfixturevalue("lanes"))


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def views(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def receive_exactly(sock: socket.socket, count: int, *, or_end: bool = False) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(count - len(data), 1 << 20))
        if or_end and not part:
            break
        assert part
        data += part
    return bytes(data)


def segment(page: int, data: bytes) -> SendBytes:
    return SendBytes(memoryview(data), 7, page, page % 3, 0, len(data))


# Sizes around what the implementations treat in another way: pieces, waits, bursts.
SIZES = st.one_of(
    st.integers(0, 200),
    st.sampled_from([0, 4096, 32 * 1024, 32 * 1024 + 1, 256 * 1024 - 1, 256 * 1024, 330_000, BURST_BYTES]),
)
BATCHES = st.lists(st.tuples(st.booleans(), SIZES), min_size=1, max_size=12).map(
    lambda kinds: [
        segment(index, os.urandom(size)) if is_segment else SendBytes(pack_control(os.urandom(1 + size % 5000)))
        for index, (is_segment, size) in enumerate(kinds)
    ]
)


def test_the_extension_is_in_use_where_it_can_be_built(lanes: ModuleType) -> None:
    assert lane_io.IN_USE.name == "C", f"{lane_io.describe()}; install the package again to build it"
    assert lane_io.describe() == "lanes run in C"


def read_frames(io: LaneIo, sock: socket.socket, wanted: int, *, sparse: bool = False) -> list[bytes]:
    """What a reader makes of the stream: payloads in order, each compared with the sum that came with it."""
    reader, got = FrameReader(), []
    while len(got) < wanted:
        *payloads, tail = reader.buffers()
        try:
            count, sums = io.receive_payloads(sock, payloads, tail, reader.header_room(), WAIT_S)
        except BlockingIOError:
            continue
        assert count, "the stream ended"
        assert sum(map(len, payloads[: len(sums)])) <= count
        for place, frame in enumerate(reader.received(count)):
            done = [frame]
            if place < len(sums) and isinstance(frame, SegmentFrame) and frame.payload is not None:
                assert sums[place] == checksum(payloads[place])
            if isinstance(frame, SegmentStart):
                drop = sparse and frame.header.page % 2 == 1
                done = [*reader.deliver_to(None if drop else memoryview(bytearray(frame.header.length)))]
            for one in done:
                assert isinstance(one, SegmentFrame | ControlFrame)
                if isinstance(one, SegmentFrame) and one.payload is not None:
                    assert checksum(one.payload) == one.header.checksum
                got.append(b"" if one.payload is None else bytes(one.payload))
    assert reader.idle
    return got


@settings(max_examples=25, deadline=None)
@given(batch=BATCHES, last=st.booleans())
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_batch_leaves_as_it_is_sealed(lanes: ModuleType, kind: str, batch: list[SendBytes], last: bool) -> None:
    expected = b"".join(seal(batch, last))
    for io in (lane_io.PYTHON, lane_io.native(lanes)):
        one, other = make_pair(kind)
        with closing(one), closing(other):
            sender = in_thread(lambda io=io, one=one: io.send_batch(one, batch, 0, lane_io.NEVER, last))
            assert receive_exactly(other, len(expected)) == expected
            sender.join()


@pytest.mark.parametrize("known", [0, 1, (1 << 64) - 1])
def test_a_checksum_that_is_known_is_not_made_again(
    io: LaneIo, pair: tuple[socket.socket, socket.socket], known: int
) -> None:
    """Even a wrong one: it is for the receiver to find out."""
    batch = [segment(0, b"zero" * 100), segment(1, b"one" * 100)._replace(checksum=known), segment(2, b"two" * 100)]
    io.send_batch(pair[0], batch)
    headers = receive_exactly(pair[1], 3 * HEADER_BYTES)
    sums = [int.from_bytes(headers[at + 32 : at + 40], "little") for at in range(0, len(headers), HEADER_BYTES)]
    assert sums == [checksum(batch[0].data), known, checksum(batch[2].data)]


@settings(max_examples=25, deadline=None)
@given(batch=BATCHES, must=st.integers(0, 12), last=st.booleans())
def test_a_batch_that_is_stopped_is_sent_up_to_the_same_frame(
    lanes: ModuleType, batch: list[SendBytes], must: int, last: bool
) -> None:
    """What is left of it and sent later makes the bytes whole; a frame is never cut, and none is the last then."""
    stopped = []
    for io in (lane_io.PYTHON, lane_io.native(lanes)):
        one, other = make_pair("unix")
        with closing(one), closing(other):
            counts: list[int] = []
            sender = in_thread(
                lambda io=io, one=one, counts=counts: (
                    counts.append(io.send_batch(one, batch, must, bytearray(b"\1"), last)),
                    one.shutdown(socket.SHUT_WR),
                )
            )
            got = receive_exactly(other, len(b"".join(seal(batch))), or_end=True)
            sender.join()
            stopped.append((counts[0], got))
            assert counts[0] >= min(must, len(batch))
            assert got == b"".join(seal(batch[: counts[0]], last and counts[0] == len(batch)))
    assert stopped[0] == stopped[1]


def test_a_stop_that_comes_while_a_batch_is_sent(io: LaneIo, pair: tuple[socket.socket, socket.socket]) -> None:
    """It is looked at between segments: the one being sent is finished, and no other begun."""
    batch = [segment(index, bytes([index]) * BURST_BYTES) for index in range(20)]
    stop, counts = bytearray(1), list[int]()
    sender = in_thread(lambda: counts.append(io.send_batch(pair[0], batch, 0, stop)))
    got = receive_exactly(pair[1], BURST_BYTES * 3 // 2)
    stop[0] = 1
    sender.join(0.05)
    while not counts:  # not all of it fits into the buffers of the sockets
        with contextlib.suppress(BlockingIOError):
            got += pair[1].recv(BURST_BYTES // 4)
    pair[0].shutdown(socket.SHUT_WR)
    got += receive_exactly(pair[1], 20 << 20, or_end=True)
    assert 2 <= counts[0] < 20
    assert got == b"".join(seal(batch[: counts[0]]))


@settings(max_examples=25, deadline=None)
@given(batch=BATCHES, sparse=st.booleans())
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_batch_is_read_back(lanes: ModuleType, kind: str, batch: list[SendBytes], sparse: bool) -> None:
    native = lane_io.native(lanes)
    expected = [
        bytes(one.data[HEADER_BYTES:] if one.transfer is None else b"" if sparse and one.page % 2 else one.data)
        for one in batch
    ]
    for sending, receiving in ((native, native), (lane_io.PYTHON, native), (native, lane_io.PYTHON)):
        one, other = make_pair(kind)
        with closing(one), closing(other):
            sender = in_thread(lambda one=one, sending=sending: sending.send_batch(one, batch))
            assert read_frames(receiving, other, len(batch), sparse=sparse) == expected
            sender.join()


def test_a_large_batch_is_sent_in_bursts(io: LaneIo, pair: tuple[socket.socket, socket.socket]) -> None:
    """More frames than one system call or one burst takes."""
    batch = [segment(index, bytes([index % 251]) * 5000) for index in range(700)]
    sender = in_thread(lambda: io.send_batch(pair[0], batch))
    assert read_frames(io, pair[1], 700) == [bytes(one.data) for one in batch]
    sender.join()


def test_a_payload_that_comes_in_parts(io: LaneIo, pair: tuple[socket.socket, socket.socket]) -> None:
    """A wait in which too little comes ends with what there is, and only full payloads have sums."""
    payloads, (tail,) = views(100_000, 400_000, 10), views(HEADER_BYTES)
    data = os.urandom(100_000 + 150_000)
    sender = in_thread(lambda: pair[0].sendall(data))
    count, sums = io.receive_payloads(pair[1], payloads, tail, NO_ROOM, WAIT_S)
    while count < len(data):  # an implementation may stop before
        more, _ = io.receive_payloads(pair[1], [payloads[1][count - 100_000 :]], tail, NO_ROOM, WAIT_S)
        count += more
    sender.join()
    assert count == len(data)
    assert sums == [checksum(data[:100_000])]
    assert bytes(payloads[1][:150_000]) == data[100_000:]
    with pytest.raises(BlockingIOError):
        io.receive_payloads(pair[1], [payloads[1][150_000:]], tail, NO_ROOM, WAIT_S)


def test_nothing_comes(io: LaneIo, pair: tuple[socket.socket, socket.socket]) -> None:
    began_s = time.monotonic()
    with pytest.raises(BlockingIOError):
        io.receive_payloads(pair[1], [], *views(HEADER_BYTES), NO_ROOM, WAIT_S)
    assert time.monotonic() - began_s >= WAIT_S * 0.9


def test_a_part_of_the_next_header_is_taken_along(io: LaneIo, pair: tuple[socket.socket, socket.socket]) -> None:
    payloads, (tail,) = views(10, 0, 20), views(HEADER_BYTES)
    pair[0].sendall(bytes(range(35)))
    count, sums = io.receive_payloads(pair[1], payloads, tail, NO_ROOM, WAIT_S)
    assert count == 35
    assert sums == [checksum(view) for view in payloads]
    assert bytes(tail[:5]) == bytes(range(30, 35))


def test_all_headers_of_a_burst_come_with_the_first(io: LaneIo, pair: tuple[socket.socket, socket.socket]) -> None:
    """One receive has what comes before a burst and all its headers; in parts, the reader makes the same of them."""
    batch = [SendBytes(pack_control(b"ping")), *[segment(index, bytes([index]) * 100) for index in range(5)]]
    stream = b"".join(seal(batch))
    for cut in (0, 1, HEADER_BYTES, HEADER_BYTES + 1, 3 * HEADER_BYTES - 1):
        reader = FrameReader()
        headers_end = HEADER_BYTES + 4 + 5 * HEADER_BYTES
        pair[0].sendall(stream[: headers_end - cut])
        io.receive_payloads(pair[1], [], *reader.buffers(), reader.header_room(), WAIT_S)
        assert reader.received(HEADER_BYTES) == []
        payload, tail = reader.buffers()
        count, _ = io.receive_payloads(pair[1], [payload], tail, reader.header_room(), WAIT_S)
        assert count == 4 + 5 * HEADER_BYTES - cut
        frames = reader.received(count)
        assert frames[0] == ControlFrame(b"ping")
        pair[0].sendall(stream[headers_end - cut :])
        if cut:
            assert len(frames) == 1
            *_, tail = reader.buffers()
            assert len(tail) == (cut if cut < 4 * HEADER_BYTES else 1)
            count, _ = io.receive_payloads(pair[1], [], tail, reader.header_room(), WAIT_S)
            frames += reader.received(count)
        assert [frame.header.page for frame in frames[1:] if isinstance(frame, SegmentStart)] == [0, 1, 2, 3, 4]
        views_ = [memoryview(bytearray(100)) for _ in range(5)]
        for view in views_:
            assert reader.deliver_to(view) == []
        *payloads, tail = reader.buffers()
        count, sums = io.receive_payloads(pair[1], payloads, tail, reader.header_room(), WAIT_S)
        assert count == 500
        assert sums == [checksum(bytes([index]) * 100) for index in range(5)]
        assert len(reader.received(count)) == 5
        assert reader.idle


def test_the_stream_ends_in_the_middle(io: LaneIo, pair: tuple[socket.socket, socket.socket]) -> None:
    payloads, (tail,) = views(300_000, 100_000), views(HEADER_BYTES)
    data = os.urandom(350_000)

    def send_and_end() -> None:
        pair[0].sendall(data)
        pair[0].shutdown(socket.SHUT_WR)

    sender = in_thread(send_and_end)
    received, sums = io.receive_payloads(pair[1], payloads, tail, NO_ROOM, WAIT_S)
    while received < len(data):
        more, _ = io.receive_payloads(pair[1], [payloads[1][received - 300_000 :]], tail, NO_ROOM, WAIT_S)
        assert more
        received += more
    assert sums == [checksum(data[:300_000])]
    assert io.receive_payloads(pair[1], [payloads[1][50_000:]], tail, NO_ROOM, WAIT_S) == (0, [])
    assert io.receive_payloads(pair[1], [], tail, NO_ROOM, WAIT_S) == (0, [])
    sender.join()


def test_a_peer_that_resets(io: LaneIo) -> None:
    one, other = make_pair("tcp")
    with closing(one), closing(other):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()
        with pytest.raises(ConnectionResetError):
            io.receive_payloads(other, [], *views(HEADER_BYTES), NO_ROOM, 1.0)
        with pytest.raises(BrokenPipeError):
            io.send_batch(other, [segment(0, bytes(1000))])


def test_a_closed_socket(io: LaneIo, pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    with pytest.raises(OSError, match="descriptor") as caught:
        io.receive_payloads(pair[1], [], *views(HEADER_BYTES), NO_ROOM, WAIT_S)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="descriptor"):
        io.send_batch(pair[1], [segment(0, b"x")])


def test_a_socket_that_does_not_block_is_refused_when_it_is_full(
    io: LaneIo, pair: tuple[socket.socket, socket.socket]
) -> None:
    pair[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        io.send_batch(pair[0], [segment(0, bytes(1 << 24)), segment(1, bytes(1 << 24))])


class Interrupted(Exception):
    pass


@pytest.fixture
def interrupt() -> Iterator[Callable[..., list[int]]]:
    """Have signals come in the main thread, beginning soon; the first handler raises, or all only count.

    One that comes just before a system call does not end it, so where it is to raise they come until it has.
    """
    stop = threading.Event()
    calls: list[int] = []
    threads: list[threading.Thread] = []
    before = signal.getsignal(signal.SIGUSR1)

    def begin(*, raises: bool, count: int = 1) -> list[int]:
        def handler(number: int, _: object) -> None:
            calls.append(number)
            if raises and len(calls) == 1:
                raise Interrupted

        def send_signals() -> None:
            for _ in itertools.count() if raises else range(count):
                if stop.wait(0.02) or (raises and calls):
                    return
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        signal.signal(signal.SIGUSR1, handler)
        threads.append(in_thread(send_signals))
        return calls

    yield begin
    stop.set()
    for thread in threads:
        thread.join()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("size", [0, 100_000], ids=["header", "payload"])
def test_a_signal_handler_that_raises_ends_a_receive(
    io: LaneIo, pair: tuple[socket.socket, socket.socket], interrupt: Callable[..., list[int]], size: int
) -> None:
    payloads, (tail,) = views(*[size] * bool(size)), views(HEADER_BYTES)
    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 5, 0))

    def receive() -> None:
        interrupt(raises=True)
        io.receive_payloads(pair[1], payloads, tail, NO_ROOM, 5.0)

    with pytest.raises(Interrupted):
        receive()


def test_a_signal_handler_that_raises_ends_a_send(
    io: LaneIo, pair: tuple[socket.socket, socket.socket], interrupt: Callable[..., list[int]]
) -> None:
    batch = [segment(index, bytes(1 << 24)) for index in range(2)]

    def send() -> None:
        interrupt(raises=True)
        io.send_batch(pair[0], batch)

    with pytest.raises(Interrupted):
        send()


def test_signals_do_not_disturb_the_bytes(
    io: LaneIo, pair: tuple[socket.socket, socket.socket], interrupt: Callable[..., list[int]]
) -> None:
    batch = [segment(index, os.urandom(1 << 20)) for index in range(20)]
    expected = b"".join(seal(batch))
    received: list[bytes] = []

    def read_slowly() -> None:
        data = bytearray()
        while len(data) < len(expected):
            data += pair[1].recv(1 << 20)
            time.sleep(0.003)
        received.append(bytes(data))

    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 5, 0))
    reader = in_thread(read_slowly)
    calls = interrupt(raises=False, count=100)
    io.send_batch(pair[0], batch)
    reader.join()
    assert calls
    assert received == [expected]


def test_wrong_arguments_of_the_extension(lanes: ModuleType) -> None:
    """Each is refused with nothing sent, and everything taken before is given back."""
    good = bytearray(1000)
    tail = memoryview(bytearray(HEADER_BYTES))
    one, other = make_pair("unix")
    with closing(one), closing(other):
        fd = one.fileno()
        strided = memoryview(bytearray(100))[::2]
        batches: list[tuple[object, type[Exception]]] = [
            ((SendBytes(good),), TypeError),
            ([SendBytes(good), b"not a tuple"], TypeError),
            ([SendBytes(good), (b"short",)], TypeError),
            ([SendBytes(good), SendBytes("text")], TypeError),  # type: ignore[arg-type]
            ([SendBytes(good), SendBytes(strided, 1)], BufferError),
            ([SendBytes(good), SendBytes(good, -1)], OverflowError),
            ([SendBytes(good), SendBytes(good, 1 << 64)], OverflowError),
            ([SendBytes(good), SendBytes(good, 1, 1 << 32)], OverflowError),
            ([SendBytes(good), SendBytes(good, 1, 0, 256)], OverflowError),
            ([SendBytes(good), SendBytes(good, 1, "page")], TypeError),  # type: ignore[arg-type]
            ([SendBytes(good), SendBytes(good, 1, checksum=-1)], OverflowError),
            ([SendBytes(good), SendBytes(good, 1, checksum=1 << 64)], OverflowError),
            ([SendBytes(good), SendBytes(good, 1, checksum="sum")], TypeError),  # type: ignore[arg-type]
        ]
        for batch, error in batches:
            with pytest.raises(error):
                lanes.send(fd, batch, 256, BURST_BYTES, 0, lane_io.NEVER, False)
        for stop in (b"", bytearray(2)):
            with pytest.raises(ValueError, match="one byte"):
                lanes.send(fd, [], 256, BURST_BYTES, 0, stop, False)
        with pytest.raises(TypeError):
            lanes.send(fd, [], 256, BURST_BYTES, 0, None, False)
        for max_burst, burst_bytes in ((0, 1), (1, 0), (1 << 16, 1)):
            with pytest.raises(ValueError, match="burst"):
                lanes.send(fd, [], max_burst, burst_bytes, 0, lane_io.NEVER, False)
        with pytest.raises(BufferError):
            lanes.receive(fd, [memoryview(good), memoryview(b"read-only")], tail, NO_ROOM, WAIT_S)
        with pytest.raises(BufferError):
            lanes.receive(fd, [memoryview(good), strided], tail, NO_ROOM, WAIT_S)
        with pytest.raises(BufferError):
            lanes.receive(fd, [memoryview(good)], b"read-only", NO_ROOM, WAIT_S)
        with pytest.raises(BufferError):
            lanes.receive(fd, [memoryview(good)], tail, b"read-only", WAIT_S)
        with pytest.raises(TypeError):
            lanes.receive(fd, [memoryview(good), 5], tail, NO_ROOM, WAIT_S)
        with pytest.raises(TypeError):
            lanes.receive(fd, memoryview(good), tail, NO_ROOM, WAIT_S)
        for wait_s in (-1.0, float("nan"), 1e9):
            with pytest.raises(ValueError, match="wait_s"):
                lanes.receive(fd, [], tail, NO_ROOM, wait_s)
        with pytest.raises(BlockingIOError):
            lanes.receive(other.fileno(), [], tail, NO_ROOM, 0.0)
        good.append(1)  # a bytearray that is exported cannot grow


def test_nothing_leaks(lanes: ModuleType) -> None:
    io = lane_io.native(lanes)
    payload = bytearray(5000)
    batch = [
        SendBytes(pack_control(b"ping")),
        *[SendBytes(memoryview(payload), 1, page, 0, 0, 5000) for page in (0, 1)],
    ]
    wrong = [*batch, SendBytes("text")]  # type: ignore[arg-type]
    size = sum(map(len, seal(batch)))
    targets, (tail,) = views(2000, size - 2000), views(HEADER_BYTES)
    one, other = make_pair("unix")

    def rounds(count: int) -> None:
        for _ in range(count):
            io.send_batch(one, batch)
            assert io.receive_payloads(other, targets, tail, NO_ROOM, WAIT_S)[0] == size
            with pytest.raises(TypeError):
                io.send_batch(one, wrong)
            with pytest.raises(BlockingIOError):
                io.receive_payloads(other, [], tail, NO_ROOM, 0.0)
            with pytest.raises(BufferError):
                lanes.receive(other.fileno(), [*targets, memoryview(b"read-only")], tail, NO_ROOM, 0.0)

    with closing(one), closing(other):
        rounds(500)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        counts = [sys.getrefcount(thing) for thing in (*targets, tail, payload, batch, batch[1], targets)]
        rounds(5000)
        assert [sys.getrefcount(thing) for thing in (*targets, tail, payload, batch, batch[1], targets)] == counts
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 2000
