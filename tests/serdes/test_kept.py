"""Memory that a receiver keeps for transfers to come (tests/aio/test_kept.py counts it): the next ones are whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import lynx_net
from lynx_net import LinkConfig


@pytest.mark.parametrize("kept_bytes", [0, 50_000, 1 << 30])
async def test_caches_are_whole_in_memory_that_was_kept(kept_bytes: int, make_cache: Any, same: Any) -> None:
    cache, config = make_cache(), LinkConfig(kept_bytes=kept_bytes)
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", config=config) as server,
        lynx_net.connect(server.url) as link,
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
