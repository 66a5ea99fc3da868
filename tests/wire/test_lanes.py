"""When a receiver confirms what has come on a lane."""

from __future__ import annotations

from lynx_net.wire.lanes import CONFIRM_EVERY_BYTES, CONFIRM_EVERY_FRAMES, LaneRecord


def test_many_small_frames_are_confirmed_by_their_number() -> None:
    record = LaneRecord()
    told = [record.count(1, 100 * frame) for frame in range(1, 3 * CONFIRM_EVERY_FRAMES + 1)]
    assert [frame for frame, due in enumerate(told, 1) if due] == [CONFIRM_EVERY_FRAMES * n for n in (1, 2, 3)]


def test_few_large_frames_are_confirmed_by_their_bytes() -> None:
    """Else a sender of large frames would keep the bytes of all of them."""
    record = LaneRecord()
    frame_bytes = CONFIRM_EVERY_BYTES // 3
    told = [record.count(1, frame_bytes * frame) for frame in range(1, 13)]
    assert [frame for frame, due in enumerate(told, 1) if due] == [4, 8, 12]


def test_bytes_of_a_frame_that_is_not_whole_confirm_nothing() -> None:
    record = LaneRecord()
    assert not record.count(0, 2 * CONFIRM_EVERY_BYTES)
    assert record.count(1, 2 * CONFIRM_EVERY_BYTES)
