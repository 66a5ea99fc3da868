"""Small entries, and stores to put them into."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lynx_codec import PackedCache, get_codec
from lynx_net.store import ContextStore, LocalStorage

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).parent))


def packed_cache(tokens: int = 40, *, seed: int = 0, layers: int = 2, size: int = 8, **options: Any) -> PackedCache:
    """A small cache; what it holds depends on the seed."""
    rng = np.random.default_rng(seed)
    arrays = {
        (layer, kind): rng.standard_normal((tokens, 1, size), np.float32)
        for layer in range(layers)
        for kind in ("key", "value")
    }
    return PackedCache.encode(get_codec("lynx"), arrays, **{"page_tokens": 16, "raw_head": 2} | options)


@pytest.fixture(name="packed_cache", scope="session")
def _packed_cache() -> Any:
    return packed_cache


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ContextStore]:
    with ContextStore(LocalStorage(tmp_path / "store")).open() as opened:
        yield opened


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def no_file_left_open() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() == before
