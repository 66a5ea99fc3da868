"""Which drafts stand, and what follows them (Lynx section 4.3; Leviathan et al. 2023, algorithm 1).

Both functions are pure up to the random generator they are given. Row i of the target is the
model's opinion, on Q_full, of position i: row 0 judges the first draft, and the row behind the last
draft, if given, yields one token more when all drafts stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lynx_net.speculation.sampling import draw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Verdict", "verify_greedy", "verify_sampled"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a verification."""

    accepted: int
    """How many drafts stand, from the first."""

    next_token: int | None
    """The token behind them: the correction of the first wrong draft, or the extra token after all of
    them; None if all stand and no row for an extra token was given."""


def verify_greedy(drafts: Sequence[int], logits: NDArray[np.float32]) -> Verdict:
    """Accept drafts as long as they are the target's best token.

    Args:
        drafts: k draft tokens.
        logits: target scores [k or k + 1, vocab].
    """
    best = logits.argmax(axis=-1)
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    return Verdict(accepted, int(best[accepted]) if accepted < len(best) else None)


def verify_sampled(
    drafts: Sequence[int],
    draft_rows: Sequence[NDArray[np.float32]],
    target_rows: NDArray[np.float32],
    rng: np.random.Generator,
) -> Verdict:
    """Accept a draft x with probability min(1, p(x) / q(x)); replace the first refused one by a draw
    from the positive part of p - q. The tokens that result are distributed as draws from p.

    Args:
        drafts: k draft tokens, each drawn from its row of `draft_rows`.
        draft_rows: k rows q, [vocab] each.
        target_rows: rows p, [k or k + 1, vocab].
        rng: one number is used per judged draft, and one for the next token.
    """
    for index, (token, draft_row) in enumerate(zip(drafts, draft_rows, strict=True)):
        target = _normalised(target_rows[index])
        drafted = _normalised(draft_row)
        if rng.random() * drafted[token] < target[token]:
            continue
        excess = np.maximum(target - drafted, 0.0)
        # p = q up to rounding leaves no excess; then the draft would have stood, and p itself is right.
        return Verdict(index, draw(excess if excess.any() else target, rng))
    count = len(drafts)
    return Verdict(count, draw(target_rows[count], rng) if count < len(target_rows) else None)


def _normalised(row: NDArray[np.float32]) -> NDArray[np.float64]:
    """A float32 row as float64 probabilities."""
    wide = row.astype(np.float64)
    wide /= wide.sum()
    return wide
