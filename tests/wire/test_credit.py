"""Credit windows: three integers that never promise more than the window, nor two windows with what is held."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynx_net.errors import FlowControlError, LocalProtocolError, RemoteProtocolError
from lynx_net.wire.credit import ReceiveWindow, SendWindow


@given(window=st.integers(2, 1000), steps=st.lists(st.tuples(st.integers(1, 500), st.booleans()), max_size=60))
def test_sender_and_receiver_agree_and_never_exceed_the_window(window: int, steps: list[tuple[int, bool]]) -> None:
    receive = ReceiveWindow(window)
    send = SendWindow()
    granted = receive.next_limit()
    assert granted == window
    send.grant(window)
    for wanted, consume in steps:
        count = min(wanted, send.available)
        send.use(count)
        receive.receive(count)
        receive.hold(count)
        assert receive.outstanding <= window
        assert receive.held + receive.outstanding <= 2 * window
        assert send.available == receive.outstanding
        if consume:
            receive.consume(receive.held)
        limit = receive.next_limit()
        if limit is not None:
            assert limit >= send.limit + window // 2
            send.grant(limit)
        assert receive.outstanding <= window
        assert receive.held + receive.outstanding <= 2 * window
        if receive.held <= window:
            assert send.available > window // 2 or send.available >= window - window // 2


def test_who_was_granted_all_it_can_need_hears_no_more() -> None:
    window = ReceiveWindow(100, most=150)
    assert window.next_limit() == 100
    window.receive(60)
    assert window.next_limit() == 160
    window.receive(90)
    assert not window.grant_due
    assert window.next_limit() is None


@given(segment=st.integers(1, 50), window=st.integers(0, 100), sizes=st.lists(st.integers(1, 50), max_size=50))
def test_two_segments_of_window_never_block_a_sender_of_whole_segments(
    segment: int, window: int, sizes: list[int]
) -> None:
    receive = ReceiveWindow(2 * segment + window)
    send = SendWindow()
    for size in sizes:
        count = min(size, segment)
        limit = receive.next_limit()
        if limit is not None:
            send.grant(limit)
        assert send.available >= count
        send.use(count)
        receive.receive(count)


@pytest.mark.parametrize("window_mib", [32, 96, 256])
def test_a_large_window_stays_open_while_as_much_is_held(window_mib: int) -> None:
    """A decoder holds pages for as long as it works; the sender goes on meanwhile."""
    window, segment = window_mib << 20, 1 << 20
    receiver, sender = ReceiveWindow(window), SendWindow()
    held: deque[int] = deque()
    least = window
    for number in range(1000):
        limit = receiver.next_limit()
        if limit is not None:
            sender.grant(limit)
        if number > window // segment:
            least = min(least, sender.available)
        sender.use(segment)
        receiver.receive(segment)
        receiver.hold(segment)
        held.append(segment)
        if len(held) * segment > window:
            receiver.consume(held.popleft())
    assert least >= window - max(window // 8, 8 << 20) - segment


@pytest.mark.parametrize(("window_mib", "grant_mib"), [(4, 2), (32, 8), (64, 16), (96, 16), (256, 32)])
def test_who_consumes_at_once_grants_seldom(window_mib: int, grant_mib: int) -> None:
    """A message for every so many bytes, and the sender has half of its window always."""
    window, segment, count = window_mib << 20, 1 << 20, 4096
    receiver, sender = ReceiveWindow(window), SendWindow()
    messages = 0
    for _ in range(count):
        limit = receiver.next_limit()
        if limit is not None:
            sender.grant(limit)
            messages += 1
        assert sender.available >= window // 2
        sender.use(segment)
        receiver.receive(segment)
        receiver.hold(segment)
        receiver.consume(segment)
    assert messages == 1 + (count - 1) // grant_mib


def test_old_and_repeated_grants_change_nothing() -> None:
    window = SendWindow(10)
    window.use(10)
    assert window.grant(20)
    assert not window.grant(15)
    assert window.available == 10
    assert not window.grant(20)
    assert window.available == 10


def test_sending_beyond_the_credit_is_a_local_error() -> None:
    window = SendWindow(10)
    with pytest.raises(LocalProtocolError):
        window.use(11)
    assert window.sent == 0


def test_receiving_beyond_the_grant_is_the_peers_error() -> None:
    window = ReceiveWindow(10, limit=5)
    with pytest.raises(FlowControlError, match="1 bytes more"):
        window.receive(6)
    assert issubclass(FlowControlError, RemoteProtocolError)
    window.receive(5)
    window.receive(0)


def test_consuming_what_was_never_held_is_a_local_error() -> None:
    window = ReceiveWindow(10)
    window.hold(3)
    with pytest.raises(LocalProtocolError):
        window.consume(4)


def test_an_initial_credit_beyond_the_window_is_not_taken_back() -> None:
    window = ReceiveWindow(10, limit=100)
    assert window.next_limit() is None
    window.receive(100)
    assert window.next_limit() == 110
