"""TLS on lanes that can be looked into: what travels below it, and how a stream may end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from lynx_net.errors import ConnectionLostError, HandshakeError
from lynx_net.transport.memory import MemoryLane, memory_pair
from lynx_net.transport.tls import TlsLane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

MEGABYTE = 1 << 20


class Watched(MemoryLane):
    """Remembers the size of everything sent, and can be told to deliver nothing but the beginning."""

    def __init__(self, lane: MemoryLane) -> None:
        super().__init__(lane.peer, lane._out, lane._in)
        self.sent: list[int] = []

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        self.sent += [len(buffer) for buffer in buffers]
        await super().send(buffers)


@contextlib.asynccontextmanager
async def pair(certificates: Any) -> AsyncIterator[tuple[TlsLane, TlsLane, Watched]]:
    """A connecting and a serving lane whose handshake is done, and what lies below the first."""
    below, far_below = memory_pair()
    watched = Watched(below)
    tls = certificates.config()
    left = TlsLane(watched, tls.client_context(), "127.0.0.1")
    right = TlsLane(far_below, tls.server_context())
    try:
        await asyncio.gather(left.established(), right.established())
        yield left, right, watched
    finally:
        left.close()
        right.close()


async def test_a_lane_is_driven_by_the_loop_and_says_what_it_is(certificates: Any) -> None:
    async with pair(certificates) as (left, _, _):
        assert left.plain_socket is None


async def test_a_large_send_is_encrypted_piece_by_piece(certificates: Any) -> None:
    """Nobody reads: what is beyond recall stays a small part of what is to be sent."""
    async with pair(certificates) as (left, right, below):
        below.sent.clear()
        sending = asyncio.create_task(left.send([bytes(64 * MEGABYTE)]))
        for _ in range(100):
            await asyncio.sleep(0)
        assert sum(below.sent) < MEGABYTE
        got, target = 0, memoryview(bytearray(MEGABYTE))
        while got < 64 * MEGABYTE:
            got += await right.receive_into([target])
        await sending
        assert max(below.sent) < MEGABYTE / 2


async def test_a_close_is_a_clean_end(certificates: Any) -> None:
    async with pair(certificates) as (left, right, _):
        await left.send([b"last words"])
        left.close()
        target = bytearray(20)
        assert await right.receive_into([memoryview(target)]) == 10
        for _ in range(2):
            assert await right.receive_into([memoryview(target)]) == 0


async def test_an_end_without_the_end_of_tls_is_none(certificates: Any) -> None:
    async with pair(certificates) as (left, right, below):
        await left.send([b"and then"])
        below.close()
        assert await right.receive_into([memoryview(bytearray(20))]) == 8
        for _ in range(2):
            with pytest.raises(ConnectionLostError, match="cut off"):
                await right.receive_into([memoryview(bytearray(20))])


async def test_a_send_given_up_half_way_is_no_clean_end(certificates: Any) -> None:
    """The peer must not take a cancelled send that is followed by a close for the whole."""
    async with pair(certificates) as (left, right, _):
        sending = asyncio.create_task(left.send([bytes(4 * MEGABYTE)]))
        for _ in range(20):
            await asyncio.sleep(0)
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        left.close()
        got, error = await _read_to_the_end(right)
        assert 0 < got < 4 * MEGABYTE
        assert "cut off" in str(error)


async def _read_to_the_end(lane: TlsLane) -> tuple[int, ConnectionLostError | None]:
    got = 0
    try:
        while count := await lane.receive_into([memoryview(bytearray(MEGABYTE))]):
            got += count
    except ConnectionLostError as error:
        return got, error
    return got, None


async def test_a_lost_connection_is_found_by_both(certificates: Any) -> None:
    async with pair(certificates) as (left, right, below):
        waiting = asyncio.create_task(right.receive_into([memoryview(bytearray(1))]))
        await asyncio.sleep(0)
        below.break_connection()
        with pytest.raises(ConnectionLostError):
            await waiting
        with pytest.raises(ConnectionLostError):
            await left.send([b"x"])


async def test_a_close_in_the_middle_of_the_handshake(certificates: Any) -> None:
    """Everybody who waits for it is told, also those that come later."""
    below, _ = memory_pair()
    lane = TlsLane(below, certificates.config().server_context())
    calls = [lane.established(), lane.receive_into([memoryview(bytearray(1))]), lane.send([b"x"])]
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0)
    lane.close()
    outcomes = await asyncio.gather(*tasks, lane.established(), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ConnectionLostError] * 4


async def test_a_cancelled_wait_leaves_the_handshake_alone(certificates: Any) -> None:
    below, far_below = memory_pair()
    tls = certificates.config()
    right = TlsLane(far_below, tls.server_context())
    waiting = asyncio.create_task(right.receive_into([memoryview(bytearray(1))]))
    await asyncio.sleep(0)
    waiting.cancel()
    left = TlsLane(below, tls.client_context(), "127.0.0.1")
    await left.send([b"hello"])
    target = bytearray(5)
    assert await right.receive_into([memoryview(target)]) == 5
    assert target == b"hello"
    left.close()
    right.close()


async def test_a_certificate_that_is_refused_late_is_heard_while_sending(certificates: Any) -> None:
    """The serving side has closed before the first byte is sent; the reason is not lost with the connection."""
    below, far_below = memory_pair()
    tls = certificates.config()
    stranger = certificates.config(certificate=certificates.stranger)
    left = TlsLane(below, stranger.client_context(), "127.0.0.1")
    right = TlsLane(far_below, tls.server_context())
    await left.established()
    with pytest.raises(HandshakeError, match="not believed"):
        await right.established()
    right.close()
    with pytest.raises(HandshakeError, match="does not know the authority"):
        await left.send([b"greeting"])
    left.close()
