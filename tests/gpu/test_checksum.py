"""Checksums that a device makes of encoded streams are those of the xxhash package, whatever lengths and places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from checksums import check_checksums

from lynx_codec import PageShape, get_codec
from lynx_gpu import DeviceCodec, PageJob, device_view
from lynx_gpu.driver import launch
from lynx_gpu.modules import kernel
from lynx_gpu.plan import JOB, LENGTHS, SHORT_STREAM_BYTES, STATUS, WIDE_PAGE

THREADS = 288
BLOCK, TURN = 1024, 32 * 1024
"""Bytes between two scrambles, and those that a block of threads adds between two barriers."""


def sums_of(cupy: Any, data: np.ndarray, spans: list[tuple[int, int]], status: np.ndarray | None = None) -> list[int]:
    """Of pages with one stream each, at these places and of these lengths."""
    jobs, lengths = np.zeros(len(spans), JOB), np.zeros(len(spans), LENGTHS)
    for job, length, (at, size) in zip(jobs, lengths, spans, strict=True):
        job["at"][0] = at
        length["narrow"], length["wide"] = size, size
    of_pages = np.zeros(len(spans), STATUS) if status is None else status
    told = [
        cupy.asarray(array.view(np.uint8))
        for array in (jobs, lengths, data, of_pages, np.zeros(8 * len(spans), np.uint8))
    ]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Device(0):
        function = kernel(0, "checksum.cu", "sum_streams", ())
        launch(0, function, (len(spans), 1), THREADS, 0, [np.uint64(array.data.ptr) for array in told], stream)
    stream.synchronize()
    return list(told[-1].get().view(np.uint64).tolist())


SIZES = [
    SHORT_STREAM_BYTES + 1, 255, 256, 257, 511, 512, 1000,
    *(BLOCK * blocks + more for blocks in (1, 2, 3, 31, 32, 33) for more in (-65, -64, -63, -1, 0, 1, 63, 64, 65)),
    *(TURN * turns + more for turns in (2, 3) for more in (-1, 0, 1, BLOCK, 5 * BLOCK + 77)),
]  # fmt: skip


@pytest.mark.parametrize("begin", range(8))
def test_lengths_and_places(cupy: Any, begin: int) -> None:
    check_sizes(cupy, SIZES[begin::8] if begin else SIZES, begin)


def test_order_of_threads(reversed_cupy: Any) -> None:
    check_sizes(reversed_cupy, SIZES, 3)


def check_sizes(cupy: Any, sizes: list[int], begin: int) -> None:
    spans = []
    at = begin
    for size in sizes:
        spans.append((at, size))
        at += -(-size // 8) * 8
    data = np.random.default_rng(begin).integers(0, 256, -(-at // 256) * 256, np.uint8)
    assert sums_of(cupy, data, spans) == [xxhash.xxh3_64_intdigest(data[at : at + size]) for at, size in spans]


@pytest.mark.parametrize("value", [0, 0xFF])
def test_bytes_that_are_alike(cupy: Any, value: int) -> None:
    data = np.full(3 * TURN, value, np.uint8)
    assert sums_of(cupy, data, [(0, 70_001)]) == [xxhash.xxh3_64_intdigest(data[:70_001])]


def test_short_streams_are_left_to_the_host(cupy: Any) -> None:
    assert sums_of(cupy, np.ones(256, np.uint8), [(0, 0), (0, 1), (8, SHORT_STREAM_BYTES)]) == [0, 0, 0]


def test_wide_pages_are_longer(cupy: Any) -> None:
    """One of a batch escapes to 16-bit fields."""
    codec = get_codec("nested", bits=[4, 4], chunk=32)
    shape = PageShape(64, 2, 64)
    page = np.random.default_rng(1).standard_normal((3 * 64, 2, 64)).astype(np.float32)
    page[70, 1, 5] = 1e6
    device = DeviceCodec(codec, 0)
    plan = device.plan([PageJob(start, shape) for start in (0, 64, 128)])
    piece, stream = cupy.full(plan.total_bytes, 0xA5, cupy.uint8), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    device.encode(device_view(cupy.asarray(page)), plan, None, piece.data.ptr, stream, checksums=True)
    stream.synchronize()
    host = memoryview(piece.get())
    flags = np.frombuffer(host, STATUS, 3)["flags"]
    assert list(flags & WIDE_PAGE) == [0, WIDE_PAGE, 0]
    streams = [
        [bytes(host[at : at + size]) for size, (at, _) in zip(of_page, spans, strict=True)]
        for of_page, spans in zip(plan.lengths(host), plan.spans, strict=True)
    ]
    check_checksums(streams, plan.checksums(host))
