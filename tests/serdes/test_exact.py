"""Transfers with an exact stream: every bit is the sender's, and it goes after the residuals of all transfers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import lynx_net
from lynx_net import CacheLayout, HostCache
from lynx_net.testing.clock import run_virtual

PARAMS = {"bits": [2, 2, 4], "exact": True}
DTYPES = {"bfloat16": np.uint16, "float16": np.float16}


def make_arrays(layout: CacheLayout) -> dict[tuple[int, str], Any]:
    rng = np.random.default_rng(5)
    arrays: dict[tuple[int, str], Any] = {}
    for layer in range(layout.layers):
        for kind in layout.kinds:
            values = rng.standard_normal(layout.array_shape(kind), np.float32) * 3
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            arrays[layer, kind] = bits if layout.dtype == "bfloat16" else values.astype(np.float16)
    return arrays


async def send(link: Any, layout: CacheLayout, arrays: Any, params: dict[str, Any]) -> None:
    async with link.send("r", layout, codec="nested", codec_params=params) as sending:
        for layer in range(layout.layers):
            await sending.write(layer, arrays[layer, "key"], arrays[layer, "value"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("url", ["memory://exact", "tcp://127.0.0.1:0"])
async def test_every_bit_is_the_senders(url: str, dtype: str) -> None:
    layout = CacheLayout(layers=2, tokens=300, heads=2, key_size=16, value_size=24, dtype=dtype)
    arrays = make_arrays(layout)

    def allocate(offer: Any) -> HostCache:
        return HostCache(offer.layout, DTYPES[dtype])

    async with lynx_net.serve(url, allocate=allocate) as server, lynx_net.connect(server.url) as link:
        sending = asyncio.create_task(send(link, layout, arrays, PARAMS))
        transfer = await anext(aiter(server))
        await transfer.exact_ready
        await transfer.complete
        await sending
    for (layer, kind), array in arrays.items():
        assert np.array_equal(transfer.target.view(layer, kind).view(np.uint16), array.view(np.uint16))
    timeline = transfer.timeline()
    assert timeline.stream_names == ("anchor", "residual1", "residual2", "exact")
    assert timeline.residual_ready_s == timeline.streams_ready_s[2]
    assert timeline.exact_ready_s == timeline.streams_ready_s[3]


async def test_residuals_go_before_the_exact_stream_of_another_transfer() -> None:
    """Of two transfers on a paced link, the residual of the later one is in before the exact stream of the first."""
    layout = CacheLayout(layers=2, tokens=600, heads=4, key_size=64, value_size=64, dtype="bfloat16")
    arrays = make_arrays(layout)

    async def run() -> None:
        async with lynx_net.serve("memory://two") as server, lynx_net.connect(server.url, rate="5Mbit") as link:
            first = asyncio.create_task(send(link, layout, arrays, {"bits": [8], "exact": True}))
            one = await anext(aiter(server))
            await one.residual_ready
            second = asyncio.create_task(send(link, layout, arrays, {"bits": [4, 4]}))
            other = await anext(aiter(server))
            await other.complete
            assert not one.exact_ready.done()
            await asyncio.gather(first, second)

    await asyncio.to_thread(run_virtual, run())
