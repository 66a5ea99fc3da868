"""Memory that is kept for transfers to come: what is used again, and how much of it stays."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import lynx_net
from lynx_net import LinkConfig
from lynx_net.serdes.kept import KeptMemory

SIZE = 200_000


def begin_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def test_memory_is_used_again_when_the_last_view_of_it_is_gone() -> None:
    memory = KeptMemory(1 << 20)
    first = memory.take(SIZE)
    first[:3] = b"abc"
    begin, part = begin_of(first), first[:3]
    del first
    other = memory.take(SIZE)
    assert begin_of(other) >= begin + SIZE
    assert bytes(part) == b"abc"
    del part
    assert begin_of(memory.take(SIZE)) == begin


def test_what_does_not_fit_is_memory_of_its_own() -> None:
    memory = KeptMemory(2 * SIZE)
    pieces = [memory.take(SIZE - 256) for _ in range(3)]
    for number, piece in enumerate(pieces):
        assert piece.nbytes == SIZE - 256
        piece[:] = bytes([number]) * piece.nbytes
    assert [set(piece) for piece in pieces] == [{0}, {1}, {2}]
    assert isinstance(pieces[2].obj, bytearray)
    assert not isinstance(pieces[1].obj, bytearray)
    assert memory.take(3 * SIZE).nbytes == 3 * SIZE


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_nothing_and_less_than_that(kept_bytes: int) -> None:
    memory = KeptMemory(kept_bytes)
    assert memory.take(0).nbytes == 0
    one = memory.take(1)
    one[0] = 7
    assert bytes(one) == b"\7"


@pytest.mark.parametrize("kept_bytes", [0, 50_000, 1 << 30])
async def test_a_receiver_keeps_what_it_may(kept_bytes: int, make_cache: Any, same: Any) -> None:
    cache, config = make_cache(), LinkConfig(kept_bytes=kept_bytes)
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", config=config) as server,
        lynx_net.connect(server.url, config=config) as link,
    ):
        transfers = aiter(server)
        for _ in range(2):
            sending = asyncio.create_task(cache.send_on(link, codec="lynx"))
            transfer = await anext(transfers)
            await transfer.complete
            await sending
            assert same(transfer.target, cache.decoded("lynx"))
        kept = server._endpoint._book.pool.kept_bytes
        assert kept <= kept_bytes
        assert (kept > 0) == (kept_bytes > 0)
        if kept_bytes == 1 << 30:
            assert kept >= transfer.stats.stream_bytes[0]  # all anchors were held at once
