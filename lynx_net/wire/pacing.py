"""Rates: parsing them, and a token bucket that takes time as an argument."""

from __future__ import annotations

import math
import re

from lynx_net.errors import LocalProtocolError

__all__ = ["TokenBucket", "parse_rate"]

_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<prefix>[kMGT]?)(?P<unit>bit(?:/s|ps)?|bps|B/s|Bps)")
_PREFIX = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

MAX_RATE_BPS = 1e18
BURST_SECONDS = 0.01
"""Time the bucket can save up, so that a timer which fires late does not lower the rate."""

_ROUNDING_BYTES = 1.0
"""A debt below this comes from the rounding of times; it is still paid, but nobody waits for it."""


def parse_rate(text: str | float | None) -> float | None:
    """A rate in bits per second from "10Gbit", "100Mbit/s", "1.25GB/s" or a number; None is no limit.

    Prefixes are decimal; "bit" counts bits and "B" bytes.
    """
    if text is None:
        return None
    if isinstance(text, int | float) and not isinstance(text, bool):
        rate = float(text) if abs(text) < MAX_RATE_BPS else math.inf
    else:
        match = _RATE.fullmatch(str(text).strip())
        if match is None:
            raise LocalProtocolError(f"cannot read the rate {text!r}; write for example 100Mbit, 10Gbit/s or 1.25GB/s")
        rate = float(match["number"]) * _PREFIX[match["prefix"]] * (8 if match["unit"].startswith("B") else 1)
    _check_rate(rate)
    return rate


def _check_rate(rate_bps: float) -> None:
    if not 0 < rate_bps < MAX_RATE_BPS:
        raise LocalProtocolError(f"a rate must be positive and finite, not {rate_bps:g} bit/s")


class TokenBucket:
    """Paces sends to a rate: a send may start while the balance is not negative, and then pays in full.

    The long-run rate is exact because debts are paid whatever the size of a send; at most
    `burst_bytes` are saved while nothing is sent. `now` is in seconds on any steady clock.
    """

    def __init__(self, rate_bps: float, now: float, burst_bytes: float | None = None) -> None:
        _check_rate(rate_bps)
        self._rate_bps = rate_bps
        self._burst_bytes = burst_bytes
        self._balance_bytes = 0.0
        self._updated_s = now

    @property
    def rate_bps(self) -> float:
        """Bits per second."""
        return self._rate_bps

    def set_rate(self, rate_bps: float, now: float) -> None:
        """Change the rate from `now` on; what is owed stays owed."""
        _check_rate(rate_bps)
        self._refill(now)
        self._rate_bps = rate_bps

    def ready_at(self, now: float) -> float:
        """When the next send may start; not later than `now` if it may start at once."""
        self._refill(now)
        return now if self._balance_bytes > -_ROUNDING_BYTES else now - self._balance_bytes * 8 / self._rate_bps

    def spend(self, count_bytes: int, now: float) -> None:
        """Account for bytes that were sent."""
        self._refill(now)
        self._balance_bytes -= count_bytes

    def _refill(self, now: float) -> None:
        elapsed = max(now - self._updated_s, 0.0)
        self._updated_s = max(now, self._updated_s)
        burst = self._rate_bps / 8 * BURST_SECONDS if self._burst_bytes is None else self._burst_bytes
        self._balance_bytes = min(self._balance_bytes + elapsed * self._rate_bps / 8, burst)
