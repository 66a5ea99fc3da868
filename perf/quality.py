"""Quality of the codecs on caches of real models: `python -m perf.quality --json FILE`.

On SmolLM2-135M (chat prompts) and Gemma 3 270M (plain text; it is a base model), for every codec: bits a value after
the first stream, after Q_full and in all; errors of keys, values and attention outputs against the bfloat16 cache; and
how many of 64 drafts, decoded greedily from the first stream, are what Q_full would have said. `docs/codec-study.md`
says what the figures mean and what was tried.

The first run downloads Gemma (253 MB), converts both models and prefills the prompts, which takes 10 to 20 minutes
more; caches are kept in `$LYNX_NET_CACHE/quality` (1 GB a model for 1,024 tokens).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lynx_net.demo.process import limit_threads

if __name__ == "__main__":
    limit_threads()  # before torch is imported

import numpy as np
import torch

from lynx_codec import codec_names
from lynx_net.demo.results import machine_facts
from lynx_net.errors import LynxError
from lynx_net.integrations import gemma3, smollm2
from lynx_net.integrations.transformers import layout_of
from lynx_net.integrations.weights import cache_folder
from lynx_net.serdes.fine import FINE_LEAST, FINE_SHARE
from perf.quality_capture import Greedy, captures
from perf.quality_codecs import BITS_TOKENS, Subject, bits, code, speeds
from perf.quality_measure import Attention, drafts, errors, summary
from perf.quality_prompts import PROMPTS, prompt_set

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perf.quality_capture import Kind
    from perf.quality_measure import Drafts

MODELS = {"smollm2": smollm2.MODEL, "gemma3": gemma3.MODEL}
DEFAULT = "nested"
"""The codec that a transfer uses unless it is told otherwise, with the tokens that it keeps finer."""

KEPT: Mapping[str, Any] = {"raw_head": 4, "fine": FINE_LEAST, "fine_share": FINE_SHARE}
"""Of the default: 4 raw tokens, and the usual number of fine ones, those of most attention."""

KEYS, VALUES = {"bits": [4, 4], "chunk": 128}, {"bits": [3, 5]}
ALPHAS = (0.25, 0.5, 1.0, 2.0)
FEW = 8
"""Prompts for the codecs that are there for comparison."""

SUBJECTS: Mapping[str, Subject] = {
    DEFAULT: Subject("nested", {**KEYS, "exact": True}, VALUES, **KEPT),
    "lynx": Subject("lynx"),
    "lynx_raw": Subject("lynx", raw_head=4),
    "lynx_fine": Subject("lynx", **KEPT),
    "nested_3.5": Subject("nested", {"bits": [3, 5], "chunk": 128}, {"bits": [2, 6]}, 4, FINE_LEAST, 0.129),
    "nested_4": Subject("nested", KEYS, raw_head=4, fine=224),
    "nested_tail": Subject("nested", KEYS, raw_head=4, fine=224, fine_last=True),
    "nested_5": Subject("nested", {**KEYS, "bits": [5, 3]}, **KEPT),
    "nested_6": Subject("nested", {**KEYS, "bits": [6, 2]}, **KEPT),
    "nested_7": Subject("nested", {**KEYS, "bits": [7, 1]}, **KEPT),
    "nested_plain": Subject("nested", {"bits": [4, 4], "chunk": 32}, prompts=FEW),
    "int8": Subject("int8", prompts=FEW),
    "int4": Subject("int4", prompts=FEW),
    "fp8": Subject("fp8", prompts=FEW),
    "int8_token": Subject("int8_token", prompts=FEW),
    "int4_token": Subject("int4_token", prompts=FEW),
    "cachegen": Subject("cachegen", layer_params=({"bin": 0.5}, {"bin": 1.0}, {"bin": 1.5}), prompts=FEW),
    "kivi_4": Subject("kivi", {"bits": 4, "axis": "channel"}, {"axis": "token"}, prompts=FEW),
    "kivi_2": Subject("kivi", {"bits": 2, "axis": "channel"}, {"axis": "token"}, prompts=FEW),
    "turboquant": Subject("turboquant", {"bits": 4}, prompts=FEW),
}
"""All of them; those whose codec is not there are left out."""


def measure(
    loaded: Any,
    name: str,
    subjects: Mapping[str, Subject],
    *,
    tokens: int,
    prompts: int,
    error_prompts: int,
    folder: Path,
    text: str | None = None,
) -> dict[str, dict[str, Any]]:
    """All figures of one model, by codec.

    Args:
        loaded: the model and its tokenizer.
        tokens: length of the caches that errors and drafts are measured on.
        prompts: prompts whose drafts are counted.
        error_prompts: of these, and of as many prose caches, so many are looked at for errors.
        folder: where the captured caches are kept.
        text: prose that takes the place of the frozen text.
    """
    layout = layout_of(loaded.model.config, tokens, dtype="bfloat16")
    greedy = Greedy(loaded.model, tokens)
    kind: Kind = "chat" if loaded.tokenizer.chat_template else "text"
    counted: dict[str, list[Drafts]] = {subject: [] for subject in subjects}
    found: dict[str, dict[str, list[dict[str, float]]]] = {subject: {kind: [], "prose": []} for subject in subjects}
    written: dict[str, list[tuple[int, ...]]] = {subject: [] for subject in subjects}
    exact: dict[str, list[bool]] = {subject: [] for subject in subjects}
    sets: tuple[tuple[Kind, int], ...] = ((kind, max(prompts, error_prompts)), ("prose", error_prompts))
    for chosen, count in sets:
        for number, captured in captures(loaded, name, chosen, tokens, range(count), folder, text):
            begin = time.perf_counter()
            attention = Attention(loaded.model, captured) if number < error_prompts else None
            for key, subject in subjects.items():
                drafting = chosen == kind and number < min(prompts, subject.prompts or prompts)
                if attention is None and not drafting:
                    continue
                coded = code(subject, captured, layout)
                written[key].append(coded.stream_bytes)
                if coded.exact_ok is not None:
                    exact[key].append(coded.exact_ok)
                if attention is not None:
                    found[key][chosen].append(errors(attention, coded))
                if drafting:
                    counted[key].append(drafts(greedy, captured, coded))
            tell(f"{name}: {chosen} prompt {number + 1} of {count}, {time.perf_counter() - begin:.1f} s")
    ends = layout_of(loaded.model.config, BITS_TOKENS, dtype="bfloat16")
    return {
        key: {
            **bits(subject, ends, written[key], layout),
            **{f"{name}_here": value for name, value in bits(subject, layout, written[key], layout).items()},
            **means([error for errors_of in found[key].values() for error in errors_of]),
            **(summary(counted[key]) if counted[key] else {}),
            "exact_ok": all(exact[key]) if exact[key] else None,
            "by_set": {chosen: means(list_) for chosen, list_ in found[key].items()},
            "accepted": [one.accepted for one in counted[key]],
            "codec": subject.codec,
            "params": {"key": _params(subject, "key"), "value": _params(subject, "value")},
            "raw_head": subject.raw_head,
            "fine": len(subject.fine_tokens(layout, None)),
            "fine_at_bits_tokens": len(subject.fine_tokens(ends, None)),
        }
        for key, subject in subjects.items()
    }


def best_alpha(loaded: Any, name: str, tokens: int, folder: Path, count: int) -> float:
    """The alpha of `lynx` with the least error of the attention output on its anchors."""
    layout = layout_of(loaded.model.config, tokens, dtype="bfloat16")
    kind: Kind = "chat" if loaded.tokenizer.chat_template else "text"
    totals = dict.fromkeys(ALPHAS, 0.0)
    for _, captured in captures(loaded, name, kind, tokens, range(count), folder):
        attention = Attention(loaded.model, captured)
        for alpha in ALPHAS:
            totals[alpha] += attention.errors(code(Subject("lynx", {"alpha": alpha}), captured, layout).anchor)[
                "attn_err"
            ]
    return min(totals, key=totals.__getitem__)


def means(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of every figure."""
    return {name: float(np.mean([sample[name] for sample in samples])) for name in samples[0]} if samples else {}


def table(models: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The result as text."""
    lines = []
    for model, codecs in models.items():
        lines.append(
            f"{model:14} {'bits: anchor':>12} {'full':>6} {'all':>6} {'attention: anchor':>18} {'full':>8} "
            f"{'K':>8} {'V':>8} {'accepted of 64':>16} {'of 21':>6} {'tokens equal':>12}"
        )
        for name, row in codecs.items():
            accepted = f"{row['mean_accepted']:9.1f} ± {row['mean_accepted_se']:4.1f}" if "mean_accepted" in row else ""
            share = f"{row['accept_rate_21']:6.3f} {row['token_agreement']:12.3f}" if accepted else ""
            lines.append(
                f"{name:14} {row['bits_anchor']:12.3f} {row['bits_full']:6.2f} {row['bits_all']:6.2f} "
                f"{row['attn_err_anchor']:18.2e} {row['attn_err_full']:8.1e} "
                f"{row['k_err_anchor']:8.1e} {row['v_err_anchor']:8.1e} {accepted:>16} {share}"
            )
    return "\n".join(lines)


def tell(line: str) -> None:
    """Progress, to standard error."""
    print(line, file=sys.stderr, flush=True)


def _params(subject: Subject, kind: str) -> list[dict[str, Any]]:
    parts = len(subject.layer_params)
    return [subject.codec_of(kind, part, parts).params() for part in range(parts)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m perf.quality", description="Measure the codecs on real caches.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--codecs", nargs="+", choices=SUBJECTS, metavar="NAME", help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the caches (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="prompts to draft on (default: %(default)s)")
    parser.add_argument(
        "--error-prompts", type=int, default=6, help="caches of each kind to measure errors on (default: %(default)s)"
    )
    parser.add_argument(
        "--prose", type=Path, metavar="FILE", help="a text to take the prose from, instead of the frozen one"
    )
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch (default: %(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two short prompts of SmolLM2 and three codecs: does it run?"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.models, options.tokens, options.prompts, options.error_prompts = ["smollm2"], 256, 2, 1
        options.codecs = options.codecs or [DEFAULT, "lynx", "lynx_raw"]
    torch.set_num_threads(options.threads)
    wanted = options.codecs or SUBJECTS
    chosen = {key: SUBJECTS[key] for key in wanted if SUBJECTS[key].codec in codec_names()}
    models: dict[str, dict[str, dict[str, Any]]] = {}
    folder = cache_folder() / "quality"
    text = None if options.prose is None else options.prose.read_text("utf-8")
    try:
        for name in options.models:
            loaded = MODELS[name].load(lambda step, done: tell(f"{step} ({done:.0%})"), fetch=True)
            alpha = best_alpha(loaded, name, options.tokens, folder, min(4, options.error_prompts))
            with_alpha = {
                key: dataclasses.replace(subject, params={"alpha": alpha}) if subject.codec == "lynx" else subject
                for key, subject in chosen.items()
            }
            models[name] = measure(
                loaded,
                name,
                with_alpha,
                tokens=options.tokens,
                prompts=options.prompts,
                error_prompts=options.error_prompts,
                folder=folder,
                text=text,
            )
            for key, subject in with_alpha.items():
                models[name][key] |= speeds(subject)
    except LynxError as error:
        tell(f"perf.quality: {error}")
        return 1
    result = {
        "machine": machine_facts(("numpy", "numba", "torch", "transformers")),
        "default": DEFAULT,
        "settings": {
            "tokens": options.tokens,
            "prompts": options.prompts,
            "error_prompts": options.error_prompts,
            "prompt_set": prompt_set(),
            "prose": str(options.prose) if options.prose else None,
            "bits_tokens": BITS_TOKENS,
        },
        "models": models,
    }
    print(table(models))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
