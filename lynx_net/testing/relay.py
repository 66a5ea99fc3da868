"""A TCP relay that can be slow, cut, mute, or wrong: what networks do, on demand."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Faults", "FaultyRelay"]

_READ_BYTES = 64 * 1024


@dataclass(slots=True)
class Faults:
    """What the relay does to the bytes that pass it; may be changed at any time.

    Attributes:
        rate_bps: bits per second of each connection and direction; None passes at once.
        delay_s: added to every byte, without lowering the rate.
        chunk_bytes: the most that is passed on at once.
        flip_at: absolute positions, in the direction to the server, whose byte is inverted.
        cut_at: position in the direction to the server at which both connections are reset.
    """

    rate_bps: float | None = None
    delay_s: float = 0.0
    chunk_bytes: int = _READ_BYTES
    flip_at: set[int] = field(default_factory=set)
    cut_at: int | None = None


class FaultyRelay:
    """Listens on a loopback port and relays to a server; `async with FaultyRelay.to("127.0.0.1", 7000) as relay`."""

    def __init__(self, host: str, port: int) -> None:
        self.faults = Faults()
        self.connections = 0
        self.refusing = False
        """While true, new connections are reset at once."""
        self.passed_bytes = 0
        """Bytes relayed in the direction to the server, all connections."""
        self._target = (host, port)
        self._moving = asyncio.Event()
        self._moving.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, host: str, port: int) -> AsyncIterator[FaultyRelay]:
        """Run a relay for the time of a block."""
        relay = cls(host, port)
        relay._server = await asyncio.start_server(relay._connected, "127.0.0.1", 0)
        try:
            yield relay
        finally:
            relay._server.close()
            relay.cut()
            for task in relay._tasks:
                task.cancel()
            await asyncio.gather(*relay._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        """Where to connect to."""
        assert self._server is not None
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stall(self) -> None:
        """Let nothing pass any more, and close no connection."""
        self._moving.clear()

    def resume(self) -> None:
        """Let everything pass again."""
        self._moving.set()

    def cut(self) -> None:
        """Reset every connection that is open now."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.refusing:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        tasks = [
            asyncio.create_task(self._relay(reader, far_writer, to_server=True)),
            asyncio.create_task(self._relay(far_reader, writer, to_server=False)),
        ]
        self._tasks.update(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._writers -= {writer, far_writer}
        for one in (writer, far_writer):
            one.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_server: bool) -> None:
        loop = asyncio.get_running_loop()
        faults = self.faults
        free_at_s = loop.time()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(min(faults.chunk_bytes, _READ_BYTES)):
                arrived_s = loop.time()
                if faults.rate_bps is not None:
                    free_at_s = max(free_at_s, arrived_s) + len(data) * 8 / faults.rate_bps
                else:
                    free_at_s = arrived_s
                await asyncio.sleep(max(free_at_s + faults.delay_s - arrived_s, 0))
                await self._moving.wait()
                if to_server:
                    data = self._spoil(data)
                writer.write(data)
                await writer.drain()
                if to_server and faults.cut_at is not None and self.passed_bytes >= faults.cut_at:
                    self.cut()
                    return
            if writer.can_write_eof():
                writer.write_eof()

    def _spoil(self, data: bytes) -> bytes:
        start = self.passed_bytes
        self.passed_bytes += len(data)
        wrong = [position - start for position in self.faults.flip_at if start <= position < self.passed_bytes]
        if not wrong:
            return data
        spoiled = bytearray(data)
        for position in wrong:
            spoiled[position] ^= 0xFF
        return bytes(spoiled)
