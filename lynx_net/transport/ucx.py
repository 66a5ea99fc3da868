"""`ucx://` addresses: a TCP port whose connections become UCX lanes once both sides have greeted (ucxlane.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from lynx_net.errors import ConnectionFailedError, ConnectionLostError, LynxError
from lynx_net.transport.base import Address, Lane, Listener, SocketOptions, Transport
from lynx_net.transport.tcp import TcpTransport
from lynx_net.transport.ucxlane import UcxLane
from lynx_net.transport.ucxnotes import HANDSHAKE_S, Hello, exchange_hellos, window_bytes
from lynx_net.transport.ucxworker import UcxWorker, load_ucx, worker_of_this_loop

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["UcxTransport"]

logger = logging.getLogger("lynx_net")

_MAX_HANDSHAKES = 256
_USABLE = frozenset({"keepalive", "user_timeout_s"})


async def _make_lane(worker: UcxWorker, tcp: Lane, options: SocketOptions) -> UcxLane:
    """Turn a fresh TCP connection into a lane; closes it if that fails."""
    sock = tcp.plain_socket
    assert sock is not None
    lane: UcxLane | None = None
    try:
        ours = Hello(worker.address, worker.new_tag(), window_bytes(options))
        theirs = await exchange_hellos(tcp, ours)
        lane = UcxLane(worker, "ucx" + tcp.peer.removeprefix("tcp"), ours, theirs)
        notes = lane.notes
        await asyncio.get_running_loop().create_connection(lambda: notes, sock=sock)
    except BaseException:
        if lane is not None:
            lane.close()
        tcp.close()
        raise
    return lane


class UcxListener(Listener):
    """A TCP port whose connections become lanes."""

    def __init__(self, worker: UcxWorker, tcp: Listener, options: SocketOptions) -> None:
        self.url = "ucx" + tcp.url.removeprefix("tcp")
        self._worker = worker
        self._tcp = tcp
        self._options = options
        self._lanes: asyncio.Queue[UcxLane | None] = asyncio.Queue()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._closed = False
        worker.acquire()
        self._accepting = asyncio.create_task(self._accept_loop())

    async def accept(self) -> Lane:
        lane = await self._lanes.get()
        if lane is None:
            self._lanes.put_nowait(None)
            raise ConnectionLostError(f"{self.url} was closed")
        return lane

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._accepting.cancel()
        for task in self._handshakes:
            task.cancel()
        self._tcp.close()
        while not self._lanes.empty():
            if (lane := self._lanes.get_nowait()) is not None:
                lane.close()
        self._lanes.put_nowait(None)
        self._worker.release()

    async def _accept_loop(self) -> None:
        while True:
            tcp = await self._tcp.accept()
            if len(self._handshakes) >= _MAX_HANDSHAKES:
                logger.warning("%s: too many connections in their greeting, closing one from %s", self.url, tcp.peer)
                tcp.close()
                continue
            task = asyncio.create_task(self._greet(tcp))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _greet(self, tcp: Lane) -> None:
        """One connection; whatever is wrong with it costs only itself."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                lane = await _make_lane(self._worker, tcp, self._options)
        except (LynxError, TimeoutError) as error:
            logger.info("%s: refused %s: %s", self.url, tcp.peer, str(error) or "no greeting in time")
        else:
            self._lanes.put_nowait(lane)


class UcxTransport(Transport):
    """`ucx://host:port`; raises BackendMissingError when ucxx is not installed.

    Of the socket options, `receive_buffer_bytes` is the window, and `keepalive` and `user_timeout_s` apply to the TCP
    connection of a lane. The others are errors: UCX chooses its own paths, and environment variables configure it.
    """

    def __init__(self) -> None:
        load_ucx()
        self._tcp = TcpTransport()

    async def connect(self, address: Address, options: SocketOptions) -> Lane:
        options.check_usable(f"connecting to {address}", _USABLE)
        with _worker_for(f"connect to {address}") as worker:
            tcp = await self._tcp.connect(address, _for_notes(options))
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    return await _make_lane(worker, tcp, options)
            except ConnectionLostError as error:
                raise ConnectionFailedError(f"cannot connect to {address}: {error}") from error
            except TimeoutError as error:
                reason = f"no UCX greeting in {HANDSHAKE_S:g} s"
                raise ConnectionFailedError(f"cannot connect to {address}: {reason}") from error

    async def listen(self, address: Address, options: SocketOptions) -> Listener:
        options.check_usable(f"listening on {address}", _USABLE)
        with _worker_for(f"listen on {address}") as worker:
            return UcxListener(worker, await self._tcp.listen(address, _for_notes(options)), options)


def _for_notes(options: SocketOptions) -> SocketOptions:
    """What the TCP connection of a lane gets."""
    return SocketOptions(keepalive=options.keepalive, user_timeout_s=options.user_timeout_s)


@contextlib.contextmanager
def _worker_for(what: str) -> Iterator[UcxWorker]:
    """The loop's worker while something is opened; who needs it longer acquires it again."""
    api = load_ucx()
    try:
        worker = worker_of_this_loop()
    except api.error as error:
        raise ConnectionFailedError(f"cannot {what}: UCX does not start: {error}") from error
    try:
        yield worker
    finally:
        worker.release()
