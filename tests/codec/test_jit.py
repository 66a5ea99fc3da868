"""The cache of compiled kernels: what makes it stale, and life without it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

CALLER = """
from lynx_codec.jit import compiled
from callee import CONSTANT, step

@compiled
def total(x):
    return step(x) + CONSTANT

print(total(1), sum(total.stats.cache_hits.values()))
"""
CALLEE = """
from lynx_codec.jit import compiled

CONSTANT = {constant}

@compiled
def step(x):
    return x + {step}
"""


def run(folder: Path) -> str:
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    done = subprocess.run(
        # Without bytecode, which Python takes for fresh if a file changes within a second and keeps its length.
        [sys.executable, "-B", str(folder / "caller.py")],
        env={**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip()


def test_a_change_of_another_file_makes_the_cache_stale(tmp_path):
    """The caller's own file never changes, only what it calls and what it takes as a constant."""
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "callee.py").write_text(CALLEE.format(constant=100, step=1))
    assert run(tmp_path) == "102 0"
    assert run(tmp_path) == "102 1"
    (tmp_path / "callee.py").write_text(CALLEE.format(constant=100, step=20))
    assert run(tmp_path) == "121 0"
    (tmp_path / "callee.py").write_text(CALLEE.format(constant=700, step=20))
    assert run(tmp_path) == "721 0"


def test_kernels_work_where_nothing_can_be_cached():
    """A function without a file behind it has no cache folder, like one in a read-only package of a homeless user."""
    from lynx_codec.jit import compiled

    names: dict[str, object] = {}
    exec("def successor(x):\n    return x + 1", names)
    assert compiled(names["successor"])(41) == 42
