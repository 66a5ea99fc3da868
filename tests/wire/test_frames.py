"""The frame parser. Its one invariant: any bytes are a RemoteProtocolError or a correct parse, in bounded memory."""

from __future__ import annotations

import random
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynx_net.errors import LocalProtocolError, RemoteProtocolError
from lynx_net.wire.framereader import FrameReader
from lynx_net.wire.frames import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_SEGMENT_BYTES,
    ControlFrame,
    SegmentFrame,
    SegmentHeader,
    SegmentStart,
    checksum,
    headers_following,
    pack_control,
    pack_segment_header,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lynx_net.wire.frames import Frame

Sent = tuple[bytes, SegmentHeader | None, bytes]
"""A frame as it was sent: its bytes, its segment header (None for control), its payload."""


def control(payload: bytes) -> Sent:
    return pack_control(payload), None, payload


def segment(
    payload: bytes, *, transfer: int = 1, page: int = 0, stream: int = 0, offset: int = 0, more: int = 0
) -> Sent:
    total = offset + len(payload) + more if payload else 0
    header = SegmentHeader(transfer, page, stream, offset if payload else 0, len(payload), total, checksum(payload))
    return pack_segment_header(header) + payload, header, payload


u32 = st.integers(0, 2**32 - 1)
controls = st.builds(control, st.binary(min_size=1, max_size=300))
segments = st.builds(
    segment,
    st.binary(max_size=300),
    transfer=st.integers(0, 2**64 - 1),
    page=u32,
    stream=st.integers(0, 255),
    offset=st.integers(0, 2**31),
    more=st.integers(0, 2**30),
)
frames = st.lists(controls | segments, max_size=8)


class Feeder:
    """Plays the driver: feeds bytes in given portions and keeps what came out."""

    def __init__(self, reader: FrameReader | None = None, how: Callable[[], str] = lambda: "exact") -> None:
        self.reader = reader or FrameReader()
        self.how = how
        """Asked before each portion: "exact", "headers" of a burst together, or "ahead" where that can be."""
        self.got: list[tuple[SegmentHeader | None, bytes | None]] = []
        self.dropped: set[int] = set()
        """Ordinals of the segments to drop."""
        self._segments = 0

    def feed(self, data: bytes, portion: int) -> None:
        rest = memoryview(data)[:portion]
        while len(rest):
            how = self.how()
            if how == "ahead" and self.reader.idle:
                count = put(rest, [self.reader.ahead()])
                came = self.reader.received_ahead(count)
                rest = rest[count:]
                while came:
                    self.act_on(came)
                    came = self.reader.received_ahead()
                continue
            views = self.reader.buffers()
            count = put(rest, views)
            assert count, "the reader offers no room"
            room = self.reader.header_room()
            if how == "headers" and len(room) and views[-1].nbytes == HEADER_BYTES and count == sum(map(len, views)):
                count += put(rest[count:], [room[: HEADER_BYTES * headers_following(views[-1])]])
            rest = rest[count:]
            self.act_on(self.reader.received(count))

    def act_on(self, came: list[Frame]) -> None:
        for frame in came:
            match frame:
                case ControlFrame(payload):
                    self.got.append((None, payload))
                case SegmentStart(header):
                    drop = self._segments in self.dropped
                    self._segments += 1
                    view = None if drop else memoryview(bytearray(header.length))
                    for done in self.reader.deliver_to(view):
                        self.keep(done)
                case SegmentFrame():
                    self.keep(frame)

    def keep(self, frame: SegmentFrame) -> None:
        self.got.append((frame.header, None if frame.payload is None else bytes(frame.payload)))

    def feed_all(self, data: bytes, cuts: random.Random | int) -> None:
        at = 0
        while at < len(data):
            portion = cuts if isinstance(cuts, int) else cuts.choice((1, 7, 47, 48, 49, 100, 1000))
            self.feed(data[at:], portion)
            at += portion


def put(data: memoryview, views: Sequence[memoryview]) -> int:
    """Fill the views in order; returns how many bytes there were."""
    count = 0
    for view in views:
        taken = min(len(data) - count, view.nbytes)
        view[:taken] = data[count : count + taken]
        count += taken
    return count


def ways(seed: int) -> list[tuple[random.Random | int, Callable[[], str]]]:
    """Portions and manners of feeding."""
    rng = random.Random(seed)
    return [
        (1 << 20, lambda: "exact"),
        (1 << 20, lambda: "headers"),
        (1 << 20, lambda: "ahead"),
        (1, lambda: "exact"),
        (rng, lambda: rng.choice(("exact", "headers", "ahead"))),
    ]


def expected(sent: list[Sent], dropped: set[int]) -> list[tuple[SegmentHeader | None, bytes | None]]:
    result: list[tuple[SegmentHeader | None, bytes | None]] = []
    ordinal = 0
    for _, header, payload in sent:
        drop = False
        if header is not None:
            drop = ordinal in dropped
            ordinal += 1
        result.append((header, None if drop else payload))
    return result


@given(sent=frames, dropped=st.sets(st.integers(0, 8)), seed=st.integers(0, 2**32))
def test_every_way_of_feeding_gives_the_frames_that_were_sent(sent: list[Sent], dropped: set[int], seed: int) -> None:
    data = b"".join(part[0] for part in sent)
    for cuts, how in ways(seed):
        feeder = Feeder(how=how)
        feeder.dropped = dropped
        feeder.feed_all(data, cuts)
        assert feeder.got == expected(sent, dropped)
        assert feeder.reader.idle


@given(sent=frames, share=st.floats(0, 1))
def test_a_truncated_stream_is_a_prefix_and_never_idle_inside_a_frame(sent: list[Sent], share: float) -> None:
    data = b"".join(part[0] for part in sent)
    cut = int(share * len(data))
    feeder = Feeder()
    feeder.feed_all(data[:cut], 64)
    borders = [0]
    for part in sent:
        borders.append(borders[-1] + len(part[0]))
    whole = sum(border <= cut for border in borders) - 1
    assert feeder.got == expected(sent[:whole], set())
    assert feeder.reader.idle == (cut in borders)


@given(sent=frames.filter(bool), data=st.data())
def test_any_flipped_header_bit_is_noticed(sent: list[Sent], data: st.DataObject) -> None:
    stream = b"".join(part[0] for part in sent)
    which = data.draw(st.integers(0, len(sent) - 1))
    start = sum(len(part[0]) for part in sent[:which])
    at = start + data.draw(st.integers(0, HEADER_BYTES - 1))
    broken = bytearray(stream)
    broken[at] ^= 1 << data.draw(st.integers(0, 7))
    feeder = Feeder()
    portion = data.draw(st.sampled_from([1, 50, len(stream)]))

    def read() -> None:
        feeder.feed_all(bytes(broken), portion)
        feeder.reader.buffers()  # a broken header behind whole frames is reported once they have been taken

    with pytest.raises(RemoteProtocolError):
        read()
    assert feeder.got == expected(sent[:which], set())
    for use in (feeder.reader.buffers, lambda: feeder.reader.received(0)):
        with pytest.raises(RemoteProtocolError):
            use()


def sealed(**fields: int) -> bytes:
    """A header with any fields whose own checksum is right."""
    import struct

    names = (
        "kind",
        "stream",
        "following",
        "length",
        "transfer",
        "page",
        "offset",
        "stream_bytes",
        "flags",
        "payload_sum",
    )
    head = struct.pack("<BBHIQIIIIQ", *(fields.get(name, 0) for name in names))
    return head + struct.pack("<Q", checksum(head))


@given(
    kind=st.integers(0, 3),
    stream=st.integers(0, 255),
    following=st.sampled_from([0, 0, 0, 1, 255, 256]),
    length=st.sampled_from([0, 1, 100, 4096, MAX_CONTROL_BYTES, MAX_CONTROL_BYTES + 1, MAX_SEGMENT_BYTES + 1]) | u32,
    transfer=st.sampled_from([0, 1, 2**64 - 1]),
    page=u32,
    offset=st.sampled_from([0, 4096]) | u32,
    stream_bytes=st.sampled_from([0, 4096, 100]) | u32,
    flags=st.sampled_from([0, 0, 1, 1, 2, 2**31]),
    payload_sum=st.just(0),
)
def test_a_sealed_header_is_believed_exactly_within_the_limits(**fields: int) -> None:
    good_control = (
        fields["kind"] == 1
        and 0 < fields["length"] <= MAX_CONTROL_BYTES
        and not any(
            fields[name] for name in ("stream", "following", "transfer", "page", "offset", "stream_bytes", "flags")
        )
    )
    good_segment = (
        fields["kind"] == 2
        and fields["length"] <= MAX_SEGMENT_BYTES
        and fields["offset"] + fields["length"] <= fields["stream_bytes"]
        and (fields["length"] > 0 or fields["stream_bytes"] == 0)
        and fields["following"] < 256
        and fields["flags"] <= (0 if fields["following"] else 1)
    )
    feeder = FrameReader()
    feeder.buffers()[0][:] = sealed(**fields)
    if good_control or good_segment:
        started = feeder.received(HEADER_BYTES)
        assert [type(frame) for frame in started] == ([] if good_control or fields["following"] else [SegmentStart])
    else:
        with pytest.raises(RemoteProtocolError):
            feeder.received(HEADER_BYTES)


@pytest.mark.parametrize("kind", [1, 2])
def test_flags_that_a_header_cannot_have(kind: int) -> None:
    fields = {"kind": kind, "length": 5, "stream_bytes": 0 if kind == 1 else 5}
    reader = FrameReader()
    reader.buffers()[0][:] = sealed(**fields)
    assert len(reader.received(HEADER_BYTES)) == kind - 1
    reader = FrameReader()
    reader.buffers()[0][:] = sealed(**fields, flags=kind)
    with pytest.raises(RemoteProtocolError, match="flags"):
        reader.received(HEADER_BYTES)


def test_only_the_last_header_of_a_burst_says_that_nothing_follows() -> None:
    header = SegmentHeader(1, 0, 0, 0, 5, 5, 0)
    reader = FrameReader()
    reader.buffers()[0][:] = pack_segment_header(header, 1)
    assert reader.received(HEADER_BYTES) == []
    reader.buffers()[0][:] = pack_segment_header(header, 0, last=True)
    assert reader.received(HEADER_BYTES) == [SegmentStart(header)] * 2
    reader = FrameReader()
    reader.buffers()[0][:HEADER_BYTES] = pack_segment_header(header, 1, last=True)
    with pytest.raises(RemoteProtocolError, match="flags"):
        reader.received(HEADER_BYTES)


def burst(sent: list[Sent]) -> bytes:
    """The same segments, headers first."""
    headers = [header for _, header, _ in sent if header is not None]
    count = len(headers)
    return b"".join(
        [pack_segment_header(header, count - 1 - index) for index, header in enumerate(headers)]
        + [payload for *_, payload in sent]
    )


@given(
    parts=st.lists(controls.map(lambda one: [one]) | st.lists(segments, min_size=1, max_size=6), max_size=4),
    dropped=st.sets(st.integers(0, 12)),
    seed=st.integers(0, 2**32),
)
def test_bursts_give_the_same_frames(parts: list[list[Sent]], dropped: set[int], seed: int) -> None:
    data = b"".join(part[0][0] if part[0][1] is None else burst(part) for part in parts)
    for cuts, how in ways(seed):
        feeder = Feeder(how=how)
        feeder.dropped = dropped
        feeder.feed_all(data, cuts)
        assert feeder.got == expected([one for part in parts for one in part], dropped)
        assert feeder.reader.idle


def test_the_largest_burst_is_offered_to_the_system_at_once() -> None:
    sent = [segment(bytes([number]) * 10, page=number) for number in range(256)]
    reader = FrameReader()
    data = burst(sent)
    reader.buffers()[0][:] = data[:HEADER_BYTES]
    assert reader.received(HEADER_BYTES) == []
    assert not reader.idle
    (headers,) = reader.buffers()
    assert headers.nbytes == 255 * HEADER_BYTES
    headers[:] = data[HEADER_BYTES : 256 * HEADER_BYTES]
    assert len(reader.received(headers.nbytes)) == 256
    for _ in range(256):
        assert reader.deliver_to(memoryview(bytearray(10))) == []
    assert len(reader.buffers()) == 257


@pytest.mark.parametrize(
    ("counts", "what"),
    [([256], "miscounts: 256"), ([2, 2], "miscounts: 2"), ([2, 0], "miscounts: 0"), ([1, None], "inside a burst")],
)
def test_a_burst_must_count_down_and_holds_segments_only(counts: list[int | None], what: str) -> None:
    data = b""
    for count in [*counts, 0, 0]:
        data += sealed(kind=1, length=9) if count is None else sealed(kind=2, length=5, stream_bytes=5, following=count)
    reader = FrameReader()

    def read(at: int = 0) -> None:
        while at < len(data):
            view = reader.buffers()[0]
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes
            assert reader.received(view.nbytes) == []

    with pytest.raises(RemoteProtocolError, match=what):
        read()


@given(st.binary(min_size=1, max_size=400), st.sampled_from([1, 13, 400]))
def test_noise_is_a_remote_protocol_error(noise: bytes, portion: int) -> None:
    feeder = Feeder()
    if len(noise) < HEADER_BYTES:
        feeder.feed_all(noise, portion)
        assert not feeder.reader.idle
    else:
        with pytest.raises(RemoteProtocolError):
            feeder.feed_all(noise, portion)
    assert feeder.got == []


def test_a_control_payload_that_does_not_match_its_checksum() -> None:
    data = bytearray(pack_control(b"payload"))
    data[-1] ^= 1
    with pytest.raises(RemoteProtocolError, match="wrong checksum"):
        Feeder().feed_all(bytes(data), len(data))


def test_control_frames_have_a_size_limit_on_both_sides() -> None:
    with pytest.raises(LocalProtocolError):
        pack_control(b"")
    with pytest.raises(LocalProtocolError):
        pack_control(bytes(MAX_CONTROL_BYTES + 1))
    feeder = Feeder()
    feeder.feed_all(pack_control(bytes(MAX_CONTROL_BYTES)), 1 << 20)
    assert feeder.got == [(None, bytes(MAX_CONTROL_BYTES))]


def test_a_reader_for_strangers_takes_small_control_frames_only() -> None:
    feeder = Feeder(FrameReader(max_control_bytes=100))
    feeder.feed_all(pack_control(bytes(100)), 64)
    with pytest.raises(RemoteProtocolError, match="allowed are 1 to 100"):
        feeder.feed_all(pack_control(bytes(101)), 64)


def test_memory_stays_within_its_bound_whatever_the_headers_promise() -> None:
    """Rule 4: 16 MiB segments are announced and dropped; nothing of their size is ever allocated."""
    header = pack_segment_header(SegmentHeader(1, 0, 0, 0, MAX_SEGMENT_BYTES, 2**32 - 1, 0))
    portion = memoryview(bytes(1 << 16))
    tracemalloc.start()
    try:
        reader = FrameReader()
        for _ in range(2):
            reader.buffers()[0][:] = header
            assert len(reader.received(HEADER_BYTES)) == 1
            reader.deliver_to(None)
            left = MAX_SEGMENT_BYTES
            while left:
                view = reader.buffers()[0]
                view[:] = portion[: view.nbytes]
                reader.received(view.nbytes)
                left -= view.nbytes
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reader.idle
    assert peak < (1 << 16) + 20_000


def test_after_a_large_segment_nothing_is_read_ahead() -> None:
    """Its payload would be copied, and its checksum could not be computed as it comes."""
    reader = FrameReader()
    assert reader.small
    for length, small in ((100_000, False), (100, True)):
        reader.buffers()[0][:] = pack_segment_header(SegmentHeader(1, 0, 0, 0, length, length, 0))
        reader.received(HEADER_BYTES)
        reader.deliver_to(memoryview(bytearray(length)))
        assert reader.small is small
        reader.buffers()
        reader.received(length)
        assert reader.small is small


def test_zero_length_segments_are_complete_at_once() -> None:
    sent = [segment(b"", page=3), segment(b"x"), segment(b"", page=4)]
    feeder = Feeder()
    feeder.dropped = {2}
    feeder.feed_all(b"".join(part[0] for part in sent), 1000)
    assert feeder.got == expected(sent, {2})


def started(length: int) -> FrameReader:
    reader = FrameReader()
    reader.buffers()[0][:] = segment(bytes(length))[0][:HEADER_BYTES]
    (start,) = reader.received(HEADER_BYTES)
    assert isinstance(start, SegmentStart)
    return reader


@pytest.mark.parametrize(
    "view",
    [
        memoryview(bytearray(99)),
        memoryview(bytearray(101)),
        memoryview(bytes(100)),
        memoryview(bytearray(200))[::2],
        memoryview(bytearray(100)).cast("I"),
        memoryview(bytearray(100)).cast("B", (10, 10)),
    ],
    ids=["short", "long", "read-only", "strided", "words", "two dimensions"],
)
def test_a_destination_that_does_not_fit_is_refused_and_may_be_corrected(view: memoryview) -> None:
    reader = started(100)
    with pytest.raises(LocalProtocolError):
        reader.deliver_to(view)
    buffer = bytearray(100)
    assert reader.deliver_to(memoryview(buffer)) == []
    reader.buffers()[0][:] = bytes(range(100))
    (frame,) = reader.received(100)
    assert isinstance(frame, SegmentFrame)
    assert frame.payload is not None
    assert frame.payload.obj is buffer
    assert bytes(buffer) == bytes(range(100))


def test_calls_out_of_order_are_local_errors() -> None:
    reader = FrameReader()
    with pytest.raises(LocalProtocolError, match="no segment waits"):
        reader.deliver_to(None)
    for count in (-1, HEADER_BYTES + 1):
        with pytest.raises(LocalProtocolError, match="there was room for 48"):
            reader.received(count)
    reader = started(100)
    with pytest.raises(LocalProtocolError, match="destination"):
        reader.buffers()
    with pytest.raises(LocalProtocolError, match="destination"):
        reader.received(1)
    reader.deliver_to(None)
    with pytest.raises(LocalProtocolError, match="no segment waits"):
        reader.deliver_to(None)
    assert reader.segment is not None
    assert sum(view.nbytes for view in reader.buffers()) == 148
    with pytest.raises(LocalProtocolError, match="room for 148"):
        reader.received(149)
    reader.received(148 - HEADER_BYTES)
    assert reader.segment is None
    assert reader.idle
    for count in (-1, len(reader.ahead()) + 1):
        with pytest.raises(LocalProtocolError, match="not read ahead"):
            reader.received_ahead(count)
    put(memoryview(pack_control(b"one") + bytes(10)), [reader.ahead()])
    assert reader.received_ahead(HEADER_BYTES + 3 + 10) == [ControlFrame(b"one")]
    with pytest.raises(LocalProtocolError, match="between two frames"):
        reader.ahead()
    with pytest.raises(LocalProtocolError, match="not read ahead"):
        reader.received_ahead(1)
    assert sum(view.nbytes for view in reader.buffers()) == HEADER_BYTES - 10
    reader = FrameReader()
    put(memoryview(segment(b"payload", more=0)[0]), [reader.ahead()])
    (start,) = reader.received_ahead(HEADER_BYTES + 7)
    assert reader.received_ahead() == []
    assert isinstance(start, SegmentStart)
    reader.deliver_to(memoryview(bytearray(7)))
    with pytest.raises(LocalProtocolError, match="not been looked at"):
        reader.buffers()
    assert not reader.idle
    assert len(reader.received_ahead()) == 1
    assert reader.idle


def test_a_large_drop_offers_the_scratch_buffer_only() -> None:
    reader = started(1 << 17)
    reader.deliver_to(None)
    assert [view.nbytes for view in reader.buffers()] == [1 << 16]
    with pytest.raises(LocalProtocolError):
        reader.received((1 << 16) + 1)
    reader.received(1 << 16)
    assert [view.nbytes for view in reader.buffers()] == [1 << 16, HEADER_BYTES]
