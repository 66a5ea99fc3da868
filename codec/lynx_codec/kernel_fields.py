"""Compiled kernels of the metadata: statistics of chunks, page and chunk fields, written and read."""

# numba types these functions, from their arguments:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, var-annotated, arg-type"

from __future__ import annotations

import numpy as np

from lynx_codec import limits
from lynx_codec.base import CHUNK_TOKENS
from lynx_codec.jit import compiled
from lynx_codec.kernel_rows import F_HALF, F_ZERO, MAGNITUDE, bits_of, float_of, load_row, window

__all__ = [
    "CHUNK",
    "L_NARROW",
    "L_WIDE",
    "affine_fields",
    "chunk_bounds",
    "chunk_count",
    "clamp",
    "extremes",
    "grid",
    "lynx_fields",
    "page_grid",
    "read_chunk",
    "read_page",
    "statistics",
    "write_fields",
]

CHUNK = CHUNK_TOKENS
F_WEIGHT = limits.MEAN_WEIGHT
F_CHUNK = limits.MEAN_CHUNK
F_LIMIT = limits.MAX_MAGNITUDE
F_TOP = limits.MAX_TOP
F_FLAT = limits.FLAT_SCALE
F_ESCAPE = limits.ESCAPE_STEPS
F_FINITE = np.float32(3.4e38)
L_NARROW = limits.MAX_LEVEL_NARROW
L_WIDE = limits.MAX_LEVEL_WIDE


@compiled
def chunk_count(first, stop, chunk):
    return (stop - 1) // chunk - first // chunk + 1


@compiled
def chunk_bounds(first, stop, chunk, k):
    cut = (first // chunk + k) * chunk
    return max(first, cut), min(stop, cut + chunk)


@compiled
def statistics(src, strides, shape, padded, kind, first, stop, least, most, mean):
    """Minimum, maximum and mean [chunks, width] of the coded tokens; false if a value is out of bounds."""
    token_stride, head_stride = strides
    heads, size = shape
    width = heads * padded
    bits = np.zeros(width, np.uint32)
    row = bits.view(np.float32)
    total = np.empty(width, np.float32)
    for k in range(len(least)):
        start, end = chunk_bounds(first, stop, CHUNK, k)
        low, high, centre = least[k], most[k], mean[k]
        load_row(src, start * token_stride, head_stride, heads, size, padded, kind, bits)
        for c in range(width):
            x = row[c]
            low[c] = x
            high[c] = x
            total[c] = x * F_WEIGHT
        for t in range(start + 1, end):
            load_row(src, t * token_stride, head_stride, heads, size, padded, kind, bits)
            for c in range(width):
                x = row[c]
                total[c] += x * F_WEIGHT
                low[c] = x if x < low[c] else low[c]
                high[c] = x if x > high[c] else high[c]
        scale = F_CHUNK / np.float32(end - start)
        good = True
        for c in range(width):
            centre[c] = total[c] * scale
            good &= (low[c] >= -F_LIMIT) & (high[c] <= F_LIMIT) & (abs(total[c]) <= F_FINITE)
        if not good:
            return False
    return True


@compiled
def extremes(src, strides, shape, kind, first, stop, chunk, least, most):
    """Minimum and maximum [chunks, width] of the coded tokens; false if a value is out of bounds."""
    token_stride, head_stride = strides
    heads, size = shape
    width = heads * size
    bits = np.empty(width, np.uint32)
    row = bits.view(np.float32)
    largest = np.zeros(width, np.uint32)
    for k in range(len(least)):
        start, end = chunk_bounds(first, stop, chunk, k)
        low, high = least[k], most[k]
        load_row(src, start * token_stride, head_stride, heads, size, size, kind, bits)
        for c in range(width):
            low[c] = row[c]
            high[c] = row[c]
            largest[c] = max(largest[c], np.uint32(bits[c] & MAGNITUDE))
        for t in range(start + 1, end):
            load_row(src, t * token_stride, head_stride, heads, size, size, kind, bits)
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
def page_grid(least, most, low_bits, scale_bits, low, step, inverse):
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
    grid(scale_bits, L_NARROW, step, inverse)


@compiled
def grid(scale_bits, top, step, inverse):
    for c in range(len(step)):
        scale = float_of(np.uint32(np.uint32(scale_bits[c]) << np.uint32(16)))
        step[c] = scale / top
        divisor = scale if scale != F_ZERO else top
        inverse[c] = top / divisor if scale != F_ZERO else F_ZERO


@compiled
def clamp(code, top):
    code = code if code > F_ZERO else F_ZERO
    return code if code < top else top


@compiled
def lynx_fields(least, most, mean, low, step, inverse, top, first, stop, first_code, second_code):
    """Codes of mu and sigma, as float32 whole numbers; true if the page should escape."""
    escape = False
    for k in range(len(least)):
        start, end = chunk_bounds(first, stop, CHUNK, k)
        counts = end - start >= limits.ESCAPE_TOKENS
        for c in range(len(low)):
            code = clamp(np.float32(np.floor((mean[k, c] - low[c]) * inverse[c] + F_HALF)), top)
            mu = low[c] + step[c] * code
            above = most[k, c] - mu
            below = mu - least[k, c]
            deviation = above if above > below else below
            length = clamp(np.float32(np.ceil(deviation * inverse[c])), top)
            first_code[k, c] = code
            second_code[k, c] = length
            escape |= counts & _too_coarse(least[k, c], most[k, c], length, step[c])
    return escape


@compiled
def affine_fields(least, most, low, step, inverse, top, first, stop, chunk, first_code, second_code):
    """Codes of the chunk minimum and range, as float32 whole numbers; true if the page should escape."""
    escape = False
    for k in range(len(least)):
        start, end = chunk_bounds(first, stop, chunk, k)
        counts = end - start >= limits.ESCAPE_TOKENS
        for c in range(len(low)):
            code = clamp(np.float32(np.floor((least[k, c] - low[c]) * inverse[c])), top)
            base = low[c] + step[c] * code
            length = clamp(np.float32(np.ceil((most[k, c] - base) * inverse[c])), top)
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
def write_fields(out, at, shape, padded, low_bits, scale_bits, first_code, second_code, wide):
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
def read_page(data, at, shape, padded, low, scale_bits):
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
def read_chunk(data, at, k, chunks, shape, padded, wide, low, step, place, length):
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
