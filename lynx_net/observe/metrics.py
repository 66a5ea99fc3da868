"""Metrics in the text format 0.0.4 of Prometheus; docs/observability.md says what each of them means.

The counters exist already, in the links and their lanes; this module adds them up when it is asked for them.
That is less code than handing them to a client library would be, and the text may follow that of any other exporter.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

from lynx_net.aio.timeline import Observer
from lynx_net.observe.prometheus import CONTENT_TYPE, Histogram, Labels, Metric, Values, exposition
from lynx_net.wire.stats import WAIT_REASONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from lynx_net.aio.link import Link
    from lynx_net.aio.timeline import Timeline

__all__ = ["CONTENT_TYPE", "METRICS", "Metric", "Metrics"]

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
        self._histograms: dict[str, dict[Labels, Histogram]] = {
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
        return exposition(METRICS, values, self._histograms)

    def _observe(self, name: str, labels: Labels, timeline: Timeline, at_s: float | None) -> None:
        if at_s is not None:
            self._histograms[name].setdefault(labels, Histogram()).add(at_s - timeline.offered_s)


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
