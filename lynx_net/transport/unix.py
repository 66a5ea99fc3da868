"""Unix sockets: the same lanes as TCP, inside one machine, with the permissions of a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
from typing import TYPE_CHECKING

from lynx_net.errors import ConnectionFailedError, ConnectionLostError
from lynx_net.transport.base import Address, Lane, Listener, SocketOptions, Transport, failed
from lynx_net.transport.setup import set_send_buffer
from lynx_net.transport.tcp import BACKLOG, SocketLane, SocketListener

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["UnixTransport"]

_CONNECTING = frozenset({"send_buffer_bytes"})
_LISTENING = _CONNECTING | {"unix_mode"}
_DEFAULT_MODE = 0o600
_LOCK_S = 2.0
_RETRY_S = 0.01


class UnixTransport(Transport):
    """`unix:///path`, and `unix://@name` in the abstract namespace, which has no files and no permissions.

    The file of a server that died is replaced; that of a live one, or a file that is no socket, is not.
    """

    async def connect(self, address: Address, options: SocketOptions) -> Lane:
        what = f"connect to {address}"
        options.check_usable(f"connecting to {address}", _CONNECTING)
        sock = _new_socket(what)
        try:
            sock.setblocking(False)
            set_send_buffer(sock, options.send_buffer_bytes)
            while True:
                try:
                    sock.connect(_socket_name(address))
                    break
                except BlockingIOError:  # its queue is full; unlike TCP, nothing tells when it no longer is
                    await asyncio.sleep(_RETRY_S)
        except OSError as error:
            sock.close()
            raise failed(what, error) from error
        except BaseException:
            sock.close()
            raise
        return SocketLane(sock, str(address))

    async def listen(self, address: Address, options: SocketOptions) -> Listener:
        what = f"listen on {address}"
        abstract = address.host.startswith("@")  # has no file
        options.check_usable(f"listening on {address}", _CONNECTING if abstract else _LISTENING)
        sock = _new_socket(what)
        try:
            set_send_buffer(sock, options.send_buffer_bytes)
            if abstract:
                sock.bind(_socket_name(address))
                sock.listen(BACKLOG)
            else:
                async with _directory_locked(address, what):
                    _remove_dead_socket(address.host, what)
                    sock.bind(address.host)
                    # Nobody can connect before `listen`, so nobody slips in under the permissions of the umask.
                    os.chmod(address.host, _DEFAULT_MODE if options.unix_mode is None else options.unix_mode)
                    sock.listen(BACKLOG)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            raise failed(what, error) from error
        except BaseException:
            sock.close()
            raise
        return UnixListener(sock, address, options)


class UnixListener(SocketListener):
    """A listening Unix socket; closing it removes its file, if that is still its own."""

    def __init__(self, sock: socket.socket, address: Address, options: SocketOptions) -> None:
        super().__init__(sock, str(address), self._accepted)
        self._options = options
        self._path = None if address.host.startswith("@") else address.host
        self._file = None if self._path is None else _identity(self._path)

    def _accepted(self, sock: socket.socket) -> SocketLane:
        try:
            set_send_buffer(sock, self._options.send_buffer_bytes)  # not inherited here
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError as error:
            sock.close()
            raise ConnectionLostError("the connection ended before it was used") from error
        pid, _, _ = struct.unpack("3i", credentials)
        return SocketLane(sock, f"{self.url} (process {pid})")

    def close(self) -> None:
        if self._path is not None and self._sock.fileno() >= 0:
            # A file that cannot be removed is harmless: the next server replaces it.
            with contextlib.suppress(OSError):
                # While the socket is open, its inode cannot be another file's.
                if _identity(self._path) == self._file:
                    os.unlink(self._path)
        super().close()


def _new_socket(what: str) -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise failed(what, error) from error


def _socket_name(address: Address) -> str | bytes:
    return b"\0" + os.fsencode(address.host[1:]) if address.host.startswith("@") else address.host


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


@contextlib.asynccontextmanager
async def _directory_locked(address: Address, what: str) -> AsyncIterator[None]:
    """One server at a time looks at a path and takes it; a socket that is bound and does not listen yet looks dead."""
    import fcntl  # here, so that the package can be imported on Windows

    directory = os.open(os.path.dirname(address.host), os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            async with asyncio.timeout(_LOCK_S):
                while True:
                    try:
                        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        await asyncio.sleep(_RETRY_S)
        except TimeoutError as error:
            raise ConnectionFailedError(f"cannot {what}: another process has locked the directory") from error
        yield
    finally:
        os.close(directory)


def _remove_dead_socket(path: str, what: str) -> None:
    """Remove the file of a server that is no more; raises OSError or ConnectionFailedError if it is something else."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConnectionFailedError(f"cannot {what}: there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:  # it listens, and is busy
            pass
    raise ConnectionFailedError(f"cannot {what}: the address is taken by another process")
