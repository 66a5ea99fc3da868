"""The credit book: priority across links, the memory bound, first come first served, and no deadlock."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wirekit import LAYOUT, STREAMS, page_bytes, page_sizes, sent_size

from lynx_net.wire.bursts import SendBytes, seal
from lynx_net.wire.framereader import FrameReader
from lynx_net.wire.frames import HEADER_BYTES, SegmentHeader, SegmentStart, checksum
from lynx_net.wire.grants import CreditBook, Grant
from lynx_net.wire.receiving import ReceiveState
from lynx_net.wire.scheduler import Scheduler
from lynx_net.wire.sendqueue import SendQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lynx_net.wire.events import PageArrived

SEGMENT = 4096
WINDOW = 2 * SEGMENT
TOTAL = [sum(sent_size(page, stream) for page in range(LAYOUT.page_count)) for stream in range(STREAMS)]


@dataclass
class Incoming:
    state: ReceiveState
    need_bytes: int
    limits: list[int]
    accepted: bool = False
    to_decode: list[PageArrived] = field(default_factory=list)
    complete: bool = False


class Incast:
    """Several senders, each with a real scheduler, into one credit book; every grant is checked when it is made."""

    def __init__(
        self,
        memory_bytes: int,
        seed: int,
        initial_credit: int = 0,
        *,
        window: int = WINDOW,
        early_window: int | None = None,
        streams: int = STREAMS,
    ) -> None:
        self.streams = streams
        self.book = CreditBook(memory_bytes)
        self.random = random.Random(seed)
        self.initial_credit = initial_credit
        self.window = window
        self.early_window = early_window
        self.senders: dict[str, Scheduler] = {}
        self.incoming: dict[tuple[str, int], Incoming] = {}
        self.offered: list[tuple[str, int]] = []
        self.accepted: list[tuple[str, int]] = []

    def offer(self, link: str, transfer: int, need_bytes: int, *, submit: bool = True) -> None:
        scheduler = self.senders.setdefault(link, Scheduler())
        scheduler.open(
            SendQueue(
                transfer,
                streams=self.streams,
                page_count=LAYOUT.page_count,
                segment_bytes=SEGMENT,
                initial_credit=self.initial_credit,
            )
        )
        if submit:
            for page in range(LAYOUT.page_count):
                for stream in range(self.streams):
                    scheduler.submit(transfer, page, stream, memoryview(page_bytes(transfer, page, stream)))
        state = ReceiveState(
            transfer,
            LAYOUT,
            self.streams,
            SEGMENT,
            partial(page_sizes, streams=self.streams),
            [self.window] * self.streams,
            self.initial_credit,
            early_window=self.early_window,
        )
        incoming = self.incoming[link, transfer] = Incoming(state, need_bytes, [0] * self.streams)
        incoming.limits[0] = self.initial_credit
        self.offered.append((link, transfer))
        self.take(self.book.add(link, state, need_bytes))

    def take(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            where = (str(grant.link), grant.transfer)
            incoming = self.incoming[where]
            if grant.stream < 0:
                assert not incoming.accepted
                incoming.accepted = True
                self.accepted.append(where)
                continue
            assert incoming.accepted
            assert grant.limit > incoming.limits[grant.stream]
            incoming.limits[grant.stream] = grant.limit
            self.check_priority(where[0], grant.stream)
            self.check_narrow(incoming.state, grant.stream)
            self.senders[where[0]].grant(grant.transfer, grant.stream, grant.limit)
        self.check_memory()

    def check_priority(self, link: str, stream: int) -> None:
        """Rule 2, stated anew: nobody else owes an earlier stream."""
        for (other, _), incoming in self.incoming.items():
            if other != link and incoming.accepted:
                assert not any(incoming.state.owes(earlier) for earlier in range(stream))

    def check_narrow(self, state: ReceiveState, stream: int) -> None:
        """Rule 7 of the receiving half: little is on its way of a stream whose transfer owes an earlier one."""
        if self.early_window is not None and any(state.owes(earlier) for earlier in range(stream)):
            assert state.windows[stream].outstanding <= max(self.early_window, 2 * SEGMENT)

    def check_memory(self) -> None:
        reserved = sum(one.need_bytes for one in self.incoming.values() if one.accepted)
        assert reserved == self.book.reserved_bytes <= self.book.memory_bytes
        waiting = [where for where in self.offered if where in self.incoming and not self.incoming[where].accepted]
        if waiting:
            # First come, first served, and nobody waits who would fit.
            last_accepted = max((self.offered.index(where) for where in self.accepted), default=-1)
            assert last_accepted < self.offered.index(waiting[0])
            assert reserved + self.incoming[waiting[0]].need_bytes > self.book.memory_bytes
        for link, transfer in self.incoming:
            assert self.book.is_accepted(link, transfer) == self.incoming[link, transfer].accepted

    def remove(self, link: str, transfer: int) -> None:
        del self.incoming[link, transfer]
        self.senders[link].close(transfer)
        self.take(self.book.remove(link, transfer))

    def send_one(self, link: str) -> bool:
        chosen = self.senders[link].next(1, 0.0)
        if not isinstance(chosen, SendBytes):
            return False
        reader = FrameReader()
        reader.buffers()[0][:] = seal([chosen])[0]
        (start,) = reader.received(HEADER_BYTES)
        assert isinstance(start, SegmentStart)
        self.arrive(link, start.header, b"".join(seal([chosen])[1:]))
        return True

    def arrive(self, link: str, header: SegmentHeader, payload: bytes) -> None:
        incoming = self.incoming[link, header.transfer]
        state = incoming.state
        view = state.place(header)
        assert view is not None
        view[:] = payload
        owed = state.owes(header.stream)
        incoming.to_decode += state.segment_arrived(header, checksum(view))
        finished = owed and not state.owes(header.stream)
        self.take(self.book.progressed(link, header.transfer, stream_finished=finished))

    def decode_one(self, link: str, transfer: int) -> bool:
        incoming = self.incoming[link, transfer]
        if not incoming.to_decode:
            return False
        event = incoming.to_decode.pop(self.random.randrange(len(incoming.to_decode)))
        incoming.state.decoded(event.page, event.stream)
        self.take(self.book.progressed(link, transfer, stream_finished=False))
        if incoming.state.complete:
            self.remove(link, transfer)
        return True

    def step(self) -> bool:
        """Something happens, in random order; False if nothing can."""
        actions = [(self.send_one, (link,)) for link in self.senders]
        actions += [(self.decode_one, where) for where in self.incoming]  # type: ignore[misc]
        self.random.shuffle(actions)
        return any(act(*arguments) for act, arguments in actions)

    def run(self) -> None:
        while self.step():
            pass


@settings(max_examples=25, deadline=None)
@given(
    needs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100)), min_size=1, max_size=7),
    aborts=st.sets(st.integers(0, 6), max_size=3),
    initial_credit=st.sampled_from([0, 5000]),
    windows=st.sampled_from([(WINDOW, None), (WINDOW, 0), (8 * WINDOW, 0), (8 * WINDOW, 3 * SEGMENT + 1)]),
    streams=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
def test_everything_arrives_with_windows_of_two_segments(
    needs: list[tuple[str, int]],
    aborts: set[int],
    initial_credit: int,
    windows: tuple[int, int | None],
    streams: int,
    seed: int,
) -> None:
    incast = Incast(100, seed, initial_credit, window=windows[0], early_window=windows[1], streams=streams)
    for number, (link, need) in enumerate(needs):
        incast.offer(link, 2 * number + 1, need)
        for _ in range(incast.random.randrange(20)):
            incast.step()
    for number in aborts & set(range(len(needs))):
        for _ in range(incast.random.randrange(30)):
            incast.step()
        where = needs[number][0], 2 * number + 1
        if where in incast.incoming:
            incast.remove(*where)
    incast.run()
    assert not incast.incoming, "a transfer got stuck"
    assert incast.book.reserved_bytes == 0
    assert not any(incast.book._owing.values())
    assert incast.book.remove("a", 1) == []


def test_residuals_wait_for_the_anchors_of_every_other_link_only() -> None:
    incast = Incast(1000, 0)
    incast.offer("a", 1, 10)
    incast.offer("a", 3, 10)
    incast.offer("b", 1, 10, submit=False)
    assert [incast.incoming[where].limits for where in incast.offered] == [
        [WINDOW, WINDOW],
        [WINDOW, WINDOW],
        [WINDOW, 0],
    ]
    assert incast.book.withholds("b", 1)
    assert incast.book.withholds("a", 1)
    while incast.send_one("a"):
        for where in (("a", 1), ("a", 3)):
            while where in incast.incoming and incast.decode_one(*where):
                pass
    for where in (("a", 1), ("a", 3)):
        # What was granted before b's offer came has been used up; nothing was granted since.
        assert not incast.incoming[where].state.owes(0)
        assert incast.incoming[where].limits[1] == WINDOW
    incast.remove("b", 1)
    assert not incast.book.withholds("a", 1)
    incast.run()
    assert not incast.incoming


def test_finishing_anchors_frees_the_residuals_of_all_links() -> None:
    incast = Incast(1000, 0)
    incast.offer("a", 1, 10)
    incast.offer("b", 1, 10)
    while not incast.incoming["b", 1].limits[1]:
        assert incast.step()
    assert not incast.incoming["a", 1].state.owes(0)


def test_an_anchor_that_begins_later_finds_little_residual_ahead_of_itself() -> None:
    incast = Incast(1000, 0, window=8 * WINDOW, early_window=0)
    incast.offer("a", 1, 10)
    a = incast.incoming["a", 1]
    assert a.limits == [8 * WINDOW] + [2 * SEGMENT] * (STREAMS - 1)
    incast.offer("b", 1, 10, submit=False)
    while incast.send_one("a"):
        pass
    assert not a.state.owes(0)
    assert a.limits[1] == 2 * SEGMENT  # which b's anchor has to wait for, and no more
    incast.remove("b", 1)
    assert a.limits[1] > 2 * SEGMENT
    incast.run()
    assert not incast.incoming


def test_offers_are_accepted_in_their_order_even_if_a_later_one_would_fit() -> None:
    incast = Incast(100, 0)
    for number, need in enumerate((60, 50, 10)):
        incast.offer("abc"[number], 1, need, submit=False)
    assert incast.accepted == [("a", 1)]
    assert incast.book.withholds("b", 1)
    incast.remove("b", 1)  # the head of the queue leaves: who is behind it fits
    assert incast.accepted == [("a", 1), ("c", 1)]
    incast.remove("a", 1)
    incast.remove("c", 1)
    assert incast.book.reserved_bytes == 0


def test_who_can_never_fit() -> None:
    assert CreditBook(100).fits(100)
    assert not CreditBook(100).fits(101)


def test_early_reservations_have_their_own_bound() -> None:
    book = CreditBook(100, early_bytes=50)
    states = [ReceiveState(n, LAYOUT, 1, SEGMENT, page_sizes, [WINDOW], 40) for n in range(4)]
    book.add("a", states[0], 100)
    for state in states[1:]:
        assert book.add("a", state, 100) == []
    assert book.reserve_early("a", 1, 40)
    assert not book.reserve_early("a", 2, 40)
    assert book.early_reserved_bytes == 40
    book.remove("a", 0)
    assert book.is_accepted("a", 1)
    assert book.early_reserved_bytes == 0
    assert book.reserve_early("a", 2, 40)
    book.remove("a", 2)
    assert book.early_reserved_bytes == 0


def test_unknown_transfers_change_nothing() -> None:
    book = CreditBook(100)
    assert book.remove("a", 1) == []
    assert book.progressed("a", 1, stream_finished=True) == []
    assert not book.is_accepted("a", 1)
    assert not book.withholds("a", 1)


@pytest.mark.parametrize("links", [1, 50])
def test_the_cost_of_a_segment_does_not_grow_with_the_number_of_transfers(links: int) -> None:
    """Counted in calls, not in time: a grant for one transfer looks at that transfer only."""
    asked = 0

    class Counted(ReceiveState):
        def owes(self, stream: int) -> bool:
            nonlocal asked
            asked += 1
            return super().owes(stream)

    book = CreditBook(10**9)
    for number in range(links):
        state = Counted(1, LAYOUT, STREAMS, SEGMENT, page_sizes, [WINDOW] * STREAMS, 0)
        book.add(number, state, 10)
    asked = 0
    book.progressed(0, 1, stream_finished=False)
    assert asked == 0
    book.progressed(0, 1, stream_finished=True)
    assert asked == STREAMS


@settings(max_examples=25, deadline=None)
@given(
    streams=st.integers(1, 6),
    links=st.integers(1, 3),
    early_window=st.sampled_from([None, 0, 3 * SEGMENT]),
    seed=st.integers(0, 10**6),
)
def test_streams_of_one_sender_go_in_order_whatever_their_number(
    streams: int, links: int, early_window: int | None, seed: int
) -> None:
    """A stream is sent only while nothing earlier can be; with room for whole streams, only after all that is earlier.

    A narrow window is used up now and then, and lets the streams behind it use theirs (`check_narrow`).
    """
    incast = Incast(1000, seed, window=10**6, early_window=early_window, streams=streams)
    began: dict[str, list[int]] = {}
    plain_arrive = incast.arrive

    def arrive(link: str, header: SegmentHeader, payload: bytes) -> None:
        queued = incast.senders[link]._queues[header.transfer]
        assert not any(queued.sendable(earlier) for earlier in range(header.stream))
        began.setdefault(link, []).append(header.stream)
        plain_arrive(link, header, payload)

    incast.arrive = arrive  # type: ignore[method-assign]
    for number in range(links):
        incast.offer("abc"[number], 1, 10)
    incast.run()
    assert not incast.incoming
    assert sorted(began) == list("abc"[:links])
    for order in began.values():
        assert early_window is not None or order == sorted(order)
        assert set(order) == set(range(streams))
