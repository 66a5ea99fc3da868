"""The scheduler against a model of the rules at the head of scheduler.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from lynx_net.errors import LocalProtocolError
from lynx_net.wire.bursts import BURST_BYTES, SendBytes, seal
from lynx_net.wire.framereader import FrameReader
from lynx_net.wire.frames import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    SegmentFrame,
    SegmentStart,
    checksum,
    pack_control,
)
from lynx_net.wire.messages import Bye, Ping, Request, decode_message, encode_message
from lynx_net.wire.pacing import TokenBucket
from lynx_net.wire.scheduler import NothingToSend, Scheduler, WaitUntil
from lynx_net.wire.sendqueue import SendQueue

SEGMENT = 100
STREAMS = 3
PAGES = 40


def parse(chosen: SendBytes) -> SegmentStart:
    reader = FrameReader()
    reader.buffers()[0][:] = seal([chosen])[0]
    (start,) = reader.received(HEADER_BYTES)
    assert isinstance(start, SegmentStart)
    return start


@dataclass
class ModelStream:
    limit: int
    pages: list[tuple[int, bytes]] = field(default_factory=list)
    offset: int = 0
    given_back: list[SendBytes] = field(default_factory=list)
    sent: int = 0
    waiting_since: int = 0

    def next_part(self) -> bytes:
        if self.given_back:
            return bytes(self.given_back[0].data)
        return self.pages[0][1][self.offset : self.offset + SEGMENT]

    def sendable(self) -> bool:
        return bool(self.pages or self.given_back) and len(self.next_part()) <= self.limit - self.sent


@dataclass
class ModelTransfer:
    deadline_s: float
    streams: list[ModelStream]
    next_page: list[int] = field(default_factory=lambda: [0] * STREAMS)


class AgainstTheRules(RuleBasedStateMachine):
    transfers = Bundle("transfers")

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler()
        self.model: dict[int, ModelTransfer] = {}
        self.control: list[str] = []
        self.clock = 0
        self.next_id = 1
        self.runs: dict[int, list[SendBytes]] = {}
        self.must_stop: set[int] = set()

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    @rule(
        target=transfers,
        credit=st.integers(0, 250),
        deadline_s=st.sampled_from([1.0, 2.0, math.inf, math.inf]),
    )
    def open(self, credit: int, deadline_s: float) -> int:
        transfer = self.next_id
        self.next_id += 2
        self.scheduler.open(
            SendQueue(
                transfer,
                streams=STREAMS,
                page_count=PAGES,
                segment_bytes=SEGMENT,
                initial_credit=credit,
                deadline_s=deadline_s,
            )
        )
        streams = [ModelStream(credit if stream == 0 else 0) for stream in range(STREAMS)]
        self.model[transfer] = ModelTransfer(deadline_s, streams)
        return transfer

    @rule(transfer=transfers, stream=st.integers(0, STREAMS - 1), size=st.sampled_from([0, 1, 99, 100, 101, 250]))
    def submit(self, transfer: int, stream: int, size: int) -> None:
        model = self.model[transfer]
        page = model.next_page[stream]
        if page == PAGES:
            return
        model.next_page[stream] += 1
        before = self.sendable()
        data = bytes((transfer + page + at) % 251 for at in range(size))
        was = model.streams[stream].sendable()
        model.streams[stream].pages.append((page, data))
        if not was:
            model.streams[stream].waiting_since = self.tick()
        self.scheduler.submit(transfer, page, stream, memoryview(data))
        self.check_stops(before)

    @rule(transfer=transfers, stream=st.integers(0, STREAMS), limit=st.integers(0, 2000))
    def grant(self, transfer: int, stream: int, limit: int) -> None:
        self.scheduler.grant(transfer, stream, limit)
        if stream == STREAMS:
            return
        model, before = self.model[transfer].streams[stream], self.sendable()
        was = model.sendable()
        model.limit = max(model.limit, limit)
        if not was:
            model.waiting_since = self.tick()
        self.check_stops(before)

    @rule(transfer=consumes(transfers))
    def close(self, transfer: int) -> None:
        self.scheduler.close(transfer)
        del self.model[transfer]
        self.must_stop |= {
            lane for lane, run in self.runs.items() if any(segment.transfer == transfer for segment in run)
        }
        self.scheduler.close(transfer)
        self.scheduler.grant(transfer, 0, 10**6)
        with pytest.raises(LocalProtocolError):
            self.scheduler.submit(transfer, 0, 0, memoryview(b"late"))

    @rule()
    def say(self) -> None:
        self.control.append(f"m{len(self.control)}")
        self.scheduler.control(Bye(self.control[-1]))
        self.must_stop |= self.runs.keys() & {0}

    @rule(lane=st.integers(0, 3), times=st.integers(1, 12))
    def send(self, lane: int, times: int) -> None:
        for _ in range(times):
            assert self.scheduler.has_next(lane, 0.0) == bool(self.sendable())
            chosen = self.scheduler.next(lane, 0.0)
            if lane == 0 and self.control:
                assert isinstance(chosen, SendBytes)
                assert chosen.transfer is None
                assert decode_message(bytes(seal([chosen])[0])[HEADER_BYTES:]) == Bye(self.control.pop(0))
                continue
            candidates = self.sendable()
            if not candidates:
                assert isinstance(chosen, NothingToSend)
                return
            number, _, _, transfer = min(candidates)
            assert isinstance(chosen, SendBytes)
            self.check_segment(chosen, transfer, number)

    @rule(lane=st.integers(0, 3), room=st.sampled_from([1, 250, 1000]), most=st.sampled_from([2, 100]))
    def run(self, lane: int, room: int, most: int) -> None:
        """The same that it would be given one by one, up to the one that fills the room."""
        if lane in self.runs:
            return
        run = self.scheduler.run(lane, room, most, 0.0)
        if lane == 0 and self.control:
            assert not run
            return
        for segment in run:
            assert room > 0
            number, _, _, transfer = min(self.sendable())
            self.check_segment(segment, transfer, number)
            room -= len(segment.data)
        assert room <= 0 or len(run) == most or not self.sendable()
        if run:
            self.runs[lane] = run
            assert not self.scheduler.stop_byte(lane)[0]

    @precondition(lambda self: self.runs)
    @rule(which=st.integers(0, 3), sent=st.integers(0, 8))
    def run_ends(self, which: int, sent: int) -> None:
        lane = sorted(self.runs)[which % len(self.runs)]
        unsent = self.runs.pop(lane)[sent:]
        before = self.sendable()
        self.must_stop.discard(lane)
        self.scheduler.run_ended(lane, unsent, 0.0)
        for segment in reversed(unsent):
            if segment.transfer in self.model:
                stream = self.model[segment.transfer].streams[segment.stream]
                was = stream.sendable()
                stream.given_back.insert(0, segment)
                stream.sent -= len(segment.data)
                assert stream.sendable()
                if not was:
                    stream.waiting_since = self.tick()
        self.check_stops(before)

    def sendable(self) -> list[tuple[int, float, int, int]]:
        return [
            (number, model.deadline_s, stream.waiting_since, transfer)
            for transfer, model in self.model.items()
            for number, stream in enumerate(model.streams)
            if stream.sendable()
        ]

    def check_stops(self, before: list[tuple[int, float, int, int]]) -> None:
        """Who can send now and could not before stops the runs that should not be before it (rule 8)."""
        for number, deadline_s, _, transfer in set(self.sendable()) - set(before):
            for lane, run in self.runs.items():
                last = run[-1]
                transfers = {segment.transfer for segment in run}
                # The key of the last one as it was: a transfer that has ended meanwhile has stopped the run already.
                if lane in self.must_stop or last.transfer not in self.model:
                    continue
                key = (last.stream, self.model[last.transfer].deadline_s)
                same = (number, deadline_s) == key and len(run) > len(transfers) and transfer not in transfers
                if (number, deadline_s) < key or same:
                    self.must_stop.add(lane)

    def check_segment(self, chosen: SendBytes, transfer: int, number: int) -> None:
        stream = self.model[transfer].streams[number]
        part = stream.next_part()
        if stream.given_back:
            assert chosen is stream.given_back.pop(0)
            stream.sent += len(part)
            stream.waiting_since = self.tick()
            return
        page, data = stream.pages[0]
        assert (chosen.transfer, chosen.stream, len(chosen.data)) == (transfer, number, len(part))
        assert b"".join(bytes(buffer) for buffer in seal([chosen])[1:]) == part
        header = parse(chosen).header
        assert (header.transfer, header.page, header.stream) == (transfer, page, number)
        assert (header.offset, header.length, header.stream_bytes) == (stream.offset, len(part), len(data))
        assert header.offset % SEGMENT == 0
        assert header.checksum == checksum(part)
        stream.offset += len(part)
        stream.sent += len(part)
        assert stream.sent <= stream.limit
        if stream.offset == len(data):
            stream.pages.pop(0)
            stream.offset = 0
        stream.waiting_since = self.tick()

    @precondition(lambda self: self.model)
    @invariant()
    def bookkeeping_agrees(self) -> None:
        any_sendable = False
        for transfer, model in self.model.items():
            queue = self.scheduler._queues[transfer]
            for number, stream in enumerate(model.streams):
                left = sum(len(data) for _, data in stream.pages) - stream.offset
                left += sum(len(segment.data) for segment in stream.given_back)
                assert queue.queued_bytes[number] == left
                assert queue.stats.stream_bytes[number] == stream.sent
                any_sendable |= stream.sendable()
            unsent = (
                STREAMS * PAGES
                - sum(model.next_page)
                + sum(len(stream.pages) + len(stream.given_back) for stream in model.streams)
            )
            assert queue.unsent == unsent
        assert self.scheduler.has_control() == bool(self.control)
        assert self.scheduler.has_work() == bool(self.control or any_sendable)
        assert self.scheduler._order == sorted(self.scheduler._turns)

    @invariant()
    def runs_stop_for_what_goes_before(self) -> None:
        assert {lane for lane in self.runs if self.scheduler.stop_byte(lane)[0]} == self.must_stop
        assert self.scheduler.running_bytes == sum(len(segment.data) for run in self.runs.values() for segment in run)


TestAgainstTheRules = AgainstTheRules.TestCase
TestAgainstTheRules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def queue_of(transfer: int = 1, **options: float) -> SendQueue:
    fields = {"streams": 2, "page_count": 100, "segment_bytes": SEGMENT, "initial_credit": 10**9} | options
    return SendQueue(transfer, **fields)  # type: ignore[arg-type]


def test_nothing_is_queued_ahead_of_an_anchor() -> None:
    """Rule 2 at the moment of choice: an anchor submitted late overtakes a backlog of residuals."""
    scheduler = Scheduler()
    for transfer in (1, 3):
        scheduler.open(queue_of(transfer))
        scheduler.grant(transfer, 1, 10**9)
    for page in range(100):
        scheduler.submit(1, page, 1, memoryview(bytes(1000)))
    assert isinstance(scheduler.next(1, 0.0), SendBytes)
    scheduler.submit(3, 0, 0, memoryview(bytes(250)))
    chosen = [scheduler.next(1, 0.0) for _ in range(4)]
    assert [(part.transfer, part.stream) for part in chosen if isinstance(part, SendBytes)] == [
        (3, 0),
        (3, 0),
        (3, 0),
        (1, 1),
    ]


def test_equal_transfers_take_turns() -> None:
    scheduler = Scheduler()
    for transfer in range(1, 21, 2):
        scheduler.open(queue_of(transfer))
        scheduler.submit(transfer, 0, 0, memoryview(bytes(10 * SEGMENT)))
    order = []
    while isinstance(chosen := scheduler.next(0, 0.0), SendBytes):
        order.append(chosen.transfer)
    assert order == list(range(1, 21, 2)) * 10


def test_pacing_delays_segments_and_never_control() -> None:
    scheduler = Scheduler(TokenBucket(8000, 0.0))
    scheduler.open(queue_of())
    scheduler.submit(1, 0, 0, memoryview(bytes(3 * SEGMENT)))
    assert isinstance(scheduler.next(1, 0.0), SendBytes)
    wait = scheduler.next(1, 0.0)
    assert isinstance(wait, WaitUntil)
    assert wait.at_s == pytest.approx((SEGMENT + HEADER_BYTES) / 1000)
    scheduler.control(Ping())
    assert scheduler.next(1, 0.0) == wait
    paid = scheduler.next(0, 0.0)
    assert isinstance(paid, SendBytes)
    later = scheduler.next(1, 0.0)
    assert isinstance(later, WaitUntil)
    assert later.at_s == pytest.approx(wait.at_s + len(seal([paid])[0]) / 1000)
    assert isinstance(scheduler.next(1, later.at_s), SendBytes)


def test_what_the_receiver_would_refuse_is_not_queued() -> None:
    scheduler = Scheduler()
    scheduler.open(queue_of(page_count=2))
    scheduler.submit(1, 0, 0, memoryview(b"x"))
    for page, stream in ((-1, 0), (2, 0), (0, -1), (0, 2), (0, 0)):
        with pytest.raises(LocalProtocolError):
            scheduler.submit(1, page, stream, memoryview(b"x"))
    with pytest.raises(TypeError):
        scheduler.submit(1, 1, 0, memoryview(bytearray(10))[::2])
    huge = memoryview(np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (1 << 32,), (0,)))
    with pytest.raises(LocalProtocolError, match="4294967295"):
        scheduler.submit(1, 1, 0, huge)
    with pytest.raises(LocalProtocolError):
        SendQueue(1, streams=1, page_count=1, segment_bytes=1, initial_credit=0, deadline_s=math.nan)
    assert isinstance(scheduler.next(0, 0.0), SendBytes)
    assert isinstance(scheduler.next(0, 0.0), NothingToSend)


def test_buffers_of_any_shape_travel_as_bytes() -> None:
    scheduler = Scheduler()
    scheduler.open(queue_of())
    array = np.arange(12, dtype=np.uint16).reshape(3, 4)
    scheduler.submit(1, 0, 0, memoryview(array))
    scheduler.submit(1, 1, 0, memoryview(np.empty((0, 3))))
    first, second = scheduler.next(0, 0.0), scheduler.next(0, 0.0)
    assert isinstance(first, SendBytes)
    assert bytes(seal([first])[1]) == array.tobytes()
    assert isinstance(second, SendBytes)
    assert len(seal([second])) == 1


def test_a_message_too_large_leaves_the_queue_as_it_was() -> None:
    scheduler = Scheduler()
    with pytest.raises(LocalProtocolError):
        scheduler.control(Request("r", {"prompt": bytes(MAX_CONTROL_BYTES)}))
    assert scheduler.control_bytes == 0
    assert not scheduler.has_work()
    scheduler.control(Ping())
    assert scheduler.control_bytes > HEADER_BYTES
    scheduler.next(0, 0.0)
    assert scheduler.control_bytes == 0


def test_waiting_for_the_peer() -> None:
    queue = queue_of(page_count=1, initial_credit=SEGMENT)
    scheduler = Scheduler()
    scheduler.open(queue)
    assert not queue.waits_for_peer()  # its own application has not written yet
    scheduler.submit(1, 0, 0, memoryview(bytes(2 * SEGMENT)))
    assert not queue.waits_for_peer()
    scheduler.next(0, 0.0)
    assert queue.waits_for_peer()  # for credit
    scheduler.grant(1, 0, 2 * SEGMENT)
    scheduler.submit(1, 0, 1, memoryview(b""))
    scheduler.next(0, 0.0)
    assert not queue.waits_for_peer()
    scheduler.next(0, 0.0)
    assert queue.unsent == 0
    assert queue.waits_for_peer()  # for Complete


def test_a_burst_ends_with_the_segment_that_fills_it() -> None:
    half = memoryview(bytes(BURST_BYTES // 2))
    sealed = seal([SendBytes(half, 1, page, 0, 0, len(half)) for page in range(5)])
    assert [len(buffer) for buffer in sealed] == [
        2 * HEADER_BYTES, len(half), len(half), 2 * HEADER_BYTES, len(half), len(half), HEADER_BYTES, len(half),
    ]  # fmt: skip


@pytest.mark.parametrize("last", [False, True])
def test_nothing_follows_the_last_segment_of_what_is_sealed(last: bool) -> None:
    half = memoryview(bytes(BURST_BYTES // 2))
    control = SendBytes(pack_control(encode_message(Bye("now"))))
    pages = [SendBytes(half, 1, page, 0, 0, len(half)) for page in range(5)]
    headers = [buffer for buffer in seal(pages, last) if len(buffer) < len(half)]
    flags = [header[at + 28] for header in headers for at in range(0, len(header), HEADER_BYTES)]
    assert flags == [0, 0, 0, 0, int(last)]
    assert seal([*pages, control], last)[-2] == seal([pages[-1]])[1]
    assert seal([control], last) == [control.data]


def test_a_checksum_goes_with_streams_of_one_segment_alone() -> None:
    scheduler = Scheduler()
    scheduler.open(SendQueue(1, streams=1, page_count=3, segment_bytes=SEGMENT, initial_credit=10 * SEGMENT))
    for page, size in enumerate((SEGMENT, SEGMENT + 1, SEGMENT)):
        scheduler.submit(1, page, 0, memoryview(bytes(size)), checksum=page + 7 if page < 2 else None)
    chosen = [scheduler.next(0, 0.0) for _ in range(4)]
    assert [(one.page, one.offset, one.checksum) for one in chosen if isinstance(one, SendBytes)] == [
        (0, 0, 7), (1, 0, None), (1, SEGMENT, None), (2, 0, None),
    ]  # fmt: skip


def test_there_is_a_next_segment_only_with_credit_and_pace() -> None:
    scheduler = Scheduler(TokenBucket(8000, 0.0), urgent_lane=True)
    scheduler.open(SendQueue(1, streams=2, page_count=2, segment_bytes=SEGMENT, initial_credit=2 * SEGMENT))
    assert not scheduler.has_next(1, 0.0)
    scheduler.submit(1, 0, 0, memoryview(bytes(3 * SEGMENT)))
    paid_s = (SEGMENT + HEADER_BYTES) / 1000
    assert scheduler.has_next(0, 0.0)
    assert isinstance(scheduler.next(1, 0.0), SendBytes)
    assert not scheduler.has_next(1, 0.9 * paid_s)
    assert scheduler.has_next(1, paid_s)
    assert isinstance(scheduler.next(1, paid_s), SendBytes)
    assert not scheduler.has_next(1, 9.0)  # for want of credit
    scheduler.submit(1, 0, 1, memoryview(bytes(SEGMENT)))
    scheduler.grant(1, 1, SEGMENT)
    assert scheduler.has_next(1, 9.0)
    assert not scheduler.has_next(0, 9.0)  # which is kept for stream 0


def test_what_is_sealed_together_is_read_in_order() -> None:
    """Segments between two control frames become one burst."""
    scheduler = Scheduler()
    queue = SendQueue(1, streams=1, page_count=3, segment_bytes=SEGMENT, initial_credit=1000)
    scheduler.open(queue)
    for page, size in enumerate((SEGMENT, 0, 30)):
        scheduler.submit(1, page, 0, memoryview(bytes([page]) * size))
    segments = [scheduler.next(0, 0.0) for _ in range(3)]
    control = SendBytes(pack_control(encode_message(Bye("now"))))
    batch = [control, *(chosen for chosen in segments if isinstance(chosen, SendBytes)), control]
    assert len(seal(batch)) == 5
    data = b"".join(seal(batch))
    reader, got, at = FrameReader(), [], 0
    while at < len(data):
        view = reader.buffers()[0]
        view[:] = data[at : at + view.nbytes]
        at += view.nbytes
        for frame in reader.received(view.nbytes):
            if isinstance(frame, SegmentStart):
                got += reader.deliver_to(memoryview(bytearray(frame.header.length)))
            else:
                got.append(frame)
    assert [frame.header.page if isinstance(frame, SegmentFrame) else "control" for frame in got] == [
        "control", 0, 1, 2, "control",
    ]  # fmt: skip


def test_a_lane_kept_for_what_is_urgent_takes_no_residual() -> None:
    scheduler = Scheduler(TokenBucket(8000, 0.0), urgent_lane=True)
    queue = SendQueue(1, streams=2, page_count=2, segment_bytes=SEGMENT, initial_credit=1000)
    scheduler.open(queue)
    scheduler.grant(1, 1, 1000)
    scheduler.submit(1, 0, 1, memoryview(bytes(SEGMENT)))
    assert not scheduler.has_segments(0)
    assert scheduler.has_segments(1)
    assert isinstance(scheduler.next(0, 0.0), NothingToSend)
    assert not scheduler.small(SEGMENT, 0.0)
    scheduler.submit(1, 0, 0, memoryview(bytes(SEGMENT)))
    assert scheduler.has_segments(0)
    anchor = scheduler.next(0, 0.0)
    assert isinstance(anchor, SendBytes)
    assert anchor.stream == 0
    assert isinstance(scheduler.next(0, 0.0), NothingToSend)  # not even a time: it has nothing to wait for
    assert isinstance(scheduler.next(1, 0.0), WaitUntil)


def test_what_is_small_leaves_together_and_as_it_would_one_by_one() -> None:
    """Control frames, then ends of transfers; neither one with more to send nor what does not fit into the room."""
    schedulers = [Scheduler(), Scheduler()]
    for scheduler in schedulers:
        for transfer, size, pages in ((1, 10, 1), (2, SEGMENT, 1), (3, 10, 2), (4, 10, 1)):
            scheduler.open(
                SendQueue(transfer, streams=1, page_count=pages, segment_bytes=SEGMENT, initial_credit=10**6)
            )
            scheduler.submit(transfer, 0, 0, memoryview(bytes(size)))
        scheduler.control(Ping())
        scheduler.control(Bye("x" * SEGMENT))
    together, alone = schedulers
    assert together.small(10, 0.0) == []
    chosen = together.small(SEGMENT, 0.0)
    assert [one.transfer for one in chosen] == [None]
    chosen += together.small(10**6, 0.0)
    assert [one.transfer for one in chosen] == [None, None, 1, 2]
    assert chosen == [alone.next(0, 0.0) for _ in chosen]
    assert together.small(10**6, 0.0) == []
    assert isinstance(together.next(0, 0.0), SendBytes)


def test_what_is_small_keeps_the_rate() -> None:
    scheduler = Scheduler(TokenBucket(8000, 0.0))
    for transfer in range(1, 10):
        scheduler.open(SendQueue(transfer, streams=1, page_count=1, segment_bytes=SEGMENT, initial_credit=10**6))
        scheduler.submit(transfer, 0, 0, memoryview(bytes(SEGMENT)))
    at_once = scheduler.small(10**6, 0.0)
    assert len(at_once) < 9
    wait = scheduler.next(0, 0.0)
    assert isinstance(wait, WaitUntil)
    assert len(scheduler.small(10**6, wait.at_s)) == 1
