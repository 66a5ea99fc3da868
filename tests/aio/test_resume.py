"""Connections that are lost and come back: the link goes on where it was, and nothing is lost, doubled or early."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

import lynx_net
from lynx_net import LinkConfig
from lynx_net.errors import ConnectionLostError
from lynx_net.testing.clock import run_virtual
from lynx_net.testing.relay import FaultyRelay
from lynx_net.transport import memory

PATIENT = LinkConfig(resume_s=5.0)


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("lanes", [1, 3])
async def test_connections_cut_again_and_again(make_cache: Any, same: Any, lanes: int) -> None:
    cache = make_cache(layers=12, tokens=1000)
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", config=PATIENT) as server,
        FaultyRelay.to(*_address(server.url)) as relay,
        lynx_net.connect(relay.url, config=PATIENT, lanes=lanes, rate="40Mbit") as link,
    ):
        async with link.send("r", cache.layout, codec="lynx", fine=cache.fine) as sending:
            transfer = await anext(aiter(server))
            # What is written behind a cut can only come on a connection that is made after it.
            for layers, ready in ((range(4), 1), (range(4, 8), 4), (range(8, 11), 8)):
                await cache.write_to(sending, layers)
                await transfer.layer_ready(ready)
                relay.cut()
            await cache.write_to(sending, range(11, 12))
        await transfer.complete
        assert lanes + 3 <= relay.connections <= 4 * lanes
        assert sum(lane.reopened for lane in link.lane_stats) >= 3
        again = asyncio.create_task(cache.send_on(link))
        await (await anext(aiter(server))).complete
        await again
    assert same(transfer.target, cache.decoded("lynx"))


async def test_a_network_that_is_away_for_a_while(make_cache: Any, same: Any) -> None:
    """Longer than the default wait and the deadline, shorter than this link is willing to wait."""
    config = LinkConfig(resume_s=6.0, deadline_s=0.5)
    cache = make_cache(layers=12, tokens=1000)
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", config=config) as server,
        FaultyRelay.to(*_address(server.url)) as relay,
        lynx_net.connect(relay.url, config=config, lanes=2, rate="40Mbit") as link,
    ):
        sending = asyncio.create_task(cache.send_on(link))
        transfer = await anext(aiter(server))
        await transfer.layer_ready(1)
        relay.refusing = True
        relay.cut()
        await asyncio.sleep(1.2)
        assert link.error is None
        relay.refusing = False
        await transfer.complete
        await sending
    assert same(transfer.target, cache.decoded("lynx"))


async def test_a_link_that_does_not_resume_fails_at_once(make_cache: Any) -> None:
    config = LinkConfig(resume_s=0)
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", config=config) as server,
        FaultyRelay.to(*_address(server.url)) as relay,
        lynx_net.connect(relay.url, config=config) as link,
    ):
        relay.cut()
        await asyncio.wait_for(link.closed(), 1)
        assert isinstance(link.error, ConnectionLostError)
        assert relay.connections == 1
        assert server.url.startswith("tcp://")


async def test_a_link_that_has_ended_at_its_peer_is_not_resumed() -> None:
    """The peer has given it up: the answer comes at once, however long this side would wait."""
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", config=LinkConfig(resume_s=0)) as server,
        FaultyRelay.to(*_address(server.url)) as relay,
        lynx_net.connect(relay.url, config=LinkConfig(resume_s=60)) as link,
    ):
        accepted = await server.accept()
        relay.cut()
        await accepted.closed()
        await asyncio.wait_for(link.closed(), 5)
        assert isinstance(link.error, ConnectionLostError)
        assert "cannot be resumed" in str(link.error)


def test_any_moment_over_several_lanes(make_cache: Any, same: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes break at random sends, with what is on its way in both directions, while two caches cross."""
    rng = random.Random(1)
    send = memory.MemoryLane.send
    trouble = False

    async def send_and_break(lane: memory.MemoryLane, buffers: Any) -> None:
        broken = trouble and rng.random() < 0.2
        sending = asyncio.ensure_future(send(lane, buffers))
        if broken:
            await asyncio.sleep(0)
            lane.break_connection()
        await sending

    monkeypatch.setattr(memory.MemoryLane, "send", send_and_break)
    cache = make_cache(layers=3, tokens=300)

    async def run() -> int:
        nonlocal trouble
        config = LinkConfig(resume_s=60.0)
        async with (
            lynx_net.serve("memory://there", config=config, rate="2Mbit") as server,
            lynx_net.connect("memory://there", config=config, lanes=3, rate="2Mbit") as link,
        ):
            accepted = await server.accept()
            trouble = True
            sending = [asyncio.create_task(cache.send_on(one)) for one in (link, accepted)]
            for arriving in (aiter(server), aiter(link)):
                transfer = await anext(arriving)
                await transfer.complete
                assert same(transfer.target, cache.decoded("lynx"))
            await asyncio.gather(*sending)
            trouble = False
            return int(link.core.resent_frames + accepted.core.resent_frames)

    assert sum(run_virtual(run()) for _ in range(6)) > 20
