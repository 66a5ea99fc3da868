"""Peers that hang, die, crawl, restart or lie: found in time, typed, and nobody else's problem."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from faultkit import descriptors_and_tasks

import lynx_net
from lynx_net import LinkConfig
from lynx_net.errors import (
    ConnectionLostError,
    IntegrityError,
    LynxError,
    PeerTimeoutError,
    TransferAbortedError,
)
from lynx_net.testing.clock import run_virtual
from lynx_net.testing.relay import FaultyRelay

DEADLINE_S = 1.0
QUICK = LinkConfig(deadline_s=DEADLINE_S)


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return host, int(port)


async def _through_relay(cache: Any, trouble: Any, **connect: Any) -> tuple[Any, BaseException | None, float]:
    """Send a cache through a relay that `trouble(relay, transfer)` disturbs; the transfer, and the sender's error."""
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", config=QUICK) as server,
        FaultyRelay.to(*_address(server.url)) as relay,
        lynx_net.connect(relay.url, **({"config": QUICK, "rate": "4Mbit"} | connect)) as link,
    ):
        sending = asyncio.create_task(cache.send_on(link))
        async for transfer in server:
            await trouble(relay, transfer)
            began_s = time.monotonic()
            await transfer.closed()
            await asyncio.wait([sending])
            return transfer, sending.exception(), time.monotonic() - began_s
    raise AssertionError


async def test_a_hung_peer_is_found_at_the_deadline(make_cache: Any) -> None:
    """Connections stay open and nothing moves: both sides get a typed error, one deadline later."""

    async def stall(relay: FaultyRelay, transfer: Any) -> None:
        await transfer.layer_ready(1)
        relay.stall()

    transfer, error, waited_s = await _through_relay(make_cache(layers=12, tokens=1000), stall)
    assert isinstance(error, PeerTimeoutError)
    with pytest.raises(PeerTimeoutError, match="silent"):
        await transfer.residual_ready
    assert DEADLINE_S * 0.6 < waited_s < DEADLINE_S * 2


async def test_a_connection_that_stays_lost_is_found_within_a_second(make_cache: Any) -> None:
    async def cut(relay: FaultyRelay, transfer: Any) -> None:
        await transfer.layer_ready(1)
        relay.refusing = True
        relay.cut()

    transfer, error, waited_s = await _through_relay(make_cache(layers=12, tokens=1000), cut, lanes=2)
    assert isinstance(error, ConnectionLostError)
    with pytest.raises(ConnectionLostError):
        await transfer.residual_ready
    await transfer.layer_ready(1)
    assert QUICK.resume_s * 0.9 < waited_s < 1.0


async def test_a_slow_peer_that_moves_is_never_killed(make_cache: Any, same: Any) -> None:
    """The transfer takes several deadlines, a few bytes at a time, and completes."""
    cache = make_cache(tokens=220)
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", config=QUICK) as server,
        FaultyRelay.to(*_address(server.url)) as relay,
    ):
        relay.faults.rate_bps = 120_000
        relay.faults.chunk_bytes = 512
        async with lynx_net.connect(relay.url, config=QUICK) as link:
            sending = asyncio.create_task(cache.send_on(link))
            async for transfer in server:
                await transfer.complete
                break
            await sending
    assert transfer.complete.at_s - transfer.offered_at_s > 2 * DEADLINE_S
    assert same(transfer.target, cache.decoded("lynx"))


async def test_one_flipped_byte_names_transfer_layer_and_stream(make_cache: Any) -> None:
    """The transfer fails with IntegrityError and never fires; the link lives on."""
    cache = make_cache(layers=1, tokens=256)
    async with (
        lynx_net.serve("tcp://127.0.0.1:0") as server,
        FaultyRelay.to(*_address(server.url)) as relay,
        lynx_net.connect(relay.url) as link,
    ):
        relay.faults.flip_at = {relay.passed_bytes + 3000}
        sending = asyncio.create_task(cache.send_on(link))
        async for transfer in server:
            with pytest.raises(IntegrityError) as caught:
                await transfer.anchor_ready
            break
        assert (caught.value.transfer, caught.value.layer, caught.value.stream) == (1, 0, 0)
        with pytest.raises(TransferAbortedError, match="checksum"):
            await sending
        await cache.send_on(link, "again")


async def test_a_truncated_stream_never_fires(make_cache: Any) -> None:
    cache = make_cache(layers=1, tokens=256)
    async with (
        lynx_net.serve("tcp://127.0.0.1:0") as server,
        FaultyRelay.to(*_address(server.url)) as relay,
        lynx_net.connect(relay.url, rate="1Mbit") as link,
    ):
        relay.faults.cut_at = relay.passed_bytes + 6000
        sending = asyncio.create_task(cache.send_on(link))
        async for transfer in server:
            with pytest.raises(ConnectionLostError):
                await transfer.anchor_ready
            break
        with pytest.raises(ConnectionLostError):
            await sending


async def test_a_silent_application_is_not_a_hung_peer(make_cache: Any) -> None:
    """The sender's model takes many deadlines before the next layer; heartbeats keep the link."""
    cache = make_cache()

    async def run() -> None:
        async with lynx_net.serve("memory://silent") as server, lynx_net.connect(server.url) as link:

            async def slowly() -> None:
                async with link.send("r", cache.layout, codec="lynx", fine=cache.fine) as sending:
                    for layer in range(2):
                        await asyncio.sleep(25)
                        await sending.write(layer, cache.arrays[layer, "key"], cache.arrays[layer, "value"])

            sending = asyncio.create_task(slowly())
            async for transfer in server:
                await transfer.complete
                break
            await sending

    await asyncio.to_thread(run_virtual, run())


async def test_a_transfer_that_stalls_is_aborted_alone(make_cache: Any) -> None:
    """The peer is alive but never sends what it owes: progress_timeout_s ends the transfer, not the link."""
    cache = make_cache()
    config = LinkConfig(progress_timeout_s=20)

    async def run() -> float:
        async with lynx_net.serve("memory://stall", config=config) as server, lynx_net.connect(server.url) as link:
            sending = link.send("r", cache.layout, codec="lynx", fine=cache.fine)
            await sending.write(0, cache.arrays[0, "key"], cache.arrays[0, "value"])
            async for transfer in server:
                with pytest.raises(TransferAbortedError, match="no byte of transfer 1 arrived for 20 s"):
                    await transfer.complete
                break
            at_s = asyncio.get_running_loop().time()
            with pytest.raises(TransferAbortedError, match="20 s"):
                await sending.delivered
            await cache.send_on(link, "again")
            return at_s

    assert await asyncio.to_thread(run_virtual, run()) == pytest.approx(20, abs=0.5)


async def test_closing_with_waiters_is_quick_and_tells_everyone(make_cache: Any) -> None:
    cache = make_cache(layers=6, tokens=1000)
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        async with lynx_net.connect(server.url, rate="5Mbit") as link:
            sending = asyncio.create_task(cache.send_on(link))
            asked = asyncio.create_task(link.request("anything"))
            transfer = await anext(aiter(server))
            waiters = [
                asyncio.create_task(_wait(one))
                for one in (transfer.anchor_ready, transfer.residual_ready, transfer.layer_ready(5), transfer.complete)
            ]
            await asyncio.sleep(0.05)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 1
        outcomes = await asyncio.gather(sending, asked, *waiters, return_exceptions=True)
        assert all(isinstance(outcome, LynxError) for outcome in outcomes), outcomes


async def _wait(readiness: Any) -> None:
    await readiness


async def test_a_server_closes_with_links_open(make_cache: Any) -> None:
    cache = make_cache(layers=6, tokens=1000)
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        connecting = lynx_net.connect(server.url, rate="5Mbit", lanes=2)
        link = await connecting.__aenter__()
        sending = asyncio.create_task(cache.send_on(link))
        await server.accept()
    with pytest.raises(ConnectionLostError):
        await sending
    with pytest.raises(ConnectionLostError):
        link.send("late", cache.layout)
    await connecting.__aexit__(None, None, None)


CHILD = """
import asyncio, sys, numpy as np, lynx_net
async def main():
    layout = lynx_net.CacheLayout(layers=40, tokens=512, heads=2, key_size=32, value_size=32)
    array = np.ones((512, 2, 32), np.float32)
    async with lynx_net.connect(sys.argv[1], rate="4Mbit", config=lynx_net.LinkConfig(deadline_s=2)) as link:
        async with link.send("r", layout) as transfer:
            for layer in range(40):
                await transfer.write(layer, array, array)
asyncio.run(main())
"""


@pytest.fixture
def child() -> Any:
    """Start a real sending process; it is gone after the test."""
    children: list[subprocess.Popen[bytes]] = []

    def start(url: str) -> subprocess.Popen[bytes]:
        children.append(
            subprocess.Popen([sys.executable, "-c", CHILD, url], stderr=subprocess.PIPE, cwd=os.path.dirname(__file__))
        )
        return children[-1]

    yield start
    for one in children:
        one.kill()
        one.wait()
        assert one.stderr is not None
        one.stderr.close()


async def test_a_killed_process_is_noticed_within_a_second(child: Any) -> None:
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        process = child(server.url)
        async for transfer in server:
            await transfer.layer_ready(2)
            process.kill()
            async with asyncio.timeout(1):
                with pytest.raises(ConnectionLostError):
                    await transfer.residual_ready
            break


async def test_a_stopped_process_is_found_at_the_deadline_and_learns_it(child: Any) -> None:
    deadline_s = 2.0
    async with lynx_net.serve("tcp://127.0.0.1:0", config=LinkConfig(deadline_s=deadline_s)) as server:
        process = child(server.url)
        async for transfer in server:
            await transfer.layer_ready(2)
            process.send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            with pytest.raises(PeerTimeoutError):
                await transfer.residual_ready
            assert deadline_s * 0.6 < time.monotonic() - began_s < deadline_s * 1.5
            break
        process.send_signal(signal.SIGCONT)
        _, trace = await asyncio.to_thread(process.communicate)
        assert b"ConnectionLostError" in trace or b"PeerTimeoutError" in trace


async def test_a_peer_restarted_on_the_same_port_is_a_new_peer(make_cache: Any, same: Any) -> None:
    """Again and again: the old link fails, the new one works, nothing of the old transfer appears."""
    cache = make_cache()
    url = "tcp://127.0.0.1:0"
    for round_ in range(5):
        async with lynx_net.serve(url) as server:
            url = server.url
            async with lynx_net.connect(url) as link:
                sending = asyncio.create_task(cache.send_on(link, f"round-{round_}"))
                async for transfer in server:
                    await transfer.complete
                    break
                await sending
                assert transfer.offer.request_id == f"round-{round_}"
                assert same(transfer.target, cache.decoded("lynx"))


async def test_files_and_threads_are_given_back(make_cache: Any) -> None:
    """Transfers, aborts and links leave no descriptor and no task behind."""
    cache = make_cache(tokens=40)

    async def rounds(count: int) -> None:
        async with lynx_net.serve("tcp://127.0.0.1:0") as server:
            for index in range(count):
                async with lynx_net.connect(server.url, lanes=2) as link:
                    sending = asyncio.create_task(cache.send_on(link))
                    async for transfer in server:
                        if index % 2:
                            transfer.cancel()
                        await transfer.closed()
                        break
                    await asyncio.wait([sending])
                    sending.exception()

    await rounds(2)
    before = await descriptors_and_tasks()
    await rounds(20)
    assert await descriptors_and_tasks() == before
