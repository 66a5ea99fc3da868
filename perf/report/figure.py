"""What a figure of the page is made of, and helpers that pick its samples out of the raw results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perf.report.series import SERIES
from perf.report.stats import Estimate, estimate

__all__ = ["Block", "Record", "Results", "Table", "by_text", "cell", "only", "present", "timed", "values"]

Results = Mapping[str, Any]
"""The whole raw JSON."""

Record = Mapping[str, Any]
"""One sample in it."""


@dataclass(frozen=True, slots=True)
class Table:
    """Header and rows, as text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One figure of the page.

    Attributes:
        name: of its anchor and of its SVG file.
        title: its heading.
        paper: which figure or table of the paper it answers; empty for what goes beyond it, None to say neither.
        caption: what is shown and what is to be seen.
        svg: the plot, None for a table alone.
        tables: the same numbers, to read.
    """

    name: str
    title: str
    paper: str | None
    caption: str
    svg: str | None
    tables: Sequence[Table]


def only(records: Sequence[Record], **wanted: Any) -> list[Record]:
    """The records with these values."""
    return [one for one in records if all(one.get(name) == value for name, value in wanted.items())]


def timed(results: Results) -> list[Record]:
    """All transfers: of the models on the CPU, and of the one on a device as its drafts would have stood."""
    return [*results["transfers"], *results.get("device_transfers", ())]


def present(records: Sequence[Record], field: str = "series") -> list[str]:
    """Codecs that have records, in the order of `SERIES`."""
    found = {one[field] for one in records}
    return [name for name in SERIES if name in found]


def values(records: Sequence[Record], field: str) -> list[Any]:
    """Different values of a field, in ascending order."""
    return sorted({one[field] for one in records})


def samples(records: Sequence[Record], field: str) -> list[float]:
    """A figure of every record that has it."""
    return [one[field] for one in records if one.get(field) is not None]


def by_text(records: Sequence[Record]) -> dict[tuple[int, int], float]:
    """Mean score of each text by its length and number: questions about one text share a cache, so texts are what
    is drawn at random.
    """
    found: dict[tuple[int, int], list[float]] = {}
    for one in records:
        found.setdefault((one["tokens"], one.get("text", one["number"])), []).append(one["score"])
    return {key: sum(scores) / len(scores) for key, scores in found.items()}


def median_of(records: Sequence[Record], field: str) -> Estimate | None:
    """Median of a figure; None where nothing was measured."""
    found = samples(records, field)
    return estimate(found, "median") if found else None


def mean_of(records: Sequence[Record], field: str) -> Estimate | None:
    """Mean of a figure; None where nothing was measured."""
    found = samples(records, field)
    return estimate(found) if found else None


def cell(one: Estimate | None, unit: str = "", digits: int = 2, factor: float = 1.0) -> str:
    """An estimate with its interval, for a table."""
    if one is None:
        return "not measured"
    text = f"{one.value * factor:.{digits}f}{unit}"
    if one.low is None or one.high is None:
        return f"{text} (1 sample)"
    return f"{text} [{one.low * factor:.{digits}f}, {one.high * factor:.{digits}f}]"


def rate_text(rate_bps: float) -> str:
    """For example "100 Mbit/s"."""
    return f"{rate_bps / 1e9:g} Gbit/s" if rate_bps >= 1e9 else f"{rate_bps / 1e6:g} Mbit/s"
