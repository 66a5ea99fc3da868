"""Offers and buffers that are not what they should be: a typed error at once, nothing sent, nobody waits."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import lynx_codec
import lynx_net
from lynx_gpu import device_count
from lynx_net import CacheLayout, HostCache, LinkConfig
from lynx_net.errors import BackendMissingError, CodecError, LocalProtocolError, LynxError, TransferAbortedError


class DeviceArray:
    """What a CUDA library hands out: looks like an array, and its pointer means nothing on the host."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.dtype = np.dtype(np.float32)
        self.size = int(np.prod(shape))
        self.nbytes = self.size * 4
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": (0xDEAD0000, False), "version": 3}

    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


class DeviceTarget:
    """A target whose memory lies on a device."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout

    def view(self, layer: int, kind: Any) -> Any:
        return DeviceArray(self._layout.array_shape(kind))


class ReadOnly(HostCache):
    def view(self, layer: int, kind: Any) -> Any:
        array = super().view(layer, kind)
        array.flags.writeable = False
        return array


def _sent_bytes(link: Any) -> int:
    """Data bytes that left, whatever was queued."""
    return sum(sum(outgoing.stats.stream_bytes) for outgoing in link.events.outgoing.values())


async def test_device_memory_that_cannot_be_used(make_cache: Any) -> None:
    """A typed error that says what is missing; nothing of the transfer was sent and the link lives on."""
    cache = make_cache()
    device = DeviceArray(cache.layout.array_shape("key"))
    async with lynx_net.serve("tcp://127.0.0.1:0") as server, lynx_net.connect(server.url) as link:
        sending = link.send("device", cache.layout)
        with pytest.raises(LocalProtocolError, match="layer 0: keys and values must both be in device memory"):
            await sending.write(0, device, cache.arrays[0, "value"])
        if not device_count():
            with pytest.raises(BackendMissingError, match="CuPy with a CUDA device"):
                await sending.write(0, device, device)
        assert _sent_bytes(link) == 0
        sending.cancel()
        await cache.send_on(link, "host")


@pytest.mark.parametrize(
    "buffer",
    [
        DeviceArray((4096,)),
        np.zeros((64, 128), np.uint8)[:, ::2],
        np.zeros((64, 64), np.uint8, order="F"),
        memoryview(bytes(8192))[::2],
        "text",
        None,
        4096,
    ],
    ids=["device", "strided", "fortran", "sliced", "text", "none", "number"],
)
async def test_buffers_that_cannot_be_sent(buffer: Any, make_cache: Any) -> None:
    """Page streams given as wrong objects are a TypeError; the right one can still follow."""
    layout = CacheLayout(layers=1, tokens=1, heads=1, key_size=1, value_size=0, page_tokens=1)
    async with lynx_net.serve("tcp://127.0.0.1:0") as server, lynx_net.connect(server.url) as link:
        transfer = link.open_transfer("raw", layout, codec="lynx", codec_params={}, streams=2)
        with pytest.raises(TypeError):
            transfer.submit(0, 0, buffer)
        assert transfer.stats.total_bytes == 0
        assert link.core.outgoing.queued_bytes(transfer.id, 0) == 0
        transfer.cancel()
        await make_cache().send_on(link, "good")


@pytest.mark.parametrize(("target", "words"), [(DeviceTarget, "CuPy|cudaError"), (ReadOnly, "writable")])
async def test_targets_that_cannot_be_written_to(target: Any, words: str, make_cache: Any) -> None:
    """The receiver declines before a byte of data is taken, and says why."""
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", allocate=lambda offer: target(offer.layout)) as server,
        lynx_net.connect(server.url) as link,
    ):
        async with asyncio.timeout(2):
            with pytest.raises(TransferAbortedError, match=words):
                await make_cache().send_on(link)


@pytest.mark.parametrize("error", [MemoryError("no room"), ZeroDivisionError("a bug"), LynxError("not now")])
@pytest.mark.parametrize("url", ["memory://declining", "tcp://127.0.0.1:0"])
async def test_an_application_that_fails_to_give_memory_declines(
    error: Exception, url: str, make_cache: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises: the sender learns it at once, the link and the next transfer live."""
    failing = [error]

    def allocate(offer: Any) -> HostCache:
        if failing:
            raise failing.pop()
        return HostCache(offer.layout)

    async with lynx_net.serve(url, allocate=allocate) as server, lynx_net.connect(server.url, lanes=2) as link:
        async with asyncio.timeout(2):
            with pytest.raises(TransferAbortedError, match=str(error)):
                await make_cache().send_on(link)
            await make_cache().send_on(link, "next")
    assert str(error) in caplog.text


@pytest.mark.parametrize(
    "params", [{"alpha": "x"}, {"name": "lynx"}, {"implementation": "reference"}, {"surprise": 1}, {"alpha": [[]]}]
)
async def test_codec_parameters_that_make_no_sense(params: dict[str, Any], make_cache: Any) -> None:
    """They come from the peer: that transfer is declined, and nothing else happens."""
    cache = make_cache()
    async with lynx_net.serve("tcp://127.0.0.1:0") as server, lynx_net.connect(server.url) as link:
        transfer = link.open_transfer("odd", cache.layout, codec="lynx", codec_params=params, streams=2)
        async with asyncio.timeout(2):
            with pytest.raises(TransferAbortedError):
                await transfer.delivered
            await cache.send_on(link, "good")


@pytest.mark.parametrize("url", ["memory://garbage", "tcp://127.0.0.1:0"])
async def test_bytes_that_no_codec_made(url: str, make_cache: Any) -> None:
    """They arrive whole and cannot be decoded: CodecError for the receiver, an abort for the sender, nothing ready."""
    cache = make_cache(layers=1, tokens=40)
    codec = lynx_codec.get_codec("lynx")
    async with lynx_net.serve(url) as server, lynx_net.connect(server.url) as link:
        transfer = link.open_transfer(
            "garbage", cache.layout, codec="lynx", codec_params=codec.params(), streams=len(codec.stream_names)
        )
        received = await anext(aiter(server))
        for stream in range(2):
            for page in cache.layout.pages():
                size = codec.stream_bytes(page.shape, wide=False)[stream]
                transfer.submit(page.index, stream, memoryview(b"\xa5" * size))
        async with asyncio.timeout(2):
            for waiting in (received.anchor_ready, received.layer_ready(0), received.complete):
                with pytest.raises(CodecError):
                    await waiting
            with pytest.raises(TransferAbortedError, match="cannot decode"):
                await transfer.delivered
            await cache.send_on(link, "good")


async def test_overload_waits_in_order_under_a_bound(make_cache: Any) -> None:
    """Thirty caches for memory that holds two: never more is held, all arrive, in the order of their offers."""
    cache = make_cache(tokens=200)
    done: list[str] = []
    held: list[int] = []
    config = LinkConfig(memory_bytes=40_000, initial_credit_bytes=4096)
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", config=config) as server,
        lynx_net.connect(server.url) as link,
        asyncio.TaskGroup() as group,
    ):
        book = server._endpoint._book
        for index in range(30):
            group.create_task(cache.send_on(link, f"r{index}"))
        async for transfer in server:
            await transfer.complete
            done.append(transfer.offer.request_id)
            held.append(book.reserved_bytes)
            if len(done) == 30:
                break
    assert done == [f"r{index}" for index in range(30)]
    assert 0 < max(held) <= config.memory_bytes


async def test_more_open_transfers_than_allowed_are_refused_and_the_rest_arrives(make_cache: Any) -> None:
    """A hundred at once where ten may be open: each is delivered or refused with the reason, none is lost."""
    cache = make_cache(tokens=40)
    config = LinkConfig(max_pending_offers=10)
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", config=config) as server,
        lynx_net.connect(server.url, rate="20Mbit") as link,
    ):
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(
                *(cache.send_on(link, f"r{index}") for index in range(100)), return_exceptions=True
            )
    refused = [one for one in outcomes if isinstance(one, BaseException)]
    assert all(isinstance(one, TransferAbortedError) and "too many" in str(one) for one in refused), refused
    assert 10 <= len(outcomes) - len(refused) < 100
