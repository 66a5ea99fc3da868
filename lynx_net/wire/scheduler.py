"""Which bytes go next. Asked at the moment a lane can take them, never earlier.

Rules:

1. Control frames first, in order, on lane 0 only; they are never held back by credit or pacing.
2. Then segments, by class: stream 0 of any transfer before stream 1 of any, and so on; exact streams last.
3. Inside a class the earliest deadline first; transfers of equal deadline take turns, a segment each, beginning with
   the one that has waited longest.
4. A transfer takes part in a class while it has bytes queued there and credit for its whole next segment.
5. A segment is cut when it is chosen, from one stream of one page: as many bytes as the transfer's segment size, fewer
   only at the end, so that segments begin at multiples of that size and the receiver can tell one from another. Pages
   of a stream go by their ranks, equal ones in the order in which they came; one that has begun is finished first.
6. Pacing delays segments as a whole; it never changes their order.
7. Where lane 0 is kept for what is urgent it takes no segment of a stream above 0: what lies in the buffers of a lane
   cannot be overtaken there.
8. A lane may be given a run of segments at once, the same that it would be given one by one. As soon as something has
   come that would go before the rest of them its stop byte is set: the lane looks at it between segments, and gives
   back those that it has not begun. These go first in their streams then, cut as they were.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lynx_net.errors import LocalProtocolError, RemoteProtocolError
from lynx_net.wire.bursts import SendBytes
from lynx_net.wire.frames import HEADER_BYTES, pack_control
from lynx_net.wire.messages import Message, encode_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lynx_net.wire.pacing import TokenBucket
    from lynx_net.wire.sendqueue import SendQueue

__all__ = ["NothingToSend", "Scheduler", "WaitUntil"]

MAX_CONTROL_BACKLOG_BYTES = 1 << 24
"""A peer that makes us answer and reads no answers is given up when this much waits for it."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Pacing: ask again at this time."""

    at_s: float


@dataclass(frozen=True, slots=True)
class NothingToSend:
    """Ask again after the scheduler's state has changed."""


class _Run(NamedTuple):
    """Segments that a lane is sending (rule 8)."""

    key: tuple[int, float]
    """Of the last of them."""
    queues: set[SendQueue]
    repeats: bool
    """Somebody has more than one turn in it."""
    payload_bytes: int

    def yields_to(self, key: tuple[int, float], queue: SendQueue) -> bool:
        """Whether a transfer that can send now should not wait for all of it."""
        return key < self.key or (key == self.key and self.repeats and queue not in self.queues)


class Scheduler:
    """Holds the queues of all transfers of a link and picks what is sent next."""

    def __init__(self, pacer: TokenBucket | None = None, *, urgent_lane: bool = False) -> None:
        self.pacer = pacer
        self._urgent_lane = urgent_lane
        self.control_bytes = 0
        """Bytes of control frames that wait."""
        self._control: deque[bytes] = deque()
        self._queues: dict[int, SendQueue] = {}
        # (class, deadline) -> transfers that are sendable there, in the order of their turns
        self._turns: dict[tuple[int, float], deque[SendQueue]] = {}
        # the keys of _turns, in order
        self._order: list[tuple[int, float]] = []
        self._runs: dict[int, _Run] = {}
        self._stops: dict[int, bytearray] = {}

    def control(self, message: Message) -> None:
        """Queue a control message."""
        frame = pack_control(encode_message(message))
        self._control.append(frame)
        self.control_bytes += len(frame)
        if 0 in self._runs:
            self._stops[0][0] = 1

    def check_backlog(self) -> None:
        """Called before the peer is answered; raises RemoteProtocolError if it does not read the answers."""
        if self.control_bytes > MAX_CONTROL_BACKLOG_BYTES:
            raise RemoteProtocolError("the peer asks without reading the answers")

    def open(self, queue: SendQueue) -> None:
        """Take up a transfer."""
        self._queues[queue.transfer] = queue

    def close(self, transfer: int) -> None:
        """Drop a transfer and whatever it still had queued. A segment whose sending has begun is not recalled."""
        queue = self._queues.pop(transfer, None)
        if queue is None:
            return
        for stream in range(len(queue.pages)):
            if queue.sendable(stream):
                key = (queue.classes[stream], queue.deadline_s)
                self._turns[key].remove(queue)
                self._forget_empty(key)
        for lane, run in self._runs.items():
            if queue in run.queues:
                self._stops[lane][0] = 1

    def submit(
        self,
        transfer: int,
        page: int,
        stream: int,
        data: memoryview,
        rank: tuple[int, ...] = (),
        checksum: int | None = None,
    ) -> None:
        """Queue one stream of one page. `data` must not change until it has been sent; the lowest `rank` goes first.

        `checksum` is that of the data, if it is known: it is used where all of it goes in one segment.

        Raises:
            LocalProtocolError: the transfer is not open or has no such page, or it was submitted before.
            TypeError: the buffer is not contiguous.
        """
        queue = self._queues.get(transfer)
        if queue is None:
            raise LocalProtocolError(f"transfer {transfer} is not open for sending")
        pages = queue.pages[stream] if 0 <= stream < len(queue.pages) else ()
        if pages and pages[0].rank <= rank:  # it does not go first
            queue.append(page, stream, data, rank, checksum)
            return
        was_sendable = 0 <= stream < len(queue.pages) and queue.sendable(stream)
        queue.append(page, stream, data, rank, checksum)
        if queue.sendable(stream) == was_sendable:
            return
        if was_sendable:  # what goes first now needs more credit
            key = (queue.classes[stream], queue.deadline_s)
            self._turns[key].remove(queue)
            self._forget_empty(key)
        else:
            self._enter(queue, stream)

    def grant(self, transfer: int, stream: int, limit: int) -> None:
        """Take a credit grant; one for a transfer that is over is ignored."""
        queue = self._queues.get(transfer)
        if queue is None or stream >= len(queue.windows):
            return
        was_sendable = queue.sendable(stream)
        queue.windows[stream].grant(limit)
        if not was_sendable and queue.sendable(stream):
            self._enter(queue, stream)

    def has_control(self) -> bool:
        """True while control frames are queued."""
        return bool(self._control)

    def small(self, room_bytes: int, now: float) -> list[SendBytes]:
        """What `next` would answer on lane 0, as long as it is small and fits into the room.

        Small are control frames, and the last page of a transfer.
        """
        chosen: list[SendBytes] = []
        while self._control and len(self._control[0]) <= room_bytes:
            chosen.append(self._next_control(now))
            room_bytes -= len(chosen[-1].data)
        while not self._control and self.has_next(0, now):
            key = self._order[0]
            queue = self._turns[key][0]
            if queue.unsent > 1 or queue.next_length(queue.stream_in(key[0])) > room_bytes:
                break
            chosen += self._take_turn(now)
            room_bytes -= len(chosen[-1].data)
        return chosen

    def has_segments(self, lane: int) -> bool:
        """True while a segment could be sent on this lane now, pacing aside."""
        return bool(self._order) and not (self._urgent_lane and lane == 0 and self._order[0][0] > 0)

    def has_next(self, lane: int, now: float) -> bool:
        """True while `next` would answer with a segment, were it not for control frames."""
        return self.has_segments(lane) and (self.pacer is None or self.pacer.ready_at(now) <= now)

    def has_work(self) -> bool:
        """True while anything could be sent now, pacing aside."""
        return bool(self._control or self._turns)

    def sendable_bytes(self, enough: int) -> int:
        """Payload bytes that are queued and have credit, counted up to about `enough`."""
        total = 0
        for key in self._order:
            for queue in self._turns[key]:
                stream = queue.stream_in(key[0])
                total += min(queue.queued_bytes[stream], queue.windows[stream].available)
                if total >= enough:
                    return total
        return total

    def next(self, lane: int, now: float) -> SendBytes | WaitUntil | NothingToSend:
        """Decide what this lane sends now (rules 1 to 7). The answer counts as sent."""
        if self._control and lane == 0:
            return self._next_control(now)
        if not self.has_segments(lane):
            return NothingToSend()
        if self.pacer is not None:
            ready_at = self.pacer.ready_at(now)
            if ready_at > now:
                return WaitUntil(ready_at)
        return self._take_turn(now)[0]

    def run(self, lane: int, room_bytes: int, most: int, now: float) -> list[SendBytes]:
        """What `next` would answer then: segments, up to the one that fills the room (rule 8).

        When they have been sent, or not, `run_ended` says so; until then the lane has no other run.
        """
        if (self._control and lane == 0) or not self.has_segments(lane):
            return []
        key = self._order[0]
        chosen: list[SendBytes] = []
        queues: set[SendQueue] = set()
        run_bytes = 0
        while run_bytes < room_bytes and len(chosen) < most and self.has_next(lane, now):
            key = self._order[0]
            queues.add(self._turns[key][0])
            taken = self._take_turn(now, room_bytes - run_bytes, most - len(chosen))
            run_bytes += sum([len(one.data) for one in taken])
            chosen += taken
        if chosen:
            self._runs[lane] = _Run(key, queues, len(chosen) > len(queues), run_bytes)
            self.stop_byte(lane)[0] = 0
        return chosen

    def run_ended(self, lane: int, unsent: Sequence[SendBytes], now: float) -> None:
        """The run of a lane is over; these, the last of it, were not sent. Those of ended transfers are dropped."""
        self._runs.pop(lane, None)
        for segment in reversed(unsent):
            queue = None if segment.transfer is None else self._queues.get(segment.transfer)
            if queue is None:
                continue
            was_sendable = queue.sendable(segment.stream)
            queue.give_back(segment)
            self._pay(-HEADER_BYTES - len(segment.data), now)
            if not was_sendable:
                self._enter(queue, segment.stream)

    @property
    def running_bytes(self) -> int:
        """Payload bytes that lanes are sending in runs."""
        return sum([run.payload_bytes for run in self._runs.values()])

    def stop_byte(self, lane: int) -> bytearray:
        """One byte that is not 0 when the lane should end its run; the same object for ever."""
        return self._stops.setdefault(lane, bytearray(1))

    def stop_runs(self) -> None:
        """What was decided may not hold any more: have all lanes ask again."""
        for lane in self._runs:
            self._stops[lane][0] = 1

    def _next_control(self, now: float) -> SendBytes:
        frame = self._control.popleft()
        self.control_bytes -= len(frame)
        self._pay(len(frame), now)
        return SendBytes(frame)

    def _take_turn(self, now: float, room_bytes: int = 1, most: int = 1) -> list[SendBytes]:
        """The next segment of who has the turn, which then goes to the end.

        Where nobody else wants one and nothing is paced, its next ones, too: up to the one that fills the room.
        """
        key = self._order[0]
        turns = self._turns[key]
        queue = turns.popleft()
        stream = queue.stream_in(key[0])
        chosen = queue.cut(stream, room_bytes, 1 if turns or self.pacer is not None else most)
        if queue.stats.first_segment_s is None:
            queue.stats.first_segment_s = now
        if queue.sendable(stream):
            turns.append(queue)
        else:
            self._forget_empty(key)
            if not queue.unsent:
                queue.stats.last_segment_s = now
        if self.pacer is not None:
            self._pay(HEADER_BYTES + len(chosen[0].data), now)
        return chosen

    def again(self, frame: SendBytes, now: float) -> SendBytes | WaitUntil:
        """A frame that was lost with its connection: it has its place already, so only pacing counts."""
        header_bytes = 0
        if frame.transfer is not None:
            header_bytes = HEADER_BYTES
            if self.pacer is not None and (ready_at := self.pacer.ready_at(now)) > now:
                return WaitUntil(ready_at)
        self._pay(header_bytes + len(frame.data), now)
        return frame

    def _enter(self, queue: SendQueue, stream: int) -> None:
        key = (queue.classes[stream], queue.deadline_s)
        if key not in self._turns:
            self._turns[key] = deque()
            bisect.insort(self._order, key)
        self._turns[key].append(queue)
        for lane, run in self._runs.items():
            if run.yields_to(key, queue):
                self._stops[lane][0] = 1

    def _forget_empty(self, key: tuple[int, float]) -> None:
        if not self._turns[key]:
            del self._turns[key]
            self._order.remove(key)

    def _pay(self, count: int, now: float) -> None:
        if self.pacer is not None:
            self.pacer.spend(count, now)
