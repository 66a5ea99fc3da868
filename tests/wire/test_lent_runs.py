"""Runs of segments in lent buffers do what the same segments do one by one, and buffers are lent to the last page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynx_net.errors import IntegrityError, RemoteProtocolError
from lynx_net.wire import lending
from lynx_net.wire.events import PageArrived, PagesArrived
from lynx_net.wire.frames import SegmentHeader
from lynx_net.wire.layout import CacheLayout
from lynx_net.wire.receiving import ReceiveState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lynx_net.wire.events import Event
    from lynx_net.wire.lending import LentRun

SIZE = 4096
PAGES = 12
STREAMS = 3
LAYOUT = CacheLayout(layers=2, tokens=PAGES // 2, heads=1, key_size=1, value_size=0, page_tokens=1)
EVERYTHING = PAGES * SIZE


def make_state(streams: int = STREAMS, size_of: Callable[[int], int] = lambda page: SIZE) -> ReceiveState:
    state = ReceiveState(
        1,
        LAYOUT,
        streams,
        SIZE,
        lambda page: [frozenset({size_of(page)})] * streams,
        [EVERYTHING] * streams,
        EVERYTHING,
    )
    for window in state.windows:
        window.limit = 2 * EVERYTHING
    state.accepted = True
    return state


def run_of(stream: int, pages: list[int], buffers: list[memoryview], *, sound: bool = True) -> LentRun:
    return 1, stream, SIZE, pages, buffers, sound


def placed(state: ReceiveState, stream: int, page: int) -> list[PageArrived]:
    header = SegmentHeader(1, page, stream, 0, SIZE, SIZE, 7)
    view = state.place(header)
    if view is None:
        return []
    view[0] = page
    return state.segment_arrived(header, 7)


def singly(events: Sequence[Event]) -> list[PageArrived]:
    """What is handed out, in an order that does not depend on how it was put together."""
    single: list[PageArrived] = []
    for event in events:
        if isinstance(event, PagesArrived):
            single += [PageArrived(event.transfer, page, event.stream) for page in event.pages]
        elif isinstance(event, PageArrived):
            single.append(event)
    return sorted(single)


def counts(state: ReceiveState) -> list[object]:
    windows = [(window.received, window.held) for window in state.windows]
    stats = (state.stats.stream_bytes, state.stats.stream_segments)
    return [windows, stats, [state.owes(stream) for stream in range(state.streams)], state.lent_bytes]


BATCHES = st.lists(
    st.tuples(st.integers(0, STREAMS - 1), st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=5), st.booleans()),
    max_size=30,
)


@given(batches=BATCHES, decodes=st.booleans())
def test_a_run_does_what_its_segments_do(batches: list[tuple[int, list[int], bool]], *, decodes: bool) -> None:
    """In any order, repeated, mixed with segments that were placed, decoded at once or not at all."""
    lent, single = make_state(), make_state()
    for stream, pages, is_run in batches:
        got: list[Event] = []
        buffers = lent.lend(stream, 1, len(pages) * SIZE) if is_run else []
        in_buffers, others = pages[: len(buffers)], pages[len(buffers) :]
        for page, buffer in zip(in_buffers, buffers, strict=False):
            buffer[0] = page
        lent.take_back(stream, buffers[len(in_buffers) :])
        lent.take_run(run_of(stream, in_buffers, buffers[: len(in_buffers)]), got)
        for page in others:
            got += placed(lent, stream, page)
        wanted = [event for page in pages for event in placed(single, stream, page)]
        assert singly(got) == sorted(wanted)
        assert counts(lent) == counts(single)
        if decodes:
            for _, page, upto in singly(got):
                assert [view[0] for view in lent.page_streams(page, upto)] == [page] * (upto + 1)
                assert lent.decoded(page, upto) == single.decoded(page, upto)


@given(order=st.permutations(range(PAGES)), ahead=st.integers(1, 3))
def test_buffers_are_lent_until_the_last_page_whatever_the_order(order: list[int], ahead: int) -> None:
    """Lanes overtake one another: a page may take the buffer that was lent with an earlier one in view."""
    state = make_state(1)
    free = state.lend(0, 1, ahead * SIZE)
    for count, page in enumerate(order):
        assert free
        assert state.lent_bytes[0] == len(free) * SIZE == min(ahead, PAGES - count) * SIZE
        state.take_run(run_of(0, [page], [free.pop()]), [])
        free += state.lend(0, 1, ahead * SIZE)
    assert not free
    assert not state.owes(0)


@given(order=st.permutations(range(PAGES)), ahead=st.integers(1, 3), keys=st.integers(0, PAGES))
def test_a_size_is_lent_while_pages_of_it_are_missing(order: list[int], ahead: int, keys: int) -> None:
    """Also of those that others have overtaken: values must not be all that is lent while keys are missing."""
    sizes = [SIZE if page < keys else SIZE // 2 for page in range(PAGES)]
    state = make_state(1, sizes.__getitem__)
    free: dict[int, list[memoryview]] = {SIZE: [], SIZE // 2: []}
    missing = list(range(PAGES))
    for page in order:
        for buffer in state.lend(0, 1, 0, ahead):
            free[buffer.nbytes].append(buffer)
        assert len(free[SIZE]) == min(ahead, sum(sizes[one] == SIZE for one in missing))
        missing.remove(page)
        if free[sizes[page]]:
            state.take_run((1, 0, sizes[page], [page], [free[sizes[page]].pop()], True), [])
        else:
            assert free[SIZE], "nothing is lent for values while keys have not been looked at"
            state.place(SegmentHeader(1, page, 0, 0, sizes[page], sizes[page], 7))
    assert not any(free.values())
    assert state.lent_bytes == [0]


def test_so_much_is_lent_of_each_size() -> None:
    """Values come behind keys, on a lane that is ahead before all of those: their size must not be used up by then."""
    keys, small = PAGES // 2, SIZE // 2
    state = make_state(1, lambda page: SIZE if page < keys else small)
    free = state.lend(0, 1, keys * SIZE)
    assert [buffer.nbytes for buffer in free] == [SIZE] * keys + [small] * keys
    state = make_state(1, lambda page: SIZE if page < keys else small)
    free = state.lend(0, 1, 3 * SIZE)
    assert [buffer.nbytes for buffer in free] == [SIZE] * 3 + [small] * 6
    state.take_run(run_of(0, [0, 1, 2], free[:3]), [])
    assert [buffer.nbytes for buffer in state.lend(0, 1, 3 * SIZE)] == [SIZE] * 3
    assert state.lent_bytes == [6 * SIZE]


def test_some_pages_are_lent_however_large_they_are() -> None:
    for most_pages, lent in ((2, 3), (3, 3), (5, 5)):
        state = make_state(1, lambda _: SIZE)
        assert len(state.lend(0, 1, 3 * SIZE, most_pages)) == lent


class Counting:
    """A stock."""

    lent = together_bytes = 0

    def put(self, transfer: int, stream: int, buffers: list[memoryview], together_bytes: int) -> None:
        self.lent += len(buffers)
        self.together_bytes = together_bytes

    def take_back(self, transfer: int, stream: int) -> list[memoryview]:
        return []


@pytest.mark.parametrize("factor", [1, 2])
def test_a_pool_says_that_more_is_lent(factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "MOST_LENT_BYTES", SIZE)
    monkeypatch.setattr(lending, "MOST_LENT_PAGES", 1)
    state, stock = make_state(1), Counting()
    state.pool.lend_factor = factor
    lending.Lender(stock, lanes=3, least_bytes=1).lend(state, 0)
    assert stock.lent == 3 * factor


def test_a_pool_says_how_much_lanes_receive_together_unless_the_peer_had_no_credit_then() -> None:
    for together_bytes, most_bytes in ((SIZE, 3 * SIZE), (EVERYTHING, EVERYTHING // 4)):
        state, stock = make_state(1), Counting()
        state.pool.together_bytes = together_bytes
        lending.Lender(stock, lanes=3, least_bytes=1).lend(state, 0)
        assert stock.together_bytes == most_bytes


def test_what_came_before_a_wrong_segment_counts() -> None:
    state = make_state()
    events: list[Event] = []
    buffers = state.lend(0, 1, 3 * SIZE)
    with pytest.raises(RemoteProtocolError, match=f"page {PAGES}"):
        state.take_run(run_of(0, [2, 3, PAGES], buffers), events)
    assert events == [PagesArrived(1, [2, 3], 0)]
    assert state.windows[0].received == state.windows[0].held == 2 * SIZE


def test_bytes_that_do_not_match_their_checksum_are_not_handed_out() -> None:
    state = make_state()
    events: list[Event] = []
    buffers = state.lend(0, 1, SIZE)
    with pytest.raises(IntegrityError):
        state.take_run(run_of(0, [4], buffers, sound=False), events)
    assert events == []
    assert state.owes(0)
    # One that came before is not looked at again.
    state = make_state()
    placed(state, 0, 4)
    state.take_run(run_of(0, [4], state.lend(0, 1, SIZE), sound=False), events)
    assert events == []


def test_a_run_of_more_than_was_granted_is_refused() -> None:
    state = make_state()
    events: list[Event] = []
    buffers = state.lend(0, 1, 3 * SIZE)
    state.windows[0].limit = 2 * SIZE
    with pytest.raises(RemoteProtocolError, match="granted"):
        state.take_run(run_of(0, [0, 1, 2], buffers), events)
    assert events == [PagesArrived(1, [0, 1], 0)]


def test_buffers_are_lent_for_what_is_sent_next() -> None:
    """Anchors come in the order of the pages, what waits behind them as `WaitingOrder` says; all sizes differ."""
    layout = CacheLayout(layers=2, tokens=3, heads=1, key_size=1, value_size=1, page_tokens=1)
    sizes = [[frozenset({SIZE + page}), frozenset({0 if page % 3 == 2 else 2 * SIZE + page})] for page in range(12)]
    state = ReceiveState(1, layout, 2, 4 * SIZE, sizes.__getitem__, [1 << 20] * 2, 1 << 20)
    for window in state.windows:
        window.limit = 1 << 20
    state.accepted = True
    sent = [list(range(12)), [8, 7, 6, 2, 1, 0, 11, 10, 9, 5, 4, 3]]
    for stream, pages in enumerate(sent):
        wanted = [min(sizes[page][stream]) for page in pages]
        buffers: list[memoryview] = []
        for page in pages:
            buffers += state.lend(stream, SIZE, 5 * SIZE)
            assert [buffer.nbytes for buffer in buffers] == wanted[: len(buffers)]
            buffer, *buffers = buffers
            del wanted[0]
            state.take_run((1, stream, buffer.nbytes, [page], [buffer], True), [])
        assert not state.owes(stream)
