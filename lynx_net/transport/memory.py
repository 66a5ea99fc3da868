"""Lanes inside one process: the same behaviour as a socket, for tests and for virtual time.

Two bounded byte pipes make a connection. A name is listened on at most once per event loop.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from typing import TYPE_CHECKING

from lynx_net.errors import ConnectionFailedError, ConnectionLostError
from lynx_net.transport.base import Address, Lane, Listener, SocketOptions, Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MemoryLane", "MemoryTransport", "memory_pair"]

_PIPE_BYTES = 256 * 1024


class _Pipe:
    """Bytes from one side to the other, at most `capacity` of them at a time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.chunks: deque[memoryview] = deque()
        self.held = 0
        self.ended = False
        self.broken = False
        self.changed = asyncio.Event()

    def touch(self) -> None:
        self.changed.set()


class MemoryLane(Lane):
    """One end of an in-process connection."""

    def __init__(self, peer: str, outgoing: _Pipe, incoming: _Pipe) -> None:
        self.peer = peer
        self._out = outgoing
        self._in = incoming
        self._closed = False

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            while view.nbytes:
                self._check(self._out)
                room = self._out.capacity - self._out.held
                if room <= 0:
                    await self._changed(self._out)
                    continue
                part = view[:room]
                self._out.chunks.append(memoryview(bytes(part)))
                self._out.held += part.nbytes
                self._out.touch()
                view = view[room:]
        await asyncio.sleep(0)

    def try_send(self, data: bytes) -> bool:
        room = self._out.capacity - self._out.held
        if self._closed or self._out.broken or room < len(data):
            return False
        self._out.chunks.append(memoryview(bytes(data)))
        self._out.held += len(data)
        self._out.touch()
        return True

    async def receive_into(self, views: Sequence[memoryview]) -> int:
        pipe = self._in
        while not pipe.held:
            self._check(pipe)
            if pipe.ended:
                return 0
            await self._changed(pipe)
        self._check(pipe)
        total = 0
        for view in views:
            filled = 0
            while filled < view.nbytes and pipe.chunks:
                chunk = pipe.chunks.popleft()
                count = min(view.nbytes - filled, chunk.nbytes)
                view[filled : filled + count] = chunk[:count]
                filled += count
                if count < chunk.nbytes:
                    pipe.chunks.appendleft(chunk[count:])
            total += filled
        pipe.held -= total
        pipe.touch()
        return total

    def close(self) -> None:
        self._closed = True
        self._out.ended = True
        self._in.broken = True
        self._out.touch()
        self._in.touch()

    def break_connection(self) -> None:
        """Lose the connection as a reset would, with all that is on its way: both sides see ConnectionLostError."""
        for pipe in (self._out, self._in):
            pipe.broken = True
            pipe.chunks.clear()
            pipe.held = 0
            pipe.touch()

    def _check(self, pipe: _Pipe) -> None:
        if self._closed:
            raise ConnectionLostError(f"the connection to {self.peer} was closed on this side")
        if pipe.broken:
            raise ConnectionLostError(f"connection to {self.peer} lost")

    async def _changed(self, pipe: _Pipe) -> None:
        pipe.changed.clear()
        await pipe.changed.wait()


def memory_pair(capacity_bytes: int = _PIPE_BYTES) -> tuple[MemoryLane, MemoryLane]:
    """Two connected lanes; each direction holds at most `capacity_bytes` that were sent and not received."""
    forward, backward = _Pipe(capacity_bytes), _Pipe(capacity_bytes)
    return MemoryLane("memory:right", forward, backward), MemoryLane("memory:left", backward, forward)


_names: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, MemoryListener]] = weakref.WeakKeyDictionary()


class MemoryListener(Listener):
    """A name inside this process."""

    def __init__(self, address: Address) -> None:
        self.url = str(address)
        self._name = address.host
        self._queue: asyncio.Queue[MemoryLane | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def offer(self, lane: MemoryLane) -> None:
        """Give the listener a new lane."""
        self._queue.put_nowait(lane)

    async def accept(self) -> Lane:
        lane = await self._queue.get()
        if lane is None:
            raise ConnectionLostError(f"{self.url} was closed")
        return lane

    def close(self) -> None:
        _names.get(self._loop, {}).pop(self._name, None)
        self._queue.put_nowait(None)


class MemoryTransport(Transport):
    """`memory://name`."""

    async def connect(self, address: Address, options: SocketOptions) -> Lane:
        options.check_usable(f"connecting to {address}", ())
        listener = _names.get(asyncio.get_running_loop(), {}).get(address.host)
        if listener is None:
            raise ConnectionFailedError(f"cannot connect to {address}: nobody listens there")
        ours, theirs = memory_pair()
        listener.offer(theirs)
        return ours

    async def listen(self, address: Address, options: SocketOptions) -> Listener:
        options.check_usable(f"listening on {address}", ())
        names = _names.setdefault(asyncio.get_running_loop(), {})
        if address.host in names:
            raise ConnectionFailedError(f"cannot listen on {address}: the name is taken")
        listener = names[address.host] = MemoryListener(address)
        return listener
