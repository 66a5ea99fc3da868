"""Which pages are decoded together: each with every stream or a later one, anchors first, and nothing waits forever."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lynx_net.serdes.waiting import BATCH_PAGES, WaitingPages
from lynx_net.wire.credit import ReceiveWindow, patience_bytes

LAYERS, PER_LAYER = 3, 11


def waiting(streams: int, run_pages: int, *, whole: bool) -> WaitingPages:
    return WaitingPages(
        streams=streams,
        pages_per_array=PER_LAYER,
        arrays=LAYERS,
        run_pages=run_pages,
        whole=whole,
        bytes_of=lambda page, stream: 10,
    )


@settings(deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 12), st.booleans(), st.integers(10, 200), st.integers(0, 2**32), st.integers(1, 6)
)
def test_every_page_gets_every_stream(
    streams: int, run_pages: int, whole: bool, limit_bytes: int, seed: int, patience: int
) -> None:
    """Pages arrive in any order, each with stream after stream; the decoder comes when something is due, or late."""
    rng = random.Random(seed)
    pages = waiting(streams, run_pages, whole=whole)
    arrived = [-1] * (LAYERS * PER_LAYER)
    decoded = [-1] * (LAYERS * PER_LAYER)

    def decode_all() -> None:
        while (batch := pages.next()) is not None:
            assert 1 <= len(batch.pages) <= max(BATCH_PAGES, run_pages)
            assert len(set(batch.pages)) == len(batch.pages)
            for page in batch.pages:
                assert decoded[page] < batch.stream <= arrived[page]
                decoded[page] = batch.stream

    coming = [page for page in range(len(arrived)) for _ in range(streams)]
    rng.shuffle(coming)
    late = 0
    for page in coming:
        arrived[page] += 1
        due = pages.add(page, arrived[page], limit_bytes)
        late = late + 1 if due or late else 0
        if late >= patience:
            decode_all()
            late = 0
    if late:
        decode_all()
    assert decoded == [streams - 1] * len(decoded)


def test_runs_are_alike_in_all_layers() -> None:
    """What is decoded together depends on places in the layer alone, whatever the order of arrival."""
    pages = waiting(1, 4, whole=True)
    order = list(range(LAYERS * PER_LAYER))
    random.Random(1).shuffle(order)
    found = []
    for page in order:
        if pages.add(page, 0, 10**9):
            batch = pages.next()
            assert batch is not None
            found.append(tuple(place % PER_LAYER for place in batch.pages))
        assert pages.next() is None
    assert sorted(found) == sorted([(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10)] * LAYERS)


def test_anchors_are_first_and_the_rest_may_skip_them() -> None:
    pages = waiting(2, 2, whole=True)
    for page in (0, 1):
        pages.add(page, 0, 10**9)
    for page in (2, 3):
        pages.add(page, 0, 10**9)
        pages.add(page, 1, 10**9)
    first, second = pages.next(), pages.next()
    assert first is not None
    assert second is not None
    assert (first.stream, first.pages) == (0, [0, 1])
    assert (second.stream, second.pages) == (1, [2, 3])  # not first without its residual and then with it
    assert pages.next() is None


@pytest.mark.parametrize("whole", [False, True])
def test_pages_that_hold_back_credit_do_not_wait_for_their_run(whole: bool) -> None:
    pages = waiting(1, 8, whole=whole)
    assert not pages.add(0, 0, 25)
    assert (pages.next() is None) is whole
    assert not pages.add(1, 0, 25) or not whole
    due = pages.add(2, 0, 25)
    assert due is whole
    batch = pages.next()
    assert batch is not None
    assert batch.pages == ([0, 1, 2] if whole else [1, 2])


def test_runs_that_are_due_come_together() -> None:
    pages = WaitingPages(
        streams=2, pages_per_array=4, arrays=4, run_pages=2, whole=True, bytes_of=lambda page, stream: 10, most_runs=3
    )
    for page in range(10):
        pages.add(page, 0, 10_000)
    assert pages.next() == (0, [0, 1, 2, 3, 4, 5], True)
    assert pages.next() == (0, [6, 7, 8, 9], True)
    assert pages.next() is None


def test_after_an_end_nothing_waits() -> None:
    pages = waiting(2, 1, whole=True)
    assert pages.add(0, 0, 10)
    pages.clear()
    assert pages.next() is None


def test_little_credit_of_a_later_stream_makes_no_small_batches_while_earlier_pages_wait() -> None:
    pages = waiting(2, 4, whole=True)
    pages.add(0, 0, 10**9)
    assert pages.next() is None
    pages.add(4, 0, 10**9)
    assert not pages.add(4, 1, 10)  # page 0 waits for its run
    assert pages.next() is None
    assert [pages.add(page, 0, 10**9) for page in (1, 2, 3)] == [False, False, True]
    found = [pages.next(), pages.next()]
    assert [(batch.stream, batch.pages) for batch in found if batch] == [(0, [0, 1, 2, 3])]
    for page in (5, 6, 7):
        pages.add(page, 0, 10**9)
    found = [pages.next(), pages.next()]
    assert [(batch.stream, batch.pages) for batch in found if batch] == [(0, [4, 5, 6, 7]), (1, [4])]


@settings(deadline=None)
@given(
    st.booleans(),
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(2, 12),
    st.integers(0, 30),
    st.integers(1, PER_LAYER),
    st.integers(0, 2**32),
)
@example(True, 9, 32, 7, 5, 6, 9)  # hung while three quarters of a window were allowed to wait
@example(True, 3, 27, 9, 22, 10, 26)
def test_what_waits_never_keeps_the_credit_of_the_next_segment(
    whole: bool, segment_bytes: int, most_bytes: int, segments: int, more_bytes: int, run_pages: int, seed: int
) -> None:
    """A sender with one window for pages of any sizes, in any order; the decoder comes when it is called, or late."""
    rng = random.Random(seed)
    largest_segment = min(segment_bytes, most_bytes)
    window = ReceiveWindow(segments * largest_segment + more_bytes)
    pages = WaitingPages(
        streams=1,
        pages_per_array=PER_LAYER,
        arrays=LAYERS,
        run_pages=run_pages,
        whole=whole,
        bytes_of=lambda page, stream: most_bytes,
        most_runs=rng.randint(1, 4),
    )
    least_bytes = rng.choice((0, most_bytes))
    sizes = [rng.randint(least_bytes, most_bytes) for _ in range(LAYERS * PER_LAYER)]
    order = list(range(len(sizes)))
    rng.shuffle(order)
    called = False
    decoded: set[int] = set()

    def decode_all() -> None:
        while (batch := pages.next()) is not None:
            decoded.update(batch.pages)
            window.consume(sum(sizes[page] for page in batch.pages))
            window.next_limit()

    window.next_limit()
    for page in order:
        left = sizes[page]
        while left:
            segment = min(left, segment_bytes)
            if called and (segment > window.outstanding or rng.random() < 0.3):
                decode_all()
                called = False
            assert segment <= window.outstanding, "sender and receiver wait for each other"
            window.receive(segment)
            window.next_limit()
            left -= segment
        window.hold(sizes[page])
        called |= pages.add(page, 0, patience_bytes(window.window, largest_segment))
    decode_all()
    assert decoded == set(order)
