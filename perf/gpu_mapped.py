"""Kernels on pinned host memory itself, beside staging memory and copies: `python -m perf.gpu_mapped --json FILE`.

Four ways for the streams of a batch of pages (8 heads of 128, bfloat16) between device and host, each timed by CUDA
events from its first launch to its last byte, in turn, medians:

    encode, staged    kernels write device memory, one copy takes it to pinned memory
    encode, mapped    kernels write pinned memory
    decode, staged    one launch gathers the streams from the buffers of their pages, kernels read device memory
    decode, mapped    kernels read pinned memory (all streams in one piece, which real buffers are not)
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec import PageShape, get_codec
from lynx_gpu import DeviceCodec, PageJob, device_count, device_view
from lynx_gpu.events import SPAN, Runtime
from lynx_gpu.modules import cupy
from lynx_net.demo.results import machine_facts

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS, SIZE = 8, 128
CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16", {}),
    "int4": ("int4", {}),
    "lynx": ("lynx", {}),
    "default, keys": ("nested", {"bits": [4, 4], "chunk": 128}),
}


class Case:
    """A batch of one codec with its memory."""

    def __init__(self, name: str, pages: int, page_tokens: int) -> None:
        cp = cupy()
        kind, params = CODECS[name]
        self.codec = DeviceCodec(get_codec(kind, **params), 0)
        shape = PageShape(page_tokens, HEADS, SIZE)
        self.plan = self.codec.plan([PageJob(page * page_tokens, shape) for page in range(pages)])
        values = cp.random.default_rng(5).standard_normal((pages * page_tokens, HEADS, SIZE), dtype=cp.float32)
        self.view = device_view((values.view(cp.uint32) >> 16).astype(cp.uint16))
        self.runtime = Runtime(0)
        self.stream = self.runtime.stream()
        total = self.plan.total_bytes
        self.device, self.host = self.runtime.memory(total), self.runtime.pinned(total)
        self.staged_encode()
        self.stream.synchronize()
        memory = memoryview((ctypes.c_ubyte * total).from_address(self.host.address)).cast("B")
        self.lengths = self.plan.lengths(memory)
        self.stream_bytes = sum(map(sum, self.lengths))
        self.table = self.runtime.pinned(SPAN.itemsize * sum(map(len, self.lengths)))
        spans = [
            (self.host.address + offset, self.device.address + offset, length)
            for of_page, lengths in zip(self.plan.spans, self.lengths, strict=True)
            for (offset, _), length in zip(of_page, lengths, strict=True)
        ]
        self.count, self.most = len(spans), max(length for *_, length in spans)
        rows = (ctypes.c_ubyte * self.table.size_bytes).from_address(self.table.address)
        np.frombuffer(memoryview(rows), np.uint64).reshape(-1, 3)[:] = spans

    def staged_encode(self) -> None:
        self.codec.encode(self.view, self.plan, None, self.device.address, self.stream)
        with self.runtime.here():
            self.runtime.to_pinned(self.host.address, self.device.address, self.plan.total_bytes, self.stream)

    def mapped_encode(self) -> None:
        self.codec.encode(self.view, self.plan, None, self.host.address, self.stream)

    def staged_decode(self) -> None:
        with self.runtime.here():
            self.runtime.gather(self.table.address, self.count, self.most, self.stream)
        self.codec.decode_checked(self.plan, len(self.lengths[0]), self.device.address, self.view, self.stream)

    def mapped_decode(self) -> None:
        self.codec.decode_checked(self.plan, len(self.lengths[0]), self.host.address, self.view, self.stream)

    def time_s(self, work: Callable[[], None]) -> float:
        """From the first launch to the last byte."""
        cp = cupy()
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record(self.stream)
        work()
        end.record(self.stream)
        end.synchronize()
        return float(cp.cuda.get_elapsed_time(begin, end)) / 1e3


def main() -> None:
    """Run and print or write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--page-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if device_count() == 0:
        raise SystemExit("there is no CUDA device here, or no CuPy")
    found: dict[str, dict[str, float]] = {}
    print(f"{options.pages} pages of {options.page_tokens} tokens; GB/s of streams")
    print(f"{'':14}" + "".join(f"{what:>16}" for what in ("encode, staged", "mapped", "decode, staged", "mapped")))
    for name in CODECS:
        case = Case(name, options.pages, options.page_tokens)
        ways = {way: getattr(case, way) for way in ("staged_encode", "mapped_encode", "staged_decode", "mapped_decode")}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for round_ in range(options.rounds + 2):
            for way, work in ways.items():
                took_s = case.time_s(work)
                if round_ > 1:
                    times[way].append(took_s)
        found[name] = {way: round(case.stream_bytes / median(took) / 1e9, 1) for way, took in times.items()}
        print(f"{name:14}" + "".join(f"{value:16.1f}" for value in found[name].values()))
    if options.json:
        device = cupy().cuda.runtime.getDeviceProperties(0)["name"].decode()
        facts = {"machine": machine_facts(()), "device": device, "pages": options.pages}
        options.json.write_text(json.dumps(facts | {"gb_per_s": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
