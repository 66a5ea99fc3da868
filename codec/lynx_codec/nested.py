"""The nested codec: one 8-bit quantiser whose codes travel in pieces, upper bits first.

What is known of a code after some of the streams is a cell of the quantiser. It is read at its middle, or, after
the first stream alone, at a fitted point that the header carries. With `exact`, one more stream says which 16-bit float
of its cell a value was (exact.py).
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec.base import PageShape
from lynx_codec.codecs import PageCodec, checked_positions
from lynx_codec.errors import CodecError
from lynx_codec.exact import exact_bound
from lynx_codec.layout import (
    HEADER_BYTES,
    NESTED_ID,
    Sections,
    chunk_spans,
    read_positions,
    read_table,
    row_places,
    write_header,
)
from lynx_codec.reference import chunk_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from lynx_codec.engine import Engine
    from lynx_codec.layout import PageHeader

__all__ = ["NestedCodec", "cell_middles", "cell_points"]

CODE_BITS = 8
MIN_CHUNK, MAX_CHUNK = 16, 256
WIDTHS_BYTES = 8
"""Bytes of the header that name the widths of the streams."""

MAX_TABLE_BITS = 6
"""Widest first stream whose cells are read at fitted points; narrower cells gain nothing."""


def cell_middles(bits: int) -> NDArray[np.float32]:
    """Middle of each of the 2**bits cells, in steps of the 8-bit code: float32, exact."""
    cell = np.float32(1 << (CODE_BITS - bits))
    return np.arange(1 << bits, dtype=np.float32) * cell + (cell - np.float32(1.0)) / np.float32(2.0)


class NestedCodec(PageCodec):
    """Asymmetric 8-bit integers per channel and chunk, cut into streams of `bits` bits each, upper bits first.

    With `exact`, pages are float16 or bfloat16, and one more stream, "exact", makes all their bits known again.
    """

    name = "nested"
    codec_id = NESTED_ID

    def __init__(
        self,
        load_engine: Callable[[], Engine],
        *,
        bits: Sequence[int] = (4, 4),
        chunk: int = 32,
        exact: bool = False,
    ) -> None:
        super().__init__(load_engine)
        self._bits = tuple(int(b) for b in bits)
        if not self._bits or min(self._bits) < 1 or sum(self._bits) != CODE_BITS or list(self._bits) != list(bits):
            raise CodecError(f"nested: bits must be whole numbers from 1 that add up to {CODE_BITS}, not {bits!r}")
        if not MIN_CHUNK <= chunk <= MAX_CHUNK or int(chunk) != chunk:
            raise CodecError(f"nested: chunk must be {MIN_CHUNK} to {MAX_CHUNK} tokens, not {chunk!r}")
        if exact is not True and exact is not False:
            raise CodecError(f"nested: exact must be true or false, not {exact!r}")
        self.chunk_tokens = int(chunk)
        self.row_bits = self._bits
        self._exact = exact
        later = len(self._bits) - 1
        self.stream_names = ("anchor", *(["residual"] if later == 1 else [f"residual{i + 1}" for i in range(later)]))
        if exact:
            self.variable_streams = frozenset({len(self.stream_names)})
            self.stream_names = (*self.stream_names, "exact")
        self._shifts = [CODE_BITS - sum(self._bits[: i + 1]) for i in range(len(self._bits))]
        first = self._bits[0]
        table = cell_points(first, self.chunk_tokens).astype("<f2").tobytes() if first <= MAX_TABLE_BITS else b""
        self._tail = bytes(self._bits) + bytes(WIDTHS_BYTES - len(self._bits)) + table
        self.header_bytes = HEADER_BYTES + len(self._tail)

    def params(self) -> dict[str, Any]:
        return {"bits": list(self._bits), "chunk": self.chunk_tokens, "exact": self._exact}

    def warm_up(self) -> None:
        super().warm_up()
        if self._exact:
            page = np.ones((2, 1, 2), dtype=np.uint16)
            shape = PageShape(*page.shape)
            streams = [memoryview(bytearray(size)) for size in self.stream_bytes(shape, wide=True)]
            sizes = self.encode(page, shape, streams)
            self.decode([s[:n] for s, n in zip(streams, sizes, strict=True)], shape, page)

    def stream_bytes(self, shape: PageShape, *, wide: bool = False) -> tuple[int, ...]:
        sizes = super().stream_bytes(shape, wide=wide)
        return (*sizes, exact_bound(shape.coded_tokens * shape.channels)) if self._exact else sizes

    def encode(
        self,
        page: NDArray[Any],
        shape: PageShape,
        outs: Sequence[memoryview],
        fine: NDArray[np.integer[Any]] | None = None,
    ) -> tuple[int, ...]:
        self.check_page(page, shape)
        if self._exact and page.dtype == np.float32:
            raise CodecError("nested: an exact stream is for float16 and bfloat16 pages, not for float32")
        buffers = self._buffers(outs, shape)
        positions = checked_positions(fine, shape)
        anchor = buffers[0]
        self._encode_raw(page, shape, anchor)
        wide = False
        float16 = page.dtype == np.float16
        exact_bytes = 0
        if shape.coded_tokens:
            codes, wide = self._engine.encode_codes(page, shape, self.chunk_tokens, anchor, self.header_bytes)
            sections = self.sections(shape, wide)
            everyone, ordinary, chosen = _token_sets(positions, shape)
            data = anchor[sections.data : sections.fine]
            self._engine.pack(codes, everyone, shape, self._shifts[0], self._bits[0], data)
            if len(self._bits) > 1:
                anchor[sections.fine_positions : sections.data] = positions.astype("<u2").view(np.uint8)
            at = sections.fine
            for i, (row, shift, bits) in enumerate(self._later(sections), 1):
                end = at + shape.fine * row
                if len(ordinary):
                    self._engine.pack(codes, ordinary, shape, shift, bits, buffers[i][: len(ordinary) * row])
                if shape.fine:
                    self._engine.pack(codes, chosen, shape, shift, bits, anchor[at:end])
                at = end
            if self._exact:
                coded = page[shape.raw_head : shape.tokens - shape.raw_tail].reshape(codes.shape)
                patterns = np.ascontiguousarray(coded).view(np.uint16)
                fields = self._fields(anchor, shape, wide)
                exact_bytes = self._engine.encode_exact(patterns, codes, *fields, buffers[-1], float16=float16)
        write_header(anchor, self.header(shape), wide=wide, raw_float16=float16)
        sizes = self.stream_bytes(shape, wide=wide)
        return (*sizes[:-1], exact_bytes) if self._exact else sizes

    def check_tail(self, header: PageHeader) -> None:
        if header.tail[:WIDTHS_BYTES] != self._tail[:WIDTHS_BYTES]:
            found = [bits for bits in header.tail[:WIDTHS_BYTES] if bits]
            raise CodecError(f"page header: the streams have {found} bits, expected {list(self._bits)}")
        if table := header.tail[WIDTHS_BYTES:]:
            read_table(table, 0.0, 255.0)

    def decode(self, streams: Sequence[memoryview], shape: PageShape, out: NDArray[Any]) -> None:
        self._check_out(out, shape)
        header, arrays = self.parse(streams, shape)
        anchor = arrays[0]
        self.check_tail(header)
        self._decode_raw(anchor, header.raw_float16, shape, out)
        if not shape.coded_tokens:
            return
        sections = self.sections(shape, header.wide)
        single = len(self._bits) == 1
        positions = np.empty(0, np.int32) if single else read_positions(anchor, sections, shape)
        everyone, ordinary, chosen = _token_sets(positions, shape)
        codes = np.zeros((shape.coded_tokens, shape.channels), dtype=np.uint8)
        data = anchor[sections.data : sections.fine]
        self._engine.unpack(data, everyone, shape, self._shifts[0], self._bits[0], codes)
        at = sections.fine
        for i, (row, shift, bits) in enumerate(self._later(sections), 1):
            end = at + shape.fine * row
            if len(ordinary) and i < len(arrays):
                self._engine.unpack(arrays[i], ordinary, shape, shift, bits, codes)
            if shape.fine:
                self._engine.unpack(anchor[at:end], chosen, shape, shift, bits, codes)
            at = end
        if len(arrays) > len(self._bits):
            patterns = np.empty(codes.shape, dtype=np.uint16)
            fields = self._fields(anchor, shape, header.wide)
            self._engine.decode_exact(arrays[-1], codes, *fields, patterns, float16=header.raw_float16)
            raw = patterns.astype("<u2", copy=False).reshape(-1).view(np.uint8)
            first, stop = shape.raw_head, shape.tokens - shape.raw_tail
            self._engine.load_raw(raw, header.raw_float16, shape, first, stop, out)
            return
        points = self._points(len(arrays), header.tail[WIDTHS_BYTES:])
        places = row_places(positions, shape) if len(positions) else everyone
        where = (shape, self.chunk_tokens, self.header_bytes, header.wide)
        self._engine.decode_codes(anchor, codes, *where, points, places, out)

    def _fields(
        self, anchor: NDArray[np.uint8], shape: PageShape, wide: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
        """What the exact stream rests on: base and length [chunks, channels], and the first coded row of each chunk."""
        base, length = chunk_fields(anchor, self.sections(shape, wide), shape, wide)
        first = shape.raw_head
        starts = [start - first for start, _ in chunk_spans(shape, self.chunk_tokens)]
        return base, length, np.array([*starts, shape.coded_tokens], dtype=np.int64)

    def _later(self, sections: Sections) -> list[tuple[int, int, int]]:
        """Row bytes, shift and bits of each stream behind the first."""
        return list(zip(sections.rows[1:], self._shifts[1:], self._bits[1:], strict=True))

    def _points(self, streams: int, table: bytes) -> NDArray[np.float32]:
        """[2, 256]: where each code is read after so many streams, and with all of them."""
        known = sum(self._bits[:streams])
        return _code_positions(known, table if streams == 1 else b"")


@lru_cache(maxsize=64)
def cell_points(bits: int, chunk: int) -> NDArray[np.float16]:
    """Mean position of the codes inside each of the 2**bits cells, for values as they are in real caches.

    Two values of a chunk, the extremes, are at the ends; the others are assumed to have a density proportional to
    (1 - u^2)^(0.3 log2(chunk) - 0.7) over -1 < u < 1, fitted to the keys and values of SmolLM2 at 32 and 128 tokens
    (docs/codec.md). Decimal arithmetic, so that every platform writes the same table.
    """
    with localcontext() as context:
        context.prec = 28
        power = Decimal("0.3") * Decimal(chunk).ln() / Decimal(2).ln() - Decimal("0.7")
        inner = [((255 - code) * code / (Decimal(255) / 2) ** 2) ** power for code in map(Decimal, range(1, 255))]
        share = (1 - Decimal(2) / chunk) / sum(inner)
        end = Decimal(1) / chunk
        mass = [end, *(share * weight for weight in inner), end]
        size = 1 << (CODE_BITS - bits)
        cells = [range(first, first + size) for first in range(0, 256, size)]
        means = [sum(mass[code] * code for code in cell) / sum(mass[code] for code in cell) for cell in cells]
    return np.array([float(mean) for mean in means]).astype(np.float16)


@lru_cache(maxsize=64)
def _code_positions(known: int, table: bytes) -> NDArray[np.float32]:
    """[2, 256]: positions of codes whose first `known` bits are given, the others being 0, and of whole codes."""
    whole = cell_middles(CODE_BITS)
    middles = cell_middles(known)
    points = read_table(table, 0.0, 255.0) if table else middles
    # Middles, for the codes that there are, are also the sums that the kernels need not look up.
    first = whole + middles[0] if np.array_equal(points, middles) else np.repeat(points, 1 << (CODE_BITS - known))
    positions = np.stack([first, whole])
    positions.flags.writeable = False
    return positions


@lru_cache(maxsize=64)
def _first_tokens(count: int) -> NDArray[np.int32]:
    """0 to `count`, locked."""
    tokens = np.arange(count, dtype=np.int32)
    tokens.flags.writeable = False
    return tokens


def _token_sets(
    positions: NDArray[np.int32], shape: PageShape
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Coded tokens, counted from the first coded one: all, those that are not fine, those that are."""
    everyone = _first_tokens(shape.coded_tokens)
    if not len(positions):
        return everyone, everyone, positions
    chosen = positions - np.int32(shape.raw_head)
    return everyone, np.delete(everyone, chosen), chosen
