"""How far a coded cache is from the original, and how many drafts on its anchors survive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from perf.quality_capture import STEPS, Greedy, fill, matching, widen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from perf.quality_capture import Capture
    from perf.quality_codecs import Coded

    Pair = tuple[NDArray[np.float32], NDArray[np.float32]]

__all__ = ["Attention", "Drafts", "drafts", "errors"]


class Attention:
    """Attention of one captured cache, layer by layer, with the model's own queries.

    Only the cache is exchanged: the queries, and the keys and values of the tokens behind the cache, are those of
    the exact model, so an error of one layer does not reach the next.
    """

    def __init__(self, model: Any, captured: Capture) -> None:
        config = model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self._windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        self._scaling = model.get_decoder().layers[0].self_attn.scaling
        self._captured = captured
        self.keys, self.values = widen(captured.keys), widen(captured.values)
        self._exact = self._outputs(self.keys, self.values)

    def errors(self, cache: Pair) -> dict[str, float]:
        """Mean over layers and tokens of |o - ô|² / |o|², and with the paper's denominator |ô|²; o: all heads."""
        if cache[0] is self.keys:
            return {"attn_err": 0.0, "attn_err_paper": 0.0}
        found = self._outputs(*cache)
        off = ((found - self._exact) ** 2).sum((1, 3))
        return {
            "attn_err": float((off / (self._exact**2).sum((1, 3))).mean()),
            "attn_err_paper": float((off / (found**2).sum((1, 3))).mean()),
        }

    def _outputs(self, keys: NDArray[np.float32], values: NDArray[np.float32]) -> torch.Tensor:
        """[layers, query heads, STEPS, size]."""
        captured = self._captured
        tokens, heads = keys.shape[1:3]
        positions = torch.arange(tokens + STEPS)
        at = positions[tokens:, None]
        outputs = []
        for layer, window in enumerate(self._windows):
            first = 0 if window is None else max(tokens + 1 - window, 0)
            allowed = positions[first:] <= at
            if window is not None:
                allowed &= positions[first:] > at - window
            key, value = (
                torch.cat([torch.from_numpy(old[layer, first:]).transpose(0, 1), torch.from_numpy(new[layer])], 1)
                for old, new in ((keys, captured.new_keys), (values, captured.new_values))
            )
            query = torch.from_numpy(captured.queries[layer])
            group = query.shape[0] // heads
            folded = query.reshape(heads, group * STEPS, -1)
            mixed = torch.nn.functional.scaled_dot_product_attention(
                folded, key, value, attn_mask=allowed.repeat(group, 1), scale=self._scaling
            )
            outputs.append(mixed.reshape(heads * group, STEPS, -1))
        return torch.stack(outputs)


def errors(attention: Attention, coded: Coded) -> dict[str, float]:
    """All errors of one coded cache."""
    result: dict[str, float] = {}
    stages = [("anchor", coded.anchor)] if coded.single else [("anchor", coded.anchor), ("full", coded.full)]
    for stage, (keys, values) in stages:
        found = attention.errors((keys, values))
        result |= {f"{name}_{stage}": error for name, error in found.items()}
        result[f"k_err_{stage}"] = _relative(keys, attention.keys)
        result[f"v_err_{stage}"] = _relative(values, attention.values)
    if len(stages) == 1:
        result |= {name.replace("anchor", "full"): error for name, error in list(result.items())}
    return result


@dataclass(frozen=True, slots=True)
class Drafts:
    """What became of STEPS drafts that were decoded from the anchors of one cache."""

    accepted: int
    """Drafts before the first that Q_full does not confirm."""

    agreeing: float
    """Share of the STEPS positions where anchors and Q_full choose the same token after the same text."""

    like_exact: int
    """Tokens from the start that Q_full chooses as the exact cache does."""

    target: tuple[int, ...]
    """What the drafts are held against."""


def drafts(greedy: Greedy, captured: Capture, coded: Coded) -> Drafts:
    """Count the drafts that survive, in two forward passes instead of 2 * STEPS.

    Drafts are the same as the target up to the first that is not, and up to there a pass over the target's
    tokens on the anchors computes just what drafting computes. The target, greedy decoding on Q_full, is found
    in the same way from what the exact cache gives. A codec of one stream is its own Q_full, which would accept
    everything; its drafts are held against the exact cache instead.
    """
    exact = [int(token) for token in captured.following]
    if coded.single:
        target, like_exact = exact, STEPS
    else:
        fill(greedy.cache, *coded.full)
        target = greedy.target(captured.last, exact)
        like_exact = matching(target, exact)
    fill(greedy.cache, *coded.anchor)
    chosen = greedy.forced(captured.last, target)
    agreeing = float(np.mean([a == b for a, b in zip(chosen, target, strict=True)]))
    return Drafts(matching(chosen, target), agreeing, like_exact, tuple(target))


def summary(counted: Sequence[Drafts]) -> dict[str, float]:
    """Means over prompts; standard errors where a figure is judged."""
    accepted = np.array([one.accepted for one in counted])
    return {
        "mean_accepted": float(accepted.mean()),
        "mean_accepted_se": float(accepted.std(ddof=1) / len(accepted) ** 0.5) if len(accepted) > 1 else 0.0,
        "accept_rate_21": float(np.minimum(accepted, 21).mean() / 21),
        "token_agreement": float(np.mean([one.agreeing for one in counted])),
        "tokens_like_exact": float(np.mean([one.like_exact for one in counted])),
        "prompts": len(counted),
    }


def _relative(found: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    """Squared error as a share of the squared values."""
    return float(np.sum((found - exact) ** 2, dtype=np.float64) / np.sum(exact**2, dtype=np.float64))
