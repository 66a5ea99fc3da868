"""The codecs that perf.quality compares, and what each of them makes of a cache."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec import Codec, PageShape, get_codec
from lynx_net.serdes.fine import fine_tokens
from perf.codec import Bench, make_pages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from lynx_net.wire.layout import CacheLayout, PageRef
    from perf.quality_capture import Capture

__all__ = ["BITS_TOKENS", "Coded", "Subject", "bits", "code", "speeds"]

BITS_TOKENS = 4096
"""Bits are counted for a cache of this length, whatever the length that errors are measured on."""

_SPEED_PAGE = PageShape(256, 8, 128)
_SPEED_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Subject:
    """A codec with its parameters and what of the cache it keeps finer."""

    codec: str
    params: Mapping[str, Any] = field(default_factory=dict)

    value_params: Mapping[str, Any] = field(default_factory=dict)
    """Added to `params` for the values."""

    raw_head: int = 0
    """First tokens of the cache, as 16-bit floats."""

    fine: int = 0
    """So many tokens of the cache are fine, or `fine_share` of it if that is more."""

    fine_share: float = 0.0

    fine_last: bool = False
    """The last ones are fine, instead of those of most attention."""

    prompts: int | None = None
    """Drafts are counted on so many prompts; None for all."""

    layer_params: tuple[Mapping[str, Any], ...] = ({},)
    """Added to `params` for equal parts of the layers, in order."""

    def codec_of(self, kind: str, layer: int, layers: int) -> Codec:
        """The codec for the keys or the values of one layer."""
        part = self.layer_params[layer * len(self.layer_params) // layers]
        return _codec(self.codec, json.dumps({**self.params, **(self.value_params if kind == "value" else {}), **part}))

    def fine_tokens(self, layout: CacheLayout, scores: NDArray[np.float32] | None) -> NDArray[np.int64]:
        """Which tokens of a cache are fine, in ascending order; without scores the last ones."""
        kept = dataclasses.replace(layout, raw_head=self.raw_head, raw_tail=0, fine=())
        return fine_tokens(kept, None if self.fine_last else scores, share=self.fine_share, least=self.fine)


@dataclass(frozen=True, slots=True)
class Coded:
    """A cache after its first stream, and after all that make Q_full; float32 [layers, tokens, heads, size]."""

    anchor: tuple[NDArray[np.float32], NDArray[np.float32]]
    """Keys and values."""

    full: tuple[NDArray[np.float32], NDArray[np.float32]]
    """The same arrays as `anchor` for a codec of one stream."""

    stream_bytes: tuple[int, ...]
    """Bytes that were written, per stream."""

    exact_ok: bool | None
    """Whether the exact stream gave the same bits back; None for codecs without one."""

    @property
    def single(self) -> bool:
        """Whether all of it comes with the first stream."""
        return self.full is self.anchor


def cut(subject: Subject, page: PageRef, fine: NDArray[np.int64]) -> tuple[PageShape, NDArray[np.int64]]:
    """The shape of a page, and its fine tokens as positions in the page."""
    inside = fine[(fine >= page.start) & (fine < page.stop)] - page.start
    raw_head = min(max(subject.raw_head - page.start, 0), page.stop - page.start)
    shape = dataclasses.replace(page.shape, raw_head=raw_head, raw_tail=0, fine=len(inside))
    return shape, inside


def code(subject: Subject, captured: Capture, layout: CacheLayout) -> Coded:
    """Encode every page of a cache and decode it twice."""
    sources = {"key": captured.keys, "value": captured.values}
    first = subject.codec_of("key", 0, layout.layers)
    lossy = _lossy(first)
    anchor = {kind: np.empty(source.shape, np.float32) for kind, source in sources.items()}
    full = {kind: np.empty(source.shape, np.float32) for kind, source in sources.items()} if lossy > 1 else anchor
    exact = len(first.stream_names) > lossy
    sizes = np.zeros(len(first.stream_names), np.int64)
    exact_ok = True
    chosen = subject.fine_tokens(layout, captured.scores)
    for page in layout.pages():
        codec = subject.codec_of(page.kind, page.layer, layout.layers)
        shape, fine = cut(subject, page, chosen)
        source = sources[page.kind][page.layer, page.start : page.stop]
        streams = _encode(codec, source, shape, fine)
        sizes += [stream.nbytes for stream in streams]
        codec.decode(streams[:1], shape, anchor[page.kind][page.layer, page.start : page.stop])
        if lossy > 1:
            codec.decode(streams[:lossy], shape, full[page.kind][page.layer, page.start : page.stop])
        if exact:
            back = np.empty_like(source)
            codec.decode(streams, shape, back)
            exact_ok = exact_ok and bool(np.array_equal(back, source))
    pair = (anchor["key"], anchor["value"])
    return Coded(
        pair,
        pair if lossy == 1 else (full["key"], full["value"]),
        tuple(int(size) for size in sizes),
        exact_ok if exact else None,
    )


def bits(
    subject: Subject, layout: CacheLayout, written: Sequence[tuple[int, ...]], captured: CacheLayout
) -> dict[str, float]:
    """Bits a value of a cache of `layout`, everything counted, after the first stream, after Q_full and in all.

    Streams whose size depends on the data are taken from `written`: bytes per stream of caches of layout `captured`.
    """
    first = subject.codec_of("key", 0, layout.layers)
    sizes = np.zeros(len(first.stream_names))
    fine = subject.fine_tokens(layout, None)  # sizes depend on the number alone
    for page in layout.pages():
        codec = subject.codec_of(page.kind, page.layer, layout.layers)
        sizes += codec.stream_bytes(cut(subject, page, fine)[0])
    lossy = _lossy(first)
    per_value = 8 * sizes / layout.values
    for stream in getattr(first, "variable_streams", ()):
        per_value[stream] = 8 * np.mean([one[stream] for one in written]) / captured.values
    return {
        "bits_anchor": float(per_value[0]),
        "bits_full": float(per_value[:lossy].sum()),
        "bits_all": float(per_value.sum()),
    }


def speeds(subject: Subject) -> dict[str, float]:
    """GB of float32 values that are encoded, and decoded to Q_full, in a second of one core; no exact stream."""
    lossy = dataclasses.replace(subject, params={k: v for k, v in subject.params.items() if k != "exact"})
    codec = lossy.codec_of("key", 0, 1)
    codec.warm_up()
    bench = Bench(codec, make_pages(_SPEED_PAGE, "float32", 1), _SPEED_PAGE)
    calls = bench.calls()
    result = {}
    for name, call in (("encode_gbps", calls["encode_gbps"]), ("decode_gbps", calls["refine_gbps"])):
        times = []
        for _ in range(_SPEED_ROUNDS):
            begin = time.perf_counter()
            call(0)
            times.append(time.perf_counter() - begin)
        result[name] = 4 * _SPEED_PAGE.values / 1e9 / statistics.median(times)
    return result


@lru_cache(maxsize=64)
def _codec(name: str, params: str) -> Codec:
    """Making a codec may take longer than coding a page."""
    return get_codec(name, **json.loads(params))


def _lossy(codec: Codec) -> int:
    """Streams that make up Q_full."""
    return len(codec.stream_names) - (codec.stream_names[-1] == "exact")


def _encode(codec: Codec, source: NDArray[np.uint16], shape: PageShape, fine: NDArray[np.int64]) -> list[memoryview]:
    buffers = [memoryview(bytearray(size)) for size in codec.stream_bytes(shape, wide=True)]
    used = codec.encode(source, shape, buffers, fine)
    return [buffer[:size] for buffer, size in zip(buffers, used, strict=True)]
