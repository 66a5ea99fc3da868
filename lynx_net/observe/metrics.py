"""Metrics in the text format 0.0.4 of Prometheus; docs/observability.md says what each of them means.

The counters exist already, in the links and their lanes; this module adds them up when it is asked for them.
That is less code than handing them to a client library would be, and the text may follow that of any other exporter.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lynx_net.aio.timeline import Observer
from lynx_net.wire.stats import WAIT_REASONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from lynx_net.aio.link import Link
    from lynx_net.aio.timeline import Timeline

__all__ = ["CONTENT_TYPE", "METRICS", "Metric", "Metrics"]

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


METRICS: tuple[Metric, ...] = (
    Metric("lynx_net_links", "gauge", (), "Links that are up."),
    Metric("lynx_net_links_ended_total", "counter", ("error",), "Links that have ended, by the class of the error."),
    Metric("lynx_net_transfers", "gauge", ("direction",), "Transfers under way."),
    Metric(
        "lynx_net_transfers_ended_total",
        "counter",
        ("direction", "outcome"),
        "Transfers that have ended: complete, or the class of the error.",
    ),
    Metric(
        "lynx_net_transfers_empty_total",
        "counter",
        ("direction",),
        "Transfers that ended well and moved not one payload byte.",
    ),
    Metric(
        "lynx_net_transfer_bytes_total",
        "counter",
        ("direction", "stream"),
        "Payload bytes of segments, those of failed transfers included.",
    ),
    Metric("lynx_net_transfer_segments_total", "counter", ("direction", "stream"), "Segments, counted alike."),
    Metric("lynx_net_lane_bytes_total", "counter", ("direction", "lane"), "Bytes on the wire with all headers."),
    Metric("lynx_net_lane_segments_total", "counter", ("direction", "lane"), "Segments on the wire."),
    Metric("lynx_net_lane_control_frames_total", "counter", ("direction", "lane"), "Control frames on the wire."),
    Metric("lynx_net_lane_resent_frames_total", "counter", ("lane",), "Frames sent again after a connection was lost."),
    Metric("lynx_net_lane_reopened_total", "counter", ("lane",), "Connections that took the place of lost ones."),
    Metric(
        "lynx_net_lane_wait_seconds_total",
        "counter",
        ("lane", "reason"),
        "Time in which a lane sent nothing because nothing was queued (idle), no credit was left (credit), "
        "or the rate had to be kept (pacing).",
    ),
    Metric(
        "lynx_net_accept_seconds",
        "histogram",
        ("direction",),
        "From the offer to the reservation of its memory; at the sender with the way there and back.",
    ),
    Metric("lynx_net_anchor_ready_seconds", "histogram", (), "From the offer to anchors decoded in place."),
    Metric("lynx_net_residual_ready_seconds", "histogram", (), "From the offer to residuals decoded in place."),
    Metric("lynx_net_exact_ready_seconds", "histogram", (), "From the offer to exact streams decoded in place."),
    Metric(
        "lynx_net_transfer_seconds",
        "histogram",
        ("direction",),
        "From the offer to the end of a transfer that ended well.",
    ),
)


class _Histogram:
    """How many values were at most as large as each bound, their number, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, value_s: float) -> None:
        self.counts[bisect.bisect_left(BUCKETS_S, value_s)] += 1
        self.sum_s += value_s


class Metrics(Observer):
    """Adds up what the links it observes do; `text()` is what a `/metrics` endpoint answers.

    One object may observe any number of endpoints of one event loop.

    Args:
        clock: what the links go by; only those of a virtual event loop go by another.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._links: list[Link] = []
        # Of transfers and links that have ended; what runs is added when it is asked for.
        self._ended: Values = {metric.name: defaultdict(float) for metric in METRICS}
        self._histograms: dict[str, dict[Labels, _Histogram]] = {
            metric.name: {} for metric in METRICS if metric.kind == "histogram"
        }

    def link_opened(self, link: Link) -> None:
        self._links.append(link)

    def transfer_ended(self, link: Link, timeline: Timeline) -> None:
        direction = ("direction", timeline.direction)
        _count_transfer(self._ended, timeline)
        outcome = timeline.error_type or "complete"
        self._ended["lynx_net_transfers_ended_total"][direction, ("outcome", outcome)] += 1
        if timeline.error_type is None:
            if not timeline.total_bytes:
                self._ended["lynx_net_transfers_empty_total"][(direction,)] += 1
            self._observe("lynx_net_transfer_seconds", (direction,), timeline, timeline.ended_s)
        self._observe("lynx_net_accept_seconds", (direction,), timeline, timeline.accepted_s)
        self._observe("lynx_net_anchor_ready_seconds", (), timeline, timeline.anchor_ready_s)
        self._observe("lynx_net_residual_ready_seconds", (), timeline, timeline.residual_ready_s)
        self._observe("lynx_net_exact_ready_seconds", (), timeline, timeline.exact_ready_s)

    def link_ended(self, link: Link) -> None:
        self._links.remove(link)
        self._ended["lynx_net_links_ended_total"][(("error", type(link.error).__name__),)] += 1
        _count_lanes(self._ended, link, self._clock())

    def text(self) -> str:
        """All metrics, as `CONTENT_TYPE` says. Call it in the event loop of the links."""
        now = self._clock()
        values = {name: defaultdict(float, counted) for name, counted in self._ended.items()}
        values["lynx_net_links"][()] = len(self._links)
        for direction in ("incoming", "outgoing"):
            values["lynx_net_transfers"][(("direction", direction),)] = 0
        for link in self._links:
            _count_lanes(values, link, now)
            for timeline in link.timelines():
                _count_transfer(values, timeline)
                values["lynx_net_transfers"][(("direction", timeline.direction),)] += 1
        lines: list[str] = []
        for metric in METRICS:
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
            if metric.kind == "histogram":
                for labels, histogram in sorted(self._histograms[metric.name].items()):
                    lines += _histogram_lines(metric.name, labels, histogram)
            else:
                lines += [_line(metric.name, labels, value) for labels, value in sorted(values[metric.name].items())]
        return "\n".join(lines) + "\n"

    def _observe(self, name: str, labels: Labels, timeline: Timeline, at_s: float | None) -> None:
        if at_s is not None:
            self._histograms[name].setdefault(labels, _Histogram()).add(at_s - timeline.offered_s)


def _count_transfer(values: Values, timeline: Timeline) -> None:
    for name, counts in (
        ("lynx_net_transfer_bytes_total", timeline.stream_bytes),
        ("lynx_net_transfer_segments_total", timeline.stream_segments),
    ):
        for stream, count in enumerate(counts):
            values[name][("direction", timeline.direction), ("stream", str(stream))] += count


def _count_lanes(values: Values, link: Link, now: float) -> None:
    for index, stats in enumerate(link.lane_stats):
        lane = ("lane", str(index))
        for direction, wire_bytes, segments, frames in (
            ("incoming", stats.received_bytes, stats.received_segments, stats.received_control_frames),
            ("outgoing", stats.sent_bytes, stats.sent_segments, stats.sent_control_frames),
        ):
            labels = (("direction", direction), lane)
            values["lynx_net_lane_bytes_total"][labels] += wire_bytes
            values["lynx_net_lane_segments_total"][labels] += segments
            values["lynx_net_lane_control_frames_total"][labels] += frames
        values["lynx_net_lane_resent_frames_total"][(lane,)] += stats.resent_frames
        values["lynx_net_lane_reopened_total"][(lane,)] += stats.reopened
        for reason in WAIT_REASONS:
            values["lynx_net_lane_wait_seconds_total"][lane, ("reason", reason)] += stats.waited_s(reason, now)


def _histogram_lines(name: str, labels: Labels, histogram: _Histogram) -> list[str]:
    lines, below = [], 0
    for bound_s, count in zip((*BUCKETS_S, math.inf), histogram.counts, strict=True):
        below += count
        lines.append(_line(f"{name}_bucket", (*labels, ("le", _number(bound_s))), below))
    return [*lines, _line(f"{name}_sum", labels, histogram.sum_s), _line(f"{name}_count", labels, below)]


def _line(name: str, labels: Labels, value: float) -> str:
    # No label value needs an escape: they are numbers, words of this module, and names of classes.
    inside = ",".join(f'{label}="{text}"' for label, text in labels)
    return f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(value)
