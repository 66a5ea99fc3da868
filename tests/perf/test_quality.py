"""The quality benchmark on a tiny random model: short cuts give what the long way gives; the JSON has its shape."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
import transformers

from lynx_net.integrations.transformers import layout_of
from lynx_net.integrations.weights import LoadedModel
from perf import quality, quality_capture
from perf.quality_capture import STEPS, Greedy, capture, fill, widen
from perf.quality_codecs import Coded, Subject, bits, code
from perf.quality_measure import Attention, drafts, errors
from perf.quality_prompts import PROMPTS, text_from

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 96
VOCABULARY = 60


class Letters:
    """A tokenizer: every character is a token, folded into the vocabulary."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        begin = [1] if add_special_tokens else []
        return {"input_ids": begin + [2 + ord(letter) % (VOCABULARY - 2) for letter in text]}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A random model with a sliding window in every second layer, like Gemma."""
    torch.set_num_threads(1)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        use_sliding_window=True,
        sliding_window=40,
        layer_types=["full_attention", "sliding_attention"] * 2,
        eos_token_id=3,
    )
    torch.manual_seed(5)
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3)
    return LoadedModel(model.train(False), Letters(), tmp_path_factory.mktemp("model"))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def captured(loaded: LoadedModel) -> quality_capture.Capture:
    prompt = quality_capture.prompt_tokens(loaded.tokenizer, "text", 3, TOKENS)
    return capture(loaded.model, prompt, TOKENS, "text")


def noisy(cache: tuple[Any, Any], seed: int, size: float) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(array + size * rng.standard_normal(array.shape, dtype=np.float32) for array in cache)  # type: ignore[return-value]


@pytest.mark.parametrize(("anchor_noise", "full_noise"), [(0.0, 0.0), (0.02, 0.0), (0.3, 0.02), (1.0, 0.3)])
def test_drafts_are_counted_as_sequential_decoding_counts_them(
    loaded: LoadedModel, captured: quality_capture.Capture, anchor_noise: float, full_noise: float
) -> None:
    exact = (widen(captured.keys), widen(captured.values))
    greedy = Greedy(loaded.model, TOKENS)
    fill(greedy.cache, *exact)
    assert greedy.decode(captured.last, STEPS) == captured.following.tolist()
    counts = []
    for seed in range(2):
        full = noisy(exact, seed, full_noise)
        coded = Coded(noisy(full, seed + 100, anchor_noise), full, (), None)
        counted = drafts(greedy, captured, coded)
        fill(greedy.cache, *coded.full)
        target = greedy.decode(captured.last, STEPS)
        fill(greedy.cache, *coded.anchor)
        drafted = greedy.decode(captured.last, STEPS)
        assert counted.accepted == quality_capture.matching(drafted, target)
        assert counted.like_exact == quality_capture.matching(target, captured.following.tolist())
        counts.append(counted.accepted)
    assert (min(counts) == STEPS) == (anchor_noise == 0.0)


def test_attention_is_that_of_the_model(loaded: LoadedModel, captured: quality_capture.Capture) -> None:
    """What `Attention` computes from the recorded queries is what the layers hand to their output projections."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0][0].clone()))
        for layer in loaded.model.get_decoder().layers
    ]
    greedy = Greedy(loaded.model, TOKENS)
    fill(greedy.cache, widen(captured.keys), widen(captured.values))
    greedy.forced(captured.last, captured.following.tolist())
    for hook in hooks:
        hook.remove()
    attention = Attention(loaded.model, captured)
    outputs = attention._outputs(attention.keys, attention.values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(outputs, torch.stack(seen), rtol=1e-4, atol=1e-5)


def test_scores_are_shares_of_attention(captured: quality_capture.Capture) -> None:
    assert captured.scores.shape == (4, TOKENS)
    np.testing.assert_allclose(captured.scores.sum(axis=1), 1, rtol=1e-5)
    # The oldest token that the last 64 queries see through a window of 40 is 96 - 64 - 39 < 0: none is hidden from all.
    assert (captured.scores[0] > 0).all()


def test_fine_tokens_have_no_more_error_than_the_full_cache(
    captured: quality_capture.Capture, loaded: LoadedModel
) -> None:
    layout = layout_of(loaded.model.config, TOKENS, dtype="bfloat16")
    kept = {"raw_head": 4, "fine": 20}
    plain, fine = (
        code(subject, captured, layout) for subject in (Subject("nested", raw_head=4), Subject("nested", **kept))
    )
    better = (fine.anchor[0] != plain.anchor[0]).any((0, 2, 3))
    assert better.sum() == 20
    assert not better[:4].any()
    np.testing.assert_array_equal(fine.anchor[0][:, better], fine.full[0][:, better])
    of_plain, of_fine = (bits(Subject("nested", **options), layout, [], layout) for options in ({"raw_head": 4}, kept))
    assert of_fine["bits_anchor"] - of_plain["bits_anchor"] == pytest.approx(
        20 / TOKENS * 4 + 8 * 8 * 2 * 20 / layout.values
    )
    attention = Attention(loaded.model, captured)
    assert errors(attention, fine)["attn_err_anchor"] < errors(attention, plain)["attn_err_anchor"]


def test_every_figure_of_the_issue_is_there(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Tiny:
        def load(self, _progress: object, fetch: bool) -> LoadedModel:
            assert fetch
            return loaded

    monkeypatch.setenv("LYNX_NET_CACHE", str(tmp_path))
    monkeypatch.setattr(quality, "MODELS", {"tiny": Tiny()})
    arguments = [
        "--models",
        "tiny",
        "--tokens",
        str(TOKENS),
        "--prompts",
        "3",
        "--error-prompts",
        "1",
        "--threads",
        "1",
    ]
    chosen = [quality.DEFAULT, "lynx", "lynx_raw", "int8"]
    assert quality.main([*arguments, "--codecs", *chosen, "--json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["default"] in result["models"]["tiny"]
    assert set(result["models"]["tiny"]) == set(chosen)
    assert result["models"]["tiny"][quality.DEFAULT]["exact_ok"] is True
    for row in result["models"]["tiny"].values():
        for name in (
            "bits_anchor", "bits_full", "bits_all", "attn_err_anchor", "attn_err_full", "k_err_anchor", "v_err_anchor",
            "mean_accepted", "accept_rate_21", "encode_gbps", "decode_gbps",
        ):  # fmt: skip
            assert row[name] >= 0
        assert row["exact_ok"] is (True if row["bits_all"] > row["bits_full"] else None)
        assert row["prompts"] == 3
    assert result["models"]["tiny"]["lynx"]["params"]["key"] == [
        {"alpha": result["models"]["tiny"]["lynx_raw"]["params"]["key"][0]["alpha"]}
    ]
    assert "accepted of 64" in capsys.readouterr().out
    files = sorted(path.stat().st_mtime_ns for path in (tmp_path / "quality").rglob("*.npz"))
    assert quality.main([*arguments, "--codecs", "lynx"]) == 0  # from what was kept
    assert files == sorted(path.stat().st_mtime_ns for path in (tmp_path / "quality").rglob("*.npz"))


def test_prompts_differ_and_the_text_is_all_used() -> None:
    texts = [text_from(number) for number in range(PROMPTS)]
    assert len({text[:100] for text in texts}) == PROMPTS
    assert len({len(text) for text in texts}) == 1
    assert dataclasses.is_dataclass(Subject)
