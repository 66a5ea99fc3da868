"""The documents do what they say: every block of Python runs and prints the text block behind it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lynx_net import SocketOptions

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(file: Path) -> list[tuple[str, str]]:
    """Language and content of every fenced block."""
    return [(match["language"], match["body"]) for match in BLOCK.finditer(file.read_text("utf-8"))]


@pytest.mark.parametrize(
    ("file", "pairs"),
    [
        ("docs/quickstart.md", 5),
        ("docs/observability.md", 3),
        ("docs/packed.md", 3),
        ("docs/plans.md", 2),
        ("docs/store.md", 1),
    ],
)
def test_programs_in_documents(file: str, pairs: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = [(language, body) for language, body in blocks(ROOT / file) if language != "sh"]
    assert [language for language, _ in found] == ["python", "text"] * pairs
    namespace: dict[str, Any] = {"__name__": "document"}
    for (_, code), (_, expected) in zip(found[::2], found[1::2], strict=True):
        exec(compile(code, file, "exec"), namespace)
        assert capsys.readouterr().out == expected, code


def test_every_socket_option_is_documented() -> None:
    text = (ROOT / "docs" / "sockets.md").read_text("utf-8")
    missing = [
        field.name for field in fields(SocketOptions) if not re.search(rf"^\| `{field.name}\b", text, re.MULTILINE)
    ]
    assert missing == []


@pytest.mark.parametrize("file", ["README.md", "docs/quickstart.md", "docs/netem.md", "docs/gpu.md"])
def test_files_that_the_documents_name_exist(file: str) -> None:
    text = (ROOT / file).read_text("utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    named = re.findall(r"`((?:docs|examples|scripts|perf|tests|lynx_net|codec)/[\w./-]+)`", text)
    assert links + named
    missing = [name for name in links if not ((ROOT / file).parent / name).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_commands_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    modules = re.findall(r"python -m (perf\.\w+)", text)
    assert modules
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
