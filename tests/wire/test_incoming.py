"""The receiving half of a link: offers, where segments go, and what they are granted."""

from __future__ import annotations

from typing import Any

import pytest
from pairkit import CONFIG
from sidekit import EMPTY, an_offer, arrive, hear, make_side, receiving, said
from wirekit import LAYOUT, NEED_BYTES, page_bytes, page_sizes, segments_of

from lynx_net.errors import (
    FlowControlError,
    IntegrityError,
    RemoteProtocolError,
)
from lynx_net.wire.events import (
    OfferReceived,
    TransferComplete,
    TransferFailed,
)
from lynx_net.wire.frames import SegmentHeader, checksum
from lynx_net.wire.incoming import SegmentAwaitsOffer
from lynx_net.wire.messages import (
    Abort,
    AbortCode,
    Accept,
    Complete,
    Credit,
    Message,
)


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


COVERING_BYTES = sum(max(page_sizes(page, 1)[0]) for page in range(LAYOUT.page_count))


@pytest.mark.parametrize(
    ("initial_credit_bytes", "answer"),
    [(COVERING_BYTES, []), (COVERING_BYTES - 1, [Accept(2), Credit(2, 0, 1 << 20)])],
)
def test_a_transfer_that_the_initial_credit_covers_needs_no_answer_but_complete(
    initial_credit_bytes: int, answer: list[Message]
) -> None:
    """Nor is anything granted beyond what a transfer can need."""
    side = make_side(initial_credit_bytes=initial_credit_bytes, anchor_window_bytes=1 << 20)
    hear(side, an_offer(2, streams=1))
    side.take()
    assert side.book.is_accepted("the link", 2)
    assert said(side) == answer
    for page in range(LAYOUT.page_count):
        for header, payload in segments_of(2, page, 0):
            arrive(side, header, payload)
        side.decode()
    assert said(side) == [Complete(2)]


@pytest.mark.parametrize(("initiator", "good", "bad"), [(True, [2, 4, 100], [1, 0, 100]), (False, [1, 3, 99], [2, 99])])
def test_offer_ids_have_the_peers_parity_and_grow(initiator: bool, good: list[int], bad: list[int]) -> None:
    side = make_side(initiator=initiator)
    for transfer in good:
        hear(side, an_offer(transfer))
    for transfer in bad:
        with pytest.raises(RemoteProtocolError, match=f"transfer id {transfer},"):
            hear(side, an_offer(transfer))


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
    assert side.core.incoming.place(SegmentHeader(2, 0, 0, 0, 1, 1, 0), 0.0) is None
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
    assert side.core.incoming.take(event.offer, event.layout, page_sizes, NEED_BYTES, 0.0) == []
    assert side.core.open_transfers() == []
    assert side.book.reserved_bytes == 0


def test_an_empty_transfer_is_accepted_and_complete_at_once() -> None:
    side = make_side()
    hear(side, an_offer(2, layout=EMPTY.to_wire()))
    side.take()
    assert said(side) == [Accept(2), Complete(2)]
    assert side.ended == {2: TransferComplete(2)}
    assert side.core.open_transfers() == []


def test_where_segments_go() -> None:
    side = make_side()
    header, payload = segments_of(2, 0, 0)[0]
    with pytest.raises(SegmentAwaitsOffer):
        side.core.incoming.place(header, 0.0)
    hear(side, an_offer(2))
    with pytest.raises(SegmentAwaitsOffer):
        side.core.incoming.place(header, 0.0)
    side.take()
    assert arrive(side, header, payload) is not None
    assert side.core.incoming.place(header, 0.0) is None
    with pytest.raises(RemoteProtocolError, match="not the peer's"):
        side.core.incoming.place(header._replace(transfer=1), 0.0)
    side.abort(2)
    assert side.core.incoming.place(header, 0.0) is None
    with pytest.raises(SegmentAwaitsOffer):
        side.core.incoming.place(header._replace(transfer=4), 0.0)
    assert side.core.incoming.place(header._replace(transfer=0), 0.0) is None


def test_late_bytes_of_an_aborted_transfer_are_harmless() -> None:
    side = receiving()
    header, payload = segments_of(2, 0, 0)[0]
    view = side.core.incoming.place(header, 0.0)
    assert view is not None
    side.abort(2)
    before = list(side.log)
    view[:] = payload
    assert side.core.incoming.segment(header, checksum(view), 0.0) == []
    assert side.core.incoming.decoded(2, [0], 0) == []
    assert side.core.incoming.state(2) is None
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
                view = side.core.incoming.place(header, 0.0)
                assert view is not None
                view[:] = payload  # its arrival is not reported: no new credit

    with pytest.raises(FlowControlError):
        send_all()


def test_what_a_page_holds_is_what_was_sent() -> None:
    side = receiving()
    for header, payload in segments_of(2, 1, 0):
        arrive(side, header, payload)
    state = side.core.incoming.state(2)
    assert state is not None
    assert [bytes(data) for data in state.page_streams(1, 0)] == [page_bytes(2, 1, 0)]
