"""Networks can be built only as root on Linux with the tools; elsewhere these tests are skipped, with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # perf/ is not installed with the package


@pytest.fixture(scope="session")
def namespaces() -> Any:
    """Which network namespaces a process has made and not removed, by its id; skips the test where none can be made."""
    from perf.netem import NetemError, network

    try:
        with network(2, rate="1Gbit"):
            pass
    except NetemError as error:
        pytest.skip(f"no network can be built here: {error}")

    def names(process: int = os.getpid()) -> set[str]:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return {line.split()[0] for line in listed.splitlines() if line.startswith(f"lynx-{process}-")}

    return names
