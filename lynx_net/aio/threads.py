"""Moving bytes with blocking threads: one thread a lane and direction, for lanes that are sockets.

The kernel's copies run outside the interpreter lock, so several lanes use several cores, and a call that waits for a
whole segment costs one wake-up instead of many. Here is their life, and sending; lane_receiver.py receives.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from lynx_net.aio import lane_io
from lynx_net.aio.lane_receiver import LaneReceiver
from lynx_net.aio.pump import Pump, PumpOwner, class_of, replaced_by_newer
from lynx_net.errors import ConnectionLostError, LynxError
from lynx_net.transport.base import lost
from lynx_net.wire.bursts import SendBytes, seal
from lynx_net.wire.framereader import FrameReader
from lynx_net.wire.scheduler import WaitUntil

if TYPE_CHECKING:
    from collections.abc import Callable

    from lynx_net.aio import _lanes
    from lynx_net.transport import Lane

__all__ = ["Connection", "ThreadPump"]

logger = logging.getLogger("lynx_net")

_STOP_S = 2.0
"""A thread whose socket is shut down ends at once; one that does not must not keep a closing link."""

_SMALL_BYTES = 128 * 1024
"""What is sent by the thread that made it, if nothing is being sent."""
_MAX_BATCH = 256
"""Frames that are sent together."""
_BATCH_S = 0.016
"""A lane takes together what it sends in so long, up to `LinkConfig.lane_batch_bytes`: every visit to the core costs
all lanes, and finds nothing of what it needs in the caches, through which the payloads go. It stops earlier for what
is more urgent."""


class Connection:
    """One connection of a lane: its socket, and what its two threads share."""

    def __init__(self, index: int, lane: Lane, sock: socket.socket, lock: threading.RLock, stop: bytearray) -> None:
        self.index = index
        self.lane = lane
        self.sock = sock
        self.reader = FrameReader()
        self.bulk: _lanes.Reader | None = None
        """Reads what is for lent buffers, where that can be done."""
        self.may_send = threading.Condition(lock)
        self.batch_bytes = 0
        """What the lane sends in `_BATCH_S`, by its last large batch."""
        self.rest: list[memoryview] = []
        """What another thread began to send and the kernel did not take at once."""
        self.sleeping = False
        self.stopping = False
        self.stop = stop
        """The core's byte: not 0 when the rest of what is being sent should be asked for again."""
        self.run: list[SendBytes] = []
        """The end of what is being sent, which may be stopped."""
        self.last = False
        """There was nothing more to send when it was chosen."""
        self.error: LynxError | None = None
        self.running = 0
        self.threads: list[threading.Thread] = []
        self.ended = asyncio.Event()


class ThreadPump(Pump):
    """Blocking threads. Takes over the sockets of its lanes, which must have one."""

    driver = "blocking threads"

    def __init__(self, owner: PumpOwner) -> None:
        super().__init__(owner)
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, Connection] = {}
        self._stopping = False
        self._idle = asyncio.Event()
        self._flushing = False
        # A blocked receive comes back several times per deadline, so that slow bytes count as heard.
        self._wait_s = owner.core.config.deadline_s / 4
        self._receiver = LaneReceiver(self, self._wait_s, self._failed)

    def attach(self, index: int, lane: Lane) -> None:
        owner, sock = self.owner, lane.plain_socket
        assert sock is not None
        sock.setblocking(True)
        timeout = struct.pack("@ll", int(self._wait_s), int(self._wait_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        logger.debug("lane %d to %s: %s", index, lane.peer, lane_io.describe())
        connection = Connection(index, lane, sock, owner.lock, owner.core.scheduler.stop_byte(index))
        connection.bulk = self._receiver.reader(index)
        for work, name in ((self._send_loop, "send"), (self._receiver.run, "receive")):
            thread = threading.Thread(
                target=self._run, args=(work, connection), name=f"lynx_net-{name}-{index}", daemon=True
            )
            connection.threads.append(thread)
        connection.running = len(connection.threads)
        with self.owner.lock:
            self._connections[index] = connection
        for thread in connection.threads:
            thread.start()

    async def detach(self, index: int) -> None:
        connection = self._connections.get(index)
        if connection is not None:
            if connection.error is None:
                connection.error = replaced_by_newer(connection.lane)
            await self._end(connection)

    def wake(self) -> None:
        self._receiver.wake()
        if self.handling:
            return  # once, when all that came together has been handled
        first = self._connections.get(0)
        if first is not None and first.sleeping and not first.rest:
            self._send_here(first)
        scheduler = self.owner.core.scheduler
        for index, connection in self._connections.items():
            if connection.sleeping and (scheduler.has_segments(index) or (index == 0 and scheduler.has_control())):
                connection.may_send.notify()

    def _send_here(self, connection: Connection) -> None:
        """Send what is small in the thread that made it, with the lock: waking the other one takes longer."""
        owner, now = self.owner, self.owner.clock()
        batch = owner.core.outgoing.send_small(_SMALL_BYTES, now)
        parts = _parts(connection.lane, batch)
        last = bool(parts) and not owner.core.outgoing.has_next(connection.index, now)
        for part in parts:
            buffers = seal(part, last and part is parts[-1])
            if connection.rest:
                connection.rest += map(memoryview, buffers)
            else:
                connection.lane.mark(class_of(part[0]))
                connection.rest = lane_io.send_now(connection.sock, buffers)
        owner.sent(batch)
        if connection.rest:
            connection.may_send.notify()

    async def flushed(self) -> None:
        while True:
            self._idle.clear()
            with self.owner.lock:
                first = self._connections.get(0)
                idle = first is not None and first.sleeping and not first.rest
                if self._stopping or (idle and not self.owner.core.scheduler.has_control()):
                    return
                self._flushing = True
            await self._idle.wait()

    async def stop(self) -> None:
        self._stopping = True
        self._idle.set()
        await asyncio.gather(*(self._end(connection) for connection in self._connections.values()))
        await self._receiver.stop()

    async def _end(self, connection: Connection) -> None:
        """Make both threads of a connection end, and wait for it."""
        self._shut(connection)
        try:
            async with asyncio.timeout(_STOP_S):
                await connection.ended.wait()
        except TimeoutError:
            alive = ", ".join(thread.name for thread in connection.threads if thread.is_alive())
            logger.exception("link to %s: threads that do not end: %s", connection.lane.peer, alive)
            connection.lane.close()

    def _shut(self, connection: Connection) -> None:
        with self.owner.lock:
            connection.stopping = True
            self._receiver.wake()
            connection.may_send.notify_all()
        # The peer may have closed it already; a thread that waits on it wakes up either way.
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)

    def _run(self, work: Callable[[Connection], None], connection: Connection) -> None:
        failure: BaseException | None = None
        try:
            work(connection)
        except BaseException as problem:
            failure = problem
        self._loop.call_soon_threadsafe(self._thread_ended, connection, failure)

    def _thread_ended(self, connection: Connection, failure: BaseException | None) -> None:
        connection.running -= 1
        error = None if failure is None else self._explained(failure, connection.lane)
        if connection.error is None:
            connection.error = error
        if connection.running:
            self._shut(connection)
            return
        connection.lane.close()
        with self.owner.lock:
            self._connections.pop(connection.index)
        if not self._stopping:
            if isinstance(connection.error, ConnectionLostError):
                self.owner.lane_ended(connection.index, connection.error, connection.reader.unfinished)
            elif connection.error is not None:
                self.owner.pump_failed(connection.error)
        connection.ended.set()

    def _failed(self, failure: BaseException) -> None:
        """The teller ended so."""
        error = self._explained(failure, None)
        if not self._stopping:
            self.owner.pump_failed(error)

    def _explained(self, failure: BaseException, lane: Lane | None) -> LynxError:
        """What ended a thread, as the link's waiters are told. What is a fault of ours is told to the loop, too."""
        if isinstance(failure, OSError) and lane is not None:
            return lost(lane.peer, failure)
        if isinstance(failure, LynxError):
            return failure
        self._loop.call_exception_handler({"message": "lynx_net link thread failed", "exception": failure})
        return LynxError(f"the link failed on this side: {failure!r}")

    def _send_loop(self, connection: Connection) -> None:
        owner = self.owner
        batch: list[SendBytes] = []
        sent = 0
        try:
            while not connection.stopping:
                with owner.lock:
                    self._account(connection, batch, sent)
                    batch = self._choose(connection)
                    rest, connection.rest = connection.rest, []
                sent = len(batch)
                if rest:
                    lane_io.send_all(connection.sock, rest)
                elif batch:
                    sent = self._send(connection, batch)
        finally:  # what failed counts as sent: it is sent again, as far as the peer has not got it
            with owner.lock:
                self._account(connection, batch, sent)

    def _account(self, connection: Connection, batch: list[SendBytes], sent: int) -> None:
        """The first `sent` of these left, the others go back. With the lock; empties the list.

        So a lane that has nothing to do holds no buffers.
        """
        run, owner = connection.run, self.owner
        if run:
            owner.core.outgoing.run_ended(connection.index, run, len(run) - len(batch) + sent, owner.clock())
            connection.run = []
        if sent < len(batch):
            del batch[sent:]
            self.wake()  # another lane may have nothing to do
        owner.sent(batch)
        batch.clear()

    def _choose(self, connection: Connection) -> list[SendBytes]:
        """Wait, with the lock, for what to send: control frames and small segments together, or a run of large ones.

        Nothing when the connection ends or has a rest to send.
        """
        owner, outgoing = self.owner, self.owner.core.outgoing
        batch: list[SendBytes] = []
        room_bytes = 0
        while not connection.stopping and not connection.rest:
            if not batch:
                room_bytes = outgoing.batch_bytes(connection.batch_bytes)
            now = owner.clock()
            chosen = outgoing.next_send(connection.index, now)
            if isinstance(chosen, SendBytes):
                batch.append(chosen)
                room_bytes -= len(chosen.data)
                if room_bytes > 0 and len(batch) < _MAX_BATCH:
                    connection.run = outgoing.send_run(connection.index, room_bytes, _MAX_BATCH - len(batch), now)
                    if not connection.run:
                        continue
                connection.last = not outgoing.has_next(connection.index, now)
                return batch + connection.run
            if batch:
                connection.last = True
                return batch
            timeout = chosen.at_s - now if isinstance(chosen, WaitUntil) else None
            connection.sleeping = True
            if connection.index == 0 and timeout is None and self._flushing:
                self._flushing = False
                self._loop.call_soon_threadsafe(self._idle.set)
            why = "pacing" if timeout is not None else outgoing.why_nothing()
            with owner.core.lane_stats[connection.index].waiting(why, owner.clock):
                connection.may_send.wait(timeout)
            connection.sleeping = False
        return batch

    def _send(self, connection: Connection, batch: list[SendBytes]) -> int:
        """Returns how many of them were sent; all but where the run at their end was stopped."""
        began_s = time.monotonic()
        must = len(batch) - len(connection.run)
        sent = 0
        parts = _parts(connection.lane, batch)
        for part in parts:
            connection.lane.mark(class_of(part[0]))
            last = connection.last and part is parts[-1]
            count = lane_io.IN_USE.send_batch(connection.sock, part, max(must - sent, 0), connection.stop, last)
            sent += count
            if count < len(part):
                return sent
        sent_bytes = sum([len(one.data) for one in batch])
        if sent_bytes >= min(_SMALL_BYTES, self.owner.core.outgoing.segment_bytes):
            rate = sent_bytes / max(time.monotonic() - began_s, 1e-9)
            most_bytes = self.owner.core.config.lane_batch_bytes
            connection.batch_bytes = min(int(rate * _BATCH_S), 2 * sent_bytes, most_bytes)
        return sent


def _parts(lane: Lane, batch: list[SendBytes]) -> list[list[SendBytes]]:
    """All at once, or one class after the other where the lane marks them."""
    if not batch or not lane.marks_classes:
        return [batch] if batch else []
    return [list(run) for _, run in itertools.groupby(batch, class_of)]
