"""One request as a Chrome trace, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lynx_net.observe.trace import instant, phase, transfer_events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lynx_net.integrations.http.bus import RequestLog

__all__ = ["request_trace"]

_REQUEST, _TRANSFER, _TOKENS = 1, 2, 3


def request_trace(log: RequestLog, now_s: float) -> dict[str, Any]:
    """The trace of a request that has ended, or runs: its phases, its transfer, and its tokens, each on a track.

    The format is that of `observe.TraceRecorder`. Times are microseconds on the steady clock: traces of one host fit
    together.
    """
    pid = os.getpid()
    tracks: list[tuple[int, str, list[dict[str, Any]]]] = [(_REQUEST, f"request {log.id}", list(_phases(log, now_s)))]
    if log.timeline is not None:
        tracks.append((_TRANSFER, "its cache", list(transfer_events(log.timeline, now_s))))
    tracks.append((_TOKENS, "its tokens", list(_tokens(log))))
    events: list[dict[str, Any]] = [_about(pid, "process_name", 0, name="decode server")]
    for number, name, track in tracks:
        events.append(_about(pid, "thread_name", number, name=name))
        events.append(_about(pid, "thread_sort_index", number, sort_index=number))
        events += [{**event, "pid": pid, "tid": number} for event in track]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _phases(log: RequestLog, now_s: float) -> Iterator[dict[str, Any]]:
    """The request, and in it: waiting for a place, for the cache's offer, for the first final token, and the rest."""
    at_s = {event["type"]: log.started_s + event["at_s"] for event in reversed(log.events)}  # the first of each type
    ended_s = log.started_s + log.events[-1]["at_s"] if log.ended else now_s
    fields = {name: value for name, value in log.events[0].items() if name not in ("type", "seq", "at_s", "time")}
    last = {"last": log.events[-1]["type"]} if log.ended else {}
    yield phase("request", "request", log.started_s, ended_s, fields | last)
    for event in log.events:
        if event["type"] in ("store", "rest"):
            about = {
                name: value for name, value in event.items() if name not in ("type", "request", "seq", "at_s", "time")
            }
            words = f"store: {event['outcome']}" if event["type"] == "store" else "rest of the prompt computed"
            yield instant(words, log.started_s + event["at_s"], about)
    steps = [("waits for a place", log.started_s)]
    for name, kind in (("waits for the cache", "started"), ("waits for a final token", "offer"), ("decodes", "first")):
        if kind in at_s:
            steps.append((name, at_s[kind]))
    for (name, start_s), stop_s in zip(steps, [*(one for _, one in steps[1:]), ended_s], strict=True):
        yield phase(name, "request", start_s, stop_s, {})


def _tokens(log: RequestLog) -> Iterator[dict[str, Any]]:
    for event in log.events:
        at_s = log.started_s + event["at_s"]
        match event["type"]:
            case "draft":
                yield instant(f"draft {event['text']!r}", at_s, {"index": event["index"], "token": event["token"]})
            case "retract":
                yield instant(f"retract {event['count']}", at_s, {})
            case "commit":
                arguments = {name: event[name] for name in ("index", "tokens", "accepted")}
                yield instant(f"commit {''.join(event['texts'])!r}", at_s, arguments)


def _about(pid: int, kind: str, track: int, **arguments: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": track, "args": arguments}
