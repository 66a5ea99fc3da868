"""Every test that docs/faults.md names exists, and every row names one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFINED = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)


def test_every_row_names_tests_that_exist() -> None:
    defined = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in DEFINED.findall(file.read_text("utf-8"))
    }
    lines = (ROOT / "docs" / "faults.md").read_text("utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and "proven by" not in line]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.split("|")[2])
        assert named, row
        assert set(named) <= defined, set(named) - defined
