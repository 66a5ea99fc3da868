"""`python -m perf.cold` moves what it says, from every kind of memory to every other."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from lynx_gpu import device_count

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ("--gib", "0.02", "--cold-gib", "0.01", "--rounds", "1", "--lanes", "2")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perf.cold", *arguments], capture_output=True, text=True, timeout=100, check=False
    )


def test_all_four_are_measured(tmp_path: Path) -> None:
    done = run(*SMALL, "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    names = ["warm to warm", "warm to cold", "cold to warm", "cold to cold"]
    assert [*figures["gbps"]] == names
    assert all(len(speeds) == 1 and speeds[0] > 0 for speeds in figures["gbps"].values())
    assert figures["machine"]["cores"] >= 1
    assert all(name in done.stdout for name in names)


@pytest.mark.parametrize("wrong", [("--lanes", "0"), ("--gib", "0.001"), ("--cold-gib", "0")])
def test_less_than_a_piece_a_lane_is_refused(wrong: tuple[str, ...]) -> None:
    done = run(*SMALL, *wrong)
    assert done.returncode == 2
    assert "a lane needs at least a MiB" in done.stderr


def test_pinned_memory_needs_a_device() -> None:
    done = run(*SMALL, "--pinned")
    if device_count():
        assert done.returncode == 0, done.stderr
        assert "cold memory pinned" in done.stdout
    else:
        assert done.returncode == 1
        assert "no CUDA device" in done.stderr
