"""The soak of perf/soak.py, short: it passes here, and it notices what it is there to notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LEAKING = """
import perf.soak as soak
kept = []
async def leak(*arguments, real=soak._send):
    kept.append(open('/dev/null'))
    await real(*arguments)
soak._send = leak
raise SystemExit(soak.main())
"""


def _run(*command: str, transfers: int, aborts: int) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "codec", "gpu"))
    return subprocess.run(
        [sys.executable, *command, "--transfers", str(transfers), "--aborts", str(aborts)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_transfers_and_aborts_leave_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    done = _run("-m", "perf.soak", "--json", str(file), transfers=400, aborts=100)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(file.read_text())
    assert figures["rss_growth_mb"] <= 20
    assert (figures["fd_growth"], figures["threads_growth"]) == (0, 0)
    assert figures["tasks_growth"] <= 0
    assert figures["errors"] == []


def test_a_leak_is_noticed() -> None:
    done = _run("-c", LEAKING, transfers=60, aborts=20)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "file descriptors +64" in done.stdout
