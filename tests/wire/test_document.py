"""docs/wire-format.md is normative: its tables must say what the code does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from lynx_net.aio import handshake
from lynx_net.wire import connection, frames, layout, messages, scheduler, sendqueue
from lynx_net.wire.layout import CacheLayout

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-format.md"
TEXT = DOCUMENT.read_text()
TYPES = {
    "int": "int",
    "str": "str",
    "bytes": "bytes",
    "tuple[int, ...]": "bytes",
    "dict[str, Any]": "dict",
    "int | None": "int or nil",
}


def section(title: str) -> str:
    match = re.search(rf"^#+ (?:\d+\. )?{re.escape(title)}$(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert match, f"no section {title}"
    return match[1]


def rows(text: str) -> list[list[str]]:
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return [cells for cells in table if not set(cells[0]) <= {"-"}]


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_header() -> None:
    table = rows(section("Frames"))[1:]
    formats = {1: "B", 2: "H", 4: "I", 8: "Q"}
    at = 0
    for offset, size, *_ in table:
        assert int(offset) == at
        at += int(size)
    assert at == frames.HEADER_BYTES
    assert "<" + "".join(formats[int(size)] for _, size, *_ in table) == frames.HEADER.format
    assert [row[2] for row in table] == [
        "kind",
        "stream",
        "following",
        "length",
        "transfer",
        "page",
        "offset",
        "stream bytes",
        "flags",
        "payload checksum",
        "header checksum",
    ]
    assert [row[3] for row in table][:2] == [str(frames.CONTROL), "0"]
    assert [row[4] for row in table][:1] == [str(frames.SEGMENT)]


def test_the_messages() -> None:
    described = re.findall(r"^### `(\w+)`$", TEXT, re.MULTILINE)
    assert described == list(messages.MESSAGE_TYPES)
    for tag, kind in messages.MESSAGE_TYPES.items():
        table = [row for row in rows(section(f"`{tag}`")) if len(row) == 3 and row[1] in TYPES.values()]
        assert [(name.strip("`"), of_type) for name, of_type, _ in table] == [
            (field.name, TYPES[str(field.type)]) for field in fields(kind)
        ]


def test_the_abort_codes() -> None:
    table = [row for row in rows(section("`abort`")) if row[0].isdigit()]
    codes = {name: code for name, code in vars(messages.AbortCode).items() if name.isupper()}
    assert {name.strip("`"): int(code) for code, name, _ in table} == codes
    assert len(set(codes.values())) == len(codes)


def test_the_layout() -> None:
    table = rows(section("Layout"))[1:]
    assert [(name.strip("`"), of_type) for name, of_type, _ in table] == [
        (field.name, TYPES[str(field.type)]) for field in fields(CacheLayout)
    ]


def test_the_limits() -> None:
    table = rows(section("Limits"))[1:]
    modules = (frames, messages, layout, connection, scheduler, sendqueue, handshake)
    limits = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("MAX_") or name in ("HEADER_BYTES", "MIN_SEGMENT_BYTES")
    }
    del limits["MAX_CONTROL_BACKLOG_BYTES"]  # a setting of ours, not of the protocol
    assert {name.strip("`"): number(value) for name, value, _ in table} == limits


@pytest.mark.parametrize(
    ("sentence", "value"),
    [
        (r"Version (\d+)\. This document", messages.PROTOCOL_VERSION),
        (r"payload, 1 to ([\d,]+) \|", frames.MAX_CONTROL_BYTES),
        (r"`lanes` \| int \| lanes of the link, 1 to ([\d,]+)", handshake.MAX_LANES),
        (r"integers of message fields are 0 to 2\^(\d+) - 1", messages.INTEGER_LIMIT.bit_length() - 1),
        (r"`layers` \| int \| layers of the model, 0 to ([\d,]+)", layout.MAX_LAYERS),
        (r"There are\s+at most ([\d,]+) pages", layout.MAX_PAGES),
        (r"a page has at most ([\d,]+) values", layout.MAX_PAGE_VALUES),
    ],
)
def test_numbers_in_the_text(sentence: str, value: int) -> None:
    found = [number(group) for group in re.findall(sentence, TEXT) if group]
    assert found
    assert set(found) == {value}


def test_links_and_line_length() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", TEXT):
        assert (DOCUMENT.parent / target).name == "codec.md" or (DOCUMENT.parent / target).exists()
    assert all(len(line) <= 140 for line in TEXT.splitlines())
