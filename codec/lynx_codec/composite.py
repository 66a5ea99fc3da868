"""Codecs made of other codecs: one for each range of heads or of channels, and streams put beside those of others."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lynx_codec.base import Codec, PageShape
from lynx_codec.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["MAX_PARTS", "PlacedCodec", "SplitCodec", "join_streams"]

MAX_PARTS = 256
"""Parts of a page: as many as a model may have KV heads, and few enough to trust a peer with."""

EXACT = "exact"


def join_streams(codecs: Sequence[Codec]) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """Names of the streams of codecs that travel side by side, and the place of each codec's streams among them.

    The first lossy streams of all are one stream, so are the second ones, and so on; a stream called "exact" is last.
    It keeps its name if nothing stays lossy without one: `bf16` is exact by itself where exact streams exist.
    """
    lossy = [sum(name != EXACT for name in codec.stream_names) for codec in codecs]
    last = max(lossy)
    places = [
        (*range(own), last) if EXACT in codec.stream_names else tuple(range(own))
        for codec, own in zip(codecs, lossy, strict=True)
    ]
    has_exact = any(EXACT in codec.stream_names for codec in codecs)
    all_exact = has_exact and all(EXACT in codec.stream_names or codec.name == "bf16" for codec in codecs)
    later = last - 1 + (has_exact and not all_exact)
    residuals = ["residual"] if later == 1 else [f"residual{number + 1}" for number in range(later)]
    return ("anchor", *residuals, *([EXACT] if all_exact else [])), places


class SplitCodec(Codec):
    """Cuts a page into ranges of heads, or of the channels of every head, each with a codec of its own.

    Every stream begins with the length of each part, u32; the parts follow in order. A part whose codec has fewer
    streams is empty in the others.

    Args:
        axis: "heads" for `by_head`, "channels" for `by_channel`.
        counts: heads (channels of a head) of each part; together those of the page.
        codecs: of each part.
    """

    def __init__(self, axis: str, counts: Sequence[int], codecs: Sequence[Codec]) -> None:
        self.name = {"heads": "by_head", "channels": "by_channel"}[axis]
        if not 1 <= len(codecs) <= MAX_PARTS or len(counts) != len(codecs):
            raise CodecError(f"{self.name}: {len(counts)} counts and {len(codecs)} codecs; 1 to {MAX_PARTS} of each")
        if not all(type(count) is int and 1 <= count <= 0xFFFF for count in counts):
            raise CodecError(f"{self.name}: {axis} of each part must be 1 to 65535, not {list(counts)!r:.80}")
        self._axis = axis
        self._counts = tuple(counts)
        self._parts = tuple(codecs)
        self.stream_names, self._places = join_streams(codecs)
        grids = [codec.grid_tokens for codec in codecs]
        self._grid_tokens = math.lcm(*grids) if all(grids) else 0
        self.variable_streams = frozenset({0}).union(
            *([place[s] for s in codec.variable_streams] for codec, place in zip(codecs, self._places, strict=True))
        )
        self._lengths = struct.Struct(f"<{len(codecs)}I")

    def params(self) -> dict[str, Any]:
        return {
            self._axis: list(self._counts),
            "codecs": [codec.name for codec in self._parts],
            "params": [codec.params() for codec in self._parts],
        }

    @property
    def grid_tokens(self) -> int:
        return self._grid_tokens

    def warm_up(self) -> None:
        for codec in self._parts:
            codec.warm_up()

    def stream_bytes(self, shape: PageShape, *, wide: bool = False) -> tuple[int, ...]:
        totals = [self._lengths.size] * len(self.stream_names)
        for codec, places, part in zip(self._parts, self._places, self._shapes(shape), strict=True):
            for place, size in zip(places, codec.stream_bytes(part, wide=wide), strict=True):
                totals[place] += size
        return tuple(totals)

    def encode(
        self,
        page: NDArray[Any],
        shape: PageShape,
        outs: Sequence[memoryview],
        fine: NDArray[np.integer[Any]] | None = None,
    ) -> tuple[int, ...]:
        self.check_page(page, shape)
        sizes = self.stream_bytes(shape, wide=True)
        if len(outs) != len(sizes) or any(out.nbytes < size for out, size in zip(outs, sizes, strict=True)):
            raise CodecError(f"{self.name} needs buffers of {sizes} bytes, not {[out.nbytes for out in outs]}")
        ends = [self._lengths.size] * len(outs)
        lengths = [[0] * len(self._parts) for _ in outs]
        rest = zip(self._parts, self._places, self._shapes(shape), self._views(page), strict=True)
        for number, (codec, places, part, view) in enumerate(rest):
            room = codec.stream_bytes(part, wide=True)
            into = [outs[place][ends[place] : ends[place] + size] for place, size in zip(places, room, strict=True)]
            for place, size in zip(places, codec.encode(view, part, into, fine), strict=True):
                lengths[place][number] = size
                ends[place] += size
        for out, of_parts in zip(outs, lengths, strict=True):
            self._lengths.pack_into(out, 0, *of_parts)
        return tuple(ends)

    def decode(self, streams: Sequence[memoryview], shape: PageShape, out: NDArray[Any]) -> None:
        self.check_page(out, shape)
        parts = zip(self._parts, self._split(streams), self._shapes(shape), self._views(out), strict=True)
        for codec, part, part_shape, view in parts:
            codec.decode(part, part_shape, view)

    def fine_tokens(self, streams: Sequence[bytes], shape: PageShape) -> tuple[int, ...]:
        parts = zip(self._parts, self._split(streams), self._shapes(shape), strict=True)
        return next(filter(None, (codec.fine_tokens(_as_bytes(part), one) for codec, part, one in parts)), ())

    def cut_page(self, streams: Sequence[bytes], shape: PageShape, start: int, left: PageShape) -> tuple[bytes, ...]:
        lefts = iter(self._shapes(left))
        return self._rebuilt(
            streams, shape, lambda codec, part, part_shape: codec.cut_page(part, part_shape, start, next(lefts))
        )

    def take_heads(self, streams: Sequence[bytes], shape: PageShape, heads: Sequence[int]) -> tuple[bytes, ...]:
        if self._axis == "channels":
            return self._rebuilt(
                streams, shape, lambda codec, part, part_shape: codec.take_heads(part, part_shape, heads)
            )
        parts, shapes = self._split(streams), self._shapes(shape)
        target = self.for_heads(heads)
        taken = [
            self._parts[part].take_heads(_as_bytes(parts[part]), shapes[part], local)
            for part, local in self._runs(heads)
        ]
        # What is left may have fewer streams, and of those only the first ones that are whole.
        count = len(target.stream_names)
        for part, places in zip(taken, target._places, strict=True):
            count = min(count, *places[len(part) :], count)
        return target._framed(taken, count)

    def for_heads(self, heads: Sequence[int]) -> SplitCodec:
        if self._axis == "channels":
            return self
        taken = self._runs(heads)
        return SplitCodec("heads", [len(local) for _, local in taken], [self._parts[part] for part, _ in taken])

    def add_raw(
        self, streams: Sequence[bytes], shape: PageShape, added: Sequence[bytes], more: PageShape
    ) -> tuple[bytes, ...] | None:
        new = zip(self._split(added), self._shapes(more), strict=True)
        old = zip(self._parts, self._split(streams), self._shapes(shape), strict=True)
        grown = []
        for (codec, part, part_shape), (other, other_shape) in zip(old, new, strict=True):
            both = codec.add_raw(_as_bytes(part), part_shape, _as_bytes(other), other_shape)
            if both is None:
                return None
            grown.append(both)
        return self._framed(grown, len(streams))

    def _runs(self, heads: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Part and heads inside it for each run of chosen heads that share a part."""
        where = [(part, local) for part, count in enumerate(self._counts) for local in range(count)]
        runs: list[tuple[int, list[int]]] = []
        for part, local in (where[head] for head in heads):
            if runs and runs[-1][0] == part:
                runs[-1][1].append(local)
            else:
                runs.append((part, [local]))
        return runs

    def _shapes(self, shape: PageShape) -> list[PageShape]:
        """Shape of each part."""
        whole = shape.heads if self._axis == "heads" else shape.head_size
        if sum(self._counts) != whole:
            raise CodecError(f"{self.name}: parts of {sum(self._counts)} {self._axis} for a page of {whole}")
        if self._axis == "heads":
            return [replace(shape, heads=count) for count in self._counts]
        return [replace(shape, head_size=count) for count in self._counts]

    def _views(self, page: NDArray[Any]) -> list[NDArray[Any]]:
        """The part of the array that is each part's."""
        views, at = [], 0
        for count in self._counts:
            views.append(page[:, at : at + count] if self._axis == "heads" else page[:, :, at : at + count])
            at += count
        return views

    def _split(self, streams: Sequence[bytes | memoryview]) -> list[list[memoryview]]:
        """The streams of each part, as many as its codec has among those given."""
        if not 1 <= len(streams) <= len(self.stream_names):
            raise CodecError(f"{len(streams)} streams given, {self.name} has {len(self.stream_names)}")
        parts: list[list[memoryview]] = [[] for _ in self._parts]
        for number, stream in enumerate(streams):
            view = memoryview(stream)
            if not view.c_contiguous:
                raise CodecError(f"buffer for stream {self.stream_names[number]} is not contiguous")
            view = view.cast("B")
            if len(view) < self._lengths.size:
                raise CodecError(
                    f"{self.name}: stream {number} has {len(view)} bytes, the lengths of its parts take more"
                )
            lengths = self._lengths.unpack_from(view)
            at = self._lengths.size
            if at + sum(lengths) != len(view):
                raise CodecError(f"{self.name}: stream {number} has {len(view)} bytes, its parts {sum(lengths)}")
            for part, (length, places) in enumerate(zip(lengths, self._places, strict=True)):
                if number in places:
                    parts[part].append(view[at : at + length])
                elif length:
                    raise CodecError(f"{self.name}: part {part} has no stream {number}, but {length} bytes are there")
                at += length
        return parts

    def _rebuilt(
        self,
        streams: Sequence[bytes],
        shape: PageShape,
        operation: Callable[[Codec, Sequence[bytes], PageShape], tuple[bytes, ...]],
    ) -> tuple[bytes, ...]:
        """The page of which each part went through the operation."""
        parts = zip(self._parts, self._split(streams), self._shapes(shape), strict=True)
        return self._framed([operation(codec, _as_bytes(part), one) for codec, part, one in parts], len(streams))

    def _framed(self, parts: Sequence[tuple[bytes, ...]], streams: int) -> tuple[bytes, ...]:
        """The first streams of a page with these parts."""
        framed = []
        for number in range(streams):
            pieces = [
                part[places.index(number)] if number in places else b""
                for part, places in zip(parts, self._places, strict=True)
            ]
            framed.append(self._lengths.pack(*map(len, pieces)) + b"".join(pieces))
        return tuple(framed)


def _as_bytes(views: Iterable[memoryview]) -> list[bytes]:
    return [bytes(view) for view in views]


class PlacedCodec(Codec):
    """A codec in a transfer that has more streams than it: the others are empty.

    Args:
        inner: the codec; `name` and `params` are its own.
        stream_names: of the transfer.
        places: which of them are those of the codec, in its order.
    """

    def __init__(self, inner: Codec, stream_names: tuple[str, ...], places: tuple[int, ...]) -> None:
        self.name = inner.name
        self.stream_names = stream_names
        self.variable_streams = frozenset(places[stream] for stream in inner.variable_streams)
        self._inner = inner
        self._places = places

    def params(self) -> dict[str, Any]:
        return self._inner.params()

    def warm_up(self) -> None:
        self._inner.warm_up()

    def stream_bytes(self, shape: PageShape, *, wide: bool = False) -> tuple[int, ...]:
        return self._spread(self._inner.stream_bytes(shape, wide=wide))

    def encode(
        self,
        page: NDArray[Any],
        shape: PageShape,
        outs: Sequence[memoryview],
        fine: NDArray[np.integer[Any]] | None = None,
    ) -> tuple[int, ...]:
        if len(outs) != len(self.stream_names):
            raise CodecError(f"{self.name} writes {len(self.stream_names)} streams, {len(outs)} buffers were given")
        return self._spread(self._inner.encode(page, shape, [outs[place] for place in self._places], fine))

    def decode(self, streams: Sequence[memoryview], shape: PageShape, out: NDArray[Any]) -> None:
        if not 1 <= len(streams) <= len(self.stream_names):
            raise CodecError(f"{len(streams)} streams given, there are {len(self.stream_names)}")
        for number, stream in enumerate(streams):
            if number not in self._places and stream.nbytes:
                raise CodecError(f"codec {self.name} has no stream {self.stream_names[number]}, but bytes of it came")
        self._inner.decode([streams[place] for place in self._places if place < len(streams)], shape, out)

    def _spread(self, sizes: Sequence[int]) -> tuple[int, ...]:
        spread = [0] * len(self.stream_names)
        for place, size in zip(self._places, sizes, strict=True):
            spread[place] = size
        return tuple(spread)
