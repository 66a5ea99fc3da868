"""What perf.quality measures on: caches of real prompts, with the queries that really read them.

A prompt of `tokens` + 1 tokens is prefilled once. Its first `tokens` positions are the cache that would be sent,
rounded to bfloat16; the last token is what the receiver feeds first. What follows is STEPS tokens long: the model's own
greedy answer on that cache, or the text as it goes on. One forward pass over it gives, per layer, the queries (rotary
positions applied) and the keys and values of the tokens behind the cache.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from lynx_net.integrations.scores import SCORE_QUERIES, recorded_queries
from lynx_net.integrations.transformers import ProgressiveCache, TransformersModel, layout_of, prefill
from perf.quality_prompts import chat_prompt, prompt_set, prose

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = [
    "STEPS",
    "Capture",
    "Greedy",
    "Kind",
    "bfloat16_bits",
    "capture",
    "captures",
    "fill",
    "matching",
    "prompt_tokens",
    "widen",
]

Kind = Literal["chat", "text", "prose"]
"""chat: the chat template, answered greedily; text: plain text, continued greedily; prose: text and what follows it."""

STEPS = 64
"""Tokens behind the cache: the most that are drafted."""


@dataclass(frozen=True, slots=True)
class Capture:
    """One cache and what reads it."""

    keys: NDArray[np.uint16]
    """[layers, tokens, heads, size], bits of bfloat16."""

    values: NDArray[np.uint16]
    """Same."""

    last: int
    """The last token of the prompt, which is not in the cache."""

    following: NDArray[np.int64]
    """[STEPS] tokens behind it."""

    queries: NDArray[np.float32]
    """[layers, query heads, STEPS, size] of the tokens `last`, `following[:-1]`."""

    new_keys: NDArray[np.float32]
    """[layers, heads, STEPS, size] of the same tokens."""

    new_values: NDArray[np.float32]
    """Same."""

    scores: NDArray[np.float32]
    """[layers, tokens]: `attention_scores` of the prompt."""


class Greedy:
    """Greedy decoding of a model on a cache that can be exchanged. Tokens that end an answer are never chosen."""

    def __init__(self, model: Any, tokens: int) -> None:
        self.layout = layout_of(model.config, tokens, dtype="float32")
        self.cache = ProgressiveCache(self.layout, room=STEPS + 1)
        self._driven = TransformersModel(model, self.cache)
        ends = model.generation_config.eos_token_id
        self._ends = [end for end in (ends if isinstance(ends, list) else [ends]) if end is not None]

    def forced(self, last: int, tokens: Sequence[int]) -> list[int]:
        """What the model chooses at each step if it is fed `last` and all but the last of `tokens`."""
        scores = self._driven.forward([last, *tokens[:-1]])
        self._driven.truncate(self.layout.tokens)
        return self._choose(scores)

    def losses(self, last: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Nats that the model pays for each of `tokens` behind `last`; all tokens of the vocabulary count."""
        scores = torch.from_numpy(self._driven.forward([last, *tokens[:-1]]))
        self._driven.truncate(self.layout.tokens)
        paid: NDArray[np.float32] = torch.nn.functional.cross_entropy(
            scores, torch.tensor(list(tokens)), reduction="none"
        ).numpy()
        return paid

    def decode(self, last: int, steps: int, begun: Sequence[int] = ()) -> list[int]:
        """Decode one token after the other until there are `steps`, `begun` being the first of them."""
        tokens = list(begun)
        fed = [last, *tokens]
        while len(tokens) < steps:
            tokens += self._choose(self._driven.forward(fed)[-1:])
            fed = tokens[-1:]
        self._driven.truncate(self.layout.tokens)
        return tokens

    def target(self, last: int, proposed: Sequence[int]) -> list[int]:
        """What `decode` gives on this cache: one pass as far as it is `proposed`, then step by step."""
        chosen = self.forced(last, proposed)
        agreed = matching(chosen, proposed)
        return self.decode(last, len(proposed), chosen[: agreed + 1])

    def _choose(self, scores: NDArray[np.float32]) -> list[int]:
        scores[:, self._ends] = -np.inf
        return [int(token) for token in scores.argmax(axis=1)]


def matching(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(left, right, strict=True)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(left))


def fill(cache: ProgressiveCache, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
    """Write a whole cache, [layers, tokens, heads, size]."""
    for layer in range(len(keys)):
        cache.view(layer, "key")[...] = keys[layer]
        cache.view(layer, "value")[...] = values[layer]


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def prompt_tokens(tokenizer: Any, kind: Kind, number: int, tokens: int, text: str | None = None) -> list[int]:
    """Prompt `number`: `tokens` + 1 tokens, or STEPS more if real text follows."""
    if kind == "chat":
        return chat_prompt(tokenizer, number, tokens + 1)
    return prose(tokenizer, number, tokens + 1 + (STEPS if kind == "prose" else 0), text if kind == "prose" else None)


def capture(model: Any, prompt: Sequence[int], tokens: int, kind: Kind, steps: int = STEPS) -> Capture:
    """Prefill a prompt, decode `steps` tokens that follow, and record how they read the cache."""
    prefilled = prefill(model, prompt[:tokens], score_queries=SCORE_QUERIES)
    assert prefilled.scores is not None
    keys, values = (
        np.stack([bfloat16_bits(array) for array in arrays]) for arrays in (prefilled.keys, prefilled.values)
    )
    greedy = Greedy(model, tokens)
    fill(greedy.cache, widen(keys), widen(values))
    last = prompt[tokens]
    following = list(prompt[tokens + 1 :]) if kind == "prose" else greedy.decode(last, steps)
    with recorded_queries(model, steps) as queries:
        greedy.forced(last, following)
    behind = slice(tokens, tokens + steps)
    new_keys, new_values = (
        np.stack([getattr(layer, name)[0, :, behind].numpy() for layer in greedy.cache.layers])
        for name in ("all_keys", "all_values")
    )
    read = np.stack([query.numpy() for query in queries])
    return Capture(keys, values, last, np.array(following), read, new_keys, new_values, prefilled.scores)


def captures(
    loaded: Any, name: str, kind: Kind, tokens: int, numbers: Sequence[int], folder: Path, text: str | None = None
) -> Iterator[tuple[int, Capture]]:
    """The captures with these numbers, read from `folder` or made and kept there; those of a `text` are not kept."""
    folder = folder / f"{name}-{kind}-{tokens}-{prompt_set()}"
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        file = folder / f"{number:03d}.npz"
        if (kind == "prose" and text is not None) or not file.exists():
            made = capture(loaded.model, prompt_tokens(loaded.tokenizer, kind, number, tokens, text), tokens, kind)
            if kind == "prose" and text is not None:
                yield number, made
                continue
            _save(made, file)
        with np.load(file) as held:
            fields = {field: held[field] for field in Capture.__slots__}
        yield number, Capture(**{**fields, "last": int(fields["last"])})


def _save(made: Capture, file: Path) -> None:
    """Write a capture so that the file is whole or absent."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as opened:
            fields: dict[str, Any] = {field: np.asarray(getattr(made, field)) for field in Capture.__slots__}
            np.savez(opened, **fields)
        Path(name).rename(file)
    finally:
        Path(name).unlink(missing_ok=True)


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).view(torch.uint16).numpy()
