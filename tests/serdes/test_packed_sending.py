"""Caches that are encoded already travel as they are."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import lynx_net
from lynx_codec import CodecError, CodecPlan, CodecRule, PackedCache, get_codec
from lynx_net.errors import StoreError, TransferAbortedError
from lynx_net.serdes.packed import PackedPages, page_order, send_pages
from lynx_net.testing.sweep import Canceller, Moment, cancel_sweep

PLANS: dict[str, Any] = {
    "lynx": get_codec("lynx"),
    "nested": get_codec("nested", bits=[2, 2, 4]),
    "exact": get_codec("nested", exact=True, chunk=64),
    "int8": get_codec("int8"),
    "bf16": get_codec("bf16"),
    "plan": CodecPlan(
        "nested",
        {"bits": [4, 4]},
        [CodecRule("int8", layers=(0,)), CodecRule("nested", {"bits": [3, 5]}, kind="value")],
    )
    .table(3)
    .own,
}


def packed(name: str, **options: Any) -> PackedCache:
    rng = np.random.default_rng(1)
    shape = (600, 2, 16)
    arrays = {(layer, kind): rng.standard_normal(shape, np.float32) for layer in range(3) for kind in ("key", "value")}
    if name == "exact":
        arrays = {place: array.astype(np.float16) for place, array in arrays.items()}
    return PackedCache.encode(PLANS[name], arrays, raw_head=4, **options)


async def send(cache: PackedCache, **options: Any) -> tuple[lynx_net.IncomingTransfer, Any]:
    async with lynx_net.serve("memory://packed") as server, lynx_net.connect(server.url) as link:
        sending = asyncio.create_task(link.send_packed("r", cache, **options))
        transfer = await anext(aiter(server))
        await transfer.complete
        return transfer, await sending


@pytest.mark.parametrize("name", sorted(PLANS))
async def test_the_receiver_decodes_what_the_cache_decodes_to(name: str) -> None:
    cache = packed(name, fine=[7, 300, 301, 599], raw_tail=0)
    transfer, sent = await send(cache, meta={"a": 1})
    for place, array in cache.decode().items():
        assert transfer.target.view(*place).tobytes() == array.tobytes()
    assert sent.stats.total_bytes == cache.nbytes
    assert transfer.offer.meta == {"a": 1}


@pytest.mark.parametrize("stop", [1, 3, 255, 256, 257, 470, 600])
async def test_a_crop_from_the_front_can_be_sent(stop: int) -> None:
    cache = packed("nested", fine=[7, 300, 301, 599], raw_tail=20).crop(0, stop)
    transfer, _ = await send(cache)
    assert transfer.offer.layout.tokens == stop
    for place, array in cache.decode().items():
        assert transfer.target.view(*place).tobytes() == array.tobytes()


async def test_one_sequence_of_several() -> None:
    beams = packed("int8").stack(packed("int8").crop(0, 600).select_heads([1, 0]))
    transfer, _ = await send(beams, sequence=1)
    assert transfer.target.view(2, "value").tobytes() == beams.decode(1)[2, "value"].tobytes()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda cache: cache.crop(32, 600), "page 1 is"),
        (lambda cache: cache.crop(0, 100).concatenate(cache), "page 1 is"),
        (lambda cache: cache.first_streams(1), "a page has 1 streams of 2"),
        (lambda cache: PackedCache({**cache.arrays, (7, "key"): cache.arrays[0, "key"]}), "same kinds"),
        (lambda cache: PackedCache({**cache.arrays, (0, "key"): cache.select_heads([0]).arrays[0, "key"]}), "heads"),
    ],
)
async def test_pages_that_lie_otherwise_are_refused_before_anything_is_offered(change: Any, complaint: str) -> None:
    async with lynx_net.serve("memory://packed") as server, lynx_net.connect(server.url) as link:
        with pytest.raises(CodecError, match=complaint):
            await link.send_packed("r", change(packed("lynx")))
        assert link.timelines() == []


async def test_cancelling_aborts_the_transfer() -> None:
    async with lynx_net.serve("memory://packed") as server, lynx_net.connect(server.url, rate="1Mbit") as link:
        sending = asyncio.create_task(link.send_packed("r", packed("lynx")))
        transfer = await anext(aiter(server))
        sending.cancel()
        with pytest.raises(TransferAbortedError):
            await transfer.complete
        with pytest.raises(asyncio.CancelledError):
            await sending


@pytest.mark.parametrize("kinds", [{}, {"key_size": 0}, {"value_size": 0}])
def test_pages_go_in_the_order_of_pages_that_are_encoded_on_the_way(kinds: dict[str, int]) -> None:
    layout = lynx_net.CacheLayout(**({"layers": 3, "tokens": 900, "heads": 1, "key_size": 2, "value_size": 2} | kinds))
    assert page_order(layout, 0) == [page.index for page in layout.pages()]
    assert page_order(layout, 1) == [
        page.index for page in sorted(layout.pages(), key=lambda page: (page.kind != "key", -page.layer, -page.start))
    ]


async def test_what_waits_to_be_sent_is_bounded() -> None:
    """A queue that is only ever as long as asked for, over a link that is slower than the source."""
    cache = packed("lynx", page_tokens=32)
    most, limit = 0, 20_000
    async with lynx_net.serve("memory://packed") as server, lynx_net.connect(server.url, rate="8Mbit") as link:
        pages = PackedPages(cache)

        class Watched(PackedPages):
            def read(self, wanted: Any) -> list[bytes]:
                nonlocal most
                found = super().read(wanted)
                most = max(most, sum(map(len, found)) + link.core.outgoing.all_queued_bytes(1))
                return found

        watched = Watched(cache)
        assert watched.layout == pages.layout
        sending = asyncio.create_task(send_pages(link, "r", watched, executor=None, read_ahead_bytes=limit))
        transfer = await anext(aiter(server))
        await transfer.complete
        await sending
    assert 0 < most <= 1.5 * limit < cache.nbytes / 2


class Growing(PackedPages):
    """A cache that is there page by page."""

    there = 0

    def size(self, page: int, stream: int) -> int | None:  # type: ignore[override]
        return super().size(page, stream) if stream * self.layout.page_count + page < self.there else None

    async def more(self) -> None:
        await asyncio.sleep(0.001)
        self.there += 3


@pytest.mark.parametrize("moment", ["waiting", "woken"])
async def test_cancelled_at_any_await_nothing_is_left(moment: Moment) -> None:
    whole = packed("lynx", page_tokens=200)
    cache = PackedCache({place: arrays for place, arrays in whole.arrays.items() if place[0] == 0})
    config = lynx_net.LinkConfig(segment_bytes=4096, anchor_window_bytes=8192, residual_window_bytes=8192)

    async def scenario(canceller: Canceller) -> None:
        before = asyncio.all_tasks()
        async with (
            lynx_net.serve("memory://packed", config=config) as server,
            lynx_net.connect(server.url, config=config, rate="10Mbit") as link,
        ):
            await canceller.run(send_pages(link, "r", Growing(cache), executor=None, read_ahead_bytes=5000))
            assert link.core.open_transfers() == []
            assert not link._waiting_for_few
            sending = asyncio.create_task(link.send_packed("afterwards", cache))
            async for transfer in server:
                if transfer.offer.request_id == "afterwards":
                    await transfer.complete
                    break
            await sending
        assert asyncio.all_tasks() == before

    assert await asyncio.to_thread(cancel_sweep, scenario, moment) > 10


async def test_a_source_that_fails_fails_the_transfer_with_its_reason() -> None:
    class Failing(Growing):
        async def more(self) -> None:
            if self.there:
                raise StoreError("the disk is gone")
            await super().more()

    async with lynx_net.serve("memory://packed") as server, lynx_net.connect(server.url) as link:
        sending = asyncio.create_task(send_pages(link, "r", Failing(packed("lynx")), executor=None))
        transfer = await anext(aiter(server))
        with pytest.raises(TransferAbortedError, match="the disk is gone"):
            await transfer.complete
        with pytest.raises(StoreError, match="the disk is gone"):
            await sending
        assert link.core.open_transfers() == []


async def test_a_transfer_that_is_given_up_does_not_wait_for_its_source() -> None:
    class Stuck(Growing):
        async def more(self) -> None:
            await asyncio.Event().wait()

    async with lynx_net.serve("memory://packed") as server, lynx_net.connect(server.url) as link:
        sending = asyncio.create_task(send_pages(link, "r", Stuck(packed("lynx")), executor=None))
        transfer = await anext(aiter(server))
        transfer.cancel()
        with pytest.raises(TransferAbortedError, match="cancelled by the peer"):
            await sending
