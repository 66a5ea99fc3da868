"""Everybody gets a fair share, and who is slow is slow alone."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from faultkit import SlowKeep, byte_endpoint, send_bytes, take_all

from lynx_net.errors import LynxError, TransferAbortedError
from lynx_net.testing.clock import run_virtual

KIB = 1024


@pytest.mark.parametrize("links", [1, 4])
@pytest.mark.parametrize("streams", [1, 2])
async def test_a_hundred_transfers_finish_together(links: int, streams: int) -> None:
    """Equal transfers offered at once on a paced link end within 10 % of each other; so do those of several senders."""
    count = 100
    sizes = [[40 * KIB] * streams]

    async def run() -> dict[str, float]:
        times: dict[str, float] = {}
        receiver, sender = byte_endpoint(), byte_endpoint(rate="200Mbit")
        server = await receiver.serve("memory://fair")
        taking = asyncio.create_task(take_all(server, times))
        opened = [await sender.connect(server.url, lanes=2) for _ in range(links)]
        async with asyncio.TaskGroup() as group:
            for index in range(count):
                group.create_task(send_bytes(opened[index % links], f"r{index}", 20, sizes))
        await sender.close()
        await server.close()
        await taking
        return times

    times = await asyncio.to_thread(run_virtual, run())
    assert len(times) == count
    assert max(times.values()) <= 1.1 * min(times.values())


async def test_a_late_transfer_gets_its_share_at_once() -> None:
    """Sixteenth of sixteen, offered when the others are half done: it does not wait for their end."""

    async def run() -> tuple[float, float]:
        times: dict[str, float] = {}
        receiver, sender = byte_endpoint(), byte_endpoint(rate="100Mbit")
        server = await receiver.serve("memory://late")
        taking = asyncio.create_task(take_all(server, times))
        link = await sender.connect(server.url)
        async with asyncio.TaskGroup() as group:
            for index in range(15):
                group.create_task(send_bytes(link, f"early {index}", 16, [[64 * KIB]]))
            await asyncio.sleep(0.6)
            group.create_task(send_bytes(link, "small", 1, [[64 * KIB]]))
        await sender.close()
        await server.close()
        await taking
        return times["small"] - 0.6, max(times.values())

    small_s, all_s = await asyncio.to_thread(run_virtual, run())
    assert small_s < 0.2
    assert all_s > 1.2


async def _timed(link: Any, name: str) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await send_bytes(link, name, 16, [[64 * KIB, 64 * KIB]])
    return loop.time() - began_s


async def test_a_slow_receiver_does_not_slow_the_other_links_of_its_sender() -> None:
    """One of two receivers needs 0.2 s a page and stops reading for want of credit; the other gets the full rate."""

    async def run() -> tuple[float, float]:
        slow, quick = byte_endpoint(incoming=SlowKeep, **TIGHT), byte_endpoint()
        sender = byte_endpoint(rate="100Mbit")
        slow_server, quick_server = await slow.serve("memory://slow"), await quick.serve("memory://quick")
        slow_link, quick_link = await sender.connect(slow_server.url), await sender.connect(quick_server.url)
        crawling = asyncio.create_task(_timed(slow_link, "slow"))
        await asyncio.sleep(0.01)
        quick_s = await _timed(quick_link, "quick")
        slow_s = await crawling
        for side in (sender, slow, quick):
            await side.close()
        for server in (slow_server, quick_server):
            await server.close()
        return quick_s, slow_s

    quick_s, slow_s = await asyncio.to_thread(run_virtual, run())
    assert quick_s == pytest.approx(2 * 16 * 64 * KIB * 8 / 100e6, rel=0.1)
    assert slow_s > 5 * quick_s


TIGHT = {"segment_bytes": 64 * KIB, "anchor_window_bytes": 128 * KIB, "residual_window_bytes": 128 * KIB}


async def test_a_stalled_receiver_over_tcp_delays_no_other_receiver() -> None:
    """Its kernel buffers are full and its sending threads blocked; the other link works as if alone."""
    slow, quick, sender = byte_endpoint(), byte_endpoint(), byte_endpoint()
    slow_server, quick_server = await slow.serve("tcp://127.0.0.1:0"), await quick.serve("tcp://127.0.0.1:0")
    slow_link, quick_link = await sender.connect(slow_server.url), await sender.connect(quick_server.url)
    served = await slow_server.accept()
    with served.lock:  # its receiving thread needs the lock for every frame: the receiver reads no more
        # The lock is the slow receiver's own; this thread holds it, and does the quick transfers meanwhile.
        blocked = asyncio.create_task(send_bytes(slow_link, "slow", 64, [[1024 * KIB]]))
        for index in range(20):
            async with asyncio.timeout(5):
                await send_bytes(quick_link, f"quick {index}", 4, [[64 * KIB, 64 * KIB]])
        assert not blocked.done()
    await blocked
    for side in (sender, slow, quick):
        await side.close()
    for server in (slow_server, quick_server):
        await server.close()


async def test_a_slow_sender_does_not_hold_up_the_anchors_of_the_others() -> None:
    """One of two senders crawls at 1 Mbit/s to the same receiver; the other's anchors come at its own rate."""

    async def run() -> float:
        receiver, crawling, quick = byte_endpoint(), byte_endpoint(rate="1Mbit"), byte_endpoint(rate="100Mbit")
        server = await receiver.serve("memory://senders")
        slow_link, quick_link = await crawling.connect(server.url), await quick.connect(server.url)
        loop = asyncio.get_running_loop()
        slow = asyncio.create_task(send_bytes(slow_link, "slow", 16, [[64 * KIB, 64 * KIB]]))
        await asyncio.sleep(0.01)
        began_s = loop.time()
        quick_task = asyncio.create_task(send_bytes(quick_link, "quick", 16, [[64 * KIB, 64 * KIB]]))
        async for transfer in server:
            if transfer.offer.request_id == "quick":
                await transfer.anchor_ready
                break
        elapsed_s = loop.time() - began_s
        for task in (slow, quick_task):
            task.cancel()
        await asyncio.wait([slow, quick_task])
        for side in (crawling, quick, receiver):
            await side.close()
        await server.close()
        return elapsed_s

    assert await asyncio.to_thread(run_virtual, run()) < 1.1 * 16 * 64 * KIB * 8 / 100e6


async def test_an_aborted_transfer_frees_its_turn() -> None:
    """Half of forty transfers are given up; the rest get the whole rate from then on."""

    async def run() -> float:
        receiver, sender = byte_endpoint(), byte_endpoint(rate="100Mbit")
        server = await receiver.serve("memory://turns")
        times: dict[str, float] = {}

        async def take() -> None:
            async with asyncio.TaskGroup() as group:
                async for transfer in server:
                    if transfer.offer.request_id.startswith("doomed"):
                        transfer.cancel("enough")
                    else:
                        group.create_task(_note(transfer, times))

        taking = asyncio.create_task(take())
        link = await sender.connect(server.url)
        tasks = [
            asyncio.create_task(send_bytes(link, f"{'doomed' if index % 2 else 'kept'} {index}", 4, [[64 * KIB]]))
            for index in range(40)
        ]
        for index, task in enumerate(tasks):
            if index % 2:
                with pytest.raises(TransferAbortedError):
                    await task
            else:
                await task
        await sender.close()
        await server.close()
        await taking
        return max(times.values())

    kept_bytes = 20 * 4 * 64 * KIB
    assert await asyncio.to_thread(run_virtual, run()) < 1.25 * kept_bytes * 8 / 100e6


async def _note(transfer: Any, times: dict[str, float]) -> None:
    with contextlib.suppress(LynxError):
        await transfer.complete
        times[transfer.offer.request_id] = asyncio.get_running_loop().time()
