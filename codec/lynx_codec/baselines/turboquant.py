"""TurboQuant (Zandieh et al., "TurboQuant: online vector quantization", 2025, arXiv:2504.19874), its first stage.

Algorithm 1 (TurboQuant_mse): each token's vector of one head is divided by its norm and rotated at random, which leaves
nearly normal coordinates whatever the vector was; each is coded with the levels that are best for that distribution.

Deviations: the rotation is a Hadamard transform with random signs and not a dense random matrix (additions in a fixed
order, so that both sides agree bit for bit; head sizes that are no power of two take four overlapping transforms); the
levels are those of the normal distribution (Max, 1960), the limit of the paper's Beta density, for every head size;
what is stored is norm / sqrt(head size), in bfloat16. Left out: the second stage (a 1-bit sketch of what is left, for
unbiased inner products), more bits for outlier channels, and entropy coding of the codes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec.baselines.common import (
    TURBOQUANT_ID,
    BaselineCodec,
    bounded_scale,
    read_fields,
    write_fields,
)
from lynx_codec.errors import CodecError
from lynx_codec.reference import widen

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from lynx_codec.base import PageShape
    from lynx_codec.engine import Engine

__all__ = ["HALF_LEVELS", "TurboQuantCodec", "rotate", "rotate_back"]

HALF_LEVELS = {
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}
"""Lloyd-Max levels of a standard normal variable, the positive half, for each number of bits."""


@lru_cache(maxsize=64)
def _steps(head_size: int, seed: int) -> tuple[tuple[int, int, NDArray[np.float32]], ...]:
    """The rotation: (first channel, channels, signs of all channels) of every Hadamard transform, in order."""
    span = 1 << (head_size.bit_length() - 1)
    places = (0,) if span == head_size else (0, head_size - span) * 2
    raw = np.random.PCG64(seed).random_raw(len(places) * head_size)
    signs = np.where(raw >> np.uint64(63), np.float32(-1.0), np.float32(1.0)).reshape(len(places), head_size)
    signs.flags.writeable = False
    return tuple((at, span, signs[i]) for i, at in enumerate(places))


def _hadamard(columns: NDArray[Any]) -> NDArray[Any]:
    """Orthonormal Hadamard transform along the first axis, a power of two long; sums run in a fixed order."""
    size, count = columns.shape
    half = 1
    while half < size:
        pairs = columns.reshape(size // (2 * half), 2, half, count)
        columns = np.empty_like(pairs)
        np.add(pairs[:, 0], pairs[:, 1], out=columns[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=columns[:, 1])
        half *= 2
    scaled: NDArray[Any] = columns.reshape(size, count) * columns.dtype.type(1 / np.sqrt(size))
    return scaled


def rotate(rows: NDArray[Any], seed: int) -> NDArray[Any]:
    """Rotate vectors [count, size], float32 or float64."""
    columns = rows.T.copy()
    for at, span, signs in _steps(rows.shape[1], seed):
        columns *= signs[:, None]
        columns[at : at + span] = _hadamard(columns[at : at + span])
    return columns.T


def rotate_back(rows: NDArray[Any], seed: int) -> NDArray[Any]:
    """Inverse of `rotate`."""
    columns = rows.T.copy()
    for at, span, signs in reversed(_steps(rows.shape[1], seed)):
        columns[at : at + span] = _hadamard(columns[at : at + span])
        columns *= signs[:, None]
    return columns.T


class TurboQuantCodec(BaselineCodec):
    """TurboQuant's first stage. Body: norm / sqrt(head size) of each token and head as bfloat16, then packed codes."""

    name = "turboquant"
    codec_id = TURBOQUANT_ID

    def __init__(self, load_engine: Callable[[], Engine], *, bits: int = 4, seed: int = 0) -> None:
        if bits not in HALF_LEVELS:
            raise CodecError(f"turboquant has 2, 3 or 4 bits, not {bits!r}")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
            raise CodecError(f"seed must be an integer of 32 bits, not {seed!r}")
        self._bits, self._seed = int(bits), seed
        super().__init__(load_engine, (self._bits, 0, 0, seed))
        half = np.array(HALF_LEVELS[self._bits], np.float32)
        self._levels = np.concatenate([-half[::-1], half])
        self._edges = (self._levels[1:] + self._levels[:-1]) / np.float32(2.0)

    def params(self) -> dict[str, Any]:
        return {"bits": self._bits, "seed": self._seed}

    def _body_bytes(self, shape: PageShape) -> int:
        return 2 * shape.coded_tokens * shape.heads + self._packed_bytes(shape, self._bits)

    def _encode_body(self, rows: NDArray[np.float32], shape: PageShape, out: NDArray[np.uint8]) -> int:
        vectors = rows.reshape(-1, rows.shape[2])
        # float64: the sum of squares of a token may not fit float32.
        length = np.sqrt(np.square(vectors, dtype=np.float64).mean(axis=1))
        scale = bounded_scale(length.astype(np.float32))
        divisor = widen(scale)[:, None]
        unit = np.zeros_like(vectors)
        np.divide(vectors, divisor, out=unit, where=divisor != 0)
        turned = rotate(unit, self._seed)
        codes = np.zeros_like(turned, np.uint8)
        for edge in self._edges:
            codes += turned >= edge
        at = write_fields(out, 0, scale)
        packed = self._pack(codes.reshape(rows.shape), shape, self._bits)
        out[at : at + packed.size] = packed
        return at + packed.size

    def _decode_body(self, body: NDArray[np.uint8], shape: PageShape) -> NDArray[np.float32]:
        scale, at = read_fields(body, 0, (shape.coded_tokens * shape.heads, 1))
        if bool((scale < 0).any()):
            raise CodecError("the norm of a token is negative")
        codes = self._unpack(body[at:], shape, self._bits)
        unit = rotate_back(self._levels[codes].reshape(-1, shape.head_size), self._seed)
        with np.errstate(over="ignore"):
            values: NDArray[np.float32] = (unit * scale).reshape(shape.coded_tokens, shape.heads, shape.head_size)
        return values
