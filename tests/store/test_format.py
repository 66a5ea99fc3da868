"""The file of an entry: what was written is read, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lynx_net import CacheLayout
from lynx_net.errors import EntryDamagedError, LocalProtocolError
from lynx_net.store import TokenPath
from lynx_net.store.entry import EntryWriter, load_entry
from lynx_net.store.format import EntryHead, pack_head, read_fixed

if TYPE_CHECKING:
    from collections.abc import Sequence

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Memory:
    """A file in memory."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.name: str | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.data[offset : offset + length])

    def write(self, data: Sequence[bytes | memoryview]) -> None:
        for one in data:
            self.data += one

    def publish(self, key: str) -> None:
        self.name = key

    def discard(self) -> None:
        self.data.clear()

    def close(self) -> None:
        pass


LAYOUT = CacheLayout(layers=2, tokens=20, heads=1, key_size=2, value_size=2, page_tokens=16)
HEAD = EntryHead(TokenPath.of("model", range(20)), LAYOUT, "lynx", {"alpha": 0.5}, 2, {"note": [1, "two"]}, 1.5)


def written(head: EntryHead, streams: dict[tuple[int, int], bytes]) -> Memory:
    file = Memory()
    writer = EntryWriter(head, lambda: file)
    for (page, stream), data in streams.items():
        writer.append([(page, stream, data)])
    writer.publish()
    return file


def everything(file: Memory) -> tuple[EntryHead, dict[tuple[int, int], bytes]]:
    head, pages = load_entry(file)
    streams, count = pages.index.shape
    return head, {(page, stream): pages.read(page, stream) for stream in range(streams) for page in range(count)}


PLACES = [(page, stream) for stream in range(2) for page in range(LAYOUT.page_count)]
CONTENTS = st.lists(st.binary(max_size=30), min_size=len(PLACES), max_size=len(PLACES))


@given(CONTENTS, st.permutations(PLACES))
@SETTINGS
def test_page_streams_in_any_order_are_read_as_they_were_written(
    contents: list[bytes], order: list[tuple[int, int]]
) -> None:
    streams = dict(zip(order, contents, strict=True))
    file = written(HEAD, streams)
    assert file.name == HEAD.key
    assert everything(file) == (HEAD, streams)


SMALL = written(HEAD, {place: bytes([3 * number + 1] * number) for number, place in enumerate(PLACES)})


def test_every_truncation_is_detected() -> None:
    for length in range(len(SMALL.data)):
        with pytest.raises(EntryDamagedError):
            load_entry(Memory(bytes(SMALL.data[:length])))


def test_every_flipped_bit_is_detected() -> None:
    """In the head, in the index and in the trailer at once, in a page stream when it is read."""
    unharmed = everything(SMALL)[1]
    for bit in range(8 * len(SMALL.data)):
        file = Memory(bytes(SMALL.data))
        file.data[bit // 8] ^= 1 << bit % 8
        wrong = 0
        try:
            _, pages = load_entry(file)
        except EntryDamagedError:
            continue
        for page, stream in PLACES:
            try:
                assert pages.read(page, stream) == unharmed[page, stream]
            except EntryDamagedError:
                wrong += 1
        assert wrong == 1


@given(st.data())
@SETTINGS
def test_pieces_cut_out_put_in_or_swapped_are_detected(data: st.DataObject) -> None:
    other = written(replace(HEAD, meta={}), {place: bytes([7] * number) for number, place in enumerate(PLACES)})
    length = len(SMALL.data)
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start, length))
    pieces = [b"", bytes(SMALL.data[:start]), bytes(other.data[start:stop]), bytes(stop - start)]
    piece = data.draw(st.sampled_from(pieces))
    changed = bytes(SMALL.data[:start]) + piece + bytes(SMALL.data[stop:])
    if changed in (SMALL.data, other.data):  # nothing was changed, or all of it
        return
    with pytest.raises(EntryDamagedError):
        everything(Memory(changed))


@given(st.binary(max_size=400))
@SETTINGS
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(EntryDamagedError):
        load_entry(Memory(data))
    with pytest.raises(EntryDamagedError):
        load_entry(Memory(bytes(SMALL.data[:32]) + data))


def test_another_version_is_named() -> None:
    from lynx_net.store.format import checksum

    head = bytearray(pack_head(HEAD)[:32])
    head[8] = 9
    head[24:] = checksum(bytes(head[:24])).to_bytes(8, "little")
    with pytest.raises(EntryDamagedError, match="version 9"):
        read_fixed(bytes(head))


def test_a_writer_takes_each_page_stream_once_and_publishes_only_a_whole_entry() -> None:
    file = Memory()
    writer = EntryWriter(HEAD, lambda: file)
    with pytest.raises(LocalProtocolError, match="16 page streams were never written"):
        writer.publish()
    writer.append([(0, 0, b"a")])
    for again in ([(0, 0, b"a")], [(1, 0, b"a"), (1, 0, b"a")], [(9, 0, b"")], [(0, 2, b"")], [(-1, 0, b"")]):
        with pytest.raises(LocalProtocolError):
            writer.append(again)
    assert file.name is None
    assert writer.pages is not None
    assert (writer.pages.size(0, 0), writer.pages.size(1, 0)) == (1, None)


KEYS: dict[str, Any] = {
    "tokens": {"path": TokenPath.of("model", range(1, 21))},
    "model": {"path": TokenPath.of("model2", range(20))},
    "codec": {"codec": "int8"},
    "parameters": {"codec_params": {"alpha": 1.0}},
    "pages": {"layout": replace(LAYOUT, page_tokens=8)},
    "dtype": {"layout": replace(LAYOUT, dtype="float16")},
    "raw": {"layout": replace(LAYOUT, raw_head=0)},
}


@pytest.mark.parametrize("name", sorted(KEYS))
def test_the_key_tells_different_caches_apart(name: str) -> None:
    assert replace(HEAD, **KEYS[name]).key != HEAD.key


def test_the_key_is_that_of_the_content() -> None:
    same = replace(HEAD, meta={"x": 1}, created_s=7.0, path=HEAD.path.short())
    assert same.key == HEAD.key
    assert (
        replace(HEAD, codec="plan", codec_params={"b": [1], "a": {"y": 1, "x": 2}}).key
        == replace(HEAD, codec="plan", codec_params={"a": {"x": 2, "y": 1}, "b": (1,)}).key
    )


def test_a_head_must_fit_together() -> None:
    with pytest.raises(LocalProtocolError, match="21 tokens"):
        replace(HEAD, path=TokenPath.of("model", range(21)))
    with pytest.raises(LocalProtocolError, match="streams"):
        replace(HEAD, streams=17)
