"""Buffers for what arrives for a device."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lynx_gpu.ring import PinnedRing, ordinary_memory
from lynx_net.serdes.receive_pool import ReceivePool, piece_bytes, pinned_address

PIECE = 1000


def make_pool(room_bytes: int) -> ReceivePool:
    ring = PinnedRing(room_bytes, ordinary_memory, slab_bytes=1 << 14)
    while ring.grow():
        pass
    return ReceivePool(ring)


def test_buffers_of_other_sizes_make_room() -> None:
    """A codec whose pages have one size, then one whose pages have another, through memory for one of them."""
    pool = make_pool(1 << 14)

    def take_and_give_four(size: int) -> None:
        buffers = [pool.take(size) for _ in range(4)]
        assert all(pinned_address(buffer) is not None for buffer in buffers)
        while buffers:
            pool.give(buffers.pop())

    for size in (PIECE, 3 * PIECE, 2 * PIECE, PIECE):
        take_and_give_four(size)


def test_what_finds_no_room_is_ordinary_memory_and_kept_apart() -> None:
    pool = make_pool(2048)
    held = [pool.take(PIECE) for _ in range(4)]
    assert [pinned_address(buffer) is not None for buffer in held] == [True, True, False, False]
    addresses = [pinned_address(buffer) for buffer in held]
    for buffer in held:
        pool.give(buffer)
    again = [pool.take(PIECE) for _ in range(4)]
    assert sorted(a or 0 for a in addresses) == sorted(pinned_address(buffer) or 0 for buffer in again)
    assert pool.kept_bytes == 0


def test_empty_buffers_have_no_pinned_address_and_parts_have_their_own() -> None:
    pool = make_pool(1 << 14)
    assert pool.take(0).nbytes == 0
    assert pinned_address(memoryview(bytearray(PIECE))) is None
    buffer = pool.take(PIECE)
    at = pinned_address(buffer)
    assert at is not None
    assert (pinned_address(buffer[10:20]), pinned_address(buffer[PIECE:])) == (at + 10, None)


def test_about_the_same_size_is_the_same_memory() -> None:
    """Pages of `int4` and of a first stream of `lynx`, say: one codec after the other, in memory for one of them."""
    pool = make_pool(1 << 14)
    sizes = (1040, 1150, 1100)
    addresses = set()
    for size in sizes:
        buffer = pool.take(size)
        assert buffer.nbytes == size
        addresses.add(pinned_address(buffer))
        pool.give(buffer)
    assert len(addresses) == 1


def test_kept_pieces_stay_while_there_is_room_for_one_of_another_size() -> None:
    """A ring that is too small for a block of any."""
    pool = make_pool(1 << 14)
    kept = pool.take(PIECE)
    at = pinned_address(kept)
    pool.give(kept)
    del kept
    assert pinned_address(pool.take(3 * PIECE)) not in (at, None)
    assert pinned_address(pool.take(PIECE)) == at


def test_one_codec_after_the_other_does_not_cut_memory_small() -> None:
    """Memory for either of two long caches, and some of it for others: whatever has been there before, what comes next
    takes it in blocks, not page by page."""

    class Counted(PinnedRing):
        pieces = 0

        def take(self, size_bytes: int) -> memoryview | None:
            piece = super().take(size_bytes)
            self.pieces += piece is not None
            return piece

    ring = Counted(2 << 30, ordinary_memory)
    while ring.grow():
        pass
    pool = ReceivePool(ring)
    codecs = {4194824: 60, 2130440: 90, 1091656: 1500, 1183808: 1100, 1310720: 800}
    taken: list[int] = []
    for _ in range(6):
        for size, pages in codecs.items():
            before = ring.pieces
            held = [pool.take(size) for _ in range(pages)]
            assert all(pinned_address(buffer) is not None for buffer in held)
            taken.append(ring.pieces - before)
            while held:
                pool.give(held.pop())
    assert max(taken) <= 1500 * 1091656 // (24 << 20)


@given(st.integers(1, 1 << 40))
def test_an_eighth_of_a_piece_is_idle_at_most(size: int) -> None:
    room = piece_bytes(size)
    assert size <= room == piece_bytes(room)
    assert 8 * (room - size) <= room


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from([0, 100, 300, 1000, 5000]), st.booleans()), max_size=40))
def test_nobody_is_given_what_another_holds(steps: list[tuple[int, bool]]) -> None:
    pool = make_pool(1 << 13)
    held: list[memoryview] = []
    for number, (size, give) in enumerate(steps):
        if give and held:
            pool.give(held.pop(number % len(held)))
        buffer = pool.take(size)
        assert (buffer.nbytes, buffer.readonly, buffer.format) == (size, False, "B")
        held.append(buffer)
        for mark, one in enumerate(held):
            np.frombuffer(one, np.uint8)[:] = mark
        assert all((np.frombuffer(one, np.uint8) == mark).all() for mark, one in enumerate(held))
