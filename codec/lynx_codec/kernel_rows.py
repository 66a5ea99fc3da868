"""Compiled kernels: what all of them share, and the raw tokens.

Arrays are one-dimensional. `src` and `dst` are the page as bits, addressed by element strides: a pair of a uint32 array
(float32 pages) and a uint16 array (float16 and bfloat16), of which the one that `kind` does not mean is empty; so
each kernel is compiled once. Work goes row by row through float32 rows of `heads` x `padded` channels, where `padded`
is the head size rounded up to even for nibbles; a row stays in the first-level cache, and the innermost loops run over
its channels so that they become vector code. Table look-ups stand in loops of their own: mixed with arithmetic they
would be taken apart and put together again lane by lane. numba types integer expressions as 64-bit; the casts
keep them at 32 bits. There is no fastmath, so nothing is fused or reordered.
"""

# numba types these functions, from their arguments:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, var-annotated, arg-type"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from lynx_codec.jit import compiled

__all__ = [
    "BAD_PAGE_FIELD",
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "F_HALF",
    "F_ZERO",
    "MAGNITUDE",
    "NARROW",
    "NOT_FINITE",
    "SIGN",
    "WIDE",
    "bits_of",
    "float_of",
    "half_bits",
    "load_raw",
    "load_row",
    "store_raw",
    "store_row",
    "to_bfloat16",
    "to_float16",
    "window",
]

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
"""Kinds of page elements."""

NARROW, WIDE, NOT_FINITE = 0, 1, -1
"""Results of the encoders."""

BAD_PAGE_FIELD = 1
"""Result of a decoder that refused the page minimum or scale."""

F_ZERO = np.float32(0.0)
F_HALF = np.float32(0.5)

SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)


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


@compiled
def load_row(src, at, head_stride, heads, size, padded, kind, row):
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
                into[i] = half_bits(np.uint32(part[i]))


@compiled
def half_bits(half):
    """Float32 bits of a float16, without passing through subnormal float32 numbers."""
    shifted = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13))
    normal = np.uint32(shifted + np.uint32(112 << 23))
    tiny = float_of(np.uint32(shifted + np.uint32(113 << 23))) - float_of(np.uint32(113 << 23))
    bits = normal if shifted >= np.uint32(1 << 23) else bits_of(tiny)
    bits = np.uint32(shifted + np.uint32(224 << 23)) if shifted >= np.uint32(31 << 23) else bits
    return np.uint32(bits | ((half & np.uint32(0x8000)) << np.uint32(16)))


@compiled
def to_bfloat16(bits):
    """Nearest bfloat16, ties to even, of a finite float32."""
    return np.uint32(np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@compiled
def to_float16(bits):
    """Nearest float16, ties to even, of a finite float32; saturates at 65504."""
    size = np.uint32(bits & MAGNITUDE)
    size = np.uint32(0x477FE000) if size > np.uint32(0x477FE000) else size
    rounded = np.uint32(size + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1)))
    normal = np.uint32(np.uint32(rounded - np.uint32(112 << 23)) >> np.uint32(13))
    tiny = np.uint32(bits_of(float_of(size) + F_HALF) - np.uint32(0x3F000000))
    half = normal if size >= np.uint32(0x38800000) else tiny
    return np.uint32(half | ((bits & SIGN) >> np.uint32(16)))


@compiled
def store_row(row, dst, at, head_stride, heads, size, padded, kind):
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
                into[i] = to_bfloat16(part[i])
        else:
            for i in range(size):
                into[i] = to_float16(part[i])


@compiled
def store_raw(src, strides, shape, kind, first, stop, out):
    """Tokens [first, stop) as 16-bit floats into the bytes `out`; NOT_FINITE or 0."""
    token_stride, head_stride = strides
    heads, size = shape
    row = np.empty(heads * size, np.uint32)
    bytes_per_row = 2 * heads * size
    for t in range(first, stop):
        load_row(src, t * token_stride, head_stride, heads, size, size, kind, row)
        bad = False
        for i in range(heads * size):
            bad |= (row[i] & MAGNITUDE) > np.uint32(0x7E800000)
        if bad:
            return NOT_FINITE
        begin = (t - first) * bytes_per_row
        into = window(out, begin, bytes_per_row).view(np.uint16)
        if kind != FLOAT16:
            for i in range(heads * size):
                into[i] = to_bfloat16(row[i])
        else:
            for i in range(heads * size):
                into[i] = to_float16(row[i])
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
                    into[i] = to_bfloat16(bits)
            else:
                for i in range(size):
                    bits = _widen(part[i], float16)
                    largest = max(largest, np.uint32(bits & MAGNITUDE))
                    into[i] = to_float16(bits)
    return NOT_FINITE if largest >= np.uint32(0x7F800000) else 0


@compiled
def _widen(half, float16):
    """Float32 bits of a raw value."""
    return half_bits(np.uint32(half)) if float16 else np.uint32(np.uint32(half) << np.uint32(16))
