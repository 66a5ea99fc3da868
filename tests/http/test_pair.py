"""Two real server processes, started and ended as docs/http.md says, and many clients of the real client library."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time

import openai
import pytest
from httpkit import get

pytestmark = pytest.mark.timeout(300)  # starting both servers is most of it, on a machine that is busy

CLIENTS = 50
TOKENS = 20
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 9


def prompt_of(number):
    return f"{number}. {TEXT[number:]}"


def metrics_of(url):
    lines = [line.rpartition(" ") for line in get(f"{url}/metrics").splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


async def ask(client, number, *, leave):
    """One request, plain or streamed by its number; returns its text and how long it took, None if it left early."""
    began_s = time.monotonic()
    chat = {"model": "smollm2", "messages": [{"role": "user", "content": prompt_of(number)}], "temperature": 0}
    if number % 2:
        work = client.chat.completions.create(**chat, max_tokens=TOKENS)
        if leave:
            with pytest.raises(TimeoutError):  # in the queue, at the prefill server, or in mid-transfer
                await asyncio.wait_for(work, random.Random(number).uniform(0, 0.4))
            return None
        text = (await work).choices[0].message.content
    else:
        text = ""
        async with await client.chat.completions.create(
            **chat, max_tokens=1000 if leave else TOKENS, stream=True
        ) as stream:
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if leave and len(text) > number % 10:
                    return None
    return text, time.monotonic() - began_s


async def crowd(url, *, leaving):
    """All clients at once; those whose number `leaving` contains leave in mid-way."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asks = [ask(client, number, leave=number in leaving) for number in range(CLIENTS)]
        return await asyncio.gather(*asks)


def settled(url, names, timeout_s=15.0):
    """A server's metrics once those named are 0."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        metrics = metrics_of(url)
        left = {name: metrics[name] for name in names if metrics[name]}
        if not left:
            return metrics
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def idle(pair):
    """Metrics of both servers when nothing is under way any more."""
    common = ["lynx_net_http_requests_running", "lynx_net_http_requests_queued", "lynx_net_http_model_steps_waiting"]
    incoming, outgoing = (f'lynx_net_transfers{{direction="{way}"}}' for way in ("incoming", "outgoing"))
    decode = settled(pair.url, [*common, incoming, "lynx_net_http_caches"])
    return decode, settled(pair.prefill_url, [*common, outgoing])


def test_the_documents_answer_and_program(pair, reference, capsys):
    assert len(pair.commands) < 10
    printed = pair.run(pair.asking)
    chunks = [json.loads(line[6:]) for line in printed.splitlines() if line.startswith("data: {")]
    assert printed.rstrip().endswith("data: [DONE]")
    assert {chunk["model"] for chunk in chunks} == {"smollm2"}
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    exec(compile(pair.at_our_ports(pair.program), "docs/http.md", "exec"), {})
    final = capsys.readouterr().out.rstrip("\n")
    assert 0 < len(final) <= 32
    exec(compile(pair.at_our_ports(pair.drafts_program), "docs/http.md", "exec"), {})
    text, _, timings = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    ended = re.fullmatch(r"[\d.]+ s to the first token, (\d+) of (\d+) drafts accepted", timings)
    assert ended is not None
    drafts = re.findall(r"\[(?:.|\n)\?\]", text)
    assert len(drafts) == int(ended[2])
    assert re.sub(r"\[(?:.|\n)\?\]|\[\d+ retracted\]", "", text) == final


def test_fifty_clients_a_third_of_them_leaving(pair, reference):
    everyone = asyncio.run(crowd(pair.url, leaving=()))
    before = idle(pair)
    leaving = set(range(0, CLIENTS, 3))
    answers = asyncio.run(crowd(pair.url, leaving=leaving))
    after = idle(pair)

    for number, (text, _) in enumerate(everyone):
        messages = [{"role": "user", "content": prompt_of(number)}]
        expected = reference.text(messages, TOKENS)
        assert text == expected
        if number not in leaving:
            assert answers[number][0] == expected

    # Who stays does not wait for those who have left, who had asked for fifty times as much: see perf/http_pair.py.
    stayed = [number for number in range(CLIENTS) if number not in leaving]
    assert max(answers[number][1] for number in stayed) < 3 * max(everyone[number][1] for number in stayed)
    steps = [metrics["lynx_net_http_model_steps_total"] for metrics in (before[0], after[0])]
    assert steps[1] - steps[0] < 1.5 * steps[0]

    for server_before, server_after in zip(before, after, strict=True):
        for name in ("lynx_net_http_tasks", "process_open_fds"):
            assert server_after[name] <= server_before[name] + 2, name
        assert server_after["process_resident_memory_bytes"] < server_before["process_resident_memory_bytes"] + 32e6
    left = 'lynx_net_http_requests_total{endpoint="chat",status="499"}'
    assert len([number for number in leaving if number % 2 == 0]) <= after[0][left] <= len(leaving)

    # asyncio's own pool may still have been filling up, which ends; what leaks does so with every crowd.
    threads = [[server["process_threads"] for server in servers] for servers in (before, after)]
    while len(threads) < 5 and any(now > earlier + 2 for earlier, now in zip(*threads[-2:], strict=True)):
        asyncio.run(crowd(pair.url, leaving=leaving))
        threads.append([server["process_threads"] for server in idle(pair)])
    assert all(now <= earlier + 2 for earlier, now in zip(*threads[-2:], strict=True)), threads


def wait_for_log(pair, text):
    while text not in pair.logs():
        time.sleep(0.01)


async def all_accepted(url, work):
    """Wait until the server has every request; returns how many of them wait for a place."""
    while True:
        metrics = await asyncio.to_thread(metrics_of, url)
        queued = metrics["lynx_net_http_requests_queued"]
        if metrics["lynx_net_http_requests_running"] + queued + sum(one.done() for one in work) == len(work):
            return queued
        await asyncio.sleep(0.01)


def test_the_documents_end_finishes_what_was_accepted(pair):
    """SIGTERM loses no accepted request, waiting ones included, and both processes end with code 0."""
    metrics, kill = pair.last.splitlines()
    assert "lynx_net_http_ttft_seconds_count" in pair.run(metrics)

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as client:
            work = [asyncio.create_task(ask(client, number, leave=False)) for number in range(20)]
            assert await all_accepted(pair.url, work) >= 4
            # Both waits in it fail unless the processes end with code 0.
            ending = asyncio.create_task(asyncio.to_thread(pair.run, kill))
            await asyncio.to_thread(wait_for_log, pair, "shutting down")
            with pytest.raises(openai.InternalServerError) as refusal:
                await client.completions.create(model="smollm2", prompt="late", max_tokens=1)
            assert refusal.value.status_code == 503
            assert int(refusal.value.response.headers["Retry-After"]) > 0
            answers = await asyncio.gather(*work)
            await ending
            return answers

    answers = asyncio.run(main())
    assert len(answers) == 20
    assert all(len(text) == TOKENS for text, _ in answers)
