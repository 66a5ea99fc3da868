"""UCX lanes: the shipped suite, transfers between processes, deaths, cancellation, and what happens without ucxx."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

import lynx_net
from lynx_net import LinkConfig
from lynx_net.errors import (
    BackendMissingError,
    ConnectionFailedError,
    ConnectionLostError,
    HandshakeError,
    LocalProtocolError,
    PeerTimeoutError,
)
from lynx_net.testing.conformance import TransportConformance
from lynx_net.transport import Address, Lane, SocketOptions, transport_for, ucxworker
from lynx_net.transport.ucxbuffers import DeviceSpan, messages, spans

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

needs_ucxx = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed (extra: ucx)")

CHILD = Path(__file__).parent / "ucx_child.py"
PATTERN = bytes(range(256)) * 4096
URL = "ucx://127.0.0.1:0"
OPTIONS = SocketOptions()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def _child(mode: str, url: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """The other process; killed at the end if it still lives."""
    process = subprocess.Popen([sys.executable, str(CHILD), mode, url], env=os.environ | environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def _lane_from(mode: str, **environment: str) -> AsyncIterator[tuple[Lane, subprocess.Popen[bytes]]]:
    """A lane that another process has opened."""
    address = Address.parse(URL)
    listener = await transport_for(address).listen(address, OPTIONS)
    try:
        with _child(mode, listener.url, **environment) as process:
            lane = await listener.accept()
            try:
                yield lane, process
            finally:
                lane.close()
    finally:
        listener.close()


async def _read_on(lane: Lane, view: memoryview) -> None:
    while True:
        await lane.receive_into([view])


@needs_ucxx
class TestUcx(TransportConformance):
    url = URL
    free_url = f"ucx://127.0.0.1:{_free_port()}"


@needs_ucxx
@pytest.mark.parametrize("name", [name for name in dir(TransportConformance) if name.startswith("test_")])
def test_ucx_on_uvloop(name: str) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(getattr(TestUcx(), name)())


@needs_ucxx
@pytest.mark.parametrize("environment", [{"UCX_TLS": "tcp"}, {}], ids=["tcp", "best"])
async def test_a_cache_from_another_process(environment: dict[str, str], make_cache: Any, same: Any) -> None:
    """A whole transfer, over TCP alone and over what UCX likes best here (shared memory)."""
    async with lynx_net.serve(URL) as server:
        with _child("send_cache", server.url, **environment) as process:
            async for transfer in server:
                await transfer.complete
                break
            assert await asyncio.to_thread(process.wait, 20) == 0
    assert same(transfer.target, make_cache(layers=4, tokens=1000).decoded("lynx"))


@needs_ucxx
@pytest.mark.parametrize("environment", [{"UCX_TLS": "tcp"}, {}], ids=["tcp", "best"])
async def test_a_killed_peer_is_found_at_once(environment: dict[str, str]) -> None:
    """In the middle of its messages, by a lane that reads on."""
    view = memoryview(bytearray(1 << 20))
    async with _lane_from("flood", **environment) as (lane, process):
        for _ in range(20):
            await lane.receive_into([view])
        process.kill()
        began_s = time.monotonic()
        with pytest.raises(ConnectionLostError):
            await _read_on(lane, view)
        assert time.monotonic() - began_s < 1
        with pytest.raises(ConnectionLostError):
            await lane.send([b"anybody there?"])


@needs_ucxx
async def test_a_stopped_peer_is_found_at_the_deadline() -> None:
    """A process that hangs keeps its connections; the link's deadline ends them."""
    config = LinkConfig(deadline_s=0.6)
    async with lynx_net.serve(URL, config=config) as server:
        with _child("idle", server.url) as process:
            link = await server.accept()
            process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(3):
                await link.closed()
            assert isinstance(link.error, PeerTimeoutError)


@needs_ucxx
async def test_a_peer_that_closes_and_exits_is_heard_to_the_end() -> None:
    async with _lane_from("last_words") as (lane, process):
        await asyncio.sleep(0.3)
        received = bytearray()
        view = memoryview(bytearray(65536))
        while count := await lane.receive_into([view]):
            received += view[:count]
        assert bytes(received) == PATTERN[:200_000]
        assert await asyncio.to_thread(process.wait, 10) == 0


@needs_ucxx
@pytest.mark.parametrize("environment", [{"UCX_TLS": "tcp", "UCX_RNDV_THRESH": "inf"}, {"UCX_RNDV_THRESH": "1024"}])
async def test_a_cancelled_receive_loses_nothing_wherever_it_is(environment: dict[str, str]) -> None:
    """Receives of many sizes, half of them cancelled at some moment, with messages landing directly or by a detour."""
    rng = random.Random(3)
    cancelled = position = 0
    async with _lane_from("flood", **environment) as (lane, _):
        while position < 24 << 20 or cancelled < 20:
            views = [memoryview(bytearray(rng.choice([1, 48, 5000, 262_144, 1 << 20]))) for _ in range(2)]
            receiving = asyncio.create_task(lane.receive_into(views))
            if rng.random() < 0.5:
                await asyncio.sleep(rng.choice([0, 0, 1e-4, 1e-3]))
                cancelled += receiving.cancel()
            try:
                count = await receiving
            except asyncio.CancelledError:
                continue
            got = b"".join(views)[:count]
            start = position % len(PATTERN)
            assert got == (PATTERN * 3)[start : start + count]
            position += count


@needs_ucxx
async def test_strangers_cost_only_themselves(caplog: pytest.LogCaptureFixture) -> None:
    """Garbage, half a greeting and silence do not keep a lane from being opened."""
    caplog.set_level("INFO", "lynx_net")
    address = Address.parse(URL)
    listener = await transport_for(address).listen(address, OPTIONS)
    bound = Address.parse(listener.url)
    writers = []
    for greeting in (b"GET / HTTP/1.1\r\nHost: nowhere.example\r\n\r\n", b"LYNXUCX1" + b"\xff" * 16, b"LYNX", b""):
        _, writer = await asyncio.open_connection(bound.host, bound.port)
        writer.write(greeting)
        writers.append(writer)
    left, right = await asyncio.gather(transport_for(bound).connect(bound, OPTIONS), listener.accept())
    await left.send([b"hello"])
    assert await right.receive_into([memoryview(bytearray(8))]) == 5
    assert "does not speak" in caplog.text
    assert "impossible values" in caplog.text
    for closeable in (left, right, listener, *writers):
        closeable.close()
    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


@needs_ucxx
async def test_a_server_that_is_something_else() -> None:
    """Another protocol on the port is a typed error, not a wait without end."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP, at your service and longer than a greeting\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        address = Address.parse(f"ucx://127.0.0.1:{port}")
        with pytest.raises((HandshakeError, ConnectionFailedError)):
            await transport_for(address).connect(address, OPTIONS)


@needs_ucxx
async def test_lanes_leave_nothing_behind() -> None:
    """File descriptors and threads are what they were, after lanes that were closed, full, and in use."""

    async def use() -> None:
        address = Address.parse(URL)
        listener = await transport_for(address).listen(address, OPTIONS)
        bound = Address.parse(listener.url)
        for _ in range(5):
            left, right = await asyncio.gather(transport_for(bound).connect(bound, OPTIONS), listener.accept())
            await left.send([b"x" * 300_000])
            blocked = asyncio.create_task(left.send([PATTERN, PATTERN]))
            await asyncio.sleep(0.01)
            left.close()
            right.close()
            with pytest.raises(ConnectionLostError):
                await blocked
        listener.close()
        await asyncio.sleep(0.05)

    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        await use()
    before = (open_files(), threading.active_count())
    for _ in range(3):
        await use()
    assert (open_files(), threading.active_count()) == before
    assert not ucxworker._workers


@needs_ucxx
@pytest.mark.parametrize("chunk_bytes", [1000, 60_000])
async def test_no_more_than_the_window_is_beyond_recall(chunk_bytes: int) -> None:
    """A peer that does not read gets at most its window, whether UCX copies messages or has them fetched."""
    window_bytes = 256 * 1024
    options = SocketOptions(receive_buffer_bytes=window_bytes)
    address = Address.parse(URL)
    listener = await transport_for(address).listen(address, options)
    bound = Address.parse(listener.url)
    left, right = await asyncio.gather(transport_for(bound).connect(bound, options), listener.accept())
    accepted = 0
    with contextlib.suppress(TimeoutError):
        while accepted < 4 * window_bytes:
            async with asyncio.timeout(0.3):
                await left.send([bytes(chunk_bytes)])
            accepted += chunk_bytes
    assert window_bytes // 2 < accepted <= window_bytes
    for closeable in (left, right, listener):
        closeable.close()


@needs_ucxx
async def test_socket_options_that_would_do_nothing_are_refused() -> None:
    address = Address.parse(URL)
    with pytest.raises(LocalProtocolError, match="send_buffer_bytes"):
        await transport_for(address).listen(address, SocketOptions(send_buffer_bytes=65536))


async def test_the_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import lynx_net` needs no ucxx; the first use of ucx:// says what to install."""
    monkeypatch.setattr(ucxworker, "_loaded", None)
    monkeypatch.setitem(sys.modules, "ucxx", None)
    with pytest.raises(BackendMissingError, match=r"lynx-net\[ucx\]") as caught:
        async with lynx_net.connect("ucx://127.0.0.1:7000"):
            pass
    assert caught.value.extra == "ucx"


def test_messages_join_small_buffers_and_cut_large_ones() -> None:
    buffers = [b"", bytes(10), bytes(8192), bytes(70_000), bytes(5), bytes(6)]
    whole = list(messages(spans(buffers), 65_536))
    assert [message.nbytes for message in whole] == [8202, 65_536, 4464, 11]
    assert b"".join(whole) == b"".join(buffers)  # type: ignore[arg-type]
    assert [message.nbytes for message in messages(spans([bytes(100)] * 7), 300)] == [300, 300, 100]


class _DeviceArray:
    """Says what a device array says of itself."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "strides": strides,
            "typestr": "<f2",
            "data": (4096, False),
            "version": 3,
        }


def test_device_arrays_must_be_contiguous() -> None:
    (span,) = spans([_DeviceArray((3, 4), (8, 2))])
    assert isinstance(span, DeviceSpan)
    part = span[8:20]
    assert (span.nbytes, part.nbytes, part.__cuda_array_interface__["data"][0]) == (24, 12, 4104)
    with pytest.raises(ValueError, match="contiguous"):
        spans([_DeviceArray((4, 3), (2, 8))])
