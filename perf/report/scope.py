"""How much a run measures, and how it tells of its progress."""

from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import dataclass

__all__ = ["FULL", "QUICK", "Progress", "Scope"]

PAPER_RESIDUAL_TOKENS = 21.43
"""Drafts that the paper makes on average while the residual is on its way: its ratio of transfer to compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Numbers of samples and the settings that are measured.

    Attributes:
        answers: samples of needle and question answering for each model and length, five of each to a text.
        answer_tokens: lengths of their caches.
        texts: samples of summaries (which also count drafts and errors) and of perplexity for each model.
        text_tokens: length of their caches.
        curves: caches whose values figure 5 looks at.
        rounds: transfers of each codec at the paper's ratio, each with another prompt, of the model that figure 11
            scales.
        other_rounds: the same of other models.
        sweep_rounds: the same for the other lengths and rates of figure 11; see `rounds_at`.
        sweep_tokens: lengths of figure 11 beside the reference.
        sweep_rates: rates of figure 11 beside the reference, as multiples of its rate.
        time_tokens: length of the reference.
        device_rounds: transfers of each codec at each rate of the model that runs on a device.
        concurrent_rounds: of the concurrent requests.
        peer_caches: caches that the codecs of others are measured on.
        peer_rounds: of the transports of others.
    """

    quick: bool
    answers: int
    answer_tokens: tuple[int, ...]
    texts: int
    text_tokens: int
    curves: int
    rounds: int
    other_rounds: int
    sweep_rounds: int
    sweep_tokens: tuple[int, ...]
    sweep_rates: tuple[float, ...]
    time_tokens: int
    device_rounds: int
    concurrent_rounds: int
    peer_caches: int
    peer_rounds: int

    def rounds_at(self, rate_factor: float) -> int:
        """Transfers of each codec at this multiple of the reference's rate: the shorter, the more they vary."""
        return self.sweep_rounds if self.quick else round(self.sweep_rounds * max(rate_factor, 1.0))

    def with_rounds(self, rounds: int) -> Scope:
        """The same with so many transfers of each codec at the paper's ratio and on a device.

        Other lengths and rates have no fewer than they had, if `rounds` is not less, since the simulator is compared
        with all of them alike; concurrent requests a fifth, and at least three.
        """
        return dataclasses.replace(
            self,
            rounds=rounds,
            other_rounds=rounds,
            device_rounds=rounds,
            sweep_rounds=min(rounds, self.sweep_rounds),
            concurrent_rounds=min(rounds, max(3, rounds // 5)),
        )


FULL = Scope(
    quick=False,
    answers=100,
    answer_tokens=(512, 1024, 2048),
    texts=100,
    text_tokens=1024,
    curves=8,
    rounds=100,
    other_rounds=100,
    sweep_rounds=10,
    sweep_tokens=(512, 1024, 4096),
    sweep_rates=(0.5, 2.0, 4.0),
    time_tokens=2048,
    device_rounds=5,
    concurrent_rounds=20,
    peer_caches=8,
    peer_rounds=3,
)

QUICK = Scope(
    quick=True,
    answers=5,
    answer_tokens=(512, 1024),
    texts=1,
    text_tokens=512,
    curves=2,
    rounds=1,
    other_rounds=1,
    sweep_rounds=1,
    sweep_tokens=(512,),
    sweep_rates=(4.0,),
    time_tokens=2048,
    device_rounds=3,
    concurrent_rounds=1,
    peer_caches=1,
    peer_rounds=1,
)


class Progress:
    """Lines on standard error, with the time since the run began."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def took_s(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._began_s

    def tell(self, line: str) -> None:
        """One line."""
        minutes, seconds = divmod(int(self.took_s), 60)
        print(f"[{minutes:3}:{seconds:02}] {line}", file=sys.stderr, flush=True)
