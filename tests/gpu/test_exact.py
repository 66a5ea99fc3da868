"""The exact stream of the CUDA kernels, run by the emulator: its bytes and values are those of the CPU, damage is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from emulated_cupy import emulated_cupy

from lynx_codec import PageShape, get_codec
from lynx_codec.exact import CLOSED, PLAIN
from lynx_gpu import DeviceCodec, PageJob, device_view

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=[0, 1])
def cupy(request: pytest.FixtureRequest) -> Iterator[Any]:
    with emulated_cupy(request.param) as module:
        yield module


def encode(codec: Any, page: np.ndarray, shape: PageShape, fine: np.ndarray) -> list[bytes]:
    buffers = [bytearray(size) for size in codec.stream_bytes(shape, wide=True)]
    sizes = codec.encode(page, shape, [memoryview(buffer) for buffer in buffers], fine)
    return [bytes(buffer[:size]) for buffer, size in zip(buffers, sizes, strict=True)]


def encode_on_device(
    cupy: Any, codec: Any, page: np.ndarray, jobs: list[PageJob], fine: np.ndarray
) -> list[list[bytes]]:
    device_codec = DeviceCodec(codec, 0)
    plan = device_codec.plan(jobs)
    piece = cupy.full(plan.total_bytes, 0xA5, cupy.uint8)
    view = device_view(cupy.asarray(page))
    device_codec.encode(view, plan, cupy.asarray(fine, dtype=cupy.int32), piece.data.ptr, cupy.cuda.Stream())
    host = piece.get()
    lengths = plan.lengths(memoryview(host))
    found = [
        [host[offset : offset + size].tobytes() for size, (offset, _) in zip(of_page, spans, strict=True)]
        for of_page, spans in zip(lengths, plan.spans, strict=True)
    ]
    for spans in plan.spans:
        for offset, most in spans:
            host[offset : offset + most] = 0xA5
    # The last word of a stream may be written whole.
    ends = [offset + most for spans in plan.spans for offset, most in spans]
    beside = np.setdiff1d(
        np.flatnonzero(host[plan.status_bytes :] != 0xA5) + plan.status_bytes, [e + i for e in ends for i in range(3)]
    )
    assert beside.size == 0
    return found


def decode_on_device(
    cupy: Any, codec: Any, jobs: list[PageJob], streams: list[list[bytes]], out: np.ndarray
) -> np.ndarray:
    device_codec = DeviceCodec(codec, 0)
    plan = device_codec.plan(jobs)
    host = np.full(plan.total_bytes, 0xA5, np.uint8)
    for of_page, spans in zip(streams, plan.spans, strict=True):
        for stream, (offset, _) in zip(of_page, spans, strict=False):
            host[offset : offset + len(stream)] = np.frombuffer(stream, np.uint8)
    piece, target = cupy.asarray(host), cupy.asarray(out)
    hosts = [[memoryview(stream) for stream in of_page] for of_page in streams]
    device_codec.decode(plan, hosts, piece.data.ptr, device_view(target), cupy.cuda.Stream())
    plan.check(memoryview(piece.get()))
    return target.get()


def patterns(rng: np.random.Generator, shape: PageShape, dtype: str, kind: str) -> np.ndarray:
    """Pages of 16-bit floats, a kind of numbers in each channel if `kind` is "mixed"."""
    largest = 0x7E80 if dtype == "bfloat16" else 0x7BFF
    parts = {
        "normal": lambda n: to_bits(rng.standard_normal(n).astype(np.float32) + np.float32(rng.normal()), dtype),
        "any": lambda n: rng.integers(0, largest + 1, n),
        "tiny": lambda n: rng.integers(0, 0x80 if dtype == "bfloat16" else 0x400, n),
        "zeros": lambda n: np.zeros(n, np.int64),
        "one": lambda n: np.full(n, 0x3F80),
        "near": lambda n: rng.integers(1, largest - 300) + rng.integers(0, 300, n),
        "huge": lambda n: rng.integers(largest - 0x100, largest + 1, n),
    }
    page = np.zeros((shape.channels, shape.tokens), np.uint16)
    for channel in page:
        name = str(rng.choice(list(parts))) if kind == "mixed" else kind
        bits = np.asarray(parts[name](shape.tokens)).astype(np.uint16)
        channel[:] = bits ^ (rng.random(shape.tokens) < rng.choice([0, 0.5, 0.02])).astype(np.uint16) << 15
    page = page.T.reshape(shape.array_shape).copy()
    return page if dtype == "bfloat16" else page.view(np.float16)


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    return (values.view(np.uint32) >> 16) if dtype == "bfloat16" else values.astype(np.float16).view(np.uint16)


SHAPES = {
    (64, 4): [
        PageShape(40, 2, 20, 3, 2, 5),
        PageShape(150, 2, 20, 0, 0, 0),
        PageShape(0, 2, 20),
        PageShape(5, 2, 20, 3, 2),
    ],
    (16, 3): [PageShape(37, 5, 61, 1, 0, 9)],
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("chunk", [64, 16])
def test_bytes_and_values(cupy: Any, dtype: str, chunk: int):
    rng = np.random.default_rng(chunk)
    first_bits = {64: 4, 16: 3}[chunk]
    codec = get_codec("nested", bits=[first_bits, 8 - first_bits], chunk=chunk, exact=True)
    shapes = SHAPES[chunk, first_bits]
    modes = set()
    for kind in ("normal", "mixed", "any", "zeros", "tiny"):
        jobs, fine, start = [], [np.zeros(0, np.int32)], 0
        for shape in shapes:
            jobs.append(PageJob(start, shape, sum(map(len, fine))))
            fine.append(np.sort(rng.choice(shape.coded_tokens, shape.fine, replace=False) + shape.raw_head))
            start += shape.tokens
        whole = patterns(rng, PageShape(start, shapes[0].heads, shapes[0].head_size), dtype, kind)
        pages = [whole[job.start : job.start + job.shape.tokens] for job in jobs]
        expected = [encode(codec, page, job.shape, f) for page, job, f in zip(pages, jobs, fine[1:], strict=True)]
        assert encode_on_device(cupy, codec, whole, jobs, np.concatenate(fine)) == expected
        modes |= {streams[-1][0] for streams in expected if streams[-1]}
        back = decode_on_device(cupy, codec, jobs, expected, np.zeros_like(whole))
        assert np.array_equal(back.view(np.uint16), whole.view(np.uint16))
    assert modes == {PLAIN, CLOSED}
