"""Where the streams of a batch of pages lie in one piece of memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec import CodecError, NonFiniteError, PageShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lynx_codec.codecs import PageCodec

__all__ = [
    "BAD_EXACT",
    "BAD_FIELD",
    "BAD_RAW",
    "CHECKSUM",
    "FLAGS",
    "JOB",
    "LANE_CHANNELS",
    "LENGTHS",
    "MAX_STREAMS",
    "SHORT_STREAM_BYTES",
    "SLAB_CHANNELS",
    "SLAB_TOKENS",
    "STATUS",
    "TILE_CHANNELS",
    "WIDE_PAGE",
    "BatchPlan",
    "PageJob",
    "padded",
    "tiles_of",
]

MAX_STREAMS = 16
"""Of a page."""

JOB = np.dtype([("numbers", "<i4", 8), ("at", "<i8", MAX_STREAMS)])
"""`Job` in kernels/common.cuh."""

STATUS = np.dtype([("flags", "<u4"), ("exact_bytes", "<u4"), ("bad", "<u8")])
"""`Status` in kernels/common.cuh; decoders leave but the flags at 0."""

FLAGS = np.dtype("<u4")
"""What a block of the decoder says."""

CHECKSUM = np.dtype("<u8")
LENGTHS = np.dtype([("narrow", "<u4"), ("wide", "<u4")])
"""`Length` in kernels/checksum.cu."""

SHORT_STREAM_BYTES = 240
"""The device makes no checksum of a stream that is no longer."""

WIDE_PAGE, BAD_FIELD, BAD_RAW, BAD_EXACT = 1, 2, 4, 8
"""Flags of a page."""

_EXACT_ERRORS = {
    0x10: "the header of the exact stream is damaged",
    0x20: "the exact stream is too short for the page",
    0x40: "the exact stream is longer than the page takes",
    0x80: "the exact stream names an unknown kind of flat channel",
    0x100: "the exact stream leaves the cell of a code",
    0x200: "the exact stream holds a value that is not finite",
}
"""What comes with BAD_EXACT, as in kernels/exact.cuh."""

LANE_CHANNELS = 8
"""As in kernels/common.cuh."""

SLAB_CHANNELS = SLAB_TOKENS = 256
"""Of a block of the decoder."""

TILE_CHANNELS = 128
"""Of a block of the encoder."""

_PIECE_BYTES = 256
_SECTION_BYTES = 128
"""Codes begin at multiples of this, so that rows are whole sectors."""


@dataclass(frozen=True, slots=True)
class PageJob:
    """A page of a batch: tokens [start, start + shape.tokens) of a view.

    `fine_at` is where the positions of its fine tokens begin in the array that `encode` is given.
    """

    start: int
    shape: PageShape
    fine_at: int = 0


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Where status and streams of a batch lie in one piece of memory; holds no addresses, so it can be kept.

    Attributes:
        jobs: the pages.
        spans: [page][stream] to offset and most bytes. First all first streams, then all second ones, and so on.
        status_bytes: what the kernels say of the pages lies in so many bytes at the beginning, at most.
        checksums_at, blocks_at: where, in them, the checksums of all streams are, and what blocks of the encoder say.
        decoder_grid: blocks that decode codes: of channels, pages, and tokens.
        total_bytes: of the piece.
        table: the jobs as kernels read them.
        plain: the pages of the most frequent shape, if that has no fine tokens; what is true of the header and the
            lengths of one is true of all for which they are the same.
        others: all other pages.
    """

    codec: PageCodec
    jobs: tuple[PageJob, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]
    status_bytes: int
    checksums_at: int
    blocks_at: int
    total_bytes: int
    decoder_grid: tuple[int, int, int]
    table: np.ndarray[Any, Any]
    plain: tuple[int, ...]
    others: tuple[int, ...]
    on_device: dict[int, Any] = field(default_factory=dict)
    lengths_on_device: dict[int, Any] = field(default_factory=dict)
    _narrow: list[tuple[int, ...]] = field(default_factory=list)

    @staticmethod
    def of(codec: PageCodec, jobs: Sequence[PageJob]) -> BatchPlan:
        """The plan for these pages, with room for pages that escape to 16-bit metadata."""
        grid = _decoder_grid(jobs)
        # A flag word of each block of the decoder; or the status of each page, the checksums of its streams, and the
        # status of each block of the encoder.
        checksums_at = len(jobs) * STATUS.itemsize
        blocks_at = _round_up(checksums_at + len(jobs) * len(codec.stream_names) * CHECKSUM.itemsize, STATUS.itemsize)
        encoder_bytes = blocks_at + sum(tiles_of(job.shape) for job in jobs) * STATUS.itemsize
        status_bytes = _round_up(max(encoder_bytes, prod(grid) * FLAGS.itemsize), _PIECE_BYTES)
        cursor = status_bytes
        spans: list[list[tuple[int, int]]] = [[] for _ in jobs]
        shapes: dict[PageShape, int] = {}
        alike = tuple(shapes.setdefault(job.shape, len(shapes)) for job in jobs)
        of_shapes = [codec.stream_bytes(shape, wide=True) for shape in shapes]
        befores = [
            codec.sections(shape, False).data if codec.row_bits else codec.header_bytes  # of the codes of stream 0
            for shape in shapes
        ]
        sizes = [of_shapes[number] for number in alike]
        for stream in range(len(codec.stream_names)):
            for number, size, of_page in zip(alike, sizes, spans, strict=True):
                before = 0 if stream else befores[number]
                offset = _round_up(cursor + before, _SECTION_BYTES) - before
                of_page.append((offset, size[stream]))
                cursor = offset + size[stream]
        table = np.zeros(len(jobs), dtype=JOB)
        for row, job, of_page in zip(table, jobs, spans, strict=True):
            shape = job.shape
            row["numbers"][:6] = job.start, shape.tokens, shape.raw_head, shape.raw_tail, shape.fine, job.fine_at
            row["at"][: len(of_page)] = [offset for offset, _ in of_page]
        most = max(shapes, key=lambda shape: alike.count(shapes[shape])) if jobs else None
        plain = tuple(n for n, job in enumerate(jobs) if job.shape == most and not job.shape.fine)
        others = tuple(n for n in range(len(jobs)) if n not in plain)
        whole = tuple(tuple(of_page) for of_page in spans)
        total_bytes = _round_up(cursor, _PIECE_BYTES)
        return BatchPlan(
            *(codec, tuple(jobs), whole, status_bytes, checksums_at, blocks_at, total_bytes, grid, table, plain, others)
        )

    @cached_property
    def shapes(self) -> tuple[PageShape, ...]:
        """Those of the pages, each once: what a call asks of them must not be asked of thousands of pages."""
        return tuple({job.shape: None for job in self.jobs})

    @cached_property
    def tokens(self) -> range:
        """From the first token of all pages to the last."""
        return range(min(job.start for job in self.jobs), max(job.start + job.shape.tokens for job in self.jobs))

    @cached_property
    def lengths_table(self) -> np.ndarray[Any, Any]:
        """[page, stream] of LENGTHS."""
        table = np.zeros((len(self.jobs), len(self.codec.stream_names)), LENGTHS)
        for row, job in zip(table, self.jobs, strict=True):
            row["narrow"], row["wide"] = (
                self.codec.stream_bytes(job.shape),
                self.codec.stream_bytes(job.shape, wide=True),
            )
        for stream in self.codec.variable_streams:
            table[:, stream] = np.iinfo(np.uint32).max, np.iinfo(np.uint32).max
        return table

    def checksums(self, memory: memoryview) -> list[list[int]]:
        """xxh3-64 (seed 0) of the bytes that `lengths` says, [page][stream], from a host copy of the piece (or of its
        status) after `encode` with `checksums`.

        Those of streams of `SHORT_STREAM_BYTES` and less are any numbers.
        """
        count = len(self.jobs) * len(self.codec.stream_names)
        flat = np.frombuffer(memory, CHECKSUM, count, self.checksums_at)
        found: list[list[int]] = flat.reshape(len(self.jobs), -1).tolist()
        return found

    def lengths(self, memory: memoryview) -> list[tuple[int, ...]]:
        """Bytes of each stream of each page, from a host copy of the piece (or of its status) after encoding.

        Raises:
            NonFiniteError: the first value of a page that cannot be encoded.
        """
        of_all = np.frombuffer(memory, dtype=STATUS, count=len(self.jobs))
        if not (self.codec.variable_streams or of_all["bad"].any() or of_all["flags"].any()):
            if not self._narrow:
                self._narrow.extend(self.codec.stream_bytes(job.shape) for job in self.jobs)
            return self._narrow
        lengths = []
        for job, status in zip(self.jobs, of_all, strict=True):
            if bad := int(status["bad"]):
                index = ~(bad >> 32) & 0xFFFFFFFF
                value = float(np.array(bad & 0xFFFFFFFF, dtype=np.uint32).view(np.float32))
                token, channel = divmod(index, job.shape.channels)
                raise NonFiniteError(value, token, *divmod(channel, job.shape.head_size))
            sizes = self.codec.stream_bytes(job.shape, wide=bool(status["flags"] & WIDE_PAGE))
            variable = self.codec.variable_streams
            lengths.append(tuple(int(status["exact_bytes"]) if s in variable else n for s, n in enumerate(sizes)))
        return lengths

    def check(self, memory: memoryview) -> None:
        """Raise CodecError if a page that was decoded is none; `memory` is a host copy of the status."""
        flags = int(np.bitwise_or.reduce(np.frombuffer(memory, FLAGS)))
        if flags & BAD_FIELD:
            raise CodecError("a page minimum or scale is out of range")
        if flags & BAD_RAW:
            raise CodecError("raw tokens hold a value that is not finite")
        if flags & BAD_EXACT:
            raise CodecError(next(text for flag, text in _EXACT_ERRORS.items() if flags & flag))


def padded(head_size: int) -> int:
    """Channels of a head as kernels count them: whole groups."""
    return _round_up(head_size, LANE_CHANNELS)


def tiles_of(shape: PageShape) -> int:
    """Blocks of the encoder for a page."""
    return -(-shape.heads * padded(shape.head_size) // TILE_CHANNELS)


def _decoder_grid(jobs: Sequence[PageJob]) -> tuple[int, int, int]:
    channels, tokens = 1, 1
    for shape in {job.shape for job in jobs}:
        channels, tokens = max(channels, shape.heads * padded(shape.head_size)), max(tokens, shape.tokens)
    return -(-channels // SLAB_CHANNELS), len(jobs), -(-tokens // SLAB_TOKENS)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
