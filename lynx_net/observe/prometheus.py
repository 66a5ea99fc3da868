"""Prometheus' text format 0.0.4: metrics, histograms, and the text of all of them."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["BUCKETS_S", "CONTENT_TYPE", "Histogram", "Labels", "Metric", "Values", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""What an HTTP answer with this text declares."""

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histograms' buckets."""

Labels = tuple[tuple[str, str], ...]
Values = dict[str, defaultdict[Labels, float]]
"""Values of every metric by its labels."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's name, type, labels and meaning."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


class Histogram:
    """How many values were at most as large as each bound, their number, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, value_s: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(BUCKETS_S, value_s)] += 1
        self.sum_s += value_s


def exposition(
    metrics: Sequence[Metric],
    values: Mapping[str, Mapping[Labels, float]],
    histograms: Mapping[str, Mapping[Labels, Histogram]],
) -> str:
    """The text. Label values must need no escape.

    Args:
        metrics: in the order of the text.
        values: of counters and gauges, by name.
        histograms: by name.
    """
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        if metric.kind == "histogram":
            for labels, histogram in sorted(histograms[metric.name].items(), key=lambda item: item[0]):
                lines += _histogram_lines(metric.name, labels, histogram)
        else:
            lines += [_line(metric.name, labels, value) for labels, value in sorted(values[metric.name].items())]
    return "\n".join(lines) + "\n"


def _histogram_lines(name: str, labels: Labels, histogram: Histogram) -> list[str]:
    lines, below = [], 0
    for bound_s, count in zip((*BUCKETS_S, math.inf), histogram.counts, strict=True):
        below += count
        lines.append(_line(f"{name}_bucket", (*labels, ("le", _number(bound_s))), below))
    return [*lines, _line(f"{name}_sum", labels, histogram.sum_s), _line(f"{name}_count", labels, below)]


def _line(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{label}="{text}"' for label, text in labels)
    return f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(value)
