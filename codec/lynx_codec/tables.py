"""The constants of the lynx quantiser: thresholds, values, anchor centroids, and the packed search table.

Logarithms differ between C libraries and between CPU and GPU, so nothing here is computed with them at
run time. Every table follows from alpha by decimal arithmetic of 50 digits and one final rounding, which
gives the same bits on every platform (Lynx, Algorithm 1, lines 10 to 18, with the integer range 0..120).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Decimal, localcontext
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from lynx_codec.errors import CodecError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CELL_BITS", "CELL_SHIFT", "LEVELS", "UNIT", "UNIT_BITS", "LynxTables", "lynx_tables"]

LEVELS = 120
"""Largest integer magnitude I. Not 127: (127 + 7) >> 4 would not fit the 4-bit anchor."""

UNIT_BITS = 24
UNIT = 1 << UNIT_BITS
"""A normalised magnitude of 1 as a fixed-point integer."""

CELL_BITS = 10
CELL_SHIFT = UNIT_BITS - CELL_BITS
"""The search table has 2**10 cells; a compiled kernel wants the shift as a constant."""

PEAK_SHARE = Decimal(1) / Decimal(32)
EVEN_SHARE = Decimal(1) / Decimal(4)
DENSITY_POWER = 3
"""Assumed distribution of normalised magnitudes u, fitted on keys and values of a real model (docs/codec.md):
one value of 32 is the largest of its chunk and sits at u = 1, a quarter is spread evenly over 0..1, the rest has the
density (1 - u**2)**3.
"""


@dataclass(frozen=True, slots=True)
class LynxTables:
    """Everything that follows from alpha. The arrays are read-only and shared.

    Attributes:
        alpha: skew of the logarithmic map, a float32 number.
        thresholds: int32 [120]; I is the count of thresholds that are <= floor(2**24 * u).
        values: float32 [121]; magnitude of each I.
        centroids: float16 [16]; default anchor value of each anchor nibble, signed.
        full: float32 [256]; signed value of (anchor nibble << 4 | residual nibble), all 256 defined.
        cells: int32 [1025]; (cells[q >> CELL_SHIFT] + (q & mask)) >> CELL_SHIFT is I for q = floor(2**24 * u).
    """

    alpha: float
    thresholds: NDArray[np.int32]
    values: NDArray[np.float32]
    centroids: NDArray[np.float16]
    full: NDArray[np.float32]
    cells: NDArray[np.int32]


@lru_cache(maxsize=16)
def lynx_tables(alpha: float) -> LynxTables:
    """Tables for `alpha`, which is rounded to float32 first.

    Raises:
        CodecError: alpha is not a positive number, or so large that two thresholds fall into one cell.
    """
    if not math.isfinite(alpha) or not 2.0**-10 <= alpha <= 1024.0:
        raise CodecError(f"alpha must be between 2**-10 and 1024, not {alpha}")
    alpha = float(np.float32(alpha))
    with localcontext() as context:
        context.prec = 50
        magnitudes = [_expand(alpha, Decimal(i)) for i in range(LEVELS + 1)]
        edges = [_expand(alpha, Decimal(i) - Decimal("0.5")) for i in range(1, LEVELS + 1)]
        thresholds = [int((edge * UNIT).to_integral_value(ROUND_CEILING)) for edge in edges]
        centroids = _centroids(edges)
        values = np.array([_to_float32(m) for m in magnitudes], dtype=np.float32)
    tables = LynxTables(
        alpha=alpha,
        thresholds=np.array(thresholds, dtype=np.int32),
        values=values,
        centroids=centroids,
        full=_full_table(values),
        cells=_cells(alpha, thresholds),
    )
    for array in (tables.thresholds, tables.values, tables.centroids, tables.full, tables.cells):
        array.flags.writeable = False
    return tables


def _expand(alpha: float, level: Decimal) -> Decimal:
    """Inverse of the logarithmic map: magnitude in 0..1 of a level in 0..120."""
    a = Decimal(alpha)
    return ((1 + a) ** (level / LEVELS) - 1) / a


def _to_float32(value: Decimal) -> np.float32:
    """Nearest float32 of a decimal in 0..1, rounded once (float(value) alone would round twice)."""
    if value == 0:
        return np.float32(0.0)
    exponent = math.frexp(float(value))[1]
    scaled = (value * Decimal(2) ** (24 - exponent)).to_integral_value(ROUND_HALF_EVEN)
    return np.float32(math.ldexp(int(scaled), exponent - 24))


def _integral(power: int, u: Decimal, moment: int) -> Decimal:
    """Antiderivative at u of u**moment * (1 - u**2)**power."""
    total = Decimal(0)
    for j in range(power + 1):
        exponent = 2 * j + moment + 1
        total += Decimal((-1) ** j * math.comb(power, j)) * u**exponent / exponent
    return total


def _centroids(edges: list[Decimal]) -> NDArray[np.float16]:
    """Mean magnitude inside each of the eight anchor bins under the assumed density, then mirrored.

    Bin V holds the levels with (I + 7) >> 4 == V, i.e. it starts at the edge below I = 16 V - 7.
    """
    bounds = [Decimal(0), *(edges[16 * v - 8] for v in range(1, 8)), Decimal(1)]
    bell = (1 - PEAK_SHARE - EVEN_SHARE) / _integral(DENSITY_POWER, Decimal(1), 0)
    table = np.empty(16, dtype=np.float16)
    for v in range(8):
        low, high = bounds[v], bounds[v + 1]
        mass = bell * (_integral(DENSITY_POWER, high, 0) - _integral(DENSITY_POWER, low, 0))
        first = bell * (_integral(DENSITY_POWER, high, 1) - _integral(DENSITY_POWER, low, 1))
        mass += EVEN_SHARE * (high - low)
        first += EVEN_SHARE * (high**2 - low**2) / 2
        if v == 7:
            mass += PEAK_SHARE
            first += PEAK_SHARE
        centre = np.float16(float(first / mass))
        table[v] = centre
        table[15 - v] = -centre
    return table


def _full_table(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Signed value of every pair of nibbles; pairs that no encoder writes are clamped to 0..120."""
    table = np.empty(256, dtype=np.float32)
    for anchor in range(16):
        negative = anchor >= 8
        magnitude = 15 - anchor if negative else anchor
        for residual in range(16):
            signed = residual - 16 if residual >= 8 else residual
            level = min(max(16 * magnitude - signed, 0), LEVELS)
            table[anchor << 4 | residual] = -values[level] if negative else values[level]
    return table


def _cells(alpha: float, thresholds: list[int]) -> NDArray[np.int32]:
    """The search table: equal cells that hold one threshold at most.

    An entry is (levels below the cell) << shift, plus what carries into the next level once the offset inside
    the cell reaches the threshold. The last entry is for a magnitude of exactly 1.
    """
    homes = [t >> CELL_SHIFT for t in thresholds]
    if len(set(homes)) != len(homes):
        raise CodecError(f"alpha {alpha} is too large: two thresholds fall into one of {1 << CELL_BITS} cells")
    cells = np.empty((1 << CELL_BITS) + 1, dtype=np.int32)
    below = 0
    for cell in range(1 << CELL_BITS):
        cells[cell] = below << CELL_SHIFT
        if below < LEVELS and homes[below] == cell:
            cells[cell] += (1 << CELL_SHIFT) - (thresholds[below] & ((1 << CELL_SHIFT) - 1))
            below += 1
    cells[-1] = LEVELS << CELL_SHIFT
    return cells
