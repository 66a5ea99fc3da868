"""Caches go to a store over a link and come back from it, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import lynx_net
from lynx_net.errors import RequestRefusedError
from lynx_net.store import ContextStore, LocalStorage, serve_store, stored_as, wanted

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = list(np.random.default_rng(5).integers(0, 50_000, 700))


async def test_what_was_stored_comes_back(tmp_path: Path, make_cache: Any, same: Any) -> None:
    cache = make_cache(tokens=300)
    with ContextStore(LocalStorage(tmp_path)).open() as store:
        async with serve_store("tcp://127.0.0.1:0", store) as server:
            async with lynx_net.connect(server.url) as link:
                await cache.send_on(link, meta=stored_as("toy", TOKENS[:300]))
            async with lynx_net.connect(server.url) as link:
                transfer = await link.request("r", wanted("toy", TOKENS[:300]))
                await transfer.complete
                assert same(transfer.target, cache.decoded("lynx"))
                with pytest.raises(RequestRefusedError, match="not stored"):
                    await link.request("r", wanted("another", TOKENS[:300]))
