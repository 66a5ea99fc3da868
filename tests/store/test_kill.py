"""kill -9 in the middle of writes: `perf.store_kills` in small. `python -m perf.store --kills 100` is the long run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perf.store_kills import Outcome, kill_servers, kill_writers

if TYPE_CHECKING:
    from pathlib import Path


def check(outcome: Outcome, kills: int) -> None:
    assert outcome.during_write == kills
    assert outcome.stored > 0
    assert (outcome.lost, outcome.wrong, outcome.wrong_received) == ([], [], [])


def test_killed_writers_lose_nothing_and_leave_no_wrong_byte(tmp_path: Path) -> None:
    check(kill_writers(tmp_path, 4), 4)


async def test_killed_servers_lose_nothing_and_leave_no_wrong_byte(tmp_path: Path) -> None:
    check(await kill_servers(tmp_path, 4), 4)
