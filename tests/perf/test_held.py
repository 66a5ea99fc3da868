"""`python -m perf.held` measures both streams of every transfer, for every receiver."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perf.held", "--mib", "3", "--transfers", "2", "--rounds", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_both_streams_of_every_transfer_are_measured(tmp_path: Path) -> None:
    done = run("--kept-mib", "1", "8", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    assert {kind: one["kept_bytes"] for kind, one in found["figures"].items()} == {
        "1 MiB kept": 1 << 20,
        "8 MiB kept": 8 << 20,
    }
    for of_kind in found["runs"].values():
        assert [len(speeds) for speeds in of_kind] == [2]
        assert all(speed > 0 for speeds in of_kind for one in speeds for speed in one)


@pytest.mark.parametrize("wrong", [("--transfers", "1"), ("--mib", "0"), ("--kept-mib", "0")])
def test_too_little_is_refused(wrong: tuple[str, ...]) -> None:
    assert run(*wrong).returncode == 2
