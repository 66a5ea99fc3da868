"""Moving bytes with blocking threads: one thread a lane and direction, for lanes that are sockets.

The kernel's copies run outside the interpreter lock, so several lanes use several cores, and a call that waits for a
whole segment costs one wake-up instead of many.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from typing import TYPE_CHECKING

from lynx_net.aio.pump import Pump, PumpOwner, handle_control, handle_segment, never_offered
from lynx_net.errors import ConnectionLostError, LynxError
from lynx_net.transport.base import lost
from lynx_net.wire.connection import SegmentAwaitsOffer
from lynx_net.wire.frames import ControlFrame, FrameReader, SegmentFrame, SegmentStart
from lynx_net.wire.scheduler import NothingToSend, SendBytes, WaitUntil

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lynx_net.transport import Lane
    from lynx_net.wire.frames import SegmentHeader

__all__ = ["ThreadPump"]

logger = logging.getLogger("lynx_net")

_WAIT_ALL_BYTES = 32 * 1024
"""Above this much missing payload a receive waits for all of it; below, it takes what is there and the next header."""

_STOP_S = 2.0
"""A thread whose socket is shut down ends at once; one that does not must not keep a closing link."""

_MAX_BUFFERS = 512


class ThreadPump(Pump):
    """Blocking threads. `sockets` are the lanes' own, taken over by the pump."""

    def __init__(self, owner: PumpOwner, lanes: Sequence[Lane], sockets: Sequence[socket.socket]) -> None:
        super().__init__(owner, lanes)
        self._sockets = sockets
        self._loop = asyncio.get_running_loop()
        self._conditions = [threading.Condition(owner.lock) for _ in lanes]
        self._offers = threading.Condition(owner.lock)
        self._sleeping: set[int] = set()
        self._stopping = False
        self._idle = asyncio.Event()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._all_ended = asyncio.Event()

    def start(self) -> None:
        # A blocking receive comes back several times per deadline, so that slow bytes count as heard.
        seconds = self.owner.core.config.deadline_s / 4
        timeout = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        for index, sock in enumerate(self._sockets):
            sock.setblocking(True)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            for work in (self._send_loop, self._receive_loop):
                name = f"lynx_net-{work.__name__.strip('_').split('_')[0]}-{index}"
                self._threads.append(threading.Thread(target=self._run, args=(work, index), name=name, daemon=True))
        self._running = len(self._threads)
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        self._offers.notify_all()
        for index in self._sleeping:
            self._conditions[index].notify()

    async def flushed(self) -> None:
        while True:
            self._idle.clear()
            with self.owner.lock:
                if 0 in self._sleeping and not self.owner.core.scheduler.has_control():
                    return
            await self._idle.wait()

    async def stop(self) -> None:
        with self.owner.lock:
            self._stopping = True
            self._offers.notify_all()
            for condition in self._conditions:
                condition.notify_all()
        for sock in self._sockets:
            # The peer may have closed it already; a thread that waits on it wakes up either way.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        try:
            async with asyncio.timeout(_STOP_S):
                await self._all_ended.wait()
        except TimeoutError:
            alive = ", ".join(thread.name for thread in self._threads if thread.is_alive())
            logger.exception("link to %s: threads that do not end: %s", self.lanes[0].peer, alive)
        for lane in self.lanes:
            lane.close()

    def _run(self, work: Callable[[int], None], index: int) -> None:
        error: LynxError | None = None
        failure: BaseException | None = None
        try:
            work(index)
        except OSError as problem:
            error = lost(self.lanes[index].peer, problem)
        except LynxError as problem:
            error = problem
        except BaseException as problem:
            error = ConnectionLostError(f"the link failed on this side: {problem!r}")
            failure = problem
        self._loop.call_soon_threadsafe(self._thread_ended, error, failure)

    def _thread_ended(self, error: LynxError | None, failure: BaseException | None) -> None:
        self._running -= 1
        if self._running == 0:
            self._all_ended.set()
        if error is not None and not self._stopping:
            self.owner.pump_failed(error)
        if failure is not None:
            self._loop.call_exception_handler({"message": "lynx_net link thread failed", "exception": failure})

    def _send_loop(self, index: int) -> None:
        owner, sock = self.owner, self._sockets[index]
        while True:
            with owner.lock:
                chosen = self._choose(index)
            if chosen is None:
                return
            _send_all(sock, chosen.seal())
            with owner.lock:
                owner.sent(chosen)

    def _choose(self, index: int) -> SendBytes | None:
        """Wait, with the lock, for something to send; None when the pump stops."""
        owner = self.owner
        while not self._stopping:
            now = owner.clock()
            match owner.core.next_send(index, now):
                case SendBytes() as chosen:
                    return chosen
                case WaitUntil(at_s):
                    timeout: float | None = at_s - now
                case NothingToSend():
                    timeout = None
            self._sleeping.add(index)
            if index == 0 and timeout is None:
                self._loop.call_soon_threadsafe(self._idle.set)
            self._conditions[index].wait(timeout)
            self._sleeping.discard(index)
        return None

    def _receive_loop(self, index: int) -> None:
        owner, sock, peer = self.owner, self._sockets[index], self.lanes[index].peer
        reader = FrameReader()
        while not self._stopping:
            views = reader.buffers()
            try:
                if views[0].nbytes >= _WAIT_ALL_BYTES:
                    count = sock.recv_into(views[0], 0, socket.MSG_WAITALL)
                else:
                    count = sock.recvmsg_into(views)[0]
            except BlockingIOError:
                continue
            if count == 0:
                raise ConnectionLostError(f"{peer} closed the connection")
            with owner.lock:
                owner.core.heard(owner.clock(), reader.segment)
            for frame in reader.received(count):
                match frame:
                    case ControlFrame(payload):
                        handle_control(owner, payload)
                    case SegmentStart(header):
                        for done in reader.deliver_to(self._place(header)):
                            handle_segment(owner, done)
                    case SegmentFrame():
                        handle_segment(owner, frame)

    def _place(self, header: SegmentHeader) -> memoryview | None:
        owner = self.owner
        with owner.lock:
            while True:
                try:
                    return owner.core.place(header, owner.clock())
                except SegmentAwaitsOffer:
                    if self._stopping:
                        return None
                    if not self._offers.wait(owner.core.config.deadline_s):
                        raise never_offered(header) from None


def _send_all(sock: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    """Send all buffers, as many at a time as the kernel takes."""
    views = [memoryview(buffer) for buffer in buffers]
    while views:
        sent = sock.sendmsg(views[:_MAX_BUFFERS])
        while views and sent >= views[0].nbytes:
            sent -= views.pop(0).nbytes
        if sent:
            views[0] = views[0][sent:]
