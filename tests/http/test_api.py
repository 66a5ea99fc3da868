"""The API as clients see it, with both servers in this process."""

from __future__ import annotations

import asyncio
import io
import json

import aiohttp
import openai
import pytest
import pytest_asyncio
from httpkit import local_pair

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 9
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def servers(tiny_model):
    """A link slow enough that residuals come after some drafts."""
    async with local_pair(tiny_model, prefill={"link": {"rate": "8Mbit", "codec": "lynx"}}) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(servers):
    async with openai.AsyncOpenAI(base_url=f"{servers.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def http(servers):
    async with aiohttp.ClientSession(servers.url) as session:
        yield session


async def test_a_completion_is_plain_decoding(client, reference, servers):
    answer = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.created > 1.7e9
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert choice.text == await asyncio.to_thread(reference.text, PROMPT, 24, codec="lynx")
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == len(PROMPT) + 24


async def test_a_streamed_chat_is_the_same_text_in_pieces(client, reference):
    whole = await client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=24, temperature=0)
    stream = await client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    *pieces, closing, usage = chunks
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert text == whole.choices[0].message.content
    assert text == await asyncio.to_thread(reference.text, CHAT, 24, codec="lynx")
    assert closing.choices[0].finish_reason == "length"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert usage.choices == []
    assert usage.usage == whole.usage
    assert whole.choices[0].message.role == "assistant"


async def test_a_stop_text_ends_the_answer_and_is_not_in_it(client):
    async def ask(**options):
        return await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, temperature=0, **options)

    text = (await ask()).choices[0].text
    stop = text[20:23]
    assert text.find(stop) > 0
    expected = text[: text.find(stop)]
    whole = await ask(stop=stop)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")
    assert whole.usage.completion_tokens == len(expected) + 3
    streamed = [chunk.choices[0] async for chunk in await ask(stop=["never comes", stop], stream=True)]
    assert "".join(choice.text for choice in streamed) == expected
    assert streamed[-1].finish_reason == "stop"


async def test_a_seed_fixes_what_is_drawn(client):
    async def ask(seed):
        answer = await client.completions.create(
            model="tiny", prompt="Once upon a time", max_tokens=30, temperature=1.5, seed=seed
        )
        return answer.choices[0].text

    assert await ask(7) == await ask(7)
    assert len({await ask(seed) for seed in range(3)}) == 3


async def test_drafts_are_seen_by_those_who_ask(client, reference):
    stream = await client.chat.completions.create(
        model="tiny",
        messages=CHAT,
        max_tokens=24,
        temperature=0,
        stream=True,
        extra_body={"lynx": {"drafts": True, "timings": True}},
    )
    text, drafts, seen, committed = "", [], 0, 0
    async for chunk in stream:
        aside = (chunk.model_extra or {}).get("lynx")
        match aside:
            case {"type": "draft", "token": int(token), "text": str()}:
                drafts.append(token)
                seen += 1
            case {"type": "retract", "count": int(count)}:
                del drafts[-count:]
            case {"type": "commit", "accepted": int(accepted), "tokens": int(tokens)}:
                assert len(drafts) == accepted
                drafts.clear()
                committed += tokens
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        last = aside or {}
    assert seen > 0
    assert committed == 24
    assert text == await asyncio.to_thread(reference.text, CHAT, 24, codec="lynx")
    assert last["type"] == "timings"
    assert last["drafted"] == seen
    assert 0 < last["ttft_s"] < last["total_s"]


async def test_prompts_of_token_ids_and_of_one_token(client, reference):
    for prompt in ([40], [40, 41, 42]):
        answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=5, temperature=0)
        expected = await asyncio.to_thread(reference.tokens, prompt, 5, codec="lynx")
        assert answer.choices[0].text == reference.served.decode(expected)
        assert answer.usage.prompt_tokens == len(prompt)


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "lynx_net"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-5")


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"logprobs": 1}, openai.BadRequestError, "logprobs"),
        ({"n": 2}, openai.BadRequestError, "n"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 5000}, openai.BadRequestError, "prompt"),
        ({"max_tokens": 1030}, openai.BadRequestError, "max_tokens"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": [5, 5000]}, openai.BadRequestError, "prompt"),
        ({"extra_body": {"top_k": 5}}, openai.BadRequestError, "top_k"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(client, fields, kind, param):
    with pytest.raises(kind) as refusal:
        await client.completions.create(**{"model": "tiny", "prompt": "x", "max_tokens": 5, **fields})
    assert refusal.value.param == param
    assert refusal.value.type == "invalid_request_error"


async def test_errors_of_http_have_the_same_shape(http):
    for method, path, body, status in (
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/completions", io.BytesIO(b"x" * (5 << 20)), 413),
        ("GET", "/v1/completions", None, 405),
        ("POST", "/v1/embeddings", b"{}", 404),
        ("GET", "/events/unknown", None, 404),
    ):
        async with http.request(method, path, data=body) as answer:
            assert answer.status == status, path
            assert (await answer.json())["error"]["message"]


async def events_of(http, path):
    """All events of a stream that ends."""
    async with http.get(path) as answer:
        assert answer.status == 200
        blocks = (await answer.text()).split("\n\n")
    return [json.loads(block.partition("data: ")[2]) for block in blocks if "data: " in block]


async def test_the_events_of_a_request_tell_its_whole_story(client, http):
    answer = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    events = await events_of(http, f"/events/{answer.id}")
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert {event["request"] for event in events} == {answer.id}
    kinds = [event["type"] for event in events]
    order = [kinds.index(kind) for kind in ("request", "started", "offer", "progress", "draft", "first", "done")]
    assert order == sorted(order)
    assert kinds.count("ready") == 2
    assert kinds[-1] == "done"
    assert events[0]["prompt"] == PROMPT
    offer = events[kinds.index("offer")]
    assert [stream["name"] for stream in offer["streams"]] == ["anchor", "residual"]
    last = [event for event in events if event["type"] == "progress"][-1]
    assert last["streams"] == [stream["bytes"] for stream in offer["streams"]]
    assert last["layers"] == [2, 2]
    assert sum(last["lanes"]) > 0
    tokens: list[int] = []
    drafts: list[int] = []
    for event in events:
        match event:
            case {"type": "draft"}:
                assert event["index"] == len(tokens) + len(drafts)
                drafts.append(event["token"])
            case {"type": "retract"}:
                del drafts[-event["count"] :]
            case {"type": "commit"}:
                assert event["index"] == len(tokens)
                assert drafts == event["tokens"][: event["accepted"]]
                tokens += event["tokens"]
                drafts.clear()
    assert len(tokens) == 24
    times = [event["at_s"] for event in events if event["type"] not in ("ready", "offer")]
    assert times == sorted(times)


async def test_all_requests_can_be_followed_live(client, http):
    async with http.get("/events") as answer:
        first = await read_event(answer)
        assert first["type"] == "recent"
        made = await client.completions.create(model="tiny", prompt="live", max_tokens=3, temperature=0)
        kinds = []
        while not kinds or kinds[-1] != "done":
            event = await read_event(answer)
            assert event["request"] == made.id
            kinds.append(event["type"])
    assert kinds[0] == "request"


async def read_event(answer):
    data = None
    while (line := (await answer.content.readline()).decode().rstrip("\n")) or data is None:
        if line.startswith("data: "):
            data = json.loads(line[6:])
    return data


async def test_a_trace_of_a_request(client, http):
    made = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0)
    async with http.get(f"/debug/trace/{made.id}") as answer:
        trace = await answer.json()
    spans = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    steps = ["waits for a place", "waits for the cache", "waits for a final token", "decodes"]
    assert set(steps) | {"request", "transfer", "receives"} <= set(spans)
    assert sum(spans[name]["dur"] for name in steps) == pytest.approx(spans["request"]["dur"], rel=1e-3)
    inside = spans["transfer"]
    assert spans["request"]["ts"] <= inside["ts"] <= spans["request"]["ts"] + spans["request"]["dur"]


async def test_metrics_count_what_happened(client, http):
    async def value(name):
        async with http.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(name + " ")), 0.0)

    name = 'lynx_net_http_requests_total{endpoint="completions",status="200"}'
    before = await value(name), await value("lynx_net_http_completion_tokens_total")
    await client.completions.create(model="tiny", prompt="count", max_tokens=4, temperature=0)
    assert await value(name) == before[0] + 1
    assert await value("lynx_net_http_completion_tokens_total") == before[1] + 4
    assert await value("lynx_net_http_requests_running") == 0
    assert await value("process_resident_memory_bytes") > 1e6
    assert await value('lynx_net_transfers_ended_total{direction="incoming",outcome="complete"}') > 0


async def test_health(http):
    for path, status in (("/health", 200), ("/health/live", 200), ("/health/ready", 200)):
        async with http.get(path) as answer:
            assert answer.status == status
    async with http.get("/health") as answer:
        assert (await answer.json())["status"] == "ready"
