"""What goes wrong, and who may ask: each with servers of its own in this process."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl

import aiohttp
import openai
import pytest
from aiohttp import web
from httpkit import local_pair

from lynx_net.errors import ConnectionLostError
from lynx_net.integrations.http.logs import JsonFormatter, request_id
from perf.tiny_model import make_model

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 9


def client_of(running, **options):
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", **{"api_key": "none", "max_retries": 0, **options})


def complete(client, **fields):
    return client.completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields})


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # of the servers' own state, which has no event
            await asyncio.sleep(0.01)


async def test_a_full_queue_says_when_to_come_again(tiny_model):
    limits = {"limits": {"running": 1, "queued": 1}}
    async with local_pair(tiny_model, decode=limits) as running, client_of(running) as client:
        admission = running.decode.service.admission
        first = asyncio.create_task(complete(client, max_tokens=1000))
        await until(lambda: admission.running == 1)
        second = asyncio.create_task(complete(client))
        await until(lambda: admission.queued == 1)
        with pytest.raises(openai.RateLimitError) as refusal:
            await complete(client)
        assert refusal.value.code == "queue_full"
        assert int(refusal.value.response.headers["Retry-After"]) >= 1
        first.cancel()
        assert (await second).usage.completion_tokens == 8  # who leaves makes room


async def test_without_a_prefill_server_clients_are_told_to_come_again(tiny_model):
    nowhere = {"prefill": {"url": "http://127.0.0.1:9"}}
    async with local_pair(tiny_model, decode=nowhere) as running, client_of(running) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as refusal:
                await complete(client, stream=stream)
            assert refusal.value.status_code == 503
            assert refusal.value.code == "no_prefill_server"
        async with aiohttp.ClientSession(running.url) as http, http.get("/health/ready") as answer:
            assert answer.status == 503


async def test_a_prefill_server_with_another_model_is_noticed(tiny_model, tmp_path):
    other = make_model(tmp_path / "other", layers=3)
    async with local_pair(tiny_model, prefill={"model": {"name": str(other)}}) as running:
        async with client_of(running) as client:
            with pytest.raises(openai.InternalServerError, match="another model") as refusal:
                await complete(client)
        assert refusal.value.status_code == 502


async def test_a_link_lost_in_mid_transfer_fails_its_requests_and_no_later_one(tiny_model, reference):
    slow = {"link": {"rate": "500kbit", "codec": "int8"}}
    async with local_pair(tiny_model, prefill=slow) as running, client_of(running) as client:
        failing = asyncio.create_task(complete(client))
        links = running.prefill._engine._links
        await until(lambda: links._entries and next(iter(links._entries.values())).link is not None)
        [entry] = links._entries.values()
        await until(lambda: running.decode.service.metrics.links._links[0].timelines())
        entry.link.pump_failed(ConnectionLostError("cut by the test"))
        with pytest.raises(openai.InternalServerError) as failure:
            await failing
        assert failure.value.status_code == 502
        links._rate = None  # of the link that is opened in its place
        answer = await complete(client)
        assert answer.choices[0].text == await asyncio.to_thread(reference.text, PROMPT, 8, codec="int8")
        assert running.decode.service.admission.running == 0


async def test_a_client_that_takes_nothing_is_given_up(tiny_model, monkeypatch):
    write, count = web.StreamResponse.write, 0

    async def write_until_full(response, data):
        """As if the buffers on the way, which are large, were full."""
        nonlocal count
        count += 1
        if count > 3:
            await asyncio.Event().wait()
        await write(response, data)

    async with local_pair(tiny_model, decode={"http": {"stall_s": 0.3}}) as running, client_of(running) as client:
        monkeypatch.setattr(web.StreamResponse, "write", write_until_full)
        stream = await complete(client, max_tokens=1000, stream=True)
        with pytest.raises(openai.APIConnectionError):
            async for _ in stream:
                pass
        assert running.decode.service.admission.running == 0
        [log] = running.decode.bus.recent()
        assert log.events[-1]["type"] == "cancelled"


async def test_keys(tiny_model, tmp_path):
    outer, inner, cache = tmp_path / "outer", tmp_path / "inner", tmp_path / "cache"
    outer.write_text("first-key\nsecond-key\n")
    inner.write_text("between-servers\n")
    cache.write_text("00" * 32)
    async with local_pair(
        tiny_model,
        prefill={"http": {"api_key_file": str(inner)}, "link": {"key_file": str(cache)}},
        decode={
            "http": {"api_key_file": str(outer)},
            "prefill": {"api_key_file": str(inner)},
            "cache": {"key_file": str(cache)},
        },
    ) as running:
        for key in ("first-key", "second-key"):
            async with client_of(running, api_key=key) as client:
                assert (await complete(client)).usage.completion_tokens == 8
        async with client_of(running, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await complete(client)
        async with aiohttp.ClientSession() as http:
            for url, status in (
                (f"{running.url}/health/ready", 200),
                (f"{running.url}/metrics", 401),
                (f"{running.url}/events", 401),
                (f"{running.prefill_url}/health/live", 200),
            ):
                async with http.get(url) as answer:
                    assert answer.status == status
            async with http.post(f"{running.prefill_url}/prefill", json={}) as answer:
                assert answer.status == 401


async def test_tls_on_all_three_ways(tiny_model, certificates):
    authority = certificates.ours
    files = {"certificate": str(certificates.ours.issue("http-pair"))}
    ca_file = str(authority.file)
    async with local_pair(
        tiny_model,
        prefill={"http": files, "link": {**files, "ca_file": ca_file, "targets": ("tls://127.0.0.1:*",)}},
        decode={
            "http": files,
            "cache": {"url": "tls://127.0.0.1:0", **files, "ca_file": ca_file},
            "prefill": {"ca_file": ca_file},
        },
    ) as running:
        assert running.url.startswith("https://")
        assert running.prefill_url.startswith("https://")
        trusted = ssl.create_default_context(cafile=ca_file)
        async with openai.AsyncOpenAI(
            base_url=f"{running.url}/v1",
            api_key="none",
            http_client=openai.DefaultAsyncHttpxClient(verify=trusted),
        ) as client:
            assert (await complete(client)).usage.completion_tokens == 8


async def test_the_prefill_server_sends_only_where_it_may(tiny_model):
    async with local_pair(tiny_model) as running:
        fingerprint = running.decode._engine.model.fingerprint
        wanted = {"request_id": "r", "model": fingerprint, "tokens": [3, 4], "deliver_to": "tcp://192.0.2.7:7000"}
        async with aiohttp.ClientSession(running.prefill_url) as http:
            for change, status, param in (
                ({}, 403, "deliver_to"),
                ({"model": "other"}, 409, "model"),
                ({"tokens": []}, 400, "tokens"),
                ({"tokens": [5000]}, 400, "tokens"),
                ({"tokens": [3] * 3000}, 400, "tokens"),
                ({"request_id": ""}, 400, "request_id"),
            ):
                async with http.post("/prefill", json={**wanted, **change}) as answer:
                    assert answer.status == status
                    assert (await answer.json())["error"]["param"] == param
            unasked = {**wanted, "deliver_to": running.decode._engine.deliver_to}
            async with http.post("/prefill", json=unasked) as answer:
                assert answer.status == 502
                assert "nobody waits" in (await answer.json())["error"]["message"]


async def test_a_server_that_starts_is_live_but_not_ready(tiny_model):
    async with local_pair(tiny_model) as running, aiohttp.ClientSession(running.url) as http:
        for state, live, ready, asked in (("starting", 200, 503, 503), ("draining", 200, 503, 503)):
            running.decode.service.state = state
            for path, status in (("/health/live", live), ("/health/ready", ready), ("/v1/models", asked)):
                async with http.get(path) as answer:
                    assert answer.status == status
        running.decode.service.state = "ready"


async def test_sampling_by_many_at_once_is_reproducible(tiny_model):
    slow = {"link": {"rate": "40Mbit", "codec": "lynx"}}
    async with local_pair(tiny_model, prefill=slow) as running, client_of(running) as client:
        asks = [complete(client, temperature=1.2, seed=seed % 4, max_tokens=12) for seed in range(12)]
        texts = [answer.choices[0].text for answer in await asyncio.gather(*asks)]
        assert texts[:4] * 3 == texts
        assert len(set(texts)) == 4


def test_log_lines_are_json_with_the_request():
    record = logging.LogRecord("lynx_net.http", logging.INFO, __file__, 1, "%d tokens", (5,), None)
    record.fields = {"status": 200}
    token = request_id.set("cmpl-1")
    try:
        line = json.loads(JsonFormatter().format(record))
    finally:
        request_id.reset(token)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "lynx_net.http",
        "message": "5 tokens",
        "request": "cmpl-1",
        "status": 200,
    }
