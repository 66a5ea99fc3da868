"""Where entries lie: a small interface of blocking calls, and the local disk behind it.

What a storage promises: a published file is there whole or not at all, also after the process was killed or the
machine lost power; one that is open stays readable when it is removed or quarantined.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lynx_net.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["SUFFIX", "LocalStorage", "NewFile", "OpenFile", "Storage", "StoredFile", "failures", "storage_for"]

SUFFIX = ".lynx"

SYNC_EVERY_BYTES = 64 << 20
"""Of a large entry this much is left to be written to the disk when it is published: nobody waits long for that."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A published file.

    Attributes:
        key: its name.
        size_bytes: of the file.
        used_s: when it was published or touched last, seconds since 1970; None where that is not known.
    """

    key: str
    size_bytes: int
    used_s: float | None


class OpenFile(Protocol):
    """A file to read from. For any threads at once, until `close`."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """These bytes; fewer only at the end of the file. Raises StoreError if the disk fails."""
        ...

    def close(self) -> None: ...


class NewFile(OpenFile, Protocol):
    """A file that is being written and that nobody sees yet; what was written can be read at once, also later."""

    def write(self, data: Sequence[bytes | memoryview]) -> None:
        """Append these. One thread at a time. Raises StoreError if the disk fails or is full."""
        ...

    def publish(self, key: str) -> None:
        """Make it durable, then visible under this name, then make that durable; nothing is written afterwards."""
        ...

    def discard(self) -> None:
        """Remove it, if it was not published; reading goes on until `close`."""
        ...


class Storage(Protocol):
    """Keeps files by key. All calls block and may come from any thread.

    Raises:
        StoreError: from every call, when the disk fails.
    """

    def open(self, *, readonly: bool = False) -> None:
        """Take possession: one process at a time may write. Removes what an earlier one has left unfinished."""
        ...

    def close(self) -> None:
        """Let go."""
        ...

    def files(self) -> Iterator[StoredFile]:
        """All published files."""
        ...

    def create(self) -> NewFile:
        """Begin a file."""
        ...

    def read(self, key: str) -> OpenFile:
        """Open a published file; FileNotFoundError if there is none of this name."""
        ...

    def touch(self, key: str) -> None:
        """It was used now; nothing happens if it is gone."""
        ...

    def remove(self, key: str) -> None:
        """Remove a file; nothing happens if it is gone."""
        ...

    def quarantine(self, key: str) -> str:
        """Put a file aside, where it is never read again; says where it is."""
        ...


class LocalStorage:
    """A folder on a local disk: `entries/`, `incoming/` for what is not published, `quarantine/`, and a lock.

    It relies on `rename` being atomic and on `fsync` of files and folders, as POSIX file systems are; network
    file systems may promise less.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._entries = self.folder / "entries"
        self._incoming = self.folder / "incoming"
        self._quarantine = self.folder / "quarantine"
        self._lock: int | None = None
        self._readonly = True

    def __repr__(self) -> str:
        return str(self.folder)

    def open(self, *, readonly: bool = False) -> None:
        self._readonly = readonly
        if readonly:
            if not self._entries.is_dir():
                raise StoreError(f"there is no store in {self.folder}")
            return
        with failures(f"open the store in {self.folder}"):
            # Nor may a name on the way to the entries be lost when the machine stops.
            missing = [folder for folder in (self.folder, *self.folder.absolute().parents) if not folder.exists()]
            for folder in (self._entries, self._incoming, self._quarantine):
                folder.mkdir(parents=True, exist_ok=True)
            for folder in missing:
                _sync_folder(folder.absolute().parent)
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                if isinstance(error, BlockingIOError):
                    raise StoreError(f"the store in {self.folder} is in use by another process") from None
                raise
            self._lock = lock
            for left in self._incoming.iterdir():
                left.unlink()
            _sync_folder(self.folder)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def files(self) -> Iterator[StoredFile]:
        with failures(f"list {self._entries}"):
            for found in os.scandir(self._entries):
                if found.name.endswith(SUFFIX):
                    with suppress(FileNotFoundError):  # removed meanwhile
                        status = found.stat()
                        yield StoredFile(found.name.removesuffix(SUFFIX), status.st_size, status.st_mtime)

    def create(self) -> _NewLocalFile:
        path = self._incoming / secrets.token_hex(16)
        with failures(f"create {path}"):
            return _NewLocalFile(
                os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), path, self._entries
            )

    def read(self, key: str) -> _LocalFile:
        path = self._path(key)
        with failures(f"open {path}", but=(FileNotFoundError,)):
            return _LocalFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)

    def touch(self, key: str) -> None:
        with failures(f"touch {key}"), suppress(FileNotFoundError):
            now = time.time()
            os.utime(self._path(key), (now, now))

    def remove(self, key: str) -> None:
        with failures(f"remove {key}"), suppress(FileNotFoundError):
            self._path(key).unlink()

    def quarantine(self, key: str) -> str:
        aside = self._quarantine / f"{key}{SUFFIX}"
        with failures(f"quarantine {key}"):
            with suppress(FileNotFoundError):
                self._path(key).rename(aside)
            _sync_folder(self._entries)
        return str(aside)

    def _path(self, key: str) -> Path:
        return self._entries / f"{key}{SUFFIX}"


class _LocalFile:
    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, offset: int, length: int) -> bytes:
        with failures(f"read {self._path}"):
            found = os.pread(self._descriptor, length, offset)
            while 0 < len(found) < length:
                more = os.pread(self._descriptor, length - len(found), offset + len(found))
                if not more:
                    break
                found += more
            return found

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _NewLocalFile(_LocalFile):
    def __init__(self, descriptor: int, path: Path, entries: Path) -> None:
        super().__init__(descriptor, path)
        self._entries = entries
        self._unsynced_bytes = 0
        self._published = False

    def write(self, data: Sequence[bytes | memoryview]) -> None:
        with failures(f"write {self._path}"):
            for one in data:
                view = memoryview(one)
                self._unsynced_bytes += view.nbytes
                while view.nbytes:
                    view = view[os.write(self._descriptor, view) :]
            if self._unsynced_bytes >= SYNC_EVERY_BYTES:
                os.fdatasync(self._descriptor)
                self._unsynced_bytes = 0

    def publish(self, key: str) -> None:
        target = self._entries / f"{key}{SUFFIX}"
        with failures(f"publish {target}"):
            os.fsync(self._descriptor)
            os.rename(self._path, target)
            self._published = True
            _sync_folder(self._entries)

    def discard(self) -> None:
        if not self._published:
            with failures(f"remove {self._path}"), suppress(FileNotFoundError):
                self._path.unlink()


def storage_for(location: str) -> Storage:
    """The storage of a folder, or of a URL that fsspec knows (`s3://bucket/folder`).

    Raises:
        BackendMissingError: a URL, and fsspec or what it needs for it is not installed.
    """
    if "://" not in location:
        return LocalStorage(location)
    from lynx_net.store.remote import FsspecStorage

    return FsspecStorage(location)


class failures:
    """Turns errors of the operating system into StoreError, but for those of a kind that the caller expects."""

    def __init__(self, what: str, *, but: tuple[type[OSError], ...] = ()) -> None:
        self._what = what
        self._but = but

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, self._but):
            raise StoreError(f"cannot {self._what}: {error.strerror or error}") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
