"""The exact stream: what takes Q_full back to the 16-bit floats it was made from, bit for bit. Plain numpy.

The quantiser of `nested` and `int8` is monotone, so the 16-bit floats that share one 8-bit code are those of an
interval, the *cell*. Both sides work out the cell of a code from base and length of the chunk, a little wider than it
is, and the stream names one member of it. Normative description: docs/codec.md. The compiled twin, exact_kernels.py,
writes the same bytes.

Sizes are data-dependent, with a bound: a page that would take more is stored as plain 16-bit floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec.errors import CodecError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    U8 = NDArray[np.uint8]
    U16 = NDArray[np.uint16]
    I64 = NDArray[np.int64]

__all__ = [
    "BFLOAT16_FORMAT",
    "CLOSED",
    "EXACT_HEADER_BYTES",
    "FLAT_CONSTANT",
    "FLAT_PLAIN",
    "FLAT_SIGNS",
    "FLOAT16_FORMAT",
    "OPEN",
    "PLAIN",
    "QUOTIENT_BITS",
    "UNARY_MOST",
    "WIDENING",
    "FloatFormat",
    "decode_exact",
    "encode_exact",
    "exact_bound",
    "read_exact_header",
    "write_exact_header",
]

EXACT_HEADER_BYTES = 8
"""Mode (u8), three reserved bytes, bytes of section A (u32)."""

PLAIN, CLOSED, OPEN = 0, 1, 2
"""Modes of a page: plain 16-bit floats; cells; cells of which the first and the last have no outer end."""

FLAT_CONSTANT, FLAT_SIGNS, FLAT_PLAIN = 0, 1, 2
"""What a channel of a chunk of length 0 holds: its base, its base with either sign, anything."""

WIDENING = np.float32(2.0**-19)
"""A cell is widened at both ends by this part of the largest magnitude of its chunk; rounding moves an end by less."""

UNARY_MOST = 7
"""A quotient of this much or more is written as so many ones and `QUOTIENT_BITS` bits."""

QUOTIENT_BITS = 8

_HALF = np.float32(0.5)
_TOP = np.float32(255.0)


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """One of the two 16-bit formats. A *magnitude* is the 15 bits behind the sign; it grows with the absolute value."""

    mantissa: int
    """Bits of the mantissa that are stored."""

    largest: int
    """Magnitude of the largest finite number."""


BFLOAT16_FORMAT = FloatFormat(mantissa=7, largest=0x7F7F)
FLOAT16_FORMAT = FloatFormat(mantissa=10, largest=0x7BFF)


def exact_bound(values: int) -> int:
    """Most bytes the exact stream of so many coded values takes; a page without any has an empty one."""
    return EXACT_HEADER_BYTES + 2 * values if values else 0


def encode_exact(bits: U16, codes: U8, base: F32, length: F32, starts: I64, out: U8, *, float16: bool = False) -> int:
    """Write the exact stream of the coded tokens of one page; returns its bytes.

    Args:
        bits: uint16 [tokens, channels], the page as bits of bfloat16, or of float16 if `float16`; all finite.
        codes: uint8 [tokens, channels], the 8-bit codes of the quantiser for `bits`.
        base, length: float32 [chunks, channels], as a decoder computes them.
        starts: int64 [chunks + 1], first row of each chunk, and the number of rows.
        out: uint8, caller-owned, at least `exact_bound(bits.size)` bytes; what lies behind the result is left alone.
    """
    form = FLOAT16_FORMAT if float16 else BFLOAT16_FORMAT
    for mode in (CLOSED, OPEN):
        sections = _encode_cells(bits, codes, base, length, starts, form, mode)
        if sections is None:
            continue
        first, second = sections
        size = EXACT_HEADER_BYTES + len(first) + len(second)
        if size >= exact_bound(bits.size):
            break
        write_exact_header(out, mode, len(first))
        out[EXACT_HEADER_BYTES : EXACT_HEADER_BYTES + len(first)] = first
        out[EXACT_HEADER_BYTES + len(first) : size] = second
        return size
    write_exact_header(out, PLAIN, 0)
    size = exact_bound(bits.size)
    out[EXACT_HEADER_BYTES:size] = np.ascontiguousarray(bits).astype("<u2").reshape(-1).view(np.uint8)
    return size


def decode_exact(data: U8, codes: U8, base: F32, length: F32, starts: I64, out: U16, *, float16: bool = False) -> None:
    """Read what `encode_exact` wrote into `out`, uint16 [tokens, channels].

    Raises:
        CodecError: no valid stream for these codes. Bytes that pass decode to finite floats.
    """
    form = FLOAT16_FORMAT if float16 else BFLOAT16_FORMAT
    mode, cut = read_exact_header(data, out.size)
    first, second = data[EXACT_HEADER_BYTES:cut], data[cut:]
    if mode == PLAIN:
        out[...] = second.view("<u2").reshape(out.shape)
    else:
        _decode_cells(first, second, codes, base, length, starts, form, mode, out)
    if out.size and int((out & np.uint16(0x7FFF)).max()) > form.largest:
        raise CodecError("the exact stream holds a value that is not finite")


# --- cells -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cells:
    """The cells of some tokens; all arrays are [tokens, channels].

    Attributes:
        most: largest magnitude.
        members: members of a narrow cell, 1 at least.
        negative: sign of all members of a narrow cell.
        wide: cells that hold zero, or more members than two binades have.
    """

    most: I64
    members: I64
    negative: NDArray[np.bool_]
    wide: NDArray[np.bool_]

    @classmethod
    def of(cls, codes: U8, base: F32, length: F32, form: FloatFormat, mode: int) -> _Cells:
        """Cells of `codes` in one chunk, whose `base` and `length` are [channels]."""
        step = length / _TOP
        top = base + length
        margin = np.maximum(np.abs(base), np.abs(top)) * WIDENING
        level = codes.astype(np.float32)
        low = np.where(codes == 0, base, base + step * (level - _HALF)) - margin
        high = np.where(codes == 255, top, base + step * (level + _HALF)) + margin
        inner, outer = np.minimum(np.abs(low), np.abs(high)), np.maximum(np.abs(low), np.abs(high))
        most = np.minimum(_magnitude_below(outer, form), form.largest)
        members = most - _magnitude_above(inner, form) + 1
        wide = ((low <= 0) & (high >= 0)) | (members > 2 << form.mantissa)
        if mode == OPEN:
            ends = (codes == 0) | (codes == 255)
            wide = wide | ends
            most = np.where(ends, form.largest, most)
        return cls(most, np.maximum(members, 1), low < 0, wide)


def _magnitude_below(values: F32, form: FloatFormat) -> I64:
    """Magnitude of the largest 16-bit float that is not above each value, of values >= 0."""
    bits = values.view(np.uint32).astype(np.int64)
    if form is BFLOAT16_FORMAT:
        return bits >> 16
    tiny = np.minimum(values, np.float32(1.0)) * np.float32(2.0**24)
    return np.where(values < np.float32(2.0**-14), tiny.astype(np.int64), (bits - (112 << 23)) >> 13)


def _magnitude_above(values: F32, form: FloatFormat) -> I64:
    """Magnitude of the smallest 16-bit float that is not below each value, of values >= 0."""
    bits = values.view(np.uint32).astype(np.int64)
    if form is BFLOAT16_FORMAT:
        return (bits + 0xFFFF) >> 16
    tiny = np.ceil(np.minimum(values, np.float32(1.0)) * np.float32(2.0**24))
    return np.where(values < np.float32(2.0**-14), tiny.astype(np.int64), (bits + 0x1FFF - (112 << 23)) >> 13)


def _log2(counts: I64) -> I64:
    """Floor of the logarithm to base 2 of counts >= 1."""
    return np.frexp(counts.astype(np.float64))[1].astype(np.int64) - 1


def _base_bits(base: F32, form: FloatFormat) -> U16:
    """The 16-bit float next to `base`, ties to even."""
    if form is FLOAT16_FORMAT:
        return np.clip(base, np.float32(-65504.0), np.float32(65504.0)).astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(base).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


# --- encoding --------------------------------------------------------------------------------------------------------


def _encode_cells(
    bits: U16, codes: U8, base: F32, length: F32, starts: I64, form: FloatFormat, mode: int
) -> tuple[U8, U8] | None:
    """Sections A and B, or None if a value lies outside its cell."""
    fixed = _BitWriter()
    rest = _BitWriter()
    low_mask = (1 << form.mantissa) - 1
    for k in range(len(base)):
        rows = bits[starts[k] : starts[k + 1]]
        flat = length[k] == 0
        kinds = _flat_kinds(rows, _base_bits(base[k], form))
        rest.write(kinds[flat], np.full(int(flat.sum()), 2))
        cells = _Cells.of(codes[starts[k] : starts[k + 1]], base[k], length[k], form, mode)
        magnitude = (rows & np.uint16(0x7FFF)).astype(np.int64)
        negative = rows >> np.uint16(15)
        index = cells.most - magnitude
        narrow = ~cells.wide & ~flat
        if np.any((index < 0) & ~flat) or np.any(narrow & ((index >= cells.members) | (cells.negative != negative))):
            return None
        bits_short = _log2(cells.members)
        short = (2 << bits_short) - cells.members
        is_long = index >= short
        shifted = index + np.where(is_long, short, 0)

        wide_bits = np.full_like(index, 1 + form.mantissa)
        value = np.where(cells.wide, negative | (index & low_mask) << 1, np.where(is_long, shifted >> 1, index))
        size = np.where(cells.wide, wide_bits, bits_short)
        fixed.write(np.where(flat, 0, value), np.where(flat, 0, size))

        quotient = index >> form.mantissa
        ones = (1 << np.minimum(quotient, UNARY_MOST)) - 1
        unary = np.where(quotient < UNARY_MOST, ones, ones | (quotient - UNARY_MOST) << UNARY_MOST)
        unary_bits = np.where(quotient < UNARY_MOST, quotient + 1, UNARY_MOST + QUOTIENT_BITS)
        value = np.where(cells.wide, unary, shifted & 1)
        size = np.where(cells.wide, unary_bits, is_long)
        flat_value = np.where(kinds == FLAT_SIGNS, negative, rows)
        flat_bits = np.array([0, 1, 16])[kinds]
        rest.write(np.where(flat, flat_value, value), np.where(flat, flat_bits, size))
    return fixed.to_bytes(), rest.to_bytes()


def _flat_kinds(rows: U16, expected: U16) -> I64:
    """How each channel of a chunk could be stored, if its length were 0."""
    constant = (rows == expected).all(axis=0)
    signs = ((rows ^ expected) & np.uint16(0x7FFF) == 0).all(axis=0)
    return np.where(constant, FLAT_CONSTANT, np.where(signs, FLAT_SIGNS, FLAT_PLAIN))


class _BitWriter:
    """Fields of 0 to 16 bits, the least significant bit first."""

    def __init__(self) -> None:
        self._parts: list[U8] = []

    def write(self, values: NDArray[Any], sizes: NDArray[Any]) -> None:
        """Append fields in C order; bits of a value above its size are left out."""
        values, sizes = values.reshape(-1, 1).astype(np.int64), sizes.reshape(-1, 1)
        planes = (values >> np.arange(16)) & 1
        self._parts.append(planes[np.arange(16) < sizes].astype(np.uint8))

    def to_bytes(self) -> U8:
        """All of them, padded with zeros to whole bytes."""
        return np.packbits(np.concatenate([np.zeros(0, np.uint8), *self._parts]), bitorder="little")


# --- decoding --------------------------------------------------------------------------------------------------------


class _BitReader:
    """Reads what `_BitWriter` wrote."""

    def __init__(self, data: U8) -> None:
        self._bits = np.unpackbits(data, bitorder="little").tolist()
        self._at = 0

    def read(self, size: int) -> int:
        """The next field.

        Raises:
            CodecError: the section is too short.
        """
        end = self._at + size
        if end > len(self._bits):
            raise CodecError("the exact stream is too short for the page")
        value = sum(bit << i for i, bit in enumerate(self._bits[self._at : end]))
        self._at = end
        return value

    def finish(self) -> None:
        """Raise unless less than a byte is left, all zeros."""
        left = self._bits[self._at :]
        if len(left) >= 8 or any(left):
            raise CodecError("the exact stream is longer than the page takes")


def _decode_cells(
    first: U8, second: U8, codes: U8, base: F32, length: F32, starts: I64, form: FloatFormat, mode: int, out: U16
) -> None:
    fixed, rest = _BitReader(first), _BitReader(second)
    channels = out.shape[1]
    for k in range(len(base)):
        rows = slice(int(starts[k]), int(starts[k + 1]))
        cells = _Cells.of(codes[rows], base[k], length[k], form, mode)
        expected = _base_bits(base[k], form)
        kinds = [rest.read(2) if length[k, c] == 0 else -1 for c in range(channels)]
        if 3 in kinds:
            raise CodecError("the exact stream names an unknown kind of flat channel")
        bits_short = _log2(cells.members)
        for t in range(rows.stop - rows.start):
            for c in range(channels):
                if kinds[c] >= 0:
                    value = _read_flat(rest, kinds[c], int(expected[c]))
                elif cells.wide[t, c]:
                    value = _read_wide(fixed, rest, int(cells.most[t, c]), form)
                else:
                    index = fixed.read(int(bits_short[t, c]))
                    short = (2 << int(bits_short[t, c])) - int(cells.members[t, c])
                    if index >= short:
                        index = 2 * index + rest.read(1) - short
                    value = int(cells.most[t, c]) - index | int(cells.negative[t, c]) << 15
                out[rows.start + t, c] = value
    fixed.finish()
    rest.finish()


def _read_flat(rest: _BitReader, kind: int, expected: int) -> int:
    if kind == FLAT_PLAIN:
        return rest.read(16)
    return expected & 0x7FFF | rest.read(1) << 15 if kind == FLAT_SIGNS else expected


def _read_wide(fixed: _BitReader, rest: _BitReader, most: int, form: FloatFormat) -> int:
    negative = fixed.read(1)
    index = fixed.read(form.mantissa)
    quotient = 0
    while quotient < UNARY_MOST and rest.read(1):
        quotient += 1
    if quotient == UNARY_MOST:
        quotient += rest.read(QUOTIENT_BITS)
    magnitude = most - (quotient << form.mantissa | index)
    if magnitude < 0:
        raise CodecError("the exact stream leaves the cell of a code")
    return magnitude | negative << 15


# --- header ----------------------------------------------------------------------------------------------------------


def write_exact_header(out: U8, mode: int, first_bytes: int) -> None:
    """Write the header; section A takes `first_bytes`."""
    out[:EXACT_HEADER_BYTES] = np.frombuffer(bytes([mode, 0, 0, 0]) + first_bytes.to_bytes(4, "little"), np.uint8)


def read_exact_header(data: U8, values: int) -> tuple[int, int]:
    """Mode, and the offset at which section B begins; the bits of a plain page lie there.

    Raises:
        CodecError: no header of a page of so many coded values, or a length that does not fit.
    """
    if len(data) < EXACT_HEADER_BYTES or len(data) > exact_bound(values):
        raise CodecError(f"the exact stream has {len(data)} bytes, between 8 and {exact_bound(values)} are possible")
    mode, reserved = int(data[0]), data[1:4]
    first_bytes = int.from_bytes(data[4:EXACT_HEADER_BYTES].tobytes(), "little")
    cut = EXACT_HEADER_BYTES + first_bytes
    if mode > OPEN or reserved.any() or cut > len(data) or (mode == PLAIN and first_bytes):
        raise CodecError("the header of the exact stream is damaged")
    if mode == PLAIN and len(data) != exact_bound(values):
        raise CodecError(f"the exact stream has {len(data)} bytes, a plain page takes {exact_bound(values)}")
    return mode, cut
