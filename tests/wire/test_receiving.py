"""The receiving half of a transfer: any order, any duplication, each page once, readiness once and never early."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wirekit import LAYOUT, NEED_BYTES, SIZES, STREAMS, page_bytes, page_sizes, segments_of, sent_size

from lynx_net.errors import FlowControlError, IntegrityError, LocalProtocolError, RemoteProtocolError
from lynx_net.wire.events import LayerReady, PageArrived, StreamReady, TransferComplete
from lynx_net.wire.frames import SegmentHeader, checksum
from lynx_net.wire.layout import CacheLayout
from lynx_net.wire.pool import BufferPool
from lynx_net.wire.receiving import ReceiveState

ALL = [part for page in range(LAYOUT.page_count) for stream in range(STREAMS) for part in segments_of(1, page, stream)]


def make_state(
    initial_credit: int = NEED_BYTES, *, accepted: bool = True, layout: CacheLayout = LAYOUT
) -> ReceiveState:
    state = ReceiveState(1, layout, STREAMS, 4096, page_sizes, [NEED_BYTES] * STREAMS, initial_credit)
    for window in state.windows[1:]:
        window.limit = NEED_BYTES
    state.accepted = accepted
    return state


def fill(state: ReceiveState, header: SegmentHeader, payload: bytes) -> memoryview | None:
    view = state.place(header)
    if view is not None:
        view[:] = payload
    return view


class Receiver:
    """Feeds segments, decodes what is handed out in random order, and checks every promise on the way."""

    def __init__(self, seed: int) -> None:
        self.state = make_state()
        self.random = random.Random(seed)
        self.to_decode: list[PageArrived] = []
        self.handed_out: list[tuple[int, int]] = []
        self.decoded: set[tuple[int, int]] = set()
        self.ready: list[Any] = []

    def feed(self, header: SegmentHeader, payload: bytes) -> None:
        view = fill(self.state, header, payload)
        if view is None:
            return
        for event in self.state.segment_arrived(header, checksum(view)):
            earlier = [stream for page, stream in self.handed_out if page == event.page]
            assert earlier == list(range(event.stream))
            self.handed_out.append((event.page, event.stream))
            self.to_decode.append(event)

    def decode_some(self, count: int) -> None:
        for _ in range(min(count, len(self.to_decode))):
            event = self.to_decode.pop(self.random.randrange(len(self.to_decode)))
            if (event.page, event.stream) in self.decoded:
                continue  # a later stream was decoded first, and this one with it
            for stream, data in enumerate(self.state.page_streams(event.page, event.stream)):
                assert bytes(data) == page_bytes(1, event.page, stream)
            self.decoded |= {(event.page, stream) for stream in range(event.stream + 1)}
            for event_out in self.state.decoded(event.page, event.stream):
                assert event_out not in self.ready
                self.ready.append(event_out)
                self.check_not_early(event_out)

    def check_not_early(self, event: LayerReady | StreamReady | TransferComplete) -> None:
        match event:
            case LayerReady(_, layer, stream):
                pages = list(LAYOUT.layer_pages(layer))
            case StreamReady(_, stream):
                pages = list(range(LAYOUT.page_count))
            case TransferComplete():
                stream, pages = STREAMS - 1, list(range(LAYOUT.page_count))
        assert all((page, earlier) in self.decoded for page in pages for earlier in range(stream + 1))


@given(order=st.permutations(range(len(ALL))), repeats=st.lists(st.integers(0, len(ALL) - 1)), seed=st.integers(0, 999))
def test_any_order_and_any_repetition(order: list[int], repeats: list[int], seed: int) -> None:
    receiver = Receiver(seed)
    for position in receiver.random.sample([*order, *repeats], len(order) + len(repeats)):
        receiver.feed(*ALL[position])
        receiver.decode_some(receiver.random.randrange(3))
    receiver.decode_some(10**6)
    every = [(page, stream) for page in range(LAYOUT.page_count) for stream in range(STREAMS)]
    assert sorted(receiver.handed_out) == every
    assert len(receiver.ready) == STREAMS * (LAYOUT.layers + 1) + 1
    assert receiver.ready[-1] == TransferComplete(1)
    assert receiver.state.complete
    assert not any(receiver.state.owes(stream) for stream in range(STREAMS))
    for window in receiver.state.windows:
        assert window.held == 0
    for header, payload in ALL:  # late duplicates after decoding
        assert fill(receiver.state, header, payload) is None


def test_a_segment_in_flight_twice_is_placed_once() -> None:
    state = make_state()
    header, payload = ALL[0]
    view = fill(state, header, payload)
    assert state.place(header) is None
    assert view is not None
    state.segment_arrived(header, checksum(view))
    assert state.place(header) is None
    with pytest.raises(LocalProtocolError, match="not placed"):
        state.segment_arrived(header, checksum(view))


@pytest.mark.parametrize("index", range(0, len(ALL), 3))
def test_one_flipped_byte_names_where_it_is(index: int) -> None:
    header, payload = ALL[index]
    if not payload:
        return
    state = make_state()
    view = fill(state, header, payload)
    assert view is not None
    view[-1] ^= 1
    page = LAYOUT.page(header.page)
    with pytest.raises(IntegrityError, match=f"layer {page.layer} \\({page.kind}\\), stream {header.stream}") as caught:
        state.segment_arrived(header, checksum(view))
    assert (caught.value.transfer, caught.value.layer, caught.value.kind, caught.value.stream) == (
        1,
        page.layer,
        page.kind,
        header.stream,
    )


def test_an_empty_segment_has_a_checksum_too() -> None:
    state = make_state()
    page = next(page for page in range(LAYOUT.page_count) if sent_size(page, 0) == 0)
    header = SegmentHeader(1, page, 0, 0, 0, 0, checksum(b"") ^ 1)
    view = state.place(header)
    assert view is not None
    with pytest.raises(IntegrityError):
        state.segment_arrived(header, checksum(view))


BIG = next(page for page in range(LAYOUT.page_count) if sent_size(page, 0) == 10_000)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (SegmentHeader(1, LAYOUT.page_count, 0, 0, 1, 1, 0), "page 12"),
        (SegmentHeader(1, 0, STREAMS, 0, 1, 1, 0), "stream 2"),
        (SegmentHeader(1, BIG, 0, 1, 4096, 10_000, 0), "off the grid"),
        (SegmentHeader(1, BIG, 0, 0, 4095, 10_000, 0), "4095 bytes at 0"),
        (SegmentHeader(1, BIG, 0, 4096, 5904, 10_000, 0), "5904 bytes"),
        (SegmentHeader(1, BIG, 0, 0, 4096, 9_999, 0), "cannot have 9999"),
        (SegmentHeader(1, BIG, 0, 0, 0, 0, 0), "cannot have 0"),
        (SegmentHeader(1, BIG, 0, 4096 * 1000, 4096, 2**32 - 1, 0), "cannot have"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_segment_that_does_not_fit_the_offer(header: SegmentHeader, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        make_state().place(header)


def test_the_size_of_a_page_stream_cannot_change() -> None:
    state = make_state()
    assert state.place(SegmentHeader(1, BIG, 0, 0, 4096, 10_000, 0)) is not None
    with pytest.raises(RemoteProtocolError, match="changed"):
        state.place(SegmentHeader(1, BIG, 0, 4096, 4096, 20_000, 0))


def test_bytes_beyond_the_credit() -> None:
    state = make_state(initial_credit=4096)
    assert state.place(SegmentHeader(1, BIG, 0, 0, 4096, 10_000, 0)) is not None
    with pytest.raises(FlowControlError):
        state.place(SegmentHeader(1, BIG, 0, 4096, 4096, 10_000, 0))


def test_pages_in_order_never_exceed_the_early_bound_and_starting_them_all_does() -> None:
    """Rule 6: an initial credit of 1 MiB must not let a peer make us allocate every page of a large offer."""
    wide = CacheLayout(layers=50, tokens=5, heads=2, key_size=3, value_size=4, page_tokens=2)
    credit = 30_000
    anchors = [part for page in range(wide.page_count) for part in segments_of(1, page, 0)]
    total, early = 0, []
    for header, payload in anchors:
        total += header.length
        if total <= credit:
            early.append((header, payload))
    for seed in range(20):
        state = make_state(credit, accepted=False, layout=wide)
        for header, payload in random.Random(seed).sample(early, len(early)):
            assert fill(state, header, payload) is not None
    state = make_state(credit, accepted=False, layout=wide)
    assert state.early_bytes() == credit + 20_000
    allocated = 0

    def start_every_page() -> None:
        nonlocal allocated
        for header, _ in anchors:
            if header.offset == 0:
                state.place(header)
                allocated += header.stream_bytes

    with pytest.raises(FlowControlError, match="initial credit"):
        start_every_page()
    assert allocated <= state.early_bytes()


@pytest.mark.parametrize("fields", [{"layers": 0}, {"tokens": 0}, {"key_size": 0, "value_size": 0}], ids=str)
def test_a_transfer_without_pages_is_complete_at_once(fields: dict[str, int]) -> None:
    layout = replace(LAYOUT, **fields)
    state = make_state(layout=layout)
    events = state.start()
    assert events[-1] == TransferComplete(1)
    assert events.count(TransferComplete(1)) == 1
    assert [event for event in events if isinstance(event, StreamReady)] == [StreamReady(1, 0), StreamReady(1, 1)]
    assert len(events) == STREAMS * (layout.layers + 1) + 1
    assert state.complete
    assert state.early_bytes() == NEED_BYTES


def test_the_windows_of_later_streams_open_one_after_the_other() -> None:
    full = [1 << 20] * STREAMS
    state = ReceiveState(1, LAYOUT, STREAMS, 4096, page_sizes, full, NEED_BYTES, early_window=10_000)
    for window in state.windows[1:]:
        window.limit = NEED_BYTES
    state.accepted = True
    for stream in range(STREAMS):
        # Stream 0 is never narrowed, nor is one whose earlier streams are all in.
        assert [window.window for window in state.windows] == full[: stream + 1] + [10_000] * (STREAMS - 1 - stream)
        for header, payload in ALL:
            if header.stream == stream:
                fill(state, header, payload)
                state.segment_arrived(header, checksum(payload))
    assert [window.window for window in state.windows] == full


@pytest.mark.parametrize(("early", "full", "narrow"), [(0, 1 << 20, 8192), (0, 9000, 8192), (10_000, 9000, 9000)])
def test_a_narrow_window_holds_two_segments_and_is_no_wider_than_the_whole(early: int, full: int, narrow: int) -> None:
    state = ReceiveState(1, LAYOUT, STREAMS, 4096, page_sizes, [full] * STREAMS, 0, early_window=early)
    assert max(SIZES) > 4096
    assert state.windows[1].window == narrow


def test_nothing_is_ready_before_any_byte() -> None:
    assert make_state().start() == []


def test_decoding_what_was_not_handed_out_is_a_local_error() -> None:
    state = make_state()
    for use in (state.decoded, state.page_streams):
        with pytest.raises(LocalProtocolError):
            use(0, 0)
    for header, payload in segments_of(1, 0, 0):
        view = fill(state, header, payload)
        assert view is not None
        state.segment_arrived(header, checksum(view))
    state.decoded(0, 0)
    with pytest.raises(LocalProtocolError):
        state.decoded(0, 1)


def test_sizes_include_the_interesting_ones() -> None:
    used = {sent_size(page, stream) for page in range(LAYOUT.page_count) for stream in range(STREAMS)}
    assert used == set(SIZES)


BOUND = 10_000


def bounded_state(initial_credit: int = 0) -> ReceiveState:
    """Stream 0 of each page has one size, stream 1 any up to a bound."""
    sizes = [frozenset({5000}), range(BOUND + 1)]
    state = ReceiveState(1, LAYOUT, 2, 4096, lambda _: sizes, [NEED_BYTES] * 2, initial_credit)
    for window in state.windows:
        window.limit = NEED_BYTES
    state.accepted = True
    return state


@given(sizes=st.lists(st.integers(0, BOUND), min_size=LAYOUT.page_count, max_size=LAYOUT.page_count))
def test_a_stream_of_bounded_size_takes_any_size_and_counts_what_came(sizes: list[int]) -> None:
    state = bounded_state()
    for page, size in enumerate(sizes):
        for stream, data in enumerate((bytes(5000), bytes([page + 1]) * size)):
            for at in range(0, len(data), 4096) or (0,):
                part = data[at : at + 4096]
                fill(state, SegmentHeader(1, page, stream, at, len(part), len(data), checksum(part)), part)
                state.segment_arrived(
                    SegmentHeader(1, page, stream, at, len(part), len(data), checksum(part)), checksum(part)
                )
        assert bytes(state.page_streams(page, 1)[1]) == data
    assert state.windows[1].received == state.windows[1].held == sum(sizes)
    for page in range(LAYOUT.page_count):
        state.decoded(page, 1)
    assert state.windows[1].held == 0
    assert state.complete


@pytest.mark.parametrize("size", [BOUND + 1, 2**32 - 1])
def test_a_stream_beyond_its_bound_gets_no_memory(size: int) -> None:
    taken: list[int] = []

    class Counting(BufferPool):
        def take(self, size: int) -> memoryview:
            taken.append(size)
            return super().take(size)

    state = bounded_state()
    state.pool = Counting()
    with pytest.raises(RemoteProtocolError, match=f"cannot have {size} bytes"):
        state.place(SegmentHeader(1, 0, 1, 0, 4096, size, 0))
    assert taken == []
    assert state.windows[1].received == 0
    assert state.place(SegmentHeader(1, 0, 1, 0, 4096, BOUND, 0)) is not None
    assert taken == [BOUND]
    with pytest.raises(RemoteProtocolError, match="changed"):
        state.place(SegmentHeader(1, 0, 1, 4096, 4096, BOUND - 1, 0))


def test_credit_bounds_a_stream_of_bounded_size() -> None:
    state = bounded_state()
    state.windows[1].limit = 5000
    assert state.place(SegmentHeader(1, 0, 1, 0, 4096, 8192, 0)) is not None
    with pytest.raises(FlowControlError):
        state.place(SegmentHeader(1, 0, 1, 4096, 4096, 8192, 0))
