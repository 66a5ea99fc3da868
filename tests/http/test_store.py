"""Prefixes from a context store: taken where they are, never waited for, and never at the cost of a wrong text."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading

import openai
import pytest
from httpkit import local_pair

import lynx_net
from lynx_net.errors import ConnectionLostError
from lynx_net.integrations.http import stored, storing
from lynx_net.integrations.http.stored import least_tokens
from lynx_net.store import ContextStore, LocalStorage, serve_store
from lynx_net.store.source import EntryPages

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
    patient = {"answer_s": 60.0, "arrive_s": 60.0, "deadline_s": 60.0}  # the machine may be busy
    async with (
        local_pair(
            model,
            prefill={"store": {"url": url, **(prefill or {})}},
            decode={"store": {"url": url, **patient, **(decode or {})}},
        ) as running,
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


async def test_a_store_that_does_not_answer_is_waited_for_once(tiny_model, reference, monkeypatch):
    monkeypatch.setattr(stored, "AVOID_S", 1000.0)
    async with (
        lynx_net.serve("tcp://127.0.0.1:0") as silent,
        trio(tiny_model, silent.url, decode={"answer_s": 0.2}) as (running, client),
    ):
        expected = await plain(reference)
        for outcomes in ({"slow": 1}, {"slow": 1, "down": 1}):
            assert await complete(client) == expected
            assert lookups(running) == outcomes
        _, first = running.decode.bus.recent()
        asked, told_at = ({event["type"]: event["at_s"] for event in first.events}[one] for one in ("started", "store"))
        assert told_at - asked >= 0.2


@pytest.fixture
async def filled(tiny_model, store):
    """The store has the prompt."""
    async with serve_store("tcp://127.0.0.1:0", store) as server, trio(tiny_model, server.url) as (running, client):
        await complete(client)
        await until(lambda: puts(running) == {"stored": 1})
    return store


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


@pytest.fixture
def gate(monkeypatch):
    """Residuals are read from the disk once it is set."""
    opened, read = threading.Event(), EntryPages.read

    def read_later(pages, wanted):
        assert wanted[0][1] == 0 or opened.wait(60)
        return read(pages, wanted)

    monkeypatch.setattr(EntryPages, "read", read_later)
    yield opened
    opened.set()


async def test_decoding_begins_on_the_stored_anchors(tiny_model, reference, filled, gate):
    async with serve_store("tcp://127.0.0.1:0", filled) as server, trio(tiny_model, server.url) as (running, client):
        answering = asyncio.create_task(drafts_of(client, LITTLE_LONGER))
        await until(lambda: len(told(running, "draft")) > 2)
        gate.set()
        text, drafted, _ = await answering
        assert text == await asyncio.to_thread(reference.text_from, PROMPT, LITTLE_LONGER, TOKENS)
        assert drafted > 2
        assert lookups(running) == {"hit": 1}


@pytest.mark.parametrize("end", ["slow", "cut", "damaged"])
async def test_a_transfer_that_ends_early_leaves_no_trace_in_the_answer(
    tiny_model, reference, filled, gate, tmp_path, end
):
    if end == "damaged":
        [entry] = filled.entries()
        file = tmp_path / "store" / "entries" / f"{entry.key}.lynx"
        content = bytearray(file.read_bytes())
        content[-5000] ^= 1  # of the residuals, which lie behind the anchors
        file.write_bytes(content)
    async with (
        serve_store("tcp://127.0.0.1:0", filled) as server,
        trio(tiny_model, server.url, decode={"arrive_s": 1.0 if end == "slow" else 60.0}) as (running, client),
    ):
        answering = asyncio.create_task(drafts_of(client))
        if end != "slow":  # how many drafts are made in that time depends on the machine
            await until(lambda: told(running, "draft"))
        if end == "cut":
            running.decode.service.metrics.store.link.pump_failed(ConnectionLostError("cut by the test"))
        if end == "damaged":
            gate.set()
        text, _, _ = await answering
        gate.set()
        assert text == await plain(reference)
        events = running.decode.bus.recent()[0].events
        # The prefill server's transfer comes next, on which drafts may be made and stand.
        _, second = (place for place, event in enumerate(events) if event["type"] == "offer")
        drafted = sum(event["type"] == "draft" for event in events[:second])
        assert drafted == sum(event["count"] for event in events[:second] if event["type"] == "retract")
        assert drafted or end == "slow"
        outcome = "slow" if end == "slow" else "failed"
        assert lookups(running) == {outcome: 1}
        assert [event["outcome"] for event in told(running)] == ["hit", outcome]
        assert len(told(running, "offer")) == 2


async def test_an_entry_that_is_evicted_while_it_is_read_is_read_to_its_end(tiny_model, reference, filled, gate):
    async with serve_store("tcp://127.0.0.1:0", filled) as server, trio(tiny_model, server.url) as (running, client):
        answering = asyncio.create_task(complete(client))
        await until(lambda: told(running))
        assert filled.evict(max_bytes=1) == []
        gate.set()
        assert await answering == await plain(reference)
        assert lookups(running) == {"hit": 1}
        await until(lambda: filled.evict(max_bytes=1))
        assert await complete(client) == await plain(reference)
        assert lookups(running) == {"hit": 1, "miss": 1}


async def test_a_client_that_leaves_while_its_prefix_comes_leaves_nothing_behind(tiny_model, filled, gate):
    async with serve_store("tcp://127.0.0.1:0", filled) as server, trio(tiny_model, server.url) as (running, client):
        answering = [asyncio.create_task(complete(client, prompt)) for prompt in (PROMPT, LITTLE_LONGER, LONGER)]
        await until(lambda: sum("store" in [e["type"] for e in log.events] for log in running.decode.bus.recent()) == 3)
        for task in answering:
            task.cancel()
        await asyncio.wait(answering)
        await until(lambda: not running.decode.service.admission.running)
        gate.set()
        await until(lambda: not filled.entries()[0].readers)
        assert not puts(running)


async def test_a_cache_is_served_while_it_is_being_written(tiny_model, reference, store):
    async with (
        serve_store("tcp://127.0.0.1:0", store) as server,
        trio(tiny_model, server.url, prefill={"rate": "10kbit"}) as (running, client),
    ):
        expected = await plain(reference)
        assert await complete(client) == expected
        await until(lambda: store.entries())
        answering = asyncio.create_task(complete(client))
        await until(lambda: len(running.decode.bus.recent()) == 2 and told(running))
        running.prefill.service.metrics.store.link.set_rate(None)
        assert await answering == expected
        assert [(event["outcome"], event["writing"]) for event in told(running)] == [("hit", True)]
        await until(lambda: puts(running) == {"stored": 1})


async def test_storing_holds_up_nobody_and_is_bounded(tiny_model, reference, store, monkeypatch, caplog):
    monkeypatch.setattr(storing, "LAST_S", 0.1)
    async with (
        serve_store("tcp://127.0.0.1:0", store) as server,
        trio(tiny_model, server.url, prefill={"rate": "5kbit", "waiting": 1}, decode={"rest_tokens": 1}) as (
            running,
            client,
        ),
    ):
        prompts = [f"{number}{PROMPT}" for number in range(4)]
        texts = [await complete(client, prompt) for prompt in prompts]
        assert texts == [await plain(reference, prompt) for prompt in prompts]
        await until(lambda: puts(running) == {"dropped": 2})  # storing the first takes minutes
        assert running.prefill.service.metrics.writer.waiting == 2
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
        async with trio(tiny_model, server.url, prefill=mine, decode=mine) as (running, client):
            await complete(client)
            await until(lambda: puts(running) == {"stored": 1})
            await complete(client)
            assert lookups(running) == {"miss": 1, "hit": 1}
        async with trio(tiny_model, server.url, prefill=mine, decode=wrong) as (running, client):
            assert await complete(client) == await plain(reference)
            assert lookups(running) == {"down": 1}
