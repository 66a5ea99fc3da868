"""What the decode loop does next: a pure decision, I/O comes after it.

Rules, first match wins:

1. Enough tokens are final, or the last one is a stop token: FINISH.
2. What drafts are verified on is in: VERIFY the drafts; DECODE plainly if there are none.
3. No further draft can be of use (limit of drafts or of tokens reached, or the last draft is a stop
   token): WAIT for it.
4. DRAFT one token from the cache as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Action", "Limits", "is_finished", "next_action"]


class Action(Enum):
    """One step of the decode loop."""

    DRAFT = "draft"
    WAIT = "wait"
    VERIFY = "verify"
    DECODE = "decode"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a run of the decode loop."""

    max_new_tokens: int
    """Final tokens at most, at least 1."""

    max_drafts: int = 64
    """Drafts at most; 0 switches speculation off."""

    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end the text."""


def is_finished(limits: Limits, committed: Sequence[int]) -> bool:
    """Rule 1: nothing may follow the final tokens."""
    return len(committed) >= limits.max_new_tokens or (bool(committed) and committed[-1] in limits.stop_tokens)


def next_action(limits: Limits, committed: Sequence[int], drafts: Sequence[int], *, verify_ready: bool) -> Action:
    """The next step.

    Args:
        limits: of the run.
        committed: final tokens so far.
        drafts: drafts that wait for verification.
        verify_ready: the cache of the prompt is what drafts are verified on: Q_full, or exact.
    """
    if is_finished(limits, committed):
        return Action.FINISH
    if verify_ready:
        return Action.VERIFY if drafts else Action.DECODE
    if len(drafts) >= limits.max_drafts or len(committed) + len(drafts) >= limits.max_new_tokens:
        return Action.WAIT
    if drafts and drafts[-1] in limits.stop_tokens:
        return Action.WAIT
    return Action.DRAFT
