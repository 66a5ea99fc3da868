"""Compiles lynx_net/aio/_lanes*.c into the wheel; where that cannot be done the wheel is pure, lanes run in Python."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("lynx_net/aio/_lanes.c")
"""The others lie beside it and begin with the same name."""
BUILT = SOURCE.with_name("_lanes.abi3.so")
"""For every CPython from 3.11 on (Py_LIMITED_API in the source)."""


class LanesHook(BuildHookInterface[Any]):
    """Builds in the source tree, which is where an editable install imports from."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        (root / BUILT).unlink(missing_ok=True)  # never one of another source
        problem = compile_lanes(root / SOURCE, root / BUILT)
        if problem:
            self.app.display_warning(f"lynx-net is built without its C extension, lanes run in Python: {problem}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["artifacts"].append(f"/{BUILT}")


def compile_lanes(source: Path, target: Path) -> str:
    """Compile; returns why it was not possible, or nothing."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it needs CPython with the stable ABI"
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    compiler = find_compiler()
    if compiler is None:
        return "no C compiler was found"
    partial = target.with_suffix(".partial")
    flags = ["-O3", "-std=c11", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fPIC", "-fvisibility=hidden", "-shared"]
    include = f"-I{sysconfig.get_path('include')}"
    sources = map(str, sorted(source.parent.glob(f"{source.stem}*.c")))
    command = [*compiler, *flags, include, *sources, "-o", str(partial), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"{shlex.join(command)} failed:\n{done.stderr}"
    partial.replace(target)  # at once: a process that runs keeps the old one
    return ""


def find_compiler() -> list[str] | None:
    """$CC, the compiler of this Python, or cc: the first that is there."""
    for candidate in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc"):
        command = shlex.split(candidate or "")
        if command and shutil.which(command[0]):
            return command
    return None
