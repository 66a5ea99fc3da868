"""Asymmetric integers whose minimum and scale belong to a group of values: along tokens, or along channels.

`int8_token`, `int4_token`: one group a token and head, as in serving systems with "per-token" caches.
`kivi`: KIVI (Liu et al., ICML 2024), sections 3.2 and 4.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec.baselines.common import (
    INT4_TOKEN_ID,
    INT8_TOKEN_ID,
    KIVI_ID,
    BaselineCodec,
    bounded_scale,
    read_fields,
    write_fields,
)
from lynx_codec.errors import CodecError
from lynx_codec.limits import MAX_MAGNITUDE, MAX_TOP
from lynx_codec.reference import bfloat16_below, widen

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from lynx_codec.base import PageShape
    from lynx_codec.engine import Engine

    F32 = NDArray[np.float32]
    U8 = NDArray[np.uint8]
    U16 = NDArray[np.uint16]

__all__ = ["KiviCodec", "TokenCodec", "dequantise", "quantise"]

HALF = np.float32(0.5)


def quantise(rows: F32, axis: int, group: int, bits: int) -> tuple[U16, U16, U8]:
    """Minimum and range (bfloat16 bits) of every `group` values along `axis`, and codes of `bits` bits.

    KIVI section 3.1: z = min X, s = (max X - min X) / (2**bits - 1), code = round((X - z) / s). Both fields are rounded
    outwards first, so that the codes are made with what the decoder sees. The last group may be shorter.
    """
    starts = np.arange(0, rows.shape[axis], group)
    low = bfloat16_below(np.ascontiguousarray(np.minimum.reduceat(rows, starts, axis=axis)))
    scale = bounded_scale(np.maximum.reduceat(rows, starts, axis=axis) - widen(low))
    top = np.float32((1 << bits) - 1)
    length = widen(scale)
    inverse = np.zeros_like(length)
    np.divide(top, length, out=inverse, where=length != 0)
    level = (rows - _spread(widen(low), axis, group, rows)) * _spread(inverse, axis, group, rows) + HALF
    return low, scale, np.minimum(np.maximum(level, np.float32(0.0)), top).astype(np.uint8)


def dequantise(low: F32, scale: F32, codes: U8, axis: int, group: int, bits: int) -> F32:
    """Values of codes; `low` and `scale` are as read, and checked here."""
    with np.errstate(over="ignore"):
        good = (np.abs(low) <= MAX_MAGNITUDE) & (scale >= 0) & (low + scale <= MAX_TOP)
    if not good.all():
        raise CodecError("the minimum or scale of a group is out of range")
    step = (scale / np.float32((1 << bits) - 1)).astype(np.float32)
    levels: F32 = codes.astype(np.float32)
    levels *= _spread(step, axis, group, codes)
    levels += _spread(low, axis, group, codes)
    return levels


def _spread(fields: F32, axis: int, group: int, like: NDArray[Any]) -> F32:
    """Each field once for every value of its group."""
    size = like.shape[axis]
    if group >= size:
        return fields
    spread: F32 = np.repeat(fields, group, axis=axis)
    return spread[(slice(None),) * axis + (slice(size),)]


class _GroupCodec(BaselineCodec):
    """Body: minimum, then scale of every group as bfloat16, then packed codes [token][head]."""

    _bits: int
    _axis: int
    """Axis of the rows along which values are grouped: 0 tokens, 2 channels of a head."""
    _group: int

    def _fields(self, shape: PageShape) -> tuple[int, int, int]:
        """Shape of the array of minima."""
        dims = [shape.coded_tokens, shape.heads, shape.head_size]
        dims[self._axis] = -(-dims[self._axis] // self._group)
        return (dims[0], dims[1], dims[2])

    def _body_bytes(self, shape: PageShape) -> int:
        return 4 * int(np.prod(self._fields(shape))) + self._packed_bytes(shape, self._bits)

    def _encode_body(self, rows: F32, shape: PageShape, out: U8) -> int:
        low, scale, codes = quantise(rows, self._axis, self._group, self._bits)
        at = write_fields(out, 0, low, scale)
        packed = self._pack(codes, shape, self._bits)
        out[at : at + packed.size] = packed
        return at + packed.size

    def _decode_body(self, body: U8, shape: PageShape) -> F32:
        low, at = read_fields(body, 0, self._fields(shape))
        scale, at = read_fields(body, at, self._fields(shape))
        codes = self._unpack(body[at:], shape, self._bits)
        return dequantise(low, scale, codes, self._axis, self._group, self._bits)


class TokenCodec(_GroupCodec):
    """Asymmetric integers of 8 or 4 bits with a minimum and a scale for every token and head."""

    _axis = 2
    _group = 1 << 16

    def __init__(self, load_engine: Callable[[], Engine], *, bits: int) -> None:
        super().__init__(load_engine)
        self._bits = bits
        self.name = f"int{bits}_token"
        self.codec_id = {8: INT8_TOKEN_ID, 4: INT4_TOKEN_ID}[bits]


class KiviCodec(_GroupCodec):
    """KIVI: keys in groups of 32 tokens per channel, values in groups of 32 channels per token, 2 or 4 bits.

    A codec sees a page and not whether it holds keys or values: `axis="channel"` is for keys, `axis="token"` for
    values. The window of recent tokens that KIVI keeps at full precision (its residual, 128 tokens in the paper's
    experiments) is `PageShape.raw_tail`. Deviations: minimum and scale are bfloat16, rounded outwards, where the paper
    has float16 rounded to nearest; groups of tokens are counted from the first coded token.
    """

    name = "kivi"
    codec_id = KIVI_ID

    def __init__(
        self, load_engine: Callable[[], Engine], *, bits: int = 2, axis: str = "channel", group: int = 32
    ) -> None:
        if bits not in (2, 4):
            raise CodecError(f"kivi has 2 or 4 bits, not {bits!r}")
        if axis not in ("channel", "token"):
            raise CodecError(f"axis must be 'channel' (keys) or 'token' (values), not {axis!r}")
        if isinstance(group, bool) or not isinstance(group, int) or not 8 <= group <= 256:
            raise CodecError(f"group must be between 8 and 256 values, not {group!r}")
        self._bits, self._group, self._axis = int(bits), group, 0 if axis == "channel" else 2
        super().__init__(load_engine, (self._bits, self._axis, self._group, 0))

    def params(self) -> dict[str, Any]:
        return {"bits": self._bits, "axis": "channel" if self._axis == 0 else "token", "group": self._group}
