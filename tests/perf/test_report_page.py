"""The page of the evaluation: every figure there, nothing fetched, no error in a browser; files of a run."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest
import reportkit

if not all(importlib.util.find_spec(needed) for needed in ("matplotlib", "scipy")):
    pytest.skip("needs matplotlib and scipy (extra report)", allow_module_level=True)

from lynx_net.errors import LocalProtocolError
from perf.report.build import FIGURES, write
from perf.report.draw import ACCENTS, GRID, INK, PAPER, color
from perf.report.parts import FORMAT, PARTS, dump, load, merged
from perf.report.series import SERIES

if TYPE_CHECKING:
    from pathlib import Path

NAMES = (
    "table-1", "figure-2", "figure-5", "figure-8-12", "figure-9", "figure-10", "figure-11", "table-3", "pareto",
    "survival", "waiting", "concurrent", "simulator-error", "simulated", "peers", "transports",
)  # fmt: skip
TABLES_ALONE = ("table-1", "transports")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """What a test asks of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.figures: list[str] = []
        self.headings: list[int] = []
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if "data-figure" in given:
            self.figures.append(str(given["data-figure"]))
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        for name in ("href", "xlink:href", "src", "srcset"):
            if given.get(name):
                self.targets.append(str(given[name]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(reportkit.canned(), tmp_path_factory.mktemp("report")).parent


def test_the_page_is_whole_and_fetches_nothing(folder: Path) -> None:
    text = (folder / "index.html").read_text("utf-8")
    page = Page(text)
    assert not page.open, "every tag is closed"
    assert len(set(page.ids)) == len(page.ids), "ids are unique, those inside the plots too"
    assert page.figures == list(NAMES)
    assert len(FIGURES) == len(NAMES)
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(page.headings, page.headings[1:], strict=False))
    for target in page.targets:
        assert target.startswith(("#", "data:")), target
        assert not target.startswith("#") or target[1:] in page.ids, target
    assert not re.search(r"url\((?!#)", text)
    assert "A note &lt;with&gt; signs &amp; more." in text


def test_plots_have_a_title_and_follow_the_color_scheme(folder: Path) -> None:
    stand_for = {INK, GRID, PAPER, *ACCENTS, *map(color, SERIES)}
    for name in NAMES:
        if name in TABLES_ALONE:
            continue
        svg = (folder / f"{name}.svg").read_text("utf-8")
        assert '<title id="' in svg
        assert "var(--ink)" in svg
        assert "prefers-color-scheme: dark" in svg
        assert not [one for one in stand_for if one in svg], "no colour is left that only stands for one"
    sections = (folder / "index.html").read_text("utf-8").split("<section")
    assert all("<table>" in section for section in sections[1:]), "every plot has its numbers beside it"


def test_parts_that_were_not_measured_are_named_and_added_later(tmp_path: Path) -> None:
    whole = reportkit.canned()
    whole["sends"] = [
        {"series": "int8", "round": 0, "receivers": [{"known_bits": [], "made_s": [], "verified_s": 1.0}]}
    ]
    whole |= {name: {} for name in ("reference", "shapes", "speeds")}
    fields = {part: {name: whole[name] for name in names} for part, names in PARTS.items()}
    fields["device"] = {"device": whole["device"]}
    first = merged({"peers": {"fields": fields["peers"], "about": reportkit.about("peers")}})
    text = write(first, tmp_path).read_text("utf-8")
    page = Page(text)
    assert not page.open
    assert len(page.figures) == len(FIGURES)
    assert {"peers", "transports"} < set(page.figures)
    assert text.count("Not measured yet") == len(FIGURES) - 2
    assert "--only time --only quality" in text
    both = merged({"quality": {"fields": fields["quality"], "about": reportkit.about("quality")}}, first)
    assert {name: both[name] for name in (*PARTS["quality"], *PARTS["peers"])} == fields["quality"] | fields["peers"]
    assert set(both["parts"]) == {"quality", "peers"}


def test_what_follows_from_a_file_is_made_when_it_is_read(tmp_path: Path) -> None:
    peers = {name: reportkit.canned()[name] for name in PARTS["peers"]}
    results = merged({"peers": {"fields": peers, "about": reportkit.about("peers")}})
    file = dump(results, tmp_path / "made")
    assert load([file]) == results
    file.write_text(file.read_text().replace(f'"format":{FORMAT}', '"format":1'))
    with pytest.raises(LocalProtocolError, match="another version"):
        load([file])


def test_a_run_writes_its_raw_results_and_its_machine(folder: Path) -> None:
    measured = reportkit.canned()
    for name in ("device_transfers", "concurrent", "simulator"):  # which follow from the others
        del measured[name]
    assert json.loads((folder / "results.json").read_text()) == measured
    assert json.loads((folder / "machine.json").read_text())["cores"] == 2


def test_the_page_opens_in_chromium_without_an_error(folder: Path) -> None:
    browser = next((found for found in map(shutil.which, BROWSERS) if found), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} (on Debian: apt-get install chromium)")
    profile = folder / "profile"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
    done = subprocess.run(
        [*command, "--enable-logging=stderr", "--v=0", f"file://{folder}/index.html"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line or "net_error" in line]
    assert not console
    for name in NAMES:
        assert f'data-figure="{name}"' in done.stdout
    assert done.stdout.count("<svg") == len(NAMES) - len(TABLES_ALONE)
