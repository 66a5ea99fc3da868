"""Estimates with confidence intervals, and tests of differences. Seeds are fixed: equal samples give equal figures."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["LEVEL", "Difference", "Estimate", "difference", "estimate", "holm", "share"]

LEVEL = 0.95
"""Of every confidence interval."""

_RESAMPLES = 2000
_PERMUTATIONS = 10_000
_SEED = 20260401

Statistic = Literal["mean", "median"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, median or share with its confidence interval.

    Attributes:
        value: of the samples.
        low, high: ends of the interval; None for one sample, which has none.
        samples: how many there are.
    """

    value: float
    low: float | None
    high: float | None
    samples: int

    @property
    def ends(self) -> tuple[float, float]:
        """Of the interval; the value itself twice where there is none."""
        return (self.value, self.value) if self.low is None or self.high is None else (self.low, self.high)


@dataclass(frozen=True, slots=True)
class Difference:
    """What changes from one codec to another on the same prompts.

    Attributes:
        value: mean of the differences, with its interval like `Estimate`.
        low, high: ends of the interval; None for one pair.
        p: how often chance alone would give a mean at least as far from 0 (sign-flip permutation test, two-sided).
        samples: pairs.
    """

    value: float
    low: float | None
    high: float | None
    p: float
    samples: int


def estimate(samples: Sequence[float], statistic: Statistic = "mean") -> Estimate:
    """Percentile bootstrap of the mean or median of at least one sample."""
    values = _checked(samples)
    of = np.mean if statistic == "mean" else np.median
    value = float(of(values))
    if len(values) == 1:
        return Estimate(value, None, None, 1)
    if np.ptp(values) == 0:
        return Estimate(value, value, value, len(values))
    rng = np.random.default_rng(_SEED)
    found = (
        _scipy_stats()
        .bootstrap((values,), of, confidence_level=LEVEL, n_resamples=_RESAMPLES, method="percentile", rng=rng)
        .confidence_interval
    )
    return Estimate(value, float(found.low), float(found.high), len(values))


def share(successes: int, samples: int) -> Estimate:
    """Share of successes with Wilson's interval, which is not empty where all or none succeed."""
    if not 0 <= successes <= samples or not samples:
        raise ValueError(f"{successes} successes of {samples} samples make no share")
    found = _scipy_stats().binomtest(successes, samples).proportion_ci(LEVEL, method="wilson")
    return Estimate(successes / samples, float(found.low), float(found.high), samples)


def difference(left: Sequence[float], right: Sequence[float]) -> Difference:
    """How much `left` is above `right`, pair by pair."""
    pairs = _checked(left) - _checked(right)
    found = estimate(pairs.tolist())
    if not pairs.any() or len(pairs) == 1:  # one pair could as well be the other way round
        return Difference(found.value, found.low, found.high, 1.0, len(pairs))
    p = (
        _scipy_stats()
        .permutation_test(
            (pairs,),
            np.mean,
            permutation_type="samples",
            vectorized=True,
            n_resamples=_PERMUTATIONS,
            rng=np.random.default_rng(_SEED),
        )
        .pvalue
    )
    return Difference(found.value, found.low, found.high, float(p), len(pairs))


def holm(ps: Mapping[str, float]) -> dict[str, float]:
    """P-values of several tests, raised so that all together err as rarely as one (Holm's method)."""
    adjusted: dict[str, float] = {}
    least = 0.0
    for rank, name in enumerate(sorted(ps, key=ps.__getitem__)):
        least = max(least, min(1.0, (len(ps) - rank) * ps[name]))
        adjusted[name] = least
    return adjusted


def _scipy_stats() -> Any:
    """Loaded when something is estimated: a machine that only measures need not have it."""
    return importlib.import_module("scipy.stats")


def _checked(samples: Sequence[float]) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"samples must be finite numbers, at least one: {samples!r:.100}")
    return values
