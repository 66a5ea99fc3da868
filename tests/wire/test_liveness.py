"""The rules of time of a link, at the head of liveness.py, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pairkit import CONFIG, Pair, Side
from sidekit import an_offer, arrive, hear, make_side, receiving, said, segments_now
from wirekit import LAYOUT, NEED_BYTES, STREAMS, page_sizes, segments_of, sent_size

from lynx_net.wire.events import (
    TransferDelivered,
)
from lynx_net.wire.messages import (
    Abort,
    AbortCode,
    Credit,
    Message,
    Ping,
)
from lynx_net.wire.receiving import ReceiveState


def run_clock(side: Side, until_s: float, step_s: float = 0.0) -> list[tuple[float, Message]]:
    """Let time pass, calling `timer` when it wants to be called; what was said, and when."""
    spoken: list[tuple[float, Message]] = []
    while True:
        due = max(side.core.liveness.next_timer(), side.now + step_s)
        if due > until_s:
            side.now = until_s
            return spoken
        if due <= side.now:
            due = side.now + 1e-9
        side.now = due
        side.core.liveness.heard(side.now)  # the peer lives
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
    side.core.liveness.heard(10.0)
    assert not side.core.liveness.is_silent(10.0 + CONFIG.deadline_s - 0.01)
    assert side.core.liveness.is_silent(10.0 + CONFIG.deadline_s)
    assert make_side(deadline_s=1).core.liveness.next_timer() <= 1


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
    assert side.core.incoming.place(header, side.now) is not None
    for second in range(1, 200, 20):
        assert not aborts(run_clock(side, second))
        side.core.liveness.heard(side.now, header)
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
        pair.left.core.liveness.heard(pair.left.now)
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
    state = side.core.incoming.state(2)
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
        side.core.liveness.heard(side.now)
        side.timer()
    assert 0 < side.core.scheduler.control_bytes < 200


def test_timers_never_ask_for_a_time_that_has_passed() -> None:
    side = receiving(progress_timeout_s=30)
    side.offer()
    while side.now < 500:
        due = side.core.liveness.next_timer()
        side.now = due
        side.core.liveness.heard(side.now)
        side.timer()
        said(side)
        assert side.core.liveness.next_timer() > side.now
