"""Timelines of transfers as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

The format is the JSON object of the "Trace Event Format" (Google, 2016): complete events (`ph` X) for the phases of a
transfer, instant events (i) for what became ready, metadata events (M) for names. A process of the trace is one side;
its tracks are the lanes of its links and the transfers.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lynx_net.aio.timeline import Observer
from lynx_net.wire.stats import WAIT_REASONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lynx_net.aio.link import Link
    from lynx_net.aio.timeline import Timeline

__all__ = ["TraceRecorder", "instant", "phase", "transfer_events"]

KEPT = 1000


@dataclass(frozen=True, slots=True)
class _LaneSpan:
    """What one lane moved from the start of its link to its end, or to now."""

    peer: str
    lane: int
    began_s: float
    ended_s: float
    counters: dict[str, float]


class TraceRecorder(Observer):
    """Keeps the timelines of the transfers that ended last, and the counters of the links that ended last.

    Args:
        side: names the process in the trace, for example "prefill".
        keep: transfers, and links, to keep; older ones are dropped.
        pid: number of the process in the trace; that of this process by default. Two sides in one process
            need two numbers.
        clock: what the links go by; only those of a virtual event loop go by another.
    """

    def __init__(
        self,
        side: str = "lynx_net",
        *,
        keep: int = KEPT,
        pid: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.side = side
        self._pid = os.getpid() if pid is None else pid
        self._clock = clock
        self._ended: deque[Timeline] = deque(maxlen=keep)
        self._ended_lanes: deque[list[_LaneSpan]] = deque(maxlen=keep)
        self._links: list[Link] = []

    def link_opened(self, link: Link) -> None:
        self._links.append(link)

    def transfer_ended(self, link: Link, timeline: Timeline) -> None:
        self._ended.append(timeline)

    def link_ended(self, link: Link) -> None:
        self._links.remove(link)
        self._ended_lanes.append(_lane_spans(link, self._clock()))

    def timelines(self) -> list[Timeline]:
        """Of the transfers kept and of those that are under way, in the order of their offers."""
        running = [timeline for link in self._links for timeline in link.timelines()]
        return sorted([*self._ended, *running], key=lambda one: one.offered_s)

    def trace(self) -> dict[str, Any]:
        """The trace as JSON values. Times are microseconds on the steady clock: traces of one host fit together.

        Call it in the event loop of the links.
        """
        now = self._clock()
        lanes = [span for spans in self._ended_lanes for span in spans]
        for link in self._links:
            lanes += _lane_spans(link, now)
        events = [self._about("process_name", 0, name=self.side)]
        # Each track has a number; the same lane of another link comes behind it on a track of its own.
        tracks = [
            *((f"lane {span.lane}, {span.peer}", [_lane_event(span)]) for span in lanes),
            *((_title(timeline), list(transfer_events(timeline, now))) for timeline in self.timelines()),
        ]
        for number, (name, track) in enumerate(tracks, start=1):
            events.append(self._about("thread_name", number, name=name))
            events.append(self._about("thread_sort_index", number, sort_index=number))
            events += [{**event, "pid": self._pid, "tid": number} for event in track]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write(self, file: Path) -> None:
        """Write `trace()` to a file. Call it in the event loop of the links, or when they have ended."""
        file.write_text(json.dumps(self.trace()))

    def _about(self, kind: str, track: int, **arguments: str | int) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": self._pid, "tid": track, "args": arguments}


def _lane_spans(link: Link, now: float) -> list[_LaneSpan]:
    spans = []
    for index, stats in enumerate(link.lane_stats):
        counters: dict[str, float] = {
            "sent_bytes": stats.sent_bytes,
            "sent_segments": stats.sent_segments,
            "sent_control_frames": stats.sent_control_frames,
            "resent_frames": stats.resent_frames,
            "reopened": stats.reopened,
            "received_bytes": stats.received_bytes,
            "received_segments": stats.received_segments,
            "received_control_frames": stats.received_control_frames,
        }
        counters |= {f"waited_{reason}_s": stats.waited_s(reason, now) for reason in WAIT_REASONS}
        spans.append(_LaneSpan(link.peer, index, link.opened_at_s, now, counters))
    return spans


def _lane_event(span: _LaneSpan) -> dict[str, Any]:
    return phase("lane", "link", span.began_s, span.ended_s, dict(span.counters))


def _title(timeline: Timeline) -> str:
    toward = "to" if timeline.direction == "outgoing" else "from"
    return f"{timeline.request_id} ({timeline.codec}), transfer {timeline.transfer} {toward} {timeline.peer}"


def transfer_events(timeline: Timeline, now: float) -> Iterator[dict[str, Any]]:
    """The whole transfer, its phases nested in it, and an instant for everything that became ready."""
    ended_s = now if timeline.ended_s is None else timeline.ended_s
    arguments = timeline.to_json()
    del arguments["layers_ready_s"]  # they are instants of their own
    yield phase("transfer", timeline.direction, timeline.offered_s, ended_s, arguments)
    for name, start_s, stop_s in _phases(timeline, ended_s):
        yield phase(name, timeline.direction, start_s, stop_s, {})
    if timeline.accepted_s is not None:
        yield instant("accepted", timeline.accepted_s, {})
    for stream, layers in enumerate(timeline.layers_ready_s):
        name = timeline.stream_names[stream]
        for layer, at_s in enumerate(layers):
            if at_s is not None:
                yield instant(f"layer {layer} {name} ready", at_s, {"layer": layer, "stream": stream})
    for stream, at_s in enumerate(timeline.streams_ready_s):
        if at_s is not None:
            yield instant(f"{timeline.stream_names[stream]} ready", at_s, {"stream": stream})
    if timeline.error_type is not None:
        yield instant(f"failed: {timeline.error_type}", ended_s, {"error": timeline.error})


def _phases(timeline: Timeline, ended_s: float) -> Iterator[tuple[str, float, float]]:
    """Phases follow each other and never overlap; one that has not ended lasts until the transfer's end."""
    first_s, last_s = timeline.first_segment_s, timeline.last_segment_s
    yield "waits for its first segment", timeline.offered_s, ended_s if first_s is None else first_s
    if first_s is None:
        return
    moving = "sends" if timeline.direction == "outgoing" else "receives"
    # Of a transfer that failed or still runs, last_segment_s may be the end of an earlier stream.
    over = last_s is not None and timeline.ended_s is not None and timeline.error_type is None
    yield moving, first_s, last_s if over and last_s is not None else ended_s
    if over and last_s is not None:
        yield "waits for delivery" if timeline.direction == "outgoing" else "decodes the rest", last_s, ended_s


def phase(name: str, category: str, start_s: float, stop_s: float, arguments: dict[str, Any]) -> dict[str, Any]:
    """A complete event, still without its track; times on the steady clock."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start_s * 1e6,
        "dur": max(stop_s - start_s, 0.0) * 1e6,
        "args": arguments,
    }


def instant(name: str, at_s: float, arguments: dict[str, Any]) -> dict[str, Any]:
    """An instant event, still without its track."""
    return {"ph": "i", "name": name, "cat": "ready", "ts": at_s * 1e6, "s": "t", "args": arguments}
