"""Measured cells on disk, so that a run that was interrupted goes on where it was.

A cell is found again by everything that matters: what was measured, on what, the code that made it, and for times the
machine. A change of any of them is another cell; nothing is ever out of date.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["Cells", "fingerprint"]

ROOT = Path(__file__).resolve().parent.parent.parent


def fingerprint(sources: Sequence[str]) -> str:
    """Of the code in these files and folders of the repository (Python and C sources).

    Of Python what it does counts: comments, docstrings and layout do not. `FILE:NAME` is a function or class of a file.
    """
    digest = xxhash.xxh3_64()
    for source in sources:
        path, _, name = source.partition(":")
        at = ROOT / path
        files = [at] if at.is_file() else sorted(file for file in at.rglob("*") if file.suffix in (".py", ".c", ".txt"))
        if not files:
            raise FileNotFoundError(f"no sources in {at}")
        for file in files:
            digest.update(str(file.relative_to(ROOT)).encode())
            digest.update(_meaning(file, name) if file.suffix == ".py" else file.read_bytes())
    return digest.hexdigest()


def _meaning(file: Path, name: str) -> bytes:
    """A Python file, or one definition in it, without what changes nothing."""
    tree: ast.AST = ast.parse(file.read_text("utf-8"))
    if name:
        named = [one for one in ast.iter_child_nodes(tree) if getattr(one, "name", None) == name]
        if len(named) != 1:
            raise FileNotFoundError(f"no {name} in {file}")
        tree = named[0]
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
    return ast.dump(tree).encode()


def _is_text(node: ast.AST) -> bool:
    """Whether a statement is a docstring, or a string that documents what stands before it."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class Cells:
    """Cells in a folder, one JSON file each.

    Args:
        folder: made if need be.
        basis: what all cells of this object depend on, such as a `fingerprint` and the machine.
        fresh: cells of earlier runs are measured again and written over; those of this one are kept.
    """

    def __init__(self, folder: Path, basis: Mapping[str, Any], *, fresh: bool = False) -> None:
        self._folder = folder
        self._fresh = fresh
        self._mine: set[Path] = set()
        self._basis = dict(basis)
        self.reused = self.made = 0

    def get(self, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """The cell of this key: read if it was measured before, else measured now and kept."""
        if self._is_held(file := self._file(key)):
            return self._read(file)
        value = measure()
        self.put(key, value)
        return value

    def held(self, key: Mapping[str, Any]) -> Any:
        """The cell if it was measured before, else None."""
        return self._read(file) if self._is_held(file := self._file(key)) else None

    def has(self, key: Mapping[str, Any]) -> bool:
        """Whether `held` gives a cell; reads nothing."""
        return self._is_held(self._file(key))

    def put(self, key: Mapping[str, Any], value: Any) -> None:
        """Keep a cell; its file is whole or absent."""
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
                json.dump({"key": dict(key), "basis": self._basis, "value": value}, opened)
            Path(name).rename(file)
        finally:
            Path(name).unlink(missing_ok=True)
        self.made += 1
        self._mine.add(file)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Other runs with these cells wait here; what the first one measures is held then."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("w") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            yield

    def _is_held(self, file: Path) -> bool:
        return file in self._mine if self._fresh else file.exists()

    def _read(self, file: Path) -> Any:
        self.reused += 1
        return json.loads(file.read_text("utf-8"))["value"]

    def _file(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps([self._basis, dict(key)], sort_keys=True)
        name = xxhash.xxh3_128(text.encode()).hexdigest()
        return self._folder / name[:2] / f"{name}.json"
