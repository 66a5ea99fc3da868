"""`python -m perf.gpu_codec` on a device."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from lynx_gpu import device_count

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.gpu
@pytest.mark.skipif(device_count() == 0, reason="no CUDA device")
def test_figures_of_a_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perf.gpu_codec", "--pages", "8", "--rounds", "2", "--codec", "default"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "figures.json")], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    works = json.loads((tmp_path / "figures.json").read_text())["codecs"]["default"]
    assert {*works} == {"encode", "decode anchor", "refine"}
    assert all(one["gb_per_s"] > 0 and one["moved_bytes"] > 0 for one in works.values())
