"""Where everything lies inside the streams of a page, and the versioned header of stream 0.

The normative description is docs/codec.md; this module is its only implementation. All integers and
floats are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lynx_codec.base import CHUNK_TOKENS, PageShape
from lynx_codec.errors import CodecError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BFLOAT16_RAW",
    "FLAG_WIDE",
    "FLOAT16_RAW",
    "HEADER_BYTES",
    "LYNX_HEADER_BYTES",
    "VERSION",
    "PageHeader",
    "Sections",
    "chunk_spans",
    "read_header",
    "row_bytes",
    "write_header",
]

MAGIC = b"LyxP"
VERSION = 1
FLAG_WIDE = 1
"""Chunk metadata are 16-bit fields."""

BFLOAT16_RAW = 0
FLOAT16_RAW = 1

HEADER_BYTES = 32
LYNX_HEADER_BYTES = 64

_HEADER = struct.Struct("<4sBBBBHHHHHHf8x")
_CENTROIDS = struct.Struct("<16e")
_RESERVED = slice(24, 32)


@dataclass(frozen=True, slots=True)
class PageHeader:
    """What stream 0 says about itself beyond its shape.

    Attributes:
        wide: the page escaped to 16-bit chunk metadata.
        raw_float16: raw tokens are float16; otherwise they are bfloat16.
        centroids: float32 [16], anchor value of each nibble; empty for codecs without an anchor table.
    """

    wide: bool
    raw_float16: bool
    centroids: NDArray[np.float32]


def row_bytes(heads: int, head_size: int, bits: int) -> int:
    """Bytes of one token: nibbles are paired inside a head, so an odd head size is padded by one nibble."""
    return heads * (head_size if bits == 8 else (head_size + 1) // 2)


def chunk_spans(shape: PageShape) -> list[tuple[int, int]]:
    """Token ranges [start, stop) of the chunks of a page.

    Chunks are cut at multiples of CHUNK_TOKENS from the start of the page; raw tokens are left out, so the first and
    the last chunk may be shorter.
    """
    start, stop = shape.raw_head, shape.tokens - shape.raw_tail
    spans = []
    while start < stop:
        end = min((start // CHUNK_TOKENS + 1) * CHUNK_TOKENS, stop)
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
        data: packed codes, [token][row_bytes].
        end: total bytes.
        chunks: number of chunks.
        row: bytes of one token in `data`.
        meta: bytes of one chunk field.
    """

    raw: int
    page_low: int
    page_scale: int
    chunk_low: int
    chunk_scale: int
    data: int
    end: int
    chunks: int
    row: int
    meta: int

    @classmethod
    def of(cls, shape: PageShape, header_bytes: int, bits: int, wide: bool) -> Sections:
        """Sections of a page whose stream 0 keeps `bits` bits a value. A page without coded tokens has no metadata."""
        coded = shape.coded_tokens
        if coded:
            first = shape.raw_head // CHUNK_TOKENS
            chunks = (shape.raw_head + coded - 1) // CHUNK_TOKENS - first + 1
        else:
            chunks = 0
        channels = shape.channels
        meta = 2 if wide else 1
        page = 2 * channels if coded else 0
        row = row_bytes(shape.heads, shape.head_size, bits)
        low = header_bytes + 2 * (shape.raw_head + shape.raw_tail) * channels
        fields = low + 2 * page
        data = fields + 2 * chunks * channels * meta
        return cls(
            raw=header_bytes,
            page_low=low,
            page_scale=low + page,
            chunk_low=fields,
            chunk_scale=fields + chunks * channels * meta,
            data=data,
            end=data + coded * row,
            chunks=chunks,
            row=row,
            meta=meta,
        )


def write_header(
    out: memoryview,
    codec_id: int,
    shape: PageShape,
    *,
    wide: bool,
    raw_float16: bool,
    alpha: float = 0.0,
    centroids: bytes = b"",
) -> None:
    """Write the header to the start of `out`. `centroids` is the encoded table or empty."""
    _HEADER.pack_into(
        out,
        0,
        MAGIC,
        VERSION,
        codec_id,
        FLOAT16_RAW if raw_float16 else BFLOAT16_RAW,
        FLAG_WIDE if wide else 0,
        shape.tokens,
        shape.heads,
        shape.head_size,
        shape.raw_head,
        shape.raw_tail,
        CHUNK_TOKENS,
        alpha,
    )
    if centroids:
        out[HEADER_BYTES : HEADER_BYTES + len(centroids)] = centroids


def read_header(
    stream: memoryview, codec_id: int, shape: PageShape, *, may_be_wide: bool, alpha: float = 0.0, table: bool = False
) -> PageHeader:
    """Read and check the header of stream 0 against what the caller expects.

    Raises:
        CodecError: naming the first field that does not fit.
    """
    size = LYNX_HEADER_BYTES if table else HEADER_BYTES
    if len(stream) < size:
        raise CodecError(f"page header: stream 0 has {len(stream)} bytes, the header alone takes {size}")
    magic, version, codec, raw, flags, *rest = _HEADER.unpack_from(stream)
    *dims, chunk, page_alpha = rest
    checks = (
        ("magic", magic, MAGIC),
        ("version", version, VERSION),
        ("codec", codec, codec_id),
        ("tokens", dims[0], shape.tokens),
        ("heads", dims[1], shape.heads),
        ("head_size", dims[2], shape.head_size),
        ("raw_head", dims[3], shape.raw_head),
        ("raw_tail", dims[4], shape.raw_tail),
        ("chunk", chunk, CHUNK_TOKENS),
        ("alpha", page_alpha, alpha),
        ("reserved", bytes(stream[_RESERVED]), bytes(8)),
    )
    for field, found, expected in checks:
        if found != expected:
            raise CodecError(f"page header: {field} is {found!r}, expected {expected!r}")
    if raw not in (BFLOAT16_RAW, FLOAT16_RAW):
        raise CodecError(f"page header: dtype of raw tokens is {raw}, expected 0 (bfloat16) or 1 (float16)")
    if flags & ~FLAG_WIDE or (flags and not may_be_wide):
        raise CodecError(f"page header: unknown flags 0x{flags:02x}")
    centroids = np.empty(0, dtype=np.float32)
    if table:
        centroids = np.frombuffer(stream, dtype="<f2", count=16, offset=HEADER_BYTES).astype(np.float32)
        if not bool(np.all(np.abs(centroids) <= 1.0)):
            raise CodecError("page header: centroids outside -1..1")
    return PageHeader(wide=bool(flags & FLAG_WIDE), raw_float16=raw == FLOAT16_RAW, centroids=centroids)
