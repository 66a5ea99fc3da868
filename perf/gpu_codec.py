"""Bytes that the CUDA kernels move a second, beside those of a device copy in the same run.

    python -m perf.gpu_codec [--json FILE] [--pages 2048] [--rounds 60] [--dtype bfloat16]

A batch of pages of 256 tokens, 8 heads of 128, is encoded and decoded on one device; of the default codec a batch of
keys and one of values, together and each alone. Moved bytes are those that must be read and written once: the page and
its streams. Every round runs everything once, in turn; figures are medians of CUDA event times of what a call puts into
a stream; the share of the copy is the median over rounds of the ratio in one round.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec import PageShape, get_codec
from lynx_gpu import BackendMissingError, DeviceCodec, PageJob, device_count, device_view
from lynx_gpu.modules import cupy
from lynx_net.demo.results import machine_facts

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = ("nested", {"bits": [4, 4], "chunk": 128})
VALUES = ("nested", {"bits": [3, 5], "chunk": 128})
CODECS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "bf16": (("bf16", {}),),
    "int8": (("int8", {}),),
    "int4": (("int4", {}),),
    "lynx": (("lynx", {}),),
    "default": (KEYS, VALUES),
    "default, keys": (KEYS,),
    "default, values": (VALUES,),
    "exact": (("nested", {"bits": [4, 4], "chunk": 64, "exact": True}),),
}
"""Name and parameters; of the default those of keys and of values, one batch behind the other."""
HEADS, HEAD_SIZE, PAGE_TOKENS, FINE = 8, 128, 256, 6


class Case:
    """One codec with everything that its measurements need on the device."""

    def __init__(self, name: str, params: dict[str, Any], pages: int, dtype: str, stream: Any) -> None:
        cp = cupy()
        self.codec = DeviceCodec(get_codec(name, **params), 0)
        fine = FINE if len(self.codec.codec.row_bits) > 1 else 0
        shape = PageShape(PAGE_TOKENS, HEADS, HEAD_SIZE, 0, 0, fine)
        self.plan = self.codec.plan([PageJob(i * PAGE_TOKENS, shape, i * FINE) for i in range(pages)])
        rng = np.random.default_rng(5)
        values = cp.random.default_rng(5).standard_normal((pages * PAGE_TOKENS, HEADS, HEAD_SIZE), dtype=cp.float32)
        values *= cp.exp(cp.asarray(rng.normal(0, 1, (1, HEADS, HEAD_SIZE)), dtype=cp.float32))
        self.page = (values.view(cp.uint32) >> 16).astype(cp.uint16) if dtype == "bfloat16" else values.astype(dtype)
        self.out = cp.zeros_like(self.page)
        positions = [np.sort(rng.choice(PAGE_TOKENS, FINE, replace=False)) for _ in range(pages)]
        self.fine = cp.asarray(np.concatenate(positions).astype(np.int32))
        self.piece = cp.zeros(self.plan.total_bytes, cp.uint8)
        self.stream = stream
        cp.cuda.get_current_stream().synchronize()
        self.encode()
        self.stream.synchronize()
        host = memoryview(self.piece.get())
        self.lengths = self.plan.lengths(host)
        self.page_bytes = int(self.page.nbytes)
        self.stream_bytes = [sum(of_page[s] for of_page in self.lengths) for s in range(len(self.lengths[0]))]

    def encode(self) -> None:
        self.codec.encode(device_view(self.page), self.plan, self.fine, self.piece.data.ptr, self.stream)

    def decode(self, known: int) -> None:
        exact_bytes = [of_page[-1] for of_page in self.lengths]
        self.codec.decode_checked(
            self.plan, known, self.piece.data.ptr, device_view(self.out), self.stream, exact_bytes=exact_bytes
        )

    def measurements(self) -> dict[str, tuple[Callable[[], None], int]]:
        """What to time, and the bytes that each must move."""
        found: dict[str, tuple[Callable[[], None], int]] = {
            "encode": (self.encode, self.page_bytes + sum(self.stream_bytes)),
            "decode anchor": (lambda: self.decode(1), self.stream_bytes[0] + self.page_bytes),
        }
        if len(self.stream_bytes) > 1:
            known = len(self.stream_bytes)
            coded = known - len(self.codec.codec.variable_streams)
            found["refine"] = (lambda: self.decode(coded), sum(self.stream_bytes[:coded]) + self.page_bytes)
            if coded < known:
                found["decode exact"] = (lambda: self.decode(known), sum(self.stream_bytes) + self.page_bytes)
        return found


def together(cases: list[Case]) -> dict[str, tuple[Callable[[], None], int]]:
    """What to time of all these, one behind the other, and the bytes that they must move."""
    works = [case.measurements() for case in cases]

    def all_of(work: str) -> Callable[[], None]:
        def call() -> None:
            for of_case in works:
                of_case[work][0]()

        return call

    return {work: (all_of(work), sum(of_case[work][1] for of_case in works)) for work in works[0]}


_WAIT = r"""
extern "C" __global__ void wait_for(const volatile int *gate, int opened) {
    while (*gate < opened) {}
}
"""


class Gate:
    """Holds up a stream until the host has put into it what is to be timed: launches are not what is measured."""

    def __init__(self, stream: Any) -> None:
        cp = cupy()
        self.stream = stream
        self._memory = cp.cuda.alloc_pinned_memory(4)
        self._opened = np.frombuffer(self._memory, np.int32, 1)
        self._opened[0] = 0
        self._kernel = cp.RawKernel(_WAIT, "wait_for")

    def time_s(self, work: Callable[[], None]) -> float:
        """What the stream takes for what `work` puts into it."""
        cp = cupy()
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        number = int(self._opened[0]) + 1
        with self.stream:
            self._kernel((1,), (1,), (np.uint64(self._memory.ptr), np.int32(number)))
            begin.record(self.stream)
        try:
            work()
            end.record(self.stream)
        finally:
            self._opened[0] = number
        end.synchronize()
        return float(cp.cuda.get_elapsed_time(begin, end)) / 1e3


def measure(pages: int, rounds: int, dtype: str, names: list[str]) -> dict[str, Any]:
    """Results by codec and direction."""
    cp = cupy()
    source = cp.random.default_rng(1).integers(0, 255, 1 << 29, dtype=cp.uint8)
    target = cp.empty_like(source)
    stream = cp.cuda.Stream(non_blocking=True)
    gate = Gate(stream)
    copied = 2 * int(source.nbytes)

    def copy() -> None:
        cp.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, 3, stream.ptr)

    def measure_codec(name: str) -> dict[str, Any]:
        works = together([Case(*codec, pages, dtype, stream) for codec in CODECS[name]])
        for call, _ in works.values():  # to load a kernel, or to allocate, may wait for the device: not behind the gate
            call()
        stream.synchronize()
        speeds: dict[str, list[float]] = {work: [] for work in works}
        shares: dict[str, list[float]] = {work: [] for work in works}
        for number in range(rounds + 3):
            copy_bps = copied / gate.time_s(copy)
            for work, (call, moved) in works.items():
                speed = moved / gate.time_s(call)
                if number >= 3:
                    speeds[work].append(speed)
                    shares[work].append(speed / copy_bps)
            if number >= 3:
                copies.append(copy_bps)
        return {
            work: {
                "gb_per_s": round(median(speeds[work]) / 1e9, 1),
                "share_of_copy": round(median(shares[work]), 4),
                "moved_bytes": works[work][1],
            }
            for work in works
        }

    copies: list[float] = []
    results: dict[str, Any] = {}
    for name in names:
        results[name] = measure_codec(name)
        cp.get_default_memory_pool().free_all_blocks()
    return {"copy_gb_per_s": round(median(copies) / 1e9, 1), "codecs": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--pages", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--codec", choices=tuple(CODECS), action="append")
    options = parser.parse_args()
    try:
        cp = cupy()
    except BackendMissingError as error:
        raise SystemExit(str(error)) from error
    if device_count() == 0:
        raise SystemExit("there is no CUDA device here")
    device = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    found = measure(options.pages, options.rounds, options.dtype, options.codec or list(CODECS))
    print(f"{device}: a copy moves {found['copy_gb_per_s']} GB/s, read and written; {options.dtype} pages")
    columns = ("encode", "decode anchor", "refine", "decode exact")
    print(f"{'codec':18}" + "".join(f"{column:>16}" for column in columns) + "   GB/s and share of the copy")
    for name, works in found["codecs"].items():
        cells = [
            f"{works[work]['gb_per_s']:8.0f} {works[work]['share_of_copy']:6.1%}" if work in works else "-"
            for work in columns
        ]
        print(f"{name:18}" + "".join(f"{cell:>16}" for cell in cells))
    if options.json:
        facts = {"machine": machine_facts(), "device": device, "pages": options.pages, "dtype": options.dtype}
        options.json.write_text(json.dumps({**facts, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
