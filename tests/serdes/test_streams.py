"""Transfers of codecs with any number of streams: each makes the cache what its codec says, in order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lynx_codec
import lynx_net
from lynx_net import HostCache
from lynx_net.aio.transfer import Offer, OutgoingTransfer
from lynx_net.errors import LocalProtocolError, TransferAbortedError
from lynx_net.observe import TraceRecorder
from lynx_net.testing.clock import run_virtual
from lynx_net.wire.stats import TransferStats

RATE = "5Mbit"


def decoded(cache: Any, params: dict[str, Any], streams: int) -> HostCache:
    """The cache after so many streams, coded without any network."""
    codec = lynx_codec.get_codec("nested", **params)
    target = HostCache(cache.layout)
    for page in cache.layout.pages():
        room = [memoryview(bytearray(size)) for size in codec.stream_bytes(page.shape, wide=True)]
        lengths = codec.encode(cache.arrays[page.layer, page.kind][page.start : page.stop], page.shape, room)
        encoded = [out[:length] for out, length in zip(room, lengths, strict=True)]
        codec.decode(encoded[:streams], page.shape, target.view(page.layer, page.kind)[page.start : page.stop])
    return target


def copy_of(target: HostCache) -> HostCache:
    copied = HostCache(target.layout)
    for layer in range(target.layout.layers):
        for kind in target.layout.kinds:
            copied.view(layer, kind)[:] = target.view(layer, kind)
    return copied


def splits(total: int = 8) -> st.SearchStrategy[list[int]]:
    """1 to 5 widths that make 8 bits."""
    cuts = st.sets(st.integers(1, total - 1), max_size=4)
    return cuts.map(lambda at: [b - a for a, b in zip([0, *sorted(at)], [*sorted(at), total], strict=True)])


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bits=splits(), exact=st.booleans(), lanes=st.integers(1, 3))
def test_each_stream_refines_the_whole_cache_before_the_next_one_arrives(
    bits: list[int], exact: bool, lanes: int, make_cache: Any, same: Any
) -> None:
    """1 to 6 streams over a paced link: every one is ready in turn, and the target is then what it should be."""
    cache = make_cache(tokens=200, dtype="bfloat16")
    params = {"bits": bits, "exact": exact}
    streams = len(bits) + exact
    recorder = TraceRecorder(clock=lambda: asyncio.get_running_loop().time())

    async def run() -> None:
        async with (
            lynx_net.serve("memory://streams", observers=[recorder]) as server,
            lynx_net.connect(server.url, rate=RATE, lanes=lanes) as link,
        ):
            sending = asyncio.create_task(cache.send_on(link, codec="nested", codec_params=params))
            transfer = await anext(aiter(server))
            assert transfer.stream_names == lynx_codec.get_codec("nested", **params).stream_names
            for stream in range(streams):
                await transfer.stream_ready(stream)
                if stream + 1 < streams:
                    assert not transfer.stream_ready(stream + 1).done()
                assert same(copy_of(transfer.target), decoded(cache, params, stream + 1))
                assert all(transfer.layer_ready(layer, stream).done() for layer in range(cache.layout.layers))
            sent = await sending
            times = [transfer.stream_ready(stream).at_s for stream in range(streams)]
            assert transfer.anchor_ready.at_s == times[0]
            assert transfer.residual_ready.at_s == times[len(bits) - 1]
            timeline = transfer.timeline()
            assert timeline.residual_ready_s == (times[len(bits) - 1] if len(bits) > 1 else None)
            assert sent.timeline().stream_names == timeline.stream_names == transfer.stream_names
            if exact:
                assert transfer.exact_ready.at_s == timeline.exact_ready_s == times[-1]
                for (layer, kind), array in cache.arrays.items():
                    bits_there = transfer.target.view(layer, kind).view("uint32") >> 16
                    assert (bits_there == array).all()
            else:
                assert timeline.exact_ready_s is None
                with pytest.raises(LocalProtocolError, match="codec nested of request 'r' has no exact stream"):
                    _ = transfer.exact_ready
            names = {event["name"] for event in recorder.trace()["traceEvents"]}
            assert {f"{name} ready" for name in transfer.stream_names} <= names

    run_virtual(run())


async def test_streams_beyond_the_last_are_the_last(make_cache: Any) -> None:
    cache = make_cache()
    async with lynx_net.serve("memory://beyond") as server, lynx_net.connect(server.url) as link:
        sending = asyncio.create_task(cache.send_on(link, codec="int8"))
        transfer = await anext(aiter(server))
        await transfer.complete
        await sending
    assert transfer.stream_names == ("anchor",)
    assert transfer.stream_ready(3) is transfer.stream_ready(0) is transfer.anchor_ready is transfer.residual_ready
    assert transfer.layer_ready(1, 7) is transfer.layer_ready(1)
    with pytest.raises(LocalProtocolError, match="counted from 0"):
        transfer.stream_ready(-1)
    with pytest.raises(LocalProtocolError, match="counted from 0"):
        transfer.layer_ready(0, -1)


@pytest.mark.parametrize("streams", [9, 16])
def test_names_stand_for_every_stream(streams: int, make_cache: Any) -> None:
    """A transfer of bytes has names too; a codec that has another number of streams than its offer is refused."""

    class Clock:
        clock = staticmethod(lambda: 0.0)

    offer = Offer("r", make_cache().layout, "bytes", {}, streams, {}, None)
    link: Any = Clock()
    names = OutgoingTransfer(link, 1, offer, TransferStats.of(streams)).stream_names
    assert names[:3] == ("anchor", "residual1", "residual2")
    assert len(set(names)) == streams
    with pytest.raises(LocalProtocolError, match=f"the offer has {streams}, the codec 2: anchor, exact"):
        OutgoingTransfer(link, 1, offer, TransferStats.of(streams), ("anchor", "exact"))


async def test_more_streams_than_the_wire_counts_are_refused(make_cache: Any) -> None:
    async with lynx_net.serve("memory://many") as server, lynx_net.connect(server.url) as link:
        with pytest.raises(LocalProtocolError, match="1 to 16 streams, not 17"):
            link.open_transfer("r", make_cache().layout, codec="bytes", codec_params={}, streams=17)


async def test_a_transfer_that_fails_midway_keeps_what_was_ready(make_cache: Any) -> None:
    cache = make_cache(tokens=200, dtype="bfloat16")

    async def run() -> None:
        async with lynx_net.serve("memory://midway") as server, lynx_net.connect(server.url, rate=RATE) as link:
            params = {"bits": [2, 2, 4], "exact": True}
            sending = asyncio.create_task(cache.send_on(link, codec="nested", codec_params=params))
            transfer = await anext(aiter(server))
            await transfer.stream_ready(1)
            transfer.cancel("enough")
            assert transfer.stream_ready(1).done()
            for later in (transfer.residual_ready, transfer.exact_ready, transfer.complete):
                with pytest.raises(TransferAbortedError):
                    await later
            with pytest.raises(TransferAbortedError):
                await sending

    await asyncio.to_thread(run_virtual, run())
