"""Compiled CPU kernels (numba), bit-exact with reference.py.

Arrays are one-dimensional. `src` and `dst` are the page as bits, addressed by element strides: a pair of a uint32 array
(float32 pages) and a uint16 array (float16 and bfloat16), of which the one that `kind` does not mean is empty; so
each kernel is compiled once. Work goes row by row through float32 rows of `heads` x `padded` channels, where `padded`
is the head size rounded up to even for nibbles; a row stays in the first-level cache, and the innermost loops run over
its channels so that they become vector code. Table look-ups stand in loops of their own: mixed with arithmetic they
would be taken apart and put together again lane by lane. numba types integer expressions as 64-bit; the casts
keep them at 32 bits. There is no fastmath, so nothing is fused or reordered.

All kernels are in this one file because numba's cache watches the file of a function, not those of its callees.
"""

# numba types these functions, from their arguments:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, var-annotated, arg-type"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from lynx_codec import limits
from lynx_codec.base import CHUNK_TOKENS
from lynx_codec.tables import CELL_SHIFT, UNIT

__all__ = [
    "BAD_PAGE_FIELD",
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "NOT_FINITE",
    "decode_affine",
    "decode_codes",
    "decode_lynx",
    "encode_affine",
    "encode_codes",
    "encode_lynx",
    "load_raw",
    "pack_codes",
    "store_raw",
    "unpack_codes",
]

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
"""Kinds of page elements."""

NARROW, WIDE, NOT_FINITE = 0, 1, -1
"""Results of the encoders."""

BAD_PAGE_FIELD = 1
"""Result of a decoder that refused the page minimum or scale."""

CHUNK = CHUNK_TOKENS
SHIFT = CELL_SHIFT
OFFSET_MASK = np.int32((1 << CELL_SHIFT) - 1)
F_UNIT = np.float32(UNIT)
F_ZERO = np.float32(0.0)
F_HALF = np.float32(0.5)
F_WEIGHT = limits.MEAN_WEIGHT
F_CHUNK = limits.MEAN_CHUNK
F_LIMIT = limits.MAX_MAGNITUDE
F_TOP = limits.MAX_TOP
F_FLAT = limits.FLAT_SCALE
F_ESCAPE = limits.ESCAPE_STEPS
F_FINITE = np.float32(3.4e38)
L_NARROW = limits.MAX_LEVEL_NARROW
L_WIDE = limits.MAX_LEVEL_WIDE

SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)


def compiled(function):
    """numba's decorator; without its cache on disk where neither the package nor a user's cache folder is writable."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


def _float_of(typing_context, bits):
    """The float32 with these bits (uint32)."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _bits_of(typing_context, value):
    """The bits of a float32 as uint32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def _window(typing_context, array, start, size):
    """array[start : start + size] without bounds checks and without a reference count, for use inside one kernel."""
    index = types.intp

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        source = context.make_array(kind)(context, builder, arguments[0])
        view = context.make_array(kind)(context, builder)
        item = context.get_constant(index, context.get_abi_sizeof(context.get_data_type(kind.dtype)))
        arrayobj.populate_array(
            view,
            data=builder.gep(source.data, [arguments[1]]),
            shape=cgutils.pack_array(builder, [arguments[2]]),
            strides=cgutils.pack_array(builder, [item]),
            itemsize=item,
            meminfo=None,
            parent=None,
        )
        return view._getvalue()

    return array(array, index, index), generate


float_of: Any = intrinsic(_float_of)
bits_of: Any = intrinsic(_bits_of)
window: Any = intrinsic(_window)


# --- rows ------------------------------------------------------------------------------------------------------------


@compiled
def _load_row(src, at, head_stride, heads, size, padded, kind, row):
    """One token as float32 bits into `row` [heads * padded]; pad channels are left alone."""
    for h in range(heads):
        begin = at + h * head_stride
        into = window(row, h * padded, size)
        if kind == FLOAT32:
            whole = window(src[0], begin, size)
            for i in range(size):
                into[i] = whole[i]
            continue
        part = window(src[1], begin, size)
        if kind == BFLOAT16:
            for i in range(size):
                into[i] = np.uint32(np.uint32(part[i]) << np.uint32(16))
        else:
            for i in range(size):
                into[i] = _half_bits(np.uint32(part[i]))


@compiled
def _half_bits(half):
    """Float32 bits of a float16, without passing through subnormal float32 numbers."""
    shifted = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13))
    normal = np.uint32(shifted + np.uint32(112 << 23))
    tiny = float_of(np.uint32(shifted + np.uint32(113 << 23))) - float_of(np.uint32(113 << 23))
    bits = normal if shifted >= np.uint32(1 << 23) else bits_of(tiny)
    bits = np.uint32(shifted + np.uint32(224 << 23)) if shifted >= np.uint32(31 << 23) else bits
    return np.uint32(bits | ((half & np.uint32(0x8000)) << np.uint32(16)))


@compiled
def _to_bfloat16(bits):
    """Nearest bfloat16, ties to even, of a finite float32."""
    return np.uint32(np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@compiled
def _to_float16(bits):
    """Nearest float16, ties to even, of a finite float32; saturates at 65504."""
    size = np.uint32(bits & MAGNITUDE)
    size = np.uint32(0x477FE000) if size > np.uint32(0x477FE000) else size
    rounded = np.uint32(size + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1)))
    normal = np.uint32(np.uint32(rounded - np.uint32(112 << 23)) >> np.uint32(13))
    tiny = np.uint32(bits_of(float_of(size) + F_HALF) - np.uint32(0x3F000000))
    half = normal if size >= np.uint32(0x38800000) else tiny
    return np.uint32(half | ((bits & SIGN) >> np.uint32(16)))


@compiled
def _store_row(row, dst, at, head_stride, heads, size, padded, kind):
    """One token of float32 bits in `row` [heads * padded] into the page."""
    for h in range(heads):
        begin = at + h * head_stride
        part = window(row, h * padded, size)
        if kind == FLOAT32:
            whole = window(dst[0], begin, size)
            for i in range(size):
                whole[i] = part[i]
            continue
        into = window(dst[1], begin, size)
        if kind == BFLOAT16:
            for i in range(size):
                into[i] = _to_bfloat16(part[i])
        else:
            for i in range(size):
                into[i] = _to_float16(part[i])


# --- raw tokens ------------------------------------------------------------------------------------------------------


@compiled
def store_raw(src, strides, shape, kind, first, stop, out):
    """Tokens [first, stop) as 16-bit floats into the bytes `out`; NOT_FINITE or 0."""
    token_stride, head_stride = strides
    heads, size = shape
    row = np.empty(heads * size, np.uint32)
    bytes_per_row = 2 * heads * size
    for t in range(first, stop):
        _load_row(src, t * token_stride, head_stride, heads, size, size, kind, row)
        bad = False
        for i in range(heads * size):
            bad |= (row[i] & MAGNITUDE) > np.uint32(0x7E800000)
        if bad:
            return NOT_FINITE
        begin = (t - first) * bytes_per_row
        into = window(out, begin, bytes_per_row).view(np.uint16)
        if kind != FLOAT16:
            for i in range(heads * size):
                into[i] = _to_bfloat16(row[i])
        else:
            for i in range(heads * size):
                into[i] = _to_float16(row[i])
    return 0


@compiled
def load_raw(data, float16, shape, first, stop, dst, strides, kind):
    """Inverse of `store_raw`; NOT_FINITE if a value is not finite."""
    token_stride, head_stride = strides
    heads, size = shape
    largest = np.uint32(0)
    for t in range(first, stop):
        for h in range(heads):
            part = window(data, 2 * ((t - first) * heads + h) * size, 2 * size).view(np.uint16)
            begin = t * token_stride + h * head_stride
            if kind == FLOAT32:
                whole = window(dst[0], begin, size)
                for i in range(size):
                    bits = _widen(part[i], float16)
                    largest = max(largest, np.uint32(bits & MAGNITUDE))
                    whole[i] = bits
                continue
            into = window(dst[1], begin, size)
            if kind == BFLOAT16:
                for i in range(size):
                    bits = _widen(part[i], float16)
                    largest = max(largest, np.uint32(bits & MAGNITUDE))
                    into[i] = _to_bfloat16(bits)
            else:
                for i in range(size):
                    bits = _widen(part[i], float16)
                    largest = max(largest, np.uint32(bits & MAGNITUDE))
                    into[i] = _to_float16(bits)
    return NOT_FINITE if largest >= np.uint32(0x7F800000) else 0


@compiled
def _widen(half, float16):
    """Float32 bits of a raw value."""
    return _half_bits(np.uint32(half)) if float16 else np.uint32(np.uint32(half) << np.uint32(16))


# --- statistics and metadata -----------------------------------------------------------------------------------------


@compiled
def _chunk_count(first, stop, chunk):
    return (stop - 1) // chunk - first // chunk + 1


@compiled
def _chunk_bounds(first, stop, chunk, k):
    cut = (first // chunk + k) * chunk
    return max(first, cut), min(stop, cut + chunk)


@compiled
def _statistics(src, strides, shape, padded, kind, first, stop, least, most, mean):
    """Minimum, maximum and mean [chunks, width] of the coded tokens; false if a value is out of bounds."""
    token_stride, head_stride = strides
    heads, size = shape
    width = heads * padded
    bits = np.zeros(width, np.uint32)
    row = bits.view(np.float32)
    pivot = np.empty(width, np.float32)
    total = np.empty(width, np.float32)
    for k in range(len(least)):
        start, end = _chunk_bounds(first, stop, CHUNK, k)
        low, high, centre = least[k], most[k], mean[k]
        _load_row(src, start * token_stride, head_stride, heads, size, padded, kind, bits)
        for c in range(width):
            x = row[c]
            pivot[c] = x
            low[c] = x
            high[c] = x
            total[c] = F_ZERO
        for t in range(start + 1, end):
            _load_row(src, t * token_stride, head_stride, heads, size, padded, kind, bits)
            for c in range(width):
                x = row[c]
                total[c] += (x - pivot[c]) * F_WEIGHT
                low[c] = x if x < low[c] else low[c]
                high[c] = x if x > high[c] else high[c]
        scale = F_CHUNK / np.float32(end - start)
        good = True
        for c in range(width):
            centre[c] = pivot[c] + total[c] * scale
            good &= (low[c] >= -F_LIMIT) & (high[c] <= F_LIMIT) & (abs(total[c]) <= F_FINITE)
        if not good:
            return False
    return True


@compiled
def _extremes(src, strides, shape, kind, first, stop, chunk, least, most):
    """Minimum and maximum [chunks, width] of the coded tokens; false if a value is out of bounds."""
    token_stride, head_stride = strides
    heads, size = shape
    width = heads * size
    bits = np.empty(width, np.uint32)
    row = bits.view(np.float32)
    largest = np.zeros(width, np.uint32)
    for k in range(len(least)):
        start, end = _chunk_bounds(first, stop, chunk, k)
        low, high = least[k], most[k]
        _load_row(src, start * token_stride, head_stride, heads, size, size, kind, bits)
        for c in range(width):
            low[c] = row[c]
            high[c] = row[c]
            largest[c] = max(largest[c], np.uint32(bits[c] & MAGNITUDE))
        for t in range(start + 1, end):
            _load_row(src, t * token_stride, head_stride, heads, size, size, kind, bits)
            for c in range(width):
                x = row[c]
                low[c] = x if x < low[c] else low[c]
                high[c] = x if x > high[c] else high[c]
                largest[c] = max(largest[c], np.uint32(bits[c] & MAGNITUDE))
    good = True
    for c in range(width):
        good &= largest[c] <= np.uint32(0x7E800000)
    return good


@compiled
def _page_grid(least, most, low_bits, scale_bits, low, step, inverse):
    """Page fields of every channel and their 8-bit grid."""
    width = len(low)
    for c in range(width):
        lowest = least[0, c]
        highest = most[0, c]
        for k in range(1, len(least)):
            lowest = min(lowest, least[k, c])
            highest = max(highest, most[k, c])
        bits = bits_of(lowest)
        upper = np.uint32(bits >> np.uint32(16))
        if (bits & np.uint32(0xFFFF)) != 0 and lowest < F_ZERO:
            upper = np.uint32(upper + np.uint32(1))
        if upper == np.uint32(0x8000):
            upper = np.uint32(0)
        low_bits[c] = upper
        low[c] = float_of(np.uint32(upper << np.uint32(16)))
        extent = np.float32(highest - low[c])
        above = np.uint32(np.uint32(bits_of(extent) + np.uint32(0xFFFF)) >> np.uint32(16))
        if float_of(np.uint32(above << np.uint32(16))) < F_FLAT:
            above = np.uint32(0)
        scale_bits[c] = above
    _grid(scale_bits, L_NARROW, step, inverse)


@compiled
def _grid(scale_bits, top, step, inverse):
    for c in range(len(step)):
        scale = float_of(np.uint32(np.uint32(scale_bits[c]) << np.uint32(16)))
        step[c] = scale / top
        divisor = scale if scale != F_ZERO else top
        inverse[c] = top / divisor if scale != F_ZERO else F_ZERO


@compiled
def _clamp(code, top):
    code = code if code > F_ZERO else F_ZERO
    return code if code < top else top


@compiled
def _lynx_fields(least, most, mean, low, step, inverse, top, first, stop, first_code, second_code):
    """Codes of mu and sigma, as float32 whole numbers; true if the page should escape."""
    escape = False
    for k in range(len(least)):
        start, end = _chunk_bounds(first, stop, CHUNK, k)
        counts = end - start >= limits.ESCAPE_TOKENS
        for c in range(len(low)):
            code = _clamp(np.float32(np.floor((mean[k, c] - low[c]) * inverse[c] + F_HALF)), top)
            mu = low[c] + step[c] * code
            above = most[k, c] - mu
            below = mu - least[k, c]
            deviation = above if above > below else below
            length = _clamp(np.float32(np.ceil(deviation * inverse[c])), top)
            first_code[k, c] = code
            second_code[k, c] = length
            escape |= counts & _too_coarse(least[k, c], most[k, c], length, step[c])
    return escape


@compiled
def _affine_fields(least, most, low, step, inverse, top, first, stop, chunk, first_code, second_code):
    """Codes of the chunk minimum and range, as float32 whole numbers; true if the page should escape."""
    escape = False
    for k in range(len(least)):
        start, end = _chunk_bounds(first, stop, chunk, k)
        counts = end - start >= limits.ESCAPE_TOKENS
        for c in range(len(low)):
            code = _clamp(np.float32(np.floor((least[k, c] - low[c]) * inverse[c])), top)
            base = low[c] + step[c] * code
            length = _clamp(np.float32(np.ceil((most[k, c] - base) * inverse[c])), top)
            first_code[k, c] = code
            second_code[k, c] = length
            escape |= counts & _too_coarse(least[k, c], most[k, c], length, step[c])
    return escape


@compiled
def _too_coarse(least, most, length, step):
    spread = most - least
    extent = spread if spread > F_ZERO else abs(least)
    return (length > F_ZERO) & (extent < F_ESCAPE * step)


@compiled
def _write_fields(out, at, shape, padded, low_bits, scale_bits, first_code, second_code, wide):
    """Page and chunk fields into the stream; the offset behind them."""
    heads, size = shape
    for bits in (low_bits, scale_bits):
        for h in range(heads):
            part = bits[h * padded : h * padded + size]
            into = window(out, at, 2 * size).view(np.uint16)
            for i in range(size):
                into[i] = part[i]
            at += 2 * size
    for codes in (first_code, second_code):
        for k in range(len(codes)):
            for h in range(heads):
                part = codes[k, h * padded : h * padded + size]
                if wide:
                    into = window(out, at, 2 * size).view(np.uint16)
                    for i in range(size):
                        into[i] = np.uint16(part[i])
                    at += 2 * size
                else:
                    narrow = window(out, at, size)
                    for i in range(size):
                        narrow[i] = np.int32(part[i])
                    at += size
    return at


@compiled
def _read_page(data, at, shape, padded, low, scale_bits):
    """Page fields out of the stream; false if one is out of range."""
    heads, size = shape
    channels = heads * size
    good = True
    for h in range(heads):
        lows = data[at + 2 * h * size : at + 2 * (h + 1) * size].view(np.uint16)
        begin = at + 2 * channels + 2 * h * size
        scales = window(data, begin, 2 * size).view(np.uint16)
        for i in range(size):
            value = float_of(np.uint32(np.uint32(lows[i]) << np.uint32(16)))
            scale = float_of(np.uint32(np.uint32(scales[i]) << np.uint32(16)))
            low[h * padded + i] = value
            scale_bits[h * padded + i] = scales[i]
            good &= (abs(value) <= F_LIMIT) & (scale >= F_ZERO) & (value + scale <= F_TOP)
        if padded > size:
            low[h * padded + size] = F_ZERO
            scale_bits[h * padded + size] = 0
    return good


@compiled
def _read_chunk(data, at, k, chunks, shape, padded, wide, low, step, place, length):
    """Position and length of the fields of chunk k; `at` is the start of all chunk fields."""
    heads, size = shape
    channels = heads * size
    for which in range(2):
        begin = at + (which * chunks + k) * channels * (2 if wide else 1)
        for h in range(heads):
            lows = low[h * padded : h * padded + size]
            steps = step[h * padded : h * padded + size]
            into = (length if which else place)[h * padded : h * padded + size]
            if wide:
                codes = window(data, begin, 2 * size).view(np.uint16)
                for i in range(size):
                    into[i] = steps[i] * np.float32(codes[i])
                begin += 2 * size
            else:
                narrow = window(data, begin, size)
                for i in range(size):
                    into[i] = steps[i] * np.float32(narrow[i])
                begin += size
            if which == 0:
                for i in range(size):
                    into[i] = lows[i] + into[i]
            if padded > size:
                (length if which else place)[h * padded + size] = F_ZERO


# --- lynx ------------------------------------------------------------------------------------------------------------


@compiled
def encode_lynx(src, strides, shape, kind, first, stop, cells, places, fine_bytes, anchor, at, residual):
    """Metadata and nibbles of the coded tokens; NARROW, WIDE or NOT_FINITE.

    `places` gives the row of each coded token in the residual, or ~row behind the codes of the anchor. `at` is
    where the page fields begin; `fine_bytes` are left free between metadata and codes.
    """
    token_stride, head_stride = strides
    heads, size = shape
    padded = size + (size & 1)
    width = heads * padded
    chunks = _chunk_count(first, stop, CHUNK)
    least = np.empty((chunks, width), np.float32)
    most = np.empty((chunks, width), np.float32)
    mean = np.empty((chunks, width), np.float32)
    if not _statistics(src, strides, shape, padded, kind, first, stop, least, most, mean):
        return NOT_FINITE
    low_bits = np.empty(width, np.uint16)
    scale_bits = np.empty(width, np.uint16)
    low = np.empty(width, np.float32)
    step = np.empty(width, np.float32)
    inverse = np.empty(width, np.float32)
    _page_grid(least, most, low_bits, scale_bits, low, step, inverse)
    mu_code = np.empty((chunks, width), np.float32)
    sigma_code = np.empty((chunks, width), np.float32)
    wide = _lynx_fields(least, most, mean, low, step, inverse, L_NARROW, first, stop, mu_code, sigma_code)
    if wide:
        _grid(scale_bits, L_WIDE, step, inverse)
        _lynx_fields(least, most, mean, low, step, inverse, L_WIDE, first, stop, mu_code, sigma_code)
    at = _write_fields(anchor, at, shape, padded, low_bits, scale_bits, mu_code, sigma_code, wide) + fine_bytes

    bits = np.zeros(width, np.uint32)
    row = bits.view(np.float32)
    mu = np.empty(width, np.float32)
    per_unit = np.empty(width, np.float32)
    offset = np.empty(width, np.int32)
    cell = np.empty(width, np.uint16)
    found = np.empty(width, np.int32)
    sign = np.empty(width, np.uint8)
    codes = np.empty(width, np.uint8)
    pairs = codes.view(np.uint16)
    half = width // 2
    for k in range(chunks):
        for c in range(width):
            mu[c] = low[c] + step[c] * mu_code[k, c]
            sigma = step[c] * sigma_code[k, c]
            divisor = sigma if sigma != F_ZERO else F_UNIT
            per_unit[c] = F_UNIT / divisor if sigma != F_ZERO else F_ZERO
        start, end = _chunk_bounds(first, stop, CHUNK, k)
        for t in range(start, end):
            _load_row(src, t * token_stride, head_stride, heads, size, padded, kind, bits)
            for c in range(width):
                centred = row[c] - mu[c]
                units = abs(centred) * per_unit[c]
                units = units if units < F_UNIT else F_UNIT
                q = np.int32(units)
                offset[c] = q & OFFSET_MASK
                cell[c] = np.uint16(q >> SHIFT)
                sign[c] = np.uint8(15) if centred < F_ZERO else np.uint8(0)
            for c in range(width):
                found[c] = cells[cell[c]]
            for c in range(width):
                level = np.int32(np.int32(np.int32(found[c] + offset[c]) >> SHIFT) + np.int32(7))
                codes[c] = ((level >> 4) ^ sign[c]) | ((np.int32(7) - level) << 4)
            begin = (t - first) * half
            coarse = window(anchor, at + begin, half)
            place = places[t - first]
            fine = window(residual, place * half, half)
            if place < 0:
                fine = window(anchor, at + (stop - first + ~place) * half, half)
            for j in range(half):
                pair = np.uint32(pairs[j])
                coarse[j] = (pair & np.uint32(15)) | ((pair >> np.uint32(4)) & np.uint32(0xF0))
                fine[j] = ((pair >> np.uint32(4)) & np.uint32(15)) | ((pair >> np.uint32(8)) & np.uint32(0xF0))
    return WIDE if wide else NARROW


@compiled
def decode_lynx(anchor, at, residual, refine, shape, wide, first, stop, tables, places, fine_bytes, dst, strides, kind):
    """Coded tokens from the anchor, and from the residual too if `refine`; 0 or BAD_PAGE_FIELD.

    `tables` holds 16 values for the anchor alone, then 256 for both; `places` is as in `encode_lynx`, and
    `fine_bytes` stand between metadata and codes. Float32 rows that lie in one piece are made in place.
    """
    token_stride, head_stride = strides
    heads, size = shape
    padded = size + (size & 1)
    width = heads * padded
    chunks = _chunk_count(first, stop, CHUNK)
    low = np.empty(width, np.float32)
    step = np.empty(width, np.float32)
    inverse = np.empty(width, np.float32)
    scale_bits = np.empty(width, np.uint16)
    if not _read_page(anchor, at, shape, padded, low, scale_bits):
        return BAD_PAGE_FIELD
    _grid(scale_bits, L_WIDE if wide else L_NARROW, step, inverse)
    fields = at + 4 * heads * size
    at = fields + 2 * chunks * heads * size * (2 if wide else 1) + fine_bytes

    direct = kind == FLOAT32 and heads == 1 and padded == size
    scratch = np.empty(width, np.uint32)
    mu = np.empty(width, np.float32)
    sigma = np.empty(width, np.float32)
    codes = np.empty(width, np.uint8)
    pairs = codes.view(np.uint16)
    half = width // 2
    for k in range(chunks):
        _read_chunk(anchor, fields, k, chunks, shape, padded, wide, low, step, mu, sigma)
        start, end = _chunk_bounds(first, stop, CHUNK, k)
        for t in range(start, end):
            begin = (t - first) * half
            coarse = window(anchor, at + begin, half)
            table = window(tables, 0, 16)
            place = places[t - first]
            if refine or place < 0:
                table = window(tables, 16, 256)
                fine = window(residual, place * half, half)
                if place < 0:
                    fine = window(anchor, at + (stop - first + ~place) * half, half)
                for j in range(half):
                    a = np.uint32(coarse[j])
                    r = np.uint32(fine[j])
                    first_code = np.uint32(((a & np.uint32(15)) << np.uint32(4)) | (r & np.uint32(15)))
                    second_code = np.uint32((a & np.uint32(0xF0)) | (r >> np.uint32(4)))
                    pairs[j] = first_code | (second_code << np.uint32(8))
            else:
                for j in range(half):
                    a = np.uint32(coarse[j])
                    pairs[j] = (a & np.uint32(15)) | ((a & np.uint32(0xF0)) << np.uint32(4))
            bits = window(dst[0], t * token_stride, width) if direct else scratch
            row = bits.view(np.float32)
            for c in range(width):
                row[c] = table[codes[c]]
            for c in range(width):
                row[c] = mu[c] + sigma[c] * row[c]
            if not direct:
                _store_row(bits, dst, t * token_stride, head_stride, heads, size, padded, kind)
    return 0


# --- int8 and int4 ---------------------------------------------------------------------------------------------------


@compiled
def encode_affine(src, strides, shape, kind, first, stop, eight, out, at):
    """Metadata and codes of the coded tokens, 8 or 4 bits; NARROW, WIDE or NOT_FINITE."""
    token_stride, head_stride = strides
    heads, size = shape
    padded = size if eight else size + (size & 1)
    width = heads * padded
    chunks = _chunk_count(first, stop, CHUNK)
    least = np.empty((chunks, width), np.float32)
    most = np.empty((chunks, width), np.float32)
    mean = np.empty((chunks, width), np.float32)
    if not _statistics(src, strides, shape, padded, kind, first, stop, least, most, mean):
        return NOT_FINITE
    low_bits = np.empty(width, np.uint16)
    scale_bits = np.empty(width, np.uint16)
    low = np.empty(width, np.float32)
    step = np.empty(width, np.float32)
    inverse = np.empty(width, np.float32)
    _page_grid(least, most, low_bits, scale_bits, low, step, inverse)
    low_code = np.empty((chunks, width), np.float32)
    range_code = np.empty((chunks, width), np.float32)
    wide = _affine_fields(least, most, low, step, inverse, L_NARROW, first, stop, CHUNK, low_code, range_code)
    if wide:
        _grid(scale_bits, L_WIDE, step, inverse)
        _affine_fields(least, most, low, step, inverse, L_WIDE, first, stop, CHUNK, low_code, range_code)
    at = _write_fields(out, at, shape, padded, low_bits, scale_bits, low_code, range_code, wide)

    bits = np.zeros(width, np.uint32)
    row = bits.view(np.float32)
    base = np.empty(width, np.float32)
    per_unit = np.empty(width, np.float32)
    codes = np.empty(width, np.uint8)
    top = np.float32(255.0) if eight else np.float32(15.0)
    bytes_per_row = width if eight else width // 2
    for k in range(chunks):
        for c in range(width):
            base[c] = low[c] + step[c] * low_code[k, c]
            length = step[c] * range_code[k, c]
            divisor = length if length != F_ZERO else top
            per_unit[c] = top / divisor if length != F_ZERO else F_ZERO
        start, end = _chunk_bounds(first, stop, CHUNK, k)
        for t in range(start, end):
            _load_row(src, t * token_stride, head_stride, heads, size, padded, kind, bits)
            begin = at + (t - first) * bytes_per_row
            into = window(out, begin, bytes_per_row)
            target = into if eight else codes
            for c in range(width):
                level = _clamp((row[c] - base[c]) * per_unit[c] + F_HALF, top)
                target[c] = np.int32(level)
            if not eight:
                pairs = codes.view(np.uint16)
                for j in range(bytes_per_row):
                    pair = np.uint32(pairs[j])
                    into[j] = (pair & np.uint32(15)) | (pair >> np.uint32(4))
            if not eight and padded > size:
                for h in range(1, heads + 1):
                    into[h * padded // 2 - 1] &= np.uint8(15)
    return WIDE if wide else NARROW


@compiled
def decode_affine(data, at, eight, shape, wide, first, stop, dst, strides, kind):
    """Coded tokens from codes of 8 or 4 bits; 0 or BAD_PAGE_FIELD."""
    token_stride, head_stride = strides
    heads, size = shape
    padded = size if eight else size + (size & 1)
    width = heads * padded
    chunks = _chunk_count(first, stop, CHUNK)
    low = np.empty(width, np.float32)
    step = np.empty(width, np.float32)
    inverse = np.empty(width, np.float32)
    scale_bits = np.empty(width, np.uint16)
    if not _read_page(data, at, shape, padded, low, scale_bits):
        return BAD_PAGE_FIELD
    _grid(scale_bits, L_WIDE if wide else L_NARROW, step, inverse)
    fields = at + 4 * heads * size
    at = fields + 2 * chunks * heads * size * (2 if wide else 1)

    direct = kind == FLOAT32 and heads == 1 and padded == size
    scratch = np.empty(width, np.uint32)
    base = np.empty(width, np.float32)
    delta = np.empty(width, np.float32)
    codes = np.empty(width, np.uint8)
    top = np.float32(255.0) if eight else np.float32(15.0)
    bytes_per_row = width if eight else width // 2
    for k in range(chunks):
        _read_chunk(data, fields, k, chunks, shape, padded, wide, low, step, base, delta)
        for c in range(width):
            delta[c] = delta[c] / top
        start, end = _chunk_bounds(first, stop, CHUNK, k)
        for t in range(start, end):
            begin = at + (t - first) * bytes_per_row
            part = window(data, begin, bytes_per_row)
            bits = window(dst[0], t * token_stride, width) if direct else scratch
            row = bits.view(np.float32)
            if eight:
                for c in range(width):
                    row[c] = base[c] + delta[c] * np.float32(part[c])
            else:
                pairs = codes.view(np.uint16)
                for j in range(bytes_per_row):
                    a = np.uint32(part[j])
                    pairs[j] = (a & np.uint32(15)) | ((a & np.uint32(0xF0)) << np.uint32(4))
                for c in range(width):
                    row[c] = base[c] + delta[c] * np.float32(codes[c])
            if not direct:
                _store_row(bits, dst, t * token_stride, head_stride, heads, size, padded, kind)
    return 0


# --- nested ----------------------------------------------------------------------------------------------------------


@compiled
def encode_codes(src, strides, shape, kind, first, stop, chunk, out, at, codes):
    """Metadata into `out`, 8-bit codes [coded token][channel] into `codes`; NARROW, WIDE or NOT_FINITE."""
    token_stride, head_stride = strides
    heads, size = shape
    width = heads * size
    chunks = _chunk_count(first, stop, chunk)
    least = np.empty((chunks, width), np.float32)
    most = np.empty((chunks, width), np.float32)
    if not _extremes(src, strides, shape, kind, first, stop, chunk, least, most):
        return NOT_FINITE
    low_bits = np.empty(width, np.uint16)
    scale_bits = np.empty(width, np.uint16)
    low = np.empty(width, np.float32)
    step = np.empty(width, np.float32)
    inverse = np.empty(width, np.float32)
    _page_grid(least, most, low_bits, scale_bits, low, step, inverse)
    low_code = np.empty((chunks, width), np.float32)
    range_code = np.empty((chunks, width), np.float32)
    wide = _affine_fields(least, most, low, step, inverse, L_NARROW, first, stop, chunk, low_code, range_code)
    if wide:
        _grid(scale_bits, L_WIDE, step, inverse)
        _affine_fields(least, most, low, step, inverse, L_WIDE, first, stop, chunk, low_code, range_code)
    _write_fields(out, at, shape, size, low_bits, scale_bits, low_code, range_code, wide)

    bits = np.empty(width, np.uint32)
    row = bits.view(np.float32)
    base = np.empty(width, np.float32)
    per_unit = np.empty(width, np.float32)
    for k in range(chunks):
        for c in range(width):
            base[c] = low[c] + step[c] * low_code[k, c]
            length = step[c] * range_code[k, c]
            divisor = length if length != F_ZERO else L_NARROW
            per_unit[c] = L_NARROW / divisor if length != F_ZERO else F_ZERO
        start, end = _chunk_bounds(first, stop, chunk, k)
        for t in range(start, end):
            _load_row(src, t * token_stride, head_stride, heads, size, size, kind, bits)
            into = window(codes, (t - first) * width, width)
            for c in range(width):
                into[c] = np.int32(_clamp((row[c] - base[c]) * per_unit[c] + F_HALF, L_NARROW))
    return WIDE if wide else NARROW


@compiled
def decode_codes(data, at, shape, wide, first, stop, chunk, codes, tables, places, dst, strides, kind):
    """Coded tokens from codes [coded token][channel]; 0 or BAD_PAGE_FIELD.

    `tables` holds the position of each of the 256 codes twice: for ordinary tokens, and for those of negative place.
    """
    token_stride, head_stride = strides
    heads, size = shape
    width = heads * size
    chunks = _chunk_count(first, stop, chunk)
    low = np.empty(width, np.float32)
    step = np.empty(width, np.float32)
    inverse = np.empty(width, np.float32)
    scale_bits = np.empty(width, np.uint16)
    if not _read_page(data, at, shape, size, low, scale_bits):
        return BAD_PAGE_FIELD
    _grid(scale_bits, L_WIDE if wide else L_NARROW, step, inverse)
    fields = at + 4 * width

    direct = kind == FLOAT32 and heads == 1
    scratch = np.empty(width, np.uint32)
    base = np.empty(width, np.float32)
    delta = np.empty(width, np.float32)
    for k in range(chunks):
        _read_chunk(data, fields, k, chunks, shape, size, wide, low, step, base, delta)
        for c in range(width):
            delta[c] = delta[c] / L_NARROW
        start, end = _chunk_bounds(first, stop, chunk, k)
        for t in range(start, end):
            part = window(codes, (t - first) * width, width)
            table = window(tables, 0, 256) if places[t - first] >= 0 else window(tables, 256, 256)
            bits = window(dst[0], t * token_stride, width) if direct else scratch
            row = bits.view(np.float32)
            for c in range(width):
                row[c] = table[part[c]]
            for c in range(width):
                row[c] = base[c] + delta[c] * row[c]
            if not direct:
                _store_row(bits, dst, t * token_stride, head_stride, heads, size, size, kind)
    return 0


@compiled
def pack_codes(codes, tokens, heads, size, shift, bits, out):
    """The `bits` bits above bit `shift` of the codes [token][channel] of `tokens`, plane by plane, into rows."""
    at = 0
    for t in tokens:
        left = bits
        for width in (8, 4, 2, 1):
            if left < width:
                continue
            left -= width
            for h in range(heads):
                part = window(codes, (t * heads + h) * size, size)
                at += _pack_head(part, size, shift + left, width, out, at)


@compiled
def _pack_head(part, size, shift, width, out, at):
    """One plane of one head; the bytes written."""
    per = 8 // width
    whole = size // per
    into = window(out, at, -(-size // per))
    if width == 8:
        for j in range(size):
            into[j] = part[j]
    elif width == 4:
        pairs = window(part, 0, 2 * whole).view(np.uint16)
        for j in range(whole):
            v = np.uint32((np.uint32(pairs[j]) >> np.uint32(shift)) & np.uint32(0x0F0F))
            into[j] = v | (v >> np.uint32(4))
    elif width == 2:
        quads = window(part, 0, 4 * whole).view(np.uint32)
        for j in range(whole):
            v = np.uint32((quads[j] >> np.uint32(shift)) & np.uint32(0x03030303))
            v = np.uint32(v | (v >> np.uint32(6)))
            into[j] = v | (v >> np.uint32(12))
    else:
        octets = window(part, 0, 8 * whole).view(np.uint64)
        for j in range(whole):
            w = (octets[j] >> np.uint64(shift)) & np.uint64(0x0101010101010101)
            w = w | (w >> np.uint64(7))
            w = w | (w >> np.uint64(14))
            into[j] = w | (w >> np.uint64(28))
    if whole < len(into):
        last = np.uint32(0)
        for i in range(size - whole * per):
            code = np.uint32(part[whole * per + i]) >> np.uint32(shift)
            last |= np.uint32((code & np.uint32((1 << width) - 1)) << np.uint32(i * width))
        into[whole] = last
    return len(into)


@compiled
def unpack_codes(data, tokens, heads, size, shift, bits, codes):
    """Inverse of `pack_codes`: sets these bits in codes that have none of them."""
    at = 0
    for t in tokens:
        left = bits
        for width in (8, 4, 2, 1):
            if left < width:
                continue
            left -= width
            for h in range(heads):
                part = window(codes, (t * heads + h) * size, size)
                at += _unpack_head(data, at, size, shift + left, width, part)


@compiled
def _unpack_head(data, at, size, shift, width, part):
    """One plane of one head; the bytes read."""
    per = 8 // width
    whole = size // per
    source = window(data, at, -(-size // per))
    if width == 8:
        for j in range(size):
            part[j] = source[j]
    elif width == 4:
        pairs = window(part, 0, 2 * whole).view(np.uint16)
        for j in range(whole):
            a = np.uint32(source[j])
            v = np.uint32((a | (a << np.uint32(4))) & np.uint32(0x0F0F))
            pairs[j] |= v << np.uint32(shift)
    elif width == 2:
        quads = window(part, 0, 4 * whole).view(np.uint32)
        for j in range(whole):
            a = np.uint32(source[j])
            a = np.uint32((a | (a << np.uint32(12))) & np.uint32(0x000F000F))
            a = np.uint32((a | (a << np.uint32(6))) & np.uint32(0x03030303))
            quads[j] |= np.uint32(a << np.uint32(shift))
    else:
        octets = window(part, 0, 8 * whole).view(np.uint64)
        for j in range(whole):
            w = np.uint64(source[j])
            w = (w | (w << np.uint64(28))) & np.uint64(0x0000000F0000000F)
            w = (w | (w << np.uint64(14))) & np.uint64(0x0003000300030003)
            w = (w | (w << np.uint64(7))) & np.uint64(0x0101010101010101)
            octets[j] |= w << np.uint64(shift)
    if whole < len(source):
        last = np.uint32(source[whole])
        for i in range(size - whole * per):
            code = np.uint32((last >> np.uint32(i * width)) & np.uint32((1 << width) - 1))
            part[whole * per + i] |= code << np.uint32(shift)
    return len(source)
