"""Compiled kernels of `int8` and `int4`."""

# numba types these functions, from their arguments:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, var-annotated, arg-type"

from __future__ import annotations

import numpy as np

from lynx_codec.jit import compiled
from lynx_codec.kernel_fields import (
    CHUNK,
    L_NARROW,
    L_WIDE,
    affine_fields,
    chunk_bounds,
    chunk_count,
    clamp,
    grid,
    page_grid,
    read_chunk,
    read_page,
    statistics,
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
    "decode_affine",
    "encode_affine",
]


@compiled
def encode_affine(src, strides, shape, kind, first, stop, eight, out, at):
    """Metadata and codes of the coded tokens, 8 or 4 bits; NARROW, WIDE or NOT_FINITE."""
    token_stride, head_stride = strides
    heads, size = shape
    padded = size if eight else size + (size & 1)
    width = heads * padded
    chunks = chunk_count(first, stop, CHUNK)
    least = np.empty((chunks, width), np.float32)
    most = np.empty((chunks, width), np.float32)
    mean = np.empty((chunks, width), np.float32)
    if not statistics(src, strides, shape, padded, kind, first, stop, least, most, mean):
        return NOT_FINITE
    low_bits = np.empty(width, np.uint16)
    scale_bits = np.empty(width, np.uint16)
    low = np.empty(width, np.float32)
    step = np.empty(width, np.float32)
    inverse = np.empty(width, np.float32)
    page_grid(least, most, low_bits, scale_bits, low, step, inverse)
    low_code = np.empty((chunks, width), np.float32)
    range_code = np.empty((chunks, width), np.float32)
    wide = affine_fields(least, most, low, step, inverse, L_NARROW, first, stop, CHUNK, low_code, range_code)
    if wide:
        grid(scale_bits, L_WIDE, step, inverse)
        affine_fields(least, most, low, step, inverse, L_WIDE, first, stop, CHUNK, low_code, range_code)
    at = write_fields(out, at, shape, padded, low_bits, scale_bits, low_code, range_code, wide)

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
        start, end = chunk_bounds(first, stop, CHUNK, k)
        for t in range(start, end):
            load_row(src, t * token_stride, head_stride, heads, size, padded, kind, bits)
            begin = at + (t - first) * bytes_per_row
            into = window(out, begin, bytes_per_row)
            target = into if eight else codes
            for c in range(width):
                level = clamp((row[c] - base[c]) * per_unit[c] + F_HALF, top)
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
    chunks = chunk_count(first, stop, CHUNK)
    low = np.empty(width, np.float32)
    step = np.empty(width, np.float32)
    inverse = np.empty(width, np.float32)
    scale_bits = np.empty(width, np.uint16)
    if not read_page(data, at, shape, padded, low, scale_bits):
        return BAD_PAGE_FIELD
    grid(scale_bits, L_WIDE if wide else L_NARROW, step, inverse)
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
        read_chunk(data, fields, k, chunks, shape, padded, wide, low, step, base, delta)
        for c in range(width):
            delta[c] = delta[c] / top
        start, end = chunk_bounds(first, stop, CHUNK, k)
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
                store_row(bits, dst, t * token_stride, head_stride, heads, size, padded, kind)
    return 0
