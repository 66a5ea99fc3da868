"""Anchors of eight senders come before the residuals of any, on a real bottleneck."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lynx_net.errors import LynxError
from perf.incast import MIB, Incast

ROOT = Path(__file__).resolve().parents[2]


def test_anchors_of_all_senders_come_first(namespaces: Any, tmp_path: Path) -> None:
    """On a line that is slow enough for a busy machine; the figures of a fast one are in the README."""
    argv = [sys.executable, "-m", "perf.incast", "--rate", "200Mbit", "--anchor-mib", "2", "--residual-mib", "2"]
    file = tmp_path / "incast.json"
    with subprocess.Popen([*argv, "--rounds", "1", "--json", str(file)], cwd=ROOT, stderr=subprocess.PIPE) as process:
        _, messages = process.communicate(timeout=90)
    assert process.returncode == 0, messages.decode()
    figures = json.loads(file.read_text())
    assert figures["senders"] == 8
    assert 1.0 < figures["anchor_ratio"] <= 1.3
    assert figures["residual_early_share"] <= 0.05
    assert figures["total_ratio"] <= 1.3
    assert namespaces(process.pid) == set()


@pytest.mark.parametrize("wrong", [{"senders": 0}, {"anchor_bytes": MIB + 1}, {"residual_bytes": 7 * MIB + 1}], ids=str)
def test_sizes_that_cannot_be_cut_into_pages(wrong: dict[str, int]) -> None:
    with pytest.raises(LynxError):
        Incast(**wrong)
