"""The commands of docs/http.md that put a store behind both servers, as processes."""

from __future__ import annotations

import time

import openai
import pytest
from httpkit import Walk, get

pytestmark = pytest.mark.timeout(300)

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4


def wait_for_metric(url, line):
    until_s = time.monotonic() + 30
    while line not in get(f"{url}/metrics").splitlines():
        assert time.monotonic() < until_s, line
        time.sleep(0.1)


def test_the_second_answer_comes_from_the_store(tiny_model, tmp_path):
    walk = Walk(tmp_path, tiny_model)
    try:
        for command in walk.with_store.splitlines():
            walk.run(command)
        [waiting] = [line for line in walk.first.splitlines() if line.startswith("until ")]
        walk.run(waiting)
        for url in (walk.url, walk.prefill_url):
            wait_for_metric(url, "lynx_net_http_store_up 1")
        texts = []
        for outcome in ("miss", "hit"):
            with openai.OpenAI(base_url=f"{walk.url}/v1", api_key="none", max_retries=0) as client:
                answer = client.completions.create(model="smollm2", prompt=PROMPT, max_tokens=12, temperature=0)
            texts.append(answer.choices[0].text)
            wait_for_metric(walk.url, f'lynx_net_http_store_lookups_total{{outcome="{outcome}"}} 1')
            wait_for_metric(walk.prefill_url, 'lynx_net_http_store_puts_total{outcome="stored"} 1')
        assert texts[0] == texts[1] != ""
        assert list((tmp_path / "store").iterdir())
        walk.run("kill %3 && wait %3 && kill %2 && wait %2 && kill %1 && wait %1")
    finally:
        walk.end()
