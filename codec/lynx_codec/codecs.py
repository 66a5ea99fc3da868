"""Lynx, the affine codecs and bfloat16: headers, raw tokens and buffers; an engine does the arithmetic."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec.base import CHUNK_TOKENS, Codec, PageShape
from lynx_codec.errors import CodecError
from lynx_codec.layout import (
    BF16_ID,
    FLAG_WIDE,
    FLAGS_AT,
    HEADER_BYTES,
    INT4_ID,
    INT8_ID,
    LYNX_HEADER_BYTES,
    LYNX_ID,
    PageHeader,
    Sections,
    check_positions,
    header_template,
    planes,
    read_header,
    read_positions,
    read_table,
    row_bytes,
    row_places,
    valid_positions,
    write_header,
)
from lynx_codec.pageformat import PageFormat, Section, add_raw, cut, fine_tokens, take_heads
from lynx_codec.tables import LynxTables, lynx_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from lynx_codec.engine import Engine

__all__ = ["AffineCodec", "Bfloat16Codec", "LynxCodec", "PageCodec", "bytes_of", "checked_positions"]

DEFAULT_ALPHA = 0.5
"""More drafts survive than at 0.25, 1 or 2, and the errors are within 4 % of the least (docs/codec.md)."""

_MOST_SEEN = 256


class PageCodec(Codec):
    """What the codecs share: checks, buffers, raw tokens and the header."""

    codec_id: int
    header_bytes = HEADER_BYTES
    """Of the page header; what lies behind them, `sections` tells."""

    row_bits: tuple[int, ...] = ()
    """Bits of a code in each stream whose rows are planes."""

    chunk_tokens = CHUNK_TOKENS
    """Tokens of a channel that share their metadata."""

    _has_escape = True
    _alpha = 0.0
    _tail = b""

    def __init__(self, load_engine: Callable[[], Engine]) -> None:
        self._load_engine = load_engine
        self._seen: dict[tuple[Any, ...], PageHeader] = {}  # most pages of a cache have the same header
        self._fine_seen: set[tuple[PageShape, bytes]] = set()

    @property
    def _engine(self) -> Engine:
        """Loaded at first use: numba takes a second to import, and codecs are made on event loops."""
        return self._load_engine()

    def params(self) -> dict[str, Any]:
        return {}

    @property
    def grid_tokens(self) -> int:
        return self.chunk_tokens if self.row_bits else 0

    def page_format(self, *, wide: bool) -> PageFormat:
        """What the streams are made of, for a page that escaped or did not."""
        field = Section("chunk", (16 if wide else 8,))
        metadata = (Section("raw", (16,)), Section("page", (16,)), Section("page", (16,)), field, field)
        first, *later = (planes(width) for width in self.row_bits)
        positions = (Section("position", ()),) if later else ()
        fine = (Section("fine", bits) for bits in later)
        anchor = (*metadata, *positions, Section("coded", first), *fine)
        return PageFormat(
            self.header_bytes, self.chunk_tokens, (anchor, *((Section("coarse", bits),) for bits in later))
        )

    def _format_of(self, streams: Sequence[bytes]) -> PageFormat:
        if not 1 <= len(streams) <= len(self.stream_names) or len(streams[0]) < self.header_bytes:
            raise CodecError(f"these are no streams of a page of codec {self.name}")
        return self.page_format(wide=bool(streams[0][FLAGS_AT] & FLAG_WIDE))

    def _divisible(self, streams: Sequence[bytes]) -> PageFormat:
        """The same, for operations that need every stream to be made of rows."""
        found = self._format_of(streams)
        if len(streams) > len(found.streams):
            name = self.stream_names[len(found.streams)]
            raise CodecError(
                f"stream {name} of a page of codec {self.name} can only be kept whole: no token can be cut off, and no "
                f"head taken out; without it ({len(found.streams)} streams) the page can be divided"
            )
        return found

    def fine_tokens(self, streams: Sequence[bytes], shape: PageShape) -> tuple[int, ...]:
        if not self.grid_tokens:
            return ()
        found = fine_tokens(self._format_of(streams), streams, shape)
        return () if found is None else tuple(found.tolist())

    def cut_page(self, streams: Sequence[bytes], shape: PageShape, start: int, left: PageShape) -> tuple[bytes, ...]:
        if not self.grid_tokens:
            return super().cut_page(streams, shape, start, left)
        return cut(self._divisible(streams), streams, shape, start, left)

    def take_heads(self, streams: Sequence[bytes], shape: PageShape, heads: Sequence[int]) -> tuple[bytes, ...]:
        if not self.grid_tokens:
            return super().take_heads(streams, shape, heads)
        return take_heads(self._divisible(streams), streams, shape, heads)

    def add_raw(
        self, streams: Sequence[bytes], shape: PageShape, added: Sequence[bytes], more: PageShape
    ) -> tuple[bytes, ...] | None:
        if not self.grid_tokens:
            return None
        return add_raw(self._format_of(streams), streams, shape, added, more)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, so that the first page does not pay for it."""
        self._engine.warm_up(self.codec_id)

    def _buffers(self, outs: Sequence[memoryview], shape: PageShape) -> list[NDArray[np.uint8]]:
        """Writable byte arrays of the wide size over the caller's buffers."""
        sizes = self.stream_bytes(shape, wide=True)
        if len(outs) != len(sizes):
            raise CodecError(f"{self.name} writes {len(sizes)} streams, {len(outs)} buffers were given")
        arrays = []
        for name, size, out in zip(self.stream_names, sizes, outs, strict=True):
            if out.nbytes < size:
                raise CodecError(f"buffer of {out.nbytes} bytes for stream {name}, up to {size} are needed")
            if out.readonly:
                raise CodecError(f"buffer for stream {name} is read-only")
            arrays.append(bytes_of(out, name)[:size])
        return arrays

    def header(self, shape: PageShape) -> bytes:
        """The header of a page that did not escape and has bfloat16 raw tokens."""
        return header_template(self.codec_id, shape, self.chunk_tokens, self._alpha, self._tail)

    def parse(self, streams: Sequence[memoryview], shape: PageShape) -> tuple[PageHeader, list[NDArray[np.uint8]]]:
        """Checked header and byte arrays of the streams; the header decides which of two sizes they must have."""
        if not 1 <= len(streams) <= len(self.stream_names):
            raise CodecError(f"{len(streams)} streams given, {self.name} has {len(self.stream_names)}")
        arrays = [bytes_of(s, n) for s, n in zip(streams, self.stream_names, strict=False)]
        may_be_wide = self._has_escape and shape.coded_tokens > 0
        header = read_header(arrays[0], self.header(shape), may_be_wide=may_be_wide)
        sizes = self.stream_bytes(shape, wide=header.wide)
        for i, (size, array) in enumerate(zip(sizes, arrays, strict=False)):
            if array.nbytes > size or (array.nbytes < size and i not in self.variable_streams):
                raise CodecError(f"stream {self.stream_names[i]} has {array.nbytes} bytes, the page takes {size}")
        return header, arrays

    def _check_out(self, out: NDArray[Any], shape: PageShape) -> None:
        self.check_page(out, shape)
        if not out.flags.writeable:
            raise CodecError("the array to decode into is read-only")

    def _encode_raw(self, page: NDArray[Any], shape: PageShape, out: NDArray[np.uint8]) -> None:
        at = self.header_bytes
        for first, stop in ((0, shape.raw_head), (shape.tokens - shape.raw_tail, shape.tokens)):
            if stop > first:
                end = at + 2 * (stop - first) * shape.channels
                self._engine.store_raw(page, shape, first, stop, out[at:end])
                at = end

    def _decode_raw(self, data: NDArray[np.uint8], float16: bool, shape: PageShape, out: NDArray[Any]) -> None:
        at = self.header_bytes
        for first, stop in ((0, shape.raw_head), (shape.tokens - shape.raw_tail, shape.tokens)):
            if stop > first:
                end = at + 2 * (stop - first) * shape.channels
                self._engine.load_raw(data[at:end], float16, shape, first, stop, out)
                at = end

    def check_tail(self, header: PageHeader) -> None:
        """Raise CodecError if what the codec itself has put into the header is not as it must be."""
        return

    def check_streams(self, streams: Sequence[memoryview], shape: PageShape) -> PageHeader:
        """All that a decoder checks before it reads fields and codes, for one that reads these elsewhere.

        Raises:
            CodecError: no page of this shape and codec.
        """
        if not 1 <= len(streams) <= len(self.stream_names):
            raise CodecError(f"{len(streams)} streams given, {self.name} has {len(self.stream_names)}")
        key = (shape, bytes(streams[0][: self.header_bytes]), *(stream.nbytes for stream in streams))
        header = self._seen.get(key)
        if header is None:
            header, _ = self.parse(streams, shape)
            self.check_tail(header)
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[key] = header
        if len(self.row_bits) > 1 and shape.fine:
            at = self.sections(shape, header.wide).fine_positions
            positions = shape, bytes(streams[0][at : at + 2 * shape.fine])  # those of all layers are alike
            if positions not in self._fine_seen:
                check_positions(struct.unpack(f"<{shape.fine}H", positions[1]), shape)
                if len(self._fine_seen) >= _MOST_SEEN:
                    self._fine_seen.clear()
                self._fine_seen.add(positions)
        return header

    def sections(self, shape: PageShape, wide: bool) -> Sections:
        """Where things lie in stream 0."""
        return Sections.of(shape, self.header_bytes, self.row_bits, wide, self.chunk_tokens)

    def stream_bytes(self, shape: PageShape, *, wide: bool = False) -> tuple[int, ...]:
        return self.sections(shape, wide).stream_bytes(shape)


def checked_positions(fine: NDArray[np.integer[Any]] | None, shape: PageShape) -> NDArray[np.int32]:
    """The fine tokens that a caller names, or the last coded tokens."""
    if fine is None:
        stop = shape.tokens - shape.raw_tail
        return np.arange(stop - shape.fine, stop, dtype=np.int32)
    positions = np.asarray(fine)
    if positions.ndim != 1 or positions.dtype.kind not in "iu" or not valid_positions(positions, shape):
        raise CodecError(f"fine: {shape.fine} increasing positions of tokens that are not raw are needed")
    return positions.astype(np.int32)


def bytes_of(view: memoryview, name: str) -> NDArray[np.uint8]:
    """A uint8 array over the bytes of `view`; CodecError if it is not contiguous."""
    try:
        return np.frombuffer(view, dtype=np.uint8)
    except (ValueError, BufferError) as error:
        raise CodecError(f"buffer for stream {name} is not contiguous") from error


class LynxCodec(PageCodec):
    """Lynx, Algorithm 1 with its errata: a 4-bit anchor and a 4-bit residual on a logarithmic scale per chunk."""

    name = "lynx"
    stream_names = ("anchor", "residual")
    codec_id = LYNX_ID
    header_bytes = LYNX_HEADER_BYTES
    row_bits = (4, 4)

    def __init__(self, load_engine: Callable[[], Engine], *, alpha: float = DEFAULT_ALPHA) -> None:
        super().__init__(load_engine)
        self._tables = lynx_tables(float(alpha))
        self._alpha = self._tables.alpha
        self._tail = self._tables.centroids.astype("<f2").tobytes()

    def params(self) -> dict[str, Any]:
        return {"alpha": self._alpha}

    @property
    def tables(self) -> LynxTables:
        """What follows from alpha."""
        return self._tables

    def check_tail(self, header: PageHeader) -> None:
        read_table(header.tail, -1.0, 1.0)

    def encode(
        self,
        page: NDArray[Any],
        shape: PageShape,
        outs: Sequence[memoryview],
        fine: NDArray[np.integer[Any]] | None = None,
    ) -> tuple[int, ...]:
        self.check_page(page, shape)
        anchor, residual = self._buffers(outs, shape)
        positions = checked_positions(fine, shape)
        self._encode_raw(page, shape, anchor)
        wide = False
        if shape.coded_tokens:
            places = row_places(positions, shape)
            wide = self._engine.encode_lynx(page, shape, anchor, residual, self.header_bytes, self._tables, places)
            sections = self.sections(shape, wide)
            anchor[sections.fine_positions : sections.data] = positions.astype("<u2").view(np.uint8)
        write_header(anchor, self.header(shape), wide=wide, raw_float16=page.dtype == np.float16)
        return self.stream_bytes(shape, wide=wide)

    def decode(self, streams: Sequence[memoryview], shape: PageShape, out: NDArray[Any]) -> None:
        self._check_out(out, shape)
        header, arrays = self.parse(streams, shape)
        anchor = arrays[0]
        residual = arrays[1] if len(arrays) > 1 else None
        self._decode_raw(anchor, header.raw_float16, shape, out)
        if shape.coded_tokens:
            sections = self.sections(shape, header.wide)
            places = row_places(read_positions(anchor, sections, shape), shape)
            tables = (read_table(header.tail, -1.0, 1.0), self._tables.full)
            self._engine.decode_lynx(anchor, residual, shape, self.header_bytes, header.wide, *tables, places, out)


class AffineCodec(PageCodec):
    """Asymmetric integers of `bits` bits per channel and chunk of 32 tokens: minimum and range."""

    stream_names = ("anchor",)

    def __init__(self, load_engine: Callable[[], Engine], *, bits: int) -> None:
        super().__init__(load_engine)
        self._bits = bits
        self.name = f"int{bits}"
        self.codec_id = {8: INT8_ID, 4: INT4_ID}[bits]
        self.row_bits = (bits,)

    def encode(
        self,
        page: NDArray[Any],
        shape: PageShape,
        outs: Sequence[memoryview],
        fine: NDArray[np.integer[Any]] | None = None,
    ) -> tuple[int, ...]:
        self.check_page(page, shape)
        (out,) = self._buffers(outs, shape)
        self._encode_raw(page, shape, out)
        wide = False
        if shape.coded_tokens:
            wide = self._engine.encode_affine(page, shape, out, self.header_bytes, self._bits)
        write_header(out, self.header(shape), wide=wide, raw_float16=page.dtype == np.float16)
        return self.stream_bytes(shape, wide=wide)

    def decode(self, streams: Sequence[memoryview], shape: PageShape, out: NDArray[Any]) -> None:
        self._check_out(out, shape)
        header, (data,) = self.parse(streams, shape)
        self._decode_raw(data, header.raw_float16, shape, out)
        if shape.coded_tokens:
            self._engine.decode_affine(data, shape, self.header_bytes, header.wide, self._bits, out)


class Bfloat16Codec(PageCodec):
    """Every token as a 16-bit float: bfloat16, or float16 if that is what the page holds."""

    name = "bf16"
    stream_names = ("anchor",)
    codec_id = BF16_ID
    _has_escape = False

    @property
    def grid_tokens(self) -> int:
        return 1

    def page_format(self, *, wide: bool) -> PageFormat:
        return PageFormat(self.header_bytes, self.grid_tokens, ((Section("token", (16,)),),))

    def stream_bytes(self, shape: PageShape, *, wide: bool = False) -> tuple[int, ...]:
        return (self.header_bytes + shape.tokens * row_bytes(shape.heads, shape.head_size, 8) * 2,)

    def encode(
        self,
        page: NDArray[Any],
        shape: PageShape,
        outs: Sequence[memoryview],
        fine: NDArray[np.integer[Any]] | None = None,
    ) -> tuple[int, ...]:
        self.check_page(page, shape)
        (out,) = self._buffers(outs, shape)
        if shape.tokens:
            self._engine.store_raw(page, shape, 0, shape.tokens, out[self.header_bytes :])
        write_header(out, self.header(shape), wide=False, raw_float16=page.dtype == np.float16)
        return self.stream_bytes(shape)

    def decode(self, streams: Sequence[memoryview], shape: PageShape, out: NDArray[Any]) -> None:
        self._check_out(out, shape)
        header, (data,) = self.parse(streams, shape)
        if shape.tokens:
            self._engine.load_raw(data[self.header_bytes :], header.raw_float16, shape, 0, shape.tokens, out)
