"""The compiled engine: hands pages to the kernels as flat bit arrays, whatever their strides."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from lynx_codec import exact_kernels, kernel_affine, kernel_lynx, kernel_nested, kernel_rows
from lynx_codec.base import CHUNK_TOKENS, PageShape
from lynx_codec.errors import CodecError
from lynx_codec.exact import (
    BFLOAT16_FORMAT,
    CLOSED,
    EXACT_HEADER_BYTES,
    FLOAT16_FORMAT,
    OPEN,
    PLAIN,
    exact_bound,
    read_exact_header,
    write_exact_header,
)
from lynx_codec.layout import BF16_ID, HEADER_BYTES, INT8_ID, LYNX_HEADER_BYTES, LYNX_ID, NESTED_ID
from lynx_codec.reference import check_finite, widen
from lynx_codec.tables import LynxTables, lynx_tables

__all__ = ["CompiledEngine"]


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view: numba compiles read-only and writable arrays apart, so all inputs are made alike."""
    if array.flags.writeable:
        array = array[:]
        array.flags.writeable = False
    return array


_KINDS = {"f": kernel_rows.FLOAT32, "e": kernel_rows.FLOAT16, "H": kernel_rows.BFLOAT16}
_BITS: dict[int, type[np.unsignedinteger[Any]]] = {4: np.uint32, 2: np.uint16}
_EMPTY: dict[int, NDArray[Any]] = {item: np.empty(0, dtype=bits) for item, bits in _BITS.items()}
_EMPTY_SOURCE = {item: _read_only(array) for item, array in _EMPTY.items()}
_EXACT_ERRORS = {
    exact_kernels.TOO_SHORT: "the exact stream is too short for the page",
    exact_kernels.TOO_LONG: "the exact stream is longer than the page takes",
    exact_kernels.BAD_KIND: "the exact stream names an unknown kind of flat channel",
    exact_kernels.LEFT_CELL: "the exact stream leaves the cell of a code",
}
_FIRST = _read_only(np.zeros(1, dtype=np.int32))
_NO_RESIDUAL = np.empty(0, dtype=np.uint8)
_NO_RESIDUAL.flags.writeable = False

Strides = tuple[int, int]
Pair = tuple[NDArray[Any], NDArray[Any]]


class CompiledEngine:
    """The numba implementation. `Engine` in engine.py states the contract."""

    def __init__(self) -> None:
        if sys.byteorder != "little":
            raise CodecError("the compiled kernels need a little-endian machine; use implementation='reference'")

    def warm_up(self, codec_id: int) -> None:
        """Run the kernels of one codec; each is compiled once for all dtypes."""
        tables = lynx_tables(1.0)
        shape = PageShape(2, 1, 2)
        page = np.zeros(shape.array_shape, dtype=np.float32)
        anchor, residual = np.zeros(512, dtype=np.uint8), np.zeros(4, dtype=np.uint8)
        tokens = np.arange(2, dtype=np.int32)
        self.store_raw(page, shape, 0, 2, anchor[:8])
        self.load_raw(anchor[:8], False, shape, 0, 2, page)
        if codec_id == LYNX_ID:
            self.encode_lynx(page, shape, anchor, residual, LYNX_HEADER_BYTES, tables, tokens)
            coarse = tables.centroids.astype(np.float32)
            self.decode_lynx(anchor, residual, shape, LYNX_HEADER_BYTES, False, coarse, tables.full, tokens, page)
        elif codec_id == NESTED_ID:
            codes, _ = self.encode_codes(page, shape, CHUNK_TOKENS, anchor, HEADER_BYTES)
            self.pack(codes, tokens, shape, 4, 4, residual[:2])
            self.unpack(residual[:2], tokens, shape, 4, 4, codes)
            tables_of_codes = np.zeros((2, 256), dtype=np.float32)
            self.decode_codes(anchor, codes, shape, CHUNK_TOKENS, HEADER_BYTES, False, tables_of_codes, tokens, page)
        elif codec_id != BF16_ID:
            bits = 8 if codec_id == INT8_ID else 4
            self.encode_affine(page, shape, anchor, HEADER_BYTES, bits)
            self.decode_affine(anchor, shape, HEADER_BYTES, False, bits, page)

    def store_raw(self, page: NDArray[Any], shape: PageShape, first: int, stop: int, out: NDArray[np.uint8]) -> None:
        src, strides, dims = _source(page, shape, pair=1)
        if kernel_rows.store_raw(src, strides, dims, _KINDS[page.dtype.char], first, stop, out) != 0:
            _raise_not_finite(page, shape, first, stop)

    def load_raw(
        self, data: NDArray[np.uint8], float16: bool, shape: PageShape, first: int, stop: int, out: NDArray[Any]
    ) -> None:
        with _Target(out, shape, pair=1) as (dst, strides, dims):
            status = kernel_rows.load_raw(
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
        places: NDArray[np.int32],
    ) -> bool:
        src, strides, dims = _source(page, shape, pair=2)
        first, stop = shape.raw_head, shape.tokens - shape.raw_tail
        at = base + 2 * (shape.raw_head + shape.raw_tail) * shape.channels
        kind = _KINDS[page.dtype.char]
        extra = (tables.cells, _read_only(places), 2 * shape.fine)
        result = kernel_lynx.encode_lynx(src, strides, dims, kind, first, stop, *extra, anchor, at, residual)
        if result == kernel_rows.NOT_FINITE:
            _raise_not_finite(page, shape, first, stop)
        return bool(result)

    def decode_lynx(
        self,
        anchor: NDArray[np.uint8],
        residual: NDArray[np.uint8] | None,
        shape: PageShape,
        base: int,
        wide: bool,
        coarse: NDArray[np.float32],
        full: NDArray[np.float32],
        places: NDArray[np.int32],
        out: NDArray[Any],
    ) -> None:
        first, stop = shape.raw_head, shape.tokens - shape.raw_tail
        at = base + 2 * (shape.raw_head + shape.raw_tail) * shape.channels
        refine = residual is not None
        fine = _NO_RESIDUAL if residual is None else _read_only(residual)
        with _Target(out, shape, pair=2) as (dst, strides, dims):
            status = kernel_lynx.decode_lynx(
                _read_only(anchor),
                at,
                fine,
                refine,
                dims,
                wide,
                first,
                stop,
                _read_only(np.concatenate([coarse, full])),
                _read_only(places),
                2 * shape.fine,
                dst,
                strides,
                _KINDS[out.dtype.char],
            )
        _check_status(status)

    def encode_affine(self, page: NDArray[Any], shape: PageShape, out: NDArray[np.uint8], base: int, bits: int) -> bool:
        src, strides, dims = _source(page, shape, pair=1 if bits == 8 else 2)
        first, stop = shape.raw_head, shape.tokens - shape.raw_tail
        at = base + 2 * (shape.raw_head + shape.raw_tail) * shape.channels
        kind = _KINDS[page.dtype.char]
        result = kernel_affine.encode_affine(src, strides, dims, kind, first, stop, bits == 8, out, at)
        if result == kernel_rows.NOT_FINITE:
            _raise_not_finite(page, shape, first, stop)
        return bool(result)

    def decode_affine(
        self, data: NDArray[np.uint8], shape: PageShape, base: int, wide: bool, bits: int, out: NDArray[Any]
    ) -> None:
        first, stop = shape.raw_head, shape.tokens - shape.raw_tail
        at = base + 2 * (shape.raw_head + shape.raw_tail) * shape.channels
        with _Target(out, shape, pair=1 if bits == 8 else 2) as (dst, strides, dims):
            kind = _KINDS[out.dtype.char]
            status = kernel_affine.decode_affine(
                _read_only(data), at, bits == 8, dims, wide, first, stop, dst, strides, kind
            )
        _check_status(status)

    def encode_codes(
        self, page: NDArray[Any], shape: PageShape, chunk: int, out: NDArray[np.uint8], base: int
    ) -> tuple[NDArray[np.uint8], bool]:
        src, strides, dims = _source(page, shape, pair=1)
        first, stop = shape.raw_head, shape.tokens - shape.raw_tail
        at = base + 2 * (shape.raw_head + shape.raw_tail) * shape.channels
        codes = np.empty((shape.coded_tokens, shape.channels), dtype=np.uint8)
        kind = _KINDS[page.dtype.char]
        result = kernel_nested.encode_codes(src, strides, dims, kind, first, stop, chunk, out, at, codes.reshape(-1))
        if result == kernel_rows.NOT_FINITE:
            _raise_not_finite(page, shape, first, stop)
        return codes, bool(result)

    def decode_codes(
        self,
        data: NDArray[np.uint8],
        codes: NDArray[np.uint8],
        shape: PageShape,
        chunk: int,
        base: int,
        wide: bool,
        tables: NDArray[np.float32],
        places: NDArray[np.int32],
        out: NDArray[Any],
    ) -> None:
        first, stop = shape.raw_head, shape.tokens - shape.raw_tail
        at = base + 2 * (shape.raw_head + shape.raw_tail) * shape.channels
        flat_codes, flat_tables = _read_only(codes.reshape(-1)), _read_only(tables.reshape(-1))
        with _Target(out, shape, pair=1) as (dst, strides, dims):
            kind = _KINDS[out.dtype.char]
            what = (dims, wide, first, stop, chunk, flat_codes, flat_tables, _read_only(places))
            status = kernel_nested.decode_codes(_read_only(data), at, *what, dst, strides, kind)
        _check_status(status)

    def pack(
        self,
        codes: NDArray[np.uint8],
        tokens: NDArray[np.int32],
        shape: PageShape,
        shift: int,
        bits: int,
        out: NDArray[np.uint8],
    ) -> None:
        rows, heads, size = _merged(tokens, shape, bits)
        kernel_nested.pack_codes(_read_only(codes.reshape(-1)), _read_only(rows), heads, size, shift, bits, out)

    def unpack(
        self,
        data: NDArray[np.uint8],
        tokens: NDArray[np.int32],
        shape: PageShape,
        shift: int,
        bits: int,
        codes: NDArray[np.uint8],
    ) -> None:
        rows, heads, size = _merged(tokens, shape, bits)
        flat = codes.reshape(-1)
        kernel_nested.unpack_codes(_read_only(data), _read_only(rows), heads, size, shift, bits, flat)

    def encode_exact(
        self,
        bits: NDArray[np.uint16],
        codes: NDArray[np.uint8],
        base: NDArray[np.float32],
        length: NDArray[np.float32],
        starts: NDArray[np.int64],
        out: NDArray[np.uint8],
        *,
        float16: bool,
    ) -> int:
        bound = exact_bound(bits.size)
        known = [_read_only(array) for array in (bits, codes, base, length, starts)]
        for mode in (CLOSED, OPEN):
            cut, size = exact_kernels.encode_cells(*known, float16, mode, out[:bound], EXACT_HEADER_BYTES)
            if cut == exact_kernels.NO_ROOM:
                break
            if cut != exact_kernels.OUTSIDE:
                write_exact_header(out, mode, cut)
                return int(EXACT_HEADER_BYTES + size)
        write_exact_header(out, PLAIN, 0)
        out[EXACT_HEADER_BYTES:bound].view(np.uint16)[:] = bits.reshape(-1)
        return bound

    def decode_exact(
        self,
        data: NDArray[np.uint8],
        codes: NDArray[np.uint8],
        base: NDArray[np.float32],
        length: NDArray[np.float32],
        starts: NDArray[np.int64],
        out: NDArray[np.uint16],
        *,
        float16: bool,
    ) -> None:
        mode, cut = read_exact_header(data, out.size)
        if mode == PLAIN:
            out[...] = data[cut:].view(np.uint16).reshape(out.shape)
        else:
            known = [_read_only(array) for array in (codes, base, length, starts)]
            place = (_read_only(data), EXACT_HEADER_BYTES, cut)
            status = exact_kernels.decode_cells(*place, *known, float16, mode, out)
            if status:
                raise CodecError(_EXACT_ERRORS[status])
        form = FLOAT16_FORMAT if float16 else BFLOAT16_FORMAT
        if exact_kernels.largest(out) > form.largest:
            raise CodecError("the exact stream holds a value that is not finite")


def _merged(tokens: NDArray[np.int32], shape: PageShape, bits: int) -> tuple[NDArray[np.int32], int, int]:
    """Rows, heads and head size as which the kernels may take `tokens` to write the same bytes with longer loops.

    Heads that end at whole bytes are taken as one; so are all the tokens of a page, if there is one plane only.
    """
    heads, size = shape.heads, shape.head_size
    if size % 8 == 0:
        heads, size = 1, heads * size
        if len(tokens) == shape.coded_tokens and bits in (1, 2, 4, 8):
            return _FIRST, heads, size * len(tokens)
    return tokens, heads, size


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


def _source(page: NDArray[Any], shape: PageShape, pair: int) -> tuple[Pair, Strides, Strides]:
    """`_flat` of an input, as the kernels want it."""
    flat, strides, dims = _flat(page, shape, pair)
    flat.flags.writeable = False
    return _pair(flat, _EMPTY_SOURCE), strides, dims


def _pair(flat: NDArray[Any], empty: dict[int, NDArray[Any]]) -> Pair:
    """The uint32 and the uint16 array of a page, one of them empty."""
    return (flat, empty[2]) if flat.itemsize == 4 else (empty[4], flat)


class _Target:
    """The output page as `_flat` gives it; where that is a copy, leaving the context writes it back."""

    __slots__ = ("_copy", "_out", "_parts")

    def __init__(self, out: NDArray[Any], shape: PageShape, pair: int) -> None:
        self._out = out
        flat, strides, dims = _flat(out, shape, pair)
        self._parts = (_pair(flat, _EMPTY), strides, dims)
        self._copy = None
        if not np.may_share_memory(flat, out):
            self._copy = flat.view(out.dtype).reshape(shape.array_shape)

    def __enter__(self) -> tuple[Pair, Strides, Strides]:
        return self._parts

    def __exit__(self, *error: object) -> None:
        if self._copy is not None:
            self._out[...] = self._copy


def _check_status(status: int) -> None:
    if status == kernel_rows.BAD_PAGE_FIELD:
        raise CodecError("a page minimum or scale is out of range")


def _raise_not_finite(page: NDArray[Any], shape: PageShape, first: int, stop: int) -> None:
    """Find what a kernel has refused, and name it."""
    rows = widen(page[first:stop].reshape(stop - first, shape.channels))
    check_finite(rows, first, shape.head_size)
    raise AssertionError("a kernel refused a page in which every value is finite")
