"""The Chrome trace: what a viewer demands of it, and that it says what happened."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from typing import TYPE_CHECKING, Any

import pytest

import lynx_net
from lynx_net.errors import LynxError
from lynx_net.observe import TraceRecorder
from lynx_net.testing.clock import run_virtual

if TYPE_CHECKING:
    from pathlib import Path

NEEDED = {"X": {"ts", "dur", "cat"}, "i": {"ts", "s", "cat"}, "M": set()}
"""Fields that the Trace Event Format demands of an event beside name, ph, pid, tid and args, by its phase."""


def check(trace: dict[str, Any]) -> None:
    """Every event is one that the format knows, with numbers for times; complete events of a track nest."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    open_until: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        assert set(event) == {"name", "ph", "pid", "tid", "args"} | NEEDED[event["ph"]]
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is type(event["tid"]) is int
        for field in ("ts", "dur"):
            if field in event:
                assert math.isfinite(event[field])
                assert event[field] >= 0
        if event["ph"] == "X":
            spans = open_until.setdefault((event["pid"], event["tid"]), [])
            spans.append((event["ts"], event["ts"] + event["dur"]))
    for whole, *phases in open_until.values():
        for start, stop in phases:
            assert whole[0] - 1e-3 <= start <= stop <= whole[1] + 1e-3
        for (_, stop), (start, _) in itertools.pairwise(phases):
            assert start == pytest.approx(stop)


def tracks(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Events by the name of their track."""
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    return {
        name: [event for event in trace["traceEvents"] if event["tid"] == tid and event["ph"] != "M"]
        for tid, name in names.items()
    }


def _named(events: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = [event for event in events if event["name"] == name]
    return found


async def test_a_trace_of_both_sides(make_cache: Any, tmp_path: Path) -> None:
    """Two transfers that ended well, one that failed, one that still runs, over two lanes."""
    cache = make_cache(layers=2, tokens=512)
    files = {"prefill": tmp_path / "prefill.json", "decode": tmp_path / "decode.json"}

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        prefill = TraceRecorder("prefill", pid=1, clock=clock)
        decode = TraceRecorder("decode", pid=2, clock=clock)
        async with (
            lynx_net.serve("memory://trace", observers=[decode]) as server,
            lynx_net.connect(server.url, rate="4Mbit", lanes=2, observers=[prefill]) as link,
        ):
            for name in ("first", "second"):
                sending = asyncio.create_task(cache.send_on(link, name))
                transfer = await anext(aiter(server))
                await transfer.complete
                await sending
            sending = asyncio.create_task(cache.send_on(link, "third"))
            (await anext(aiter(server))).cancel()
            with pytest.raises(LynxError):
                await sending
            sending = asyncio.create_task(cache.send_on(link, "fourth"))
            transfer = await anext(aiter(server))
            await transfer.anchor_ready
            prefill.write(files["prefill"])
            decode.write(files["decode"])
            await transfer.complete
            await sending

    await asyncio.to_thread(run_virtual, run())
    traces = {side: json.loads(file.read_text()) for side, file in files.items()}
    for number, (side, trace) in enumerate(traces.items(), start=1):
        check(trace)
        assert {event["pid"] for event in trace["traceEvents"]} == {number}
        assert _named(trace["traceEvents"], "process_name")["args"] == {"name": side}
        named = tracks(trace)
        assert [name.split(" ")[0] for name in named] == ["lane", "lane", "first", "second", "third", "fourth"]
        lane = next(events for name, events in named.items() if name.startswith("lane 1"))
        moved = "sent" if side == "prefill" else "received"
        assert _named(lane, "lane")["args"][f"{moved}_segments"] > 0

    received = {name.split(" ")[0]: events for name, events in tracks(traces["decode"]).items()}
    first = received["first"]
    whole = _named(first, "transfer")
    assert whole["cat"] == "incoming"
    assert whole["args"]["request_id"] == "first"
    assert sum(whole["args"]["stream_bytes"]) > 0
    moments = [
        _named(first, name)["ts"]
        for name in ("accepted", "layer 0 anchor ready", "anchor ready", "layer 1 residual ready", "residual ready")
    ]
    assert moments == sorted(moments)
    assert _named(first, "decodes the rest")["ts"] >= _named(first, "receives")["ts"]
    assert _named(received["third"], "failed: TransferAbortedError")["args"]["error"]
    running = [event["name"] for event in received["fourth"]]
    assert "anchor ready" in running
    assert "residual ready" not in running
    assert "decodes the rest" not in running

    sent = {name.split(" ")[0]: events for name, events in tracks(traces["prefill"]).items()}
    assert _named(sent["second"], "waits for delivery")["ts"] > _named(sent["second"], "sends")["ts"]
    assert _named(sent["second"], "sends")["ts"] >= _named(sent["first"], "sends")["ts"]


async def test_only_so_many_are_kept(make_cache: Any) -> None:
    cache = make_cache(tokens=8)
    recorder = TraceRecorder(keep=3)
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        for link_number in range(5):
            async with lynx_net.connect(server.url, observers=[recorder]) as link:
                for number in range(2):
                    await cache.send_on(link, f"{link_number}.{number}")
    assert [timeline.request_id for timeline in recorder.timelines()] == ["3.1", "4.0", "4.1"]
    trace = recorder.trace()
    check(trace)
    assert sum(event["name"] == "lane" for event in trace["traceEvents"]) == 3
