"""One side of a link: the table at the head of connection.py, line by line, and the ends of transfers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sidekit import an_offer, hear, make_side, said
from wirekit import NEED_BYTES

from lynx_net.errors import (
    ConnectionLostError,
    RemoteProtocolError,
    TransferAbortedError,
)
from lynx_net.wire import scheduler
from lynx_net.wire.events import (
    PeerClosed,
    RequestRefused,
    TransferFailed,
)
from lynx_net.wire.messages import (
    MAX_REASON,
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
)
from lynx_net.wire.scheduler import NothingToSend

# ---- the table, one message after the other


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
    assert isinstance(side.core.outgoing.next_send(1, 0.0), NothingToSend)


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
    assert len(answer.reason) == MAX_REASON
    assert transfer in side.ended


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
    monkeypatch.setattr(scheduler, "MAX_CONTROL_BACKLOG_BYTES", 10_000)
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
    assert side.core.outgoing.queued_bytes(mine, 0) == 0


def test_bye_is_announced() -> None:
    side = make_side()
    side.core.bye("closed")
    assert said(side) == [Bye("closed")]


# ---- time
