"""The exact stream on a device: which kernels run one after the other, and the scratch memory that they need.

Where the bits of each token begin depends on all tokens before it: one block a page finds that, between passes over all
values (kernels/exact.cuh). Encoding takes four kernels behind those of the other streams; decoding takes five, which
write the raw tokens too, so that no other kernel is needed where all streams are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lynx_codec import CodecError
from lynx_codec.exact import exact_bound, read_exact_header
from lynx_gpu.plan import JOB, STATUS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lynx_codec import PageShape
    from lynx_gpu.plan import BatchPlan

__all__ = [
    "MAX_EXACT_VALUES",
    "Launch",
    "check_exact",
    "decode_exact",
    "decode_scratch",
    "encode_exact",
    "encode_scratch",
]

MAX_EXACT_VALUES = 1 << 27
"""Of a page: places of bits are 32-bit numbers."""

_ENCODE, _DECODE = "exact_encode.cu", "exact_decode.cu"
_WARPS = 4
_THREADS = 32 * _WARPS
_ROWS = 8
"""Tokens that a warp takes."""

_SEGMENT_GROUPS = 32
_GROUP_CHANNELS = 8
_PAGE_THREADS = 512
_CHAIN_TABLE_BYTES = 12288
_CHAIN_SHARED_BYTES = 4 * (_PAGE_THREADS * (32 + 16) + 3) + _CHAIN_TABLE_BYTES
_SLICE = 256
"""Pages of one launch: lengths of their streams are arguments of kernels."""

LENGTHS = np.dtype([("bytes", "<u4", _SLICE)])
"""`Lengths` in kernels/exact_decode.cu."""


class Launch(Protocol):
    """Enqueues a kernel of a file, compiled for the codec, the shape of heads and the dtype of the view."""

    def __call__(
        self,
        file: str,
        name: str,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        arguments: tuple[Any, ...],
        /,
    ) -> None: ...


def encode_scratch(plan: BatchPlan) -> int:
    """Bytes of scratch memory of a page while a batch is encoded."""
    return max(_round_up(_encode_bytes(plan, job.shape)) for job in plan.jobs)


def decode_scratch(plan: BatchPlan) -> int:
    """Bytes of scratch memory of a page while a batch is decoded."""
    return max(_round_up(_decode_bytes(plan, job.shape)) for job in plan.jobs)


def encode_exact(launch: Launch, plan: BatchPlan, common: tuple[Any, ...], piece: int, scratch: int) -> None:
    """Enqueue the encoding of the exact streams, behind that of the other streams.

    Args:
        launch: takes the kernels.
        common: address, token, head and block stride, block table and block tokens of the view, address of the jobs.
        piece: address of the piece, which must be device memory; its status begins it.
        scratch: address of `encode_scratch(plan)` bytes for every page, a multiple of 16.
    """
    stride, pages = encode_scratch(plan), len(plan.jobs)
    chunks, segments = _most_chunks(plan), _segments(plan.jobs[0].shape)
    parts = _parts(plan)
    memory = (np.uint64(piece), np.uint64(piece), np.uint64(scratch), np.int64(stride))
    launch(_ENCODE, "exact_kinds", (_blocks(chunks * segments), pages), _THREADS, 0, (*common, *memory))
    launch(_ENCODE, "exact_measure", (_blocks(chunks * parts * segments), pages), _THREADS, 0, (*common, *memory))
    launch(_ENCODE, "exact_place", (1, pages), _PAGE_THREADS, 0, (common[-1], *memory))
    launch(_ENCODE, "exact_write", (_blocks(chunks * parts * segments), pages), _THREADS, 0, (*common, *memory))


def check_exact(stream: memoryview, shape: PageShape) -> None:
    """Check the header of the exact stream of a page.

    Raises:
        CodecError: it has none, or a length that does not fit.
    """
    values = shape.coded_tokens * shape.channels
    data = np.frombuffer(stream, np.uint8)
    if values:
        read_exact_header(data, values)
    elif len(data):
        raise CodecError(f"the exact stream has {len(data)} bytes, a page without coded tokens has {exact_bound(0)}")


def decode_exact(
    launch: Launch, plan: BatchPlan, lengths: Sequence[int], common: tuple[Any, ...], piece: int, scratch: int
) -> None:
    """Enqueue the decoding of pages all of whose streams are there, raw tokens included.

    Args:
        lengths: bytes of the exact stream of each page.
        scratch: address of `decode_scratch(plan)` bytes for every page, a multiple of 16.

    The others are those of `encode_exact`.
    """
    stride = decode_scratch(plan)
    chunks, segments = _most_chunks(plan), _segments(plan.jobs[0].shape)
    items = chunks * _parts(plan) * segments
    raw = max(-(-(job.shape.raw_head + job.shape.raw_tail) // _ROWS) * segments for job in plan.jobs)
    for first in range(0, len(plan.jobs), _SLICE):
        pages = min(_SLICE, len(plan.jobs) - first)
        struct = np.zeros(1, dtype=LENGTHS)
        struct["bytes"][0, :pages] = lengths[first : first + pages]
        jobs = np.uint64(int(common[-1]) + first * JOB.itemsize)
        status = np.uint64(piece + first * STATUS.itemsize)
        memory = (np.uint64(scratch + first * stride), np.int64(stride))
        told = (jobs, struct, np.uint64(piece))
        if items:
            launch(_DECODE, "exact_sizes", (_blocks(items), pages), _THREADS, 0, (*told, *memory))
            launch(_DECODE, "exact_offsets", (1, pages), _PAGE_THREADS, 0, (*told, status, *memory))
            launch(_DECODE, "exact_masks", (_blocks(items), pages), _THREADS, 0, (*told, status, *memory))
            launch(_DECODE, "exact_chain", (1, pages), _PAGE_THREADS, _CHAIN_SHARED_BYTES, (*told, status, *memory))
        if items + raw:
            blocks = _blocks(items + raw)
            launch(_DECODE, "exact_values", (blocks, pages), _THREADS, 0, (*common[:-1], *told, status, *memory))


def _segments(shape: PageShape) -> int:
    """Of a token: what a warp takes."""
    groups = shape.heads * -(-shape.head_size // _GROUP_CHANNELS)
    return -(-groups // _SEGMENT_GROUPS)


def _parts(plan: BatchPlan) -> int:
    """Of a chunk."""
    return -(-plan.codec.chunk_tokens // _ROWS)


def _chunks(plan: BatchPlan, shape: PageShape) -> int:
    return plan.codec.sections(shape, False).chunks


def _most_chunks(plan: BatchPlan) -> int:
    return max(_chunks(plan, job.shape) for job in plan.jobs)


def _blocks(warps: int) -> int:
    return max(-(-warps // _WARPS), 1)


def _encode_bytes(plan: BatchPlan, shape: PageShape) -> int:
    """`EncodeScratch` in kernels/exact_encode.cu."""
    chunks, segments = _chunks(plan, shape), _segments(shape)
    return 16 + segments * (2 * _SEGMENT_GROUPS * chunks + 8 * (shape.coded_tokens + chunks))


def _decode_bytes(plan: BatchPlan, shape: PageShape) -> int:
    """`DecodeScratch` in kernels/exact_decode.cu."""
    chunks, segments = _chunks(plan, shape), _segments(shape)
    return segments * (8 * shape.coded_tokens + _SEGMENT_GROUPS * (3 * chunks + 2 * shape.coded_tokens))


def _round_up(size: int) -> int:
    return -(-size // 16) * 16
