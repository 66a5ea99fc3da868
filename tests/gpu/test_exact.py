"""The exact stream of the CUDA kernels: bytes and values are those of the CPU, what the CPU refuses is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checksums import check_checksums

from lynx_codec import CodecError, PageShape, get_codec
from lynx_codec.exact import CLOSED, OPEN, PLAIN
from lynx_codec.layout import FLAG_WIDE, FLAGS_AT
from lynx_gpu import DeviceCodec, PageJob, device_view


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
    view, positions = device_view(cupy.asarray(page)), cupy.asarray(fine, dtype=cupy.int32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    device_codec.encode(view, plan, positions, piece.data.ptr, stream, checksums=True)
    stream.synchronize()
    host = piece.get()
    lengths = plan.lengths(memoryview(host))
    found = [
        [host[offset : offset + size].tobytes() for size, (offset, _) in zip(of_page, spans, strict=True)]
        for of_page, spans in zip(lengths, plan.spans, strict=True)
    ]
    check_checksums(found, plan.checksums(memoryview(host)))
    host[: plan.status_bytes] = 0xA5
    for spans in plan.spans:
        for number, (offset, most) in enumerate(spans):
            # The exact stream is written in words: up to a multiple of 4 bytes.
            host[offset : offset + (-(-most // 4) * 4 if number in codec.variable_streams else most)] = 0xA5
    assert np.all(host == 0xA5), "something was written between the streams"
    return found


def decode_on_device(
    cupy: Any, codec: Any, jobs: list[PageJob], streams: list[list[bytes]], out: np.ndarray
) -> np.ndarray:
    device_codec = DeviceCodec(codec, 0)
    plan = device_codec.plan(jobs)
    host = np.full(plan.total_bytes, 0xA5, np.uint8)
    for of_page, spans in zip(streams, plan.spans, strict=True):
        for data, (offset, _) in zip(of_page, spans, strict=False):
            host[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    piece, target = cupy.asarray(host), cupy.asarray(out)
    hosts = [[memoryview(data) for data in of_page] for of_page in streams]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    status_bytes = device_codec.decode(plan, hosts, piece.data.ptr, device_view(target), stream)
    stream.synchronize()
    plan.check(memoryview(piece.get())[:status_bytes])
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


def fine_of(rng: np.random.Generator, shape: PageShape) -> np.ndarray:
    return np.sort(rng.choice(shape.coded_tokens, shape.fine, replace=False) + shape.raw_head)


def check(cupy: Any, codec: Any, rng: np.random.Generator, shapes: list[PageShape], whole: np.ndarray) -> list[int]:
    """All pages of a batch, one behind the other in `whole`, there and back; their modes."""
    jobs, fine, start = [], [np.zeros(0, np.int64)], 0
    for shape in shapes:
        jobs.append(PageJob(start, shape, sum(map(len, fine))))
        fine.append(fine_of(rng, shape))
        start += shape.tokens
    pages = [whole[job.start : job.start + job.shape.tokens] for job in jobs]
    expected = [encode(codec, page, job.shape, f) for page, job, f in zip(pages, jobs, fine[1:], strict=True)]
    assert encode_on_device(cupy, codec, whole, jobs, np.concatenate(fine)) == expected
    back = decode_on_device(cupy, codec, jobs, expected, np.zeros_like(whole))
    assert np.array_equal(back.view(np.uint16), whole.view(np.uint16))
    return [streams[-1][0] for streams in expected if streams[-1]]


def nested(bits: tuple[int, ...] = (4, 4), chunk: int = 64) -> Any:
    return get_codec("nested", bits=list(bits), chunk=chunk, exact=True)


SMALL = [PageShape(40, 2, 20, 3, 2, 5), PageShape(150, 2, 20), PageShape(0, 2, 20), PageShape(5, 2, 20, 3, 2)]
MANY_HEADS = [PageShape(37, 9, 45, 1, 0, 9), PageShape(20, 9, 45, 0, 3)]
"""More channels than a warp takes, in heads that end in the middle of bytes."""


@pytest.mark.parametrize(
    ("dtype", "bits", "chunk", "shapes"),
    [("bfloat16", (4, 4), 64, SMALL), ("float16", (3, 5), 16, MANY_HEADS)],
    ids=["bfloat16", "float16"],
)
def test_bytes_and_values(cupy: Any, dtype: str, bits: tuple[int, ...], chunk: int, shapes: list[PageShape]):
    rng = np.random.default_rng(chunk)
    whole = PageShape(sum(shape.tokens for shape in shapes), *shapes[0].array_shape[1:])
    modes: set[int] = set()
    for kind in ("normal", "mixed", "any", "zeros", "tiny"):
        modes |= set(check(cupy, nested(bits, chunk), rng, shapes, patterns(rng, whole, dtype, kind)))
    assert modes == {PLAIN, CLOSED}


def test_open_ends(cupy: Any):
    """A value beside the range of its chunk by more than the margin of a cell, found by a search: -61 is the least."""
    rng = np.random.default_rng(4)
    shape = PageShape(150, 2, 20)
    page = rng.standard_normal(shape.array_shape).astype(np.float32)
    page[:, 1, 7] = 0
    page[:2, 1, 7] = -905216.0, 688128.0
    page[64:128, 1, 7] = np.linspace(-61, 80, 64)
    assert check(cupy, nested(), rng, [shape], to_bits(page, "bfloat16").astype(np.uint16)) == [OPEN]


def test_wide_fields(cupy: Any):
    """A page that escapes to 16-bit fields."""
    rng = np.random.default_rng(5)
    shape = PageShape(150, 2, 20, 3, 0, 4)
    page = rng.standard_normal(shape.array_shape).astype(np.float32)
    page[9, 1, 3] = 5e4
    bits = to_bits(page, "bfloat16").astype(np.uint16)
    assert encode(nested(), bits, shape, fine_of(rng, shape))[0][FLAGS_AT] == FLAG_WIDE
    assert check(cupy, nested(), rng, [shape], bits) == [CLOSED]


def test_flat_channels_of_all_kinds(cupy: Any):
    """All channels of a chunk constant, zeros of both signs, or of a step too small to be seen."""
    rng = np.random.default_rng(6)
    shape = PageShape(150, 2, 20)
    page = np.zeros(shape.array_shape, np.uint16)
    page[:, 0] = 0x8000 * rng.integers(0, 2, (150, 20))
    page[:, 1, 3:] = 0x3F80
    page[:, 1, 9:] = rng.integers(0, 0x80, (150, 11))
    check(cupy, nested(), rng, [shape], page)


def test_batches_of_many_pages(cupy: Any):
    """More than one launch takes."""
    rng = np.random.default_rng(7)
    shapes = [PageShape(int(n), 2, 20) for n in rng.integers(0, 3, 300)]
    whole = PageShape(sum(shape.tokens for shape in shapes), 2, 20)
    check(cupy, nested(), rng, shapes, patterns(rng, whole, "bfloat16", "mixed"))


def test_other_types_come_out(cupy: Any):
    """A bfloat16 page decoded into float32."""
    rng = np.random.default_rng(8)
    for shape in SMALL:
        page = patterns(rng, shape, "bfloat16", "mixed")
        streams = encode(nested(), page, shape, fine_of(rng, shape))
        expected = np.zeros(shape.array_shape, np.float32)
        nested().decode([memoryview(data) for data in streams], shape, expected)
        found = decode_on_device(cupy, nested(), [PageJob(0, shape)], [streams], np.zeros_like(expected))
        assert found.tobytes() == expected.tobytes()


def test_float32_pages_are_refused(cupy: Any):
    with pytest.raises(CodecError, match="not for float32"):
        encode_on_device(
            cupy, nested(), np.zeros((4, 2, 20), np.float32), [PageJob(0, PageShape(4, 2, 20))], np.zeros(0)
        )


def damaged(rng: np.random.Generator, streams: list[bytes]) -> list[bytes]:
    """Streams with a few bytes changed, of the exact one mostly."""
    changed = [bytearray(data) for data in streams]
    which = int(rng.choice([0, 1, 2, 2, 2, 2, 2, 2]))
    victim = changed[which]
    match rng.choice(["flip", "flip", "cut", "extend", "noise", "bit"]):
        case "cut" if which == 2:
            del victim[int(rng.integers(max(len(victim) - 40, 0), len(victim))) :]
        case "extend" if which == 2:
            victim += rng.integers(0, 2, int(rng.integers(1, 4))).astype(np.uint8).tobytes()
        case "noise":
            start = min(FIRST_BYTES[which], len(victim))
            victim[start:] = rng.integers(0, 256, len(victim) - start).astype(np.uint8).tobytes()
        case "bit":
            victim[int(rng.integers(len(victim)))] ^= 1 << int(rng.integers(8))
        case _:
            for _ in range(int(rng.integers(1, 5))):
                victim[int(rng.integers(len(victim)))] = int(rng.integers(256))
    return [bytes(data) for data in changed]


FIRST_BYTES = (200, 0, 8)


def test_damaged_streams(cupy: Any):
    """What the CPU refuses is refused, and all else decodes to the same values; nothing else is touched."""
    rng = np.random.default_rng(9)
    outcomes = set()
    for number in range(80):
        shape = SMALL[number % 2]
        page = patterns(rng, shape, "bfloat16", str(rng.choice(["normal", "mixed", "zeros"])))
        streams = damaged(rng, encode(nested(), page, shape, fine_of(rng, shape)))
        expected = np.zeros_like(page)
        try:
            nested().decode([memoryview(data) for data in streams], shape, expected)
        except CodecError:
            with pytest.raises(CodecError):
                decode_on_device(cupy, nested(), [PageJob(0, shape)], [streams], np.zeros_like(page))
            outcomes.add("refused")
        else:
            found = decode_on_device(cupy, nested(), [PageJob(0, shape)], [streams], np.zeros_like(page))
            assert np.array_equal(found, expected)
            outcomes.add("other values" if not np.array_equal(page, expected) else "the same")
    assert outcomes >= {"refused", "other values"}


def test_damage_is_of_one_page(cupy: Any):
    """A page beside a damaged one is decoded; the damage is named."""
    rng = np.random.default_rng(10)
    shape = SMALL[1]
    whole = patterns(rng, PageShape(300, 2, 20), "bfloat16", "normal")
    jobs = [PageJob(0, shape), PageJob(150, shape)]
    good = [encode(nested(), whole[j.start : j.start + 150], shape, fine_of(rng, shape)) for j in jobs]
    exact = good[0][-1]
    cases = {
        "too short": exact[:-1],
        "longer": exact + bytes(1),
        "header of the exact stream": b"\x03" + exact[1:],
    }
    for message, data in cases.items():
        with pytest.raises(CodecError, match=message):
            decode_on_device(cupy, nested(), jobs, [[*good[0][:-1], data], good[1]], np.zeros_like(whole))
