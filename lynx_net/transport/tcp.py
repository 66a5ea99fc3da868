"""Lanes that are sockets, and TCP: non-blocking sockets driven by the event loop's readiness callbacks.

Streams and protocols of asyncio copy every byte at least once; here `recvmsg_into` writes into the final
buffer and `sendmsg` reads from the encoder's. A call is tried first and waited for only if the kernel is not ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from typing import TYPE_CHECKING, Any

from lynx_net.errors import ConnectionFailedError, ConnectionLostError, LynxError
from lynx_net.transport.base import Address, Lane, Listener, SocketOptions, Transport, failed, lost
from lynx_net.transport.options import LONE_NOTSENT_LOWAT_BYTES, NOTSENT_LOWAT_BYTES
from lynx_net.transport.setup import ClassMarks, set_low_water_mark, set_tcp_options, unpace_local

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["SocketLane", "SocketListener", "TcpTransport"]

_YIELD_BYTES = 1 << 20
"""A lane that never has to wait lets the other tasks run after this many bytes."""

BACKLOG = 1024
_LISTENING = frozenset(
    {"send_buffer_bytes", "congestion_control", "keepalive", "user_timeout_s", "dscp", "priority", "kernel_rate"}
)
_CONNECTING = _LISTENING | {"local_addresses"}
_OUT_OF_SOCKETS_WAIT_S = 0.1


class SocketLane(Lane):
    """A connected stream socket, non-blocking, owned by the lane."""

    def __init__(self, sock: socket.socket, peer: str, marks: ClassMarks | None = None) -> None:
        sock.setblocking(False)
        self.peer = peer
        self._sock = sock
        self._marks = marks
        self.marks_classes = marks is not None
        self._loop = asyncio.get_running_loop()
        self._unyielded_bytes = 0
        self._waits: set[asyncio.Future[None]] = set()

    @property
    def plain_socket(self) -> socket.socket:
        return self._sock

    def mark(self, stream: int | None) -> None:
        if self._marks is not None:
            try:
                self._marks.set(stream)
            except OSError as error:
                raise lost(self.peer, error) from error

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        views = [view for buffer in buffers if (view := memoryview(buffer).cast("B")).nbytes]
        while views:
            await self._let_others_run()
            try:
                sent = self._sock.sendmsg(views)
            except BlockingIOError:
                await self._wait(self._loop.add_writer, self._loop.remove_writer)
                continue
            except OSError as error:
                raise lost(self.peer, error) from error
            self._unyielded_bytes += sent
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]

    def try_send(self, data: bytes) -> bool:
        try:
            return self._sock.send(data) == len(data)
        except OSError:
            return False

    async def receive_into(self, views: Sequence[memoryview]) -> int:
        while True:
            await self._let_others_run()
            try:
                count = self._sock.recvmsg_into(views)[0]
            except BlockingIOError:
                await self._wait(self._loop.add_reader, self._loop.remove_reader)
                continue
            except OSError as error:
                raise lost(self.peer, error) from error
            self._unyielded_bytes += count
            return count

    def close(self) -> None:
        if self._sock.fileno() < 0:
            return
        for future in self._waits:
            if not future.done():
                future.set_exception(self._closed())
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()

    def _closed(self) -> ConnectionLostError:
        return ConnectionLostError(f"the connection to {self.peer} was closed on this side")

    async def _wait(self, add: Callable[..., object], remove: Callable[[int], object]) -> None:
        """Wait for one readiness callback of the loop."""
        self._unyielded_bytes = 0
        fd = self._sock.fileno()
        future: asyncio.Future[None] = self._loop.create_future()
        self._waits.add(future)
        add(fd, _resolve, future)
        try:
            await future
        finally:
            self._waits.discard(future)
            if self._sock.fileno() >= 0:
                remove(fd)

    async def _let_others_run(self) -> None:
        if self._sock.fileno() < 0:
            raise self._closed()
        if self._unyielded_bytes >= _YIELD_BYTES:
            self._unyielded_bytes = 0
            await asyncio.sleep(0)


class _TcpLane(SocketLane):
    """A TCP connection whose options are set."""

    def __init__(self, sock: socket.socket, peer: str, options: SocketOptions) -> None:
        super().__init__(sock, peer, ClassMarks.of(sock, options))
        self._lowat_is_set = options.notsent_lowat_bytes is not None
        set_low_water_mark(sock, options.notsent_lowat_bytes or NOTSENT_LOWAT_BYTES)

    def joined(self, lanes: int) -> None:
        if lanes == 1 and not self._lowat_is_set:
            set_low_water_mark(self._sock, LONE_NOTSENT_LOWAT_BYTES)


def _tcp_lane(sock: socket.socket, options: SocketOptions) -> _TcpLane:
    """A lane of a connected socket whose options are set; its first bytes are a greeting, which is control."""
    try:
        peer = _tcp_url(sock.getpeername())
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if options.congestion_control is None:
            unpace_local(sock)
        lane = _TcpLane(sock, peer, options)
        lane.mark(None)
    except OSError as error:
        sock.close()
        raise ConnectionLostError("the connection ended before it was used") from error
    except ConnectionLostError:
        sock.close()
        raise
    return lane


def _tcp_url(name: tuple[Any, ...]) -> str:
    """The URL of a socket's name: with the interface of a link-local address, IPv4 as IPv4."""
    host, port = name[:2]
    if len(name) == 4 and name[3] and "%" not in host:
        try:
            host += f"%{socket.if_indextoname(name[3])}"
        except OSError:  # the interface is gone
            host += f"%{name[3]}"
    if "." in host:
        host = host.removeprefix("::ffff:")
    return str(Address("tcp", host, port))


async def _resolve_host(host: str, port: int | None) -> list[tuple[int, tuple[Any, ...]]]:
    """Families and socket names of a host; raises OSError.

    An address in figures costs no thread, and keeps its interface: not every event loop leaves it on.
    """
    flags = socket.AI_PASSIVE | socket.AI_NUMERICHOST
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except socket.gaierror:
        address, percent, interface = host.partition("%")
        if percent:
            raise OSError(f"{address} is no IPv6 address, or {interface} no interface of this machine") from None
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise OSError(f"this cannot be a host name: {error}") from error
    if any(len(target) == 4 and target[0].startswith("fe80:") and not target[3] for *_, target in found):
        raise OSError(f"a link-local address needs its interface, as in [{host}%eth0]")
    return [(family, target) for family, _, _, _, target in found]


def _bind(sock: socket.socket, target: tuple[Any, ...], what: str) -> None:
    try:
        sock.bind(target)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConnectionFailedError(f"cannot {what}: {target[0]} is not an address of this machine") from error
        raise failed(what, error) from error


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class SocketListener(Listener):
    """A bound, listening stream socket; `make_lane` makes a lane of what it accepts, or closes it."""

    def __init__(self, sock: socket.socket, url: str, make_lane: Callable[[socket.socket], SocketLane]) -> None:
        self._sock = sock
        self._make_lane = make_lane
        self.url = url

    async def accept(self) -> Lane:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                if self._sock.fileno() < 0:
                    raise ConnectionLostError(f"{self.url} was closed") from error
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    # The kernel keeps the connection in its queue; others must be closed first.
                    await asyncio.sleep(_OUT_OF_SOCKETS_WAIT_S)
                continue
            with contextlib.suppress(ConnectionLostError):
                return self._make_lane(sock)

    def close(self) -> None:
        self._sock.close()


class TcpTransport(Transport):
    """`tcp://host:port`, IPv4 and IPv6.

    A host name is connected to by any of its addresses in turn, and listened on by the first of them. `tcp://[::]:0`
    accepts IPv4 as well, `tcp://0.0.0.0:0` only that.
    """

    async def connect(self, address: Address, options: SocketOptions) -> Lane:
        what = f"connect to {address}"
        options.check_usable(f"connecting to {address}", _CONNECTING)
        source = None
        loop = asyncio.get_running_loop()
        try:
            if options.local_addresses:
                what += f" from {options.local_addresses[0]}"
                source = (await _resolve_host(options.local_addresses[0], 0))[0]
            candidates = await _resolve_host(address.host, address.port)
        except OSError as error:
            raise failed(what, error) from error
        problem = OSError("no address of the same IP version")
        for family, target in candidates:
            if source is not None and source[0] != family:
                continue
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:
                problem = error
                continue
            try:
                sock.setblocking(False)
                set_tcp_options(sock, options)
                if source is not None:
                    _bind(sock, source[1], what)
                await loop.sock_connect(sock, target)
            except OSError as error:
                sock.close()
                problem = error
            except BaseException:
                sock.close()
                raise
            else:
                return _tcp_lane(sock, options)
        raise failed(what, problem) from problem

    async def listen(self, address: Address, options: SocketOptions) -> Listener:
        what = f"listen on {address}"
        options.check_usable(f"listening on {address}", _LISTENING)
        try:
            family, target = (await _resolve_host(address.host, address.port))[0]
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise failed(what, error) from error
        try:
            # A restarted server must not wait for the kernel to forget its last connections.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, target[0] != "::")
            set_tcp_options(sock, options)  # inherited by the connections it accepts
            _bind(sock, target, what)
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            raise failed(what, error) from error
        except LynxError:
            sock.close()
            raise
        return SocketListener(sock, _tcp_url(sock.getsockname()), lambda accepted: _tcp_lane(accepted, options))
