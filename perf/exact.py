"""Bits and speed of the exact stream against zipnn and zstd: `python -m perf.exact --json FILE`.

The cache is that of SmolLM2-135M in bfloat16 after a prefill of this repository's documents, or is read from a file
(`--cache FILE.npz`: arrays "keys" and "values", uint16 [layers, tokens, heads, head size], bits of bfloat16). Every
page is decoded from all its streams and compared bit for bit. zipnn and zstd, where they are installed, get the same
tensors, one per layer and kind; zstd also with the upper and the lower bytes of the values apart, which is better.

Speeds are MB of 16-bit values per second on one core, of the exact stream alone, of all streams, and of the others:
processor time of the thread, medians over rounds in which the variants alternate.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec import PageShape, get_codec
from lynx_codec.layout import HEADER_BYTES
from lynx_net.demo.results import machine_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

DOCUMENTS = ("README.md", "docs/wire-format.md", "docs/codec.md", "docs/faults.md")
KINDS = ("keys", "values")


def smollm2_cache(tokens: int) -> dict[str, NDArray[np.uint16]]:
    """Keys and values [layers, tokens, heads, head size] of a prefill in bfloat16."""
    from lynx_net.integrations.smollm2 import load
    from lynx_net.integrations.transformers import prefill

    loaded = load(dtype="bfloat16")
    root = Path(__file__).resolve().parent.parent
    text = "\n\n".join((root / name).read_text("utf-8") for name in DOCUMENTS)
    ids = loaded.tokenizer(text)["input_ids"][:tokens]
    if len(ids) < tokens:
        raise SystemExit(f"the documents have {len(ids)} tokens only")
    made = prefill(loaded.model, ids)
    return {"keys": np.stack(made.keys), "values": np.stack(made.values)}


def pages_of(tensor: NDArray[np.uint16], tokens: int, raw_head: int) -> Iterator[tuple[NDArray[np.uint16], PageShape]]:
    """The pages of one layer; the first tokens of the cache are raw."""
    for start in range(0, len(tensor), tokens):
        page = np.ascontiguousarray(tensor[start : start + tokens])
        count, heads, size = page.shape
        yield page, PageShape(count, heads, size, raw_head=min(raw_head, count) if start == 0 else 0)


class Nested:
    """`nested` with the exact stream, page by page: bytes of every stream, and the check of every bit."""

    def __init__(self, chunk: int, page_tokens: int, raw_head: int) -> None:
        self.codec = get_codec("nested", chunk=chunk, exact=True)
        self.codec.warm_up()
        self._page_tokens, self._raw_head = page_tokens, raw_head
        self.stream_bytes = [0] * len(self.codec.stream_names)
        self.modes = [0, 0, 0]
        self.unequal_pages = 0

    def add(self, tensor: NDArray[np.uint16]) -> None:
        """One layer of keys or values."""
        for page, shape in pages_of(tensor, self._page_tokens, self._raw_head):
            streams = encode(self.codec, page, shape)
            for i, stream in enumerate(streams):
                self.stream_bytes[i] += len(stream)
            if len(streams[-1]):
                self.modes[streams[-1][0]] += 1
            back = np.empty_like(page)
            self.codec.decode(streams, shape, back)
            self.unequal_pages += not np.array_equal(back, page)


def encode(codec: Any, page: NDArray[Any], shape: PageShape) -> list[memoryview]:
    """Streams of one page, of the sizes that they have."""
    outs = [memoryview(bytearray(size)) for size in codec.stream_bytes(shape, wide=True)]
    return [out[:size] for out, size in zip(outs, codec.encode(page, shape, outs), strict=True)]


def rivals() -> dict[str, tuple[Callable[[bytes], Any], Callable[[Any], Any]]]:
    """Compress and decompress of the compressors that are installed."""
    found: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], Any]]] = {}
    if importlib.util.find_spec("zstandard"):
        zstandard = importlib.import_module("zstandard")
        press, release = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()

        def split(data: bytes) -> list[bytes]:
            halves = np.frombuffer(data, np.uint8).reshape(-1, 2)
            return [press.compress(halves[:, i].tobytes()) for i in (0, 1)]

        def join(parts: list[bytes]) -> bytes:
            halves = [np.frombuffer(release.decompress(part), np.uint8) for part in parts]
            return np.stack(halves, axis=1).tobytes()

        found["zstd"] = (press.compress, release.decompress)
        found["zstd_split"] = (split, join)
    if importlib.util.find_spec("zipnn"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zipnn = importlib.import_module("zipnn")

        made = zipnn.ZipNN(bytearray_dtype="bfloat16", threads=1)
        found["zipnn"] = (lambda data: made.compress(bytearray(data)), made.decompress)  # it writes into its input
    return found


def size_of(packed: Any) -> int:
    """Bytes of what a compressor returned."""
    return sum(len(part) for part in packed) if isinstance(packed, list) else len(packed)


def measure_bits(
    cache: dict[str, NDArray[np.uint16]], options: argparse.Namespace, page_tokens: int
) -> dict[str, dict[str, Any]]:
    """Bits a value of every stream and of the others, for keys, values and both."""
    result: dict[str, dict[str, Any]] = {}
    totals: dict[str, float] = {}
    others = rivals()
    for kind in KINDS:
        nested = Nested(options.chunk, page_tokens, options.raw_head)
        compressed = dict.fromkeys(others, 0)
        for tensor in cache[kind]:
            nested.add(tensor)
            data = np.ascontiguousarray(tensor).tobytes()
            for name, (press, release) in others.items():
                packed = press(data)
                compressed[name] += size_of(packed)
                if bytes(release(packed)) != data:
                    raise RuntimeError(f"{name} does not give back what it was given")
        bits = 8 / cache[kind].size
        row: dict[str, Any] = {
            name: size * bits for name, size in zip(nested.codec.stream_names, nested.stream_bytes, strict=True)
        }
        row |= {"all": sum(nested.stream_bytes) * bits} | {name: size * bits for name, size in compressed.items()}
        for name, value in row.items():
            totals[name] = totals.get(name, 0.0) + value / len(KINDS)
        result[kind] = row | {"modes": nested.modes, "exact_ok": nested.unequal_pages == 0}
    ok = all(result[kind]["exact_ok"] for kind in KINDS)
    ratios = {f"all_to_{name}": totals["all"] / totals[name] for name in others}
    result["both"] = totals | ratios | {"exact_ok": ok}
    return result


def measure_speed(cache: dict[str, NDArray[np.uint16]], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """MB of 16-bit values a second, of keys and values of the middle layer."""
    codec: Any = get_codec("nested", chunk=options.chunk, exact=True)
    codec.warm_up()
    engine = codec._engine  # the exact stream alone has no public way in
    layer = len(cache["keys"]) // 2
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    for kind in KINDS:
        page, shape = next(pages_of(cache[kind][layer], options.page_tokens, 0))
        streams = encode(codec, page, shape)
        outs = [memoryview(bytearray(size)) for size in codec.stream_bytes(shape, wide=True)]
        back = np.empty_like(page)
        bits = page.reshape(shape.tokens, -1)
        codes, _ = engine.encode_codes(page, shape, options.chunk, np.frombuffer(outs[0], np.uint8), HEADER_BYTES)
        known = (codes, *codec._fields(np.frombuffer(streams[0], np.uint8), shape, bool(streams[0][7] & 1)))
        exact, room = np.frombuffer(streams[-1], np.uint8), np.frombuffer(outs[-1], np.uint8)
        calls[kind] = {
            "exact_encode": partial(engine.encode_exact, bits, *known, room, float16=False),
            "exact_decode": partial(engine.decode_exact, exact, *known, back.reshape(bits.shape), float16=False),
            "all_encode": partial(codec.encode, page, shape, outs),
            "all_decode": partial(codec.decode, streams, shape, back),
        }
        for name, (press, release) in rivals().items():
            data = page.tobytes()
            calls[kind][f"{name}_encode"] = partial(press, data)
            calls[kind][f"{name}_decode"] = partial(release, press(data))
        for call in calls[kind].values():
            call()
    result: dict[str, dict[str, float]] = {}
    for kind, variants in calls.items():
        megabytes = 2 * options.page_tokens * cache[kind][layer][0].size / 1e6
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(options.rounds):
            for name, call in variants.items():
                begin = time.thread_time()
                call()
                times[name].append(time.thread_time() - begin)
        result[kind] = {f"{name}_mbps": megabytes / statistics.median(times[name]) for name in variants}
    return result


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Numbers of a result, a column a kind."""
    names = [n for n in next(reversed(rows.values())) if not isinstance(next(reversed(rows.values()))[n], bool | list)]
    lines = [f"{'':20}" + "".join(f"{kind:>10}" for kind in rows)]
    for name in names:
        lines.append(f"{name:20}" + "".join(f"{row[name]:10.3f}" if name in row else " " * 10 for row in rows.values()))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.exact", description="Measure the exact stream on one core.")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--cache", type=Path, help="an .npz file with a cache, instead of that of SmolLM2")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--page-tokens", type=int, default=256, help="tokens of a page whose speed is measured")
    parser.add_argument("--pages", type=int, nargs="+", default=[256, 1024], help="tokens of a page, for the bits")
    parser.add_argument("--raw-head", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(arguments)

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if options.cache:
        with np.load(options.cache) as stored:
            cache = {kind: stored[kind][:, : options.tokens] for kind in KINDS}
    else:
        cache = smollm2_cache(options.tokens)
    result: dict[str, Any] = {
        "machine": machine_facts(("numpy", "numba", *filter(importlib.util.find_spec, ("zipnn", "zstandard")))),
        "cache": {"from": str(options.cache or "SmolLM2-135M, bfloat16"), "shape": list(cache["keys"].shape)},
        "chunk": options.chunk,
        "raw_head": options.raw_head,
        "bits": {str(tokens): measure_bits(cache, options, tokens) for tokens in options.pages},
        "speed": measure_speed(cache, options),
    }
    print(f"{result['machine']['processor']}, one core; {result['cache']['from']}, chunks of {options.chunk} tokens")
    for tokens, rows in result["bits"].items():
        print(f"\nbits a value, pages of {tokens} tokens\n{table(rows)}")
    print(f"\nMB of 16-bit values a second\n{table(result['speed'])}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
