"""Compiled kernels of the lynx codec."""

# numba types these functions, from their arguments:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, var-annotated, arg-type"

from __future__ import annotations

import numpy as np

from lynx_codec.jit import compiled
from lynx_codec.kernel_fields import (
    CHUNK,
    L_NARROW,
    L_WIDE,
    chunk_bounds,
    chunk_count,
    grid,
    lynx_fields,
    page_grid,
    read_chunk,
    read_page,
    statistics,
    write_fields,
)
from lynx_codec.kernel_rows import (
    BAD_PAGE_FIELD,
    F_ZERO,
    FLOAT32,
    NARROW,
    NOT_FINITE,
    WIDE,
    load_row,
    store_row,
    window,
)
from lynx_codec.tables import CELL_SHIFT, UNIT

__all__ = [
    "decode_lynx",
    "encode_lynx",
]

SHIFT = CELL_SHIFT
OFFSET_MASK = np.int32((1 << CELL_SHIFT) - 1)
F_UNIT = np.float32(UNIT)


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
    mu_code = np.empty((chunks, width), np.float32)
    sigma_code = np.empty((chunks, width), np.float32)
    wide = lynx_fields(least, most, mean, low, step, inverse, L_NARROW, first, stop, mu_code, sigma_code)
    if wide:
        grid(scale_bits, L_WIDE, step, inverse)
        lynx_fields(least, most, mean, low, step, inverse, L_WIDE, first, stop, mu_code, sigma_code)
    at = write_fields(anchor, at, shape, padded, low_bits, scale_bits, mu_code, sigma_code, wide) + fine_bytes

    bits = np.zeros(width, np.uint32)
    row = bits.view(np.float32)
    mu = np.empty(width, np.float32)
    per_unit = np.empty(width, np.float64)  # products with float32 are exact
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
            per_unit[c] = np.float32(F_UNIT / divisor) if sigma != F_ZERO else F_ZERO
        start, end = chunk_bounds(first, stop, CHUNK, k)
        for t in range(start, end):
            load_row(src, t * token_stride, head_stride, heads, size, padded, kind, bits)
            for c in range(width):
                centred = row[c] - mu[c]
                units = np.float64(abs(centred)) * per_unit[c]
                q = np.int32(units if units < F_UNIT else np.float64(F_UNIT))
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
    chunks = chunk_count(first, stop, CHUNK)
    low = np.empty(width, np.float32)
    step = np.empty(width, np.float32)
    inverse = np.empty(width, np.float32)
    scale_bits = np.empty(width, np.uint16)
    if not read_page(anchor, at, shape, padded, low, scale_bits):
        return BAD_PAGE_FIELD
    grid(scale_bits, L_WIDE if wide else L_NARROW, step, inverse)
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
        read_chunk(anchor, fields, k, chunks, shape, padded, wide, low, step, mu, sigma)
        start, end = chunk_bounds(first, stop, CHUNK, k)
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
                store_row(bits, dst, t * token_stride, head_stride, heads, size, padded, kind)
    return 0
