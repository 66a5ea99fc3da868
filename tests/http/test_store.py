"""Prefixes from a context store: taken where they are, never waited for, and never at the cost of a wrong text."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time

import openai
import pytest
from httpkit import local_pair

import lynx_net
from lynx_net.integrations.http import storing
from lynx_net.integrations.http.stored import least_tokens
from lynx_net.store import ContextStore, LocalStorage, serve_store

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 9
LITTLE_LONGER = PROMPT[:-1] + ", Winston Smith"
LONGER = (
    PROMPT[:-1] + ", his chin nuzzled into his breast in an effort to escape the vile wind, slipped quickly in. " * 2
)
MUCH_LONGER = LONGER + " Winston Smith" * 12
TOKENS = 12
OUTCOMES = ("hit", "miss", "down", "slow", "failed", "stored", "known", "dropped")


@pytest.fixture
def store(tmp_path):
    with ContextStore(LocalStorage(tmp_path / "store")).open() as opened:
        yield opened


@contextlib.asynccontextmanager
async def trio(model, url, *, prefill=None, decode=None):
    """Both servers with a store, and a client. At the end nothing may be left of any request."""
    both = {"url": url}
    sections = ({"store": both | (one or {}).pop("store", {}), **(one or {})} for one in (prefill, decode))
    first, second = sections
    async with (
        local_pair(model, prefill=first, decode=second) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield running, client
        await until(lambda: not running.decode.service.admission.running)
        await until(lambda: gc.collect() >= 0 and not len(running.decode.service.metrics.caches))
        assert not running.decode._engine._prefixes._expected
        [links] = [running.decode.service.metrics.links._links]
        assert not any(link.timelines() for link in links)


def asked(client, prompt=PROMPT, **fields):
    wanted = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **fields}
    return client.completions.create(**wanted)


async def complete(client, prompt=PROMPT, **fields):
    return (await asked(client, prompt, **fields)).choices[0].text


def counts(values):
    return {one: int(values[("outcome", one),]) for one in OUTCOMES if values[("outcome", one),]}


def lookups(running):
    return counts(running.decode.service.metrics._values["lynx_net_http_store_lookups_total"])


def puts(running):
    return counts(running.prefill.service.metrics._values["lynx_net_http_store_puts_total"])


def told(running, kind="store"):
    """What the newest request's events say of the store."""
    return [event for log in running.decode.bus.recent()[:1] for event in log.events if event["type"] == kind]


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # of the servers' own state, which has no event
            await asyncio.sleep(0.005)


def plain(reference, prompt=PROMPT):
    return asyncio.to_thread(reference.text, prompt, TOKENS)


async def test_what_was_computed_is_taken_from_the_store_afterwards(tiny_model, reference, store):
    async with serve_store("tcp://127.0.0.1:0", store) as server, trio(tiny_model, server.url) as (running, client):
        expected = await plain(reference)
        assert await complete(client) == expected
        assert told(running)[0]["outcome"] == "miss"
        await until(lambda: puts(running) == {"stored": 1})

        assert await complete(client) == expected
        [event] = told(running)
        assert (event["outcome"], event["rest"], event["writing"]) == ("hit", 1, False)
        assert told(running, "offer")[0]["tokens"] == event["tokens"] == len(PROMPT) - 1

        # A rest of some tokens goes along with the drafts, a longer one is computed when the residuals are in.
        for prompt in (LITTLE_LONGER, LONGER, PROMPT[:600]):
            text = await complete(client, prompt)
            assert text == await asyncio.to_thread(reference.text_from, PROMPT, prompt, TOKENS)
        assert lookups(running) == {"miss": 1, "hit": 4}
        values = running.decode.service.metrics._values
        assert values["lynx_net_http_store_tokens_total"][()] == 3 * (len(PROMPT) - 1) + 599

        # Of a much longer one the prefill server computes all, and that is stored as well.
        assert await complete(client, MUCH_LONGER) == await plain(reference, MUCH_LONGER)
        await until(lambda: puts(running) == {"stored": 2})
        assert lookups(running) == {"miss": 2, "hit": 4}

        # What is the same every time must not depend on what is stored.
        drawn = await asyncio.gather(*(complete(client, temperature=1.0, seed=5) for _ in range(2)))
        assert drawn[0] == drawn[1]
        await until(lambda: puts(running) == {"stored": 2, "known": 2})
        assert sum(lookups(running).values()) == 6


@pytest.mark.parametrize(("prompt", "rest", "least"), [(2, 256, 1), (100, 256, 50), (1000, 256, 744), (1000, 1, 999)])
def test_a_prefix_is_worth_it_if_it_is_half_of_the_prompt(prompt, rest, least):
    assert least_tokens(prompt, rest) == least


async def test_servers_start_and_answer_without_their_store_and_find_it_later(tiny_model, reference, tmp_path, store):
    url = f"unix://{tmp_path / 'socket'}"
    async with trio(tiny_model, url) as (running, client):
        expected = await plain(reference)
        assert await complete(client) == expected
        await until(lambda: puts(running) == {"down": 1})
        assert lookups(running) == {"down": 1}
        async with serve_store(url, store):
            await until(
                lambda: running.decode.service.metrics.store.link and running.prefill.service.metrics.store.link
            )
            assert await complete(client) == expected
            await until(lambda: puts(running) == {"down": 1, "stored": 1})
            assert await complete(client) == expected
        await until(lambda: running.decode.service.metrics.store.link is None)
        assert await complete(client) == expected
        assert lookups(running) == {"down": 2, "miss": 1, "hit": 1}


async def test_a_store_that_does_not_answer_is_waited_for_once(tiny_model, reference):
    async with (
        lynx_net.serve("tcp://127.0.0.1:0") as silent,
        trio(tiny_model, silent.url, decode={"store": {"answer_s": 0.2}}) as (running, client),
    ):
        expected = await plain(reference)
        for outcomes in ({"slow": 1}, {"slow": 1, "down": 1}):
            assert await complete(client) == expected
            assert lookups(running) == outcomes
        first, second = (log.events for log in reversed(running.decode.bus.recent()))
        waited_s = [next(event["at_s"] for event in one if event["type"] == "store") for one in (first, second)]
        assert waited_s[0] >= 0.2
        assert waited_s[1] < 0.2


@pytest.fixture
async def filled(tiny_model, store):
    """The store has the prompt."""
    async with serve_store("tcp://127.0.0.1:0", store) as server, trio(tiny_model, server.url) as (running, client):
        await complete(client)
        await until(lambda: puts(running) == {"stored": 1})
    [entry] = store.entries()
    return store, entry.key


async def drafts_of(client, prompt=PROMPT):
    """The text of a streamed answer, and what became of its drafts: how many there were, and were retracted."""
    text, drafted, retracted = "", 0, 0
    extra = {"lynx": {"drafts": True}}
    async with await asked(client, prompt, stream=True, max_tokens=TOKENS, extra_body=extra) as chunks:
        async for chunk in chunks:
            aside = (chunk.model_extra or {}).get("lynx", {})
            drafted += aside.get("type") == "draft"
            retracted += aside.get("count", 0) if aside.get("type") == "retract" else 0
            text += chunk.choices[0].text if chunk.choices else ""
    return text, drafted, retracted


async def test_decoding_begins_on_the_stored_anchors(tiny_model, reference, filled):
    store, _ = filled
    async with (
        serve_store("tcp://127.0.0.1:0", store, rate="2Mbit") as server,
        trio(tiny_model, server.url) as (running, client),
    ):
        text, drafted, _ = await drafts_of(client, LITTLE_LONGER)
        assert text == await asyncio.to_thread(reference.text_from, PROMPT, LITTLE_LONGER, TOKENS)
        assert drafted
        assert lookups(running) == {"hit": 1}


@pytest.mark.parametrize("end", ["slow", "killed", "damaged"])
async def test_a_transfer_that_ends_early_leaves_no_trace_in_the_answer(tiny_model, reference, filled, tmp_path, end):
    store, key = filled
    bounds = {"store": {"arrive_s": 0.6 if end == "slow" else 30.0}}
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve_store("tcp://127.0.0.1:0", store, rate="1Mbit"))
        if end == "damaged":
            file = tmp_path / "store" / "entries" / f"{key}.lynx"
            content = bytearray(file.read_bytes())
            content[-30000] ^= 1  # of the residuals, which lie behind the anchors
            file.write_bytes(content)
        async with trio(tiny_model, server.url, decode=bounds) as (running, client):
            answering = asyncio.create_task(drafts_of(client))
            if end == "killed":
                await until(lambda: told(running, "draft"))
                await server.close()
            text, drafted, retracted = await answering
            assert text == await plain(reference)
            assert end == "damaged" or (drafted and retracted)  # damage is found while reading ahead
            assert lookups(running) == {"slow" if end == "slow" else "failed": 1}
            assert [event["outcome"] for event in told(running)] == ["hit", "slow" if end == "slow" else "failed"]
            assert len(told(running, "offer")) == 2
            [last] = told(running, "done")
            assert last["ttft_s"] < 10


async def test_an_entry_that_is_evicted_while_it_is_read_is_read_to_its_end(tiny_model, reference, filled):
    store, key = filled
    async with (
        serve_store("tcp://127.0.0.1:0", store, rate="2Mbit") as server,
        trio(tiny_model, server.url) as (running, client),
    ):
        answering = asyncio.create_task(complete(client))
        await until(lambda: told(running))
        assert store.evict(max_bytes=1) == []
        assert await answering == await plain(reference)
        assert lookups(running) == {"hit": 1}
        assert store.evict(max_bytes=1) == [key]
        assert await complete(client) == await plain(reference)
        assert lookups(running) == {"hit": 1, "miss": 1}


async def test_a_client_that_leaves_while_its_prefix_comes_leaves_nothing_behind(tiny_model, filled):
    store, _ = filled
    async with (
        serve_store("tcp://127.0.0.1:0", store, rate="200kbit") as server,
        trio(tiny_model, server.url) as (running, client),
    ):
        answering = [asyncio.create_task(complete(client, prompt)) for prompt in (PROMPT, LITTLE_LONGER, LONGER)]
        await until(lambda: sum("store" in [e["type"] for e in log.events] for log in running.decode.bus.recent()) == 3)
        for task in answering:
            task.cancel()
        await asyncio.wait(answering)
        await until(lambda: not store.entries()[0].readers)
        assert not puts(running)


async def test_a_cache_is_served_while_it_is_being_written(tiny_model, reference, store):
    slowly = {"store": {"rate": "600kbit"}}
    async with (
        serve_store("tcp://127.0.0.1:0", store) as server,
        trio(tiny_model, server.url, prefill=slowly) as (running, client),
    ):
        expected = await plain(reference)
        assert await complete(client) == expected
        await until(lambda: store.entries())
        assert await complete(client) == expected
        assert [(event["outcome"], event["writing"]) for event in told(running)] == [("hit", True)]
        await until(lambda: puts(running) == {"stored": 1})


async def test_storing_holds_up_nobody_and_is_bounded(tiny_model, reference, store, monkeypatch, caplog):
    monkeypatch.setattr(storing, "LAST_S", 0.1)
    slowly = {"store": {"rate": "100kbit", "waiting": 1}}
    async with (
        serve_store("tcp://127.0.0.1:0", store) as server,
        trio(tiny_model, server.url, prefill=slowly, decode={"store": {"rest_tokens": 1}}) as (running, client),
    ):
        prompts = [f"{number}{PROMPT}" for number in range(4)]
        began_s = time.monotonic()
        texts = [await complete(client, prompt) for prompt in prompts]
        assert puts(running) == {"dropped": 2}
        assert running.prefill.service.metrics.writer.waiting == 2
        assert time.monotonic() - began_s < 8  # storing one takes about ten
        assert texts == [await plain(reference, prompt) for prompt in prompts]
    assert "before everything was stored" in caplog.text
    assert not store.entries()


async def test_keys_and_certificates_of_the_link_to_the_store(tiny_model, reference, store, certificates, tmp_path):
    (tmp_path / "key").write_text("11" * 32)
    (tmp_path / "other").write_text("22" * 32)
    authority = certificates.ours
    issued = str(authority.issue("store"))
    tls = lynx_net.TlsConfig(certificate=issued, ca_file=str(authority.file))
    mine = {"certificate": issued, "ca_file": str(authority.file), "key_file": str(tmp_path / "key")}
    wrong = {**mine, "key_file": str(tmp_path / "other")}
    async with serve_store("tls://127.0.0.1:0", store, tls=tls, key=b"\x11" * 32) as server:
        async with trio(tiny_model, server.url, prefill={"store": mine}, decode={"store": mine}) as (running, client):
            await complete(client)
            await until(lambda: puts(running) == {"stored": 1})
            await complete(client)
            assert lookups(running) == {"miss": 1, "hit": 1}
        async with trio(tiny_model, server.url, prefill={"store": mine}, decode={"store": wrong}) as (running, client):
            assert await complete(client) == await plain(reference)
            assert lookups(running) == {"down": 1}
