"""Compiled kernels of the exact stream (numba), bit-exact with exact.py.

Work goes row by row (a row is one token, all channels). What a row needs, cells, sizes and fields, is first laid out in
arrays of one row with loops that become vector code; the loops that move bits follow, and they alone are serial. A
decoder knows the sizes of all fields of section A of a row before it reads one, so only an addition lies between two
values there.

Sections are read from copies with some bytes of room behind them, since bits are fetched eight bytes at a time.
"""

# numba types these functions, from their arguments:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, var-annotated, arg-type, assignment"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from lynx_codec import exact
from lynx_codec.jit import compiled
from lynx_codec.kernel_rows import bits_of

__all__ = [
    "BAD_KIND",
    "LEFT_CELL",
    "NO_ROOM",
    "OUTSIDE",
    "TOO_LONG",
    "TOO_SHORT",
    "decode_cells",
    "encode_cells",
    "largest",
]

OUTSIDE, NO_ROOM = -1, -2
"""Results of the encoder: a value lies outside its cell; more than the bound."""

TOO_SHORT, TOO_LONG, BAD_KIND, LEFT_CELL = 1, 2, 3, 4
"""Results of the decoder."""

SPARE = 16
"""Bytes of room behind a section: a fetch reads 8."""

CELL_OPEN = exact.OPEN
SIGNS, ANYTHING, UNKNOWN_KIND = exact.FLAT_SIGNS, exact.FLAT_PLAIN, 3
CONSTANT = exact.FLAT_CONSTANT
UNARY_MOST = np.int32(exact.UNARY_MOST)
UNARY_ONES = np.int32((1 << exact.UNARY_MOST) - 1)
QUOTIENT_BITS = np.int32(exact.QUOTIENT_BITS)
LONGEST_UNARY = np.int32(exact.UNARY_MOST + exact.QUOTIENT_BITS)
BF_MANTISSA, BF_LARGEST = np.int32(exact.BFLOAT16_FORMAT.mantissa), np.int32(exact.BFLOAT16_FORMAT.largest)
HALF_MANTISSA, HALF_LARGEST = np.int32(exact.FLOAT16_FORMAT.mantissa), np.int32(exact.FLOAT16_FORMAT.largest)
F_WIDENING = exact.WIDENING
F_ZERO, F_HALF, F_ONE, F_TOP = np.float32(0.0), np.float32(0.5), np.float32(1.0), np.float32(255.0)
F_TINY = np.float32(2.0**-14)
F_TINY_UNITS = np.float32(2.0**24)
F_HALF_MOST = np.float32(65504.0)
MAGNITUDE = np.int32(0x7FFF)
REBIAS = np.int32(112 << 23)
I_ZERO, I_ONE = np.int32(0), np.int32(1)


def _fetch(typing_context, array, byte):
    """The eight bytes of a uint8 array that begin at `byte`, as uint64, unchecked and unaligned."""

    def generate(context, builder, signature, arguments):
        source = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.bitcast(builder.gep(source.data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(array, types.intp), generate


def _deposit(typing_context, array, byte, value):
    """Write a uint64 over eight bytes of a uint8 array, unchecked and unaligned."""

    def generate(context, builder, signature, arguments):
        target = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.bitcast(builder.gep(target.data, [arguments[1]]), ir.IntType(64).as_pointer())
        builder.store(arguments[2], pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64), generate


fetch: Any = intrinsic(_fetch)
deposit: Any = intrinsic(_deposit)


# --- cells -----------------------------------------------------------------------------------------------------------


@compiled
def _chunk_cells(base, length, step, top, margin):
    """What all cells of one chunk share, per channel."""
    for c in range(len(base)):
        step[c] = length[c] / F_TOP
        top[c] = base[c] + length[c]
        size = abs(base[c])
        other = abs(top[c])
        margin[c] = (size if size > other else other) * F_WIDENING


@compiled
def _row_cells(codes, base, length, step, top, margin, float16, mode, most, members, flags):
    """The cell of every code of a row: largest magnitude, members, and flags 1 negative, 2 wide, 4 flat."""
    limit = HALF_LARGEST if float16 else BF_LARGEST
    widest = np.int32(2) << (HALF_MANTISSA if float16 else BF_MANTISSA)
    ends_open = mode == CELL_OPEN
    for c in range(len(codes)):
        code = codes[c]
        level = np.float32(code)
        low = base[c] + step[c] * (level - F_HALF)
        high = base[c] + step[c] * (level + F_HALF)
        low = (base[c] if code == 0 else low) - margin[c]
        high = (top[c] if code == 255 else high) + margin[c]
        a = abs(low)
        b = abs(high)
        inner = a if a < b else b
        outer = b if a < b else a
        if float16:
            below = _half_below(outer)
            above = _half_above(inner)
        else:
            below = np.int32(bits_of(outer) >> np.uint32(16))
            above = np.int32(np.uint32(bits_of(inner) + np.uint32(0xFFFF)) >> np.uint32(16))
        below = below if below < limit else limit
        count = np.int32(below - above + I_ONE)
        wide = ((low <= F_ZERO) & (high >= F_ZERO)) | (count > widest)
        end = ends_open & ((code == 0) | (code == 255))
        most[c] = limit if end else below
        members[c] = count if count > I_ONE else I_ONE
        flat = length[c] == F_ZERO
        flags[c] = (np.int32(low < F_ZERO)) | (np.int32(wide | end) << I_ONE) | (np.int32(flat) << np.int32(2))


@compiled
def _half_below(value):
    """Magnitude of the largest float16 that is not above `value` >= 0."""
    tiny = np.int32((value if value < F_ONE else F_ONE) * F_TINY_UNITS)
    normal = np.int32(np.int32(np.int32(bits_of(value)) - REBIAS) >> np.int32(13))
    return tiny if value < F_TINY else normal


@compiled
def _half_above(value):
    """Magnitude of the smallest float16 that is not below `value` >= 0."""
    tiny = np.int32(np.ceil((value if value < F_ONE else F_ONE) * F_TINY_UNITS))
    normal = np.int32(np.int32(np.int32(bits_of(value)) + np.int32(0x1FFF) - REBIAS) >> np.int32(13))
    return tiny if value < F_TINY else normal


@compiled
def _log2(count):
    """Floor of the logarithm to base 2 of a count between 1 and 2**24."""
    return np.int32(np.int32(bits_of(np.float32(count)) >> np.uint32(23)) - np.int32(127))


@compiled
def _expected(base, float16, into):
    """The 16-bit float next to each base, ties to even."""
    for c in range(len(base)):
        bits = bits_of(base[c])
        if not float16:
            into[c] = np.int32(
                np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            )
            continue
        size = abs(base[c])
        size = size if size < F_HALF_MOST else F_HALF_MOST
        bare = bits_of(size)
        rounded = np.uint32(bare + np.uint32(0xFFF) + ((bare >> np.uint32(13)) & np.uint32(1)))
        normal = np.uint32(np.uint32(rounded - np.uint32(112 << 23)) >> np.uint32(13))
        tiny = np.uint32(bits_of(size + F_HALF) - np.uint32(0x3F000000))
        half = tiny if size < F_TINY else normal
        into[c] = np.int32(half | ((bits >> np.uint32(16)) & np.uint32(0x8000)))


# --- encoding --------------------------------------------------------------------------------------------------------


@compiled
def _flat_kinds(bits, first, stop, length, expected, kinds):
    """How each channel of length 0 is stored; -1 for all others."""
    for c in range(len(length)):
        kinds[c] = -1
        if length[c] != F_ZERO:
            continue
        kind = CONSTANT
        for t in range(first, stop):
            difference = np.int32(bits[t, c]) ^ expected[c]
            if difference & MAGNITUDE:
                kind = ANYTHING
                break
            if difference:
                kind = SIGNS
        kinds[c] = kind


@compiled
def _row_fields(row, most, members, flags, kinds, mantissa, value_a, size_a, value_b, size_b):
    """Fields of a row for both sections; false if a value lies outside its cell."""
    low_mask = np.int32((I_ONE << mantissa) - I_ONE)
    bad = I_ZERO
    for c in range(len(row)):
        bits = np.int32(row[c])
        negative = np.int32(bits >> np.int32(15))
        index = np.int32(most[c] - (bits & MAGNITUDE))
        wide = (flags[c] & np.int32(2)) != 0
        flat = (flags[c] & np.int32(4)) != 0
        wrong = np.int32(index >= members[c]) | (negative ^ (flags[c] & I_ONE))
        bad |= I_ZERO if flat else np.int32(index < 0) | (I_ZERO if wide else wrong)

        short_bits = _log2(members[c])
        short = np.int32((np.int32(2) << short_bits) - members[c])
        is_long = index >= short
        shifted = np.int32(index + short)
        value = np.int32(shifted >> I_ONE) if is_long else index
        value = np.int32(negative | np.int32((index & low_mask) << I_ONE)) if wide else value
        size = np.int32(mantissa + I_ONE) if wide else short_bits
        value_a[c] = I_ZERO if flat else value
        size_a[c] = I_ZERO if flat else size

        quotient = np.int32(index >> mantissa)
        few = quotient < UNARY_MOST
        shift = quotient if few else UNARY_MOST
        ones = np.int32(np.int32(I_ONE << (shift & np.int32(31))) - I_ONE)
        unary = ones if few else np.int32(UNARY_ONES | np.int32(np.int32(quotient - UNARY_MOST) << UNARY_MOST))
        unary_bits = np.int32(quotient + I_ONE) if few else LONGEST_UNARY
        value = unary if wide else np.int32(shifted & np.int32(is_long))
        size = unary_bits if wide else np.int32(is_long)
        flat_value = bits if kinds[c] == ANYTHING else np.int32(negative & np.int32(kinds[c] == SIGNS))
        flat_size = np.int32(16) if kinds[c] == ANYTHING else np.int32(kinds[c] == SIGNS)
        value_b[c] = flat_value if flat else value
        size_b[c] = flat_size if flat else size
    return bad == 0


@compiled
def _put(target, byte, pending, held, values, sizes):
    """Append one field per channel: the new byte offset, the bits that are pending there, and how many (0 to 7).

    A field holds no bits above its size.
    """
    for c in range(len(values)):
        pending = np.uint64(pending | (np.uint64(np.uint32(values[c])) << held))
        held = np.uint64(held + np.uint64(np.uint32(sizes[c])))
        deposit(target, byte, pending)
        whole = np.uint64(held >> np.uint64(3))
        byte += np.intp(whole)
        pending = np.uint64(pending >> np.uint64(whole << np.uint64(3)))
        held = np.uint64(held & np.uint64(7))
    return byte, pending, held


@compiled
def encode_cells(bits, codes, base, length, starts, float16, mode, out, at):
    """Sections A and B into out[at:]; (bytes of A, bytes of all), or (OUTSIDE | NO_ROOM, 0).

    Nothing is written into `out` unless all fits below its end.
    """
    channels = bits.shape[1]
    mantissa = HALF_MANTISSA if float16 else BF_MANTISSA
    room = len(out) - at
    row_most = 2 * channels + SPARE
    section_a = np.empty(room + row_most + SPARE, np.uint8)
    section_b = np.empty(room + row_most + channels + SPARE, np.uint8)
    byte_a, pending_a, held_a = 0, np.uint64(0), np.uint64(0)
    byte_b, pending_b, held_b = 0, np.uint64(0), np.uint64(0)
    step = np.empty(channels, np.float32)
    top = np.empty(channels, np.float32)
    margin = np.empty(channels, np.float32)
    expected = np.empty(channels, np.int32)
    kinds = np.empty(channels, np.int32)
    most = np.empty(channels, np.int32)
    members = np.empty(channels, np.int32)
    flags = np.empty(channels, np.int32)
    value_a = np.empty(channels, np.int32)
    size_a = np.empty(channels, np.int32)
    value_b = np.empty(channels, np.int32)
    size_b = np.empty(channels, np.int32)
    for k in range(len(base)):
        first, stop = starts[k], starts[k + 1]
        _chunk_cells(base[k], length[k], step, top, margin)
        _expected(base[k], float16, expected)
        _flat_kinds(bits, first, stop, length[k], expected, kinds)
        for c in range(channels):
            value_b[c] = kinds[c] if kinds[c] > 0 else I_ZERO
            size_b[c] = np.int32(2) if kinds[c] >= 0 else I_ZERO
        byte_b, pending_b, held_b = _put(section_b, byte_b, pending_b, held_b, value_b, size_b)
        for t in range(first, stop):
            if float16:
                _row_cells(codes[t], base[k], length[k], step, top, margin, True, mode, most, members, flags)
            else:
                _row_cells(codes[t], base[k], length[k], step, top, margin, False, mode, most, members, flags)
            if not _row_fields(bits[t], most, members, flags, kinds, mantissa, value_a, size_a, value_b, size_b):
                return OUTSIDE, 0
            byte_a, pending_a, held_a = _put(section_a, byte_a, pending_a, held_a, value_a, size_a)
            byte_b, pending_b, held_b = _put(section_b, byte_b, pending_b, held_b, value_b, size_b)
            if byte_a + byte_b >= room:
                return NO_ROOM, 0
    bytes_a = byte_a + (1 if held_a > np.uint64(0) else 0)
    bytes_b = byte_b + (1 if held_b > np.uint64(0) else 0)
    if bytes_a + bytes_b >= room:
        return NO_ROOM, 0
    out[at : at + bytes_a] = section_a[:bytes_a]
    out[at + bytes_a : at + bytes_a + bytes_b] = section_b[:bytes_b]
    return bytes_a, bytes_a + bytes_b


# --- decoding --------------------------------------------------------------------------------------------------------


@compiled
def _padded(data, first, stop, spare):
    """A copy of data[first:stop] with zeros behind it."""
    copy = np.empty(stop - first + spare, np.uint8)
    copy[: stop - first] = data[first:stop]
    copy[stop - first :] = 0
    return copy


@compiled
def _bits_at(section, position, size):
    """`size` bits, 16 at most, from bit `position` on."""
    word = np.uint64(fetch(section, position >> 3) >> np.uint64(position & 7))
    return np.int32(word & np.uint64((np.uint64(1) << np.uint64(size)) - np.uint64(1)))


@compiled
def _ended(section, position, limit):
    """Whether less than a byte is left, all zeros."""
    return limit - position < 8 and _bits_at(section, position, limit - position) == 0


@compiled
def _read_flat(section, place, kind, expected):
    """A value of a channel of length 0, and the bits it takes."""
    if kind == CONSTANT:
        return expected, 0
    if kind == SIGNS:
        return np.int32((expected & MAGNITUDE) | (_bits_at(section, place, 1) << np.int32(15))), 1
    return _bits_at(section, place, 16), 16


@compiled
def _read_wide(section, place, head, most, mantissa):
    """A value of a wide cell, -1 if there is none, and the bits it takes; `head` is its field of section A."""
    word = _bits_at(section, place, LONGEST_UNARY)
    quotient = np.int32(0)
    while quotient < UNARY_MOST and (word >> quotient) & I_ONE:
        quotient = np.int32(quotient + I_ONE)
    used = quotient + 1
    if quotient == UNARY_MOST:
        quotient = np.int32(quotient + (word >> UNARY_MOST))
        used = np.intp(LONGEST_UNARY)
    magnitude = np.int32(most - np.int32(np.int32(quotient << mantissa) | np.int32(head >> I_ONE)))
    if magnitude < 0:
        return np.int32(-1), used
    return np.int32(magnitude | np.int32((head & I_ONE) << np.int32(15))), used


@compiled
def decode_cells(data, at, cut, codes, base, length, starts, float16, mode, out):
    """Inverse of `encode_cells`: section A is data[at:cut], section B the rest; 0 or what is wrong.

    A row takes 16 bits a channel of section B at most, the room behind its copy: a check after a row is enough.
    """
    channels = out.shape[1]
    mantissa = HALF_MANTISSA if float16 else BF_MANTISSA
    wide_bits = np.int32(mantissa + I_ONE)
    section_a = _padded(data, at, cut, SPARE)
    section_b = _padded(data, cut, len(data), 2 * channels + SPARE)
    limit_a, limit_b = 8 * (cut - at), 8 * (len(data) - cut)
    place_a, place_b = 0, 0
    step = np.empty(channels, np.float32)
    top = np.empty(channels, np.float32)
    margin = np.empty(channels, np.float32)
    expected = np.empty(channels, np.int32)
    kinds = np.empty(channels, np.int32)
    most = np.empty(channels, np.int32)
    members = np.empty(channels, np.int32)
    flags = np.empty(channels, np.int32)
    size = np.empty(channels, np.int32)
    short = np.empty(channels, np.int32)
    index = np.empty(channels, np.int32)
    for k in range(len(base)):
        _chunk_cells(base[k], length[k], step, top, margin)
        _expected(base[k], float16, expected)
        for c in range(channels):
            kinds[c] = -1
            if length[k, c] == F_ZERO:
                if place_b + 2 > limit_b:
                    return TOO_SHORT
                kinds[c] = _bits_at(section_b, place_b, 2)
                if kinds[c] == UNKNOWN_KIND:
                    return BAD_KIND
                place_b += 2
        for t in range(starts[k], starts[k + 1]):
            if float16:
                _row_cells(codes[t], base[k], length[k], step, top, margin, True, mode, most, members, flags)
            else:
                _row_cells(codes[t], base[k], length[k], step, top, margin, False, mode, most, members, flags)
            total = np.int32(0)
            for c in range(channels):
                bits = _log2(members[c])
                short[c] = np.int32((np.int32(2) << bits) - members[c])
                bits = wide_bits if flags[c] & np.int32(2) else bits
                bits = I_ZERO if flags[c] & np.int32(4) else bits
                size[c] = bits
                total += bits
            if place_a + total > limit_a:
                return TOO_SHORT
            for c in range(channels):
                found = _bits_at(section_a, place_a, size[c])
                place_a += size[c]
                if flags[c] & np.int32(6):
                    if flags[c] & np.int32(4):
                        found, used = _read_flat(section_b, place_b, kinds[c], expected[c])
                    else:
                        found, used = _read_wide(section_b, place_b, found, most[c], mantissa)
                        if found < 0:
                            return LEFT_CELL
                    place_b += used
                    index[c] = most[c] - (found & MAGNITUDE)
                    flags[c] = found >> np.int32(15)
                    continue
                is_long = np.int32(found >= short[c])
                more = np.int32(found + _bits_at(section_b, place_b, 1) - short[c])
                place_b += is_long
                index[c] = np.int32(found + (more & np.int32(-is_long)))
            if place_b > limit_b:
                return TOO_SHORT
            row = out[t]
            for c in range(channels):
                row[c] = np.uint16((most[c] - index[c]) | ((flags[c] & I_ONE) << np.int32(15)))
    if not (_ended(section_a, place_a, limit_a) and _ended(section_b, place_b, limit_b)):
        return TOO_LONG
    return 0


@compiled
def largest(bits):
    """Largest magnitude of 16-bit floats."""
    most = I_ZERO
    for t in range(bits.shape[0]):
        row = bits[t]
        for c in range(bits.shape[1]):
            magnitude = np.int32(row[c]) & MAGNITUDE
            most = magnitude if magnitude > most else most
    return most
