"""TCP lanes: non-blocking sockets driven by the event loop's readiness callbacks.

Streams and protocols of asyncio copy every byte at least once; here `recvmsg_into` writes into the final
buffer and `sendmsg` reads from the encoder's. A call is tried first and waited for only if the kernel is not ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from typing import TYPE_CHECKING

from lynx_net.errors import ConnectionLostError
from lynx_net.transport.base import Address, Lane, Listener, SocketOptions, Transport, failed, lost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["TcpTransport"]

_YIELD_BYTES = 1 << 20
"""A lane that never has to wait lets the other tasks run after this many bytes."""

_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_BACKLOG = 1024
_OUT_OF_SOCKETS_WAIT_S = 0.1


class TcpLane(Lane):
    """A connected socket, non-blocking, owned by the lane."""

    def __init__(self, sock: socket.socket, options: SocketOptions) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Not every kernel has the option; without it more bytes are beyond recall, nothing else changes.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, options.notsent_lowat_bytes)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._unyielded_bytes = 0
        self._waits: set[asyncio.Future[None]] = set()
        try:
            host, port = sock.getpeername()[:2]
        except OSError as error:
            sock.close()
            raise ConnectionLostError("the connection ended before it was used") from error
        self.peer = str(Address("tcp", host, port))

    @property
    def plain_socket(self) -> socket.socket:
        return self._sock

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


def _limit_receive_buffer(sock: socket.socket, options: SocketOptions) -> None:
    """Before the connection is made, since the window it announces follows from it."""
    if options.receive_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.receive_buffer_bytes)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class TcpListener(Listener):
    """A bound, listening socket."""

    def __init__(self, sock: socket.socket, options: SocketOptions) -> None:
        self._sock = sock
        self._options = options
        host, port = sock.getsockname()[:2]
        self.url = str(Address("tcp", host, port))

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
                return TcpLane(sock, self._options)

    def close(self) -> None:
        self._sock.close()


class TcpTransport(Transport):
    """`tcp://host:port`, IPv4 and IPv6."""

    async def connect(self, address: Address, options: SocketOptions) -> Lane:
        loop = asyncio.get_running_loop()
        what = f"connect to {address}"
        try:
            candidates = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise failed(what, error) from error
        problem: OSError | None = None
        for family, kind, protocol, _, target in candidates:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                _limit_receive_buffer(sock, options)
                await loop.sock_connect(sock, target)
            except OSError as error:
                sock.close()
                problem = error
            except BaseException:
                sock.close()
                raise
            else:
                return TcpLane(sock, options)
        raise failed(what, problem or OSError("no address")) from problem

    async def listen(self, address: Address, options: SocketOptions) -> Listener:
        what = f"listen on {address}"
        try:
            candidates = await asyncio.get_running_loop().getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except OSError as error:
            raise failed(what, error) from error
        family, kind, protocol, _, target = candidates[0]
        sock = socket.socket(family, kind, protocol)
        try:
            # A restarted server must not wait for the kernel to forget its last connections.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _limit_receive_buffer(sock, options)  # inherited by the connections it accepts
            sock.bind(target)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            raise failed(what, error) from error
        return TcpListener(sock, options)
