"""The prose of the tasks: Debian's FAQ, and documents of this project as they once were.

The FAQ is Debian's package `debian-faq`, fetched with `apt-get download` and unpacked with `dpkg-deb -x` into the cache
folder, once; nothing is installed. Where that cannot be done the project's documents stand alone, and the page says so.
"""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import xxhash

__all__ = ["Corpus", "load_corpus"]

PACKAGE = "debian-faq"
_TEXT = "usr/share/doc/debian/FAQ/debian-faq.en.txt.gz"
_PROJECT = Path(__file__).resolve().parent.parent / "quality_texts.txt"
_FETCH_LIMIT_S = 120
_TABLE_OF_CONTENTS_END = "Chapter 1."
_SHORTEST_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Corpus:
    """Paragraphs of prose.

    Attributes:
        name: what it is, with its version.
        paragraphs: in order, each on one line.
        missing: why the FAQ is not in it; None if it is.
    """

    name: str
    paragraphs: tuple[str, ...]
    missing: str | None = None

    def from_start(self, number: int, of: int) -> list[str]:
        """All paragraphs, rotated so that they begin at the `number`-th of `of` evenly spaced ones."""
        start = number % of * len(self.paragraphs) // of
        return [*self.paragraphs[start:], *self.paragraphs[:start]]

    @property
    def digest(self) -> str:
        """Changes with any paragraph."""
        return xxhash.xxh3_64("\n".join(self.paragraphs).encode()).hexdigest()


def load_corpus(folder: Path) -> Corpus:
    """The corpus of the tasks; the FAQ is fetched into `folder` if it is not there."""
    project = paragraphs_of(_PROJECT.read_text("utf-8"))
    try:
        text = fetch(folder)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        lines = said.strip().splitlines()
        return Corpus("documents of this project", tuple(project), lines[-1] if lines else type(error).__name__)
    faq = paragraphs_of(faq_body(text))
    return Corpus(f"{PACKAGE} and documents of this project", (*faq, *project))


def fetch(folder: Path) -> str:
    """The English text of the FAQ, fetched and unpacked once.

    Raises:
        OSError, subprocess.SubprocessError: there is no apt-get or dpkg-deb here, or no way to the archive.
    """
    kept = folder / f"{PACKAGE}.txt"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for program in ("apt-get", "dpkg-deb"):
            if shutil.which(program) is None:
                raise FileNotFoundError(f"there is no {program} here")
        with tempfile.TemporaryDirectory(dir=folder) as name:
            where = Path(name)
            _run(["apt-get", "download", PACKAGE], where)
            (package,) = where.glob(f"{PACKAGE}_*.deb")
            _run(["dpkg-deb", "-x", package.name, "unpacked"], where)
            text = gzip.decompress((where / "unpacked" / _TEXT).read_bytes())
            (where / "text").write_bytes(text)
            (where / "text").rename(kept)
    return kept.read_text("utf-8")


def _run(command: list[str], where: Path) -> None:
    subprocess.run(command, cwd=where, check=True, capture_output=True, text=True, timeout=_FETCH_LIMIT_S)


def faq_body(text: str) -> str:
    """The text behind its table of contents."""
    at = [found.start() for found in re.finditer(re.escape(_TABLE_OF_CONTENTS_END), text)]
    return text[at[1] :] if len(at) > 1 else text


def paragraphs_of(text: str) -> list[str]:
    """Paragraphs, each on one line; short ones (headings) are left out."""
    joined = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [one for one in joined if len(one) >= _SHORTEST_CHARACTERS]
