"""8-bit floats, e4m3 (Micikevicius et al., "FP8 formats for deep learning", 2022, table 1), with a scale per channel.

Of the usual choices, a scale per channel and page costs the least, 0.06 bits a value; a scale per token and head takes
0.125 to 0.25. It loses nothing: the format has 18 binades of relative precision, so the scale only has to keep a
channel inside its range, and channels of unlike magnitude do not disturb each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lynx_codec.baselines.common import FP8_ID, BaselineCodec, bounded_scale, read_fields, write_fields
from lynx_codec.errors import CodecError
from lynx_codec.reference import widen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lynx_codec.base import PageShape

    F32 = NDArray[np.float32]
    U8 = NDArray[np.uint8]

__all__ = ["E4M3_MAX", "Fp8Codec", "e4m3_nearest", "e4m3_values"]

E4M3_MAX = np.float32(448.0)
"""Largest e4m3 number; there are no infinities, and 0x7F and 0xFF are NaN."""

_SMALLEST_NORMAL = np.float32(2.0**-6)


def e4m3_nearest(values: F32) -> U8:
    """Codes of the nearest e4m3 numbers, ties to even, of float32 values; magnitudes above 448 saturate."""
    magnitude = np.minimum(np.abs(values), E4M3_MAX)
    bits = magnitude.view(np.uint32)
    # float32 to 4 exponent and 3 mantissa bits: drop 20 bits, then take the difference of the exponent biases, 127 - 7.
    rounded = (bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    normal = rounded - np.uint32((127 - 7) << 3)
    code = np.where(magnitude < _SMALLEST_NORMAL, np.rint(magnitude * np.float32(512.0)).astype(np.uint32), normal)
    signed: U8 = (code | np.signbit(values).astype(np.uint32) << np.uint32(7)).astype(np.uint8)
    return signed


def e4m3_values() -> F32:
    """float32 [256]: the number of each code."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    half = np.where(exponent > 0, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9)).astype(np.float32)
    half[127] = np.nan
    return np.concatenate([half, -half])


_VALUES = e4m3_values()


class Fp8Codec(BaselineCodec):
    """e4m3 floats of 8 bits. Body: a bfloat16 scale per channel, the largest magnitude / 448 rounded up, then codes."""

    name = "fp8"
    codec_id = FP8_ID

    def _body_bytes(self, shape: PageShape) -> int:
        return (2 + shape.coded_tokens) * shape.channels

    def _encode_body(self, rows: F32, shape: PageShape, out: U8) -> int:
        scale = bounded_scale(np.abs(rows).max(axis=0) / E4M3_MAX)
        length = widen(scale)
        scaled = np.zeros_like(rows)
        np.divide(rows, length, out=scaled, where=length != 0)
        at = write_fields(out, 0, scale)
        out[at : at + rows.size] = e4m3_nearest(scaled).reshape(-1)
        return at + rows.size

    def _decode_body(self, body: U8, shape: PageShape) -> F32:
        scale, at = read_fields(body, 0, (shape.heads, shape.head_size))
        if bool((scale < 0).any()):
            raise CodecError("the scale of a channel is negative")
        codes = body[at:].reshape(shape.coded_tokens, shape.heads, shape.head_size)
        if bool((codes & 127 == 127).any()):
            raise CodecError("a code of fp8 is NaN")
        with np.errstate(over="ignore"):
            values: F32 = _VALUES[codes] * scale
        return values
