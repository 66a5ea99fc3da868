"""What the receiving threads of a link do: bytes of a lane, frames, and what the core says of them.

Payloads go where the core says. Whole streams of pages for which buffers are lent (wire/lending.py) are received many
in a call, without the interpreter.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from lynx_net.aio import lane_io
from lynx_net.aio.pump import never_offered, offer_wait_s
from lynx_net.aio.teller import Teller
from lynx_net.errors import ConnectionLostError
from lynx_net.wire.frames import SegmentFrame, SegmentHeader, SegmentStart, checksum
from lynx_net.wire.incoming import SegmentAwaitsOffer
from lynx_net.wire.lending import Lender
from lynx_net.wire.messages import decode_message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lynx_net.aio import _lanes
    from lynx_net.aio.pump import Pump
    from lynx_net.aio.threads import Connection
    from lynx_net.wire.events import Event
    from lynx_net.wire.frames import Frame
    from lynx_net.wire.incoming import Arrived

__all__ = ["LaneReceiver"]

_MANY_LANES = 3
"""From so many on a thread of its own tells of what lanes have received: they would all wait for the interpreter."""


class LaneReceiver:
    """The receiving side of the lanes of a pump.

    Args:
        pump: of these lanes.
        wait_s: a blocked receive comes back after so long, so that slow bytes count as heard.
        failed: called in any thread with what ended the one that tells.
    """

    def __init__(self, pump: Pump, wait_s: float, failed: Callable[[BaseException], None]) -> None:
        owner = pump.owner
        self._pump = pump
        self._owner = owner
        self._wait_s = wait_s
        self._failed = failed
        self._offers = threading.Condition(owner.lock)
        self._waiting_for_offer = 0
        self._stock = lane_io.IN_USE.make_stock() if lane_io.IN_USE.make_stock is not None else None
        if self._stock is not None:
            owner.core.incoming.lender = Lender(self._stock, len(owner.core.lane_stats))
        self._teller: Teller | None = None

    def reader(self, index: int) -> _lanes.Reader | None:
        """What reads a new connection of a lane into lent buffers, where that can be done."""
        if self._stock is None:
            return None
        if self._teller is None and len(self._owner.core.lane_stats) >= _MANY_LANES:
            self._teller = Teller(self._stock, self._act_on_full, self._failed)
        return self._stock.reader(index)

    def wake(self) -> None:
        """An offer has been decided on, or a connection ends; with the lock."""
        if self._waiting_for_offer:
            self._offers.notify_all()

    async def stop(self) -> None:
        """All threads have ended."""
        if self._teller is not None:
            await self._teller.stop()

    def run(self, connection: Connection) -> None:
        """Receive until the connection ends. Of a thread of its own."""
        try:
            self._receive(connection)
        finally:
            if connection.bulk is not None:
                with self._owner.lock:
                    try:
                        if self._take_full():
                            self._owner.post(())
                    finally:
                        self._owner.core.incoming.not_filled(connection.bulk.abandon())

    def _receive(self, connection: Connection) -> None:
        sock, reader, bulk = connection.sock, connection.reader, connection.bulk
        stats = self._owner.core.lane_stats[connection.index]
        nothing = memoryview(bytearray())
        while not connection.stopping:
            if bulk is not None and reader.idle and not reader.small:
                self._receive_lent(connection, bulk)
                continue
            payloads: list[memoryview] = []
            ahead = reader.small and reader.idle
            if ahead:
                tail, more = reader.ahead(), nothing
            else:
                *payloads, tail = reader.buffers()
                more = reader.header_room()
                if bulk is not None and payloads:
                    tail = more = nothing  # there may be lent buffers for what comes next
            try:
                count, sums = lane_io.IN_USE.receive_payloads(sock, payloads, tail, more, self._wait_s)
            except BlockingIOError:
                continue
            if count == 0:
                raise ConnectionLostError(f"{connection.lane.peer} closed the connection")
            stats.received_bytes += count
            frames = reader.received_ahead(count) if ahead else reader.received(count)
            self._handle(connection, frames, _sums(frames, payloads, sums), ahead)

    def _receive_lent(self, connection: Connection, bulk: _lanes.Reader) -> None:
        """Segments as long as there are lent buffers for them, then the headers of what is something else."""
        owner = self._owner
        try:
            count, coming, headers = bulk.receive(connection.sock.fileno(), self._wait_s)
        except BlockingIOError:
            return
        if count == 0:
            raise ConnectionLostError(f"{connection.lane.peer} closed the connection")
        with owner.lock:
            if not self._take_full():
                owner.core.liveness.heard(owner.clock(), None if coming is None else SegmentHeader(*coming))
            owner.post(())
        if headers:
            frames = connection.reader.received_headers(headers)
            self._handle(connection, frames, _sums(frames, (), ()))

    def _handle(
        self, connection: Connection, frames: Sequence[Frame], sums: Sequence[int], ahead: bool = False
    ) -> None:
        """Frames in order with their checksums, and any read ahead behind them; the lock is taken once for all."""
        owner, reader = self._owner, connection.reader
        whole = control = 0
        with owner.lock:
            self._pump.handling = True
            try:
                if not frames:
                    owner.core.liveness.heard(owner.clock(), reader.segment)
                while frames:
                    more_whole, more_control = self._act_on(connection, frames, sums)
                    whole += more_whole
                    control += more_control
                    if not ahead:
                        break
                    frames = reader.received_ahead()
                    sums = _sums(frames, (), ())
            finally:
                self._pump.handling = False
            owner.core.frames_received(connection.index, whole, control)
            owner.post(())  # there may be something to send

    def _act_on(self, connection: Connection, frames: Sequence[Frame], sums: Sequence[int]) -> tuple[int, int]:
        """Returns how many whole frames, and control frames among them, these were. Called with the lock."""
        arrived: list[Arrived] = []
        whole = control = 0
        for frame, payload_sum in zip(frames, sums, strict=True):
            if isinstance(frame, SegmentFrame):
                whole += 1
                if frame.payload is not None:
                    arrived.append((frame.header, payload_sum))
            elif isinstance(frame, SegmentStart):
                if arrived:
                    self._take_in(arrived)
                for done in connection.reader.deliver_to(self._place(connection, frame.header)):
                    whole += 1
                    if done.payload is not None:
                        arrived.append((done.header, checksum(b"")))
            else:
                if arrived:
                    self._take_in(arrived)
                if events := self._owner.core.message(decode_message(frame.payload), self._owner.clock()):
                    self._owner.post(events)
                whole += 1
                control += 1
        if arrived:
            self._take_in(arrived)
        return whole, control

    def _take_in(self, arrived: list[Arrived]) -> None:
        """Segments that lie in their places; with the lock. Empties the list."""
        core = self._owner.core
        events: list[Event] = []
        try:
            core.incoming.segments(arrived, self._owner.clock(), events)
        finally:
            if events:
                self._owner.post(events)
        core.incoming.lend({(header.transfer, header.stream) for header, _ in arrived})
        arrived.clear()

    def _act_on_full(self) -> None:
        """For the teller."""
        with self._owner.lock:
            self._take_full()
            self._owner.post(())

    def _take_full(self) -> bool:
        """Act on what any lane has received into lent buffers; whether there was anything. With the lock."""
        assert self._stock is not None
        core = self._owner.core
        runs, counts = self._stock.take_full()
        for lane, _, received_bytes in counts:
            core.lane_stats[lane].received_bytes += received_bytes
        if runs:
            events: list[Event] = []
            self._pump.handling = True
            try:
                core.incoming.runs(runs, self._owner.clock(), events)
            finally:
                if events:
                    self._owner.post(events)
                self._pump.handling = False
            core.incoming.lend({run[:2] for run in runs})
        for lane, segments, _ in counts:
            core.frames_received(lane, segments)
        return bool(runs)

    def _place(self, connection: Connection, header: SegmentHeader) -> memoryview | None:
        """Called with the lock, which is free while this waits."""
        owner = self._owner
        while True:
            try:
                return owner.core.incoming.place(header, owner.clock())
            except SegmentAwaitsOffer:
                if connection.stopping:
                    return None
                self._waiting_for_offer += 1
                self._pump.handling = False
                owner.post(())
                try:
                    if not self._offers.wait(offer_wait_s(owner)):
                        raise never_offered(header) from None
                finally:
                    self._waiting_for_offer -= 1
                    self._pump.handling = True


def _sums(frames: Sequence[Frame], views: Sequence[memoryview], view_sums: Sequence[int]) -> list[int]:
    """The checksum of each frame that is a segment with a payload: the one that its view came with, or computed."""
    sums: list[int] = []
    for place, frame in enumerate(frames):
        if not isinstance(frame, SegmentFrame) or frame.payload is None:
            sums.append(0)
        elif place < len(view_sums) and len(views[place]) == len(frame.payload):
            sums.append(view_sums[place])
        else:  # its first bytes came in an earlier receive
            sums.append(checksum(frame.payload))
    return sums
