"""Toy models and transfers whose every step a test controls."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_net.aio.readiness import Readiness
from lynx_net.speculation import Commit, Done, Draft, Retract

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lynx_net.speculation import Event


class HashModel:
    """Scores are a hash of everything in the cache, so that any wrong or coarse position changes them.

    A position remembers whether the prompt was Q_full when it was computed. As long as anything is
    coarse, noise is mixed into the scores; on Q_full they depend on the tokens alone.
    """

    def __init__(self, seed: int, *, vocab: int = 7, noise: float = 1.0, prompt: int = 3, full: bool = False) -> None:
        self.seed, self.vocab, self.noise, self.prompt, self.full = seed, vocab, noise, prompt, full
        self.entries: list[tuple[int, bool]] = [(-1, True)] * prompt
        self.running = False
        self.calls: list[int] = []
        self.after_call: Callable[[int], None] = lambda _count: None

    @property
    def length(self) -> int:
        return len(self.entries)

    def truncate(self, length: int) -> None:
        assert not self.running, "truncated in mid-forward"
        assert length <= len(self.entries)
        del self.entries[length:]

    def forward(self, tokens: Sequence[int]) -> np.ndarray:
        assert tokens
        assert not self.running, "two forwards at once"
        self.running = True
        rows = []
        try:
            for token in tokens:
                self.entries.append((int(token), self.full))
                rows.append(self._row())
            self.calls.append(len(tokens))
            self.after_call(len(self.calls))
        finally:
            self.running = False
        return np.stack(rows)

    def _row(self) -> np.ndarray:
        tokens = [token for token, _ in self.entries]
        row = self._noise_of("clean", tokens)
        if not all(full for _, full in self.entries) or not self.full:
            row = row + self.noise * self._noise_of("coarse", self.entries)
        return row.astype(np.float32)

    def _noise_of(self, *key: object) -> np.ndarray:
        digest = hashlib.blake2b(repr((self.seed, key)).encode(), digest_size=8).digest()
        return np.random.default_rng(int.from_bytes(digest, "little")).normal(size=self.vocab)


class BigramModel:
    """Scores depend on the last token only: one table on anchors, one on Q_full."""

    def __init__(self, anchor: np.ndarray, full: np.ndarray) -> None:
        self.tables = (anchor.astype(np.float32), full.astype(np.float32))
        self.full = False
        self.length = 1

    def truncate(self, length: int) -> None:
        self.length = length

    def forward(self, tokens: Sequence[int]) -> np.ndarray:
        self.length += len(tokens)
        return self.tables[self.full][list(tokens)]


@dataclass
class Offer:
    first_token: int | None = None


@dataclass
class ScriptedTransfer:
    """A transfer whose readiness the test sets."""

    model: Any
    offer: Offer = field(default_factory=Offer)
    anchor_ready: Readiness = field(default_factory=Readiness)
    residual_ready: Readiness = field(default_factory=Readiness)
    exact_ready: Readiness = field(default_factory=Readiness)
    stream_names: tuple[str, ...] = ("anchor", "residual")

    def finish(self) -> None:
        """Everything is refined: the model reads Q_full from here on."""
        self.model.full = True
        self.anchor_ready.set(0.0)
        self.residual_ready.set(0.0)

    def finish_after(self, calls: int, fallback_s: float = 60.0) -> None:
        """Finish while forward number `calls` runs (0: now), or after a while if it never comes."""
        loop = asyncio.get_running_loop()
        if calls == 0:
            self.finish()
            return
        self.anchor_ready.set(0.0)

        def after_call(count: int) -> None:
            if count == calls:
                loop.call_soon_threadsafe(self.finish)

        self.model.after_call = after_call
        loop.call_later(fallback_s, self._finish_late)

    def _finish_late(self) -> None:
        if self.model.running:  # only ever between forwards, so that a test knows which drafts were coarse
            asyncio.get_running_loop().call_later(0.001, self._finish_late)
        else:
            self.finish()


def replay(events: Sequence[Event]) -> tuple[list[int], list[int]]:
    """Follow the documented meaning of the events; returns the final and the tentative tokens at the end."""
    final: list[int] = []
    tentative: list[int] = []
    drafted = accepted = 0
    clock = 0.0
    for position, event in enumerate(events):
        assert event.at_s >= clock
        clock = event.at_s
        match event:
            case Draft(token=token):
                tentative.append(token)
                drafted += 1
            case Retract(count=count):
                assert 1 <= count <= len(tentative)
                del tentative[-count:]
            case Commit(tokens=tokens, accepted=kept):
                assert tokens
                assert list(tokens[:kept]) == tentative
                final += tokens
                accepted += kept
                tentative = []
            case Done() as done:
                assert position == len(events) - 1
                assert list(done.tokens) == final
                assert (done.drafted, done.accepted) == (drafted, accepted)
                assert len(done.token_times_s) == len(final)
                assert list(done.token_times_s) == sorted(done.token_times_s)
                assert (done.verified_at_s is None) == (drafted == 0)
                assert not tentative
    return final, tentative
