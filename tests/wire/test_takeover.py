"""A buffer changes hands only when nobody can write to it or read it any more, however a transfer ends."""

from __future__ import annotations

import random

import pytest
from pairkit import CONFIG, Pair, Side
from wirekit import LAYOUT, STREAMS, page_bytes, segments_of

from lynx_net.wire.frames import SegmentHeader, checksum
from lynx_net.wire.messages import OfferMessage

GARBAGE = 0xEE


def _receiving(side: Side, transfer: int) -> None:
    offer = OfferMessage(transfer, "r", LAYOUT.to_wire(), "none", {}, STREAMS, CONFIG.segment_bytes, {}, None)
    side.handle(side.core.message(offer, side.now))
    side.take()


def _begin_all(side: Side, transfer: int) -> list[tuple[SegmentHeader, memoryview]]:
    """Begin every segment of stream 0 that the credit allows, and let none arrive."""
    begun: list[tuple[SegmentHeader, memoryview]] = []
    left = 8192
    for page in range(LAYOUT.page_count):
        for header, _ in segments_of(transfer, page, 0):
            left -= header.length
            if left >= 0 and header.length:
                view = side.core.incoming.place(header, side.now)
                assert view is not None
                begun.append((header, view))
    assert len(begun) >= 2
    return begun


def _arrive(side: Side, transfer: int, page: int, stream: int) -> None:
    for header, payload in segments_of(transfer, page, stream):
        view = side.core.incoming.place(header, side.now)
        assert view is not None
        view[:] = payload
        side.handle(side.core.incoming.segment(header, checksum(view), side.now))


def test_late_segments_never_land_in_a_buffer_of_another_transfer() -> None:
    """Segments are being read into their places while the transfer is aborted and its successors begin."""
    side = Side(initiator=True, lanes=1, config=CONFIG, peer=CONFIG)
    late: list[memoryview] = []
    for transfer in range(2, 22, 2):
        _receiving(side, transfer)
        begun = _begin_all(side, transfer)
        for view in late:
            view[:] = bytes([GARBAGE]) * view.nbytes
        for header, view in begun:
            view[:] = page_bytes(transfer, header.page, 0)[header.offset : header.offset + header.length]
        for view in late:
            view[:] = bytes([GARBAGE]) * view.nbytes
        for header, view in begun:
            assert checksum(view) == dict(_sums(transfer))[header.page, header.offset]
        side.abort(transfer)
        late += [view for _, view in begun]


def _sums(transfer: int) -> list[tuple[tuple[int, int], int]]:
    return [
        ((header.page, header.offset), header.checksum)
        for page in range(LAYOUT.page_count)
        for header, _ in segments_of(transfer, page, 0)
    ]


def test_a_page_that_is_being_decoded_is_not_given_to_another_transfer() -> None:
    """The decoder thread of an aborted transfer may still read; what it reads must stay what it was."""
    side = Side(initiator=True, lanes=1, config=CONFIG, peer=CONFIG)
    _receiving(side, 2)
    _arrive(side, 2, 2, 0)
    [event] = side.to_decode
    state = side.core.incoming.state(2)
    assert state is not None
    [in_the_decoder] = state.page_streams(event.page, event.stream)
    assert in_the_decoder.nbytes > 1
    side.abort(2)
    _receiving(side, 4)
    _arrive(side, 4, 2, 0)
    assert bytes(in_the_decoder) == page_bytes(2, 2, 0)


def test_pages_that_nobody_reads_are_used_again() -> None:
    """What was decoded or had only arrived goes back to the pool when its transfer is aborted."""
    side = Side(initiator=True, lanes=1, config=CONFIG, peer=CONFIG)
    _receiving(side, 2)
    _arrive(side, 2, 2, 0)
    side.decode()
    before = side.book.pool.kept_bytes
    side.abort(2)
    assert side.book.pool.kept_bytes - before == len(page_bytes(2, 2, 0))


@pytest.mark.parametrize("seed", range(3))
def test_an_abort_storm_returns_every_reservation(seed: int) -> None:
    """Many transfers, most of them given up by either side at any moment; the rest arrives whole."""
    rng = random.Random(seed)
    pair = Pair(3, seed=seed)
    offered: list[tuple[Side, Side, int]] = []
    for _ in range(150):
        sender, receiver = rng.sample(pair.sides, 2)
        offered.append((sender, receiver, sender.offer()))
        for _ in range(rng.randrange(40)):
            pair.move()
            if receiver.offers and rng.random() < 0.7:
                receiver.take()
            if receiver.to_decode and rng.random() < 0.7:
                receiver.decode(rng.randrange(len(receiver.to_decode)))
        if rng.random() < 0.7:
            sender, receiver, transfer = rng.choice(offered)
            rng.choice((sender, receiver)).abort(transfer)
    pair.settle()
    for sender, _, transfer in offered:
        assert transfer in sender.ended
    pair.check_empty()
