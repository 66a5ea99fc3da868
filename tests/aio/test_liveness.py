"""Who hangs is found at the configured time, who moves is never given up, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from faultkit import Wall, byte_endpoint, content, offer_bytes, send_bytes, until

import lynx_net
from lynx_net import LinkConfig
from lynx_net.aio.handshake import answer_hello, make_hello
from lynx_net.errors import ConnectionLostError, LynxError, PeerTimeoutError
from lynx_net.testing.clock import run_virtual
from lynx_net.transport import Address, SocketOptions, transport_for

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from lynx_net.wire.messages import Hello

KIB = 1024
DEADLINES_S = [0.5, 5.0, 60.0]
ROOT = Path(__file__).resolve().parents[2]


async def _virtually(run: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.to_thread(run_virtual, run)


def _in_time(waited_s: float, deadline_s: float) -> bool:
    return abs(waited_s - deadline_s) <= 0.1 * deadline_s


@pytest.mark.parametrize("deadline_s", DEADLINES_S)
@pytest.mark.parametrize("answered", [0, 2])
async def test_a_peer_that_hangs_while_connecting(deadline_s: float, answered: int) -> None:
    """It answers some lanes of three, or none, and then nothing more: PeerTimeoutError at the deadline."""

    async def run() -> float:
        address = Address.parse("memory://mute")
        listener = await transport_for(address).listen(address, SocketOptions())
        config = LinkConfig(deadline_s=deadline_s)

        def greet(hello: Hello) -> Hello:
            return make_hello(config, hello.link, bytes(8), hello.lane, hello.lanes, None, keyed=False)

        async def answer() -> None:
            for _ in range(answered):
                await answer_hello(await listener.accept(), greet, None)

        answering = asyncio.create_task(answer())
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(PeerTimeoutError, match="handshake"):
            async with lynx_net.connect("memory://mute", config=config, lanes=3):
                pass
        await answering
        listener.close()
        return asyncio.get_running_loop().time() - began_s

    assert _in_time(await _virtually(run()), deadline_s)


@pytest.mark.parametrize("deadline_s", DEADLINES_S)
@pytest.mark.parametrize("idle_share", [0.0, 0.24, 0.99, 3.3])
async def test_a_peer_that_hangs_on_an_idle_link(deadline_s: float, idle_share: float) -> None:
    """Both sides find it at the deadline +- 10 %, at whatever moment between two pings it began to hang."""

    async def run() -> list[float]:
        left, right = byte_endpoint(deadline_s=deadline_s), byte_endpoint(deadline_s=deadline_s)
        server = await left.serve("memory://back")
        async with Wall("memory://front", server.url) as wall:
            link = await right.connect("memory://front")
            served = await server.accept()
            await asyncio.sleep(idle_share * deadline_s)
            assert link.error is None
            wall.shut()
            waited = await asyncio.gather(*(_until_found(one) for one in (link, served)))
        await right.close()
        await server.close()
        return waited

    for waited_s in await _virtually(run()):
        assert _in_time(waited_s, deadline_s), waited_s


async def _until_found(link: Any) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await link.closed()
    assert isinstance(link.error, PeerTimeoutError)
    assert "silent" in str(link.error)
    return loop.time() - began_s


@pytest.mark.parametrize("deadline_s", DEADLINES_S)
@pytest.mark.parametrize("rate", ["400Mbit", "4Mbit"])
async def test_a_peer_that_hangs_in_a_transfer(deadline_s: float, rate: str) -> None:
    """The sending side, whose lanes are full, and the receiving side, which is owed bytes, both find it in time."""

    async def run() -> list[float]:
        config = {"deadline_s": deadline_s, "progress_timeout_s": 10 * deadline_s, "segment_bytes": 64 * KIB}
        receiver, sender = byte_endpoint(**config), byte_endpoint(rate=rate, **config)
        server = await receiver.serve("memory://back")
        async with Wall("memory://front", server.url) as wall:
            link = await sender.connect("memory://front", lanes=2)
            sending = asyncio.create_task(send_bytes(link, "r", 600, [[64 * KIB, 64 * KIB]]))
            transfer = await anext(aiter(server))
            await until(lambda: transfer.stats.segments > 5)
            wall.shut()
            waited = await asyncio.gather(_until_fails(sending), _until_fails(transfer.complete))
        await sender.close()
        await server.close()
        return waited

    for waited_s in await _virtually(run()):
        assert _in_time(waited_s, deadline_s), waited_s


async def _until_fails(awaitable: Any) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(PeerTimeoutError):
        await awaitable
    return loop.time() - began_s


async def test_a_peer_that_moves_is_never_killed_however_long_it_takes() -> None:
    """A transfer of hours: less than a segment in a deadline, and in a progress timeout."""

    async def run() -> float:
        config = {"deadline_s": 5.0, "progress_timeout_s": 30.0, "segment_bytes": 64 * KIB}
        receiver, sender = byte_endpoint(**config), byte_endpoint(rate=4000, **config)
        server = await receiver.serve("memory://crawl")
        link = await sender.connect(server.url)
        sending = asyncio.create_task(send_bytes(link, "r", 40, [[64 * KIB, 17]]))
        transfer = await anext(aiter(server))
        await transfer.complete
        await sending
        assert all(transfer.got[page, 0] == content(page, 0, 64 * KIB)[: 64 * KIB] for page in range(40))
        elapsed_s = asyncio.get_running_loop().time()
        await sender.close()
        await server.close()
        return elapsed_s

    assert await _virtually(run()) > 3600


SENDER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from faultkit import byte_endpoint, send_bytes

async def main():
    side = byte_endpoint(rate="50Mbit")
    link = await side.connect(sys.argv[1], lanes=2)
    await send_bytes(link, "r", 4000, [[64 * 1024, 64 * 1024]])

asyncio.run(main())
"""

RECEIVER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from faultkit import byte_endpoint

async def main():
    server = await byte_endpoint().serve(sys.argv[1])
    print(server.url, flush=True)
    async for transfer in server:
        await transfer.closed()

asyncio.run(main())
"""


class Children:
    """Real processes; none is left after the test."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, code: str, url: str) -> subprocess.Popen[str]:
        paths = os.pathsep.join((str(ROOT), str(ROOT / "codec"), str(ROOT / "gpu")))
        command = [sys.executable, "-c", code, url, str(Path(__file__).parent)]
        one = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )
        self._started.append(one)
        return one

    def kill(self, one: subprocess.Popen[str]) -> None:
        one.kill()
        one.wait()

    def close(self) -> None:
        for one in self._started:
            self.kill(one)
            assert one.stdout is not None
            one.stdout.close()


@pytest.fixture
def children() -> Iterator[Children]:
    running = Children()
    yield running
    running.close()


async def test_a_killed_sender_is_noticed_within_a_second(children: Children) -> None:
    receiver = byte_endpoint()
    server = await receiver.serve("tcp://127.0.0.1:0")
    process = children.start(SENDER, server.url)
    transfer = await anext(aiter(server))
    await until(lambda: transfer.stats.segments > 5)
    children.kill(process)
    async with asyncio.timeout(1):
        with pytest.raises(ConnectionLostError):
            await transfer.complete
    await server.close()


async def test_a_receiver_killed_and_restarted_on_its_port_again_and_again(children: Children) -> None:
    """Each time the sender learns it within a second, and its next link reaches the new process."""
    url = "tcp://127.0.0.1:0"
    for _ in range(3):
        process = children.start(RECEIVER, url)
        assert process.stdout is not None
        url = (await asyncio.to_thread(process.stdout.readline)).strip()
        sender = byte_endpoint(rate="50Mbit")
        link = await sender.connect(url, lanes=2)
        await send_bytes(link, "whole", 4, [[4096, 4096]])
        sending = asyncio.create_task(send_bytes(link, "cut", 4000, [[64 * KIB, 64 * KIB]]))
        await asyncio.sleep(0.1)
        children.kill(process)
        async with asyncio.timeout(1):
            with pytest.raises(ConnectionLostError):
                await sending
            await link.closed()
        with pytest.raises(LynxError):
            offer_bytes(link, "too late", 1, [[1]])
        await sender.close()


async def test_a_receiver_restarted_in_the_same_process_has_no_stale_data() -> None:
    """Fifty incarnations on one port, each left in the middle of a transfer: every next one starts from nothing."""
    url = "tcp://127.0.0.1:0"
    sender = byte_endpoint(rate="200Mbit")
    for round_ in range(50):
        receiver = byte_endpoint()
        server = await receiver.serve(url)
        url = server.url
        link = await sender.connect(url)
        size = 1000 + round_
        whole = asyncio.create_task(send_bytes(link, f"whole {round_}", 3, [[size]]))
        transfers = aiter(server)
        transfer = await anext(transfers)
        await transfer.complete
        await whole
        assert transfer.offer.request_id == f"whole {round_}"
        assert transfer.got == {(page, 0): content(page, 0, size)[:size] for page in range(3)}
        left = asyncio.create_task(send_bytes(link, f"left {round_}", 4000, [[64 * KIB]]))
        await anext(transfers)
        await server.close()
        with pytest.raises(ConnectionLostError):
            await left
    assert sender.links == {}
    await sender.close()


@pytest.mark.parametrize("url", ["memory://waiters", "tcp://127.0.0.1:0"])
async def test_closing_a_server_ends_every_kind_of_waiter(url: str) -> None:
    """Iteration and accept, readiness, requests in both directions, room in the queue: all end within a second."""
    receiver, sender = byte_endpoint(), byte_endpoint(rate="1Mbit", send_queue_bytes=4096)
    server = await receiver.serve(url)
    link = await sender.connect(server.url)
    served = await server.accept()
    sending = asyncio.create_task(send_bytes(link, "r", 400, [[4096, 4096]]))
    transfer = await anext(aiter(server))
    waiters = {
        "iterating the server": anext(aiter(server)),
        "iterating its link": anext(aiter(served)),
        "iterating the peer's link": anext(aiter(link)),
        "accepting": server.accept(),
        "requests at the server": anext(served.requests()),
        "requests at the peer": anext(link.requests()),
        "asking": served.request("never answered"),
        "being asked": link.request("never answered either"),
        "anchor": _wait(transfer.anchor_ready),
        "layer": _wait(transfer.layer_ready(0)),
        "complete": _wait(transfer.complete),
    }
    tasks = {name: asyncio.ensure_future(one) for name, one in waiters.items()}
    await asyncio.sleep(0.1)
    taken = {name for name, task in tasks.items() if task.done()}
    assert taken == {"requests at the server", "requests at the peer"}
    again = {"more requests": asyncio.ensure_future(anext(served.requests()))}
    began_s = time.monotonic()
    await server.close()
    assert time.monotonic() - began_s < 1
    async with asyncio.timeout(1):
        for name, task in [*tasks.items(), *again.items(), ("sending", sending)]:
            if name not in taken:
                with pytest.raises((LynxError, StopAsyncIteration)):
                    await task
    with pytest.raises(ConnectionLostError, match="closed"):
        await server.accept()
    assert [one async for one in server] == []
    await sender.close()


async def _wait(readiness: Any) -> None:
    await readiness


async def test_an_unknown_request_is_answered_at_once() -> None:
    """One round trip on a link paced to a crawl, not a timeout."""

    async def run() -> float:
        left, right = byte_endpoint(rate="100kbit"), byte_endpoint(rate="100kbit")
        server = await left.serve("memory://unknown")
        link = await right.connect(server.url)
        served = await server.accept()

        async def answer() -> None:
            async for request in served.requests():
                request.refuse("unknown")

        answering = asyncio.create_task(answer())
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(lynx_net.errors.RequestRefusedError, match="unknown"):
            await link.request("nobody knows it")
        elapsed_s = loop.time() - began_s
        await right.close()
        await server.close()
        await answering
        return elapsed_s

    assert await _virtually(run()) < 0.1


async def test_a_server_whose_links_nobody_accepts_keeps_only_the_live_ones() -> None:
    """A peer that reconnects for ever does not make it grow."""
    receiver = byte_endpoint()
    server = await receiver.serve("tcp://127.0.0.1:0")
    for _ in range(30):
        sender = byte_endpoint()
        await sender.connect(server.url)
        await sender.close()
        async with asyncio.timeout(1):
            await until(lambda: not receiver.links)
    sender = byte_endpoint()
    link = await sender.connect(server.url)
    served = await server.accept()
    assert served.error is None
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(server.accept(), 0.05)
        pytest.fail("an old link was kept")
    await sender.close()
    await server.close()
    assert link.error is not None


async def test_silence_is_not_made_up_by_a_busy_event_loop() -> None:
    """The application blocks its loop for longer than the deadline: nobody is given up."""
    receiver, sender = byte_endpoint(deadline_s=0.5), byte_endpoint(deadline_s=0.5)
    server = await receiver.serve("tcp://127.0.0.1:0")
    link = await sender.connect(server.url)
    await asyncio.sleep(0.1)
    time.sleep(0.8)  # noqa: ASYNC251
    await send_bytes(link, "r", 2, [[1000]])
    await sender.close()
    await server.close()


@pytest.mark.parametrize("url", ["memory://farewell", "tcp://127.0.0.1:0"])
async def test_both_sides_may_close_at_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither waits out the time that a farewell may take when the other has left already."""
    caplog.set_level("DEBUG", "lynx_net")
    receiver, sender = byte_endpoint(), byte_endpoint()
    server = await receiver.serve(url)
    for _ in range(40):
        link = await sender.connect(server.url)
        served = await server.accept()
        await send_bytes(link, "r", 1, [[100]])
        await asyncio.gather(link.close(), served.close())
    await sender.close()
    await server.close()
    assert "did not leave in time" not in caplog.text
