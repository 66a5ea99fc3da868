"""Which kernels a codec and an array need: their macros, the blocks that they are started with, their search table."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec.codecs import LynxCodec, PageCodec
from lynx_codec.layout import HEADER_BYTES
from lynx_codec.nested import WIDTHS_BYTES, NestedCodec
from lynx_codec.tables import CELL_BITS, LEVELS, UNIT, UNIT_BITS
from lynx_gpu.plan import SLAB_CHANNELS, SLAB_TOKENS, TILE_CHANNELS

if TYPE_CHECKING:
    from lynx_codec import PageShape
    from lynx_gpu.views import DeviceView

__all__ = [
    "WARP_LANES",
    "block_of_warps",
    "cell_bits",
    "codec_defines",
    "decoder_stages",
    "fields_bytes_of",
    "logarithm_defines",
    "search_table",
    "shape_defines",
    "view_defines",
]

WARP_LANES = 32
_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
_STRIDED, _PACKED, _PAGED = 0, 1, 2
_STAGE_TOKENS = 64
"""Of a block of the decoder: whose codes it asks for at once. Up to four such stages are under way, all there are."""

_DECODER_BLOCKS = 3
"""On a multiprocessor: the fewer of them, the nearer to each other is what the device writes, and the faster."""

_DECODER_TABLES_BYTES = 2304
"""More than a block of the decoder shares beside codes and fields."""

_RESERVED_SHARED_BYTES = 1024
"""Of a multiprocessor's memory, for each block."""

_WARPS = 8, 4, 2
"""Of a block of the encoder."""

_STATIC_SHARED_BYTES = 16 * 1024
"""More than a block of the encoder shares beside its tokens and fields."""

_LOGARITHM_ERROR = 2.0**-22
"""Of lg2.approx.f32: absolute between 0.5 and 2, relative elsewhere (PTX ISA; tests/gpu/test_arithmetic.py looks)."""

_MOST_DOUBT = 64
"""Where levels are doubtful more often than this of 65,536 times, the search table is faster."""


def fields_bytes_of(codec: PageCodec, shape: PageShape) -> int:
    """What a block of the encoder shares for extremes and fields; of `lynx`, a warp knows those of chunks."""
    if not codec.row_bits:
        return 0
    chunks = 1 if isinstance(codec, LynxCodec) else codec.sections(shape, False).chunks
    return 8 * chunks * TILE_CHANNELS


@lru_cache(maxsize=64)
def block_of_warps(item_bytes: int, fields_bytes: int, limit_bytes: int) -> tuple[int, int]:
    """Warps of a block of the encoder, and what they share: 32 tokens each, fewer where a device has less memory."""
    shared = {warps: warps * WARP_LANES * TILE_CHANNELS * item_bytes + fields_bytes for warps in _WARPS}
    warps = next((warps for warps in _WARPS if shared[warps] + _STATIC_SHARED_BYTES <= limit_bytes), _WARPS[-1])
    return warps, shared[warps]


@lru_cache(maxsize=64)
def decoder_stages(bits: tuple[int, ...], chunk_tokens: int, multiprocessor_bytes: int) -> tuple[int, int]:
    """Stages that a block of the decoder has under way, and what it shares for them: three blocks have room, no fourth.

    Args:
        bits: of a value in each of the streams that are known.
        chunk_tokens: of the codec.
        multiprocessor_bytes: shared memory of a multiprocessor.
    """
    chunks = SLAB_TOKENS // chunk_tokens + (2 if SLAB_TOKENS % chunk_tokens else 0)
    others = 8 * chunks * SLAB_CHANNELS + _DECODER_TABLES_BYTES + _RESERVED_SHARED_BYTES
    stage = _STAGE_TOKENS * WARP_LANES * sum(bits)
    # Planes of one bit are half a sector wide: more of these under way are slower.
    most = 2 if any(count % 2 for count in bits) else SLAB_TOKENS // _STAGE_TOKENS
    stages = max(min((multiprocessor_bytes // _DECODER_BLOCKS - others) // stage, most), 2)
    too_much = multiprocessor_bytes // (_DECODER_BLOCKS + 1) + 2 * _DECODER_TABLES_BYTES
    return stages, max(stages * stage, too_much - others)


def cell_bits(codec: LynxCodec) -> int:
    """There are 2**bits cells of a search table: few, if none of them holds two thresholds."""
    homes = codec.tables.thresholds >> UNIT_BITS - 8
    return 8 if np.unique(homes).size == homes.size else CELL_BITS


def search_table(codec: LynxCodec) -> np.ndarray[Any, Any]:
    """float32 [2**bits + 1]: a magnitude x, counted in cells of sigma, plus the entry of cell floor(x), rounded down to
    a whole number, is its level + 135. Sums are between 128 and 256, so that this is byte 2 of a float32, less 128.
    """
    cells = 1 << cell_bits(codec)
    thresholds = codec.tables.thresholds.astype(np.float64) * cells / UNIT
    numbers = np.arange(cells + 1)
    below = np.searchsorted(thresholds, numbers)  # a threshold may be where its cell begins
    table = 135.0 + below - numbers
    homes = thresholds.astype(np.int64)
    table[homes] = 136.0 + np.arange(homes.size) - thresholds
    assert np.array_equal(table, table.astype(np.float32))
    return table.astype(np.float32)


@lru_cache(maxsize=64)
def logarithm_defines(codec: LynxCodec) -> dict[str, int | str]:
    """How levels are found by the device's logarithm (kernels/encode_chunk.cuh), and when the search table must say.

    A magnitude u has the level scale * log2(1 + alpha * u), rounded; with 135 more, byte 2 of a float32 is that and 7.
    u is counted in a power of two that brings the argument of the logarithm, start + u, near 1. All roundings, the
    logarithm, and thresholds on whole multiples of 2**-24 may be off by half of DOUBT, in 2**-16 of a level. So much is
    added: a sum that may be in the next level is a whole one and less than DOUBT. QUICK_LEVELS is 0, and the table says
    all, where that would be too often.
    """
    alpha = codec.tables.alpha
    unit = 2.0 ** math.floor(math.log2(alpha))
    scale = LEVELS / math.log2(1 + alpha)
    start = unit / alpha
    largest = start * (1 + alpha)
    base = 135.5 - scale * math.log2(start)
    relative = 2.0**-24 + abs(float(np.float32(start)) - start) / start
    off = (
        scale * max(math.log2(largest), 1.0) * _LOGARITHM_ERROR
        + scale * math.log2(math.e) * relative
        + abs(float(np.float32(scale)) - scale) * max(math.log2(largest), -math.log2(start))
        + float(np.spacing(np.float32(base + 1))) / 2  # the constant of the sum, and the sum
        + 2.0**-17
    )
    late = LEVELS * alpha / math.log1p(alpha) * 2.0**-24  # a threshold may be, at most
    doubt = math.ceil((2 * off + late) * 65536)
    numbers = {
        "LOG_START": start,
        "LOG_SCALE": scale,
        "LOG_BASE": base + off,
        "LOG_UNIT": unit / (1 << cell_bits(codec)),
    }
    bits = {name: f"{np.float32(number).view(np.uint32):#x}u" for name, number in numbers.items()}
    return {**bits, "DOUBT": doubt, "QUICK_LEVELS": int(doubt <= _MOST_DOUBT)}


@lru_cache(maxsize=256)
def codec_defines(codec: PageCodec) -> tuple[tuple[str, int | str], ...]:
    """The macros of kernels/pages.cuh."""
    if not codec.row_bits:
        return ()
    lynx = isinstance(codec, LynxCodec)
    points_at = HEADER_BYTES if lynx else 0
    if isinstance(codec, NestedCodec) and codec.header_bytes > HEADER_BYTES + WIDTHS_BYTES:
        points_at = HEADER_BYTES + WIDTHS_BYTES
    return (
        ("LYNX", int(lynx)),
        ("CHUNK", codec.chunk_tokens),
        ("STREAMS", len(codec.row_bits)),
        ("STREAM_BITS", ",".join(map(str, codec.row_bits))),
        ("HEADER", codec.header_bytes),
        ("POINTS_AT", points_at),
        ("TOP", "15.0f" if codec.row_bits == (4,) else "255.0f"),
        *((("CELL_BITS", cell_bits(codec)), *logarithm_defines(codec).items()) if isinstance(codec, LynxCodec) else ()),
    )


@lru_cache(maxsize=256)
def shape_defines(
    dtype: str, heads: int, head_size: int, aligned: bool, rows: int
) -> tuple[tuple[str, int | str], ...]:
    """The macros of kernels/common.cuh."""
    return (
        ("KIND", _KINDS[dtype]),
        ("HEADS", heads),
        ("SIZE", head_size),
        ("VECTOR", int(aligned)),
        ("ROWS", rows),
    )


def view_defines(view: DeviceView) -> tuple[tuple[str, int | str], ...]:
    """The macros of kernels/common.cuh."""
    packed = (view.token_stride, view.head_stride) == (view.heads * view.head_size, view.head_size)
    rows = _PAGED if view.block_tokens else _PACKED if packed else _STRIDED
    return shape_defines(view.dtype, view.heads, view.head_size, view.aligned, rows)
