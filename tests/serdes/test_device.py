"""Caches in device memory: the pipeline around the kernels, on a CUDA that takes its time (fakecuda.py)."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fakecuda import FakeArray

import lynx_net
from lynx_codec import get_codec
from lynx_net import CacheLayout, HostCache, LinkConfig
from lynx_net.errors import (
    CodecError,
    IntegrityError,
    LocalProtocolError,
    LynxError,
    NonFiniteError,
    TransferAbortedError,
)
from lynx_net.serdes.device import DeviceBuffers

if TYPE_CHECKING:
    from collections.abc import Callable

    from fakecuda import FakeCuda

URL = "tcp://127.0.0.1:0"


class FakeTarget(HostCache):
    """A cache in the memory of the fake device; layers take turns on `devices`."""

    def __init__(self, layout: CacheLayout, devices: tuple[int, ...] = (0,), caller: int = 0) -> None:
        super().__init__(layout)
        self.devices = devices
        self.caller = caller

    def view(self, layer: int, kind: Any) -> Any:
        return FakeArray(super().view(layer, kind), self.devices[layer % len(self.devices)], self.caller)

    def on_host(self) -> HostCache:
        """The values, as a host cache."""
        copy = HostCache(self.layout)
        copy._arrays = self._arrays
        return copy


async def write_devices(cache: Any, sending: Any, devices: tuple[int, ...] = (0,), caller: int = 0) -> None:
    for layer in range(cache.layout.layers):
        device = devices[layer % len(devices)]
        arrays = (cache.arrays.get((layer, kind)) for kind in ("key", "value"))
        await sending.write(layer, *(None if one is None else FakeArray(one, device, caller) for one in arrays))


async def until(true: Callable[[], object]) -> None:
    """Wait for something that a thread does."""
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def pass_on(
    cache: Any,
    *,
    codec: Any = "lynx",
    devices: tuple[int, ...] = (0,),
    buffers: DeviceBuffers | None = None,
    config: LinkConfig | None = None,
    on_host: bool = False,
    **options: Any,
) -> Any:
    """Send a cache from a device to a device (or to the host) and return the complete transfer."""
    target: Any = HostCache if on_host else lambda layout: FakeTarget(layout, devices)
    async with (
        lynx_net.serve(
            URL, allocate=lambda offer: target(offer.layout), device_buffers=buffers, config=config
        ) as server,
        lynx_net.connect(server.url, device_buffers=buffers, config=config, **options) as link,
    ):

        async def send() -> None:
            async with link.send("r", cache.layout, codec=codec, fine=cache.fine) as sending:
                await write_devices(cache, sending, devices)

        task = asyncio.create_task(send())
        transfer = await anext(aiter(server))
        await transfer.complete
        await task
        return transfer


@pytest.mark.parametrize("codec", ["lynx", "bf16", "int8", "nested"])
async def test_device_to_device_is_what_the_codec_gives(codec: str, cuda: FakeCuda, make_cache: Any, same: Any) -> None:
    cache = make_cache(layers=2, tokens=520)
    transfer = await pass_on(cache, codec=codec, devices=(0, 1), lanes=3)
    assert same(transfer.target.on_host(), cache.decoded(codec))
    assert {device for device, _ in cuda.encoded} == {device for device, *_ in cuda.decoded} == {0, 1}


async def test_the_device_makes_checksums_which_the_receiver_compares(
    cuda: FakeCuda, make_cache: Any, same: Any
) -> None:
    cache = make_cache(layers=2, tokens=520)
    transfer = await pass_on(cache)
    assert same(transfer.target.on_host(), cache.decoded("lynx"))
    assert cuda.summed_pages == cache.layout.page_count
    cuda.bad_sums = 1 << 40
    with pytest.raises(LynxError, match="checksum") as caught:
        await pass_on(cache)
    assert isinstance(caught.value, IntegrityError | TransferAbortedError)


@pytest.mark.parametrize(
    ("buffers", "config"),
    [
        (DeviceBuffers(checksums=False), None),
        (DeviceBuffers(checksums=False, group_bytes=1), None),
        (None, LinkConfig(segment_bytes=4096)),
    ],
    ids=["not wanted", "not wanted, and pages without residuals", "small segments"],
)
async def test_checksums_that_nobody_needs_are_not_made(
    buffers: DeviceBuffers | None, config: LinkConfig | None, cuda: FakeCuda, make_cache: Any, same: Any
) -> None:
    cuda.bad_sums = 1
    cache = make_cache(layers=2, tokens=520, heads=4)
    transfer = await pass_on(cache, buffers=buffers, config=config)
    assert same(transfer.target.on_host(), cache.decoded("lynx"))
    assert cuda.summed_pages == 0


@pytest.mark.parametrize("fields", [{"tokens": 1}, {"key_size": 0}, {"value_size": 0}, {"layers": 0}, {"tokens": 0}])
async def test_odd_layouts(fields: dict[str, Any], cuda: FakeCuda, make_cache: Any, same: Any) -> None:
    cache = make_cache(**fields)
    transfer = await pass_on(cache)
    assert same(transfer.target.on_host(), cache.decoded("lynx"))


async def test_one_side_in_host_memory(cuda: FakeCuda, make_cache: Any, same: Any) -> None:
    cache = make_cache()
    transfer = await pass_on(cache, on_host=True)
    assert same(transfer.target, cache.decoded("lynx"))
    assert cuda.encoded
    assert not cuda.decoded


async def test_codecs_without_kernels_go_by_way_of_the_host(cuda: FakeCuda, make_cache: Any, same: Any) -> None:
    cuda.without_kernels = ("lynx",)
    cache = make_cache(layers=2, tokens=600)
    transfer = await pass_on(cache)
    assert same(transfer.target.on_host(), cache.decoded("lynx"))
    assert (cuda.encoded, cuda.decoded) == ([], [])
    assert cuda.fetched == cache.layout.page_count
    assert cuda.fetched <= cuda.stored <= 2 * cuda.fetched  # once more where the residual came later


async def test_pages_too_long_for_the_kernels_are_told_of_once(
    cuda: FakeCuda, make_cache: Any, same: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.longest_page = 100
    cache = make_cache(layers=2, tokens=300)
    transfer = await pass_on(cache)
    assert same(transfer.target.on_host(), cache.decoded("lynx"))
    assert cuda.encoded == []
    told = [record.getMessage() for record in caplog.records if "kernels" in record.getMessage()]
    assert len(told) == 2  # of either side
    assert "pages of 256 tokens are too long for the kernels of the codec lynx" in told[0]
    assert "pages of 64 tokens" in told[0]


async def test_keys_with_kernels_and_values_without(cuda: FakeCuda, make_cache: Any, same: Any) -> None:
    """A plan whose value codec has one stream and no kernels, beside a key codec with two."""
    cuda.without_kernels = ("int8",)
    plan = lynx_codec_plan()
    cache = make_cache(layers=2, tokens=600)
    transfer = await pass_on(cache, codec=plan)
    expected = {"key": cache.decoded("lynx"), "value": cache.decoded("int8")}
    target = transfer.target.on_host()
    for layer in range(2):
        for kind, right in expected.items():
            assert np.array_equal(target.view(layer, kind), right.view(layer, kind))  # type: ignore[arg-type]
    assert cuda.encoded
    assert cuda.stored == cache.layout.page_count // 2  # values have no other stream


def lynx_codec_plan() -> Any:
    from lynx_codec import CodecPlan
    from lynx_codec.plan import CodecRule

    return CodecPlan("lynx", {}, [CodecRule("int8", kind="value")])


async def test_a_slow_device_and_small_buffers(cuda: FakeCuda, make_cache: Any, same: Any) -> None:
    """Room for about two groups in each buffer: everybody waits for somebody, and everything arrives."""
    cuda.copy_s = cuda.kernel_s = 0.001
    cache = make_cache(layers=2, tokens=1000, heads=4, key_size=32, value_size=32)
    buffers = DeviceBuffers(
        send_pinned_bytes=300_000, receive_pinned_bytes=100_000, staging_bytes=2_000_000, group_bytes=200_000
    )
    transfer = await pass_on(cache, buffers=buffers, lanes=2)
    assert same(transfer.target.on_host(), cache.decoded("lynx"))
    assert cuda.device_bytes[0] <= 2 * 2_000_000
    assert cuda.pinned_bytes <= 300_000 + 100_000 + 2 * (1 << 20)


async def test_groups_of_an_array_are_alike(cuda: FakeCuda, make_cache: Any) -> None:
    """But for the first one, which is small: the wire has something soon."""
    cache = make_cache(layers=2, tokens=13 * 64, page_tokens=64)
    anchor_bytes, residual_bytes = get_codec("lynx").stream_bytes(cache.layout.page(6).shape)
    await pass_on(cache, buffers=DeviceBuffers(group_bytes=5 * anchor_bytes))
    assert cuda.batches == [1, 4, 4, 4, 5, 5, 3, 5, 5, 3, 5, 5, 3]
    cuda.batches.clear()
    wide_bytes = sum(get_codec("lynx").stream_bytes(cache.layout.page(6).shape, wide=True))
    assert wide_bytes > anchor_bytes + residual_bytes
    await pass_on(cache, buffers=DeviceBuffers(group_bytes=5 * anchor_bytes, staging_bytes=3 * 3 * wide_bytes))
    assert cuda.batches == [1, 3, 3, 3, 3, 3, 3, 3, 3, 1] + 2 * [3, 3, 3, 3, 1]


@pytest.mark.parametrize(("window_bytes", "early_bytes"), [(8192, 0), (9000, 20000), (30000, 0)])
async def test_narrow_windows_never_stop_the_transfer(
    window_bytes: int, early_bytes: int, cuda: FakeCuda, make_cache: Any, same: Any
) -> None:
    """Pages that wait for others to be decoded with them hold back credit for these others, but never for good."""
    config = LinkConfig(
        segment_bytes=4096,
        anchor_window_bytes=window_bytes,
        residual_window_bytes=window_bytes,
        initial_credit_bytes=4096,
        early_residual_bytes=early_bytes,
    )
    cache = make_cache(layers=2, tokens=500, page_tokens=64)
    async with asyncio.timeout(20):
        transfer = await pass_on(cache, config=config, lanes=3)
    assert same(transfer.target.on_host(), cache.decoded("lynx"))


async def test_what_the_application_has_queued_comes_first(cuda: FakeCuda, make_cache: Any, same: Any) -> None:
    """The cache is still being written, and the target still being cleared, when they are handed over."""
    cache = make_cache()
    caller, other = cuda.caller(), cuda.caller()
    finished = {key: array.copy() for key, array in cache.arrays.items()}
    target = FakeTarget(cache.layout, caller=other)
    for array in cache.arrays.values():
        array[:] = 0
    written, cleared = threading.Event(), threading.Event()

    def write_late() -> None:
        assert written.wait(10)
        for key, array in cache.arrays.items():
            array[:] = finished[key]

    def clear_late() -> None:
        assert cleared.wait(10)
        for array in target._arrays.values():
            array.fill(7)

    cuda.callers[caller].put(write_late)
    cuda.callers[other].put(clear_late)
    async with (
        lynx_net.serve(URL, allocate=lambda _: target) as server,
        lynx_net.connect(server.url) as link,
    ):

        async def send() -> None:
            async with link.send("r", cache.layout, codec="lynx", fine=cache.fine) as sending:
                await write_devices(cache, sending, caller=caller)

        task = asyncio.create_task(send())
        transfer = await anext(aiter(server))
        await asyncio.sleep(0.2)
        assert not cuda.encoded
        written.set()
        await until(lambda: cuda.encoded)
        await asyncio.sleep(0.2)
        assert not cuda.decoded
        cleared.set()
        await transfer.complete
        await task
    assert same(target.on_host(), cache.decoded("lynx"))


async def test_ready_means_that_the_device_has_written_it(cuda: FakeCuda, make_cache: Any, same: Any) -> None:
    """Kernels are slow; at every event the values are those that it announces."""
    cuda.kernel_s = 0.01
    cache = make_cache(layers=4, tokens=600)
    anchors, full = cache.decoded("lynx", streams=1), cache.decoded("lynx")
    target = FakeTarget(cache.layout)
    async with (
        lynx_net.serve(URL, allocate=lambda _: target) as server,
        lynx_net.connect(server.url, rate="20Mbit") as link,
    ):

        async def send() -> None:
            async with link.send("r", cache.layout, codec="lynx", fine=cache.fine) as sending:
                await write_devices(cache, sending)

        task = asyncio.create_task(send())
        transfer = await anext(aiter(server))
        values = target.on_host()
        for layer in range(4):
            await transfer.layer_ready(layer)
            for kind in cache.layout.kinds:
                now = values.view(layer, kind)
                either = (now == anchors.view(layer, kind)) | (now == full.view(layer, kind))
                assert either.all()
        await transfer.residual_ready
        assert same(values, full)
        await task


class TestErrors:
    async def test_nan_names_its_place_and_the_receiver_learns(self, cuda: FakeCuda, make_cache: Any) -> None:
        cache = make_cache(tokens=700)
        cache.arrays[1, "value"][677, 1, 5] = np.nan
        async with (
            lynx_net.serve(URL, allocate=lambda offer: FakeTarget(offer.layout)) as server,
            lynx_net.connect(server.url) as link,
        ):

            async def send() -> None:
                async with link.send("r", cache.layout, codec="lynx", fine=cache.fine) as sending:
                    await write_devices(cache, sending)

            task = asyncio.create_task(send())
            transfer = await anext(aiter(server))
            with pytest.raises(TransferAbortedError, match=r"layer 1.*nan"):
                await transfer.complete
            with pytest.raises(NonFiniteError) as caught:
                await task
            assert (caught.value.head, caught.value.channel) == (1, 5)
            assert any("token 677" in note for note in caught.value.__notes__)

    @pytest.mark.parametrize(
        ("keys", "match"),
        [
            (np.zeros((300, 2, 15), np.float32), "shape"),
            (np.zeros((300, 2, 16), np.float16), "float16"),
            (None, "both be in device memory"),
        ],
    )
    async def test_wrong_arrays(self, keys: Any, match: str, cuda: FakeCuda, make_cache: Any) -> None:
        cache = make_cache()
        async with lynx_net.serve(URL) as server, lynx_net.connect(server.url) as link:
            sending = link.send("bad", cache.layout)
            array = None if keys is None else FakeArray(keys)
            with pytest.raises(LocalProtocolError, match=rf"layer 0: keys.*{match}"):
                await sending.write(0, array, FakeArray(cache.arrays[0, "value"]))
            sending.cancel()
            await cache.send_on(link, "good")

    async def test_a_group_that_never_fits(self, cuda: FakeCuda, make_cache: Any) -> None:
        cache = make_cache()
        buffers = DeviceBuffers(send_pinned_bytes=1000)
        async with lynx_net.serve(URL) as server, lynx_net.connect(server.url, device_buffers=buffers) as link:
            with pytest.raises(LocalProtocolError, match="send_pinned_bytes"):
                async with link.send("big", cache.layout) as sending:
                    await write_devices(cache, sending)
            await cache.send_on(link, "good")

    @pytest.mark.parametrize("switch", ["bad_header", "bad_pages"])
    async def test_bytes_that_are_no_page(self, switch: str, cuda: FakeCuda, make_cache: Any) -> None:
        cache = make_cache()
        setattr(cuda, switch, 1)
        async with (
            lynx_net.serve(URL, allocate=lambda offer: FakeTarget(offer.layout)) as server,
            lynx_net.connect(server.url) as link,
        ):

            async def send() -> None:
                async with link.send("r", cache.layout, codec="lynx", fine=cache.fine) as sending:
                    await write_devices(cache, sending)

            task = asyncio.create_task(send())
            transfer = await anext(aiter(server))
            with pytest.raises(CodecError, match="fake"):
                await transfer.complete
            with pytest.raises(TransferAbortedError, match="cannot decode"):
                await task

    async def test_a_target_of_another_shape_declines(self, cuda: FakeCuda, make_cache: Any) -> None:
        cache, other = make_cache(), make_cache(tokens=5)
        async with (
            lynx_net.serve(URL, allocate=lambda _: FakeTarget(other.layout)) as server,
            lynx_net.connect(server.url) as link,
        ):
            with pytest.raises(TransferAbortedError, match="device memory of shape"):
                await cache.send_on(link)


class TestEnds:
    async def test_cancelling_waits_for_the_device(self, cuda: FakeCuda, make_cache: Any) -> None:
        """After a cancelled write nothing reads the arrays, and the link lives on."""
        cuda.kernel_s = 0.02
        cache = make_cache(layers=2, tokens=2000)
        buffers = DeviceBuffers(group_bytes=20_000)
        async with (
            lynx_net.serve(URL, allocate=lambda offer: FakeTarget(offer.layout)) as server,
            lynx_net.connect(server.url, device_buffers=buffers) as link,
        ):

            async def send() -> None:
                async with link.send("r", cache.layout, codec="lynx", fine=cache.fine) as sending:
                    await write_devices(cache, sending)

            task = asyncio.create_task(send())
            transfer = await anext(aiter(server))
            await until(lambda: cuda.encoded)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            read = len(cuda.encoded)
            await asyncio.sleep(0.1)
            assert 0 < len(cuda.encoded) == read < cache.layout.page_count
            with pytest.raises(TransferAbortedError):
                await transfer.complete
            await make_cache().send_on(link, "next")

    async def test_a_cancelled_receiver_writes_nothing_more(self, cuda: FakeCuda, make_cache: Any) -> None:
        cuda.kernel_s = 0.01
        cache = make_cache(layers=6, tokens=1000)
        target = FakeTarget(cache.layout)
        async with (
            lynx_net.serve(URL, allocate=lambda _: target) as server,
            lynx_net.connect(server.url) as link,
        ):

            async def send() -> None:
                async with link.send("r", cache.layout, codec="lynx", fine=cache.fine) as sending:
                    await write_devices(cache, sending)

            task = asyncio.create_task(send())
            transfer = await anext(aiter(server))
            await transfer.layer_ready(0)
            transfer.cancel()
            await transfer.closed()
            before = {key: array.copy() for key, array in target._arrays.items()}
            with pytest.raises(LynxError):
                await task
            await asyncio.sleep(0.1)
            assert all(np.array_equal(array, before[key]) for key, array in target._arrays.items())

    async def test_a_full_ring_is_no_dead_end(self, cuda: FakeCuda, make_cache: Any, same: Any) -> None:
        """All pinned memory is somebody else's for good: it takes longer, that is all."""
        cache = make_cache()
        buffers = DeviceBuffers(send_pinned_bytes=1 << 20)
        async with (
            lynx_net.serve(URL, allocate=lambda offer: FakeTarget(offer.layout)) as server,
            lynx_net.connect(server.url, device_buffers=buffers) as link,
        ):
            ring = link._devices.ring(0)
            ring.grow()
            held = ring.take(1 << 20)
            assert held is not None

            async def send() -> None:
                async with link.send("r", cache.layout, codec="lynx", fine=cache.fine) as sending:
                    await write_devices(cache, sending)

            task = asyncio.create_task(send())
            transfer = await anext(aiter(server))
            await asyncio.sleep(0.05)
            assert not cuda.encoded
            await transfer.complete
            await task
            assert ring.used_bytes == held.nbytes
        assert same(transfer.target.on_host(), cache.decoded("lynx"))

    async def test_pinned_memory_comes_back(self, cuda: FakeCuda, make_cache: Any) -> None:
        """When a transfer has ended, in whatever way, nothing of it is left in the ring."""
        cache = make_cache(layers=4, tokens=800)
        async with (
            lynx_net.serve(URL, allocate=lambda offer: FakeTarget(offer.layout)) as server,
            lynx_net.connect(server.url, lanes=2) as link,
        ):
            for cancel in (False, True):
                sending = link.send("r", cache.layout, codec="lynx", fine=cache.fine)
                transfer = await anext(aiter(server))
                await sending.write(0, FakeArray(cache.arrays[0, "key"]), FakeArray(cache.arrays[0, "value"]))
                ring = link._devices.ring(0)
                if cancel:
                    transfer.cancel()
                    await transfer.closed()
                    with pytest.raises(TransferAbortedError):
                        await sending.delivered
                else:
                    for layer in range(1, 4):
                        await sending.write(
                            layer, FakeArray(cache.arrays[layer, "key"]), FakeArray(cache.arrays[layer, "value"])
                        )
                    await sending.delivered
                await until(lambda ring=ring: not ring.used_bytes)
