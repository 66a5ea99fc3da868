"""Prefixes from a context store: taken where they are, never waited for, and never at the cost of a wrong text."""

from __future__ import annotations

import asyncio
import contextlib

import openai
import pytest
from httpkit import local_pair

from lynx_net.store import ContextStore, LocalStorage, serve_store

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. "
PROMPT = TEXT * 9
LONGER = PROMPT + "Winston Smith, " * 20
OUTCOMES = ("hit", "miss", "down", "slow", "failed")


@pytest.fixture
def store(tmp_path):
    with ContextStore(LocalStorage(tmp_path / "store")).open() as opened:
        yield opened


@contextlib.asynccontextmanager
async def trio(model, url, *, prefill=None, decode=None):
    """Both servers with a store, and a client."""
    sections = {"store": {"url": url}}
    async with (
        local_pair(model, prefill=sections | (prefill or {}), decode=sections | (decode or {})) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield running, client


async def complete(client, prompt=PROMPT, **fields):
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
    return (await client.completions.create(**asked)).choices[0].text


def counted(server, name, label):
    return int(server.service.metrics._values[name][(label,)])


def lookups(running):
    counts = {one: counted(running.decode, "lynx_net_http_store_lookups_total", ("outcome", one)) for one in OUTCOMES}
    return {outcome: count for outcome, count in counts.items() if count}


def puts(running, outcome):
    return counted(running.prefill, "lynx_net_http_store_puts_total", ("outcome", outcome))


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # of the servers' own state, which has no event
            await asyncio.sleep(0.005)


async def test_a_computed_prompt_is_taken_from_the_store_the_next_time(tiny_model, reference, store):
    async with serve_store("tcp://127.0.0.1:0", store) as server, trio(tiny_model, server.url) as (running, client):
        first = await complete(client)
        await until(lambda: puts(running, "stored") == 1)
        second = await complete(client)
        assert lookups(running) == {"miss": 1, "hit": 1}
        longer = await complete(client, LONGER)
        print(lookups(running), running.decode.bus.recent()[0].events)
    assert first == second == await asyncio.to_thread(reference.text, PROMPT, 12)
