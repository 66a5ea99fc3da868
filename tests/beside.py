"""Programs that run at the lowest priority beside all tests, started once for all workers of a session."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BesideTests", "outcomes"]

ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.05


class BesideTests:
    """Python scripts of this repository, whose exit codes and output are left in a folder."""

    def __init__(self, folder: Path, commands: Sequence[tuple[str, ...]]) -> None:
        self._running: list[tuple[subprocess.Popen[str], Thread]] = []
        paths = os.pathsep.join(str(ROOT / part) for part in (".", "codec", "gpu"))
        for number, (script, *arguments) in enumerate(commands):
            process = subprocess.Popen(
                [sys.executable, str(ROOT / script), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {"PYTHONPATH": paths},
                preexec_fn=_lowest_priority,
            )
            thread = Thread(target=_keep, args=(process, folder / str(number)))
            thread.start()
            self._running.append((process, thread))

    def end(self) -> None:
        """Kill what still runs."""
        for process, thread in self._running:
            process.kill()
            thread.join()


def outcomes(folder: Path, count: int, limit_s: float) -> list[tuple[int, str]]:
    """Exit code and output of every program, in their order, once all have ended; in whichever worker."""
    until_s = time.monotonic() + limit_s
    files = [folder / str(number) for number in range(count)]
    while not all(file.exists() for file in files):
        assert time.monotonic() < until_s, f"not all programs of {folder} have ended within {limit_s:g} s"
        time.sleep(_POLL_S)
    found = [file.read_text().partition("\n") for file in files]
    return [(int(code), printed) for code, _, printed in found]


def _keep(process: subprocess.Popen[str], file: Path) -> None:
    """Write how it ended, in one step."""
    printed, _ = process.communicate()
    partial = file.with_suffix(".partial")
    partial.write_text(f"{process.returncode}\n{printed}")
    partial.rename(file)


def _lowest_priority() -> None:
    os.nice(19)
