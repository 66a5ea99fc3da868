"""The fuzz targets of fuzz/, run beside all other tests; in a file of its own, which no worker gets before the last."""

from __future__ import annotations

import pytest


@pytest.mark.timeout(400)
def test_a_minute_of_fuzzing_beside_the_other_tests(fuzz_minute: list[tuple[int, str]]) -> None:
    """Half a minute of CPU time on each target, begun before the first test and over, mostly, before this, the last."""
    for code, printed in fuzz_minute:
        assert code == 0, printed
