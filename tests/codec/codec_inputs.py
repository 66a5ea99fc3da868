"""Pages, dtypes, layouts and call helpers that the codec tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from lynx_codec import Codec, PageShape, get_codec

NAMES = ("bf16", "int4", "int8", "lynx", "nested")
COMPARISON = ("cachegen", "fp8", "int4_token", "int8_token", "kivi", "turboquant")
"""Codecs of other systems, lynx_codec.baselines."""

ALL_NAMES = NAMES + COMPARISON
DTYPES = (np.float32, np.float16, np.uint16)
HEAD_SIZES = (64, 80, 96, 128, 192, 256, 512, 576)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Bits of the bfloat16 numbers that float32 `values` truncate to."""
    return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_dtype(values: np.ndarray, dtype: Any) -> np.ndarray:
    """float32 values as one of the three page dtypes; float16 is limited to its range."""
    if dtype is np.uint16:
        return to_bfloat16(values)
    if dtype is np.float16:
        with np.errstate(under="ignore"):
            return np.clip(values, -65504, 65504).astype(np.float16)
    return values.astype(np.float32)


def as_float32(page: np.ndarray) -> np.ndarray:
    return from_bfloat16(page) if page.dtype == np.uint16 else page.astype(np.float32)


def with_layout(page: np.ndarray, layout: str) -> np.ndarray:
    """The same page with other strides."""
    if layout == "heads first":
        return np.ascontiguousarray(page.transpose(1, 0, 2)).transpose(1, 0, 2)
    if layout == "channels last to first":
        return np.ascontiguousarray(page.transpose(2, 1, 0)).transpose(2, 1, 0)
    if layout == "backwards":
        return np.ascontiguousarray(page[::-1])[::-1]
    if layout == "window":
        tokens, heads, size = page.shape
        around = np.full((tokens + 2, heads + 1, size + 3), 7, dtype=page.dtype)
        around[1:-1, :-1, 2:-1] = page
        return around[1:-1, :-1, 2:-1]
    return page


LAYOUTS = ("plain", "heads first", "channels last to first", "backwards", "window")


def fine_positions(shape: PageShape) -> np.ndarray:
    """Some choice of fine tokens that is the same for the same shape."""
    chosen = np.random.default_rng(shape.tokens).choice(shape.coded_tokens, shape.fine, replace=False)
    return np.sort(chosen) + shape.raw_head


def encode(codec: Codec, page: np.ndarray, shape: PageShape) -> list[bytes]:
    """Streams of a page with some fine tokens; bytes past the returned lengths are checked to be left alone."""
    room = [size + 5 for size in codec.stream_bytes(shape, wide=True)]
    buffers = [bytearray(b"\xa5" * size) for size in room]
    sizes = codec.encode(page, shape, [memoryview(b) for b in buffers], fine_positions(shape))
    expected = codec.stream_bytes(shape), codec.stream_bytes(shape, wide=True)
    assert all(sizes[i] <= expected[1][i] for i in codec.variable_streams)
    fixed = [i for i in range(len(sizes)) if i not in codec.variable_streams]
    assert [sizes[i] for i in fixed] in [[e[i] for i in fixed] for e in expected]
    # A page that turns out narrow may not use the wide room, not even for a moment.
    assert all(bytes(b[size:]) == b"\xa5" * (len(b) - size) for b, size in zip(buffers, sizes, strict=True))
    return [bytes(b[:size]) for b, size in zip(buffers, sizes, strict=True)]


def decode(codec: Codec, streams: list[bytes], shape: PageShape, dtype: Any = np.float32) -> np.ndarray:
    """A page out of streams; every element is checked to be written."""
    results = []
    for filler in (0, 1):
        out = np.full(shape.array_shape, filler, dtype=dtype)
        codec.decode([memoryview(s) for s in streams], shape, out)
        results.append(out)
    assert results[0].tobytes() == results[1].tobytes()
    return results[0]


def round_trip(name: str, page: np.ndarray, shape: PageShape | None = None, **params: Any) -> np.ndarray:
    """Encode and fully decode to float32."""
    shape = shape or PageShape(*page.shape)
    codec = get_codec(name, **params)
    return decode(codec, encode(codec, page, shape), shape)


def normal(*dims: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(dims).astype(np.float32)


@st.composite
def shapes(draw: st.DrawFn, max_tokens: int = 80) -> PageShape:
    tokens = draw(st.integers(0, max_tokens))
    heads = draw(st.integers(1, 3))
    size = draw(st.sampled_from((1, 2, 3, 5, 8, 17, 64)))
    head = draw(st.sampled_from((0, 0, 1, 4, 33)))
    tail = draw(st.sampled_from((0, 0, 1, 5, 31, 64)))
    head = min(head, tokens)
    tail = min(tail, tokens - head)
    fine = min(draw(st.sampled_from((0, 0, 1, 9, 64))), tokens - head - tail)
    return PageShape(tokens, heads, size, head, tail, fine)


PATTERNS = (
    "normal",
    "few values",
    "any exponent",
    "spike",
    "bias",
    "integers",
    "constant channels",
    "stairs",
    "edge of range",
)


@st.composite
def pages(draw: st.DrawFn, max_tokens: int = 80) -> tuple[np.ndarray, PageShape]:
    """A float32 page of finite values within the encoders' limits, and its shape."""
    shape = draw(shapes(max_tokens))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dims = shape.array_shape
    page = rng.standard_normal(dims).astype(np.float32)
    match draw(st.sampled_from(PATTERNS)):
        case "few values":
            page = rng.choice(np.array([0.0, -0.0, 1.0, -1.0, 3e-39, 1e5], np.float32), size=dims)
        case "any exponent":
            page = np.ldexp(page, rng.integers(-145, 123, size=dims)).astype(np.float32)
        case "spike":
            if page.size:
                page.reshape(-1)[rng.integers(page.size)] = np.float32(10.0 ** draw(st.integers(2, 36)))
        case "bias":
            page += rng.uniform(-900, 900, size=(1, dims[1], dims[2])).astype(np.float32)
        case "integers":
            page = np.round(page * 3)
        case "constant channels":
            page = np.where(rng.random((1, dims[1], dims[2])) < 0.5, np.float32(draw(st.floats(-10, 10))), page)
        case "stairs":
            # Constant chunks beside one that is not, so that the page range is not theirs.
            page[8:] = np.round(page[:1] * 8) + (np.arange(8, dims[0]) // 32 * 3).reshape(-1, 1, 1)
        case "edge of range":
            page = rng.choice(np.array([2.0**126, -(2.0**126), 0.0, 1.0], np.float32), size=dims)
        case _:
            pass
    # Some channels at other scales, so that flat, tiny and huge ones meet in one page.
    if draw(st.booleans()):
        page = np.ldexp(page, rng.integers(-100, 1, size=(1, dims[1], dims[2]))).astype(np.float32)
    return page.astype(np.float32), shape
