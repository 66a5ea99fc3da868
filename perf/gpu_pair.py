"""Caches from GPU memory to GPU memory through loopback TCP: `python -m perf.gpu_pair --json FILE`.

Two processes, each with a cache of the shape of an 8B model (32 layers, 8 KV heads of 128, bfloat16, random values).
The sender is paced as a network of that rate would be. Of every transfer:

    transfer   from the begin of `send` until everything is decoded in place
    TTFT       from the same moment until the anchors are, when the first token could be decoded
    network    bytes on the wire, headers included, over the rate: what no codec can change
    busy       network / transfer, of paced links
    exposed    1 - busy: what encoding, copying and decoding add to it

Unpaced transfers are measured beside the same bytes sent from host memory without a codec, in the same run, in turn:
from 64 MiB over and over, which large caches hold, and from more than any holds: what a device writes is in none.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import multiprocessing
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

import lynx_net
from lynx_gpu import device_count
from lynx_gpu.modules import cupy
from lynx_gpu.views import DeviceView
from lynx_net import CacheLayout, DeviceBuffers, DeviceCache, LinkConfig
from lynx_net.demo.results import machine_facts
from lynx_net.wire.frames import HEADER_BYTES
from perf import null_cuda
from perf.bytelevel import PACKAGES, endpoint, open_bytes, run

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from lynx_net.serdes.links import KVLink

LAYERS, HEADS, SIZE = 32, 8, 128
DEFAULT = "default"
CODECS = ("bf16", "int8", "int4", "lynx", DEFAULT)
BUFFERS = DeviceBuffers(prepare=(0,), receive_pinned_bytes=4 << 30)
SENDER_BUFFERS = DeviceBuffers(prepare=(0,), receive_pinned_bytes=0, send_pinned_bytes=4 << 30)
"""All residuals of a long cache wait behind its anchors, and all anchors for its residuals."""

SOURCE_BYTES, COLD_SOURCE_BYTES = 64 << 20, 2 << 30


def layout_of(tokens: int, page_tokens: int = 256) -> CacheLayout:
    """Of the 8B shape."""
    return CacheLayout(
        layers=LAYERS,
        tokens=tokens,
        heads=HEADS,
        key_size=SIZE,
        value_size=SIZE,
        dtype="bfloat16",
        page_tokens=page_tokens,
    )


def first_tokens(array: Any, tokens: int) -> Any:
    """The beginning of keys or values."""
    return dataclasses.replace(array, tokens=tokens) if isinstance(array, DeviceView) else array[:tokens]


# ---- the decode process


def receive(pipe: Connection, most_tokens: int, window_bytes: int, null: bool, warm_ups: int = 0) -> None:
    """Serve transfers into device memory, and bytes into nowhere, until the pipe says that it is over.

    After so many transfers everything is loaded: the collector need not look at it again (docs/operations.md).
    """
    if null:
        null_cuda.install()
    run(_receive(pipe, most_tokens, window_bytes, null, warm_ups))


async def _receive(pipe: Connection, most_tokens: int, window_bytes: int, null: bool, warm_ups: int) -> None:
    whole: Any = null_cuda.NullCache(layout_of(most_tokens)) if null else DeviceCache(layout_of(most_tokens))

    class Part:
        """The first tokens of it."""

        def __init__(self, tokens: int) -> None:
            self._tokens = tokens

        def view(self, layer: int, kind: Any) -> Any:
            return first_tokens(whole.view(layer, kind), self._tokens)

    config = LinkConfig.for_devices(memory_bytes=64 << 30, residual_window_bytes=window_bytes)
    bytes_side = endpoint(residual_window_bytes=window_bytes)
    bytes_server = await bytes_side.serve("tcp://127.0.0.1:0")
    async with lynx_net.serve(
        "tcp://127.0.0.1:0",
        allocate=lambda offer: Part(offer.layout.tokens),
        config=config,
        device_buffers=BUFFERS,
    ) as server:
        pipe.send((server.url, bytes_server.url))
        for source, first in ((server, warm_ups), (bytes_server, 0)):
            asyncio.create_task(_report(pipe, source, first))  # noqa: RUF006  # lives as long as the loop
        await asyncio.to_thread(pipe.recv)
        own: Any = server._endpoint
        pipe.send({} if null else _device_bytes(own._devices, LAYERS * 2 * most_tokens * HEADS * SIZE * 2))
    await bytes_server.close()


def _bfloat16(cp: Any, values: Any) -> Any:
    """The upper halves of float32 numbers."""
    return (values.view(cp.uint32) >> 16).astype(cp.uint16)


async def _report(pipe: Connection, server: Any, warm_ups: int = 0) -> None:
    used_s = time.process_time()
    async for transfer in server:
        await transfer.complete
        warm_ups -= 1
        if not warm_ups:
            gc.freeze()
        before_s, used_s = used_s, time.process_time()
        line = transfer.timeline()
        pipe.send(
            {
                "anchor_s": line.streams_ready_s[0],
                "complete_s": transfer.complete.at_s,
                "first_segment_s": line.first_segment_s,
                "last_segment_s": line.last_segment_s,
                "cpu_s": used_s - before_s,
                "wire_bytes": transfer.stats.total_bytes + HEADER_BYTES * transfer.stats.segments,
            }
        )


def _device_bytes(devices: Any, cache_bytes: int) -> dict[str, int]:
    """Memory of the device that this process uses beside the cache, without CUDA's own."""
    pool = cupy().get_default_memory_pool().total_bytes()
    staging = sum(side.staging.allocated_bytes for side in devices._sides.values())
    return {"staging_bytes": staging, "beyond_the_cache_bytes": staging + pool - cache_bytes}


# ---- the prefill process


class Sender:
    """A cache on the device, and where to send it."""

    def __init__(self, pipe: Any, tokens: int, lanes: int, window_bytes: int, page_tokens: int, *, null: bool) -> None:
        self._pipe = pipe
        self._page_tokens = page_tokens
        self.lanes = lanes
        self.link: KVLink
        """Open while there are transfers."""
        self._window_bytes = window_bytes
        self.url, self.bytes_url = pipe.recv()
        self._hot = self._cold = memoryview(b"")
        self.beyond: dict[str, int] = {}
        self._null = null
        self.arrays: list[Any] = []
        if null:
            cache = null_cuda.NullCache(layout_of(tokens))
            self.arrays += [cache.view(layer, kind) for layer in range(LAYERS) for kind in ("key", "value")]
            return
        cp = cupy()
        rng = cp.random.default_rng(3)
        scale = cp.exp(cp.asarray(np.random.default_rng(3).normal(0, 1, (1, HEADS, SIZE)), dtype=cp.float32))
        for _ in range(2 * LAYERS):
            self.arrays.append(_bfloat16(cp, rng.standard_normal((tokens, HEADS, SIZE), dtype=cp.float32) * scale))
        cp.get_default_memory_pool().free_all_blocks()
        self.cache_bytes = sum(int(array.nbytes) for array in self.arrays)

    async def send(self, codec: str, tokens: int, rate: str | None) -> dict[str, Any]:
        """One transfer over the link, which lives as long as this does, as that of two servers would."""
        options: dict[str, Any] = {} if codec == DEFAULT else {"codec": codec}
        if codec != DEFAULT:
            options["fine"] = ()  # the paper's codecs have none; with them the anchors of lynx have 14 % more bytes
        self.link.set_rate(rate)
        began_s, used_s = time.monotonic(), time.process_time()
        written_s = await self._write(self.link, layout_of(tokens, self._page_tokens), options)
        told: dict[str, Any] = await asyncio.to_thread(self._pipe.recv)
        used_s = time.process_time() - used_s
        if not self._null:
            self.beyond = _device_bytes(self.link._devices, self.cache_bytes)
        told = {
            "codec": codec,
            "tokens": tokens,
            "rate": rate,
            "transfer_s": told["complete_s"] - began_s,
            "ttft_s": told["anchor_s"] - began_s,
            "first_byte_s": told["first_segment_s"] - began_s,
            "last_byte_s": told["last_segment_s"] - began_s,
            "written_s": written_s - began_s,
            "wire_bytes": told["wire_bytes"],
            "cpu_s": {"prefill": used_s, "decode": told["cpu_s"]},
        }
        if rate:
            network_s = told["wire_bytes"] * 8 / (float(rate.removesuffix("Gbit")) * 1e9)
            told |= {"network_s": network_s, "busy": network_s / told["transfer_s"]}
        else:
            told["gbps"] = told["wire_bytes"] * 8 / told["transfer_s"] / 1e9
        return told

    async def _write(self, link: KVLink, layout: CacheLayout, options: dict[str, Any]) -> float:
        async with link.send("pair", layout, **options) as sending:
            for layer in range(LAYERS):
                keys, values = self.arrays[2 * layer : 2 * layer + 2]
                await sending.write(layer, first_tokens(keys, layout.tokens), first_tokens(values, layout.tokens))
            written_s = time.monotonic()
        return written_s

    def make_bytes(self, most_bytes: int) -> None:
        """For `send_bytes`, before there are links: it takes seconds, in which they would go silent."""
        self._hot, self._cold = (
            memoryview(bytes(range(256)) * (min(size, most_bytes) // 256)) for size in (SOURCE_BYTES, COLD_SOURCE_BYTES)
        )

    async def send_bytes(self, total: int, *, cold: bool = False) -> float:
        """The same from host memory, without a codec; Gbit/s."""
        side = endpoint(residual_window_bytes=self._window_bytes)
        link = await side.connect(self.bytes_url, lanes=self.lanes)
        source = self._cold if cold else self._hot
        page_bytes = 512 * 1024
        pages = total // page_bytes
        began_s = time.monotonic()
        transfer = open_bytes(link, pages, (page_bytes,))
        for page in range(pages):
            await transfer.wait_for_room()
            at = page * page_bytes % source.nbytes
            transfer.submit(page, 0, source[at : at + page_bytes])
        await transfer.delivered
        told = await asyncio.to_thread(self._pipe.recv)
        await side.close()
        return float(told["wire_bytes"] * 8 / (told["complete_s"] - began_s) / 1e9)


def copies_gb_per_s(size_bytes: int = 1 << 28) -> dict[str, float]:
    """A copy on the device (bytes read and written), and pinned copies from it and to it."""
    cp = cupy()
    source, target = cp.zeros(size_bytes, cp.uint8), cp.zeros(size_bytes, cp.uint8)
    pinned = cp.cuda.PinnedMemory(size_bytes)
    stream = cp.cuda.Stream(non_blocking=True)
    found = {}
    for name, to, from_, kind, factor in (
        ("device_copy", target.data.ptr, source.data.ptr, 3, 2),
        ("device_to_host", pinned.ptr, source.data.ptr, 2, 1),
        ("host_to_device", target.data.ptr, pinned.ptr, 1, 1),
    ):
        times = []
        for _ in range(7):
            begin, end = cp.cuda.Event(), cp.cuda.Event()
            begin.record(stream)
            cp.cuda.runtime.memcpyAsync(to, from_, size_bytes, kind, stream.ptr)
            end.record(stream)
            end.synchronize()
            times.append(cp.cuda.get_elapsed_time(begin, end) / 1e3)
        found[name] = round(factor * size_bytes / median(times) / 1e9, 1)
    return found


async def measure(sender: Sender, options: argparse.Namespace) -> dict[str, Any]:
    """All transfers; the first of each codec is not counted."""
    config = LinkConfig.for_devices(residual_window_bytes=options.window_bytes)
    on_host = options.host_checksums or options.null
    buffers = dataclasses.replace(SENDER_BUFFERS, checksums=not on_host)
    if options.unpaced:
        sender.make_bytes(layout_of(max(options.tokens)).values * 2)
    async with lynx_net.connect(sender.url, lanes=sender.lanes, config=config, device_buffers=buffers) as link:
        sender.link = link
        return await _measure(sender, options)


async def _measure(sender: Sender, options: argparse.Namespace) -> dict[str, Any]:
    paced: list[dict[str, Any]] = []
    for codec in options.codecs:
        for tokens in options.tokens:
            await sender.send(codec, tokens, None)
    gc.freeze()
    for tokens in options.tokens:
        for round_ in range(options.rounds):
            for rate in options.rates:
                for codec in options.codecs:
                    paced.append(await sender.send(codec, tokens, rate) | {"round": round_})
    unpaced: dict[str, list[float]] = {codec: [] for codec in options.codecs}
    host: list[float] = []
    cold: list[float] = []
    tokens = max(options.tokens)
    for _ in range(options.unpaced):
        host.append(await sender.send_bytes(layout_of(tokens).values * 2))
        cold.append(await sender.send_bytes(layout_of(tokens).values * 2, cold=True))
        for codec in options.codecs:
            unpaced[codec].append((await sender.send(codec, tokens, None))["gbps"])
    return {"paced": paced, "unpaced_gbps": unpaced, "host_bytes_gbps": host, "cold_host_bytes_gbps": cold}


def table(found: dict[str, Any]) -> list[str]:
    """The figures for people."""
    lines = [
        f"{'tokens':>7}{'rate':>8}  {'codec':8}{'transfer':>10}{'TTFT':>8}{'network':>9}"
        f"{'busy':>8}{'first':>8}{'tail':>7}{'CPU of both':>13}"
    ]
    cases: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for one in found["paced"]:
        cases.setdefault((one["tokens"], one["rate"], one["codec"]), []).append(one)
    ttft: dict[tuple[int, str, str], float] = {}
    for (tokens, rate, codec), ones in cases.items():

        def of(name: str, ones: list[dict[str, Any]] = ones) -> float:
            return float(median(one[name] for one in ones))

        ttft[tokens, rate, codec] = of("ttft_s")
        tail = median(one["transfer_s"] - one["last_byte_s"] for one in ones)
        lines.append(
            f"{tokens:7}{rate:>8}  {codec:8}{of('transfer_s'):9.3f}s{of('ttft_s'):7.3f}s{of('network_s'):8.3f}s"
            f"{of('busy'):8.1%}{of('first_byte_s') * 1e3:6.1f}ms{tail * 1e3:5.1f}ms"
            + "".join(f"{median(one['cpu_s'][side] for one in ones):6.2f}s" for side in ("prefill", "decode"))
        )
    for (tokens, rate, codec), value in ttft.items():
        if codec in ("lynx", DEFAULT) and (tokens, rate, "int4") in ttft:
            lines.append(
                f"{tokens} tokens, {rate}: TTFT({codec}) / TTFT(int4) = {value / ttft[tokens, rate, 'int4']:.3f}"
            )
    if found["host_bytes_gbps"]:
        host, cold = median(found["host_bytes_gbps"]), median(found["cold_host_bytes_gbps"])
        lines.append(f"unpaced: {host:.1f} Gbit/s from host memory without a codec, {cold:.1f} from memory in no cache")
        for codec, speeds in found["unpaced_gbps"].items():
            speed = median(speeds)
            shares = f"{speed / host:.2f} of the one, {speed / cold:.2f} of the other"
            lines.append(f"  {codec:8}{speed:7.1f} Gbit/s, {shares}")
    if "copies_gb_per_s" in found:
        lines.append(f"copies: {found['copies_gb_per_s']} GB/s")
        lines.append(f"device memory beside the cache: {found['device_memory']}")
    return lines


def main() -> None:
    """Run and print or write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--rates", nargs="*", default=["10Gbit", "25Gbit", "50Gbit"])
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--rounds", type=int, default=3, help="of paced transfers")
    parser.add_argument("--unpaced", type=int, default=3, help="rounds of unpaced transfers")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--page-tokens", type=int, default=2048)
    parser.add_argument("--host-checksums", action="store_true", help="made by the threads that send")
    parser.add_argument("--null", action="store_true", help="without a device: what Python costs (perf/null_cuda.py)")
    parser.add_argument("--window-bytes", type=int, default=96 << 20, help="of residuals, at the receiver")
    options = parser.parse_args()
    if options.null:
        null_cuda.install()
    elif device_count() == 0:
        raise SystemExit("there is no CUDA device here, or no CuPy")
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    warm_ups = len(options.codecs) * len(options.tokens)
    arguments = (there, max(options.tokens), options.window_bytes, options.null, warm_ups)
    process = context.Process(target=receive, args=arguments, daemon=True)
    process.start()
    there.close()
    sender = Sender(
        *(here, max(options.tokens), options.lanes, options.window_bytes, options.page_tokens), null=options.null
    )
    found = run(measure(sender, options))
    here.send("over")
    found["device_memory"] = {"prefill": sender.beyond, "decode": here.recv()}
    process.join()
    device = "no device (--null)"
    if not options.null:
        found["copies_gb_per_s"] = copies_gb_per_s()
        device = cupy().cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(
        f"{device}, {LAYERS} layers, {HEADS} KV heads of {SIZE}, bfloat16, pages of {options.page_tokens} tokens, "
        f"{options.lanes} lanes over loopback"
    )
    print("\n".join(table(found)))
    if options.json:
        facts = {"machine": machine_facts(PACKAGES), "version": lynx_net.__version__, "device": device}
        options.json.write_text(
            json.dumps({**facts, "lanes": options.lanes, "page_tokens": options.page_tokens, **found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
