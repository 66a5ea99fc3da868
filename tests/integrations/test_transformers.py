from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
import transformers
from speculation_toys import Offer, ScriptedTransfer, replay

import lynx_net
from lynx_net.errors import LocalProtocolError
from lynx_net.integrations.transformers import ProgressiveCache, TransformersModel, layout_of, prefill
from lynx_net.speculation import Draft, Retract, decode, decode_plain
from lynx_net.testing.clock import run_virtual
from lynx_net.wire.layout import CacheLayout

DTYPES = ("float32", "bfloat16", "float16")


def prompt_of(length, vocab=60):
    return [int(token) for token in np.random.default_rng(4).integers(0, vocab, length)]


def filled(model, prompt, *, room=64):
    """A cache that holds what the model itself computes for all but the last token of the prompt."""
    computed = prefill(model, prompt)
    dtype = str(model.dtype).removeprefix("torch.")
    cache = ProgressiveCache(layout_of(model.config, len(prompt) - 1, dtype=dtype), room=room)
    for layer in range(model.config.num_hidden_layers):
        cache.view(layer, "key")[:] = computed.keys[layer][:-1]
        cache.view(layer, "value")[:] = computed.values[layer][:-1]
    return cache


def generated(model, prompt, count):
    """Greedy tokens by transformers' own loop and cache."""
    inputs = torch.tensor([prompt])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


class Paired:
    """The same prompt cache twice over: coarse first, exact when `full` is set, written in place."""

    def __init__(self, model, cache, noise):
        self.inner = TransformersModel(model, cache)
        self.cache = cache
        self.running = False
        self.after_call = lambda _count: None
        self.calls = 0
        self._exact = [
            (cache.view(i, kind), cache.view(i, kind).copy()) for i in range(len(cache)) for kind in ("key", "value")
        ]
        rng = np.random.default_rng(9)
        for view, exact in self._exact:
            view += (noise * exact.std() * rng.normal(size=view.shape)).astype(view.dtype)

    def __setattr__(self, name, value):
        if name == "full":
            for view, exact in self._exact:
                view[:] = exact
        super().__setattr__(name, value)

    @property
    def length(self):
        return self.inner.length

    def truncate(self, length):
        self.inner.truncate(length)

    def forward(self, tokens):
        self.running = True
        try:
            logits = self.inner.forward(tokens)
            self.calls += 1
            self.after_call(self.calls)
        finally:
            self.running = False
        return logits


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_alias_the_cache(dtype):
    cache = ProgressiveCache(CacheLayout(2, 5, 3, 8, 6, dtype), room=4)
    key, value = cache.view(1, "key"), cache.view(1, "value")
    assert key.shape == (5, 3, 8)
    assert value.shape == (5, 3, 6)
    assert key.dtype == {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]
    key[2, 1] = np.ones(8, key.dtype)
    held = cache.layers[1].keys
    assert held.shape == (1, 3, 9, 8)
    assert (held[0, 1, 2] != 0).all()
    assert int((held != 0).sum()) == 8
    assert cache.length == 5
    assert cache.get_seq_length() == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_gives_what_transformers_caches(tiny, dtype):
    model = tiny(dtype)
    prompt = prompt_of(11)
    computed = prefill(model, prompt)
    reference = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        name = (
            "cache" if tuple(int(x) for x in transformers.__version__.split(".")[:2]) >= (5, 24) else "past_key_values"
        )
        logits = model(torch.tensor([prompt]), use_cache=True, **{name: reference}).logits[0, -1]
    np.testing.assert_allclose(computed.logits, logits.float().numpy(), rtol=1e-5, atol=1e-5)
    assert len(computed.keys) == len(computed.values) == 3
    for ours, theirs in zip(computed.keys, reference.layers, strict=True):
        assert ours.shape == (11, 2, 8)
        raw = theirs.keys[0].view(torch.uint16) if dtype == "bfloat16" else theirs.keys[0]
        np.testing.assert_array_equal(ours, raw.numpy().transpose(1, 0, 2))


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_decoding_equals_generate(tiny, heads):
    model = tiny(num_key_value_heads=heads)
    prompt = prompt_of(20)
    expected = generated(model, prompt, 24)
    assert len(set(expected)) > 4
    decoded = decode_plain(TransformersModel(model, filled(model, prompt)), prompt[-1:], max_new_tokens=24)
    assert decoded == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens_at_once_score_as_one_by_one(tiny, dtype):
    model = tiny(dtype)
    prompt = prompt_of(20)
    driven = TransformersModel(model, filled(model, prompt))
    tokens = prompt[-1:] + prompt_of(8)
    one_by_one = np.concatenate([driven.forward([token]) for token in tokens])
    driven.truncate(19)
    at_once = driven.forward(tokens)
    assert at_once.dtype == np.float32
    assert at_once.shape == (9, 60)
    assert driven.length == 28
    tolerance = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.6}[dtype]
    np.testing.assert_allclose(at_once, one_by_one, atol=tolerance)


def test_folded_attention_equals_sdpa(tiny):
    model = tiny()
    prompt = prompt_of(20)
    cache = filled(model, prompt)
    driven = TransformersModel(model, cache)
    tokens = prompt[-1:] + prompt_of(6)
    assert model.config._attn_implementation == "lynx_net_folded"
    folded = driven.forward(tokens)
    driven.truncate(19)
    model.set_attn_implementation("sdpa")
    np.testing.assert_allclose(driven.forward(tokens), folded, atol=1e-4)


def test_sliding_windows_are_masked(tiny):
    """A cache that keeps everything must still hide what lies outside the window."""
    config = transformers.Gemma3TextConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        eos_token_id=None,
    )
    torch.manual_seed(3)
    model = transformers.Gemma3ForCausalLM(config).train(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3)
    prompt = prompt_of(20)
    expected = generated(model, prompt, 16)
    driven = TransformersModel(model, filled(model, prompt))
    assert decode_plain(driven, prompt[-1:], max_new_tokens=16) == expected
    driven.truncate(19)
    rows = driven.forward(prompt[-1:] + expected[:-1])
    assert rows.argmax(axis=-1).tolist() == expected


def test_room_is_checked_and_a_failed_pass_leaves_the_cache(tiny, monkeypatch):
    model = tiny()
    driven = TransformersModel(model, filled(model, prompt_of(6), room=3))
    with pytest.raises(LocalProtocolError, match="room"):
        driven.forward([1, 2, 3, 4])
    with pytest.raises(LocalProtocolError, match="at least one"):
        driven.forward([])
    with pytest.raises(LocalProtocolError, match="truncate"):
        driven.truncate(9)
    assert driven.length == 5
    before = driven.forward([1])
    driven.truncate(5)

    def fail(*_args, **_kwargs):
        raise RuntimeError("in mid-forward")

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="mid-forward"):
            driven.forward([1, 2])
    assert driven.length == 5
    assert {layer.get_seq_length() for layer in driven.cache.layers} == {5}
    np.testing.assert_array_equal(driven.forward([1]), before)


def test_a_cache_of_another_dtype_is_refused(tiny):
    model = tiny("bfloat16")
    with pytest.raises(LocalProtocolError, match="float32"):
        TransformersModel(model, ProgressiveCache(layout_of(model.config, 4, dtype="float32")))
    with pytest.raises(LocalProtocolError, match="int8"):
        ProgressiveCache(layout_of(model.config, 4), dtype="int8")


def test_layouts(tiny):
    config = tiny().config
    assert layout_of(config, 7, raw_tail=5) == CacheLayout(3, 7, 2, 8, 8, "float32", 256, 4, 5)
    assert layout_of(config, 7, dtype="bfloat16").dtype == "bfloat16"
    latent = transformers.DeepseekV3Config(num_hidden_layers=2)
    with pytest.raises(LocalProtocolError, match="deepseek_v3"):
        layout_of(latent, 7)


def run_pair(model, prompt, *, noise, ready_after, first_token=None, **kwargs):
    """Decode through the real loop; the cache becomes exact while forward `ready_after` runs."""

    async def main():
        paired = Paired(model, filled(model, prompt), noise)
        transfer = ScriptedTransfer(paired, Offer(first_token))
        transfer.finish_after(ready_after)
        return [event async for event in decode(paired, transfer, prompt_tail=prompt[-1:], **kwargs)]

    return asyncio.run(main())


@pytest.mark.parametrize("noise", [0.02, 0.5])
@pytest.mark.parametrize("ready_after", [0, 1, 5, 12])
def test_speculation_on_a_tiny_model_equals_generate(tiny, noise, ready_after):
    model = tiny()
    prompt = prompt_of(30)
    expected = generated(model, prompt, 12)
    events = run_pair(model, prompt, noise=noise, ready_after=ready_after, max_new_tokens=12)
    assert replay(events)[0] == expected
    assert events[-1].drafted == ready_after


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_verified_on_the_exact_stream_tokens_are_those_of_the_unquantised_cache(tiny, dtype):
    """Over a real link, with 2-bit anchors: the tokens are what the model decodes from its own cache."""
    model = tiny(dtype)
    prompt = prompt_of(80)
    original = filled(model, prompt)
    layout = layout_of(model.config, len(prompt) - 1, dtype=dtype, raw_head=0)
    params = {"bits": [2, 6], "chunk": 16, "exact": True}
    seen = {}

    async def main():
        def allocate(_offer):
            return ProgressiveCache(layout, room=64)

        async with (
            lynx_net.serve("memory://exact", allocate=allocate) as server,
            lynx_net.connect(server.url, rate="100kbit") as link,
        ):
            sending = asyncio.create_task(send(link))
            transfer = await anext(aiter(server))
            driven = TransformersModel(model, transfer.target)
            kwargs = {"prompt_tail": prompt[-1:], "max_new_tokens": 16, "verify_on": "exact"}
            events = [event async for event in decode(driven, transfer, **kwargs)]
            await sending
            seen["q_full"] = transfer.residual_ready.at_s < transfer.exact_ready.at_s
            for layer in range(len(original)):
                for kind in ("key", "value"):
                    there, here = transfer.target.view(layer, kind), original.view(layer, kind)
                    np.testing.assert_array_equal(there.view(np.uint16), here.view(np.uint16))
            return events

    async def send(link):
        async with link.send("r", layout, codec="nested", codec_params=params) as sending:
            for layer in range(layout.layers):
                await sending.write(layer, original.view(layer, "key"), original.view(layer, "value"))

    events = run_virtual(main())
    expected = decode_plain(TransformersModel(model, original), prompt[-1:], max_new_tokens=16)
    assert replay(events)[0] == expected
    assert seen["q_full"]
    assert events[-1].drafted > 0


def test_an_exact_stream_that_is_not_sent_is_missed_at_once(tiny):
    model = tiny("bfloat16")
    original = filled(model, prompt_of(20))
    layout = layout_of(model.config, 19, dtype="bfloat16")

    async def main():
        async with lynx_net.serve("memory://inexact") as server, lynx_net.connect(server.url) as link:
            async with link.send("r", layout, codec="nested", codec_params={"bits": [4, 4]}) as sending:
                for layer in range(layout.layers):
                    await sending.write(layer, original.view(layer, "key"), original.view(layer, "value"))
                transfer = await anext(aiter(server))
            driven = TransformersModel(model, original)
            with pytest.raises(LocalProtocolError, match="no exact stream"):
                await anext(decode(driven, transfer, prompt_tail=[1], verify_on="exact"))

    run_virtual(main())


@pytest.mark.model
def test_smollm_decodes_as_generate_does(smollm):
    prompt = smollm.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three rivers of Europe."}], add_generation_prompt=True, return_dict=False
    )
    expected = generated(smollm.model, prompt, 16)
    computed = prefill(smollm.model, prompt)
    assert int(computed.logits.argmax()) == expected[0]
    driven = TransformersModel(smollm.model, filled(smollm.model, prompt))
    assert decode_plain(driven, prompt[-1:], max_new_tokens=16, stop_tokens=[2]) == expected


@pytest.mark.model
@pytest.mark.parametrize(("noise", "with_first"), [(0.0, False), (0.3, True), (1.0, False)])
def test_speculation_on_smollm_equals_plain_decoding(smollm, noise, with_first):
    text = "A river carries water from its source to the sea. " * 8 + "What does a river carry? Explain why."
    prompt = smollm.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    assert len(prompt) < 200
    driven = TransformersModel(smollm.model, filled(smollm.model, prompt))
    expected = decode_plain(driven, prompt[-1:], max_new_tokens=14, stop_tokens=[2])
    events = run_pair(
        smollm.model,
        prompt,
        noise=noise,
        ready_after=8,
        first_token=expected[0] if with_first else None,
        max_new_tokens=14,
        stop_tokens=[2],
    )
    assert replay(events)[0] == expected
    assert sum(isinstance(event, Draft) for event in events) == 8
    if noise == 0.0:
        assert not any(isinstance(event, Retract) for event in events)
    if noise == 1.0:
        assert any(isinstance(event, Retract) for event in events)
