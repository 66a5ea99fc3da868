"""Cut, select and extend encoded pages by copying their bytes.

A codec whose streams are a header and tables of rows describes them with a `PageFormat`; what is here then works for
it. No value is decoded, so what is left of a page decodes to the same floats as before.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from lynx_codec.errors import CodecError
from lynx_codec.layout import FLAGS_AT, RAW_AT, valid_positions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lynx_codec.base import PageShape

    U8 = NDArray[np.uint8]

__all__ = ["PageFormat", "Rows", "Section", "add_raw", "cut", "fine_tokens", "take_heads"]

Rows = Literal["token", "raw", "page", "chunk", "coded", "coarse", "fine", "position"]
"""What a row of a section is: any token, a raw one, the page (one row), a chunk, a coded token, one of these that is
not fine, one that is, the position of one that is (u16, the same for all heads)."""

_DIMS = struct.Struct("<HHHHH")
_DIMS_AT = 8
_FINE = struct.Struct("<H")
_FINE_AT = 24


@dataclass(frozen=True, slots=True)
class Section:
    """A table inside a stream.

    Attributes:
        rows: what its rows are.
        bits: bits of a value in each of the planes of a row. A plane holds its heads one after another, a whole number
            of bytes each.
    """

    rows: Rows
    bits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What the streams of an encoded page are made of.

    Attributes:
        header_bytes: header of stream 0, which names the shape.
        chunk: tokens of a chunk, counted from the first token of the page; 1 where tokens share nothing.
        streams: the sections of each stream, in order.
    """

    header_bytes: int
    chunk: int
    streams: tuple[tuple[Section, ...], ...]


def fine_tokens(page: PageFormat, streams: Sequence[bytes], shape: PageShape) -> NDArray[np.int32] | None:
    """Positions of the fine tokens; None if the format does not name them.

    Raises:
        CodecError: they are not positions of coded tokens in their order.
    """
    for section, table in _tables(page, streams[:1], shape)[0]:
        if section.rows == "position":
            found = table.reshape(-1).view("<u2").astype(np.int32)
            if not valid_positions(found, shape):
                raise CodecError("positions of fine tokens must increase and name tokens that are not raw")
            return found
    return None


def cut(page: PageFormat, streams: Sequence[bytes], shape: PageShape, start: int, left: PageShape) -> tuple[bytes, ...]:
    """The page of the tokens from `start` on that `left` has room for.

    `start` is a multiple of the chunk, or no coded token is left.
    """
    stop = start + left.tokens
    fine = fine_tokens(page, streams, shape)
    kept = 0 if fine is None else int(np.count_nonzero((fine >= start) & (fine < stop)))
    if fine is not None and kept != left.fine:
        raise CodecError(f"tokens {start} to {stop} have {kept} fine ones, not {left.fine}")
    if start % page.chunk and left.coded_tokens:
        raise CodecError(f"a page of chunks of {page.chunk} tokens cannot begin at token {start}")
    tables = [
        [
            np.concatenate([table[rows] for rows in _kept(section, shape, page.chunk, start, stop, fine)])
            for section, table in stream
        ]
        for stream in _tables(page, streams, shape)
    ]
    for (section, _), table in zip(_tables(page, streams[:1], shape)[0], tables[0], strict=True):
        if section.rows == "position":
            table.view("<u2")[:] -= np.uint16(start)
    return _joined(page, streams[0], left, tables)


def take_heads(page: PageFormat, streams: Sequence[bytes], shape: PageShape, heads: Sequence[int]) -> tuple[bytes, ...]:
    """The page of these heads in this order, whose shape is `shape.with_heads(len(heads))`."""
    index = np.array(heads, dtype=np.intp)
    tables = []
    for stream in _tables(page, streams, shape):
        taken = []
        for section, table in stream:
            planes, at = [], 0
            for bits in section.bits:
                size = _head_bytes(shape.head_size, bits)
                end = at + shape.heads * size
                plane = table[:, at:end].reshape(len(table), shape.heads, size)
                planes.append(plane[:, index].reshape(len(table), len(index) * size))
                at = end
            taken.append(np.concatenate(planes, axis=1) if planes else table)
        tables.append(taken)
    return _joined(page, streams[0], shape.with_heads(len(heads)), tables)


def add_raw(
    page: PageFormat, streams: Sequence[bytes], shape: PageShape, added: Sequence[bytes], more: PageShape
) -> tuple[bytes, ...] | None:
    """The page with the tokens of another behind its own, all of them raw; None if their 16-bit dtypes differ.

    The shape is `shape.with_raw(more.tokens)`.
    """
    if streams[0][RAW_AT] != added[0][RAW_AT]:
        return None
    tables = []
    for stream, other in zip(_tables(page, streams, shape), _tables(page, added, more), strict=False):
        grown = []
        for (section, table), (_, new) in zip(stream, other, strict=True):
            grown.append(np.concatenate([table, new]) if section.rows in ("raw", "token") else table)
        tables.append(grown)
    # Streams that are not made of rows know nothing of raw tokens.
    return (*_joined(page, streams[0], shape.with_raw(more.tokens), tables), *streams[len(page.streams) :])


def _head_bytes(head_size: int, bits: int) -> int:
    return (head_size * bits + 7) // 8


def _row_count(rows: Rows, shape: PageShape, chunk: int) -> int:
    coded = shape.coded_tokens
    match rows:
        case "token":
            return shape.tokens
        case "raw":
            return shape.raw_head + shape.raw_tail
        case "page":
            return 1 if coded else 0
        case "chunk":
            return (shape.raw_head + coded - 1) // chunk - shape.raw_head // chunk + 1 if coded else 0
        case "coded":
            return coded
        case "coarse":
            return coded - shape.fine
        case "fine" | "position":
            return shape.fine


def _kept(
    section: Section, shape: PageShape, chunk: int, start: int, stop: int, fine: NDArray[np.int32] | None
) -> list[slice]:
    """The rows of a section that tokens [start, stop) need."""
    head, tail = shape.raw_head, shape.tokens - shape.raw_tail
    first, last = max(start, head), min(stop, tail)
    before, until = (0, 0) if fine is None else (int(n) for n in np.searchsorted(fine, (first, last)))
    coded = first < last
    match section.rows:
        case "token":
            return [slice(start, stop)]
        case "raw":
            return [
                slice(min(start, head), min(stop, head)),
                slice(head + max(start - tail, 0), head + max(stop - tail, 0)),
            ]
        case "page":
            return [slice(0, int(coded))]
        case "chunk":
            return [
                slice(first // chunk - head // chunk, (last - 1) // chunk - head // chunk + 1) if coded else slice(0)
            ]
        case "coded":
            return [slice(first - head, last - head) if coded else slice(0)]
        case "coarse":
            return [slice(first - head - before, last - head - until) if coded else slice(0)]
        case "fine" | "position":
            return [slice(before, until) if coded else slice(0)]


def _tables(page: PageFormat, streams: Sequence[bytes], shape: PageShape) -> list[list[tuple[Section, U8]]]:
    """Every section as uint8 [rows, bytes of a row].

    Raises:
        CodecError: a stream has another length than its sections.
    """
    found = []
    for number, (sections, data) in enumerate(zip(page.streams, streams, strict=False)):
        array = np.frombuffer(data, dtype=np.uint8)
        at = 0 if number else page.header_bytes
        tables = []
        for section in sections:
            rows = _row_count(section.rows, shape, page.chunk)
            row_bytes = sum(shape.heads * _head_bytes(shape.head_size, bits) for bits in section.bits)
            if section.rows == "position":
                row_bytes = 2
            end = at + rows * row_bytes
            if end > len(array):
                raise CodecError(f"stream {number} has {len(array)} bytes, its sections take more")
            tables.append((section, array[at:end].reshape(rows, row_bytes)))
            at = end
        if at != len(array):
            raise CodecError(f"stream {number} has {len(array)} bytes, its sections take {at}")
        found.append(tables)
    return found


def _joined(page: PageFormat, first: bytes, shape: PageShape, tables: list[list[U8]]) -> tuple[bytes, ...]:
    """Streams of these tables, the first behind the old header with the new shape."""
    header = bytearray(first[: page.header_bytes])
    _DIMS.pack_into(header, _DIMS_AT, shape.tokens, shape.heads, shape.head_size, shape.raw_head, shape.raw_tail)
    _FINE.pack_into(header, _FINE_AT, shape.fine)
    if shape.coded_tokens == 0:
        header[FLAGS_AT] = 0
    streams = [b"".join(table.tobytes() for table in stream) for stream in tables]
    streams[0] = bytes(header) + streams[0]
    return tuple(streams)
