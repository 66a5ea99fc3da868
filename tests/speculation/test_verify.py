from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynx_net.speculation import Verdict, draw, probabilities, verify_greedy, verify_sampled


def one_hot(best, vocab=5):
    return np.eye(vocab, dtype=np.float32)[best]


@pytest.mark.parametrize(
    ("drafts", "best", "expected"),
    [
        ([1, 2, 3], [1, 2, 3, 4], Verdict(3, 4)),
        ([1, 2, 3], [1, 2, 3], Verdict(3, None)),  # no row for an extra token
        ([1, 2, 3], [1, 0, 3, 4], Verdict(1, 0)),
        ([1, 2, 3], [0, 2, 3, 4], Verdict(0, 0)),
        ([1, 2, 3], [1, 2, 0], Verdict(2, 0)),
    ],
)
def test_greedy(drafts, best, expected):
    assert verify_greedy(drafts, one_hot(best)) == expected


def test_probabilities_are_a_softmax_and_survive_large_scores():
    rows = probabilities(np.array([[0.0, 1.0, 2.0], [1e4, -1e4, 1e4]], np.float32), 0.5)
    expected = np.exp([0.0, 2.0, 4.0])
    np.testing.assert_allclose(rows[0], expected / expected.sum(), rtol=1e-6)
    np.testing.assert_allclose(rows[1], [0.5, 0.0, 0.5])
    assert rows.dtype == np.float32


def test_temperature_near_zero_is_greedy():
    rows = probabilities(np.array([0.0, 1.0, 0.999], np.float32), 1e-6)
    np.testing.assert_allclose(rows, [0.0, 1.0, 0.0])


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=20), st.integers(0, 2**32 - 1))
def test_draw_never_takes_a_weight_of_zero(weights, seed):
    array = np.array(weights, np.float32)
    if array.any():
        assert array[draw(array, np.random.default_rng(seed))] > 0


class FixedRandom:
    """A generator whose next numbers are given."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def random(self):
        return self.numbers.pop(0)


@pytest.mark.parametrize("number", [0.0, np.nextafter(1.0, 0.0)])
def test_draw_at_the_ends_of_the_interval(number):
    weights = np.array([0.0, 0.25, 0.0, 0.75, 0.0], np.float32)
    assert draw(weights, FixedRandom(number)) == (1 if number == 0.0 else 3)


def test_equal_distributions_accept_everything():
    rows = probabilities(np.random.default_rng(1).normal(size=(6, 8)).astype(np.float32), 1.0)
    rng = np.random.default_rng(2)
    for _ in range(200):
        drafts = [draw(row, rng) for row in rows[:5]]
        assert verify_sampled(drafts, list(rows[:5]), rows, rng).accepted == 5


def test_a_draft_the_target_excludes_is_always_refused():
    draft_row = np.array([0.5, 0.5, 0.0], np.float32)
    target = np.array([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]], np.float32)
    verdict = verify_sampled([0], [draft_row], target, FixedRandom(0.0, 0.0))
    assert verdict == Verdict(0, 2)  # p - q is positive for token 2 only


def test_the_threshold_is_p_over_q():
    draft_row = np.array([0.8, 0.2], np.float32)
    target = np.array([[0.4, 0.6], [0.0, 1.0]], np.float32)
    assert verify_sampled([0], [draft_row], target, FixedRandom(0.49, 0.0)) == Verdict(1, 1)
    assert verify_sampled([0], [draft_row], target, FixedRandom(0.51, 0.0)) == Verdict(0, 1)
