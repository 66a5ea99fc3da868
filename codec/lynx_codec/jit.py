"""numba's decorator with a cache on disk that notices a change of any kernel, wherever it is called from.

numba keeps what it compiled beside a digest of the function's own file; what the function calls, or takes as a
constant, from another file would stay as it was when that was compiled. Kernels lie in several files and take constants
from others, so here the digest is that of all modules of their folder and of this one.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numba import njit
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["compiled", "source_digest"]

_KERNELS = Path(__file__).resolve().parent
"""Where the kernels lie that those of other folders call."""


@lru_cache(maxsize=16)
def source_digest(folder: Path) -> bytes:
    """Digest of the names and contents of all modules in `folder`, as they were when first asked for."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


class _PackageStamp:
    """Replaces the digest of one file by that of its folder."""

    _py_file: str

    def get_source_stamp(self) -> bytes:
        return source_digest(Path(self._py_file).resolve().parent) + source_digest(_KERNELS)


class _UserProvided(_PackageStamp, UserProvidedCacheLocator):
    """The folder that NUMBA_CACHE_DIR names."""


class _InTree(_PackageStamp, InTreeCacheLocator):
    """Beside the source."""


class _UserWide(_PackageStamp, UserWideCacheLocator):
    """The user's cache folder."""


class _Storage(CompileResultCacheImpl):
    _locator_classes: list[type[object]] = [_UserProvided, _InTree, _UserWide]  # noqa: RUF012 - as numba has it


class _KernelCache(FunctionCache):
    _impl_class = _Storage


def compiled(function: Callable[..., Any]) -> Any:
    """Compile `function` at its first call, or load it from the cache where there is a writable folder for one."""
    dispatcher: Any = njit(nogil=True)(function)
    # Set here and not by `cache=True`, so that functions of other packages keep numba's own locators.
    with suppress(RuntimeError):
        dispatcher._cache = _KernelCache(function)  # type: ignore[no-untyped-call]
    return dispatcher
