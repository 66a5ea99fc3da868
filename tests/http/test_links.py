"""One link for each decode server, opened again when it was lost, and nothing kept of those that have gone."""

from __future__ import annotations

import asyncio
import threading

import pytest

import lynx_net
from lynx_net.errors import ConnectionFailedError, ConnectionLostError
from lynx_net.integrations.http.links import LinkPool


def pool():
    return LinkPool(rate=None, lanes=1, config=lynx_net.LinkConfig(resume_s=0), tls=None, key=None)


async def test_all_requests_share_a_link():
    links = pool()
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        found = await asyncio.gather(*(links.link(server.url) for _ in range(8)))
        assert len(set(found)) == 1
        await links.close()
        assert found[0].error is not None
        with pytest.raises(ConnectionLostError):
            await links.link(server.url)


async def test_a_lost_link_is_opened_again_and_those_of_others_are_let_go():
    links = pool()
    before = threading.active_count()
    for _ in range(5):
        async with lynx_net.serve("tcp://127.0.0.1:0") as server:
            first = await links.link(server.url)
            (await server.accept()).pump_failed(ConnectionLostError("cut by the test"))
            await first.closed()
            second = await links.link(server.url)
            assert second is not first
            assert second.error is None
        await second.closed()
    assert sum(entry.link is not None for entry in links._entries.values()) == 1
    await links.close()
    async with asyncio.timeout(10):
        while threading.active_count() > before:  # noqa: ASYNC110  # threads end by themselves
            await asyncio.sleep(0.01)


async def test_a_link_that_cannot_be_opened_may_be_tried_again():
    links = pool()
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        url = server.url
    with pytest.raises(ConnectionFailedError):
        await links.link(url)
    async with lynx_net.serve(url):
        assert (await links.link(url)).error is None
        await links.close()
