"""The symbol distributions that `cachegen` chooses from, one for each channel of a page.

Two families, symmetric around 0: two-sided geometric, P(k) ~ r**|k|, and discrete normal, P(k) ~ r**(k*k), with
r = w / (1 + w) and w in steps of sqrt(2). All in integer arithmetic, so that every machine has the same tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from lynx_codec.baselines.rans import ALPHABET, TOTAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ESCAPE", "PEAK", "TABLES", "SymbolTables", "symbol_tables"]

PEAK = 127
"""Symbols are k + PEAK for k = -PEAK .. PEAK."""

ESCAPE = ALPHABET - 1
"""The symbol that stands for all other k, and for those which a table gives no room."""

GEOMETRIC = range(-20, 15)
NORMAL = range(-20, 29)
"""w = 2**(j / 2) for j in these ranges."""

TABLES = len(GEOMETRIC) + len(NORMAL)

_FRACTION = 64
_FAR = 512
"""Where the tail of a distribution is cut off."""


@dataclass(frozen=True, slots=True)
class SymbolTables:
    """Read-only arrays that all codecs share.

    Attributes:
        frequencies, starts: int32 [TABLES * ALPHABET]; room of each symbol in a range of TOTAL, and where it begins.
        slots: uint8 [TABLES * TOTAL]; the symbol of each position of the range.
        cost: float64 [ALPHABET, TABLES]; bits of a symbol, infinite where it has no room.
    """

    frequencies: NDArray[np.int32]
    starts: NDArray[np.int32]
    slots: NDArray[np.uint8]
    cost: NDArray[np.float64]


@lru_cache(maxsize=1)
def symbol_tables() -> SymbolTables:
    """The tables, made at first use."""
    rows = [_frequencies(j, normal=False) for j in GEOMETRIC] + [_frequencies(j, normal=True) for j in NORMAL]
    frequencies = np.array(rows, np.int32)
    starts = np.cumsum(frequencies, axis=1, dtype=np.int32) - frequencies
    slots = np.stack([np.repeat(np.arange(ALPHABET, dtype=np.uint8), row) for row in frequencies])
    with np.errstate(divide="ignore"):
        cost = -np.log2(frequencies.T / TOTAL)
    for array in (frequencies, starts, slots, cost):
        array.flags.writeable = False
    return SymbolTables(frequencies.reshape(-1), starts.reshape(-1), slots.reshape(-1), cost)


def _frequencies(j: int, *, normal: bool) -> list[int]:
    """Frequencies of one table, TOTAL in sum; the escape has 1 at least."""
    one = 1 << _FRACTION
    w = math.isqrt(1 << (j + 64))  # 2**(j / 2) * 2**32
    ratio = (w << _FRACTION) // (w + (1 << 32))
    weights, term, step = [one], one, ratio
    for _ in range(_FAR):
        term = term * step >> _FRACTION
        weights.append(term)
        if normal:
            step = (step * ratio >> _FRACTION) * ratio >> _FRACTION
    inside = weights[PEAK:0:-1] + weights[: PEAK + 1]
    everything = weights[0] + 2 * sum(weights[1:])
    escape = max(1, (everything - sum(inside)) * TOTAL // everything)
    room, whole = TOTAL - escape, sum(inside)
    shares = [weight * room // whole for weight in inside]
    # What the floors have left goes to the largest remainders, the middle first.
    order = sorted(range(len(inside)), key=lambda i: (-(inside[i] * room % whole), abs(i - PEAK), i))
    for i in order[: room - sum(shares)]:
        shares[i] += 1
    return [*shares, escape]
