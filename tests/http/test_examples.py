"""The two short examples are a pair that answers, and lets go when its client leaves."""

from __future__ import annotations

import asyncio
import importlib.util
import json

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from httpkit import ROOT

from lynx_net.integrations import smollm2

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 9
CHAT = [{"role": "user", "content": PROMPT}]


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def servers(reference, monkeypatch, tmp_path):
    served = reference.served
    loaded = smollm2.LoadedModel(served.model, served._tokenizer, tmp_path)
    monkeypatch.setattr(smollm2, "load", lambda: loaded)
    computing = example("http_prefill").PrefillServer()
    prefill_app = web.Application()
    prefill_app.router.add_post("/prefill", computing.answer)
    async with TestServer(prefill_app, handler_cancellation=True) as prefill:
        decoding = example("http_decode").DecodeServer(str(prefill.make_url("")).rstrip("/"))
        decode_app = web.Application()
        decode_app.router.add_post("/v1/chat/completions", decoding.chat)
        decode_app.cleanup_ctx.append(decoding.running)
        async with TestServer(decode_app, handler_cancellation=True) as decode:
            yield decode, decoding


async def test_the_examples_stream_the_text_of_plain_decoding(servers, reference):
    decode, _ = servers
    async with (
        aiohttp.ClientSession() as http,
        http.post(decode.make_url("/v1/chat/completions"), json={"messages": CHAT}) as answer,
    ):
        lines = [line[6:] for line in (await answer.text()).split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    text = "".join(json.loads(line)["choices"][0]["delta"]["content"] for line in lines)
    assert len(lines) > 3
    assert text == await asyncio.to_thread(reference.text, CHAT, 64)


async def test_a_client_that_leaves_an_example_leaves_nothing_behind(servers):
    decode, decoding = servers
    async with aiohttp.ClientSession() as http:
        for count in (0, 1, 5):
            async with http.post(decode.make_url("/v1/chat/completions"), json={"messages": CHAT}) as answer:
                for _ in range(count):
                    await answer.content.readline()
            async with asyncio.timeout(10):
                while decoding.caches or decoding.offered:  # noqa: ASYNC110  # the example has no event for it
                    await asyncio.sleep(0.01)
