"""What every transport offers: lanes that move bytes, and listeners that accept lanes.

A transport knows nothing of frames. It maps operating system errors to `LynxError` here and nowhere else.
"""

from __future__ import annotations

import errno
import os
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lynx_net.errors import ConnectionFailedError, ConnectionLostError, LocalProtocolError, LynxError
from lynx_net.transport.options import SocketOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Address", "Lane", "Listener", "SocketOptions", "Transport", "failed", "lost"]


MAX_UNIX_PATH_BYTES = 107
"""`sockaddr_un` has room for this and a zero."""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL: scheme, host (or name, or path), and port (None where the scheme has none)."""

    scheme: str
    host: str
    port: int | None

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read "tcp://host:port", "tls://host:port", "tcp://[::1]:port", "unix:///path", "unix://@name", "memory://name"."""
        scheme, separator, rest = url.partition("://")
        if not separator or not scheme or not rest:
            raise LocalProtocolError(f"{url!r} is not an address; write for example tcp://127.0.0.1:7000")
        if scheme == "memory":
            return cls(scheme, rest, None)
        if scheme == "unix":
            if rest[0] not in "/@" or rest in ("/", "@") or "\0" in rest:
                raise LocalProtocolError(f"{url!r} is no address; write unix:///absolute/path or unix://@abstract-name")
            if len(os.fsencode(rest)) > MAX_UNIX_PATH_BYTES:
                raise LocalProtocolError(f"{url!r} is too long: a Unix address has at most {MAX_UNIX_PATH_BYTES} bytes")
            return cls(scheme, rest, None)
        host, colon, port = rest.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise LocalProtocolError(f"{url!r}: an IPv6 address needs brackets; write for example tcp://[::1]:7000")
        if not colon or not host or not port.isdecimal() or int(port) > 0xFFFF:
            raise LocalProtocolError(f"{url!r} lacks a host or a port; write for example tcp://127.0.0.1:7000")
        return cls(scheme, host, int(port))

    def __str__(self) -> str:
        if self.port is None:
            return f"{self.scheme}://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


class Lane(ABC):
    """One connection. One task sends and one task receives at a time."""

    peer: str
    """Address of the other side, for messages."""

    marks_classes = False
    """Whether `mark` does anything, so that bytes of different classes must not be sent together."""

    @property
    def plain_socket(self) -> socket.socket | None:
        """The socket, if the lane is nothing but one: threads may then drive it instead of the lane's methods."""
        return None

    def mark(self, stream: int | None) -> None:  # noqa: B027  # most lanes have no classes
        """The next bytes are of this stream, or control frames (None): set what `SocketOptions` has for that class.

        Called before every send, by whoever sends; cheap where the class does not change.

        Raises:
            ConnectionLostError: the connection broke.
        """

    def joined(self, lanes: int) -> None:  # noqa: B027  # most lanes are the same in every company
        """Its handshake is done, and it belongs to a link of so many lanes: set what depends on that."""

    @abstractmethod
    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Hand all bytes of the buffers to the transport, in order.

        The buffers must not change until the call returns. If it is cancelled or fails, an unknown
        part has been sent, and the lane can only be closed.

        Raises:
            ConnectionLostError: the peer is gone.
            HandshakeError: where the transport has a handshake of its own, it failed; also of `receive_into`.
        """

    def try_send(self, data: bytes) -> bool:
        """Hand a few last bytes to the transport without waiting, before a close; says whether all were taken.

        Nothing else may be sent behind bytes that were not taken whole.
        """
        del data
        return False

    @abstractmethod
    async def receive_into(self, views: Sequence[memoryview]) -> int:
        """Fill the writable views in order with what is there, at least one byte; 0 at the peer's end of stream.

        Cancelling loses no byte.

        Raises:
            ConnectionLostError: the connection broke.
        """

    @abstractmethod
    def close(self) -> None:
        """Close at once; pending calls end with an error. Bytes accepted before still reach a peer that reads."""


class Listener(ABC):
    """An address that accepts lanes."""

    url: str
    """The address that is really bound, port 0 resolved."""

    @abstractmethod
    async def accept(self) -> Lane:
        """Wait for the next lane."""

    @abstractmethod
    def close(self) -> None:
        """Stop accepting and free the address."""


class Transport(ABC):
    """Opens lanes and listeners for one URL scheme."""

    @abstractmethod
    async def connect(self, address: Address, options: SocketOptions) -> Lane:
        """Open a lane. Cancelling leaves nothing open.

        Raises:
            ConnectionFailedError: nobody listens there, or a local address cannot be used.
            LocalProtocolError: the kernel refuses an option, or it does not apply to such an address.
        """

    @abstractmethod
    async def listen(self, address: Address, options: SocketOptions) -> Listener:
        """Bind an address.

        Raises:
            ConnectionFailedError: it is taken, or not an address of this machine.
            LocalProtocolError: the kernel refuses an option, or it does not apply to such an address.
        """


def failed(what: str, error: OSError) -> ConnectionFailedError:
    """An OSError while connecting or binding."""
    if isinstance(error, socket.gaierror):
        reason = "the host name cannot be resolved"
    elif error.errno == errno.EADDRINUSE:
        reason = "the address is taken by another process"
    else:
        # Not `strerror`: event loops put texts of their own there.
        reason = str(error) if error.errno is None else os.strerror(error.errno)
    return ConnectionFailedError(f"cannot {what}: {reason}")


def lost(peer: str, error: OSError) -> LynxError:
    """An OSError on an open connection."""
    return ConnectionLostError(f"connection to {peer} lost: {error.strerror or error}")
