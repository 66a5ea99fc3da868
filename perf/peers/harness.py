"""What both processes of a peer do, whatever moves the bytes. Standard library and numpy only.

A plain TCP connection on loopback (the side connection) coordinates them. For every payload:

1. The sender announces its size; the receiver posts what its system needs and says that it is ready.
2. The clock starts, and the sender's system sends.
3. The receiver acknowledges on the side connection once it holds every byte, and the clock stops when that arrives.
   A two-sided system knows this by itself. A one-sided one (a write into registered memory) does not: the sender says
   when its system calls the write done, and the receiver then looks at its memory until all of it is there.

Every 64 KiB end in a number that changes with each payload, so "there" is a fact about the receiver's memory.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

__all__ = ["Peer", "Side", "main"]

STAMP_EVERY_BYTES = 64 * 1024
WARM_UPS = 3
_WORD = struct.Struct("<cQQ")
_LENGTH = struct.Struct("<I")
_LOOK_AGAIN_S = 20e-6


class Side:
    """The side connection, blocking or on an event loop."""

    def __init__(self, sock: socket.socket, blocking: bool) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(blocking)
        self._sock = sock
        self._blocking = blocking

    async def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            if self._blocking:
                part = self._sock.recv(count - len(data))
            else:
                part = await asyncio.get_running_loop().sock_recv(self._sock, count - len(data))
            if not part:
                raise ConnectionError("the other process ended")
            data += part
        return data

    async def _write(self, data: bytes) -> None:
        if self._blocking:
            self._sock.sendall(data)
        else:
            await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def say(self, kind: bytes, size: int = 0, number: int = 0) -> None:
        """One word to the other side."""
        await self._write(_WORD.pack(kind, size, number))

    async def hear(self, *kinds: bytes) -> tuple[bytes, int, int]:
        """The next word, which must be of one of these kinds."""
        kind, size, number = _WORD.unpack(await self._read(_WORD.size))
        if kind not in kinds:
            raise ConnectionError(f"heard {kind!r} instead of one of {kinds}")
        return kind, size, number

    async def give(self, data: bytes) -> None:
        """Some bytes, for setting up."""
        await self._write(_LENGTH.pack(len(data)) + data)

    async def take(self) -> bytes:
        """What the other side gave."""
        (length,) = _LENGTH.unpack(await self._read(_LENGTH.size))
        return await self._read(length)


class Peer(ABC):
    """One system. `memory` holds what is sent or where it arrives, as bytes, touched before any clock runs."""

    blocking = True
    """Calls block; else they run on the event loop."""
    one_sided = False
    """The receiver is not told when bytes have arrived."""
    in_memory = True
    """Received bytes are in `memory`; else the system has checked them itself."""

    def __init__(self, most_bytes: int) -> None:
        self.memory = np.ones(most_bytes, np.uint8)
        self.view = memoryview(self.memory.data)
        self.stamps = self.memory.view(np.uint64)[STAMP_EVERY_BYTES // 8 - 1 :: STAMP_EVERY_BYTES // 8]

    @abstractmethod
    async def start_receiver(self, side: Side) -> None:
        """Get ready to be sent to."""

    @abstractmethod
    async def start_sender(self, side: Side) -> None:
        """Get ready to send."""

    async def expect(self, size: int) -> None:  # noqa: B027  # a one-sided system has nothing to do
        """Post a receive, before the clock starts."""

    async def receive(self, size: int) -> None:  # noqa: B027
        """Return when all bytes have been received."""

    @abstractmethod
    async def send(self, size: int) -> None:
        """Send the first `size` bytes of `memory`; return when the system says that is done."""

    async def stop(self) -> None:  # noqa: B027
        """Close."""


async def _receiver(peer: Peer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        side = Side(server.accept()[0], peer.blocking)
    await peer.start_receiver(side)
    while True:
        kind, size, number = await side.hear(b"P", b"Q")
        if kind == b"Q":
            break
        stamps = peer.stamps[: size // STAMP_EVERY_BYTES]
        await peer.expect(size)
        await side.say(b"R")
        await peer.receive(size)
        if peer.one_sided:
            await side.hear(b"C")
            while not (stamps == number).all():
                time.sleep(_LOOK_AGAIN_S)  # noqa: ASYNC251  # nothing else runs, and this is quicker
        await side.say(b"A")
        if peer.in_memory and not (stamps == number).all():
            raise AssertionError("received bytes that were not sent")
    await peer.stop()
    await side.say(b"Q")


async def _sender(peer: Peer, port: int, sizes: list[int], repeats: int) -> dict[int, list[float]]:
    side = Side(socket.create_connection(("127.0.0.1", port)), peer.blocking)
    await peer.start_sender(side)
    number = 0
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for size in sizes:
        for repeat in range(WARM_UPS + repeats):
            number += 1
            peer.stamps[:] = number
            await side.say(b"P", size, number)
            await side.hear(b"R")
            began_s = time.perf_counter()
            await peer.send(size)
            if peer.one_sided:
                await side.say(b"C")
            await side.hear(b"A")
            if repeat >= WARM_UPS:
                seconds[size].append(time.perf_counter() - began_s)
    await side.say(b"Q")
    await side.hear(b"Q")
    await peer.stop()
    return seconds


def main(make: type[Peer], run: Any = asyncio.run) -> None:
    """`receive MOST_BYTES` prints a port; `send MOST_BYTES PORT SIZES REPEATS` prints seconds as JSON."""
    role, most, *rest = sys.argv[1:]
    peer = make(int(most))
    if role == "receive":
        run(_receiver(peer))
        return
    port, sizes, repeats = rest
    seconds = run(_sender(peer, int(port), [int(size) for size in sizes.split(",")], int(repeats)))
    print("SECONDS " + json.dumps(seconds), flush=True)
