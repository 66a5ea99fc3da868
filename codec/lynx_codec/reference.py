"""The reference: Algorithm 1 of Lynx (section 4.1) in plain numpy, and the affine baselines on the same metadata.

Written to be read beside the paper; "line N" is a line of Algorithm 1. The compiled and the CUDA kernels
must produce the same bytes and the same floats, so the order of every float32 operation here is part of
the format: there is no fused multiply-add, and sums run in token order. Where the algorithm had to be
decided, docs/codec.md says what was decided and why.

Rows are float32 [tokens, channels], channels = heads * head_size; page and chunk fields are [channels]
and [chunks, channels].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec.base import CHUNK_TOKENS
from lynx_codec.errors import CodecError, NonFiniteError
from lynx_codec.exact import decode_exact, encode_exact
from lynx_codec.layout import Sections, chunk_spans, planes
from lynx_codec.limits import (
    ESCAPE_STEPS,
    ESCAPE_TOKENS,
    FLAT_SCALE,
    FLOAT16_MAX,
    MAX_LEVEL_NARROW,
    MAX_LEVEL_WIDE,
    MAX_MAGNITUDE,
    MAX_TOP,
    MEAN_CHUNK,
    MEAN_WEIGHT,
)
from lynx_codec.tables import UNIT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lynx_codec.base import PageShape
    from lynx_codec.tables import LynxTables

    F32 = NDArray[np.float32]
    U8 = NDArray[np.uint8]
    U16 = NDArray[np.uint16]
    I32 = NDArray[np.int32]

__all__ = ["ReferenceEngine"]

HALF = np.float32(0.5)
TOP_CODE = np.float32(255.0)


# --- 16-bit floats ---------------------------------------------------------------------------------------------------


def widen(values: NDArray[Any]) -> F32:
    """Exact float32 of float32, float16 or bfloat16 bits (uint16)."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def bfloat16_nearest(values: F32) -> U16:
    """Bits of the nearest bfloat16, ties to even, of finite values."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def bfloat16_below(values: F32) -> U16:
    """Bits of the largest bfloat16 that is not above each value; both zeros become +0."""
    bits = values.view(np.uint32)
    upper = bits >> np.uint32(16)
    away = ((bits & np.uint32(0xFFFF)) != 0) & (values < 0)
    upper = upper + away
    return np.where(upper == 0x8000, 0, upper).astype(np.uint16)


def bfloat16_above(values: F32) -> U16:
    """Bits of the smallest bfloat16 that is not below each value, of values >= 0."""
    return ((values.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)


def store(values: F32, out: NDArray[Any]) -> None:
    """Write float32 values as the dtype of `out`; float16 saturates."""
    if out.dtype == np.uint16:
        out[...] = bfloat16_nearest(values)
    elif out.dtype == np.float16:
        with np.errstate(under="ignore"):
            out[...] = np.clip(values, -FLOAT16_MAX, FLOAT16_MAX)
    else:
        out[...] = values


def check_finite(rows: F32, first: int, head_size: int) -> None:
    """Refuse NaN, infinity and magnitudes above 2**126; `first` is the page token of row 0."""
    bad = ~(np.abs(rows) <= MAX_MAGNITUDE)
    if bad.any():
        token, channel = (int(i[0]) for i in np.nonzero(bad))
        raise NonFiniteError(float(rows[token, channel]), first + token, channel // head_size, channel % head_size)


# --- metadata, shared by lynx, int8 and int4 -------------------------------------------------------------------------


@dataclass(frozen=True)
class Statistics:
    """What the metadata are made of.

    Attributes:
        low, scale: bfloat16 bits [channels] of page minimum and range (lines 2 and 3); scale 0 marks a flat channel.
        least, most: float32 [chunks, channels].
        tokens: coded tokens of each chunk, int64 [chunks].
    """

    low: U16
    scale: U16
    least: F32
    most: F32
    tokens: NDArray[np.int64]


def statistics(chunks: list[F32]) -> Statistics:
    """Page and chunk statistics of the coded rows, cut into chunks."""
    least = np.stack([chunk.min(axis=0) for chunk in chunks])
    most = np.stack([chunk.max(axis=0) for chunk in chunks])
    low = bfloat16_below(least.min(axis=0))  # line 2
    scale = bfloat16_above(most.max(axis=0) - widen(low))  # line 3
    scale[widen(scale) < FLAT_SCALE] = 0
    return Statistics(low, scale, least, most, np.array([len(chunk) for chunk in chunks]))


def chunk_mean(chunk: F32) -> F32:
    """Mean over the tokens of one chunk (line 7), accumulated in token order."""
    total = np.zeros_like(chunk[0])
    for row in chunk:
        total = total + row * MEAN_WEIGHT
    mean: F32 = total * (MEAN_CHUNK / np.float32(len(chunk)))
    return mean


@dataclass(frozen=True)
class Grid:
    """The page grid on which chunk fields are stored: value = low + step * code, length = step * code.

    Attributes:
        low, step, inverse: float32 [channels]; step and inverse are 0 for a flat channel.
        top: largest code, 255 or 65535.
    """

    low: F32
    step: F32
    inverse: F32
    top: np.float32

    @classmethod
    def of(cls, low: U16, scale: U16, wide: bool) -> Grid:
        top = MAX_LEVEL_WIDE if wide else MAX_LEVEL_NARROW
        length = widen(scale)
        inverse = np.zeros_like(length)
        with np.errstate(over="ignore"):  # a scale that no encoder writes; decoders have no use for the inverse
            np.divide(top, length, out=inverse, where=length != 0)
        return cls(widen(low), length / top, inverse, top)

    def place(self, codes: I32) -> F32:
        """Float32 position of each code."""
        return self.low + self.length(codes)

    def length(self, codes: I32) -> F32:
        """Float32 length of each code."""
        length: F32 = self.step * codes.astype(np.float32)
        return length

    def clamp(self, codes: F32) -> I32:
        """Integer codes of whole numbers that may lie outside the grid by a rounding error."""
        return np.minimum(np.maximum(codes, np.float32(0.0)), self.top).astype(np.int32)


def lynx_fields(stats: Statistics, mean: F32, grid: Grid) -> tuple[I32, I32]:
    """Codes of mu (nearest) and sigma (rounded up, from the rounded mu: the closed loop), lines 7 and 8."""
    mu_code = grid.clamp(np.floor((mean - grid.low) * grid.inverse + HALF))
    mu = grid.place(mu_code)
    deviation = np.maximum(stats.most - mu, mu - stats.least)
    return mu_code, grid.clamp(np.ceil(deviation * grid.inverse))


def affine_fields(stats: Statistics, grid: Grid) -> tuple[I32, I32]:
    """Codes of the chunk minimum (rounded down) and the chunk range (rounded up, from the rounded minimum)."""
    low_code = grid.clamp(np.floor((stats.least - grid.low) * grid.inverse))
    low = grid.place(low_code)
    return low_code, grid.clamp(np.ceil((stats.most - low) * grid.inverse))


def must_escape(stats: Statistics, grid: Grid, length_code: I32) -> bool:
    """Whether 8-bit chunk fields are too coarse for this page.

    They are if some chunk of ESCAPE_TOKENS or more is not represented exactly by its first field alone (its length code
    is not 0) and what has to be resolved in it, its range or, if it is constant, its magnitude, is below
    ESCAPE_STEPS steps of the grid.
    """
    spread = stats.most - stats.least
    extent = np.where(spread > 0, spread, np.abs(stats.least))
    coarse = (length_code > 0) & (extent < ESCAPE_STEPS * grid.step)
    return bool(np.any(coarse[stats.tokens >= ESCAPE_TOKENS]))


# --- packing ---------------------------------------------------------------------------------------------------------


def pack_nibbles(codes: I32, shape: PageShape) -> U8:
    """Nibbles [tokens, channels] to bytes [tokens, row]: pairs of one head, even channel low, odd sizes padded by 0."""
    heads = codes.astype(np.uint8).reshape(len(codes), shape.heads, shape.head_size)
    if shape.head_size % 2:
        heads = np.concatenate([heads, np.zeros((len(codes), shape.heads, 1), np.uint8)], axis=2)
    packed: U8 = heads[..., 0::2] | heads[..., 1::2] << np.uint8(4)
    return packed.reshape(len(codes), -1)


def unpack_nibbles(packed: U8, shape: PageShape) -> I32:
    """Inverse of `pack_nibbles`; pad nibbles are ignored."""
    pairs = packed.reshape(len(packed), shape.heads, -1)
    heads = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=3)
    flat = heads.reshape(len(packed), shape.heads, -1)[..., : shape.head_size]
    return flat.reshape(len(packed), shape.channels).astype(np.int32)


def pack_plane(codes: U8, width: int) -> U8:
    """Codes [tokens, heads, size] of `width` bits to bytes [tokens, row]: heads filled up with 0, low bits first."""
    per = 8 // width
    padded = np.pad(codes, ((0, 0), (0, 0), (0, -codes.shape[2] % per)))
    packed = np.zeros((*padded.shape[:2], padded.shape[2] // per), np.uint8)
    for i in range(per):
        packed |= padded[..., i::per] << np.uint8(i * width)
    return packed.reshape(len(codes), -1)


def unpack_plane(packed: U8, shape: PageShape, width: int) -> U8:
    """Inverse of `pack_plane`; what fills a head up is ignored."""
    parts = packed.reshape(len(packed), shape.heads, -1)
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    codes = parts[..., None] >> shifts & np.uint8((1 << width) - 1)
    return codes.reshape(len(packed), shape.heads, -1)[..., : shape.head_size]


# --- the engine ------------------------------------------------------------------------------------------------------


class ReferenceEngine:
    """The numpy implementation of the steps the codecs are made of. `Engine` in engine.py states the contract."""

    def warm_up(self, codec_id: int) -> None:
        """Nothing to compile."""

    def store_raw(self, page: NDArray[Any], shape: PageShape, first: int, stop: int, out: U8) -> None:
        rows = page[first:stop].reshape(stop - first, shape.channels)
        check_finite(widen(rows), first, shape.head_size)
        if rows.dtype == np.float32:
            rows = bfloat16_nearest(rows)
        out[:] = np.ascontiguousarray(rows).view(np.uint16).astype("<u2").reshape(-1).view(np.uint8)

    def load_raw(self, data: U8, float16: bool, shape: PageShape, first: int, stop: int, out: NDArray[Any]) -> None:
        bits = data.view("<u2").astype(np.uint16)
        values = widen(bits.view(np.float16) if float16 else bits)
        if not np.all(np.isfinite(values)):
            raise CodecError("raw tokens hold a value that is not finite")
        store(values.reshape(stop - first, shape.heads, shape.head_size), out[first:stop])

    def encode_lynx(
        self,
        page: NDArray[Any],
        shape: PageShape,
        anchor: U8,
        residual: U8,
        base: int,
        tables: LynxTables,
        places: I32,
    ) -> bool:
        chunks = self._chunks(page, shape)
        stats = statistics(chunks)
        grid = Grid.of(stats.low, stats.scale, wide=False)
        mean = np.stack([chunk_mean(chunk) for chunk in chunks])
        mu_code, sigma_code = lynx_fields(stats, mean, grid)
        wide = must_escape(stats, grid, sigma_code)
        if wide:
            grid = Grid.of(stats.low, stats.scale, wide=True)
            mu_code, sigma_code = lynx_fields(stats, mean, grid)
        sections = Sections.of(shape, base, (4, 4), wide)
        self._write_fields(anchor, sections, stats, mu_code, sigma_code)

        mu, sigma = grid.place(mu_code), grid.length(sigma_code)
        per_unit = np.zeros_like(sigma)
        np.divide(np.float32(UNIT), sigma, out=per_unit, where=sigma != 0)  # line 8, the division, once a chunk
        q_anc, q_res = [], []
        for i, rows in enumerate(chunks):
            centred = rows - mu[i]
            exact = np.abs(centred).astype(np.float64) * per_unit[i]  # 48 bits hold it
            units = np.minimum(exact, UNIT).astype(np.int32)
            level = np.searchsorted(tables.thresholds, units, side="right").astype(np.int32)  # lines 10 and 11
            magnitude = (level + 7) >> 4  # lines 14 and 15
            q_res.append((magnitude << 4) - level)  # lines 16 and 17
            q_anc.append(np.where(centred < 0, -magnitude - 1, magnitude))  # lines 12 and 18
        anchor[sections.data : sections.fine] = pack_nibbles(np.concatenate(q_anc) & 15, shape).reshape(-1)
        corrections = pack_nibbles(np.concatenate(q_res) & 15, shape)
        residual[:] = corrections[places >= 0].reshape(-1)
        anchor[sections.fine : sections.end] = corrections[places < 0].reshape(-1)
        return wide

    def decode_lynx(
        self,
        anchor: U8,
        residual: U8 | None,
        shape: PageShape,
        base: int,
        wide: bool,
        coarse: F32,
        full: F32,
        places: I32,
        out: NDArray[Any],
    ) -> None:
        sections = Sections.of(shape, base, (4, 4), wide)
        grid, mu_code, sigma_code = read_fields(anchor, sections, shape, wide)
        mu, sigma = grid.place(mu_code), grid.length(sigma_code)
        row = sections.rows[0]
        codes = unpack_nibbles(anchor[sections.data : sections.fine].reshape(-1, row), shape)
        units = coarse[codes]
        for chosen, data in ((places < 0, anchor[sections.fine : sections.end]), (places >= 0, residual)):
            if data is not None and data.size:
                units[chosen] = full[codes[chosen] << 4 | unpack_nibbles(data.reshape(-1, row), shape)]
        offset = shape.raw_head
        for i, (start, stop) in enumerate(chunk_spans(shape)):
            values = mu[i] + sigma[i] * units[start - offset : stop - offset]
            store(values.reshape(-1, shape.heads, shape.head_size), out[start:stop])

    def encode_affine(self, page: NDArray[Any], shape: PageShape, out: U8, base: int, bits: int) -> bool:
        chunks = self._chunks(page, shape)
        stats = statistics(chunks)
        grid = Grid.of(stats.low, stats.scale, wide=False)
        low_code, range_code = affine_fields(stats, grid)
        wide = must_escape(stats, grid, range_code)
        if wide:
            grid = Grid.of(stats.low, stats.scale, wide=True)
            low_code, range_code = affine_fields(stats, grid)
        sections = Sections.of(shape, base, (bits,), wide)
        self._write_fields(out, sections, stats, low_code, range_code)

        top = np.float32((1 << bits) - 1)
        low, length = grid.place(low_code), grid.length(range_code)
        per_unit = np.zeros_like(length)
        np.divide(top, length, out=per_unit, where=length != 0)
        codes = []
        for i, rows in enumerate(chunks):
            level = (rows - low[i]) * per_unit[i] + HALF
            codes.append(np.minimum(np.maximum(level, np.float32(0.0)), top).astype(np.int32))
        whole = np.concatenate(codes)
        packed = whole.astype(np.uint8) if bits == 8 else pack_nibbles(whole, shape)
        out[sections.data : sections.end] = packed.reshape(-1)
        return wide

    def decode_affine(self, data: U8, shape: PageShape, base: int, wide: bool, bits: int, out: NDArray[Any]) -> None:
        sections = Sections.of(shape, base, (bits,), wide)
        grid, low_code, range_code = read_fields(data, sections, shape, wide)
        low, delta = grid.place(low_code), grid.length(range_code) / np.float32((1 << bits) - 1)
        rows = data[sections.data :].reshape(shape.coded_tokens, sections.rows[0])
        codes = (rows if bits == 8 else unpack_nibbles(rows, shape)).astype(np.float32)
        offset = shape.raw_head
        for i, (start, stop) in enumerate(chunk_spans(shape)):
            values = low[i] + delta[i] * codes[start - offset : stop - offset]
            store(values.reshape(-1, shape.heads, shape.head_size), out[start:stop])

    def encode_codes(self, page: NDArray[Any], shape: PageShape, chunk: int, out: U8, base: int) -> tuple[U8, bool]:
        chunks = self._chunks(page, shape, chunk)
        stats = statistics(chunks)
        grid = Grid.of(stats.low, stats.scale, wide=False)
        low_code, range_code = affine_fields(stats, grid)
        wide = must_escape(stats, grid, range_code)
        if wide:
            grid = Grid.of(stats.low, stats.scale, wide=True)
            low_code, range_code = affine_fields(stats, grid)
        self._write_fields(out, Sections.of(shape, base, (8,), wide, chunk), stats, low_code, range_code)
        low, length = grid.place(low_code), grid.length(range_code)
        per_unit = np.zeros_like(length)
        np.divide(TOP_CODE, length, out=per_unit, where=length != 0)
        levels = [(rows - low[i]) * per_unit[i] + HALF for i, rows in enumerate(chunks)]
        codes = np.minimum(np.maximum(np.concatenate(levels), np.float32(0.0)), TOP_CODE).astype(np.uint8)
        return codes, wide

    def decode_codes(
        self,
        data: U8,
        codes: U8,
        shape: PageShape,
        chunk: int,
        base: int,
        wide: bool,
        tables: F32,
        places: I32,
        out: NDArray[Any],
    ) -> None:
        sections = Sections.of(shape, base, (8,), wide, chunk)
        grid, low_code, range_code = read_fields(data, sections, shape, wide)
        low, delta = grid.place(low_code), grid.length(range_code) / TOP_CODE
        positions = np.where((places < 0)[:, None], tables[1][codes], tables[0][codes])
        offset = shape.raw_head
        for i, (start, stop) in enumerate(chunk_spans(shape, chunk)):
            values = low[i] + delta[i] * positions[start - offset : stop - offset]
            store(values.reshape(-1, shape.heads, shape.head_size), out[start:stop])

    def pack(self, codes: U8, tokens: I32, shape: PageShape, shift: int, bits: int, out: U8) -> None:
        heads = codes[tokens].reshape(len(tokens), shape.heads, shape.head_size)
        parts = []
        for width in planes(bits):
            bits -= width
            parts.append(pack_plane(heads >> np.uint8(shift + bits) & np.uint8((1 << width) - 1), width))
        out[:] = np.concatenate(parts, axis=1).reshape(-1)

    def unpack(self, data: U8, tokens: I32, shape: PageShape, shift: int, bits: int, codes: U8) -> None:
        heads = codes.reshape(len(codes), shape.heads, shape.head_size)
        rows, at = data.reshape(len(tokens), -1), 0
        for width in planes(bits):
            bits -= width
            size = shape.heads * -(-shape.head_size * width // 8)
            heads[tokens] |= unpack_plane(rows[:, at : at + size], shape, width) << np.uint8(shift + bits)
            at += size

    @staticmethod
    def _chunks(page: NDArray[Any], shape: PageShape, chunk: int = CHUNK_TOKENS) -> list[F32]:
        chunks = []
        for start, stop in chunk_spans(shape, chunk):
            rows = widen(page[start:stop].reshape(stop - start, shape.channels))
            check_finite(rows, start, shape.head_size)
            chunks.append(rows)
        return chunks

    @staticmethod
    def _write_fields(out: U8, sections: Sections, stats: Statistics, first: I32, second: I32) -> None:
        dtype = "<u2" if sections.meta == 2 else "u1"
        out[sections.page_low : sections.page_scale] = stats.low.astype("<u2").view(np.uint8)
        out[sections.page_scale : sections.chunk_low] = stats.scale.astype("<u2").view(np.uint8)
        out[sections.chunk_low : sections.chunk_scale] = first.astype(dtype).reshape(-1).view(np.uint8)
        out[sections.chunk_scale : sections.fine_positions] = second.astype(dtype).reshape(-1).view(np.uint8)

    def encode_exact(
        self,
        bits: U16,
        codes: U8,
        base: F32,
        length: F32,
        starts: NDArray[np.int64],
        out: U8,
        *,
        float16: bool,
    ) -> int:
        return encode_exact(bits, codes, base, length, starts, out, float16=float16)

    def decode_exact(
        self,
        data: U8,
        codes: U8,
        base: F32,
        length: F32,
        starts: NDArray[np.int64],
        out: U16,
        *,
        float16: bool,
    ) -> None:
        decode_exact(data, codes, base, length, starts, out, float16=float16)


def read_fields(data: U8, sections: Sections, shape: PageShape, wide: bool) -> tuple[Grid, I32, I32]:
    """The page grid and the codes of both chunk fields, [chunks, channels], out of stream 0."""
    dtype = "<u2" if wide else "u1"
    low = data[sections.page_low : sections.page_scale].copy().view("<u2").astype(np.uint16)
    scale = data[sections.page_scale : sections.chunk_low].copy().view("<u2").astype(np.uint16)
    check_page_fields(widen(low), widen(scale))
    fields = data[sections.chunk_low : sections.fine_positions].copy().view(dtype).astype(np.int32)
    first, second = fields.reshape(2, sections.chunks, shape.channels)
    return Grid.of(low, scale, wide), first, second


def chunk_fields(data: U8, sections: Sections, shape: PageShape, wide: bool) -> tuple[F32, F32]:
    """Base and length of every chunk of the affine codecs, float32 [chunks, channels]."""
    grid, low_code, range_code = read_fields(data, sections, shape, wide)
    return grid.place(low_code), grid.length(range_code)


def check_page_fields(low: F32, scale: F32) -> None:
    """Refuse page fields that no encoder writes and that could make a decoded value infinite."""
    with np.errstate(invalid="ignore", over="ignore"):
        good = (np.abs(low) <= MAX_MAGNITUDE) & (scale >= 0) & (low + scale <= MAX_TOP)
    if not good.all():
        channel = int(np.argmin(good))
        raise CodecError(f"page minimum and scale of channel {channel} are out of range")
