"""From scores to tokens: temperature, softmax, seeded draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["draw", "probabilities"]


def probabilities(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
    """softmax(logits / temperature) along the last axis, temperature > 0.

    Computed in float64, returned as float32 (what a kept draft distribution costs is its size: 4 bytes
    times the vocabulary). Rows sum to 1 up to float32 rounding; whoever draws from a row normalises it.
    """
    scaled = logits.astype(np.float64)
    scaled -= scaled.max(axis=-1, keepdims=True)
    scaled /= temperature
    np.exp(scaled, out=scaled)
    scaled /= scaled.sum(axis=-1, keepdims=True)
    return scaled.astype(np.float32)


def draw(weights: NDArray[np.floating], rng: np.random.Generator) -> int:
    """Draw an index with probability proportional to `weights` (non-negative, not all zero).

    Uses one number of `rng`. An index of weight zero is never drawn.
    """
    ladder = np.cumsum(weights, dtype=np.float64)
    # side="right" steps over flat parts of the ladder, that is over weights of zero; the product can
    # round up to the top step itself, hence the clip to the last index with weight.
    chosen = int(np.searchsorted(ladder, rng.random() * ladder[-1], side="right"))
    return min(chosen, int(np.searchsorted(ladder, ladder[-1], side="left")))
