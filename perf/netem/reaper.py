"""Takes the namespaces down when whoever built them is done with them, or is gone, in whatever way.

The reaper is a shell that waits on a pipe whose other end only the builder holds. It lives in a session of its own, so
that Ctrl-C does not reach it, and knows its namespaces by name before the first of them is made.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from perf.netem.errors import NetemError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Reaper"]

_SCRIPT = """
trap '' INT TERM HUP
read -r _
status=0
for name do
  [ -e "/var/run/netns/$name" ] || continue
  for pid in $(ip netns pids "$name"); do kill -KILL "$pid" 2>/dev/null; done
  ip netns del "$name" || status=1
done
exit $status
"""

_SECONDS = 20.0


class Reaper:
    """Owns these namespaces, which need not exist yet, and every process in them."""

    def __init__(self, namespaces: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", _SCRIPT, "netem-reaper", *namespaces],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> None:
        """Kill what runs in the namespaces and delete them; raises NetemError if one could not be deleted."""
        try:
            _, problems = self._process.communicate("\n", timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise NetemError(f"the network's namespaces were not deleted within {_SECONDS:g} s") from None
        if self._process.returncode:
            raise NetemError(f"the network was not taken down: {problems.strip()}")
