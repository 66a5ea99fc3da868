"""Which tokens of a cache are fine: whole in the first stream, because attention leans on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_net.errors import LocalProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lynx_net.wire.layout import CacheLayout

__all__ = ["FINE_LEAST", "FINE_SHARE", "RECENT_TOKENS", "fine_tokens"]

FINE_SHARE = 0.157
"""Share of the tokens of a cache that are fine by default."""

FINE_LEAST = 384
"""So many are fine in a cache for which the share would be fewer: short caches have as many sinks of attention."""

RECENT_TOKENS = 16
"""So many of the last tokens are fine whatever their scores."""


def fine_tokens(
    layout: CacheLayout,
    scores: NDArray[np.floating[Any]] | None = None,
    *,
    share: float = FINE_SHARE,
    least: int = FINE_LEAST,
) -> NDArray[np.int64]:
    """The fine tokens of a cache, in ascending order; raw tokens are never among them.

    Args:
        layout: of the cache.
        scores: [tokens] or [layers, tokens], the more attention a token gets the higher, such as
            `lynx_net.integrations.scores.attention_scores` measures; of several layers the mean counts. Without
            scores the last tokens are taken, which is worse: sinks of attention may be anywhere.
        share, least: as many tokens as this share of the cache, between 0 and 1, but not fewer than `least`.

    Raises:
        LocalProtocolError: a share out of range, or scores of another shape or that are not finite.
    """
    if not 0 <= share <= 1 or least < 0:
        raise LocalProtocolError(f"share of fine tokens must be between 0 and 1, not {share}; least 0 or more")
    first = min(layout.raw_head, layout.tokens)
    stop = max(layout.tokens - layout.raw_tail, first)
    count = min(max(round(share * layout.tokens), least), stop - first)
    if scores is None:
        return np.arange(stop - count, stop)
    if scores.ndim not in (1, 2) or scores.shape[-1] != layout.tokens or not np.isfinite(scores).all():
        raise LocalProtocolError(
            f"scores must be finite numbers of shape [{layout.tokens}] or [layers, {layout.tokens}], not {scores.shape}"
        )
    ranks = np.array(scores if scores.ndim == 1 else scores.mean(axis=0), dtype=np.float64)[first:stop]
    ranks[max(len(ranks) - RECENT_TOKENS, 0) :] = np.inf
    chosen: NDArray[np.int64] = np.sort(np.argsort(-ranks, kind="stable")[:count]) + first
    return chosen
