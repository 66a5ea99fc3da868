"""The pair of processes whose caches are on a device, without one: transfers are whole, and figures come out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_without_a_device_all_but_the_kernels_runs(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    words = "--null --tokens 256 --page-tokens 128 --rates 1Gbit --rounds 1 --unpaced 1 --codecs int4 lynx --json"
    command = [sys.executable, "-m", "perf.gpu_pair", *words.split(), str(out)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert told.returncode == 0, told.stderr
    found = json.loads(out.read_text())
    assert [one["codec"] for one in found["paced"]] == ["int4", "lynx"]
    assert all(0 < one["ttft_s"] <= one["transfer_s"] for one in found["paced"])
    assert {codec: len(speeds) for codec, speeds in found["unpaced_gbps"].items()} == {"int4": 1, "lynx": 1}
