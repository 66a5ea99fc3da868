"""Bounded buffers: arena, pinned ring and staging memory, on host memory."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lynx_gpu.arena import ALIGN_BYTES, Arena
from lynx_gpu.ring import BufferTooLargeError, PinnedRing, Staging, ordinary_memory

if TYPE_CHECKING:
    from lynx_gpu.events import Memory


def whole(size: int) -> int:
    """What a piece takes."""
    return -(-max(size, 1) // ALIGN_BYTES) * ALIGN_BYTES


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.booleans()), max_size=60))
def test_pieces_never_overlap_and_everything_comes_back(steps: list[tuple[int, bool]]) -> None:
    arena = Arena(16 * ALIGN_BYTES)
    held: dict[int, int] = {}
    for size, keep in steps:
        offset = arena.take(size)
        if offset is None:
            taken = sorted((at, at + length) for at, length in held.items())
            gaps = zip([0, *(end for _, end in taken)], [*(at for at, _ in taken), arena.size_bytes], strict=True)
            assert max(end - at for at, end in gaps) < whole(size)
            if held:
                arena.give(held.popitem()[0])
            continue
        assert offset % ALIGN_BYTES == 0
        assert offset + size <= arena.size_bytes
        assert all(offset + size <= at or at + length <= offset for at, length in held.items())
        held[offset] = whole(size)
        if not keep:
            arena.give(offset)
            del held[offset]
    for offset in held:
        arena.give(offset)
    assert arena.used_bytes == 0
    assert arena.take(arena.size_bytes) == 0


class Counting:
    """Allocates host memory and knows how much of it there is."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, size_bytes: int) -> Memory:
        self.sizes.append(size_bytes)
        return ordinary_memory(size_bytes)


async def in_thread(work: Any) -> Any:
    return await asyncio.to_thread(work)


class TestRing:
    def test_a_piece_is_in_use_until_its_last_view_is_gone(self) -> None:
        ring = PinnedRing(4096, Counting(), 4096)
        assert ring.take(100) is None
        assert ring.grow()
        assert not ring.grow()
        piece = ring.take(4096)
        assert piece is not None
        part, whole = piece[10:20], memoryview(piece)
        del piece
        assert ring.take(1) is None
        del whole
        assert ring.take(1) is None
        part[:] = bytes(10)
        del part
        assert ring.used_bytes == 0
        assert ring.take(4096) is not None

    def test_it_grows_to_its_limit_and_no_further(self) -> None:
        allocate = Counting()
        ring = PinnedRing(2500, allocate, 1024)
        while ring.grow():
            pass
        assert allocate.sizes == [1024, 1024, 452]
        assert ring.allocated_bytes == 2500

    def test_all_or_none(self) -> None:
        ring = PinnedRing(4096, Counting(), 4096)
        ring.grow()
        held = ring.take(2048)
        assert ring.take_all([1024, 2048]) is None
        assert ring.used_bytes == 2048
        pieces = ring.take_all([1024, 1024])
        assert pieces is not None
        assert len(pieces) == 2
        del held

    async def test_who_waits_is_woken_from_another_thread_and_in_order(self) -> None:
        ring = PinnedRing(4096, Counting(), 4096)
        first = await ring.take_when_free([3000], lambda: in_thread(ring.grow))
        order: list[str] = []

        async def wait(name: str, size: int) -> list[memoryview]:
            pieces = await ring.take_when_free([size], lambda: in_thread(ring.grow))
            order.append(name)
            return pieces

        large = asyncio.create_task(wait("large", 3500))
        await asyncio.sleep(0.01)
        small = asyncio.create_task(wait("small", 100))
        await asyncio.sleep(0.01)
        assert ring.contended
        assert order == []  # there is room for the small one, but it is not its turn
        thread = threading.Thread(target=first.clear)
        thread.start()
        async with asyncio.timeout(5):
            await large
            await small
        thread.join()
        assert order == ["large", "small"]

    async def test_a_cancelled_wait_lets_the_next_one_have_it(self) -> None:
        ring = PinnedRing(4096, Counting(), 4096)
        held = await ring.take_when_free([3000], lambda: in_thread(ring.grow))
        gone = asyncio.create_task(ring.take_when_free([3000], lambda: in_thread(ring.grow)))
        await asyncio.sleep(0.01)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        async with asyncio.timeout(5):
            assert await ring.take_when_free([100], lambda: in_thread(ring.grow))
        assert len(held) == 1

    async def test_what_never_fits_is_an_error(self) -> None:
        ring = PinnedRing(4096, Counting(), 4096)
        with pytest.raises(BufferTooLargeError, match="5000 bytes"):
            await ring.take_when_free([5000], lambda: in_thread(ring.grow))


class Later:
    """An event that comes when somebody waits for it."""

    def __init__(self) -> None:
        self.waits = 0
        self.come = False

    def done(self) -> bool:
        return self.come

    def wait(self) -> None:
        self.waits += 1
        self.come = True


class TestStaging:
    def test_a_piece_is_free_when_its_event_has_come(self) -> None:
        staging = Staging(1024, Counting())
        events: list[Any] = [Later(), Later()]
        for event in events:
            staging.give(staging.take(512), event)
        assert [event.waits for event in events] == [0, 0]
        pointer = staging.take(512)  # there is no room but that of the oldest
        assert [event.waits for event in events] == [1, 0]
        staging.give(pointer, events[1])
        assert staging.allocated_bytes == 1024

    def test_what_never_fits_is_an_error(self) -> None:
        staging = Staging(1024, Counting())
        with pytest.raises(BufferTooLargeError, match="2000 bytes"):
            staging.take(2000)
        staging.take(1024)
        with pytest.raises(BufferTooLargeError, match="all of it"):
            staging.take(10)
