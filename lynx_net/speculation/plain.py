"""Decoding without a transfer: what the decode loop must be equal to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lynx_net.speculation.loop import checked_limits
from lynx_net.speculation.policy import is_finished
from lynx_net.speculation.sampling import draw, probabilities

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from lynx_net.speculation.protocols import DecodeModel

__all__ = ["decode_plain"]


def decode_plain(
    model: DecodeModel,
    prompt_tail: Sequence[int],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
) -> list[int]:
    """Decode token by token on the cache as it is; blocks. The reference for every other way.

    Args:
        model: its cache holds the prompt without `prompt_tail`.
        prompt_tail: the last token or tokens of the prompt, at least one.
        max_new_tokens, stop_tokens: where to end; a stop token is part of the result.
        temperature: 0 takes the best token, above 0 draws.
        seed: of the draws.

    Raises:
        LocalProtocolError: an argument is out of range.
    """
    limits = checked_limits(prompt_tail, max_new_tokens, temperature, stop_tokens, 0)
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    feed = list(prompt_tail)
    while not is_finished(limits, tokens):
        row = model.forward(feed)[-1]
        tokens.append(draw(probabilities(row, temperature), rng) if temperature > 0 else int(row.argmax()))
        feed = tokens[-1:]
    return tokens
