"""One side of a link: the table and the rules at the head of connection.py, line by line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pairkit import CONFIG, Pair, Side
from wirekit import LAYOUT, NEED_BYTES, STREAMS, page_bytes, page_sizes, segments_of, sent_size

from lynx_net.errors import (
    ConnectionLostError,
    FlowControlError,
    IntegrityError,
    LocalProtocolError,
    RemoteProtocolError,
    TransferAbortedError,
)
from lynx_net.wire import connection
from lynx_net.wire.config import LinkConfig
from lynx_net.wire.connection import (
    OfferReceived,
    PeerClosed,
    RequestReceived,
    RequestRefused,
    SegmentAwaitsOffer,
    TransferDelivered,
    TransferFailed,
)
from lynx_net.wire.frames import HEADER_BYTES, SegmentHeader, checksum
from lynx_net.wire.layout import CacheLayout
from lynx_net.wire.messages import (
    Abort,
    AbortCode,
    Accept,
    Bye,
    Complete,
    Credit,
    Hello,
    Message,
    OfferMessage,
    Ping,
    Proof,
    Refuse,
    Reject,
    Request,
    decode_message,
)
from lynx_net.wire.receiving import ReceiveState, TransferComplete
from lynx_net.wire.scheduler import NothingToSend, SendBytes, seal

EMPTY = CacheLayout(layers=1, tokens=0, heads=1, key_size=4, value_size=4)


def make_side(*, initiator: bool = True, peer: LinkConfig = CONFIG, **settings: Any) -> Side:
    return Side(initiator=initiator, lanes=2, config=replace(CONFIG, **settings), peer=peer)


def said(side: Side) -> list[Message]:
    """The control messages that wait to be sent, taken out."""
    messages: list[Message] = []
    while side.core.scheduler.has_control():
        chosen = side.core.next_send(0, side.now)
        assert isinstance(chosen, SendBytes)
        messages.append(decode_message(bytes(seal([chosen])[0])[HEADER_BYTES:]))
    return messages


def hear(side: Side, message: Message) -> None:
    side.handle(side.core.message(message, side.now))


def an_offer(transfer: int = 2, **changes: Any) -> OfferMessage:
    offer = OfferMessage(transfer, "r", LAYOUT.to_wire(), "none", {}, STREAMS, 4096, {}, None)
    return replace(offer, **changes)


def receiving(transfer: int = 2, **settings: Any) -> Side:
    """A side that has accepted a transfer."""
    side = make_side(**settings)
    hear(side, an_offer(transfer))
    side.take()
    assert said(side)[0] == Accept(transfer)
    return side


def arrive(side: Side, header: SegmentHeader, payload: bytes) -> memoryview | None:
    view = side.core.place(header, side.now)
    if view is not None:
        view[:] = payload
    side.handle(side.core.segment(header, checksum(view), side.now))
    return view


def segments_now(side: Side) -> list[SendBytes]:
    chosen: list[SendBytes] = []
    while isinstance(part := side.core.next_send(1, side.now), SendBytes):
        chosen.append(part)
    return chosen


# ---- the table, one message after the other


def test_offer_is_pending_until_taken() -> None:
    side = make_side(initial_credit_bytes=0)
    hear(side, an_offer(2))
    assert side.log == [OfferReceived(an_offer(2), LAYOUT)]
    assert side.core.open_transfers() == [2]
    side.take()
    assert said(side) == [
        Accept(2),
        Credit(2, 0, CONFIG.anchor_window_bytes),
        Credit(2, 1, CONFIG.residual_window_bytes),
    ]


def test_nothing_is_granted_beyond_what_a_transfer_can_need() -> None:
    """The initial credit covers it all, so that accepting it is all there is to say."""
    side = make_side(initial_credit_bytes=1 << 20)
    hear(side, an_offer(2, streams=1))
    side.take()
    assert said(side) == [Accept(2)]


def test_a_lane_takes_its_share_of_what_can_be_sent_together() -> None:
    side = make_side(segment_bytes=4096)
    core = side.core
    assert core.batch_bytes(1 << 20) == 4096
    transfer = core.offer(
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
    core.submit(transfer, 0, 0, memoryview(bytes(60_000)), 0.0)
    core.submit(transfer, 0, 1, memoryview(bytes(60_000)), 0.0)  # no credit
    assert [core.batch_bytes(most_bytes) for most_bytes in (1 << 20, 20_000, 0)] == [30_000, 20_000, 4096]


@pytest.mark.parametrize(("initiator", "good", "bad"), [(True, [2, 4, 100], [1, 0, 100]), (False, [1, 3, 99], [2, 99])])
def test_offer_ids_have_the_peers_parity_and_grow(initiator: bool, good: list[int], bad: list[int]) -> None:
    side = make_side(initiator=initiator)
    for transfer in good:
        hear(side, an_offer(transfer))
    for transfer in bad:
        with pytest.raises(RemoteProtocolError, match=f"transfer id {transfer},"):
            hear(side, an_offer(transfer))


def test_our_own_ids_are_odd_where_we_connected_and_even_where_we_served() -> None:
    assert [make_side(initiator=True).offer(), make_side(initiator=False).offer()] == [1, 2]
    side = make_side()
    assert [side.offer(submit=False) for _ in range(3)] == [1, 3, 5]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"layout": {}}, AbortCode.MISUSE),
        ({"layout": LAYOUT.to_wire() | {"layers": 1 << 40}}, AbortCode.MISUSE),
        ({"streams": 0}, AbortCode.MISUSE),
        ({"streams": 17}, AbortCode.MISUSE),
        ({"segment_bytes": 4095}, AbortCode.MISUSE),
        ({"segment_bytes": 4097}, AbortCode.MISUSE),
    ],
    ids=str,
)
def test_an_offer_that_makes_no_sense_is_refused_alone(changes: dict[str, Any], code: int) -> None:
    side = make_side()
    hear(side, an_offer(2, **changes))
    (answer,) = said(side)
    assert isinstance(answer, Abort)
    assert (answer.transfer, answer.code) == (2, code)
    assert isinstance(side.ended[2], TransferFailed)
    assert side.core.open_transfers() == []
    assert side.core.place(SegmentHeader(2, 0, 0, 0, 1, 1, 0), 0.0) is None
    hear(side, an_offer(4))
    assert side.core.open_transfers() == [4]


def test_more_offers_than_may_wait_are_refused() -> None:
    side = make_side()
    for transfer in range(2, 20, 2):
        hear(side, an_offer(transfer))
    assert [answer.code for answer in said(side) if isinstance(answer, Abort)] == [AbortCode.OVERLOADED] * 3
    assert len(side.core.open_transfers()) == CONFIG.max_pending_offers
    side.abort(2)
    hear(side, an_offer(20))
    assert 20 in side.core.open_transfers()


def test_a_transfer_that_never_fits_is_refused_and_one_that_does_later_waits() -> None:
    side = make_side()
    for transfer in (2, 4, 6, 8):
        hear(side, an_offer(transfer))
    side.take(need_bytes=CONFIG.memory_bytes + 1)
    (answer,) = said(side)
    assert isinstance(answer, Abort)
    assert answer.code == AbortCode.TOO_LARGE
    for _ in range(3):
        side.take()
    assert [message for message in said(side) if isinstance(message, Accept)] == [Accept(4), Accept(6)]
    side.abort(4)
    assert Accept(8) in said(side)


def test_what_waiting_transfers_may_send_is_bounded() -> None:
    side = make_side()
    side.book.early_bytes = 5000 + 20_000
    for transfer in (2, 4, 6, 8):
        hear(side, an_offer(transfer))
    for _ in range(4):
        side.take()
    assert {transfer: type(event) for transfer, event in side.ended.items()} == {8: TransferFailed}
    assert said(side)[-1] == Abort(8, AbortCode.OVERLOADED, "too many transfers wait at this receiver")
    side.abort(2)
    assert side.book.early_reserved_bytes == 0


def test_taking_an_offer_that_was_aborted_meanwhile_does_nothing() -> None:
    side = make_side()
    hear(side, an_offer(2))
    (event,) = side.offers
    hear(side, Abort(2, AbortCode.CANCELLED, "changed my mind"))
    assert side.core.take(event.offer, event.layout, page_sizes, NEED_BYTES, 0.0) == []
    assert side.core.open_transfers() == []
    assert side.book.reserved_bytes == 0


def test_accept_and_credit_open_the_way() -> None:
    side = make_side(peer=replace(CONFIG, initial_credit_bytes=0))
    transfer = side.offer()
    assert isinstance(said(side)[0], OfferMessage)
    assert all(len(part.data) == 0 for part in segments_now(side))
    hear(side, Accept(transfer))
    hear(side, Credit(transfer, 0, 8192))
    assert 0 < sum(len(part.data) for part in segments_now(side)) <= 8192
    assert side.core.send_stats(transfer).stream_bytes[1] == 0
    with pytest.raises(RemoteProtocolError, match="stream 2"):
        hear(side, Credit(transfer, STREAMS, 1))


@pytest.mark.parametrize(
    "message", [Accept(1), Credit(1, 0, 10**6), Credit(1, 99, 1), Complete(1), Abort(1, 1, "x")], ids=str
)
@pytest.mark.parametrize("ended", ["unknown", "aborted"])
def test_what_crossed_an_end_is_ignored(message: Message, ended: str) -> None:
    side = make_side()
    if ended == "aborted":
        side.abort(side.offer())
    before = list(side.log)
    said(side)
    hear(side, message)
    assert side.log == before
    assert said(side) == []
    assert isinstance(side.core.next_send(1, 0.0), NothingToSend)


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
        side.core.submit(transfer, 0, 0, memoryview(b""), 0.0)


def test_an_empty_transfer_is_accepted_and_complete_at_once() -> None:
    side = make_side()
    hear(side, an_offer(2, layout=EMPTY.to_wire()))
    side.take()
    assert said(side) == [Accept(2), Complete(2)]
    assert side.ended == {2: TransferComplete(2)}
    assert side.core.open_transfers() == []


@pytest.mark.parametrize("state", ["offered", "pending", "accepted", "waiting"])
def test_abort_ends_a_transfer_in_every_open_state(state: str) -> None:
    side = make_side()
    transfer = 2
    if state == "offered":
        transfer = side.offer()
    else:
        if state == "waiting":
            side.book.memory_bytes = NEED_BYTES
            side.book.reserved_bytes = 1
        hear(side, an_offer(2))
        if state != "pending":
            side.take()
        assert side.book.is_accepted("the link", 2) == (state == "accepted")
    hear(side, Abort(transfer, AbortCode.CANCELLED, "why not"))
    event = side.ended[transfer]
    assert isinstance(event, TransferFailed)
    assert isinstance(event.error, TransferAbortedError)
    assert str(event.error) == "cancelled by the peer: why not"
    assert side.core.open_transfers() == []
    hear(side, Abort(transfer, AbortCode.CANCELLED, "again"))
    assert side.core.abort(transfer, 1, "again") == []


def test_the_reason_of_an_abort_always_travels() -> None:
    side = make_side()
    transfer = side.offer()
    side.handle(side.core.abort(transfer, AbortCode.SENDER_FAILED, "no file \udcff" + "x" * 5000))
    answer = said(side)[-1]
    assert isinstance(answer, Abort)
    assert answer.reason.startswith("no file ?xxx")
    assert len(answer.reason) == connection.MAX_REASON
    assert transfer in side.ended


def test_requests_reach_the_application_and_are_answered_once() -> None:
    side = make_side()
    hear(side, Request("a", {"tokens": [1]}))
    hear(side, Request("b", {}))
    assert side.log == [RequestReceived("a", {"tokens": [1]}), RequestReceived("b", {})]
    with pytest.raises(RemoteProtocolError, match="repeated"):
        hear(side, Request("a", {}))
    side.core.refuse("a", "no such cache")
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


def test_refuse_and_bye_are_events() -> None:
    side = make_side()
    hear(side, Refuse("a", "no"))
    hear(side, Bye("going home"))
    assert side.log == [RequestRefused("a", "no"), PeerClosed("going home")]


@pytest.mark.parametrize("message", [Ping()])
def test_ping_does_nothing(message: Message) -> None:
    side = make_side()
    hear(side, message)
    assert side.log == []
    assert said(side) == []


@pytest.mark.parametrize("message", [Hello(2, b"", b"", 0, 1, 4096, 0, 1, None, b""), Proof(b""), Reject("no")])
def test_a_handshake_on_a_link_that_is_up(message: Message) -> None:
    with pytest.raises(RemoteProtocolError, match="already up"):
        hear(make_side(), message)


@pytest.mark.parametrize("message", [an_offer(2, streams=0), Request("x", {})], ids=["offers", "requests"])
def test_a_peer_that_asks_for_ever_and_never_reads_is_given_up(
    message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_CONTROL_BACKLOG_BYTES", 10_000)
    side = make_side(max_pending_requests=1)
    hear(side, Request("first", {}))

    def ask_for_ever() -> None:
        for number in range(10_000):
            if isinstance(message, OfferMessage):
                hear(side, replace(message, transfer=2 * number + 2))
            else:
                hear(side, Request(str(number), {}))

    with pytest.raises(RemoteProtocolError, match="without reading"):
        ask_for_ever()
    assert side.core.scheduler.control_bytes < 12_000


# ---- segments


def test_where_segments_go() -> None:
    side = make_side()
    header, payload = segments_of(2, 0, 0)[0]
    with pytest.raises(SegmentAwaitsOffer):
        side.core.place(header, 0.0)
    hear(side, an_offer(2))
    with pytest.raises(SegmentAwaitsOffer):
        side.core.place(header, 0.0)
    side.take()
    assert arrive(side, header, payload) is not None
    assert side.core.place(header, 0.0) is None
    with pytest.raises(RemoteProtocolError, match="not the peer's"):
        side.core.place(header._replace(transfer=1), 0.0)
    side.abort(2)
    assert side.core.place(header, 0.0) is None
    with pytest.raises(SegmentAwaitsOffer):
        side.core.place(header._replace(transfer=4), 0.0)
    assert side.core.place(header._replace(transfer=0), 0.0) is None


def test_late_bytes_of_an_aborted_transfer_are_harmless() -> None:
    side = receiving()
    header, payload = segments_of(2, 0, 0)[0]
    view = side.core.place(header, 0.0)
    assert view is not None
    side.abort(2)
    before = list(side.log)
    view[:] = payload
    assert side.core.segment(header, checksum(view), 0.0) == []
    assert side.core.decoded(2, [0], 0) == []
    assert side.core.receive_state(2) is None
    assert side.log == before


def test_a_flipped_byte_aborts_the_transfer_and_not_the_link() -> None:
    side = receiving()
    header, payload = segments_of(2, 2, 0)[0]
    broken = bytes([payload[0] ^ 1]) + payload[1:]
    arrive(side, header, broken)
    event = side.ended[2]
    assert isinstance(event, TransferFailed)
    assert isinstance(event.error, IntegrityError)
    answer = said(side)[-1]
    assert isinstance(answer, Abort)
    assert answer.code == AbortCode.INTEGRITY
    assert answer.reason == "checksum mismatch in transfer 2, layer 0 (key), stream 0"
    hear(side, an_offer(4))


def test_bytes_beyond_the_credit_end_the_link() -> None:
    side = receiving()

    def send_all() -> None:
        for page in range(LAYOUT.page_count):
            for header, payload in segments_of(2, page, 0):
                view = side.core.place(header, 0.0)
                assert view is not None
                view[:] = payload  # its arrival is not reported: no new credit

    with pytest.raises(FlowControlError):
        send_all()


# ---- the end of the link


def test_fail_all_ends_everything_once_and_frees_the_book() -> None:
    side = make_side()
    mine = side.offer()
    for transfer in (2, 4, 6, 8):
        hear(side, an_offer(transfer))
    for _ in range(3):
        side.take()
    error = ConnectionLostError("gone")
    side.handle(side.core.fail_all(error))
    assert {transfer: event for transfer, event in side.ended.items()} == {
        transfer: TransferFailed(transfer, error) for transfer in (mine, 2, 4, 6, 8)
    }
    assert side.core.fail_all(error) == []
    assert side.book.reserved_bytes == side.book.early_reserved_bytes == 0
    assert side.core.queued_bytes(mine, 0) == 0


def test_bye_is_announced() -> None:
    side = make_side()
    side.core.bye("closed")
    assert said(side) == [Bye("closed")]


def test_an_offer_that_cannot_be_sent_leaves_no_trace() -> None:
    side = make_side()
    options: dict[str, Any] = {"codec": "none", "codec_params": {}, "streams": 2, "first_token": None, "now": 0.0}
    for wrong in ({"meta": {1: 2}}, {"meta": {"x": "y" * 300_000}}, {"streams": 17}, {"streams": 0}):
        with pytest.raises(LocalProtocolError):
            side.core.offer(request_id="r", layout=LAYOUT, **({"meta": {}} | options | wrong))
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
    core = connection.LinkCore(
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
    assert core.segment_bytes == used


@pytest.mark.parametrize(
    "wrong",
    [
        {"deadline_s": 0},
        {"progress_timeout_s": -1},
        {"deadline_s": float("nan")},
        {"segment_bytes": 4095},
        {"segment_bytes": (1 << 24) + 1},
        {"anchor_window_bytes": 8191},
        {"residual_window_bytes": 8191},
        {"early_residual_bytes": -1},
        {"initial_credit_bytes": -1},
        {"memory_bytes": 0},
        {"max_pending_offers": 0},
        {"max_pending_requests": 0},
        {"send_queue_bytes": 0},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        replace(CONFIG, **wrong)


# ---- time


def run_clock(side: Side, until_s: float, step_s: float = 0.0) -> list[tuple[float, Message]]:
    """Let time pass, calling `timer` when it wants to be called; what was said, and when."""
    spoken: list[tuple[float, Message]] = []
    while True:
        due = max(side.core.next_timer(), side.now + step_s)
        if due > until_s:
            side.now = until_s
            return spoken
        if due <= side.now:
            due = side.now + 1e-9
        side.now = due
        side.core.heard(side.now)  # the peer lives
        side.timer()
        spoken += [(side.now, message) for message in said(side)]


def test_an_idle_link_pings_ten_times_in_a_deadline() -> None:
    spoken = run_clock(make_side(), 6.01)
    assert [message for _, message in spoken] == [Ping()] * 10
    assert [at for at, _ in spoken] == pytest.approx([0.6 * n for n in range(1, 11)])


def test_the_shorter_deadline_of_both_sets_the_pace_and_an_absurd_one_does_not() -> None:
    hasty = make_side(peer=replace(CONFIG, deadline_s=0.9))
    assert len(run_clock(hasty, 0.91)) == 10
    absurd = make_side(peer=replace(CONFIG, deadline_s=1e-6))
    assert len(run_clock(absurd, 1)) <= 100


def test_who_sends_anything_does_not_ping() -> None:
    side = make_side()
    for count in range(1, 10):
        side.core.bye("x")
        said(side)
        assert run_clock(side, count / 2) == []


def test_silence_is_measured_from_the_last_byte() -> None:
    side = make_side()
    side.core.heard(10.0)
    assert not side.core.is_silent(10.0 + CONFIG.deadline_s - 0.01)
    assert side.core.is_silent(10.0 + CONFIG.deadline_s)
    assert make_side(deadline_s=1).core.next_timer() <= 1


def aborts(spoken: list[tuple[float, Message]]) -> list[tuple[float, Abort]]:
    return [(at, message) for at, message in spoken if isinstance(message, Abort)]


def test_a_sender_that_sends_nothing_of_what_it_owes_is_a_stall() -> None:
    side = receiving(progress_timeout_s=30)
    header, payload = segments_of(2, 0, 0)[0]
    assert not aborts(run_clock(side, 20))
    arrive(side, header, payload)
    assert not aborts(run_clock(side, 49.9))
    ((at, abort),) = aborts(run_clock(side, 60))
    assert at == pytest.approx(50, rel=1e-6)
    assert (abort.transfer, abort.code) == (2, AbortCode.STALLED)
    assert "no byte of transfer 2 arrived for 30 s" in str(side.ended[2])
    hear(side, an_offer(4))


def test_a_segment_that_crawls_is_not_a_stall() -> None:
    side = receiving(progress_timeout_s=30)
    header, _ = segments_of(2, 0, 0)[0]
    assert side.core.place(header, side.now) is not None
    for second in range(1, 200, 20):
        assert not aborts(run_clock(side, second))
        side.core.heard(side.now, header)
    assert len(aborts(run_clock(side, 300))) == 1


def test_residuals_that_wait_behind_anchors_on_the_same_link_are_not_a_stall() -> None:
    side = receiving(progress_timeout_s=30)
    for page in range(LAYOUT.page_count):
        for header, payload in segments_of(2, page, 0):
            arrive(side, header, payload)
            while side.to_decode:
                side.decode()
    hear(side, an_offer(4))
    side.take()
    anchors = [part for page in range(LAYOUT.page_count) for part in segments_of(4, page, 0)]
    for number, (header, payload) in enumerate(anchors):
        assert not aborts(run_clock(side, 29 * (number + 1)))
        arrive(side, header, payload)
        while side.to_decode:
            side.decode()
    assert len(anchors) * 29 > 300
    assert [abort.transfer for _, abort in aborts(run_clock(side, side.now + 31))] == [2, 4]


SMALL = [page for page in range(LAYOUT.page_count) if sent_size(page, 0) in (1, 4095)]


def test_our_own_slow_decoder_is_not_the_senders_stall_and_a_hanging_one_ends_the_transfer() -> None:
    side = receiving(progress_timeout_s=30, initial_credit_bytes=0)
    for page in SMALL:
        arrive(side, *segments_of(2, page, 0)[0])
    assert len(side.to_decode) == 3
    for second in (29, 58):
        assert not aborts(run_clock(side, second))
        side.decode()
    ((at, abort),) = aborts(run_clock(side, 100))
    assert 88 <= at <= 90.1
    assert abort == Abort(2, AbortCode.STALLED, "this receiver decoded nothing for 30 s")


def test_residuals_that_wait_for_the_anchors_of_another_link_are_not_a_stall() -> None:
    side = receiving(progress_timeout_s=30, initial_credit_bytes=0)
    other = ReceiveState(1, LAYOUT, STREAMS, 4096, page_sizes, [8192, 8192], 0)
    for page in range(LAYOUT.page_count):
        for header, payload in segments_of(2, page, 0):
            arrive(side, header, payload)
            while side.to_decode:
                side.decode()
    side.book.add("another link", other, 0)
    arrive(side, *segments_of(2, 0, 1)[0])  # 4096 bytes: what is left of the window is less than the next segment
    said(side)
    spoken = run_clock(side, 300)
    assert not aborts(spoken)
    assert [message.transfer for _, message in spoken if isinstance(message, Credit)] == [2] * 150
    side.book.remove("another link", 1)
    assert len(aborts(run_clock(side, 400))) == 1


def test_a_transfer_that_waits_for_memory_is_not_a_stall_and_its_sender_is_told() -> None:
    pair = Pair(1, config=replace(CONFIG, progress_timeout_s=30, memory_bytes=NEED_BYTES))
    pair.left.offer(submit=False)
    waiting = pair.left.offer()
    pair.settle()
    for _ in range(100):
        pair.advance(1)
        for side in pair.sides:
            side.timer()
        pair.left.core.heard(pair.left.now)
        first = pair.left.unsubmitted[1]
        if first and pair.left.now % 5 == 0:
            pair.left.submit(1)
        pair.settle()
    assert waiting not in pair.left.ended
    while pair.left.unsubmitted[1]:
        pair.left.submit(1)
    pair.settle()
    assert pair.left.ended[waiting] == TransferDelivered(waiting)


def test_a_receiver_that_grants_nothing_and_says_nothing_is_a_stall() -> None:
    side = make_side(progress_timeout_s=30)
    transfer = side.offer()
    said(side)
    segments_now(side)
    run_clock(side, 20)
    hear(side, Credit(transfer, 0, 0))
    assert not aborts(run_clock(side, 49))
    ((at, abort),) = aborts(run_clock(side, 60))
    assert at == pytest.approx(50, rel=1e-6)
    assert abort.code == AbortCode.STALLED
    assert "said nothing" in abort.reason


def test_a_receiver_that_never_completes_what_it_has_is_a_stall() -> None:
    side = make_side(progress_timeout_s=30)
    transfer = side.offer()
    for stream in range(STREAMS):
        hear(side, Credit(transfer, stream, 10**6))
    segments_now(side)
    assert len(aborts(run_clock(side, 31))) == 1


def test_a_sender_with_credit_waits_for_its_lane_for_ever() -> None:
    side = make_side(progress_timeout_s=30)
    transfer = side.offer()
    hear(side, Credit(transfer, 0, 10**6))
    assert not aborts(run_clock(side, 1000))
    segments_now(side)
    assert not aborts(run_clock(side, 1029))
    assert len(aborts(run_clock(side, 1100))) == 1


def test_a_sender_that_has_not_written_yet_is_its_own_business() -> None:
    side = make_side(progress_timeout_s=30)
    side.offer(submit=False)
    assert not aborts(run_clock(side, 1000))


def test_a_receiver_whose_decoder_moves_says_so_and_one_whose_decoder_hangs_does_not() -> None:
    side = receiving(progress_timeout_s=30, initial_credit_bytes=0)
    for page in SMALL:
        arrive(side, *segments_of(2, page, 0)[0])
    said(side)
    assert [message for _, message in run_clock(side, 9) if isinstance(message, Credit)] == []
    side.decode()
    said(side)
    spoken = [message for _, message in run_clock(side, 18) if isinstance(message, Credit)]
    state = side.core.receive_state(2)
    assert state is not None
    assert spoken == [Credit(2, 0, state.windows[0].limit)]


def test_reassurance_does_not_pile_up_for_a_peer_that_does_not_read() -> None:
    side = make_side()
    side.book.memory_bytes = NEED_BYTES
    for transfer in (2, 4):
        hear(side, an_offer(transfer))
        side.take()
    said(side)
    for second in range(500):
        side.now = float(second)
        side.core.heard(side.now)
        side.timer()
    assert 0 < side.core.scheduler.control_bytes < 200


def test_timers_never_ask_for_a_time_that_has_passed() -> None:
    side = receiving(progress_timeout_s=30)
    side.offer()
    while side.now < 500:
        due = side.core.next_timer()
        side.now = due
        side.core.heard(side.now)
        side.timer()
        said(side)
        assert side.core.next_timer() > side.now


def test_what_a_page_holds_is_what_was_sent() -> None:
    side = receiving()
    for header, payload in segments_of(2, 1, 0):
        arrive(side, header, payload)
    state = side.core.receive_state(2)
    assert state is not None
    assert [bytes(data) for data in state.page_streams(1, 0)] == [page_bytes(2, 1, 0)]
