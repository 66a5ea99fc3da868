"""The real model behind both servers, and what models tell of themselves."""

from __future__ import annotations

import asyncio

import openai
import pytest
from httpkit import Reference, local_pair

from lynx_net.errors import LocalProtocolError
from lynx_net.integrations.http.config import ModelConfig
from lynx_net.integrations.http.errors import ApiError
from lynx_net.integrations.http.models import load_model
from perf.tiny_model import EOS, make_model


@pytest.mark.model
async def test_smollm2_answers_through_both_servers():
    text = "A river carries water from its source to the sea. " * 12
    chat = [{"role": "user", "content": f"{text}What does a river carry?"}]
    # The residual takes two seconds, so that a slow machine gets to a draft, too.
    async with local_pair("smollm2", prefill={"link": {"rate": "3Mbit"}}) as running:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="smollm2", messages=chat, max_tokens=12, temperature=0, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        [log] = running.decode.bus.recent()
    assert "".join(pieces) == await asyncio.to_thread(Reference("smollm2").text, chat, 12)
    assert len(pieces) > 3
    assert any(event["type"] == "draft" for event in log.events)


def test_what_a_model_tells_of_itself(tiny_model):
    served = load_model(ModelConfig(name=str(tiny_model)), None)
    assert (served.name, served.dtype, served.context_tokens) == ("tiny", "float32", 2048)
    assert served.stop_tokens == {EOS}
    assert load_model(ModelConfig(name=str(tiny_model), served_name="x"), 100).context_tokens == 100
    assert served.decode(served.encode("Hello!")) == "Hello!"
    assert served.decode([EOS]) == ""
    chat = served.encode_chat([{"role": "user", "content": "Hi"}])
    assert served.decode(chat) == "[user] Hi\n[assistant] "


def test_other_weights_have_another_fingerprint(tiny_model, tmp_path):
    same = load_model(ModelConfig(name=str(tiny_model)), None).fingerprint
    assert load_model(ModelConfig(name=str(tiny_model)), None).fingerprint == same
    assert load_model(ModelConfig(name=str(tiny_model), dtype="bfloat16"), None).fingerprint != same
    other = make_model(tmp_path / "other", seed=12)
    assert load_model(ModelConfig(name=str(other)), None).fingerprint != same


def test_a_model_without_a_template_takes_no_chat(tiny_model):
    served = load_model(ModelConfig(name=str(tiny_model)), None)
    served._tokenizer.chat_template = None
    with pytest.raises(ApiError, match="no chat template"):
        served.encode_chat([{"role": "user", "content": "Hi"}])


def test_a_template_that_refuses_says_why(tiny_model):
    served = load_model(ModelConfig(name=str(tiny_model)), None)
    served._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ApiError, match="roles must alternate"):
        served.encode_chat([{"role": "user", "content": "Hi"}])


def test_what_is_no_model_is_named(tmp_path):
    with pytest.raises(LocalProtocolError, match="neither smollm2"):
        load_model(ModelConfig(name=str(tmp_path)), None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LocalProtocolError, match="cannot be loaded"):
        load_model(ModelConfig(name=str(tmp_path)), None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_with_an_exact_stream_the_answer_is_that_of_the_unquantised_cache(tiny_model, dtype):
    import torch

    half = {"model": {"name": str(tiny_model), "dtype": dtype}}
    exact = {"link": {"codec": "nested", "codec_params": '{"exact": true}', "rate": "8Mbit"}}
    prompt = "It was a bright cold day in April, and the clocks were striking thirteen. " * 9
    async with local_pair(tiny_model, prefill={**half, **exact}, decode=half) as running:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        served = running.decode._engine.model
        tokens = torch.tensor([served.encode(prompt)])
        expected = served.model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
    assert answer.choices[0].text == served.decode(expected[0, tokens.shape[1] :].tolist())
