"""The metrics: their format, their values, and that the document lists the same ones."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import lynx_net
from lynx_net.errors import LynxError
from lynx_net.observe import Metrics
from lynx_net.observe.metrics import METRICS
from lynx_net.testing.clock import run_virtual

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
SAMPLE = re.compile(r'([a-z_]+)(?:\{([a-z]+="[^"\\\n]*"(?:,[a-z]+="[^"\\\n]*")*)\})? (\+Inf|-?[0-9.e+-]+)')

DECLARED = {metric.name: metric.labels for metric in METRICS}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Samples:
    """Read the text format strictly: HELP, TYPE, then the samples of that metric, every one once."""
    samples: Samples = {}
    current, kind = "", ""
    assert text.endswith("\n")
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("# HELP "):
            current = line.split(" ")[2]
            kind = next(lines).removeprefix(f"# TYPE {current} ")
            assert kind in ("counter", "gauge", "histogram")
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        name, inside, value = match.groups()
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        assert name in [current + suffix for suffix in suffixes]
        pairs = re.findall(r'([a-z]+)="([^"]*)"', inside or "")
        assert tuple(label for label, _ in pairs if label != "le") == DECLARED[current]
        labels = frozenset(pairs)
        assert (name, labels) not in samples
        samples[name, labels] = float(value)
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples["lynx_net_" + name, frozenset(labels.items())]


async def test_what_is_counted(make_cache: Any) -> None:
    """Two transfers that end well, one that fails, one that runs; then the links end, and no counter goes back."""
    cache, empty = make_cache(layers=2, tokens=512), make_cache(tokens=0)
    texts: list[str] = []

    async def run() -> Any:
        clock = asyncio.get_running_loop().time
        metrics = Metrics(clock=clock)
        async with lynx_net.serve("memory://metrics", observers=[metrics]) as server:
            texts.append(metrics.text())
            async with lynx_net.connect(server.url, rate="4Mbit", lanes=2) as link:
                done = []
                for one in (cache, empty):
                    sending = asyncio.create_task(one.send_on(link))
                    done.append(await anext(aiter(server)))
                    await done[-1].complete
                    await sending
                sending = asyncio.create_task(cache.send_on(link))
                (await anext(aiter(server))).cancel()
                with pytest.raises(LynxError):
                    await sending
                sending = asyncio.create_task(cache.send_on(link))
                transfer = await anext(aiter(server))
                await transfer.anchor_ready
                texts.append(metrics.text())
            await transfer.link.closed()
            with pytest.raises(LynxError):
                await sending
            texts.append(metrics.text())
        return done[0].timeline()

    timeline = await asyncio.to_thread(run_virtual, run())
    start, running, ended = map(parse, texts)
    assert value(start, "links") == value(start, "transfers", direction="incoming") == 0
    assert value(running, "links") == value(running, "transfers", direction="incoming") == 1
    assert value(ended, "links") == value(ended, "transfers", direction="incoming") == 0
    assert value(ended, "links_ended_total", error="ConnectionLostError") == 1
    for outcome, count in (("complete", 2), ("TransferAbortedError", 1), ("ConnectionLostError", 1)):
        assert value(ended, "transfers_ended_total", direction="incoming", outcome=outcome) == count
    assert value(ended, "transfers_empty_total", direction="incoming") == 1
    anchors = value(running, "transfer_bytes_total", direction="incoming", stream="0")
    assert 2 * timeline.stream_bytes[0] <= anchors <= 3 * timeline.stream_bytes[0]
    lanes = [value(running, "lane_bytes_total", direction="incoming", lane=lane) for lane in "01"]
    assert min(lanes) > 0
    assert sum(lanes) > anchors + value(running, "transfer_bytes_total", direction="incoming", stream="1")
    assert value(running, "lane_segments_total", direction="incoming", lane="1") > 0
    assert value(running, "lane_control_frames_total", direction="outgoing", lane="0") > 0
    assert value(running, "lane_wait_seconds_total", lane="0", reason="idle") > 0
    for (name, labels), number in running.items():
        if name.endswith(("_total", "_bucket", "_count", "_sum")):
            assert ended[name, labels] >= number, name


async def test_histograms(make_cache: Any) -> None:
    """The time to anchors of three transfers: cumulative buckets, the last one holds all."""
    cache = make_cache(layers=2, tokens=512)
    took_s: list[float] = []

    async def run() -> str:
        metrics = Metrics(clock=asyncio.get_running_loop().time)
        async with lynx_net.serve("memory://histograms", observers=[metrics]) as server:
            for rate in ("4Mbit", "20Mbit", "200kbit"):
                async with lynx_net.connect(server.url, rate=rate) as link:
                    sending = asyncio.create_task(cache.send_on(link))
                    transfer = await anext(aiter(server))
                    await transfer.complete
                    await sending
                    took_s.append(transfer.anchor_ready.at_s - transfer.offered_at_s)
            return metrics.text()

    samples = parse(await asyncio.to_thread(run_virtual, run()))
    buckets = {
        dict(labels)["le"]: count
        for (name, labels), count in samples.items()
        if name == "lynx_net_anchor_ready_seconds_bucket"
    }
    assert len(set(took_s)) == 3
    for bound, count in buckets.items():
        assert count == sum(one_s <= float(bound) for one_s in took_s), bound
    assert buckets["+Inf"] == value(samples, "anchor_ready_seconds_count") == 3
    assert value(samples, "anchor_ready_seconds_sum") == pytest.approx(sum(took_s))
    assert value(samples, "transfer_seconds_count", direction="incoming") == 3


def test_the_document_lists_the_same_metrics() -> None:
    row = re.compile(r"^\| `(lynx_net_\w+)` \| (\w+) \|([^|]*)\|([^|]*)\|", re.MULTILINE)
    rows = row.findall(DOCUMENT.read_text("utf-8"))
    documented = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows}
    assert documented == {metric.name: (metric.kind, metric.labels) for metric in METRICS}
    for name, kind, _, unit in rows:
        assert name.endswith("_total") == (kind == "counter")
        assert ("_seconds" in name) == (unit.strip() == "seconds")
        assert ("_bytes" in name) == (unit.strip() == "bytes")
