"""Where everything lies inside the streams of a page, and the versioned header of stream 0.

The normative description is docs/codec.md; this module is its only implementation. All integers and
floats are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec.base import CHUNK_TOKENS
from lynx_codec.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lynx_codec.base import PageShape

__all__ = [
    "BF16_ID",
    "BFLOAT16_RAW",
    "FLAGS_AT",
    "FLAG_WIDE",
    "FLOAT16_RAW",
    "HEADER_BYTES",
    "INT4_ID",
    "INT8_ID",
    "LYNX_HEADER_BYTES",
    "LYNX_ID",
    "NESTED_ID",
    "RAW_AT",
    "VERSION",
    "PageHeader",
    "Sections",
    "check_positions",
    "chunk_spans",
    "header_template",
    "planes",
    "read_header",
    "read_positions",
    "read_table",
    "row_bytes",
    "row_places",
    "valid_positions",
    "write_header",
]

MAGIC = b"LyxP"
VERSION = 2
FLAG_WIDE = 1
"""Chunk metadata are 16-bit fields."""

BFLOAT16_RAW = 0
FLOAT16_RAW = 1

BF16_ID, LYNX_ID, INT8_ID, INT4_ID, NESTED_ID = 0, 1, 2, 3, 4
"""The codecs, as the header names them."""

HEADER_BYTES = 32
LYNX_HEADER_BYTES = 64

_HEADER = struct.Struct("<4sBBBBHHHHHHfH6s")
_FIELDS = (
    "magic",
    "version",
    "codec",
    "raw",
    "flags",
    "tokens",
    "heads",
    "head_size",
    "raw_head",
    "raw_tail",
    "chunk",
    "alpha",
    "fine",
    "reserved",
)
RAW_AT, FLAGS_AT, _DIMS_AT = 6, 7, 8
"""Offsets in the header."""


@dataclass(frozen=True, slots=True)
class PageHeader:
    """What stream 0 says about itself beyond its shape.

    Attributes:
        wide: the page escaped to 16-bit chunk metadata.
        raw_float16: raw tokens are float16; otherwise they are bfloat16.
        tail: what the codec itself has put behind the common fields.
    """

    wide: bool
    raw_float16: bool
    tail: bytes


@lru_cache(maxsize=16)
def planes(bits: int) -> tuple[int, ...]:
    """Widths of the bit planes that make up codes of `bits` bits, upper bits first: whole bytes, or 4, 2 and 1."""
    return (8,) if bits == 8 else tuple(width for width in (4, 2, 1) if bits & width)


def row_bytes(heads: int, head_size: int, bits: int) -> int:
    """Bytes of one token: one plane after another, in each of them every head filled up to whole bytes."""
    return heads * sum(-(-head_size * width // 8) for width in planes(bits))


def chunk_spans(shape: PageShape, chunk: int = CHUNK_TOKENS) -> list[tuple[int, int]]:
    """Token ranges [start, stop) of the chunks of a page.

    Chunks are cut at multiples of `chunk` from the start of the page; raw tokens are left out, so the first and
    the last chunk may be shorter.
    """
    start, stop = shape.raw_head, shape.tokens - shape.raw_tail
    spans = []
    while start < stop:
        end = min((start // chunk + 1) * chunk, stop)
        spans.append((start, end))
        start = end
    return spans


@dataclass(frozen=True, slots=True)
class Sections:
    """Byte offsets inside stream 0 of a quantised page, in the order in which they lie.

    Attributes:
        raw: 16-bit floats of the first `raw_head`, then of the last `raw_tail` tokens, [token][channel].
        page_low: bfloat16 minimum of each channel.
        page_scale: bfloat16 range of each channel.
        chunk_low: first field of each chunk, [chunk][channel], 1 or 2 bytes.
        chunk_scale: second field of each chunk, likewise.
        fine_positions: page tokens that are fine, u16.
        data: packed codes, [coded token][row].
        fine: rows of the later streams of the fine tokens, stream by stream, [fine token][row of that stream].
        end: total bytes.
        chunks: number of chunks.
        rows: bytes of one token in each stream.
        meta: bytes of one chunk field.
    """

    raw: int
    page_low: int
    page_scale: int
    chunk_low: int
    chunk_scale: int
    fine_positions: int
    data: int
    fine: int
    end: int
    chunks: int
    rows: tuple[int, ...]
    meta: int

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(
        shape: PageShape, header_bytes: int, widths: tuple[int, ...], wide: bool, chunk: int = CHUNK_TOKENS
    ) -> Sections:
        """Sections of a page whose streams have codes of `widths` bits. Without coded tokens there are no metadata."""
        coded = shape.coded_tokens
        chunks = (shape.raw_head + coded - 1) // chunk - shape.raw_head // chunk + 1 if coded else 0
        channels = shape.channels
        meta = 2 if wide else 1
        page = 2 * channels if coded else 0
        rows = tuple(row_bytes(shape.heads, shape.head_size, bits) for bits in widths)
        low = header_bytes + 2 * (shape.raw_head + shape.raw_tail) * channels
        fields = low + 2 * page
        positions = fields + 2 * chunks * channels * meta
        fine_tokens = shape.fine if len(widths) > 1 else 0
        data = positions + 2 * fine_tokens
        fine = data + coded * rows[0]
        return Sections(
            raw=header_bytes,
            page_low=low,
            page_scale=low + page,
            chunk_low=fields,
            chunk_scale=fields + chunks * channels * meta,
            fine_positions=positions,
            data=data,
            fine=fine,
            end=fine + fine_tokens * sum(rows[1:]),
            chunks=chunks,
            rows=rows,
            meta=meta,
        )

    def stream_bytes(self, shape: PageShape) -> tuple[int, ...]:
        """Bytes of each stream."""
        return (self.end, *((shape.coded_tokens - shape.fine) * row for row in self.rows[1:]))


@lru_cache(maxsize=4096)
def header_template(codec_id: int, shape: PageShape, chunk: int, alpha: float, tail: bytes) -> bytes:
    """The header of a page with no flags and bfloat16 raw tokens; `tail` is what the codec itself puts behind it."""
    dims = (shape.tokens, shape.heads, shape.head_size, shape.raw_head, shape.raw_tail)
    first = (MAGIC, VERSION, codec_id, BFLOAT16_RAW, 0)
    return _HEADER.pack(*first, *dims, chunk, alpha, shape.fine, bytes(6)) + tail


def write_header(out: NDArray[np.uint8], template: bytes, *, wide: bool, raw_float16: bool) -> None:
    """Write the header to the start of `out`."""
    out[: len(template)] = np.frombuffer(template, dtype=np.uint8)
    out[RAW_AT] = FLOAT16_RAW if raw_float16 else BFLOAT16_RAW
    out[FLAGS_AT] = FLAG_WIDE if wide else 0


def read_header(stream: NDArray[np.uint8], template: bytes, *, may_be_wide: bool) -> PageHeader:
    """Read and check the header of stream 0 against the one that the caller expects.

    Raises:
        CodecError: naming the first field that does not fit.
    """
    size = len(template)
    if len(stream) < size:
        raise CodecError(f"page header: stream 0 has {len(stream)} bytes, the header alone takes {size}")
    found = stream[:size].tobytes()
    raw, flags = found[RAW_AT], found[FLAGS_AT]
    if found[:RAW_AT] != template[:RAW_AT] or found[_DIMS_AT:HEADER_BYTES] != template[_DIMS_AT:HEADER_BYTES]:
        _name_difference(found, template)
    if raw not in (BFLOAT16_RAW, FLOAT16_RAW):
        raise CodecError(f"page header: dtype of raw tokens is {raw}, expected 0 (bfloat16) or 1 (float16)")
    if flags & ~FLAG_WIDE or (flags and not may_be_wide):
        raise CodecError(f"page header: unknown flags 0x{flags:02x}")
    return PageHeader(bool(flags & FLAG_WIDE), raw == FLOAT16_RAW, found[HEADER_BYTES:])


@lru_cache(maxsize=64)
def read_table(table: bytes, least: float, most: float) -> NDArray[np.float32]:
    """A table of float16 numbers in a header, checked against the range that its numbers may have."""
    numbers = np.frombuffer(table, dtype="<f2").astype(np.float32)
    if not bool(np.all((numbers >= least) & (numbers <= most))):
        raise CodecError(f"page header: centroids outside {least}..{most}")
    numbers.flags.writeable = False
    return numbers


def read_positions(stream: NDArray[np.uint8], sections: Sections, shape: PageShape) -> NDArray[np.int32]:
    """Positions of the fine tokens, checked."""
    found = stream[sections.fine_positions : sections.data].copy().view("<u2").astype(np.int32)
    check_positions(found.tolist(), shape)
    return found


def check_positions(positions: Sequence[int], shape: PageShape) -> None:
    """Raise CodecError unless these can be the fine tokens of a page."""
    before = shape.raw_head - 1
    for position in positions:
        if position <= before:
            break
        before = position
    else:
        if len(positions) == shape.fine and before < shape.tokens - shape.raw_tail:
            return
    raise CodecError("positions of fine tokens must increase and name tokens that are not raw")


def valid_positions(positions: NDArray[np.integer[Any]], shape: PageShape) -> bool:
    """Whether these can be the fine tokens of a page."""
    if len(positions) != shape.fine:
        return False
    rising = bool(np.all(positions[1:] > positions[:-1]))
    return shape.fine == 0 or (
        rising and int(positions[0]) >= shape.raw_head and int(positions[-1]) < shape.tokens - shape.raw_tail
    )


def row_places(positions: NDArray[np.int32], shape: PageShape) -> NDArray[np.int32]:
    """For each coded token its row in the later streams, or ~row in the fine rows of stream 0 if it is fine."""
    places = np.ones(shape.coded_tokens, dtype=np.int32)
    places[positions - shape.raw_head] = 0
    ordinary = np.cumsum(places, dtype=np.int32) - 1
    places = np.where(places, ordinary, 0)
    places[positions - shape.raw_head] = ~np.arange(shape.fine, dtype=np.int32)
    return places


def _name_difference(found: bytes, template: bytes) -> None:
    """Raise for the first field in which two headers differ."""
    have, want = _HEADER.unpack_from(found), _HEADER.unpack_from(template)
    for name, a, b in zip(_FIELDS, have, want, strict=True):
        if name not in ("raw", "flags") and a != b:
            raise CodecError(f"page header: {name} is {a!r}, expected {b!r}")
    raise CodecError("page header: alpha or reserved bytes are not as expected")
