"""The TCP connection beside a UCX lane: a greeting with the worker's address, then notes of what was taken and sent."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lynx_net.errors import ConnectionLostError, HandshakeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lynx_net.transport.base import Lane, SocketOptions

__all__ = ["HANDSHAKE_S", "Hello", "Notes", "exchange_hellos", "window_bytes"]

HANDSHAKE_S = 5.0
"""A connection that has not greeted by then is closed."""

_HELLO = struct.Struct("<8sQII")
"""Magic, tag, window in bytes, length of the worker address that follows."""
_MAGIC = b"LYNXUCX1"
_MAX_ADDRESS_BYTES = 16 * 1024

_DEFAULT_WINDOW_BYTES = 1024 * 1024
_MIN_WINDOW_BYTES = 64 * 1024
_MAX_WINDOW_BYTES = 1 << 30

_NOTE = struct.Struct("<BQ")
_TAKEN, _FINISHED = 1, 2


@dataclass(frozen=True, slots=True)
class Hello:
    """What a side says first.

    Attributes:
        worker_address: where its UCX worker can be reached; opaque, at most 16 KiB.
        tag: the tag of messages to it.
        window_bytes: how far a sender may be ahead of what it has taken.
    """

    worker_address: bytes
    tag: int
    window_bytes: int


def window_bytes(options: SocketOptions) -> int:
    """The window a side grants: its receive buffer, within limits."""
    wanted = options.receive_buffer_bytes or _DEFAULT_WINDOW_BYTES
    return min(max(wanted, _MIN_WINDOW_BYTES), _MAX_WINDOW_BYTES)


async def exchange_hellos(lane: Lane, ours: Hello) -> Hello:
    """Greet and be greeted, on a TCP lane that carried nothing yet; reads not a byte more.

    Raises:
        HandshakeError: the other side speaks something else, or its values are impossible.
        ConnectionLostError: it closed the connection.
    """
    await lane.send([_HELLO.pack(_MAGIC, ours.tag, ours.window_bytes, len(ours.worker_address)), ours.worker_address])
    magic, tag, window, length = _HELLO.unpack(await _read(lane, _HELLO.size))
    if magic != _MAGIC:
        raise HandshakeError(f"{lane.peer} does not speak this version of the UCX greeting")
    if not _MIN_WINDOW_BYTES <= window <= _MAX_WINDOW_BYTES or not 0 < length <= _MAX_ADDRESS_BYTES:
        raise HandshakeError(f"{lane.peer} greets with impossible values of window or address length")
    return Hello(await _read(lane, length), tag, window)


async def _read(lane: Lane, count: int) -> bytes:
    data = memoryview(bytearray(count))
    filled = 0
    while filled < count:
        got = await lane.receive_into([data[filled:]])
        if got == 0:
            raise ConnectionLostError(f"{lane.peer} closed the connection during the UCX greeting")
        filled += got
    return bytes(data)


class Notes(asyncio.Protocol):
    """The connection after its greeting. `changed` is called in the event loop whenever something was learnt."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.peer_took_bytes = 0
        self.peer_sent_bytes: int | None = None
        """All that the peer has sent; known once it has finished."""
        self.ended = False
        self._changed: Callable[[], None] | None = changed
        self._pending = b""
        self._transport: Any = None

    def taken(self, count: int) -> None:
        """Tell the peer how many bytes this side has taken in all."""
        self._say(_TAKEN, count)

    def finished(self, count: int) -> None:
        """Tell the peer that nothing follows these bytes."""
        self._say(_FINISHED, count)

    def close(self, *, abort: bool) -> None:
        """End the connection; with `abort`, without sending what is still unsent."""
        self._changed = None
        if self._transport is not None:
            (self._transport.abort if abort else self._transport.close)()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        data = self._pending + data
        whole = len(data) - len(data) % _NOTE.size
        self._pending = data[whole:]
        for kind, count in _NOTE.iter_unpack(data[:whole]):
            if kind == _TAKEN:
                self.peer_took_bytes = max(self.peer_took_bytes, count)
            elif kind == _FINISHED:
                self.peer_sent_bytes = count
            else:
                self._transport.abort()  # not our protocol; the lane is lost
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc  # whatever the reason, nobody is there any more
        self.ended = True
        self._tell()

    def _say(self, kind: int, count: int) -> None:
        if self._transport is not None and not self.ended:
            self._transport.write(_NOTE.pack(kind, count))

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed()
