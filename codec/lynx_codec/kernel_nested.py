"""Compiled kernels of the nested codec: 8-bit codes, and their bits packed into planes."""

# numba types these functions, from their arguments:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, var-annotated, arg-type"

from __future__ import annotations

import numpy as np

from lynx_codec.jit import compiled
from lynx_codec.kernel_fields import (
    L_NARROW,
    L_WIDE,
    affine_fields,
    chunk_bounds,
    chunk_count,
    clamp,
    extremes,
    grid,
    page_grid,
    read_chunk,
    read_page,
    write_fields,
)
from lynx_codec.kernel_rows import (
    BAD_PAGE_FIELD,
    F_HALF,
    F_ZERO,
    FLOAT32,
    NARROW,
    NOT_FINITE,
    WIDE,
    load_row,
    store_row,
    window,
)

__all__ = [
    "decode_codes",
    "encode_codes",
    "pack_codes",
    "unpack_codes",
]


@compiled
def encode_codes(src, strides, shape, kind, first, stop, chunk, out, at, codes):
    """Metadata into `out`, 8-bit codes [coded token][channel] into `codes`; NARROW, WIDE or NOT_FINITE."""
    token_stride, head_stride = strides
    heads, size = shape
    width = heads * size
    chunks = chunk_count(first, stop, chunk)
    least = np.empty((chunks, width), np.float32)
    most = np.empty((chunks, width), np.float32)
    if not extremes(src, strides, shape, kind, first, stop, chunk, least, most):
        return NOT_FINITE
    low_bits = np.empty(width, np.uint16)
    scale_bits = np.empty(width, np.uint16)
    low = np.empty(width, np.float32)
    step = np.empty(width, np.float32)
    inverse = np.empty(width, np.float32)
    page_grid(least, most, low_bits, scale_bits, low, step, inverse)
    low_code = np.empty((chunks, width), np.float32)
    range_code = np.empty((chunks, width), np.float32)
    wide = affine_fields(least, most, low, step, inverse, L_NARROW, first, stop, chunk, low_code, range_code)
    if wide:
        grid(scale_bits, L_WIDE, step, inverse)
        affine_fields(least, most, low, step, inverse, L_WIDE, first, stop, chunk, low_code, range_code)
    write_fields(out, at, shape, size, low_bits, scale_bits, low_code, range_code, wide)

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
        start, end = chunk_bounds(first, stop, chunk, k)
        for t in range(start, end):
            load_row(src, t * token_stride, head_stride, heads, size, size, kind, bits)
            into = window(codes, (t - first) * width, width)
            for c in range(width):
                into[c] = np.int32(clamp((row[c] - base[c]) * per_unit[c] + F_HALF, L_NARROW))
    return WIDE if wide else NARROW


@compiled
def decode_codes(data, at, shape, wide, first, stop, chunk, codes, tables, places, dst, strides, kind):
    """Coded tokens from codes [coded token][channel]; 0 or BAD_PAGE_FIELD.

    `tables` holds the position of each of the 256 codes twice: for ordinary tokens, and for those of negative place.
    A table of equal steps, which all are but fitted ones, is computed instead of looked up: the sum is exact.
    """
    token_stride, head_stride = strides
    heads, size = shape
    width = heads * size
    chunks = chunk_count(first, stop, chunk)
    low = np.empty(width, np.float32)
    step = np.empty(width, np.float32)
    inverse = np.empty(width, np.float32)
    scale_bits = np.empty(width, np.uint16)
    if not read_page(data, at, shape, size, low, scale_bits):
        return BAD_PAGE_FIELD
    grid(scale_bits, L_WIDE if wide else L_NARROW, step, inverse)
    fields = at + 4 * width

    direct = kind == FLOAT32 and heads == 1
    scratch = np.empty(width, np.uint32)
    base = np.empty(width, np.float32)
    delta = np.empty(width, np.float32)
    even = np.ones(2, np.bool_)
    for i in range(512):
        even[i >> 8] &= tables[i] == tables[i & 256] + np.float32(i & 255)
    for k in range(chunks):
        read_chunk(data, fields, k, chunks, shape, size, wide, low, step, base, delta)
        for c in range(width):
            delta[c] = delta[c] / L_NARROW
        start, end = chunk_bounds(first, stop, chunk, k)
        for t in range(start, end):
            part = window(codes, (t - first) * width, width)
            which = 0 if places[t - first] >= 0 else 1
            table = window(tables, 256 * which, 256)
            bits = window(dst[0], t * token_stride, width) if direct else scratch
            row = bits.view(np.float32)
            if even[which]:
                origin = table[0]
                for c in range(width):
                    row[c] = base[c] + delta[c] * (np.float32(part[c]) + origin)
            else:
                for c in range(width):
                    row[c] = table[part[c]]
                for c in range(width):
                    row[c] = base[c] + delta[c] * row[c]
            if not direct:
                store_row(bits, dst, t * token_stride, head_stride, heads, size, size, kind)
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
    shift &= 7  # says no more than what is so, but lets the loops be compiled without 64-bit numbers
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
    shift &= 7  # says no more than what is so, but lets the loops be compiled without 64-bit numbers
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
