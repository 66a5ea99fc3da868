"""The benchmark against other systems measures, and says what it could not measure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from perf.peers import transport as peers

if TYPE_CHECKING:
    from pathlib import Path


def test_what_runs_is_measured_and_what_does_not_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    sizes = [peers.MIB, 4 * peers.MIB]
    measured = peers.measure(["raw", "lynx", "lynx-open", "nixl"], sizes, rounds=1, repeats=1)
    found = peers.figures(measured["runs"], measured["failures"], sizes)
    assert found["nixl"] == {"failure": "not installed; run: python -m perf.peers --setup"}
    for name in ("raw", "lynx", "lynx-open"):
        assert set(found[name]) == {"1", "4"}
        assert all(one["gbytes_per_s"] > 0 and one["lynx_speed_ratio"] > 0 for one in found[name].values())
    assert found["lynx"]["4"]["lynx_speed_ratio"] == 1


def test_a_system_that_breaks_says_its_last_words() -> None:
    with pytest.raises(peers.Failure, match=r"the receiver does not start: .*(Memory|memory)"):
        peers.run_once("raw", [1 << 60], 1, {})
