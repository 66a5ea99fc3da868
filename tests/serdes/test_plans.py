"""Transfers in which layers, kinds, heads and channels have codecs of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import lynx_net
from lynx_codec import CodecPlan, CodecRule, get_codec
from lynx_codec.plan import CodecTable
from lynx_net import CacheLayout, HostCache, LinkConfig
from lynx_net.errors import CodecError, LocalProtocolError, TransferAbortedError
from lynx_net.testing.clock import run_virtual
from lynx_net.wire.receiving import ReceiveState

BY_HEAD = {"heads": [1, 1], "codecs": ["bf16", "nested"], "params": [{}, {"bits": [2, 6]}]}
BY_CHANNEL = {"channels": [10, 6], "codecs": ["lynx", "int8"], "params": [{"alpha": 1.0}, {}]}
PLAN = CodecPlan(
    "nested",
    {"bits": [4, 4]},
    rules=[
        CodecRule("int8", layers=(0, -1)),
        CodecRule("by_head", BY_HEAD, layers=(1,), kind="key"),
        CodecRule("by_channel", BY_CHANNEL, layers=(1,), kind="value"),
    ],
)


def decoded(cache: Any, table: CodecTable, streams: int | None = None) -> HostCache:
    """What a receiver must hold, each page coded by the codec that the plan gives it."""
    target = HostCache(cache.layout)
    for page in cache.layout.pages():
        codec = table.own(page.layer, page.kind)
        room = [memoryview(bytearray(size)) for size in codec.stream_bytes(page.shape, wide=True)]
        lengths = codec.encode(cache.arrays[page.layer, page.kind][page.start : page.stop], page.shape, room)
        encoded = [out[:length] for out, length in zip(room, lengths, strict=True)]
        codec.decode(encoded[:streams], page.shape, target.view(page.layer, page.kind)[page.start : page.stop])
    return target


async def transferred(cache: Any, url: str, **options: Any) -> Any:
    async with lynx_net.serve(url) as server, lynx_net.connect(server.url, lanes=2) as link:
        sending = asyncio.create_task(cache.send_on(link, **options))
        transfer = await anext(aiter(server))
        await transfer.complete
        sent = await sending
        assert sent.stats == transfer.stats
        return transfer


@pytest.mark.parametrize("url", ["memory://plans", "tcp://127.0.0.1:0"])
async def test_every_layer_arrives_as_its_own_codec_makes_it(url: str, make_cache: Any, same: Any) -> None:
    cache = make_cache(layers=4)
    # Only one of two heads escapes to wide metadata: a size that is neither narrow nor wide.
    cache.arrays[1, "key"][100, 1, 3] = 1e6
    transfer = await transferred(cache, url, codec=PLAN)
    table = PLAN.table(4)
    assert same(transfer.target, decoded(cache, table))
    offer = transfer.offer
    assert (offer.codec, offer.codec_params, offer.streams) == ("plan", table.params(), 2)


async def test_codecs_of_one_stream_are_done_with_the_anchors(make_cache: Any, same: Any) -> None:
    cache = make_cache(layers=4, tokens=512, heads=2, key_size=16, value_size=16)
    seen: list[HostCache] = []

    async def run() -> None:
        async with lynx_net.serve("memory://anchors") as server, lynx_net.connect(server.url, rate="5Mbit") as link:
            sending = asyncio.create_task(cache.send_on(link, codec=PLAN))
            transfer = await anext(aiter(server))
            await transfer.anchor_ready
            assert not transfer.residual_ready.done()
            snapshot = HostCache(cache.layout)
            for layer in range(4):
                for kind in cache.layout.kinds:
                    snapshot.view(layer, kind)[:] = transfer.target.view(layer, kind)
            seen.append(snapshot)
            await transfer.residual_ready
            seen.append(transfer.target)
            await sending

    await asyncio.to_thread(run_virtual, run())
    anchors, full = seen
    assert same(anchors, decoded(cache, PLAN.table(4), streams=1))
    assert same(full, decoded(cache, PLAN.table(4)))
    assert (anchors.view(0, "key") == full.view(0, "key")).all()
    assert (anchors.view(2, "key") != full.view(2, "key")).any()


@pytest.mark.parametrize(
    ("codec", "params"),
    [
        ("lynx", {}),
        ("nested", {"bits": [2, 2, 4]}),
        ("int8", {}),
        ("int4", {}),
        ("bf16", {}),
        ("by_channel", {"channels": [512, 64], "codecs": ["nested", "bf16"], "params": [{}, {}]}),
    ],
)
async def test_a_latent_cache(codec: str, params: dict[str, Any], make_cache: Any, same: Any) -> None:
    """Multi-head latent attention: one array a layer, 512 latent channels and 64 rotary ones, which may differ."""
    cache = make_cache(layers=2, tokens=70, heads=1, key_size=576, value_size=0, dtype="bfloat16", raw_tail=8)
    transfer = await transferred(cache, "memory://latent", codec=codec, codec_params=params)
    assert same(transfer.target, decoded(cache, CodecTable.uniform(get_codec(codec, **params), 2, ("key",))))
    if codec == "by_channel":
        original = (cache.arrays[1, "key"].astype(np.uint32) << 16).view(np.float32)
        assert (transfer.target.view(1, "key")[:, :, 512:] == original[:, :, 512:]).all()


@pytest.mark.parametrize(("first", "streams", "exact"), [("bf16", 4, True), ("int8", 4, False)])
async def test_exact_streams(first: str, streams: int, exact: bool, make_cache: Any) -> None:
    """They come last, whatever is before them; a transfer is exact if no layer stays lossy, and says so."""
    cache = make_cache(layers=3, dtype="bfloat16")
    rules = [CodecRule(first, layers=[0]), CodecRule("nested", {"bits": [2, 2, 4], "exact": True}, kind="value")]
    transfer = await transferred(cache, "memory://exact", codec=CodecPlan("nested", {"exact": True}, rules=rules))
    assert transfer.offer.streams == streams
    for layer in range(3):
        original = (cache.arrays[layer, "key"].astype(np.uint32) << 16).view(np.float32)
        assert (transfer.target.view(layer, "key") == original).all() == (exact or layer > 0)
    if exact:
        assert transfer.exact_ready.done()
    else:
        with pytest.raises(LocalProtocolError, match="has no exact stream"):
            _ = transfer.exact_ready


async def test_plans_for_caches_without_values_or_layers(make_cache: Any, same: Any) -> None:
    cache = make_cache(value_size=0)
    plan = CodecPlan("lynx", rules=[CodecRule("int4", layers=[1])])
    assert same((await transferred(cache, "memory://a", codec=plan)).target, decoded(cache, plan.table(2, ("key",))))
    assert (await transferred(make_cache(layers=0), "memory://b", codec=CodecPlan("lynx"))).stats.total_bytes == 0


async def test_what_a_sender_is_refused(make_cache: Any) -> None:
    layout = make_cache().layout
    deep = {"heads": [2], "codecs": ["by_channel"], "params": [BY_CHANNEL]}
    async with lynx_net.serve("memory://refused") as server, lynx_net.connect(server.url) as link:
        with pytest.raises(CodecError, match="names layer 2 of a cache with 2 layers"):
            link.send("r", layout, codec=CodecPlan("lynx", rules=[CodecRule("int8", layers=[2])]))
        with pytest.raises(CodecError, match="codec_params are not for it"):
            link.send("r", layout, codec=CodecPlan("lynx"), codec_params={})
        with pytest.raises(CodecError, match="unknown codec 'plan'"):
            link.send("r", layout, codec="plan")
        with pytest.raises(CodecError, match="parts of 3 heads for a page of 2"):
            link.send("r", layout, codec="by_head", codec_params=BY_HEAD | {"heads": [1, 2]})
        plan = CodecPlan("lynx", rules=[CodecRule("by_channel", BY_CHANNEL, layers=[1])])
        with pytest.raises(CodecError, match="parts of 16 channels for a page of 17"):
            link.send("r", CacheLayout(2, 9, 2, 16, 17), codec=plan)
        link.send("r", layout, codec="by_head", codec_params=deep).cancel()
        await make_cache().send_on(link, "good")


GOOD = CodecPlan("lynx", rules=[CodecRule("int8", layers=[1])]).table(2).params()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "a plan for key and value with"),
        (GOOD | {"more": 1}, "a plan for key and value with"),
        (GOOD | {"codecs": "lynx"}, "list of codecs"),
        (GOOD | {"params": [{}]}, "list of codecs"),
        (GOOD | {"codecs": ["lynx", "zip"]}, "unknown codec 'zip'"),
        (GOOD | {"codecs": ["lynx", "plan"]}, "unknown codec 'plan'"),
        (GOOD | {"codecs": ["lynx", ["int8"]]}, "unknown codec"),
        (GOOD | {"params": [{}, {"implementation": "reference"}]}, "no parameter implementation"),
        (GOOD | {"params": [{"name": "int8"}, {}]}, "no parameter name"),
        (GOOD | {"params": [{}, []]}, "must be a map"),
        (GOOD | {"key": [0]}, "each of 2 layers"),
        (GOOD | {"key": [0, 1, 1]}, "each of 2 layers"),
        (GOOD | {"key": {"0": 0, "1": 0}}, "each of 2 layers"),
        (GOOD | {"value": [0, 2]}, "not among its 2"),
        (GOOD | {"value": [0, -1]}, "not among its 2"),
        (GOOD | {"value": [0, True]}, "not among its 2"),
        (GOOD | {"codecs": ["int8"] * 8193, "params": [{}] * 8193}, "more than 8192"),
        ({"codecs": ["int4"], "params": [{}], "key": [0, 0], "value": [0, 0]}, "streams: the offer has 2"),
    ],
)
async def test_plans_of_a_peer_that_make_no_sense(params: dict[str, Any], message: str, make_cache: Any) -> None:
    """That transfer is declined, its sender learns why, and the link lives on."""
    cache = make_cache()
    async with lynx_net.serve("memory://odd") as server, lynx_net.connect(server.url) as link:
        transfer = link.open_transfer("odd", cache.layout, codec="plan", codec_params=params, streams=2)
        async with asyncio.timeout(5):
            with pytest.raises(TransferAbortedError, match=message):
                await transfer.delivered
            await cache.send_on(link, "good")


def test_the_largest_page_may_be_in_any_layer_and_kind() -> None:
    """What is set aside before a transfer is accepted covers the largest page of all layers, not of the first."""
    layout = CacheLayout(layers=3, tokens=300, heads=1, key_size=8, value_size=8)
    for index in range(layout.page_count):
        state = ReceiveState(
            1, layout, 1, 4096, lambda page, index=index: [frozenset({9000 if page == index else 100})], [1 << 20], 500
        )
        assert state.early_bytes() == 500 + 9000


async def test_more_bytes_than_a_part_can_have_are_refused(make_cache: Any) -> None:
    """Sizes that depend on the values are bounded: a page stream beyond its bound never gets memory."""
    cache = make_cache(layers=1, tokens=40)
    codec = get_codec("by_head", **BY_HEAD)
    bound = codec.stream_bytes(cache.layout.page(0).shape, wide=True)[0]
    async with (
        lynx_net.serve("memory://bound", config=LinkConfig(segment_bytes=1 << 20)) as server,
        lynx_net.connect(server.url) as link,
    ):
        transfer = link.open_transfer("r", cache.layout, codec="by_head", codec_params=codec.params(), streams=2)
        transfer.submit(0, 0, memoryview(bytes(bound + 1)))
        received = await anext(aiter(server))
        async with asyncio.timeout(5):
            with pytest.raises(lynx_net.LynxError):
                await received.complete
            with pytest.raises(lynx_net.LynxError):
                await transfer.delivered
