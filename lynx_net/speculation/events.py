"""What the decode loop reports. Replaying the events in order gives the text at every moment:

    Draft      append the token to the tentative tail
    Retract    drop the last `count` tokens of the tentative tail
    Commit     append `tokens` to the final text; the tentative tail, which now equals the first
               `accepted` of them, is emptied
    Done       the end; no event follows

A loop that fails retracts its drafts before it raises, and emits no Done.
All times are `time.monotonic()` seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Commit", "Done", "Draft", "Event", "Retract"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A token decoded from anchors. It may be withdrawn."""

    token: int
    """The token id."""

    at_s: float
    """When it was computed."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that are final: from Q_full, or the exact first token that came with the offer."""

    tokens: tuple[int, ...]
    """New final tokens, in order; the last one may be a stop token."""

    accepted: int
    """How many of them, from the first, were drafts that proved right."""

    at_s: float
    """When they became final."""


@dataclass(frozen=True, slots=True)
class Retract:
    """The newest drafts are void: verification disagreed, or the transfer failed."""

    count: int
    """How many."""

    at_s: float
    """When that was known."""


@dataclass(frozen=True, slots=True)
class Done:
    """Decoding is complete."""

    tokens: tuple[int, ...]
    """All final tokens; the last is a stop token, or the limit was reached."""

    drafted: int
    """Drafts made."""

    accepted: int
    """Drafts that proved right."""

    verified_at_s: float | None
    """When the verifying pass ended; None if there were no drafts."""

    token_times_s: tuple[float, ...]
    """For every final token the time at which it was there: for an accepted draft when it was drafted
    (it was on the screen, and right), for others when they were committed."""

    at_s: float
    """When the loop ended."""


Event = Draft | Commit | Retract | Done
