"""Python environments for what others have made, under `build/peers`: built once, apart from this project's own."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ENVIRONMENTS", "ROOT", "Environment", "Failure", "build", "child_environment", "last_line"]

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENTS = ROOT / "build" / "peers"
_INSTALL_LIMIT_S = 900


class Failure(Exception):
    """Something could not be measured; says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment.

    Attributes:
        name: of its folder.
        packages: what pip installs, without dependencies.
        inherits: it also sees the packages of this interpreter, behind its own (torch is large).
        settings: environment variables of the installation.
        needs: what must be on the machine, beyond pip's reach.
        setup: the command that builds it, for who is told that it is missing.
    """

    name: str
    packages: tuple[str, ...]
    inherits: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    setup: str = "python -m perf.peers --setup"

    def python(self, folder: Path) -> str:
        """Its interpreter.

        Raises:
            Failure: it was not built.
        """
        python = folder / self.name / "bin" / "python"
        if not (folder / self.name / "whole").exists():
            raise Failure(f"not installed; run: {self.setup}")
        return str(python)


def build(one: Environment, folder: Path) -> bool:
    """Build an environment anew; a package that cannot be had is said and left. Returns whether it is whole."""
    where = folder / one.name
    print(f"{one.name}: {' '.join(one.packages)}" + (f" (needs {one.needs})" if one.needs else ""), flush=True)
    venv.create(where, with_pip=True, clear=True)
    python = str(where / "bin" / "python")
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *one.packages]
    done = subprocess.run(command, env=os.environ | dict(one.settings), timeout=_INSTALL_LIMIT_S)
    if done.returncode:
        print(f"{one.name}: cannot be installed here", flush=True)
        return False
    if one.inherits:
        ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        own = Path(subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip())
        paths = dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
        (own / "inherited.pth").write_text("\n".join(paths) + "\n")
    (where / "whole").touch()
    return True


def child_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a process that imports this repository."""
    paths = [str(ROOT), str(ROOT / "codec"), str(ROOT / "gpu")]
    return os.environ | dict(settings) | {"PYTHONPATH": os.pathsep.join(paths)}


def last_line(text: str) -> str:
    """What a failed process said last."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
