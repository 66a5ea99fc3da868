"""Entries on any file system that fsspec knows (extra `store`): object stores such as S3, and others."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lynx_net.errors import BackendMissingError, LocalProtocolError, StoreError
from lynx_net.store.storage import SUFFIX, OpenFile, StoredFile, failures

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["FsspecStorage"]


class FsspecStorage:
    """Files below a URL such as `s3://bucket/folder`.

    An entry is written to a temporary file of this machine and uploaded when it is whole: under a name that is not
    looked at, then moved to its own. Reading takes byte ranges. Nothing keeps a second process from writing to the
    same place, so see to it that there is none; and when an entry was used last is known to the running process alone,
    so that after a restart the time of its upload counts.

    Args:
        url: as fsspec takes it.
        spool: folder for what is being written; None: the system's folder for temporary files.
        options: of the file system: credentials, endpoints.

    Raises:
        BackendMissingError: fsspec, or the package of this kind of URL, is not installed.
    """

    def __init__(self, url: str, *, spool: str | os.PathLike[str] | None = None, **options: Any) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise BackendMissingError("fsspec", "store") from error
        try:
            self._fs, self._root = url_to_fs(url, **options)
        except ImportError as error:
            raise BackendMissingError(
                f"what {url} needs", "store", f"the package that fsspec names: {error}"
            ) from error
        except ValueError as error:
            raise LocalProtocolError(f"{url}: {error}") from error
        self.url = url
        self._spool = spool
        self._root = self._root.rstrip("/")

    def __repr__(self) -> str:
        return self.url

    def open(self, *, readonly: bool = False) -> None:
        with failures(f"open the store in {self.url}"):
            if readonly:
                if not self._fs.isdir(self._folder("entries")):
                    raise StoreError(f"there is no store in {self.url}")
                return
            for name in ("entries", "incoming", "quarantine"):
                self._fs.makedirs(self._folder(name), exist_ok=True)
            for left in self._names("incoming"):
                self._fs.rm_file(left["name"])

    def close(self) -> None:
        """Nothing is held."""

    def files(self) -> Iterator[StoredFile]:
        with failures(f"list {self.url}"):
            for found in self._names("entries"):
                name = found["name"].rsplit("/", 1)[-1]
                if name.endswith(SUFFIX):
                    yield StoredFile(name.removesuffix(SUFFIX), found["size"], self._modified_s(found["name"]))

    def create(self) -> _NewRemoteFile:
        with failures(f"create a file in {self._spool or tempfile.gettempdir()}"):
            return _NewRemoteFile(self, tempfile.TemporaryFile(dir=self._spool))

    def read(self, key: str) -> OpenFile:
        path = self._path(key)
        with failures(f"open {path}", but=(FileNotFoundError,)):
            return _RemoteFile(self._fs, path, int(self._fs.size(path)))

    def touch(self, key: str) -> None:
        """The running process remembers it; the file does not."""

    def remove(self, key: str) -> None:
        with failures(f"remove {key}"), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    def quarantine(self, key: str) -> str:
        aside = f"{self._folder('quarantine')}/{key}{SUFFIX}"
        with failures(f"quarantine {key}"), suppress(FileNotFoundError):
            self._fs.mv(self._path(key), aside)
        return aside

    def upload(self, spooled: Any, key: str) -> None:
        """Make a file that is written visible under its name."""
        incoming = f"{self._folder('incoming')}/{secrets.token_hex(16)}"
        with failures(f"publish {key}"):
            # By name, not by copying through `open`: file systems cut large uploads into parts themselves.
            self._fs.put_file(f"/proc/self/fd/{spooled.fileno()}", incoming)
            self._fs.mv(incoming, self._path(key))

    def _names(self, name: str) -> list[dict[str, Any]]:
        try:
            found = self._fs.ls(self._folder(name), detail=True)
        except FileNotFoundError:  # object stores have no empty folders
            return []
        return [one for one in found if one["type"] == "file" and one["size"] is not None]

    def _modified_s(self, path: str) -> float | None:
        try:
            return float(self._fs.modified(path).timestamp())
        except (NotImplementedError, FileNotFoundError):
            return None

    def _folder(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _path(self, key: str) -> str:
        return f"{self._folder('entries')}/{key}{SUFFIX}"


class _RemoteFile:
    def __init__(self, fs: Any, path: str, size_bytes: int) -> None:
        self._fs = fs
        self._path = path
        self.size_bytes = size_bytes

    def read(self, offset: int, length: int) -> bytes:
        if not length:
            return b""
        with failures(f"read {self._path}"):
            data: bytes = self._fs.cat_file(self._path, start=offset, end=min(offset + length, self.size_bytes))
            return data

    def close(self) -> None:
        """Every read is a request of its own."""


class _NewRemoteFile:
    def __init__(self, storage: FsspecStorage, spooled: Any) -> None:
        self._storage = storage
        self._spooled = spooled

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._spooled.fileno()).st_size

    def read(self, offset: int, length: int) -> bytes:
        with failures("read the temporary file of an entry"):
            return os.pread(self._spooled.fileno(), length, offset)

    def write(self, data: Sequence[bytes | memoryview]) -> None:
        with failures("write the temporary file of an entry"):
            for one in data:
                self._spooled.write(one)
            self._spooled.flush()

    def publish(self, key: str) -> None:
        self._storage.upload(self._spooled, key)

    def discard(self) -> None:
        """It has no name."""

    def close(self) -> None:
        self._spooled.close()
