"""What the comparison codecs share: one stream of header, parameters, raw tokens and body; packing; 16-bit fields."""

from __future__ import annotations

import struct
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec.base import PageShape
from lynx_codec.codecs import PageCodec, bytes_of
from lynx_codec.errors import CodecError
from lynx_codec.layout import BF16_ID, HEADER_BYTES, PageHeader, read_header, row_bytes, write_header
from lynx_codec.limits import FLAT_SCALE, MAX_MAGNITUDE
from lynx_codec.reference import bfloat16_above, check_finite, store, widen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from lynx_codec.engine import Engine

    F32 = NDArray[np.float32]
    U8 = NDArray[np.uint8]
    U16 = NDArray[np.uint16]

__all__ = [
    "CACHEGEN_ID",
    "FP8_ID",
    "INT4_TOKEN_ID",
    "INT8_TOKEN_ID",
    "KIVI_ID",
    "PARAMETER_BYTES",
    "TURBOQUANT_ID",
    "BaselineCodec",
    "bounded_scale",
    "read_fields",
    "write_fields",
]

FP8_ID, INT8_TOKEN_ID, INT4_TOKEN_ID, CACHEGEN_ID, KIVI_ID, TURBOQUANT_ID = 16, 17, 18, 19, 20, 21
"""The codecs, as the header names them. Ids from 16 are comparison codecs."""

PARAMETER_BYTES = 8
"""Bytes behind the page header: two small numbers, a 16-bit and a 32-bit one, whose meaning is the codec's."""

_PARAMETERS = struct.Struct("<BBHI")


class BaselineCodec(PageCodec):
    """A codec of one stream: page header, parameters, raw tokens, and a body that holds the coded tokens.

    Subclasses say how long the body is and fill it. `rows` are float32 [coded tokens, heads, head size], at least one.
    """

    stream_names = ("anchor",)
    header_bytes = HEADER_BYTES + PARAMETER_BYTES
    _has_escape = False

    def __init__(self, load_engine: Callable[[], Engine], parameters: tuple[int, int, int, int] = (0, 0, 0, 0)) -> None:
        super().__init__(load_engine)
        self._tail = _PARAMETERS.pack(*parameters)

    def warm_up(self) -> None:
        """Compile what handles raw tokens and packed codes, or load it from numba's cache; the rest is numpy."""
        self._engine.warm_up(BF16_ID)
        shape = PageShape(1, 1, 2)
        self._unpack(self._pack(np.zeros((1, 2), np.uint8), shape, 4), shape, 4)

    @abstractmethod
    def _body_bytes(self, shape: PageShape) -> int:
        """Bytes of the body: exact, or the most that it can take if the stream is a variable one."""

    @abstractmethod
    def _encode_body(self, rows: F32, shape: PageShape, out: U8) -> int:
        """Write the body to the start of `out`, which has `_body_bytes`; bytes written."""

    @abstractmethod
    def _decode_body(self, body: U8, shape: PageShape) -> F32:
        """The rows out of a body. Whatever the bytes: finite numbers or CodecError."""

    def _body_at(self, shape: PageShape) -> int:
        return self.header_bytes + 2 * (shape.raw_head + shape.raw_tail) * shape.channels

    def stream_bytes(self, shape: PageShape, *, wide: bool = False) -> tuple[int, ...]:
        return (self._body_at(shape) + (self._body_bytes(shape) if shape.coded_tokens else 0),)

    def encode(
        self,
        page: NDArray[Any],
        shape: PageShape,
        outs: Sequence[memoryview],
        fine: NDArray[np.integer[Any]] | None = None,
    ) -> tuple[int, ...]:
        self.check_page(page, shape)
        (out,) = self._buffers(outs, shape)
        self._encode_raw(page, shape, out)
        size = self._body_at(shape)
        if shape.coded_tokens:
            rows = widen(page[shape.raw_head : shape.tokens - shape.raw_tail])
            check_finite(rows.reshape(len(rows), -1), shape.raw_head, shape.head_size)
            size += self._encode_body(np.ascontiguousarray(rows), shape, out[size:])
        write_header(out, self.header(shape), wide=False, raw_float16=page.dtype == np.float16)
        return (size,)

    def parse(self, streams: Sequence[memoryview], shape: PageShape) -> tuple[PageHeader, list[U8]]:
        if not self.variable_streams or len(streams) != 1:
            return super().parse(streams, shape)
        array = bytes_of(streams[0], self.stream_names[0])
        header = read_header(array, self.header(shape), may_be_wide=False)
        (most,) = self.stream_bytes(shape)
        if not self._body_at(shape) <= array.nbytes <= most:
            raise CodecError(f"stream anchor has {array.nbytes} bytes, the page takes {self._body_at(shape)} to {most}")
        return header, [array]

    def decode(self, streams: Sequence[memoryview], shape: PageShape, out: NDArray[Any]) -> None:
        self._check_out(out, shape)
        header, (data,) = self.parse(streams, shape)
        if header.tail != self._tail:
            found, expected = _PARAMETERS.unpack(header.tail), _PARAMETERS.unpack(self._tail)
            raise CodecError(f"page header: parameters of {self.name} are {found}, expected {expected}")
        self._decode_raw(data, header.raw_float16, shape, out)
        if shape.coded_tokens:
            rows = self._decode_body(data[self._body_at(shape) :], shape)
            rows = np.clip(rows, -MAX_MAGNITUDE, MAX_MAGNITUDE)
            store(rows, out[shape.raw_head : shape.tokens - shape.raw_tail])

    # --- packed codes: planes of bits, as in `nested` ----------------------------------------------------------------

    @staticmethod
    def _packed_bytes(shape: PageShape, bits: int) -> int:
        return shape.coded_tokens * row_bytes(shape.heads, shape.head_size, bits)

    def _pack(self, codes: U8, shape: PageShape, bits: int) -> U8:
        """Bytes of codes [coded tokens, ...] below 2**bits."""
        codes = np.ascontiguousarray(codes.reshape(len(codes), -1))
        out = np.zeros(len(codes) * row_bytes(shape.heads, shape.head_size, bits), np.uint8)
        self._engine.pack(codes, np.arange(len(codes), dtype=np.int32), shape, 0, bits, out)
        return out

    def _unpack(self, packed: U8, shape: PageShape, bits: int) -> U8:
        """Codes [coded tokens, heads, head size]."""
        codes = np.zeros((shape.coded_tokens, shape.channels), np.uint8)
        self._engine.unpack(packed, np.arange(len(codes), dtype=np.int32), shape, 0, bits, codes)
        return codes.reshape(-1, shape.heads, shape.head_size)


# --- 16-bit fields ---------------------------------------------------------------------------------------------------


def bounded_scale(scale: F32) -> U16:
    """bfloat16 bits of scales >= 0, rounded up; below 2**-80 a scale is 0."""
    bits = bfloat16_above(np.ascontiguousarray(scale))
    bits[widen(bits) < FLAT_SCALE] = 0
    return bits


def write_fields(out: U8, at: int, *fields: U16) -> int:
    """Write 16-bit fields one after another; the offset behind them."""
    for field in fields:
        end = at + 2 * field.size
        out[at:end] = field.astype("<u2").reshape(-1).view(np.uint8)
        at = end
    return at


def read_fields(data: U8, at: int, shape: tuple[int, ...]) -> tuple[F32, int]:
    """bfloat16 numbers as float32 [shape], and the offset behind them."""
    end = at + 2 * int(np.prod(shape))
    values = widen(data[at:end].copy().view("<u2").astype(np.uint16)).reshape(shape)
    if not bool(np.all(np.abs(values) < np.inf)):
        raise CodecError("a 16-bit field of the page is not finite")
    return values, end
