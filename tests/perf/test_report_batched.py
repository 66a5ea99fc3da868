"""One pass over several caches and several texts gives what one at a time gives."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

if not all(importlib.util.find_spec(needed) for needed in ("torch", "transformers")):
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from lynx_net.integrations.transformers import layout_of, prefill
from perf.quality_capture import STEPS, Greedy, capture, fill
from perf.quality_codecs import code
from perf.quality_measure import Attention, drafts, errors
from perf.report.batched import batched
from perf.report.measure_quality import SUBJECTS, measure_summary, subject_digest

TOKENS, WORDS = 40, 97
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 5, "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]


def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "full":
        made: Any = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.5))
    else:
        config = Gemma3TextConfig(**SIZES, sliding_window=16, layer_types=SLIDING, initializer_range=0.5)
        made = Gemma3ForCausalLM(config)
    return made.train(False)


@pytest.fixture(params=["full", "sliding"])
def model(request: pytest.FixtureRequest) -> Any:
    return model_of(request.param)


def caches_of(model: Any) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(1)
    made = [prefill(model, [int(one) for one in rng.integers(6, WORDS, TOKENS)]) for _ in range(3)]
    return [(np.stack(one.keys), np.stack(one.values)) for one in made]


def test_rows_decode_like_single_caches(model: Any) -> None:
    caches = caches_of(model)
    expected, losses = [], []
    greedy = Greedy(model, TOKENS)
    for cache in caches:
        fill(greedy.cache, *cache)
        expected.append(greedy.decode(7, 24))
        losses.append(greedy.losses(7, list(range(10, 20))))
    usual = model.config._attn_implementation
    with batched(model, layout_of(model.config, TOKENS, dtype="float32"), 3, STEPS) as batch:
        for row, cache in enumerate(caches):
            batch.fill(row, *cache)
        fed, found = [[7]] * 3, [[], [], []]
        for step in range(24):
            fed = batch.choose(batch.forward(fed, [0], [TOKENS + step]))
            for text, chosen in zip(found, fed, strict=True):
                text += chosen
        assert found == expected
        assert not any(5 in text for text in found), "a token that ends an answer is never chosen"
        batch.clear()
        hidden = batch.forward([[7, *range(10, 19)]] * 3, [0] * 10, range(TOKENS, TOKENS + 10))
        assert np.allclose(batch.losses(hidden, range(10, 20)), losses, atol=1e-4)
        with pytest.raises(ValueError, match="no room"):
            batch.forward([[7] * STEPS] * 3, [0] * STEPS, range(STEPS))
    assert model.config._attn_implementation == usual


def test_branches_do_not_see_each_other(model: Any) -> None:
    cache = caches_of(model)[0]
    texts = [[7, 8, 9], [20, 30, 40, 50, 60], [11]]
    alone = []
    greedy = Greedy(model, TOKENS)
    fill(greedy.cache, *cache)
    for text in texts:
        first = greedy.forced(text[0], [*text[1:], 0])[-1]
        alone.append(greedy.decode(text[0], len(text) + 5, [*text[1:], first])[len(text) - 1 :])
    with batched(model, layout_of(model.config, TOKENS, dtype="float32"), 1, 40) as batch:
        batch.fill(0, *cache)
        places = [place for text in texts for place in range(TOKENS, TOKENS + len(text))]
        branches = [at for at, text in enumerate(texts) for _ in text]
        hidden = batch.forward([[token for text in texts for token in text]], branches, places)
        chosen = batch.choose(hidden[:, np.cumsum([len(text) for text in texts]) - 1])
        found = [[token] for token in chosen[0]]
        for step in range(5):
            chosen = batch.choose(batch.forward(chosen, range(3), [TOKENS + len(text) + step for text in texts]))
            for text, token in zip(found, chosen[0], strict=True):
                text.append(token)
    assert found == alone


def test_a_summary_counts_drafts_and_errors_as_one_codec_at_a_time_does(model: Any) -> None:
    rng = np.random.default_rng(2)
    ids = [int(one) for one in rng.integers(6, WORDS, 81)]
    names = ["bf16", "int4", "lynx", "nested 2 bits", "nested 5 bits"]
    found = measure_summary(SimpleNamespace(model=model), ids, names)
    captured = capture(model, ids, 80, "chat")
    layout = layout_of(model.config, 80, dtype="bfloat16")
    attention, greedy = Attention(model, captured), Greedy(model, 80)
    for name in names:
        coded = code(SUBJECTS[name], captured, layout)
        assert found[name]["accepted"] == drafts(greedy, captured, coded).accepted
        assert found[name]["full"]["vnmse"] == pytest.approx(
            errors(attention, coded)["attn_err_paper_full"], rel=1e-3, abs=1e-9
        )
    assert found["bf16"]["accepted"] == STEPS
    assert found["nested 2 bits"]["full"] == found["nested 5 bits"]["full"], "they have the same Q_full"
    assert 0 <= found["lynx"]["anchor"]["score"] <= 1


def test_a_codec_is_known_by_what_it_does() -> None:
    digests = [subject_digest(SUBJECTS[name]) for name in ("int4", "lynx", "nested 2 bits", "nested 3 bits")]
    assert len(set(digests)) == 4
    assert subject_digest(SUBJECTS["int4"]) == digests[0]
