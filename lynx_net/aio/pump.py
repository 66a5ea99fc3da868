"""Moving bytes between the lanes of a link and its protocol core, as tasks of the event loop.

A pump asks the core what each lane sends next, at the moment the lane can take it, and tells it what arrived. Whatever
the core answers with is handed to the link in order. `ThreadPump` (aio/threads.py) does the same with blocking threads.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from lynx_net.errors import ConnectionLostError, LynxError, RemoteProtocolError
from lynx_net.wire.bursts import SendBytes, seal
from lynx_net.wire.framereader import FrameReader
from lynx_net.wire.frames import ControlFrame, SegmentFrame, SegmentStart, checksum
from lynx_net.wire.incoming import SegmentAwaitsOffer
from lynx_net.wire.messages import decode_message
from lynx_net.wire.scheduler import NothingToSend, WaitUntil

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from lynx_net.transport import Lane
    from lynx_net.wire.connection import LinkCore
    from lynx_net.wire.events import Event
    from lynx_net.wire.frames import SegmentHeader

__all__ = ["LoopPump", "Pump", "PumpOwner"]


class PumpOwner(Protocol):
    """What a pump needs of its link."""

    core: LinkCore
    lock: threading.RLock
    """Held around every call of the core: links of one process share their credit book."""
    clock: Callable[[], float]

    def post(self, events: Sequence[Event]) -> None:
        """Handle events of the core, in order. May be called from any thread, with or without the lock."""

    def sent(self, batch: Sequence[SendBytes]) -> None:
        """These frames left; called with the lock."""

    def lane_ended(self, index: int, error: LynxError, unfinished: Sequence[SegmentHeader]) -> None:
        """A connection was lost and nothing uses it any more; `unfinished` had been placed. In the event loop."""

    def pump_failed(self, error: LynxError) -> None:
        """The link cannot go on. Called in the event loop."""


class Pump(ABC):
    """Moves the bytes of a link's lanes from `attach` to the end of `stop`."""

    driver: str
    """What moves the bytes, for people."""

    handling = False
    """Frames are being acted on, with the lock, and `post` will be called when that is done."""

    def __init__(self, owner: PumpOwner) -> None:
        self.owner = owner

    @abstractmethod
    def attach(self, index: int, lane: Lane) -> None:
        """Begin to move bytes over the (next) connection of this lane, which the pump owns from now on."""

    @abstractmethod
    async def detach(self, index: int) -> None:
        """Close the connection of a lane, if it has one; `lane_ended` has been called when this returns."""

    @abstractmethod
    def wake(self) -> None:
        """The core may have something new to send, or an offer has been decided on. Called with the lock."""

    @abstractmethod
    async def flushed(self) -> None:
        """Wait until lane 0 has sent everything the core had for it, or the pump stops."""

    @abstractmethod
    async def stop(self) -> None:
        """Close the lanes. When it returns, no task or thread of the pump touches the core or a buffer."""


class LoopPump(Pump):
    """One task a lane and direction, on the event loop. Works with every transport and with virtual time."""

    driver = "the event loop"

    def __init__(self, owner: PumpOwner) -> None:
        super().__init__(owner)
        self._wake: dict[int, asyncio.Event] = {}
        self._offers = asyncio.Event()
        self._idle = asyncio.Event()
        self._connections: dict[int, tuple[asyncio.Task[None], Lane]] = {}
        self._stopping = False

    def attach(self, index: int, lane: Lane) -> None:
        self._wake[index] = asyncio.Event()
        self._connections[index] = asyncio.create_task(self._drive(index, lane)), lane

    async def detach(self, index: int) -> None:
        if index in self._connections:
            task, lane = self._connections[index]
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():  # it had not begun
                lane.close()
                self.owner.lane_ended(index, replaced_by_newer(lane), [])

    def wake(self) -> None:
        self._idle.clear()
        self._offers.set()
        for wake in self._wake.values():
            wake.set()

    async def flushed(self) -> None:
        await self._idle.wait()

    async def stop(self) -> None:
        self._stopping = True
        self._idle.set()
        for task, _ in self._connections.values():
            task.cancel()
        for task, lane in self._connections.values():
            await asyncio.wait([task])
            lane.close()  # a task that had not begun closes nothing

    async def _drive(self, index: int, lane: Lane) -> None:
        """One connection, from its first byte to the report of its end."""
        reader = FrameReader()
        tasks = [
            asyncio.create_task(self._send_loop(index, lane)),
            asyncio.create_task(self._receive_loop(index, lane, reader)),
        ]
        replaced = False
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            replaced = True
        errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        lane.close()
        self._wake.pop(index, None)
        if self._stopping:
            return
        error = next((error for error in errors if error is not None), None)
        if replaced or isinstance(error, ConnectionLostError):
            gone = error if isinstance(error, ConnectionLostError) else replaced_by_newer(lane)
            self.owner.lane_ended(index, gone, reader.unfinished)
        elif isinstance(error, LynxError):
            self.owner.pump_failed(error)
        else:
            self.owner.pump_failed(ConnectionLostError(f"the link failed on this side: {error!r}"))
            asyncio.get_running_loop().call_exception_handler(
                {"message": "lynx_net link task failed", "exception": error}
            )

    async def _send_loop(self, index: int, lane: Lane) -> None:
        owner, wake = self.owner, self._wake[index]
        stats = owner.core.lane_stats[index]
        loop = asyncio.get_running_loop()
        while True:
            wake.clear()
            now = owner.clock()
            with owner.lock:
                chosen = owner.core.outgoing.next_send(index, now)
                last = not owner.core.outgoing.has_next(index, now)
            match chosen:
                case SendBytes():
                    lane.mark(class_of(chosen))
                    await lane.send(seal([chosen], last))
                    with owner.lock:
                        owner.sent([chosen])
                case WaitUntil(at_s):
                    timer = loop.call_later(at_s - now, wake.set)
                    with stats.waiting("pacing", owner.clock):
                        await wake.wait()
                    timer.cancel()
                case NothingToSend():
                    if index == 0:
                        self._idle.set()
                    with stats.waiting(owner.core.outgoing.why_nothing(), owner.clock):
                        await wake.wait()

    async def _receive_loop(self, index: int, lane: Lane, reader: FrameReader) -> None:
        owner = self.owner
        stats = owner.core.lane_stats[index]
        while True:
            count = await lane.receive_into(reader.buffers())
            if count == 0:
                raise ConnectionLostError(f"{lane.peer} closed the connection")
            whole = control = 0
            stats.received_bytes += count
            frames = reader.received(count)
            if not frames:
                with owner.lock:
                    owner.core.liveness.heard(owner.clock(), reader.segment)
            for frame in frames:
                match frame:
                    case ControlFrame(payload):
                        message = decode_message(payload)
                        with owner.lock:
                            owner.post(owner.core.message(message, owner.clock()))
                        whole += 1
                        control += 1
                    case SegmentStart(header):
                        for done in reader.deliver_to(await self._place(header)):
                            handle_segment(owner, done, checksum(b""))
                            whole += 1
                    case SegmentFrame(_, part):
                        handle_segment(owner, frame, 0 if part is None else checksum(part))
                        whole += 1
            with owner.lock:
                owner.core.frames_received(index, whole, control)
                owner.post([])

    async def _place(self, header: SegmentHeader) -> memoryview | None:
        owner = self.owner
        while True:
            self._offers.clear()
            try:
                with owner.lock:
                    return owner.core.incoming.place(header, owner.clock())
            except SegmentAwaitsOffer:
                try:
                    async with asyncio.timeout(offer_wait_s(owner)):
                        await self._offers.wait()
                except TimeoutError:
                    raise never_offered(header) from None


def class_of(chosen: SendBytes) -> int | None:
    """The class of a frame for `Lane.mark`: the stream of a segment, None for control."""
    return None if chosen.transfer is None else chosen.stream


def handle_segment(owner: PumpOwner, frame: SegmentFrame, payload_sum: int) -> None:
    """A whole segment with this checksum lies in its place, or was dropped. Compute the sum outside of the lock."""
    if frame.payload is None:
        return
    with owner.lock:
        if events := owner.core.incoming.segment(frame.header, payload_sum, owner.clock()):
            owner.post(events)


def offer_wait_s(owner: PumpOwner) -> float:
    """How long a segment waits for its offer, whose lane may be being re-opened."""
    return owner.core.config.deadline_s + owner.core.config.resume_s


def replaced_by_newer(lane: Lane) -> ConnectionLostError:
    """The peer opened a lane again whose end had not been noticed here."""
    return ConnectionLostError(f"{lane.peer} opened the connection anew")


def never_offered(header: SegmentHeader) -> RemoteProtocolError:
    """A segment whose offer stayed away."""
    return RemoteProtocolError(f"data of transfer {header.transfer}, which was never offered")
