"""Scores are what the model's own attention says."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
import transformers

from lynx_net.integrations.transformers import prefill

TOKENS, WINDOW = 50, 12


@pytest.fixture
def model():
    """Random weights; every second layer sees the last 12 tokens only."""
    config = transformers.Qwen2Config(
        vocab_size=60,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"] * 2,
        eos_token_id=None,
    )
    torch.manual_seed(5)
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3)
    return model.train(False)


@pytest.mark.parametrize("queries", [1, 20, TOKENS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_are_the_mean_attention_of_the_last_queries(model, queries, dtype):
    tokens = [3 + 7 * i % 50 for i in range(TOKENS)]
    model.to(getattr(torch, dtype))
    implementation = model.config._attn_implementation
    found = prefill(model, tokens, score_queries=queries)
    assert model.config._attn_implementation == implementation
    plain = prefill(model, tokens)
    assert plain.scores is None
    np.testing.assert_array_equal(found.logits, plain.logits)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(torch.tensor([tokens]), output_attentions=True).attentions
    expected = np.stack([layer[0, :, -queries:].float().mean((0, 1)).numpy() for layer in weights])
    assert found.scores.shape == (4, TOKENS)
    np.testing.assert_allclose(found.scores, expected, atol=1e-5 if dtype == "float32" else 0.02)
    if queries == 1:
        assert (found.scores[1, : TOKENS - WINDOW] == 0).all()
