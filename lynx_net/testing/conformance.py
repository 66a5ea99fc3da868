"""What every transport must do. Subclass `TransportConformance` in a test module and say how to listen.

The methods are ordinary asyncio tests (pytest-asyncio in auto mode runs them). A transport passes when all do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from lynx_net.errors import ConnectionFailedError, ConnectionLostError
from lynx_net.transport import Address, Lane, Listener, SocketOptions, Transport, transport_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["TransportConformance"]

_MEGABYTE = 1 << 20
_OPTIONS = SocketOptions(notsent_lowat_bytes=64 * 1024, receive_buffer_bytes=512 * 1024)


async def _receive_exactly(lane: Lane, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    filled = 0
    while filled < count:
        got = await lane.receive_into([view[filled:]])
        assert got > 0, "the stream ended early"
        filled += got
    return bytes(data)


class TransportConformance:
    """The suite. `url` is an address to listen on; `free_url` one where nobody listens."""

    url: str
    free_url: str

    def transport(self, address: Address) -> Transport:
        """The transport under test; for those that need more than an address."""
        return transport_for(address)

    @contextlib.asynccontextmanager
    async def _pair(self) -> AsyncIterator[tuple[Lane, Lane]]:
        async with self._listener() as listener:
            address = Address.parse(listener.url)
            left, right = await asyncio.gather(self.transport(address).connect(address, _OPTIONS), listener.accept())
            try:
                yield left, right
            finally:
                left.close()
                right.close()

    @contextlib.asynccontextmanager
    async def _listener(self) -> AsyncIterator[Listener]:
        address = Address.parse(self.url)
        listener = await self.transport(address).listen(address, _OPTIONS)
        try:
            yield listener
        finally:
            listener.close()

    async def test_bytes_arrive_in_order_from_many_buffers(self) -> None:
        """Many buffers of odd sizes, empty ones among them, arrive as one stream."""
        sizes = [0, 1, 511, 512, 513, 0, 65535, 65536, 65537, 3]
        buffers = [memoryview(os.urandom(size)) for size in sizes]
        async with self._pair() as (left, right):
            _, got = await asyncio.gather(left.send(buffers), _receive_exactly(right, sum(sizes)))
        assert got == b"".join(buffers)

    async def test_receive_fills_several_views(self) -> None:
        """Bytes go into the views in order, and no further than there are bytes."""
        async with self._pair() as (left, right):
            await left.send([b"abcdefgh"])
            first, second = bytearray(3), bytearray(16)
            got = 0
            views = [memoryview(first), memoryview(second)]
            while got < 8:
                left_over = [memoryview(first)[got:], *views[1:]] if got < 3 else [memoryview(second)[got - 3 :]]
                got += await right.receive_into(left_over)
            assert (bytes(first), bytes(second[:5]), bytes(second[5:])) == (b"abc", b"defgh", bytes(11))

    async def test_both_directions_at_once(self) -> None:
        """A megabyte each way at the same time does not lock up."""
        left_data, right_data = os.urandom(_MEGABYTE), os.urandom(_MEGABYTE)
        async with self._pair() as (left, right):
            _, _, at_right, at_left = await asyncio.gather(
                left.send([left_data]),
                right.send([right_data]),
                _receive_exactly(right, _MEGABYTE),
                _receive_exactly(left, _MEGABYTE),
            )
        assert at_right == left_data
        assert at_left == right_data

    async def test_a_slow_reader_holds_the_sender_back(self) -> None:
        """A send of far more than any buffer holds does not finish before the peer reads."""
        data = bytes(64 * _MEGABYTE)
        async with self._pair() as (left, right):
            sending = asyncio.create_task(left.send([data]))
            for _ in range(50):
                await asyncio.sleep(0)
            assert not sending.done()
            await _receive_exactly(right, len(data))
            await sending

    async def test_end_of_stream_after_the_last_byte(self) -> None:
        """What was sent before a close arrives, then 0."""
        async with self._pair() as (left, right):
            await left.send([b"last words"])
            left.close()
            assert await _receive_exactly(right, 10) == b"last words"
            assert await right.receive_into([memoryview(bytearray(8))]) == 0

    async def test_cancelled_receive_loses_nothing(self) -> None:
        """Cancelling a waiting receive leaves the lane usable."""
        async with self._pair() as (left, right):
            receiving = asyncio.create_task(right.receive_into([memoryview(bytearray(8))]))
            await asyncio.sleep(0)
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await receiving
            await left.send([b"later"])
            assert await _receive_exactly(right, 5) == b"later"

    async def test_close_while_receiving(self) -> None:
        """A receive that waits ends with a typed error when its own side closes."""
        async with self._pair() as (left, _):
            receiving = asyncio.create_task(left.receive_into([memoryview(bytearray(8))]))
            for _ in range(3):
                await asyncio.sleep(0)
            left.close()
            assert isinstance(await _outcome(receiving), ConnectionLostError)

    async def test_close_while_sending(self) -> None:
        """A send that is blocked ends with a typed error when its own side closes."""
        async with self._pair() as (left, _):
            sending = asyncio.create_task(left.send([bytes(64 * _MEGABYTE)]))
            for _ in range(50):
                await asyncio.sleep(0)
            left.close()
            assert isinstance(await _outcome(sending), ConnectionLostError)

    async def test_sending_to_a_peer_that_left(self) -> None:
        """Sooner or later a send fails with a typed error, and never with an OSError."""
        async with self._pair() as (left, right):
            right.close()
            error: BaseException | None = None
            for _ in range(1000):
                error = await _outcome(asyncio.create_task(left.send([bytes(4096)])))
                if error is not None:
                    break
            assert isinstance(error, ConnectionLostError)

    async def test_closing_twice_is_harmless(self) -> None:
        """Close is idempotent, and a closed lane refuses to work."""
        async with self._pair() as (left, _):
            left.close()
            left.close()
            assert isinstance(await _outcome(asyncio.create_task(left.send([b"x"]))), ConnectionLostError)

    async def test_nobody_listens(self) -> None:
        """Connecting to a free address fails at once with a typed error."""
        address = Address.parse(self.free_url)
        task = asyncio.create_task(self.transport(address).connect(address, _OPTIONS))
        assert isinstance(await _outcome(task), ConnectionFailedError)

    async def test_the_address_is_taken(self) -> None:
        """Listening where somebody listens fails at once with a typed error."""
        async with self._listener() as listener:
            address = Address.parse(listener.url)
            task = asyncio.create_task(self.transport(address).listen(address, _OPTIONS))
            assert isinstance(await _outcome(task), ConnectionFailedError)

    async def test_an_address_can_be_bound_again(self) -> None:
        """After a close the same address can be listened on, again and again."""
        async with self._listener() as listener:
            url = Address.parse(listener.url)
        for _ in range(3):
            again = await self.transport(url).listen(url, _OPTIONS)
            again.close()


async def _outcome(task: asyncio.Task[object]) -> BaseException | None:
    """The exception a task ends with, or None."""
    await asyncio.wait([task], timeout=20)
    assert task.done(), "the call hangs"
    return task.exception()
