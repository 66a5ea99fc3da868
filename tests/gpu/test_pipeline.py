"""Caches from device memory to device memory over a link: the values are those of the CPU codecs, and never early."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import lynx_net
from lynx_codec import get_codec
from lynx_gpu import DeviceCodec, device_count, paged_view
from lynx_gpu.events import Event
from lynx_net import CacheLayout, DeviceBuffers, DeviceCache
from lynx_net.errors import NonFiniteError
from lynx_net.serdes.fine import fine_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="no CUDA device")]

URL = "tcp://127.0.0.1:0"
NESTED = {"bits": [4, 4], "chunk": 128}


def cp() -> Any:
    import cupy

    return cupy


class Cache:
    """Random keys and values with what must come out."""

    def __init__(self, **fields: Any) -> None:
        sizes = {"layers": 2, "tokens": 700, "heads": 2, "key_size": 64, "value_size": 32, "dtype": "bfloat16"}
        layout = CacheLayout(**(sizes | fields))
        self.fine = fine_tokens(layout, least=0)
        self.layout = layout.with_fine(self.fine.tolist())
        rng = np.random.default_rng(1)
        self.arrays: dict[tuple[int, str], Any] = {}
        for layer in range(layout.layers):
            for kind in layout.kinds:
                values = rng.standard_normal(layout.array_shape(kind), dtype=np.float32) * (layer + 1)
                if layout.dtype == "bfloat16":
                    self.arrays[layer, kind] = (values.view(np.uint32) >> 16).astype(np.uint16)
                else:
                    self.arrays[layer, kind] = values.astype(layout.dtype)

    def decoded(self, codec: str, params: dict[str, Any], streams: int | None = None) -> dict[tuple[int, str], Any]:
        """By the numpy reference, without a network."""
        reference = get_codec(codec, implementation="reference", **params)
        out = {key: np.zeros_like(array) for key, array in self.arrays.items()}
        for page in self.layout.pages():
            buffers = [memoryview(bytearray(size)) for size in reference.stream_bytes(page.shape, wide=True)]
            array = self.arrays[page.layer, page.kind][page.start : page.stop]
            fine = self.fine[(self.fine >= page.start) & (self.fine < page.stop)] - page.start
            lengths = reference.encode(array, page.shape, buffers, fine)
            encoded = [buffer[:length] for buffer, length in zip(buffers, lengths, strict=True)][:streams]
            reference.decode(encoded, page.shape, out[page.layer, page.kind][page.start : page.stop])
        return out


def on_cupy(array: Any, device: int = 0) -> Any:
    with cp().cuda.Device(device):
        return cp().asarray(array)


def on_torch(array: Any, device: int = 0) -> Any:
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array).to(f"cuda:{device}")
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def on_host(array: Any) -> Any:
    if isinstance(array, cp().ndarray):
        return array.get()
    torch = pytest.importorskip("torch")
    return (
        (array.view(torch.int16).cpu().numpy().view(np.uint16))
        if array.dtype == torch.bfloat16
        else array.cpu().numpy()
    )


async def pass_on(
    cache: Cache,
    target: Any,
    write: Callable[[Any], Coroutine[Any, Any, None]],
    *,
    watch: Callable[[Any], Coroutine[Any, Any, None]] | None = None,
    buffers: DeviceBuffers | None = None,
    rate: str | None = None,
    **options: Any,
) -> None:
    async with (
        lynx_net.serve(URL, allocate=lambda _: target, device_buffers=buffers) as server,
        lynx_net.connect(server.url, lanes=2, rate=rate, device_buffers=buffers) as link,
    ):

        async def send() -> None:
            async with link.send("r", cache.layout, fine=cache.fine, **options) as sending:
                await write(sending)

        task = asyncio.create_task(send())
        try:
            transfer = await anext(aiter(server))
            if watch is not None:
                await watch(transfer)
            await transfer.complete
        except lynx_net.LynxError:
            await task  # its error says more
            raise
        await task


def writer(cache: Cache, place: Callable[[Any], Any]) -> Callable[[Any], Coroutine[Any, Any, None]]:
    async def write(sending: Any) -> None:
        for layer in range(cache.layout.layers):
            await sending.write(layer, place(cache.arrays[layer, "key"]), place(cache.arrays[layer, "value"]))

    return write


def check(cache: Cache, target: Any, expected: dict[tuple[int, str], Any]) -> None:
    for (layer, kind), right in expected.items():
        found = on_host(target.view(layer, kind))
        assert np.array_equal(found.view(np.uint8), right.view(np.uint8)), (layer, kind)


@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize(
    ("codec", "params"),
    [("lynx", {}), ("nested", NESTED), ("nested", NESTED | {"exact": True}), ("bf16", {}), ("int4", {})],
    ids=["lynx", "nested", "exact", "bf16", "int4"],
)
def test_values_are_those_of_the_reference(codec: str, params: dict[str, Any], library: Any) -> None:
    cache = Cache()
    target = DeviceCache(cache.layout, library=library)
    place = on_cupy if library == "cupy" else on_torch
    asyncio.run(pass_on(cache, target, writer(cache, place), codec=codec, codec_params=params))
    check(cache, target, cache.decoded(codec, params))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_small_buffers_and_many_groups(dtype: str) -> None:
    """Everybody waits for somebody, slots are used again and again, and every value is right."""
    cache = Cache(layers=4, tokens=3000, dtype=dtype)
    target = DeviceCache(cache.layout)
    buffers = DeviceBuffers(
        send_pinned_bytes=2_000_000, receive_pinned_bytes=300_000, staging_bytes=3_000_000, group_bytes=300_000
    )
    asyncio.run(pass_on(cache, target, writer(cache, on_cupy), buffers=buffers, codec="lynx"))
    check(cache, target, cache.decoded("lynx", {}))


def test_paged_caches_on_both_sides() -> None:
    cache = Cache(value_size=64, tokens=500)
    blocks, block_tokens = 80, 16
    order = np.random.default_rng(4).permutation(blocks)[: -(-500 // block_tokens)]
    sent = {layer: cp().zeros((blocks, 2, block_tokens, 2, 64), "uint16") for layer in range(2)}
    got = {layer: cp().zeros((2, blocks, block_tokens, 2, 64), "uint16") for layer in range(2)}
    for (layer, kind), array in cache.arrays.items():
        padded = np.zeros((len(order) * block_tokens, 2, 64), np.uint16)
        padded[:500] = array
        sent[layer][order, int(kind == "value")] = cp().asarray(padded.reshape(-1, block_tokens, 2, 64))

    class Target:
        def view(self, layer: int, kind: Any) -> Any:
            return paged_view(got[layer], kind, order, 500, layout="2bthd")

    async def write(sending: Any) -> None:
        for layer in range(2):
            views = (paged_view(sent[layer], kind, order, 500, layout="b2thd") for kind in ("key", "value"))
            await sending.write(layer, *views)

    for codec, params in (("nested", NESTED), ("by_head", two_parts())):
        asyncio.run(pass_on(cache, Target(), write, codec=codec, codec_params=params))
        for (layer, kind), right in cache.decoded(codec, params).items():
            found = got[layer][int(kind == "value"), order].get().reshape(-1, 2, 64)[:500]
            assert np.array_equal(found, right), (codec, layer, kind)


def two_parts() -> dict[str, Any]:
    """Parameters of a codec without kernels."""
    return {"heads": [1, 1], "codecs": ["lynx", "int8"], "params": [{}, {}]}


def test_a_codec_without_kernels_goes_by_way_of_the_host() -> None:
    cache = Cache(dtype="float32")
    target = DeviceCache(cache.layout)
    asyncio.run(pass_on(cache, target, writer(cache, on_cupy), codec="by_head", codec_params=two_parts()))
    check(cache, target, cache.decoded("by_head", two_parts()))


@pytest.mark.skipif(device_count() < 2, reason="one CUDA device")
def test_two_devices_in_one_process() -> None:
    cache = Cache(layers=4)
    halves = [DeviceCache(cache.layout, device=device) for device in (1, 0)]

    class Target:
        def view(self, layer: int, kind: Any) -> Any:
            return halves[layer % 2].view(layer, kind)

    async def write(sending: Any) -> None:
        for layer in range(4):
            arrays = (on_cupy(cache.arrays[layer, kind], layer % 2) for kind in ("key", "value"))
            await sending.write(layer, *arrays)

    asyncio.run(pass_on(cache, Target(), write, codec="lynx"))
    check(cache, Target(), cache.decoded("lynx", {}))


SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < cycles) {}
}
"""


def spin(stream: Any, cycles: int) -> None:
    """Keep a stream busy: 2 million cycles are about a millisecond."""
    with stream:
        cp().RawKernel(SPIN, "spin")((1,), (1,), (np.int64(cycles),))


def test_what_the_callers_streams_have_comes_first() -> None:
    """The cache is still being computed, and the target still being cleared, when they are handed over."""
    cache = Cache()
    target = DeviceCache(cache.layout)
    stream = cp().cuda.Stream(non_blocking=True)
    late: dict[Any, Any] = {key: cp().zeros_like(on_cupy(array)) for key, array in cache.arrays.items()}
    final = {key: on_cupy(array) for key, array in cache.arrays.items()}
    cp().cuda.get_current_stream().synchronize()

    # Once before, so that no compiler gives the streams time.
    asyncio.run(pass_on(cache, target, writer(cache, on_cupy), codec="nested", codec_params=NESTED))

    async def write(sending: Any) -> None:
        with stream:
            spin(stream, 400_000_000)
            for key, array in late.items():
                array[...] = final[key]
            for layer in range(2):
                await sending.write(layer, late[layer, "key"], late[layer, "value"])

    asyncio.run(pass_on(cache, target, write, codec="nested", codec_params=NESTED))
    check(cache, target, cache.decoded("nested", NESTED))


def _reads_too_early(monkeypatch: pytest.MonkeyPatch, *, with_event: bool) -> int:
    """Transfers whose readiness was announced before the device had written the values.

    Whoever verifies reads, when `residual_ready` comes, on a stream of his own; decoding is held up on the device.
    """
    usual = DeviceCodec.decode

    def slow(self: Any, plan: Any, hosts: Any, data: int, view: Any, stream: Any) -> int:
        spin(stream, 40_000_000)
        return usual(self, plan, hosts, data, view, stream)

    monkeypatch.setattr(DeviceCodec, "decode", slow)
    if not with_event:
        monkeypatch.setattr(Event, "wait", lambda self: None)
    cache = Cache(layers=3)
    anchors, full = cache.decoded("nested", NESTED, streams=1), cache.decoded("nested", NESTED)
    target = DeviceCache(cache.layout)
    reading = cp().cuda.Stream(non_blocking=True)
    wrong = 0

    def snapshot() -> dict[Any, Any]:
        with reading:
            copies = {key: target.view(*key).copy() for key in full}
            reading.synchronize()
            return {key: copy.get(stream=reading) for key, copy in copies.items()}

    async def watch(transfer: Any) -> None:
        nonlocal wrong
        for ready, values in ((transfer.anchor_ready, (anchors, full)), (transfer.residual_ready, (full,))):
            await ready
            now = snapshot()
            for key, found in now.items():
                whole = np.zeros(found.shape, bool)
                for right in values:
                    whole |= found == right[key]
                wrong += not whole.all()

    snapshot()  # once before: what is compiled at first use would take longer than decoding is held up
    # Encoding waits for events, too: the sender is given host memory, so that only the receiver's are missing.
    asyncio.run(
        pass_on(
            cache, target, writer(cache, lambda a: a), watch=watch, rate="200Mbit", codec="nested", codec_params=NESTED
        )
    )
    return wrong


def test_verification_never_reads_a_torn_page(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _reads_too_early(monkeypatch, with_event=True) == 0


def test_without_the_event_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above would notice if nobody waited for the device."""
    assert _reads_too_early(monkeypatch, with_event=False) > 0


def test_nan_names_its_place() -> None:
    cache = Cache(dtype="float32")
    cache.arrays[1, "value"][677, 1, 5] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        asyncio.run(pass_on(cache, DeviceCache(cache.layout), writer(cache, on_cupy), codec="lynx"))
    assert (caught.value.head, caught.value.channel) == (1, 5)
    assert any("token 677" in note for note in caught.value.__notes__)


def test_device_memory_is_bounded() -> None:
    """Beside the caches: staging memory up to its limit, and small tables."""
    cache = Cache(layers=8, tokens=4000, heads=8, key_size=128, value_size=128)
    target = DeviceCache(cache.layout)
    place = {id(array): on_cupy(array) for array in cache.arrays.values()}
    cp().cuda.get_current_stream().synchronize()
    free, _ = cp().cuda.runtime.memGetInfo()
    buffers = DeviceBuffers(staging_bytes=32 << 20)
    seen: list[int] = []

    async def watch(transfer: Any) -> None:
        await transfer.anchor_ready
        seen.append(free - cp().cuda.runtime.memGetInfo()[0])

    asyncio.run(pass_on(cache, target, writer(cache, lambda a: place[id(a)]), watch=watch, buffers=buffers))
    assert seen[0] <= 2 * (32 << 20) + (64 << 20)  # two endpoints; modules and tables
