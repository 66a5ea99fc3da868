"""The sending half of a link: offers, credit, requests, and what a lane takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pairkit import CONFIG
from sidekit import hear, make_side, said, segments_now
from wirekit import LAYOUT, STREAMS

from lynx_net.errors import (
    LocalProtocolError,
    RemoteProtocolError,
)
from lynx_net.wire.config import LinkConfig
from lynx_net.wire.connection import LinkCore
from lynx_net.wire.events import (
    RequestReceived,
    TransferDelivered,
)
from lynx_net.wire.messages import (
    Accept,
    Complete,
    Credit,
    OfferMessage,
    Refuse,
    Request,
)


def test_a_lane_takes_its_share_of_what_can_be_sent_together() -> None:
    side = make_side(segment_bytes=4096)
    core = side.core
    assert core.outgoing.batch_bytes(1 << 20) == 4096
    transfer = core.outgoing.offer(
        request_id="r",
        layout=LAYOUT,
        codec="none",
        codec_params={},
        streams=2,
        meta={},
        first_token=None,
        now=0.0,
    )
    core.scheduler.grant(transfer, 0, 100_000)
    core.outgoing.submit(transfer, [(0, 0, memoryview(bytes(60_000)), (), None)], 0.0)
    core.outgoing.submit(transfer, [(0, 1, memoryview(bytes(60_000)), (), None)], 0.0)  # no credit
    assert [core.outgoing.batch_bytes(most_bytes) for most_bytes in (1 << 20, 20_000, 0)] == [30_000, 20_000, 4096]


def test_our_own_ids_are_odd_where_we_connected_and_even_where_we_served() -> None:
    assert [make_side(initiator=True).offer(), make_side(initiator=False).offer()] == [1, 2]
    side = make_side()
    assert [side.offer(submit=False) for _ in range(3)] == [1, 3, 5]


def test_accept_and_credit_open_the_way() -> None:
    side = make_side(peer=replace(CONFIG, initial_credit_bytes=0))
    transfer = side.offer()
    assert isinstance(said(side)[0], OfferMessage)
    assert all(len(part.data) == 0 for part in segments_now(side))
    hear(side, Accept(transfer))
    hear(side, Credit(transfer, 0, 8192))
    assert 0 < sum(len(part.data) for part in segments_now(side)) <= 8192
    assert side.core.outgoing.stats(transfer).stream_bytes[1] == 0
    with pytest.raises(RemoteProtocolError, match="stream 2"):
        hear(side, Credit(transfer, STREAMS, 1))


def test_complete_means_delivered_only_when_everything_was_sent() -> None:
    side = make_side()
    transfer = side.offer()
    with pytest.raises(RemoteProtocolError, match="not sent whole"):
        hear(side, Complete(transfer))
    for stream in range(STREAMS):
        hear(side, Credit(transfer, stream, 10**6))
    segments_now(side)
    hear(side, Complete(transfer))
    assert side.log == [TransferDelivered(transfer)]
    hear(side, Complete(transfer))
    assert len(side.log) == 1
    with pytest.raises(LocalProtocolError, match="has ended"):
        side.core.outgoing.submit(transfer, [(0, 0, memoryview(b""), (), None)], 0.0)


def test_requests_reach_the_application_and_are_answered_once() -> None:
    side = make_side()
    hear(side, Request("a", {"tokens": [1]}))
    hear(side, Request("b", {}))
    assert side.log == [RequestReceived("a", {"tokens": [1]}), RequestReceived("b", {})]
    with pytest.raises(RemoteProtocolError, match="repeated"):
        hear(side, Request("a", {}))
    side.core.outgoing.refuse("a", "no such cache")
    assert said(side) == [Refuse("a", "no such cache")]
    side.offer(request_id="b")
    for again in "ab":
        hear(side, Request(again, {}))


def test_more_requests_than_may_wait_are_refused_at_once() -> None:
    side = make_side()
    for number in range(6):
        hear(side, Request(str(number), {}))
    assert side.requests == ["0", "1", "2", "3"]
    assert [answer.request_id for answer in said(side) if isinstance(answer, Refuse)] == ["4", "5"]


def test_an_offer_that_cannot_be_sent_leaves_no_trace() -> None:
    side = make_side()
    options: dict[str, Any] = {"codec": "none", "codec_params": {}, "streams": 2, "first_token": None, "now": 0.0}
    for wrong in ({"meta": {1: 2}}, {"meta": {"x": "y" * 300_000}}, {"streams": 17}, {"streams": 0}):
        with pytest.raises(LocalProtocolError):
            side.core.outgoing.offer(request_id="r", layout=LAYOUT, **({"meta": {}} | options | wrong))
    assert side.core.open_transfers() == []
    assert said(side) == []
    assert side.offer() == 1


@pytest.mark.parametrize(
    ("ours", "peers", "rate_bps", "used"),
    [
        (262_144, 65_536, None, 65_536),
        (65_536, 262_144, None, 65_536),
        (262_144, 262_144, 1e8, 28_672),
        (262_144, 262_144, 1e6, 4096),
        (262_144, 262_144, 1e12, 262_144),
    ],
)
def test_the_segment_size_is_what_both_sides_and_the_rate_allow(
    ours: int, peers: int, rate_bps: float | None, used: int
) -> None:
    side = make_side()
    core = LinkCore(
        link="x",
        lanes=1,
        initiator=True,
        config=LinkConfig(segment_bytes=ours),
        peer_segment_bytes=peers,
        peer_initial_credit=0,
        peer_deadline_s=5,
        book=side.book,
        route_grant=side.route,
        rate_bps=rate_bps,
        now=0.0,
    )
    assert core.outgoing.segment_bytes == used
