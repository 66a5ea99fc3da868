"""Running `ip`, `tc` and `nft`, with errors that say what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from perf.netem.errors import NetemError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["call", "inside", "require_privilege", "require_tool", "works"]

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables"}
_SECONDS = 20.0


def require_tool(tool: str) -> None:
    """Raise NetemError, with the name of the package, if `tool` is not installed."""
    if shutil.which(tool) is None:
        raise NetemError(f"`{tool}` is not installed; it is in the package {_PACKAGES[tool]}")


def require_privilege() -> None:
    """Raise NetemError unless this process may make network namespaces."""
    if os.geteuid() != 0:
        raise NetemError("making network namespaces needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN); try sudo")


def inside(namespace: str, *argv: str) -> list[str]:
    """The command line that runs `argv` in a namespace, as the process that is started and not as a child of it."""
    return ["ip", "netns", "exec", namespace, *argv]


def call(argv: Sequence[str], stdin: str | None = None) -> str:
    """Run a command and return what it prints; raises NetemError with its message if it fails."""
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NetemError(f"`{' '.join(argv)}` did not end in {_SECONDS:g} s") from error
    if done.returncode:
        message = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        hint = "; root without CAP_SYS_ADMIN and CAP_NET_ADMIN?" if "not permitted" in message else ""
        raise NetemError(f"`{' '.join(argv)}`: {message}{hint}")
    return done.stdout


def works(argv: Sequence[str]) -> bool:
    """Whether a command succeeds."""
    return subprocess.run(argv, capture_output=True, timeout=_SECONDS, check=False).returncode == 0
