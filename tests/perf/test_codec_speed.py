"""`python -m perf.codec` runs to its end, and its table and file have what was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lynx_codec import PageShape, codec_names, get_codec
from lynx_codec.baselines.common import BaselineCodec
from perf.codec import make_pages, measure, table

ROOT = Path(__file__).parents[2]


def test_command(tmp_path):
    """In a process of its own, since it binds itself to one processor."""
    path = tmp_path / "speed.json"
    page = ["--tokens", "40", "--heads", "1", "--head-size", "8", "--rounds", "1"]
    command = [sys.executable, "-m", "perf.codec", "--json", str(path), "--codecs", "int8", "cachegen", *page]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100)
    result = json.loads(path.read_text())
    assert list(result["codecs"]) == ["int8", "cachegen"]
    assert result["machine"]["processor"] in done.stdout
    assert "cachegen" in done.stdout


@pytest.mark.parametrize("name", codec_names())
def test_every_codec_has_a_row(name):
    shape = PageShape(40, 1, 8)
    codec = get_codec(name)
    row = measure(name, {}, make_pages(shape, "float32", 2), shape, rounds=1)
    assert min(row["encode_gbps"], row["decode_anchor_gbps"], row["refine_gbps"]) > 0
    assert row["bits_anchor"] <= row["bits_full"] <= 8 * sum(codec.stream_bytes(shape, wide=True)) / shape.values
    assert ("reference" in row) == (not isinstance(codec, BaselineCodec))
    assert ("x)" in table({name: row})) == ("reference" in row)
