"""Timelines, counters of lanes, and what is logged at the end of transfers and links."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import pytest

import lynx_codec
import lynx_net
from lynx_net import LinkConfig, Observer, Timeline
from lynx_net.errors import ConnectionLostError, TransferAbortedError
from lynx_net.testing.clock import run_virtual
from lynx_net.testing.relay import FaultyRelay
from lynx_net.wire.stats import WAIT_REASONS, LaneStats

if TYPE_CHECKING:
    from lynx_net import Link

RATE_BPS = 4e6


class Seen(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.timelines: list[Timeline] = []
        self.calls: list[str] = []

    def link_opened(self, link: Link) -> None:
        self.calls.append("opened")

    def transfer_ended(self, link: Link, timeline: Timeline) -> None:
        self.calls.append("transfer")
        self.timelines.append(timeline)

    def link_ended(self, link: Link) -> None:
        assert link.error is not None
        self.calls.append("ended")


async def _receive(server: Any, cache: Any, link: Any, **options: Any) -> tuple[Any, Any]:
    sending = asyncio.create_task(cache.send_on(link, **options))
    transfer = await anext(aiter(server))
    await transfer.complete
    return transfer, await sending


def _in_order(*times: float | None) -> bool:
    assert all(time_s is not None for time_s in times), times
    return list(times) == sorted(times)  # type: ignore[type-var]


async def test_the_timelines_of_both_sides(make_cache: Any) -> None:
    """On a slow link in virtual time every phase takes the time that its bytes take."""
    cache = make_cache(layers=3, tokens=512)
    sender, receiver = Seen(), Seen()

    async def run() -> tuple[Any, Any]:
        async with (
            lynx_net.serve("memory://timeline", observers=[receiver]) as server,
            lynx_net.connect(server.url, rate=RATE_BPS, observers=[sender]) as link,
        ):
            transfer, sent = await _receive(server, cache, link)
            assert transfer.timeline() == receiver.timelines[0]
            assert sent.timeline() == sender.timelines[0]
            return transfer, sent

    transfer, sent = await asyncio.to_thread(run_virtual, run())
    outgoing, incoming = sender.timelines[0], receiver.timelines[0]
    assert sender.calls == receiver.calls == ["opened", "transfer", "ended"]
    assert _in_order(
        outgoing.offered_s,
        incoming.offered_s,
        incoming.accepted_s,
        outgoing.accepted_s,
        outgoing.last_segment_s,
        incoming.last_segment_s,
        incoming.ended_s,
        outgoing.ended_s,
    )
    assert _in_order(incoming.offered_s, incoming.first_segment_s, incoming.layers_ready_s[0][0])
    assert _in_order(*incoming.layers_ready_s[0], incoming.anchor_ready_s, incoming.residual_ready_s, incoming.ended_s)
    assert _in_order(*reversed(incoming.layers_ready_s[1]), incoming.residual_ready_s)
    anchor_bytes, residual_bytes = incoming.stream_bytes
    assert incoming.anchor_ready_s == pytest.approx(anchor_bytes * 8 / RATE_BPS, rel=0.1)
    assert incoming.residual_ready_s == pytest.approx((anchor_bytes + residual_bytes) * 8 / RATE_BPS, rel=0.1)
    assert incoming.rate_bps == pytest.approx(RATE_BPS, rel=0.1)
    assert outgoing.layers_ready_s == outgoing.streams_ready_s == ()
    assert (outgoing.stream_bytes, outgoing.stream_segments) == (incoming.stream_bytes, incoming.stream_segments)
    assert tuple(sent.stats.stream_bytes) == tuple(transfer.stats.stream_bytes) == incoming.stream_bytes
    assert incoming.error is incoming.error_type is outgoing.error is None


async def test_a_running_transfer_has_a_timeline(make_cache: Any) -> None:
    cache = make_cache(layers=3, tokens=512)

    async def run() -> None:
        async with (
            lynx_net.serve("memory://running") as server,
            lynx_net.connect(server.url, rate=RATE_BPS) as link,
        ):
            sending = asyncio.create_task(cache.send_on(link))
            transfer = await anext(aiter(server))
            await transfer.layer_ready(1)
            (outgoing,), (incoming,) = link.timelines(), transfer.link.timelines()
            assert (outgoing.direction, incoming.direction) == ("outgoing", "incoming")
            assert incoming.ended_s is incoming.anchor_ready_s is incoming.layers_ready_s[0][2] is None
            assert incoming.layers_ready_s[0][1] is not None
            assert 0 < incoming.total_bytes < outgoing.total_bytes + 1
            assert "under way" in incoming.describe()
            await transfer.complete
            await sending
            assert link.timelines() == transfer.link.timelines() == []

    await asyncio.to_thread(run_virtual, run())


async def test_a_failed_transfer_keeps_what_was_ready_and_says_why(make_cache: Any) -> None:
    cache = make_cache(layers=3, tokens=512)
    sender, receiver = Seen(), Seen()

    async def run() -> None:
        async with (
            lynx_net.serve("memory://failed", observers=[receiver]) as server,
            lynx_net.connect(server.url, rate=RATE_BPS, observers=[sender]) as link,
        ):
            sending = asyncio.create_task(cache.send_on(link))
            transfer = await anext(aiter(server))
            await transfer.anchor_ready
            transfer.cancel("the user has gone")
            with pytest.raises(TransferAbortedError):
                await sending

    await asyncio.to_thread(run_virtual, run())
    (outgoing,), (incoming,) = sender.timelines, receiver.timelines
    assert incoming.error_type == outgoing.error_type == "TransferAbortedError"
    assert "the user has gone" in (outgoing.error or "")
    assert _in_order(incoming.anchor_ready_s, incoming.ended_s, outgoing.ended_s)
    assert incoming.residual_ready_s is None
    assert incoming.last_segment_s is not None  # the end of the anchors


async def test_a_lost_link_ends_its_transfers_before_itself(make_cache: Any) -> None:
    """Also those that nobody awaits; each exactly once."""
    cache = make_cache(layers=6, tokens=1000)
    sender, receiver = Seen(), Seen()
    async with lynx_net.serve("tcp://127.0.0.1:0", observers=[receiver]) as server:
        async with lynx_net.connect(server.url, rate="4Mbit", observers=[sender]) as link:
            sending = [asyncio.create_task(cache.send_on(link, f"r{index}")) for index in range(3)]
            transfer = await anext(aiter(server))
            await transfer.layer_ready(0)
        outcomes = await asyncio.gather(*sending, return_exceptions=True)
        await transfer.link.closed()
    assert all(isinstance(outcome, ConnectionLostError) for outcome in outcomes)
    for seen in (sender, receiver):
        assert seen.calls == ["opened", "transfer", "transfer", "transfer", "ended"]
        assert {timeline.error_type for timeline in seen.timelines} == {"ConnectionLostError"}


async def test_a_cache_with_nothing_in_it_is_accepted_and_a_warning(
    make_cache: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(tokens=0)
    async with lynx_net.serve("tcp://127.0.0.1:0") as server, lynx_net.connect(server.url) as link:
        transfer, sent = await _receive(server, cache, link)
    for timeline in (transfer.timeline(), sent.timeline()):
        assert timeline.accepted_s is not None
        assert timeline.ended_s is not None
        assert timeline.first_segment_s is timeline.rate_bps is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert all("request 'r'" in warning and "moved nothing" in warning for warning in warnings)


async def test_transport_and_rates_are_logged(make_cache: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lynx_net")
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        async with lynx_net.connect(server.url, rate="50Mbit", lanes=2) as link:
            await _receive(server, make_cache(), link)
        await link.closed()
    told = [record.getMessage() for record in caplog.records]
    assert sum("link to tcp://127.0.0.1" in line and "2 lanes moved by blocking threads" in line for line in told) == 2
    assert sum("transfer 1 of request 'r'" in line and "Mbit/s; it is complete" in line for line in told) == 2
    ends = [line for line in told if "link to" in line and "ended after" in line]
    assert len(ends) == 2
    assert all("over 2 lanes" in line and "Mbit/s" in line for line in ends)


async def test_an_observer_that_fails_costs_nobody_else(make_cache: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def transfer_ended(self, link: Link, timeline: Timeline) -> None:
            raise RuntimeError("a full disk")

    seen = Seen()
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", observers=[Broken(), seen]) as server,
        lynx_net.connect(server.url) as link,
    ):
        await _receive(server, make_cache(), link)
    assert seen.calls == ["opened", "transfer", "ended"]
    assert any("a full disk" in (record.exc_text or "") for record in caplog.records)


async def test_what_goes_again_counts_once_for_the_transfer_and_again_for_the_lane(make_cache: Any) -> None:
    cache = make_cache(layers=12, tokens=1000)
    config = LinkConfig(resume_s=5)
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", config=config) as server,
        FaultyRelay.to("127.0.0.1", int(server.url.rpartition(":")[2])) as relay,
        lynx_net.connect(relay.url, rate="40Mbit", lanes=2, config=config) as link,
    ):
        async with link.send("r", cache.layout, codec="lynx", fine=cache.fine) as sent:
            transfer = await anext(aiter(server))
            for begin, end in ((0, 3), (4, 7), (8, 11)):
                await cache.write_to(sent, range(begin, end))
                await transfer.layer_ready(end - 1)
                relay.stall()
                before = sum(lane.sent_segments for lane in link.lane_stats)
                await cache.write_to(sent, range(end, end + 1))
                while sum(lane.sent_segments for lane in link.lane_stats) == before:  # noqa: ASYNC110  # has no event
                    await asyncio.sleep(0.002)
                relay.cut()  # what was sent last has not come
                relay.resume()
        await transfer.complete
        assert sent.stats.stream_bytes == transfer.stats.stream_bytes
        assert sent.stats.stream_segments == transfer.stats.stream_segments
        resent = sum(lane.resent_frames for lane in link.lane_stats)
        assert resent == link.core.resent_frames
        assert 0 < sent.timeline().resent_segments <= resent
        assert transfer.timeline().resent_segments == 0
        assert sum(lane.reopened for lane in link.lane_stats) == relay.connections - 2 > 0
        segments = sum(lane.sent_segments for lane in link.lane_stats)
        assert segments == sent.stats.segments + sent.stats.resent_segments


@pytest.mark.parametrize("url", ["memory://lanes", "tcp://127.0.0.1:0"])
async def test_lanes_count_what_they_move(url: str, make_cache: Any) -> None:
    """Both pumps: what one side has sent is what the other has received, lane by lane."""
    cache = make_cache(layers=6, tokens=1000)
    async with lynx_net.serve(url) as server:
        async with lynx_net.connect(server.url, rate="20Mbit", lanes=3) as link:
            transfer, sent = await _receive(server, cache, link)
        await transfer.link.closed()
    ours, theirs = link.lane_stats, transfer.link.lane_stats
    assert len(ours) == len(theirs) == 3
    assert sum(lane.sent_segments for lane in ours) == sent.stats.segments == transfer.stats.segments
    for left, right in zip(ours, theirs, strict=True):
        assert left.sent_segments == right.received_segments > 0
        # The farewell may find nobody who reads.
        assert left.sent_control_frames - 1 <= right.received_control_frames <= left.sent_control_frames
        assert left.sent_bytes - 100 < right.received_bytes <= left.sent_bytes
    for one in (ours, theirs):
        # The greetings went before the link began; after them control frames keep to lane 0.
        assert one[0].sent_control_frames > 0
        assert one[1].sent_control_frames == one[2].sent_control_frames == 0
    headers = 48 * transfer.stats.segments
    assert sum(lane.received_bytes for lane in theirs[1:]) < transfer.stats.total_bytes + headers
    assert sum(lane.received_bytes for lane in theirs) > transfer.stats.total_bytes + headers


async def test_lanes_tell_why_they_waited(make_cache: Any) -> None:
    """Three seconds without work, two without credit since another transfer holds the memory, then the rate."""
    cache = make_cache(layers=6, tokens=512)
    codec = lynx_codec.get_codec("lynx")
    need_bytes = sum(sum(codec.stream_bytes(page.shape, wide=True)) for page in cache.layout.pages())
    config = LinkConfig(memory_bytes=need_bytes * 3 // 2, initial_credit_bytes=0)

    async def run() -> dict[str, float]:
        async with (
            lynx_net.serve("memory://waits", config=config) as server,
            lynx_net.connect(server.url, rate=RATE_BPS) as link,
        ):
            await asyncio.sleep(3)
            assert link.lane_stats[0].waited_s("idle", link.clock()) == pytest.approx(3, abs=0.01)
            holder = link.send("holder", cache.layout)
            second = asyncio.create_task(cache.send_on(link, "second"))
            await asyncio.sleep(2)
            assert link.lane_stats[0].waited_s("credit", link.clock()) == pytest.approx(2, abs=0.01)
            holder.cancel()
            sent = await second
            now, stats = link.clock(), link.lane_stats[0]
            moved_s = sent.stats.total_bytes * 8 / RATE_BPS
            assert now == pytest.approx(5 + moved_s, abs=0.05)
            waited = {reason: stats.waited_s(reason, now) for reason in WAIT_REASONS}
            assert sum(waited.values()) == pytest.approx(now, abs=0.01)
            return waited | {"moved": moved_s}

    waited = await asyncio.to_thread(run_virtual, run())
    assert waited["pacing"] == pytest.approx(waited["moved"], rel=0.1)
    assert waited["credit"] == pytest.approx(2, abs=0.05)


def test_a_wait_that_lasts_is_counted() -> None:
    stats = LaneStats()
    times = iter([1.0, 4.0])
    with stats.waiting("credit", times.__next__):
        assert stats.waited_s("credit", 3.0) == 2.0
        assert stats.waited_s("idle", 3.0) == 0.0
    with contextlib.suppress(TimeoutError), stats.waiting("pacing", iter([5.0, 9.0]).__next__):
        raise TimeoutError
    assert stats.waited_s("credit", 20.0) == 3.0
    assert stats.waited_s("pacing", 20.0) == 4.0
