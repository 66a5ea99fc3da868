"""Estimates and tests of the evaluation, against what is known of them."""

from __future__ import annotations

import importlib.util
import itertools

import numpy as np
import pytest

if importlib.util.find_spec("scipy") is None:
    pytest.skip("needs scipy (extra report)", allow_module_level=True)

from perf.report.stats import difference, estimate, holm, share


@pytest.mark.parametrize("statistic", ["mean", "median"])
def test_intervals_cover_the_truth_about_as_often_as_they_say(statistic: str) -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        one = estimate(rng.normal(3.0, 1.0, 60).tolist(), statistic)  # type: ignore[arg-type]
        assert one.low is not None
        assert one.high is not None
        assert one.low <= one.value <= one.high
        covered += one.low <= 3.0 <= one.high
    assert 0.86 <= covered / 100 <= 0.99


def test_the_same_samples_give_the_same_interval() -> None:
    samples = np.random.default_rng(1).exponential(size=40).tolist()
    assert estimate(samples) == estimate(samples)
    assert difference(samples, samples[::-1]) == difference(samples, samples[::-1])


def test_one_sample_has_no_interval_and_equal_ones_have_an_empty_one() -> None:
    assert (estimate([2.0]).low, estimate([2.0]).high) == (None, None)
    same = estimate([2.0] * 5, "median")
    assert (same.low, same.value, same.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_what_is_no_sample_is_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        estimate(samples)


def test_a_share_of_all_still_has_an_interval() -> None:
    one = share(100, 100)
    assert one.value == 1
    assert one.low == pytest.approx(0.963, abs=1e-3)  # Wilson: n / (n + z²)
    assert one.high == 1
    for bad in ((1, 0), (-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="no share"):
            share(*bad)


def test_p_values_are_those_of_all_sign_flips() -> None:
    left, right = [1.0, 4.0, 2.5, 3.0, 6.0, 0.5], [0.5, 2.0, 2.75, 1.0, 3.0, 0.25]
    pairs = np.subtract(left, right)
    flips = [abs(np.mean(pairs * signs)) for signs in itertools.product((1, -1), repeat=6)]
    by_hand = np.mean([flip >= abs(pairs.mean()) - 1e-12 for flip in flips])
    found = difference(left, right)
    assert found.p == pytest.approx(by_hand)
    assert found.value == pytest.approx(pairs.mean())


def test_a_clear_difference_is_found_and_noise_is_not() -> None:
    rng = np.random.default_rng(2)
    base = rng.normal(size=100)
    assert difference((base + 0.3 + rng.normal(0, 0.1, 100)).tolist(), base.tolist()).p < 0.001
    assert difference((base + rng.normal(0, 0.1, 100)).tolist(), base.tolist()).p > 0.01
    assert difference([1.0], [0.0]).p == 1, "one pair could as well be the other way round"
    assert difference([1.0, 0.0], [1.0, 0.0]).p == 1


def test_p_values_of_several_tests_are_raised_in_order() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}
