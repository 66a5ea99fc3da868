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

from lynx_net.aio import lane_io
from lynx_net.aio.pump import Pump, PumpOwner, handle_control, handle_segment, never_offered
from lynx_net.errors import ConnectionLostError, LynxError
from lynx_net.transport.base import lost
from lynx_net.wire.connection import SegmentAwaitsOffer
from lynx_net.wire.frames import FrameReader, SegmentFrame, SegmentStart, checksum
from lynx_net.wire.scheduler import SendBytes, WaitUntil

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lynx_net.transport import Lane
    from lynx_net.wire.frames import Frame, SegmentHeader

__all__ = ["ThreadPump"]

logger = logging.getLogger("lynx_net")

_STOP_S = 2.0
"""A thread whose socket is shut down ends at once; one that does not must not keep a closing link."""

_BATCH_S = 0.001
"""Segments are sent together while that takes no longer: what has been chosen is ahead of everything urgent."""
_MAX_BATCH_BYTES = 4 * 1024 * 1024
_MAX_BATCH = 256
"""Frames that are sent together."""


class ThreadPump(Pump):
    """Blocking threads. `sockets` are the lanes' own, taken over by the pump."""

    def __init__(self, owner: PumpOwner, lanes: Sequence[Lane], sockets: Sequence[socket.socket]) -> None:
        super().__init__(owner, lanes)
        self._sockets = sockets
        self._loop = asyncio.get_running_loop()
        self._conditions = [threading.Condition(owner.lock) for _ in lanes]
        self._offers = threading.Condition(owner.lock)
        self._waiting_for_offer = 0
        self._sleeping: set[int] = set()
        # A blocked receive comes back several times per deadline, so that slow bytes count as heard.
        self._wait_s = owner.core.config.deadline_s / 4
        self._stopping = False
        self._idle = asyncio.Event()
        self._flushing = False
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._all_ended = asyncio.Event()

    def start(self) -> None:
        logger.debug("link to %s: %s", self.lanes[0].peer, lane_io.describe())
        timeout = struct.pack("@ll", int(self._wait_s), int(self._wait_s % 1 * 1e6))
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
        if self._waiting_for_offer:
            self._offers.notify_all()
        if not self._sleeping:
            return
        scheduler = self.owner.core.scheduler
        for index in self._sleeping if scheduler.has_segments() else (0,):
            self._conditions[index].notify()

    async def flushed(self) -> None:
        while True:
            self._idle.clear()
            with self.owner.lock:
                if 0 in self._sleeping and not self.owner.core.scheduler.has_control():
                    return
                self._flushing = True
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
        batch: list[SendBytes] = []
        least_bytes = batch_bytes = owner.core.segment_bytes
        while True:
            with owner.lock:
                for sent in batch:
                    owner.sent(sent)
                batch = self._choose(index, batch_bytes)
            if not batch:
                return
            began_s = owner.clock()
            lane_io.IN_USE.send_batch(sock, batch)
            took_s = owner.clock() - began_s
            if took_s > _BATCH_S:
                batch_bytes = max(batch_bytes // 2, least_bytes)
            elif took_s < _BATCH_S / 2 and sum(len(one.data) for one in batch) >= batch_bytes:
                batch_bytes = min(batch_bytes * 2, max(_MAX_BATCH_BYTES, least_bytes))

    def _choose(self, index: int, room_bytes: int) -> list[SendBytes]:
        """Wait, with the lock, for what to send: some `room_bytes` of it; nothing when the pump stops."""
        owner = self.owner
        batch: list[SendBytes] = []
        while not self._stopping:
            now = owner.clock()
            chosen = owner.core.next_send(index, now)
            if isinstance(chosen, SendBytes):
                batch.append(chosen)
                room_bytes -= len(chosen.data)
                if room_bytes > 0 and len(batch) < _MAX_BATCH:
                    continue
            if batch:
                return batch
            timeout = chosen.at_s - now if isinstance(chosen, WaitUntil) else None
            self._sleeping.add(index)
            if index == 0 and timeout is None and self._flushing:
                self._flushing = False
                self._loop.call_soon_threadsafe(self._idle.set)
            self._conditions[index].wait(timeout)
            self._sleeping.discard(index)
        return []

    def _receive_loop(self, index: int) -> None:
        sock, peer = self._sockets[index], self.lanes[index].peer
        reader = FrameReader()
        while not self._stopping:
            *payloads, tail = reader.buffers()
            try:
                count, sums = lane_io.IN_USE.receive_payloads(sock, payloads, tail, self._wait_s)
            except BlockingIOError:
                continue
            if count == 0:
                raise ConnectionLostError(f"{peer} closed the connection")
            self._handle(reader, reader.received(count), payloads, sums)

    def _handle(
        self, reader: FrameReader, frames: Sequence[Frame], views: Sequence[memoryview], view_sums: Sequence[int]
    ) -> None:
        """Frames in order, with the lock taken once for a whole burst. They begin with those that `views` filled."""
        owner = self.owner
        sums: list[int] = []
        for place, frame in enumerate(frames):
            if not isinstance(frame, SegmentFrame) or frame.payload is None:
                sums.append(0)
            elif place < len(view_sums) and len(views[place]) == len(frame.payload):
                sums.append(view_sums[place])
            else:  # its first bytes came in an earlier receive
                sums.append(checksum(frame.payload))
        with owner.lock:
            if not frames:
                owner.core.heard(owner.clock(), reader.segment)
            for frame, payload_sum in zip(frames, sums, strict=True):
                if isinstance(frame, SegmentFrame):
                    if frame.payload is not None:
                        owner.received(frame.header)
                        if events := owner.core.segment(frame.header, payload_sum, owner.clock()):
                            owner.post(events)
                elif isinstance(frame, SegmentStart):
                    for done in reader.deliver_to(self._place(frame.header)):
                        handle_segment(owner, done, checksum(b""))
                else:
                    handle_control(owner, frame.payload)
            owner.post(())  # there may be grants to send

    def _place(self, header: SegmentHeader) -> memoryview | None:
        """Called with the lock, which is free while this waits."""
        owner = self.owner
        while True:
            try:
                return owner.core.place(header, owner.clock())
            except SegmentAwaitsOffer:
                if self._stopping:
                    return None
                self._waiting_for_offer += 1
                owner.post(())
                try:
                    if not self._offers.wait(owner.core.config.deadline_s):
                        raise never_offered(header) from None
                finally:
                    self._waiting_for_offer -= 1
