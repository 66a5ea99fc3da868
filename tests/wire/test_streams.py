"""Any number of streams: strict priority, readiness in order, narrow windows, and sizes known only by their bound."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairkit import Pair, Side
from wirekit import LAYOUT, NEED_BYTES, page_sizes

from lynx_net.errors import RemoteProtocolError
from lynx_net.wire.bursts import SendBytes
from lynx_net.wire.events import LayerReady, StreamReady, TransferComplete
from lynx_net.wire.frames import SegmentHeader, checksum
from lynx_net.wire.grants import CreditBook, Grant
from lynx_net.wire.messages import MAX_STREAMS
from lynx_net.wire.pagesizes import PageSizes, largest_of
from lynx_net.wire.receiving import ReceiveState
from lynx_net.wire.scheduler import Scheduler
from lynx_net.wire.sendqueue import EXACT_CLASS, SendQueue, classes_of

SEGMENT = 4096


def class_sent(side: Side, chosen: SendBytes) -> int:
    assert chosen.transfer is not None
    return side.core.outgoing._queues[chosen.transfer].classes[chosen.stream]


def check_priority(side: Side) -> None:
    """From here on every segment the side sends is of the first class in which anything could be sent."""
    next_send = side.core.outgoing.next_send

    def checked(lane: int, now: float) -> object:
        queues = list(side.core.outgoing._queues.values())
        sendable = [
            queue.classes[stream] for queue in queues for stream in range(len(queue.pages)) if queue.sendable(stream)
        ]
        chosen = next_send(lane, now)
        if isinstance(chosen, SendBytes) and chosen.transfer is not None:
            assert class_sent(side, chosen) == min(sendable)
        return chosen

    side.core.outgoing.next_send = checked  # type: ignore[method-assign,assignment]


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=3),
    lanes=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_strict_priority_and_completion(kinds: list[tuple[int, bool]], lanes: int, seed: int) -> None:
    pair = Pair(lanes, seed)
    pair.right.book.memory_bytes = 10 * NEED_BYTES
    check_priority(pair.left)
    exact_of = {pair.left.offer(streams=streams, exact=exact): (streams, exact) for streams, exact in kinds}
    while len(pair.right.ended) < len(kinds):
        pair.settle(take=False)
        while pair.right.offers:
            transfer = pair.right.offers[0].offer.transfer
            pair.right.take(exact=exact_of[transfer][1])
    pair.settle()
    for transfer, (streams, _) in exact_of.items():
        assert isinstance(pair.right.ended[transfer], TransferComplete)
        ready = [e for e in pair.right.log if isinstance(e, StreamReady) and e.transfer == transfer]
        assert [event.stream for event in ready] == list(range(streams))
        layers = {e for e in pair.right.ready if isinstance(e, LayerReady) and e.transfer == transfer}
        assert len(layers) == streams * LAYOUT.layers
    pair.check_empty()


def test_most_streams() -> None:
    pair = Pair()
    pair.right.book.memory_bytes = 100 * NEED_BYTES
    transfer = pair.left.offer(streams=MAX_STREAMS, exact=True)
    pair.settle()
    assert isinstance(pair.right.ended[transfer], TransferComplete)


def test_an_exact_stream_is_in_a_class_of_its_own() -> None:
    assert classes_of(4, exact=True) == [0, 1, 2, EXACT_CLASS]
    assert classes_of(4, exact=False) == [0, 1, 2, 3]
    assert classes_of(1, exact=True) == [0], "the only stream of a transfer is what decoding waits for"


def state_of(transfer: int, streams: int, *, exact: bool = False, early_window: int | None = None) -> ReceiveState:
    def sizes(page: int) -> list[PageSizes]:
        return list(page_sizes(page, streams))

    windows = [1 << 20] * streams
    return ReceiveState(transfer, LAYOUT, streams, SEGMENT, sizes, windows, 0, early_window=early_window, exact=exact)


def finish(state: ReceiveState, stream: int) -> None:
    """All pages of a stream arrive."""
    state.windows[stream].limit = NEED_BYTES
    for page in range(LAYOUT.page_count):
        size = largest_of(page_sizes(page, state.streams)[stream])
        for at in range(0, size, SEGMENT):
            length = min(SEGMENT, size - at)
            header = SegmentHeader(state.transfer, page, stream, at, length, size, checksum(bytes(length)))
            view = state.place(header)
            assert view is not None
            view[:] = bytes(length)
            state.segment_arrived(header, checksum(view))


def test_exact_bytes_are_granted_only_when_no_other_link_owes_a_lossy_stream() -> None:
    """Although the exact stream of one transfer has a smaller number than the last residual of the other."""
    book = CreditBook(100 * NEED_BYTES)
    exact, lossy = state_of(1, 2, exact=True), state_of(3, 3)
    granted: list[Grant] = [*book.add("b", lossy, 1), *book.add("a", exact, 1)]

    def progress(link: str, state: ReceiveState, stream: int) -> None:
        finish(state, stream)
        granted.extend(book.progressed(link, state.transfer, stream_finished=True))

    def exact_granted() -> bool:
        return any(grant.link == "a" and grant.stream == 1 for grant in granted)

    assert not exact_granted()
    progress("a", exact, 0)
    progress("b", lossy, 0)
    assert not exact_granted()
    assert book.withholds("a", 1)
    progress("b", lossy, 1)
    assert not exact_granted()
    progress("b", lossy, 2)
    assert exact_granted()
    assert not book.withholds("a", 1)


@given(streams=st.integers(1, 6), early=st.integers(0, 200_000), done=st.integers(0, 6))
def test_the_streams_behind_the_one_owed_share_the_early_window(streams: int, early: int, done: int) -> None:
    state = state_of(1, streams, early_window=early)
    state.accepted = True
    for stream in range(min(done, streams)):
        finish(state, stream)
    owed = min(done, streams)
    windows = [window.window for window in state.windows]
    assert windows[: owed + 1] == [1 << 20] * min(owed + 1, streams)
    behind = windows[owed + 1 :]
    assert all(window >= 2 * SEGMENT for window in behind)
    assert sum(max(window - 2 * SEGMENT, 0) for window in behind) <= early
    if behind:
        assert behind[0] == max(early, 2 * SEGMENT)


@given(ranks=st.lists(st.integers(0, 3), min_size=1, max_size=6), seed=st.integers(0, 10**6))
def test_the_lowest_rank_goes_first_and_what_has_begun_is_finished(ranks: list[int], seed: int) -> None:
    """Pages come while others are sent, with credit for a segment or two at a time."""
    chance = random.Random(seed)
    scheduler = Scheduler()
    queue = SendQueue(1, streams=1, page_count=len(ranks), segment_bytes=SEGMENT, initial_credit=0)
    scheduler.open(queue)
    waiting: dict[int, int] = {}
    sent: list[int] = []
    page, limit = 0, 0
    while len(sent) < len(ranks):
        if page < len(ranks) and chance.random() < 0.5:
            size = chance.choice((1, SEGMENT, 3 * SEGMENT - 7))
            scheduler.submit(1, page, 0, memoryview(bytes(size)), (ranks[page],))
            waiting[page] = ranks[page]
            page += 1
        limit += chance.choice((0, 5, SEGMENT))
        scheduler.grant(1, 0, limit)
        assert scheduler.has_work() == queue.sendable(0)
        chosen = scheduler.next(0, 0.0)
        if isinstance(chosen, SendBytes):
            if chosen.offset == 0:
                assert waiting.pop(chosen.page) == min([ranks[chosen.page], *waiting.values()])
            if chosen.offset + len(chosen.data) == chosen.stream_bytes:
                sent.append(chosen.page)
    assert sorted(sent) == list(range(len(ranks)))


class TestVariableSizes:
    """A stream whose sizes are known by their bound alone."""

    BOUND = 9000

    def state(self) -> ReceiveState:
        sizes: list[PageSizes] = [frozenset({10}), range(self.BOUND + 1)]
        state = ReceiveState(1, LAYOUT, 2, SEGMENT, lambda _page: sizes, [1 << 20] * 2, 1 << 20)
        state.windows[1].limit = 1 << 20
        state.accepted = True
        return state

    @given(size=st.integers(0, BOUND))
    def test_any_size_up_to_the_bound(self, size: int) -> None:
        state = self.state()
        for stream, count in ((0, 10), (1, size)):
            events = []
            for at in range(0, max(count, 1), SEGMENT):
                payload = bytes(min(SEGMENT, count - at))
                header = SegmentHeader(1, 0, stream, at, len(payload), count, checksum(payload))
                view = state.place(header)
                assert view is not None
                view[:] = payload
                events += state.segment_arrived(header, checksum(view))
            assert [event.stream for event in events] == [stream]
        assert [len(data) for data in state.page_streams(0, 1)] == [10, size]

    @pytest.mark.parametrize("size", [BOUND + 1, 1 << 20, (1 << 32) - 1])
    def test_nothing_is_allocated_beyond_the_bound(self, size: int) -> None:
        state = self.state()
        state.pool.take = lambda count: pytest.fail(f"{count} bytes were allocated")  # type: ignore[method-assign]
        with pytest.raises(RemoteProtocolError, match=f"cannot have {size} bytes"):
            state.place(SegmentHeader(1, 0, 1, 0, SEGMENT, size, 0))

    def test_a_size_cannot_change_between_segments(self) -> None:
        state = self.state()
        state.place(SegmentHeader(1, 0, 1, 0, SEGMENT, 9000, 0))
        with pytest.raises(RemoteProtocolError, match="changed"):
            state.place(SegmentHeader(1, 0, 1, SEGMENT, SEGMENT, 8999, 0))

    def test_the_largest_is_found_without_counting(self) -> None:
        assert largest_of(range(1 << 62)) == (1 << 62) - 1
        assert largest_of(frozenset({3, 7})) == 7
