"""Speed of the codecs on one core, compiled and reference side by side: `python -m perf.codec --json FILE`.

Speeds are GB of float32 values per second, whatever the dtype of the page: medians over rounds in which compiled and
reference calls alternate, so that a busy machine slows both. By default one page stays in the cache, which shows the
codec rather than the memory behind it; `--pages 16` walks through a set that no second-level cache holds.

The comparison codecs (docs/codec.md) are numpy code in both implementations, so they have no ratio and take fewer
rounds. Bits are those of the pages measured: what was written, not an upper bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec import Codec, PageShape, codec_names, get_codec
from lynx_codec.baselines.common import BaselineCodec
from lynx_net.demo.results import machine_facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

SPEEDS = ("encode_gbps", "decode_anchor_gbps", "refine_gbps")
IMPLEMENTATIONS = ("compiled", "reference")
COMPARISON_ROUNDS = 8
"""Most rounds of a comparison codec, which is some ten times slower."""

SPLITS = ("nested:3+5", "nested:2+2+4", "nested:6+2")
"""Measured beside the default of every codec."""


def parse_codec(text: str) -> tuple[str, dict[str, Any]]:
    """Name and parameters of a codec; `nested:2+2+4` names the bits of its streams."""
    name, _, bits = text.partition(":")
    if name not in codec_names():
        raise SystemExit(f"unknown codec {name}; known are {', '.join(codec_names())}")
    return name, {"bits": [int(b) for b in bits.split("+")]} if bits else {}


class Bench:
    """One codec with its pages, buffers and streams, ready to be called."""

    def __init__(self, codec: Codec, pages: list[NDArray[Any]], shape: PageShape) -> None:
        self.codec, self.pages, self.shape = codec, pages, shape
        sizes = codec.stream_bytes(shape, wide=True)
        self.streams = []
        for page in pages:
            buffers = [memoryview(bytearray(size)) for size in sizes]
            used = codec.encode(page, shape, buffers)
            self.streams.append([b[:n] for b, n in zip(buffers, used, strict=True)])
        self.buffers = [memoryview(bytearray(size)) for size in sizes]
        self.outs = [np.empty_like(page) for page in pages]

    def calls(self) -> dict[str, Callable[[int], object]]:
        """What is timed: a function of the number of the page, for each speed."""
        codec, shape = self.codec, self.shape
        return {
            "encode_gbps": lambda i: codec.encode(self.pages[i], shape, self.buffers),
            "decode_anchor_gbps": lambda i: codec.decode(self.streams[i][:1], shape, self.outs[i]),
            "refine_gbps": lambda i: codec.decode(self.streams[i], shape, self.outs[i]),
        }

    def bits(self, streams: int | None = None) -> float:
        """Bits a value of the encoded pages, of all streams or the first so many."""
        used = sum(stream.nbytes for page in self.streams for stream in page[:streams])
        return 8 * used / (len(self.pages) * self.shape.values)


def make_pages(shape: PageShape, dtype: str, count: int) -> list[NDArray[Any]]:
    """Normal noise with an offset and a scale per channel."""
    rng = np.random.default_rng(1)
    pages: list[NDArray[Any]] = []
    for _ in range(count):
        page = rng.standard_normal(shape.array_shape, dtype=np.float32)
        page *= rng.uniform(0.2, 5, size=(1, shape.heads, shape.head_size)).astype(np.float32)
        page += rng.normal(0, 3, size=(1, shape.heads, shape.head_size)).astype(np.float32)
        if dtype == "float16":
            pages.append(page.astype(np.float16))
        elif dtype == "bfloat16":
            pages.append((page.view(np.uint32) >> 16).astype(np.uint16))
        else:
            pages.append(page)
    return pages


def measure(
    name: str, params: dict[str, Any], pages: list[NDArray[Any]], shape: PageShape, rounds: int
) -> dict[str, Any]:
    """The three speeds of one codec, in both implementations if they differ."""
    comparison = isinstance(get_codec(name, **params), BaselineCodec)
    implementations = IMPLEMENTATIONS[:1] if comparison else IMPLEMENTATIONS
    if comparison:
        rounds = min(rounds, COMPARISON_ROUNDS)
    benches = {i: Bench(get_codec(name, implementation=i, **params), pages, shape) for i in implementations}
    calls = {i: bench.calls() for i, bench in benches.items()}
    gigabytes = 4 * shape.values / 1e9
    times: dict[str, dict[str, list[float]]] = {i: {s: [] for s in SPEEDS} for i in implementations}
    turns = {i: itertools.cycle(range(len(pages))) for i in implementations}
    for _ in range(rounds):
        for speed in SPEEDS:
            for implementation in implementations:
                repeats = 8 if implementation == "compiled" and not comparison else 1
                call = calls[implementation][speed]
                for page in itertools.islice(turns[implementation], repeats):
                    begin = time.perf_counter()
                    call(page)
                    times[implementation][speed].append(time.perf_counter() - begin)
    speeds = {i: {s: gigabytes / statistics.median(times[i][s]) for s in SPEEDS} for i in implementations}
    bench = benches["compiled"]
    row = {**speeds["compiled"], "bits_anchor": bench.bits(1), "bits_full": bench.bits()}
    return row if comparison else {**row, "reference": speeds["reference"]}


def table(codecs: dict[str, dict[str, Any]]) -> str:
    """The result as text; each speed with its ratio to the reference, where there are two implementations."""
    lines = [f"{'codec':12} {'bits':>15}  " + "".join(f"{s.removesuffix('_gbps'):>22}" for s in SPEEDS)]
    for name, row in codecs.items():
        cells = "".join(f"{row[s]:12.3f} {_ratio(row, s):9} " for s in SPEEDS)
        lines.append(f"{name:12} {row['bits_anchor']:7.3f}/{row['bits_full']:7.3f}  {cells}".rstrip())
    return "\n".join(lines)


def _ratio(row: dict[str, Any], speed: str) -> str:
    return f"({row[speed] / row['reference'][speed]:5.1f}x)" if "reference" in row else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.codec", description="Measure the codecs on one core.")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    default = (*codec_names(), *SPLITS)
    parser.add_argument("--codecs", nargs="+", default=default, metavar="NAME", help="e.g. lynx nested:2+2+4")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--pages", type=int, default=1, help="pages to take in turn")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args(arguments)

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    shape = PageShape(options.tokens, options.heads, options.head_size)
    pages = make_pages(shape, options.dtype, options.pages)
    codecs = {}
    for text in options.codecs:
        name, params = parse_codec(text)
        get_codec(name, **params).warm_up()
        codecs[text] = measure(name, params, pages, shape, options.rounds)
    result = {
        "machine": machine_facts(("numpy", "numba")),
        "page": {
            "tokens": shape.tokens,
            "heads": shape.heads,
            "head_size": shape.head_size,
            "dtype": options.dtype,
            "pages": options.pages,
        },
        "codecs": codecs,
    }
    processor = result["machine"]["processor"]
    print(f"{processor}, one core, {options.dtype} pages of {shape.array_shape}; GB of float32 values/s")
    print(table(codecs))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
