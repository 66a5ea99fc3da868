"""Which entries a store has, keeps, gives away and lets go."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lynx_codec import CodecError
from lynx_net.errors import AlreadyStoredError, EntryDamagedError, LocalProtocolError, StoreError
from lynx_net.store import ContextStore, LocalStorage, TokenPath

if TYPE_CHECKING:
    from pathlib import Path

    from lynx_net.store.held import HeldEntry

pytestmark = pytest.mark.usefixtures("no_file_left_open")


def hold(store: ContextStore, tokens: Any, **options: Any) -> HeldEntry | None:
    return store.hold(TokenPath.of("m", tokens), **options)


def held(store: ContextStore, tokens: Any) -> HeldEntry:
    found = hold(store, tokens)
    assert found is not None
    return found


def damage_file(path: Path, at: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def entry_file(store: ContextStore, key: str) -> Path:
    assert isinstance(store.storage, LocalStorage)
    return store.storage.folder / "entries" / f"{key}.lynx"


def put(store: ContextStore, packed_cache: Any, first: int, tokens: int = 40) -> str:
    return store.put("m", range(first, first + tokens), packed_cache(tokens, seed=first))


def test_every_byte_comes_back(store: ContextStore, packed_cache: Any) -> None:
    cache = packed_cache(40)
    key = store.put("m", range(40), cache, meta={"a": 1})
    found = held(store, range(60))
    assert (found.key, found.tokens, found.head.meta) == (key, 40, {"a": 1})
    found.open()
    layout = found.head.layout
    for page in layout.pages():
        own = cache.arrays[page.layer, page.kind][0].pages[page.start // layout.page_tokens]
        assert [found.read(page.index, stream) for stream in range(2)] == list(own.streams)
    found.release()
    assert store.verify(key) is None


def test_a_cache_that_cannot_be_sent_cannot_be_stored(store: ContextStore, packed_cache: Any) -> None:
    with pytest.raises(CodecError, match="in a transfer it would be"):
        store.put("m", range(8), packed_cache(40).crop(32, 40).concatenate(packed_cache(40)).crop(4, 12))
    with pytest.raises(LocalProtocolError, match="cannot be packed"):
        store.put("m", range(40), packed_cache(40), meta={"x": object()})
    assert store.entries() == []


def test_the_longest_the_stored_and_the_newest_are_preferred(
    store: ContextStore, packed_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(store, "_clock", lambda: now)
    short = put(store, packed_cache, 0, 150)
    now = 1001.0
    long = store.put("m", range(200), packed_cache(200))
    now = 1002.0
    other = store.put("m", range(200), packed_cache(200, page_tokens=50))
    for tokens, key, common in ((300, other, 200), (200, other, 200), (150, short, 150), (149, other, 149)):
        found = held(store, range(tokens))
        assert (found.key, found.tokens) == (key, common)
        found.release()
    assert hold(store, range(300), least_tokens=201) is None
    assert hold(store, range(7, 300)) is None
    found = hold(store, range(300), wanted=lambda head: head.layout.page_tokens == 16)
    assert found is not None
    assert found.key == long
    found.release()
    exact = store.hold_key(short)
    assert exact is not None
    exact.release()
    assert store.hold_key("0" * 32) is None


def test_the_same_cache_is_stored_once(store: ContextStore, packed_cache: Any) -> None:
    key = put(store, packed_cache, 0)
    with pytest.raises(AlreadyStoredError, match=f"already stored: {key}"):
        put(store, packed_cache, 0)
    assert len(store.entries()) == 1


def test_entries_are_there_after_a_restart(tmp_path: Path, packed_cache: Any) -> None:
    with ContextStore(LocalStorage(tmp_path)).open() as store:
        keys = [put(store, packed_cache, number) for number in range(3)]
        before = {entry.key: (entry.head, entry.size_bytes) for entry in store.entries()}
    with ContextStore(LocalStorage(tmp_path)).open() as store:
        assert {entry.key: (entry.head, entry.size_bytes) for entry in store.entries()} == before
        found = held(store, range(1, 41))
        assert found.key == keys[1]
        found.release()


# ---- limits


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        self.now += 1
        return self.now


def limited(tmp_path: Path, **limits: Any) -> ContextStore:
    return ContextStore(LocalStorage(tmp_path), clock=Clock(), **limits).open()


def test_the_least_recently_used_go_first(tmp_path: Path, packed_cache: Any) -> None:
    with limited(tmp_path) as store:
        size = entry_file(store, put(store, packed_cache, 0)).stat().st_size
    with limited(tmp_path, max_bytes=3 * size + 100) as store:
        keys = [store.entries()[0].key, put(store, packed_cache, 1), put(store, packed_cache, 2)]
        held(store, range(40)).release()  # the first one is used
        keys.append(put(store, packed_cache, 3))
        assert {entry.key for entry in store.entries()} == {keys[0], keys[2], keys[3]}
        assert not entry_file(store, keys[1]).exists()
        assert store.total_bytes <= 3 * size + 100
        with pytest.raises(StoreError, match="no room"):
            put(store, packed_cache, 4, 400)


def test_what_is_held_or_written_does_not_go(tmp_path: Path, packed_cache: Any) -> None:
    with limited(tmp_path) as store:
        size = entry_file(store, put(store, packed_cache, 0)).stat().st_size
    with limited(tmp_path, max_bytes=2 * size + 100) as store:
        first = held(store, range(40))
        put(store, packed_cache, 1)
        put(store, packed_cache, 2)
        assert {entry.head.path.tail[:1] for entry in store.entries()} == {b"\0", b"\2"}
        second = held(store, range(2, 42))
        with pytest.raises(StoreError, match="no room"):
            put(store, packed_cache, 3)
        assert store.evict(max_bytes=1) == []
        assert not store.remove(first.key)
        first.release()
        first.release()
        assert store.evict(max_bytes=1) == [first.key]
        second.release()
        assert store.remove(second.key)
        assert store.total_bytes == 0


def test_what_was_not_used_for_long_goes(tmp_path: Path, packed_cache: Any) -> None:
    with limited(tmp_path, max_age_s=100) as store:
        keys = [put(store, packed_cache, number) for number in range(3)]
        clock = store._clock
        assert isinstance(clock, Clock)
        clock.now += 60
        held(store, range(1, 41)).release()
        clock.now += 60
        assert store.evict() == [keys[0], keys[2]]
        assert [entry.key for entry in store.entries()] == [keys[1]]


def test_when_an_entry_was_used_survives_a_restart(tmp_path: Path, packed_cache: Any) -> None:
    import os

    with ContextStore(LocalStorage(tmp_path)).open() as store:
        keys = [put(store, packed_cache, number) for number in range(2)]
        for number, key in enumerate(keys):
            os.utime(entry_file(store, key), (number, number))
    with ContextStore(LocalStorage(tmp_path)).open() as store:
        assert [entry.key for entry in store.entries()] == keys
        found = held(store, range(40))
        found.open()
        found.release()
    with ContextStore(LocalStorage(tmp_path)).open() as store:
        assert [entry.key for entry in store.entries()] == keys[::-1]


# ---- damage


def test_a_damaged_page_is_never_handed_out(
    store: ContextStore, packed_cache: Any, caplog: pytest.LogCaptureFixture
) -> None:
    key = put(store, packed_cache, 0)
    found, also = held(store, range(40)), held(store, range(40))
    found.open()
    also.open()
    file = entry_file(store, key)
    pages = found.pages
    assert pages is not None
    damage_file(file, int(pages.index["offset"][1, 2]))
    assert found.read(1, 1)
    with caplog.at_level(logging.ERROR), pytest.raises(EntryDamagedError, match="stream 1 of page 2"):
        found.read(2, 1)
    assert key in caplog.text
    assert "put aside" in caplog.text
    with pytest.raises(EntryDamagedError):
        also.read(2, 1)
    assert hold(store, range(40)) is None
    assert not file.exists()
    assert (file.parent.parent / "quarantine" / file.name).exists()
    put(store, packed_cache, 0)  # it can be stored again
    assert also.read(0, 0)
    found.release()
    also.release()
    assert store.verify(key) is None


def test_damaged_files_are_put_aside_when_the_store_is_opened(tmp_path: Path, packed_cache: Any) -> None:
    with ContextStore(LocalStorage(tmp_path)).open() as store:
        keys = [put(store, packed_cache, number) for number in range(4)]
        files = [entry_file(store, key) for key in keys]
    damage_file(files[0], 40)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[2].rename(files[2].with_name("0" * 32 + ".lynx"))
    with ContextStore(LocalStorage(tmp_path)).open(readonly=True) as store:
        assert set(store.damaged) == {keys[0], keys[1], "0" * 32}
    with ContextStore(LocalStorage(tmp_path)).open() as store:
        assert [entry.key for entry in store.entries()] == [keys[3]]
        assert len(list((tmp_path / "quarantine").iterdir())) == 3


def test_an_entry_is_as_young_as_its_head_where_files_have_no_times(
    tmp_path: Path, packed_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LocalStorage.files
    with ContextStore(LocalStorage(tmp_path)).open() as store:
        key = put(store, packed_cache, 0)
    monkeypatch.setattr(LocalStorage, "files", lambda self: (replace(one, used_s=None) for one in files(self)))
    with ContextStore(LocalStorage(tmp_path), max_age_s=1000).open() as store:
        assert store.evict() == []
        assert [entry.key for entry in store.entries()] == [key]


def test_an_index_that_is_damaged_or_a_file_that_is_gone_is_a_miss(store: ContextStore, packed_cache: Any) -> None:
    keys = [put(store, packed_cache, number) for number in range(2)]
    damage_file(entry_file(store, keys[0]))
    entry_file(store, keys[1]).unlink()
    assert all(store.verify(key) for key in keys)
    for number in range(2):
        found = held(store, range(number, number + 40))
        with pytest.raises(EntryDamagedError):
            found.open()
        found.release()
        assert hold(store, range(number, number + 40)) is None


def test_an_entry_of_an_unknown_codec_is_left_alone(
    tmp_path: Path, packed_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lynx_codec import registry

    with ContextStore(LocalStorage(tmp_path)).open() as store:
        file = entry_file(store, put(store, packed_cache, 0))
    with monkeypatch.context() as patched:
        patched.delitem(registry._FACTORIES, "lynx")
        with ContextStore(LocalStorage(tmp_path)).open() as store:
            assert store.entries() == []
            assert file.exists()
    with ContextStore(LocalStorage(tmp_path)).open() as store:
        assert len(store.entries()) == 1


# ---- writers


class Failing(LocalStorage):
    """A disk that is full after so many bytes."""

    room_bytes = 1500

    def create(self) -> Any:
        file = super().create()
        write = file.write

        def limited_write(data: Any) -> None:
            if file.size_bytes + sum(memoryview(one).nbytes for one in data) > self.room_bytes:
                raise StoreError("cannot write: No space left on device")
            write(data)

        file.write = limited_write  # type: ignore[method-assign]
        return file


def test_a_full_disk_fails_the_entry_and_nothing_else(tmp_path: Path, packed_cache: Any) -> None:
    with ContextStore(Failing(tmp_path)).open() as store:
        put(store, packed_cache, 0, 3)
        with pytest.raises(StoreError, match="No space left"):
            put(store, packed_cache, 1)
        assert len(store.entries()) == 1
        assert list((tmp_path / "incoming").iterdir()) == []
        Failing.room_bytes = 1 << 30
        put(store, packed_cache, 1)
        assert len(store.entries()) == 2


def test_readers_follow_a_writer_to_its_end(store: ContextStore, packed_cache: Any) -> None:
    from lynx_net.serdes.packed import PackedPages
    from lynx_net.store.format import EntryHead

    pages = PackedPages(packed_cache(40))
    head = EntryHead(TokenPath.of("m", range(40)), pages.layout, pages.codec, pages.codec_params, 2)
    for ending in ("abandon", "finish"):
        writer = store.begin(head, 10_000)
        with pytest.raises(AlreadyStoredError, match="already being stored"):
            store.begin(head, 10_000)
        early = held(store, range(50))
        early.open()
        assert early.pages is None
        heard: list[int] = []
        writer.listen(lambda: heard.append(1))  # noqa: B023
        writer.append([(3, 0, pages.read([(3, 0)])[0])])
        late = held(store, range(50))
        assert early.read(3, 0) == late.read(3, 0) == pages.read([(3, 0)])[0]
        assert heard == [1]
        if ending == "abandon":
            store.abandon(writer, StoreError("its sender died"))
            store.abandon(writer, StoreError("twice"))
            assert hold(store, range(50)) is None
            with pytest.raises(StoreError, match="its sender died"):
                writer.append([(0, 0, b"")])
            assert heard == [1, 1]
        else:
            rest = [(page, stream) for stream in range(2) for page in range(pages.layout.page_count)]
            rest.remove((3, 0))
            writer.append([(*one, pages.read([one])[0]) for one in rest])
            store.finish(writer)
            assert store.evict(max_bytes=1) == []
            assert early.read(0, 1) == pages.read([(0, 1)])[0]
        assert early.read(3, 0) == pages.read([(3, 0)])[0]
        early.release()
        late.release()
    assert store.verify(head.key) is None
    assert store.evict(max_bytes=1) == [head.key]


@pytest.mark.parametrize("moment", ["before publishing", "while publishing"])
def test_damage_that_a_reader_finds_while_the_entry_is_written_ends_it(
    moment: str, tmp_path: Path, packed_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lynx_net.serdes.packed import PackedPages
    from lynx_net.store.format import EntryHead

    pages = PackedPages(packed_cache(40))
    head = EntryHead(TokenPath.of("m", range(40)), pages.layout, pages.codec, pages.codec_params, 2)
    with ContextStore(LocalStorage(tmp_path)).open() as store:
        writer = store.begin(head, 10_000)
        everything = [(page, stream) for stream in range(2) for page in range(pages.layout.page_count)]
        writer.append([(*one, pages.read([one])[0]) for one in everything])
        found = held(store, range(40))
        assert writer.pages is not None
        damage_file(next((tmp_path / "incoming").iterdir()), int(writer.pages.index["offset"][0, 0]))

        def find_damage() -> None:
            with pytest.raises(EntryDamagedError):
                found.read(0, 0)

        if moment == "before publishing":
            find_damage()
        else:
            publish = writer.publish
            monkeypatch.setattr(writer, "publish", lambda: (publish(), find_damage()))
        with pytest.raises(EntryDamagedError, match="stream 0 of page 0"):
            store.finish(writer)
        found.release()
        assert store.entries() == []
        assert list((tmp_path / "entries").iterdir()) == []
        assert list((tmp_path / "incoming").iterdir()) == []


def test_many_threads_at_once(tmp_path: Path, packed_cache: Any) -> None:
    """Writers, readers and evictions: who holds an entry reads all of it, whatever the others do."""
    caches = {number: packed_cache(40, seed=number) for number in range(8)}
    with ContextStore(LocalStorage(tmp_path), max_bytes=12_000).open() as store:
        wrong: list[str] = []
        read = [0]
        stop = threading.Event()

        def write(seed: int) -> None:
            rng = np.random.default_rng(seed)
            while not stop.is_set():
                number = int(rng.integers(8))
                try:
                    store.put("m", range(number, number + 40), caches[number])
                except StoreError:
                    continue  # stored already, or everything is being read

        def reader(seed: int) -> None:
            rng = np.random.default_rng(seed)
            while not stop.is_set():
                number = int(rng.integers(8))
                found = hold(store, range(number, number + 40))
                if found is None or found.writer is not None:
                    if found is not None:
                        found.release()
                    continue
                found.open()
                for page in found.head.layout.pages():
                    own = caches[number].arrays[page.layer, page.kind][0].pages[page.start // 16]
                    if [found.read(page.index, stream) for stream in range(2)] != list(own.streams):
                        wrong.append(found.key)
                read[0] += 1
                found.release()

        def guarded(work: Any, seed: int) -> None:
            try:
                work(seed)
            except BaseException as error:
                wrong.append(repr(error))
                raise

        threads = [
            threading.Thread(target=guarded, args=(work, seed))
            for seed, work in enumerate([write, write, reader, reader])
        ]
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + 30
        while read[0] < 30 and not wrong and time.monotonic() < deadline_s:
            time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert read[0] >= 30
        assert store.total_bytes <= 12_000
        sizes = sum(path.stat().st_size for path in (tmp_path / "entries").iterdir())
        assert sizes == store.total_bytes
        with closing(LocalStorage(tmp_path)) as again:
            again.open(readonly=True)
            assert {file.key for file in again.files()} == {entry.key for entry in store.entries()}
