"""The quantiser's tables against the formulas they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynx_codec.tables import CELL_SHIFT, LEVELS, UNIT, lynx_tables

ALPHAS = (2.0**-10, 0.5, 1.0, 2.0, 15.0)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_values_follow_the_logarithmic_map(alpha):
    tables = lynx_tables(alpha)
    level = np.arange(LEVELS + 1)
    assert tables.values == pytest.approx(np.expm1(np.log1p(alpha) * level / 120) / alpha, abs=1e-6)
    assert tables.values[0] == 0
    assert tables.values[-1] == 1


@pytest.mark.parametrize("alpha", ALPHAS)
def test_thresholds_round_half_up(alpha):
    tables = lynx_tables(alpha)
    between = np.expm1(np.log1p(alpha) * (np.arange(1, LEVELS + 1) - 0.5) / 120) / alpha * UNIT
    assert (np.diff(tables.thresholds) > 0).all()
    assert (np.abs(tables.thresholds - between) <= 1.001).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_cells_find_every_level(alpha):
    """The one-look-up search equals a search through all thresholds, at and around each of them."""
    tables = lynx_tables(alpha)
    edges = tables.thresholds.astype(np.int64)
    grid = np.arange(0, UNIT, 1 << (CELL_SHIFT - 2))
    q = np.unique(np.clip(np.concatenate([edges - 1, edges, edges + 1, grid, [0, UNIT]]), 0, UNIT)).astype(np.int32)
    found = (tables.cells[q >> CELL_SHIFT] + (q & ((1 << CELL_SHIFT) - 1))) >> CELL_SHIFT
    assert (found == np.searchsorted(tables.thresholds, q, side="right")).all()


@given(st.integers(0, UNIT))
def test_level_is_the_nearest_in_the_logarithmic_domain(q):
    tables = lynx_tables(1.0)
    level = int(np.searchsorted(tables.thresholds, q, side="right"))
    exact = np.log2(1 + q / UNIT) * 120
    assert abs(level - exact) <= 0.5 + 1e-4


@pytest.mark.parametrize("alpha", ALPHAS)
def test_centroids(alpha):
    tables = lynx_tables(alpha)
    rising = tables.centroids[:8].astype(float)
    assert (np.diff(rising) > 0).all()
    assert (tables.centroids[8:] == -tables.centroids[:8][::-1]).all()
    edges = np.append(tables.thresholds[8::16], UNIT) / UNIT
    assert (rising < edges).all()
    assert (rising[1:] > edges[:-1]).all()


def test_full_table_covers_all_nibbles():
    tables = lynx_tables(1.0)
    assert np.isfinite(tables.full).all()
    assert np.abs(tables.full).max() == 1
    for level in range(LEVELS + 1):
        magnitude = (level + 7) >> 4
        residual = (16 * magnitude - level) & 15
        assert tables.full[magnitude << 4 | residual] == tables.values[level]
        assert tables.full[(~magnitude & 15) << 4 | residual] == -tables.values[level]


def test_tables_are_shared_and_locked():
    tables = lynx_tables(1.0)
    assert lynx_tables(1.0) is tables
    with pytest.raises(ValueError, match="read-only"):
        tables.values[0] = 1
