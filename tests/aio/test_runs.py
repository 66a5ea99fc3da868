"""Runs of segments in a sending thread: what stops them, what becomes of the rest, and that nothing is lost or counted
twice."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from lendkit import CONFIG, SEGMENT_BYTES, Owner, until

from lynx_net.aio import lane_io
from lynx_net.aio.threads import ThreadPump
from lynx_net.errors import ConnectionLostError
from lynx_net.transport.tcp import SocketLane
from lynx_net.wire.bursts import BURST_BYTES
from lynx_net.wire.framereader import FrameReader
from lynx_net.wire.frames import (
    HEADER_BYTES,
    LAST,
    SEGMENT,
    ControlFrame,
    SegmentFrame,
    SegmentHeader,
    SegmentStart,
    checksum,
)
from lynx_net.wire.layout import CacheLayout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from lynx_net import LinkConfig
    from lynx_net.errors import LynxError
    from lynx_net.wire.bursts import SendBytes

MIB = 1 << 20
PAGES = 240
"""Of 64 KiB, in one run."""
BUFFERS_BYTES = MIB
"""More than the sockets hold."""
PAYLOAD = bytes(range(256)) * (SEGMENT_BYTES // 256)


class SendingOwner(Owner):
    lost: LynxError | None = None

    def sent(self, batch: Sequence[SendBytes]) -> None:
        """Anything may be."""

    def lane_ended(self, index: int, error: LynxError, unfinished: Sequence[SegmentHeader]) -> None:
        super().lane_ended(index, error, unfinished)
        self.lost = error


class Peer:
    """Reads what a lane sends, as much as it is told to."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = FrameReader()
        self.headers: list[SegmentHeader] = []
        """Of whole segments, in order."""
        self.frames = 0
        self.received_bytes = 0

    def read(self, count: int) -> None:
        """So many bytes, or what comes in a while."""
        end = self.received_bytes + count
        while self.received_bytes < end:
            try:
                got = self.sock.recvmsg_into(self.reader.buffers())[0]
            except TimeoutError:
                return
            assert got, "the stream ended"
            self.received_bytes += got
            for frame in self.reader.received(got):
                done = [frame]
                if isinstance(frame, SegmentStart):
                    done = [*self.reader.deliver_to(memoryview(bytearray(frame.header.length)))]
                for one in done:
                    assert isinstance(one, SegmentFrame | ControlFrame)
                    self.frames += 1
                    if isinstance(one, SegmentFrame):
                        assert one.payload is not None
                        assert checksum(one.payload) == one.header.checksum
                        self.headers.append(one.header)

    def pages(self, stream: int) -> list[int]:
        return [header.page for header in self.headers if header.stream == stream]


class Sender:
    """A lane of a pump in threads, and the other end of it."""

    def __init__(self, config: LinkConfig = CONFIG) -> None:
        self.owner = SendingOwner(1, config)
        self.core = self.owner.core
        self.pump = self.owner.pump = ThreadPump(self.owner)
        self.peer = self.attach()

    def attach(self) -> Peer:
        end, sock = socket.socketpair()
        end.settimeout(0.2)
        with self.owner.lock:
            self.pump.attach(0, SocketLane(sock, "peer"))
            self.pump._connections[0].batch_bytes = PAGES * SEGMENT_BYTES
        return Peer(end)

    def offer(self, pages: int, stream: int) -> int:
        """A transfer whose pages of one stream are queued, and have credit."""
        core, now = self.core, self.owner.clock()
        layout = CacheLayout(layers=1, tokens=pages, heads=1, key_size=1, value_size=0, page_tokens=1)
        with self.owner.lock:
            transfer = core.outgoing.offer(
                request_id="r",
                layout=layout,
                codec="none",
                codec_params={},
                streams=2,
                meta={},
                first_token=None,
                now=now,
            )
            for page in range(pages):
                core.outgoing.submit(transfer, [(page, stream, memoryview(PAYLOAD), (), None)], now)
            core.scheduler.grant(transfer, stream, pages * SEGMENT_BYTES)
            self.pump.wake()
        return transfer


@pytest.fixture(params=["Python", "C"])
async def sender(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sender]:
    if request.param == "Python":
        monkeypatch.setattr(lane_io, "IN_USE", lane_io.PYTHON)
    elif lane_io.IN_USE.name != "C":
        pytest.skip("the extension was not built")
    sender = Sender()
    yield sender
    await sender.pump.stop()
    sender.peer.sock.close()
    assert sender.owner.error is None


async def in_a_run(sender: Sender) -> int:
    """Returns a transfer of residuals whose first MiB has arrived, all of the rest being in the run of the lane."""
    transfer = sender.offer(PAGES, 1)
    await asyncio.to_thread(sender.peer.read, MIB)
    assert sender.core.scheduler.running_bytes >= (PAGES - 1) * SEGMENT_BYTES
    assert sender.core.outgoing.queued_bytes(transfer, 1) == 0
    return transfer


def flags_of(stream: bytes) -> list[int]:
    """Those of the headers of all segments."""
    flags, at = [], 0
    while at < len(stream):
        is_segment, following = stream[at] == SEGMENT, int.from_bytes(stream[at + 2 : at + 4], "little")
        headers = [stream[at + HEADER_BYTES * place :][:HEADER_BYTES] for place in range(following + 1)]
        flags += [header[28] for header in headers if is_segment]
        at += sum(HEADER_BYTES + int.from_bytes(header[4:8], "little") for header in headers)
    return flags


async def test_the_last_segment_that_could_be_sent_says_so(sender: Sender) -> None:
    def read() -> bytes:
        data = bytearray()
        with contextlib.suppress(TimeoutError):
            while True:
                data += sender.peer.sock.recv(MIB)
        return bytes(data)

    sender.offer(PAGES, 1)
    assert flags_of(await asyncio.to_thread(read)) == [0] * (PAGES - 1) + [LAST]
    sender.offer(1, 0)
    assert flags_of(await asyncio.to_thread(read)) == [LAST]


async def test_an_anchor_overtakes_the_rest_of_a_run(sender: Sender) -> None:
    residual = await in_a_run(sender)
    before = len(sender.peer.headers)
    anchor = sender.offer(1, 0)
    await asyncio.to_thread(sender.peer.read, 20 * MIB)
    place = [header.transfer for header in sender.peer.headers].index(anchor)
    assert (place - before) * SEGMENT_BYTES <= BURST_BYTES + BUFFERS_BYTES + SEGMENT_BYTES
    assert sender.peer.pages(1) == list(range(PAGES))
    stats = sender.core.outgoing.stats(residual)
    assert (stats.stream_segments, stats.stream_bytes) == ([0, PAGES], [0, PAGES * SEGMENT_BYTES])
    lane = sender.core.lane_stats[0]
    assert (lane.sent_segments, lane.sent_control_frames) == (PAGES + 1, 2)
    assert sender.core.scheduler.running_bytes == 0


async def test_an_abort_ends_the_run_and_frees_its_buffers(sender: Sender) -> None:
    transfer = await in_a_run(sender)
    with sender.owner.lock:
        sender.core.abort(transfer, 1, "enough")
        sender.pump.wake()
    await asyncio.to_thread(sender.peer.read, 20 * MIB)
    assert len(sender.peer.pages(1)) * SEGMENT_BYTES <= MIB + BURST_BYTES + BUFFERS_BYTES + SEGMENT_BYTES
    assert sender.peer.frames == len(sender.peer.headers) + 2  # the offer, the abort
    assert sender.core.lane_stats[0].sent_segments == len(sender.peer.headers)
    assert not sender.core.scheduler.has_work()
    assert sender.core.scheduler.running_bytes == 0
    assert all(frame.transfer is None for frame in sender.core._lanes[0]._log)
    with sender.owner.lock:
        assert sender.pump._connections[0].run == []


async def test_a_lower_rate_ends_the_run(sender: Sender) -> None:
    transfer = await in_a_run(sender)
    with sender.owner.lock:
        sender.core.set_rate(8e3, sender.owner.clock())
        sender.pump.wake()
    await asyncio.to_thread(sender.peer.read, MIB + BURST_BYTES + BUFFERS_BYTES)
    assert sender.core.outgoing.queued_bytes(transfer, 1) > 8 * MIB
    with sender.owner.lock:
        sender.core.set_rate(None, sender.owner.clock())
        sender.pump.wake()
    await asyncio.to_thread(sender.peer.read, 20 * MIB)
    assert sender.peer.pages(1) == list(range(PAGES))


async def test_a_connection_lost_in_a_run_goes_on_where_the_peer_is(sender: Sender) -> None:
    await in_a_run(sender)
    old = sender.peer
    old.sock.close()
    await until(lambda: sender.owner.lost is not None)
    assert isinstance(sender.owner.lost, ConnectionLostError)
    with sender.owner.lock:
        assert sender.core.scheduler.running_bytes == 0
        sender.core.lane_reopened(0, old.frames, sender.owner.clock())
    sender.peer = sender.attach()
    await asyncio.to_thread(sender.peer.read, 20 * MIB)
    assert old.pages(1) + sender.peer.pages(1) == list(range(PAGES))
    lane = sender.core.lane_stats[0]
    assert lane.sent_segments - lane.resent_frames == PAGES


async def test_a_lane_takes_no_more_together_than_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    io = lane_io.IN_USE

    def send_batch(sock: socket.socket, batch: list[SendBytes], *others: Any) -> int:
        taken.append(sum(len(one.data) for one in batch))
        return io.send_batch(sock, batch, *others)

    monkeypatch.setattr(lane_io, "IN_USE", io._replace(send_batch=send_batch))
    sender = Sender(replace(CONFIG, lane_batch_bytes=3 * SEGMENT_BYTES))
    for _ in range(2):
        sender.offer(PAGES, 1)
        await asyncio.to_thread(sender.peer.read, PAGES * (SEGMENT_BYTES + HEADER_BYTES))
    await asyncio.to_thread(sender.peer.read, MIB)
    await sender.pump.stop()
    sender.peer.sock.close()
    assert sender.peer.pages(1) == 2 * list(range(PAGES))
    first, *later = (size for size in taken if size > 1000)  # the others are control frames
    assert first >= PAGES * SEGMENT_BYTES, "what the lane began with"
    assert max(later) <= 3 * SEGMENT_BYTES + 1000
