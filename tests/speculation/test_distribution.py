"""Sampled output has the distribution of plain sampling on Q_full; wrong verifiers are caught by the same test."""

from __future__ import annotations

import math

import numpy as np
import pytest
from speculation_toys import BigramModel, ScriptedTransfer

from lynx_net.speculation import Done, Draft, Verdict, decode, draw, loop, probabilities, verify_sampled

VOCAB = 8
LENGTH = 3
DRAWS = 20_000
FEW_DRAWS = 5_000
"""Enough to catch a wrong verifier, whom more draws would give away all the more."""
TEMPERATURE = 0.8
ONE_IN_A_THOUSAND = 3.09  # standard normal quantile


def tables():
    rng = np.random.default_rng(7)
    full = rng.normal(size=(VOCAB, VOCAB))
    return full + rng.normal(scale=0.7, size=(VOCAB, VOCAB)), full


def expected_joint() -> np.ndarray:
    """Probability of every sequence of LENGTH tokens behind token 0, by plain sampling on Q_full."""
    step = probabilities(tables()[1].astype(np.float32), TEMPERATURE).astype(np.float64)
    step /= step.sum(axis=1, keepdims=True)
    return np.einsum("a,ab,bc->abc", step[0], step, step)


def chi_square_fits(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Pearson's test at the level of one in a thousand; cells that expect fewer than 5 are one cell."""
    expected = expected * counts.sum()
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    hoped = np.append(expected[~rare], expected[rare].sum())
    statistic = ((seen - hoped) ** 2 / hoped).sum()
    freedom = len(hoped) - 1
    spread = 2 / (9 * freedom)  # Wilson and Hilferty's approximation of the quantile
    return bool(statistic < freedom * (1 - spread + ONE_IN_A_THOUSAND * math.sqrt(spread)) ** 3)


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch):
    """Forward passes of microseconds need no thread: four times as fast, and the rest of the loop is the real one."""

    async def at_once(_executor, function, *args):
        return function(*args)

    monkeypatch.setattr(loop, "run_or_withdraw", at_once)


async def joint_of_the_loop(drafts: int, draws: int = DRAWS) -> np.ndarray:
    """Counts over so many runs of the real loop, each with so many drafts before the residual is in."""
    counts = np.zeros((VOCAB,) * LENGTH, np.int64)
    anchor, full = tables()
    for seed in range(draws):
        model = BigramModel(anchor, full)
        transfer = ScriptedTransfer(model)
        transfer.anchor_ready.set(0.0)
        if drafts == 0:
            transfer.finish()
        made = 0
        run = decode(
            model,
            transfer,
            prompt_tail=[0],
            max_new_tokens=LENGTH,
            temperature=TEMPERATURE,
            seed=seed,
        )
        async for event in run:
            if isinstance(event, Draft):
                made += 1
                if made == drafts:
                    transfer.finish()
            if isinstance(event, Done):
                assert event.drafted == drafts
                counts[event.tokens] += 1
    return counts


def accept_always(drafts, draft_rows, target_rows, rng):
    row = target_rows[len(drafts)] if len(target_rows) > len(drafts) else None
    return Verdict(len(drafts), None if row is None else draw(row, rng))


def correct_from_target(drafts, draft_rows, target_rows, rng):
    verdict = verify_sampled(drafts, draft_rows, target_rows, rng)
    if verdict.accepted < len(drafts):
        return Verdict(verdict.accepted, draw(target_rows[verdict.accepted], rng))
    return verdict


@pytest.mark.parametrize("drafts", [2, 3])
async def test_output_is_distributed_as_plain_sampling(drafts):
    assert chi_square_fits(await joint_of_the_loop(drafts), expected_joint())


@pytest.mark.parametrize("wrong", [accept_always, correct_from_target])
async def test_the_test_catches_a_wrong_verifier(wrong, monkeypatch):
    monkeypatch.setattr(loop, "verify_sampled", wrong)
    assert not chi_square_fits(await joint_of_the_loop(2, FEW_DRAWS), expected_joint())


def test_drafts_alone_are_off_target():
    """The anchor table differs enough for the tests above to mean something."""
    rng = np.random.default_rng(3)
    step = probabilities(tables()[0].astype(np.float32), TEMPERATURE)
    counts = np.zeros((VOCAB,) * LENGTH, np.int64)
    for _ in range(DRAWS):
        a = draw(step[0], rng)
        b = draw(step[a], rng)
        counts[a, b, draw(step[b], rng)] += 1
    assert not chi_square_fits(counts, expected_joint())
