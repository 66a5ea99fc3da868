"""What every storage promises, and what the local one does when the machine stops at any moment."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lynx_net.errors import BackendMissingError, LocalProtocolError, StoreError
from lynx_net.store import ContextStore, LocalStorage, Storage
from lynx_net.store.remote import FsspecStorage
from lynx_net.store.storage import storage_for

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKENDS = ("local", "fsspec memory", "fsspec local")


@pytest.fixture(params=BACKENDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    match request.param:
        case "local":
            made: Storage = LocalStorage(tmp_path)
        case "fsspec memory":
            made = FsspecStorage(f"memory://{uuid.uuid4().hex}")
        case _:
            made = FsspecStorage(f"file://{tmp_path}/remote", spool=tmp_path)
    made.open()
    yield made
    made.close()


def put(storage: Storage, key: str, *data: bytes) -> None:
    file = storage.create()
    file.write(data)
    file.publish(key)
    file.close()


def content(storage: Storage, key: str) -> bytes:
    file = storage.read(key)
    try:
        return file.read(0, file.size_bytes)
    finally:
        file.close()


def keys(storage: Storage) -> list[str]:
    return sorted(file.key for file in storage.files())


def test_a_file_is_seen_when_it_is_published_and_not_before(storage: Storage) -> None:
    file = storage.create()
    file.write([b"one", memoryview(b"two")])
    assert keys(storage) == []
    with pytest.raises(FileNotFoundError):
        storage.read("k")
    assert (file.read(1, 4), file.size_bytes) == (b"netw", 6)
    file.write([b"three"])
    file.publish("k")
    assert file.read(0, 99) == b"onetwothree"
    file.close()
    (found,) = storage.files()
    assert (found.key, found.size_bytes) == ("k", 11)
    assert found.used_s > 1e9
    assert content(storage, "k") == b"onetwothree"


def test_reading_takes_any_range(storage: Storage) -> None:
    put(storage, "k", bytes(range(100)))
    file = storage.read("k")
    assert file.read(0, 0) == b""
    assert file.read(30, 5) == bytes(range(30, 35))
    assert file.read(98, 50) == bytes([98, 99])
    file.close()


def test_what_is_removed_or_put_aside_is_gone(storage: Storage) -> None:
    for key in "abc":
        put(storage, key, key.encode())
    storage.remove("a")
    storage.remove("a")
    storage.quarantine("b")
    storage.quarantine("b")
    storage.touch("c")
    storage.touch("a")
    assert keys(storage) == ["c"]
    put(storage, "a", b"again")
    assert content(storage, "a") == b"again"


def test_a_discarded_file_leaves_nothing(storage: Storage, tmp_path: Path) -> None:
    file = storage.create()
    file.write([b"x" * 1000])
    file.discard()
    assert file.read(0, 3) == b"xxx"
    file.close()
    assert keys(storage) == []
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == 0


def test_opening_removes_what_was_not_published(tmp_path: Path) -> None:
    first = LocalStorage(tmp_path)
    first.open()
    put(first, "k", b"kept")
    file = first.create()
    file.write([b"never finished"])
    assert len(list((tmp_path / "incoming").iterdir())) == 1
    first.close()
    second = LocalStorage(tmp_path)
    second.open()
    assert list((tmp_path / "incoming").iterdir()) == []
    assert content(second, "k") == b"kept"
    second.close()
    file.close()


def test_an_upload_that_broke_off_is_removed(tmp_path: Path) -> None:
    remote = FsspecStorage(f"file://{tmp_path}/remote")
    remote.open()
    (tmp_path / "remote" / "incoming" / "half").write_bytes(b"half of it")
    assert keys(remote) == []
    remote.open()
    assert list((tmp_path / "remote" / "incoming").iterdir()) == []


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    with ContextStore(LocalStorage(tmp_path)).open():
        with pytest.raises(StoreError, match="in use by another process"):
            LocalStorage(tmp_path).open()
        LocalStorage(tmp_path).open(readonly=True)
        program = "import sys; from lynx_net.store import LocalStorage; LocalStorage(sys.argv[1]).open()"
        other = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
        assert "in use by another process" in other.stderr
    LocalStorage(tmp_path).open()


def test_a_folder_that_is_no_store_is_not_read(tmp_path: Path) -> None:
    for nothing in (LocalStorage(tmp_path / "nothing"), FsspecStorage(f"file://{tmp_path}/nothing")):
        with pytest.raises(StoreError, match="there is no store"):
            nothing.open(readonly=True)
    assert list(tmp_path.iterdir()) == []


def test_errors_of_the_disk_have_a_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalStorage(tmp_path)
    local.open()
    put(local, "k", b"data")
    file, opened = local.create(), local.read("k")

    def failing(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        for name in ("write", "fsync", "pread", "utime"):
            patched.setattr(os, name, failing)
        for call in (lambda: file.write([b"x"]), lambda: file.publish("x"), lambda: opened.read(0, 1)):
            with pytest.raises(StoreError, match="No space left"):
                call()
        with pytest.raises(StoreError, match="cannot touch k"):
            local.touch("k")
    file.close()
    opened.close()
    local.close()
    shutil.rmtree(tmp_path)
    with pytest.raises(StoreError, match="cannot create"):
        local.create()


def test_locations(tmp_path: Path) -> None:
    assert isinstance(storage_for(str(tmp_path)), LocalStorage)
    assert isinstance(storage_for("memory://x"), FsspecStorage)
    with pytest.raises(LocalProtocolError, match="nonsense"):
        storage_for("nonsense://x")


@pytest.mark.parametrize("missing", ["fsspec", "s3fs"])
def test_what_is_not_installed_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "fsspec":
        monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(BackendMissingError, match=r"lynx-net\[store\]"):
        storage_for("s3://bucket/folder")


# ---- power failures
#
# What is written reaches the disk at fsync, or earlier; a name in a folder when the folder is synced, or earlier. So
# after a stop behind any system call, every file has any content between what was synced and what was written, and
# every rename that was not synced has happened or not.


class Disk:
    """Records what a storage does to its files, and makes the folders that a stop could leave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, Any, Any]] = []
        real = {name: getattr(os, name) for name in ("write", "fsync", "rename", "unlink")}

        def write(descriptor: int, data: Any) -> int:
            count: int = real["write"](descriptor, data)
            self.log.append(("write", os.fstat(descriptor).st_ino, bytes(data[:count])))
            return count

        def fsync(descriptor: int) -> None:
            real["fsync"](descriptor)
            self.log.append(("fsync", os.fstat(descriptor).st_ino, os.readlink(f"/proc/self/fd/{descriptor}")))

        def rename(source: Any, target: Any) -> None:
            self.log.append(("rename", os.stat(source).st_ino, str(target)))
            real["rename"](source, target)

        for name, call in (("write", write), ("fsync", fsync), ("rename", rename)):
            monkeypatch.setattr(os, name, call)

    def after(self, steps: int, data: st.DataObject) -> dict[str, bytes]:
        """What may be under the published names when the machine stops after so many calls."""
        written: dict[int, bytes] = {}
        durable: dict[int, int] = {}
        names: dict[str, int] = {}
        unsure: dict[str, int] = {}
        for what, inode, more in self.log[:steps]:
            if what == "write":
                written[inode] = written.get(inode, b"") + more
            elif what == "rename":
                unsure[more] = inode
            else:
                durable[inode] = len(written.get(inode, b""))
                for name in [name for name in unsure if Path(name).parent == Path(more)]:
                    names[name] = unsure.pop(name)
        for name, inode in unsure.items():
            if data.draw(st.booleans(), label=f"renamed to {Path(name).name}"):
                names[name] = inode
        found = {}
        for name, inode in names.items():
            whole, safe = written.get(inode, b""), durable.get(inode, 0)
            kept = data.draw(st.integers(safe, len(whole)), label="bytes that reached the disk")
            # Blocks whose data did not reach the disk but whose length did are zeros.
            grown = data.draw(st.integers(kept, len(whole)), label="length")
            found[Path(name).name] = whole[:kept] + bytes(grown - kept)
        return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, packed_cache: Any) -> Any:
    """A store that stored three entries, and after how many calls each was said to be there."""
    folder = tmp_path_factory.mktemp("recorded")
    acknowledged: list[tuple[int, str]] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        disk = Disk(monkeypatch)
        with ContextStore(LocalStorage(folder)).open() as store:
            for number in range(3):
                key = store.put("m", range(number, number + 20), packed_cache(20, seed=number))
                acknowledged.append((len(disk.log), key))
    whole = {path.name: path.read_bytes() for path in (folder / "entries").iterdir()}
    return disk, acknowledged, whole


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_stop_at_any_moment_loses_no_complete_entry_and_leaves_no_wrong_byte(
    recorded: Any, tmp_path: Path, data: st.DataObject
) -> None:
    disk, acknowledged, whole = recorded
    steps = data.draw(st.integers(0, len(disk.log)), label="calls before the stop")
    shutil.rmtree(tmp_path)
    for name in ("entries", "incoming", "quarantine"):
        (tmp_path / name).mkdir(parents=True)
    for name, found in disk.after(steps, data).items():
        (tmp_path / "entries" / name).write_bytes(found)
    with ContextStore(LocalStorage(tmp_path)).open() as store:
        keys = {entry.key for entry in store.entries()}
        assert keys >= {key for at, key in acknowledged if at <= steps}
        for key in keys:
            assert store.verify(key) is None
            assert (tmp_path / "entries" / f"{key}.lynx").read_bytes() == whole[f"{key}.lynx"]
