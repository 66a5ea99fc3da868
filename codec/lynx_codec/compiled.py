"""The compiled engine: hands pages to the kernels as flat bit arrays, whatever their strides."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from lynx_codec import kernels
from lynx_codec.base import PageShape
from lynx_codec.errors import CodecError
from lynx_codec.reference import check_finite, widen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lynx_codec.tables import LynxTables

__all__ = ["CompiledEngine"]

_KINDS = {"f": kernels.FLOAT32, "e": kernels.FLOAT16, "H": kernels.BFLOAT16}
_BITS: dict[int, type[np.unsignedinteger[Any]]] = {4: np.uint32, 2: np.uint16}
_NO_RESIDUAL = np.empty(0, dtype=np.uint8)
_NO_RESIDUAL.flags.writeable = False
_NO_ROWS = np.empty(0, dtype=np.uint32)

Strides = tuple[int, int]


class CompiledEngine:
    """The numba implementation. `Engine` in codecs.py states the contract."""

    def __init__(self) -> None:
        if sys.byteorder != "little":
            raise CodecError("the compiled kernels need a little-endian machine; use implementation='reference'")

    def warm_up(self) -> None:
        """Run every kernel once for every dtype, in both field widths."""
        from lynx_codec.tables import lynx_tables

        tables = lynx_tables(1.0)
        shape = PageShape(2, 1, 2)
        anchor, residual = np.zeros(512, dtype=np.uint8), np.zeros(4, dtype=np.uint8)
        for dtype in (np.float32, np.float16, np.uint16):
            page = np.zeros(shape.array_shape, dtype=dtype)
            self.store_raw(page, shape, 0, 2, anchor[:8])
            self.load_raw(anchor[:8], False, shape, 0, 2, page)
            for bits in (8, 4):
                self.encode_affine(page, shape, anchor, 32, bits)
                self.decode_affine(anchor, shape, 32, False, bits, page)
            self.encode_lynx(page, shape, anchor, residual, 64, tables)
            self.decode_lynx(anchor, residual, shape, 64, False, tables.full, page)

    def store_raw(self, page: NDArray[Any], shape: PageShape, first: int, stop: int, out: NDArray[np.uint8]) -> None:
        src, strides, dims = _flat(page, shape, pair=1)
        src.flags.writeable = False
        if kernels.store_raw(src, strides, dims, _KINDS[page.dtype.char], first, stop, out) != 0:
            _raise_not_finite(page, shape, first, stop)

    def load_raw(
        self, data: NDArray[np.uint8], float16: bool, shape: PageShape, first: int, stop: int, out: NDArray[Any]
    ) -> None:
        with _Target(out, shape, pair=1) as (dst, strides, dims):
            status = kernels.load_raw(
                _read_only(data), float16, dims, first, stop, dst, strides, _KINDS[out.dtype.char]
            )
        if status != 0:
            raise CodecError("raw tokens hold a value that is not finite")

    def encode_lynx(
        self,
        page: NDArray[Any],
        shape: PageShape,
        anchor: NDArray[np.uint8],
        residual: NDArray[np.uint8],
        base: int,
        tables: LynxTables,
    ) -> bool:
        src, strides, dims = _flat(page, shape, pair=2)
        src.flags.writeable = False
        first, stop = shape.raw_head, shape.tokens - shape.raw_tail
        at = base + 2 * (shape.raw_head + shape.raw_tail) * shape.channels
        kind = _KINDS[page.dtype.char]
        result = kernels.encode_lynx(src, strides, dims, kind, first, stop, tables.cells, anchor, at, residual)
        if result == kernels.NOT_FINITE:
            _raise_not_finite(page, shape, first, stop)
        return bool(result)

    def decode_lynx(
        self,
        anchor: NDArray[np.uint8],
        residual: NDArray[np.uint8] | None,
        shape: PageShape,
        base: int,
        wide: bool,
        table: NDArray[np.float32],
        out: NDArray[Any],
    ) -> None:
        first, stop = shape.raw_head, shape.tokens - shape.raw_tail
        at = base + 2 * (shape.raw_head + shape.raw_tail) * shape.channels
        refine = residual is not None
        fine = _NO_RESIDUAL if residual is None else _read_only(residual)
        with _Target(out, shape, pair=2) as (dst, strides, dims):
            status = kernels.decode_lynx(
                _read_only(anchor),
                at,
                fine,
                refine,
                dims,
                wide,
                first,
                stop,
                _read_only(table),
                dst,
                dst if dst.itemsize == 4 else _NO_ROWS,
                strides,
                _KINDS[out.dtype.char],
            )
        _check_status(status)

    def encode_affine(self, page: NDArray[Any], shape: PageShape, out: NDArray[np.uint8], base: int, bits: int) -> bool:
        src, strides, dims = _flat(page, shape, pair=1 if bits == 8 else 2)
        src.flags.writeable = False
        first, stop = shape.raw_head, shape.tokens - shape.raw_tail
        at = base + 2 * (shape.raw_head + shape.raw_tail) * shape.channels
        kind = _KINDS[page.dtype.char]
        result = kernels.encode_affine(src, strides, dims, kind, first, stop, bits == 8, out, at)
        if result == kernels.NOT_FINITE:
            _raise_not_finite(page, shape, first, stop)
        return bool(result)

    def decode_affine(
        self, data: NDArray[np.uint8], shape: PageShape, base: int, wide: bool, bits: int, out: NDArray[Any]
    ) -> None:
        first, stop = shape.raw_head, shape.tokens - shape.raw_tail
        at = base + 2 * (shape.raw_head + shape.raw_tail) * shape.channels
        with _Target(out, shape, pair=1 if bits == 8 else 2) as (dst, strides, dims):
            rows, kind = dst if dst.itemsize == 4 else _NO_ROWS, _KINDS[out.dtype.char]
            status = kernels.decode_affine(
                _read_only(data), at, bits == 8, dims, wide, first, stop, dst, rows, strides, kind
            )
        _check_status(status)


def _flat(page: NDArray[Any], shape: PageShape, pair: int) -> tuple[NDArray[Any], Strides, Strides]:
    """The page as a one-dimensional bit array with element strides (token, head) and its (heads, head size).

    Heads that lie next to each other are taken as one, unless a head would end inside a pair. Pages that no
    element strides can address are copied.
    """
    item = page.itemsize
    token, head, channel = page.strides
    heads, size = shape.heads, shape.head_size
    if page.flags.c_contiguous:
        flat = page.reshape(-1).view(_BITS[item])
        token, head = heads * size, size
    elif channel == item and token >= 0 and head >= 0 and token % item == 0 and head % item == 0:
        token, head = token // item, head // item
        span = (shape.tokens - 1) * token + (heads - 1) * head + size
        flat = as_strided(page.view(_BITS[item]), (span,), (item,))
    else:
        return _flat(np.ascontiguousarray(page), shape, pair)
    if size % pair == 0 and (head == size or heads == 1):
        heads, size = 1, heads * size
    return flat, (token, head), (heads, size)


class _Target:
    """The output page as `_flat` gives it; where that is a copy, leaving the context writes it back."""

    __slots__ = ("_copy", "_flat", "_out")

    def __init__(self, out: NDArray[Any], shape: PageShape, pair: int) -> None:
        self._out = out
        self._flat = _flat(out, shape, pair)
        self._copy = None
        if not np.may_share_memory(self._flat[0], out):
            self._copy = self._flat[0].view(out.dtype).reshape(shape.array_shape)

    def __enter__(self) -> tuple[NDArray[Any], Strides, Strides]:
        return self._flat

    def __exit__(self, *error: object) -> None:
        if self._copy is not None:
            self._out[...] = self._copy


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view: numba compiles read-only and writable arrays apart, so all inputs are made alike."""
    if array.flags.writeable:
        array = array[:]
        array.flags.writeable = False
    return array


def _check_status(status: int) -> None:
    if status == kernels.BAD_PAGE_FIELD:
        raise CodecError("a page minimum or scale is out of range")


def _raise_not_finite(page: NDArray[Any], shape: PageShape, first: int, stop: int) -> None:
    """Find what a kernel has refused, and name it."""
    rows = widen(page[first:stop].reshape(stop - first, shape.channels))
    check_finite(rows, first, shape.head_size)
    raise AssertionError("a kernel refused a page in which every value is finite")
