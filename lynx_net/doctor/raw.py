"""The reference: bytes copied by blocking sockets in threads, without checksums, headers or an event loop.

A sink reads whatever a connection sends and answers its end with the number of bytes, 8 bytes little-endian.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Self

from lynx_net.doctor.facts import DoctorError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["RawSink", "copy"]

BUFFER_BYTES = 1 << 20
MAX_CONNECTIONS = 64
IDLE_S = 10.0
"""A connection that is silent for so long is closed."""


class RawSink:
    """Swallows bytes on a port of its own, for the time of a `with` block.

    Args:
        host: address to bind.
        port: 0 takes any.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self._server = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=MAX_CONNECTIONS
        )
        self.port: int = self._server.getsockname()[1]
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        """Who swallows of which connection. Those that are done stay until another comes, so that all are joined."""
        self._closing = False
        self._acceptor = threading.Thread(target=self._accept, name="lynx_net-doctor-sink", daemon=True)

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closing = True
            threads = [*self._open.values(), self._acceptor]
            for sock in (self._server, *self._open):
                # Wakes the thread that waits on it; it may be closed already.
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(0.1)  # out of descriptors; the kernel keeps the connection in its queue
                continue
            with self._lock:
                self._open = {one: thread for one, thread in self._open.items() if thread.is_alive()}
                if self._closing or len(self._open) >= MAX_CONNECTIONS:
                    sock.close()
                    continue
                sock.settimeout(IDLE_S)
                thread = self._open[sock] = threading.Thread(target=self._swallow, args=(sock,), daemon=True)
                thread.start()

    def _swallow(self, sock: socket.socket) -> None:
        buffer, total = bytearray(BUFFER_BYTES), 0
        # A peer that resets, or is silent for too long, gets no answer; it is its measurement that fails.
        with contextlib.suppress(OSError):
            while count := sock.recv_into(buffer):
                total += count
            sock.sendall(total.to_bytes(8, "little"))
        sock.close()


def copy(host: str, port: int, lanes: int, seconds: float) -> float:
    """Send to a sink over `lanes` connections for about `seconds`, blocking; returns bits a second that arrived.

    Raises:
        DoctorError: the sink cannot be reached, or did not get everything.
    """
    connections: list[socket.socket] = []
    sent, counted = [0] * lanes, [0] * lanes
    try:
        for _ in range(lanes):
            connections.append(socket.create_connection((host, port), timeout=IDLE_S))
        data = memoryview(bytes(BUFFER_BYTES))
        began_s = time.monotonic()

        def send(lane: int) -> None:
            # What goes wrong here shows in the counts.
            with contextlib.suppress(OSError):
                sock = connections[lane]
                while time.monotonic() - began_s < seconds:
                    sent[lane] += sock.send(data)
                sock.shutdown(socket.SHUT_WR)
                answer = bytearray()
                while len(answer) < 8 and (part := sock.recv(8 - len(answer))):
                    answer += part
                counted[lane] = int.from_bytes(answer, "little")

        threads = [threading.Thread(target=send, args=(lane,), daemon=True) for lane in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed_s = time.monotonic() - began_s
    except OSError as error:
        raise DoctorError(f"no raw copy to port {port}: {error.strerror or error}") from error
    finally:
        for connection in connections:
            connection.close()
    if counted != sent:
        raise DoctorError(f"the raw copy lost its connection: {sum(counted)} of {sum(sent)} bytes were counted")
    return sum(sent) * 8 / elapsed_s
