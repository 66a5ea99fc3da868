from __future__ import annotations

import openai
import pytest

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 10


@pytest.fixture
def client(pair):
    with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_completion_is_plain_decoding(client, reference):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == reference.text(PROMPT, 24)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.choices[0].finish_reason == "length"


def test_a_streamed_chat_is_plain_decoding(client, reference):
    messages = [{"role": "user", "content": PROMPT}]
    chunks = list(
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=24, temperature=0, stream=True)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == reference.text(messages, 24)
    assert chunks[-1].choices[0].finish_reason == "length"
