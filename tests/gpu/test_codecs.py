"""Bytes and floats of the kernels are those of the CPU codecs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from checksums import check_checksums

from lynx_codec import CodecError, NonFiniteError, PageShape, get_codec
from lynx_codec.codecs import LynxCodec
from lynx_codec.tables import UNIT
from lynx_gpu import DeviceCodec, PageJob, device_view, paged_view
from lynx_gpu.variants import block_of_warps, cell_bits, decoder_stages, logarithm_defines, search_table

CODECS: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("int8", {}),
    ("int4", {}),
    ("lynx", {}),
    ("lynx", {"alpha": 4.0}),
    ("lynx", {"alpha": 0.01}),
    ("nested", {"bits": [4, 4], "chunk": 128}),
    ("nested", {"bits": [3, 5], "chunk": 128}),
    ("nested", {"bits": [2, 2, 4], "chunk": 32}),
    ("nested", {"bits": [1, 1, 1, 1, 1, 1, 1, 1], "chunk": 16}),
    ("nested", {"bits": [6, 2], "chunk": 256}),
    ("nested", {"bits": [7, 1], "chunk": 48}),
    ("nested", {"bits": [8], "chunk": 37}),
]
SHAPES = [
    PageShape(256, 8, 128, 4, 0, 9),
    PageShape(256, 3, 64),
    PageShape(256, 1, 256, 0, 64, 40),
    PageShape(250, 2, 80, 5, 3, 17),
    PageShape(40, 2, 37, 1, 0, 3),
    PageShape(1, 1, 1),
    PageShape(7, 3, 6, 3, 4),
    PageShape(0, 2, 8),
    PageShape(600, 2, 64, 33, 2, 100),
    PageShape(33, 5, 3, 0, 1, 32),
]
EMULATED = [
    ("bf16", None, "bfloat16"),
    ("int4", None, "float32"),
    ("lynx", None, "float16"),
    ("nested", [3, 5], "bfloat16"),
    ("nested", [7, 1], "bfloat16"),
    ("nested", [2, 2, 4], "float32"),
]
EMULATED_PAGES = [("lynx", 16, "b2thd"), ("nested", 48, "2bthd"), ("bf16", 256, "bthd")]
SMALL_SHAPES = [
    PageShape(100, 2, 64, 3, 2, 5),
    PageShape(288, 2, 64, 0, 0, 40),
    PageShape(1, 2, 64),
    PageShape(0, 2, 64),
]
"""For the emulator: one shape of heads, as each takes a compilation; whole tiles, which are written by other code."""

DTYPES = ("bfloat16", "float16", "float32")


def _values(rng: np.random.Generator, shape: PageShape, kind: str) -> np.ndarray:
    """float32 values, some of them of the kinds that break quantisers."""
    values = rng.standard_normal(shape.array_shape).astype(np.float32)
    if kind == "outliers":
        values *= np.exp(rng.normal(0, 2, (1, shape.heads, shape.head_size))).astype(np.float32)
        values += 30 * rng.standard_normal((1, shape.heads, shape.head_size)).astype(np.float32)
    elif kind == "spikes" and values.size:  # pages that escape
        values.reshape(-1)[rng.integers(values.size)] = 5e4
    elif kind == "flat":
        values[:, ::2] = 0
        values[:, 1::2] = 3.25
    elif kind == "tiny":
        values *= np.float32(1e-7)
    elif kind == "huge":  # where reciprocals of lengths come near to subnormal numbers
        values *= np.float32(10) ** rng.integers(25, 38, (1, shape.heads, shape.head_size)).astype(np.float32)
    return values


def _as_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(under="ignore", over="ignore"):
        return np.clip(values, -65504, 65504).astype(dtype)


def _fine(rng: np.random.Generator, shape: PageShape) -> np.ndarray:
    return np.sort(rng.choice(shape.coded_tokens, shape.fine, replace=False) + shape.raw_head).astype(np.int32)


def _encode_on_cpu(codec: Any, page: np.ndarray, shape: PageShape, fine: np.ndarray) -> list[bytes]:
    buffers = [bytearray(size) for size in codec.stream_bytes(shape, wide=True)]
    sizes = codec.encode(page, shape, [memoryview(buffer) for buffer in buffers], fine)
    return [bytes(buffer[:size]) for buffer, size in zip(buffers, sizes, strict=True)]


def _encode_on_device(
    cupy: Any, device_codec: DeviceCodec, view: Any, jobs: list[PageJob], fine: np.ndarray
) -> list[list[bytes]]:
    plan = device_codec.plan(jobs)
    piece = cupy.full(plan.total_bytes, 0xA5, cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    positions = cupy.asarray(fine) if fine.size else None
    device_codec.encode(view, plan, positions, piece.data.ptr, stream, checksums=True)
    stream.synchronize()
    host = memoryview(piece.get())
    lengths = plan.lengths(host)
    room = np.frombuffer(host, np.uint8).copy()
    for of_page, spans in zip(lengths, plan.spans, strict=True):
        for length, (offset, most) in zip(of_page, spans, strict=True):
            assert length <= most
            room[offset : offset + most] = 0xA5
    assert np.all(room[plan.status_bytes :] == 0xA5), "something was written between the streams"
    found = [
        [bytes(host[offset : offset + length]) for length, (offset, _) in zip(of_page, spans, strict=True)]
        for of_page, spans in zip(lengths, plan.spans, strict=True)
    ]
    check_checksums(found, plan.checksums(host))
    return found


def _decode_on_device(
    cupy: Any, device_codec: DeviceCodec, view: Any, jobs: list[PageJob], streams: list[list[bytes]]
) -> None:
    plan = device_codec.plan(jobs)
    host = np.full(plan.total_bytes, 0xA5, np.uint8)
    for of_page, spans in zip(streams, plan.spans, strict=True):
        for stream, (offset, _) in zip(of_page, spans, strict=False):
            host[offset : offset + len(stream)] = np.frombuffer(stream, np.uint8)
    piece = cupy.asarray(host)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    hosts = [[memoryview(s) for s in of_page] for of_page in streams]
    status_bytes = device_codec.decode(plan, hosts, piece.data.ptr, view, stream)
    assert status_bytes <= plan.status_bytes
    stream.synchronize()
    plan.check(memoryview(piece.get())[:status_bytes])


@pytest.mark.parametrize(("name", "params"), CODECS, ids=lambda value: str(value).replace(" ", ""))
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_and_values_are_those_of_the_cpu(cupy: Any, name: str, params: dict[str, Any], dtype: str) -> None:
    _compare(cupy, name, params, dtype)


@pytest.mark.parametrize(("name", "params"), [("lynx", {}), ("nested", {"bits": [3, 5], "chunk": 128})])
def test_the_order_of_threads_makes_no_difference(reversed_cupy: Any, name: str, params: dict[str, Any]) -> None:
    _compare(reversed_cupy, name, params, {"lynx": "float16", "nested": "bfloat16"}[name])


def _compare(cupy: Any, name: str, params: dict[str, Any], dtype: str) -> None:
    codec = get_codec(name, **params)
    device_codec = DeviceCodec(codec, 0)
    rng = np.random.default_rng(7)
    emulated = not hasattr(cupy, "RawKernel")
    if emulated and (name, params.get("bits"), dtype) not in EMULATED:
        pytest.skip("takes the emulator too long")
    shapes = SMALL_SHAPES if emulated else SHAPES
    kinds = ("spikes", "outliers") if emulated else ("plain", "outliers", "spikes", "flat", "tiny", "huge")
    for shape, kind in itertools.product(shapes, kinds):
        page = _as_dtype(_values(rng, shape, kind), dtype)
        fine = _fine(rng, shape)
        expected = _encode_on_cpu(codec, page, shape, fine)
        jobs = [PageJob(0, shape)]
        found = _encode_on_device(cupy, device_codec, device_view(cupy.asarray(page), dtype=dtype), jobs, fine)[0]
        assert [len(s) for s in found] == [len(s) for s in expected]
        assert found == expected, (shape, kind, [a == b for a, b in zip(found, expected, strict=True)])
        for known in range(1, len(expected) + 1):
            others = kind == "outliers" and known in (1, len(expected)) and not emulated  # each is a compilation
            for out_dtype in DTYPES if others else (dtype,):
                out = np.zeros_like(_as_dtype(np.zeros(shape.array_shape, np.float32), out_dtype))
                codec.decode([memoryview(s) for s in expected[:known]], shape, out)
                target = cupy.asarray(np.zeros_like(out))
                view = device_view(target, dtype=out_dtype)
                _decode_on_device(cupy, device_codec, view, jobs, [expected[:known]])
                same = target.get().view(np.uint8) == out.view(np.uint8)
                assert np.all(same), (shape, kind, known, out_dtype)


def test_a_device_that_shares_less_memory_makes_the_same_bytes(monkeypatch: pytest.MonkeyPatch, cupy: Any) -> None:
    def for_less_memory(item_bytes: int, fields_bytes: int, _: int) -> tuple[int, int]:
        return block_of_warps(item_bytes, fields_bytes, 48 << 10)

    assert for_less_memory(2, 1024, 0)[0] < block_of_warps(2, 1024, 227 << 10)[0]
    monkeypatch.setattr("lynx_gpu.codec.block_of_warps", for_less_memory)
    codec, shape, rng = get_codec("lynx"), PageShape(288, 2, 64, 0, 0, 40), np.random.default_rng(8)
    page, fine = _as_dtype(_values(rng, shape, "spikes"), "float16"), _fine(rng, shape)
    view = device_view(cupy.asarray(page), dtype="float16")
    found = _encode_on_device(cupy, DeviceCodec(codec, 0), view, [PageJob(0, shape)], fine)[0]
    assert found == _encode_on_cpu(codec, page, shape, fine)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_codes_under_way_change_no_value(monkeypatch: pytest.MonkeyPatch, cupy: Any, stages: int) -> None:
    def as_many(bits: tuple[int, ...], *_: int) -> tuple[int, int]:
        return stages, stages * 64 * 32 * sum(bits)

    monkeypatch.setattr("lynx_gpu.codec.decoder_stages", as_many)
    codec, shape, rng = (
        get_codec("nested", bits=[3, 5], chunk=32),
        PageShape(288, 2, 128, 4, 0, 40),
        np.random.default_rng(9),
    )
    streams = _encode_on_cpu(codec, _values(rng, shape, "spikes"), shape, _fine(rng, shape))
    for known in (1, 2):
        out = np.zeros(shape.array_shape, np.float32)
        codec.decode([memoryview(stream) for stream in streams[:known]], shape, out)
        target = cupy.asarray(np.zeros_like(out))
        _decode_on_device(cupy, DeviceCodec(codec, 0), device_view(target), [PageJob(0, shape)], [streams[:known]])
        assert np.array_equal(target.get(), out)


@pytest.mark.parametrize("bits", [(1,), (3,), (4,), (8,), (4, 4), (3, 5), (2, 2, 4)])
@pytest.mark.parametrize("chunk_tokens", [16, 32, 37, 64, 256])
@pytest.mark.parametrize("memory_bytes", [228 << 10, 164 << 10, 100 << 10])
def test_three_blocks_of_the_decoder_have_room(bits: tuple[int, ...], chunk_tokens: int, memory_bytes: int) -> None:
    stages, shared = decoder_stages(bits, chunk_tokens, memory_bytes)
    fields = 2048 * (256 // chunk_tokens + 2 * bool(256 % chunk_tokens))
    assert 2 <= stages <= 4
    assert shared >= stages * 64 * 32 * sum(bits)
    assert 4 * (shared + fields + 1024) > memory_bytes
    if stages > 2:
        assert 3 * (shared + fields + 1024 + 2300) <= memory_bytes


def test_a_batch_of_more_than_4_gib_is_refused(cupy: Any) -> None:
    page = PageShape(65535, 8, 128)  # 76 MB
    device_codec = DeviceCodec(get_codec("lynx"), 0)
    assert device_codec.plan([PageJob(0, page)] * 56).total_bytes < 1 << 32
    with pytest.raises(CodecError, match=r"too large for the CUDA kernels: 4 GiB"):
        device_codec.plan([PageJob(0, page)] * 57)


@pytest.mark.parametrize("seed", [54, 134])
def test_a_product_just_below_a_threshold_is_not_rounded_up_to_it(cupy: Any, seed: int) -> None:
    """Each page has a value whose product, in float32, would reach the next threshold."""
    codec, shape, fine = get_codec("lynx"), PageShape(32, 2, 64), np.empty(0, np.int32)
    page = np.random.default_rng(seed).standard_normal(shape.array_shape).astype(np.float32).astype(np.float16)
    view = device_view(cupy.asarray(page), dtype="float16")
    found = _encode_on_device(cupy, DeviceCodec(codec, 0), view, [PageJob(0, shape)], fine)[0]
    assert found == _encode_on_cpu(codec, page, shape, fine)


@pytest.mark.parametrize("alpha", [0.5, 0.01])
def test_values_near_the_largest_make_the_same_bytes(cupy: Any, alpha: float) -> None:
    codec, shape, fine = get_codec("lynx", alpha=alpha), PageShape(64, 2, 64), np.empty(0, np.int32)
    page = _as_dtype(_values(np.random.default_rng(2), shape, "huge"), "bfloat16")
    view = device_view(cupy.asarray(page), dtype="bfloat16")
    found = _encode_on_device(cupy, DeviceCodec(codec, 0), view, [PageJob(0, shape)], fine)[0]
    assert found == _encode_on_cpu(codec, page, shape, fine)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([PageJob(0, PageShape(32, 2, 64)), PageJob(33, PageShape(32, 2, 64))], "tokens 0 to 65 in an array of shape"),
        ([PageJob(-1, PageShape(32, 2, 64))], "tokens -1 to 31 in an array of shape"),
        ([PageJob(0, PageShape(32, 2, 64)), PageJob(32, PageShape(32, 1, 64))], "pages of 1 x 64 in an array of shape"),
    ],
)
def test_pages_that_are_not_in_the_array_are_refused(cupy: Any, jobs: list[PageJob], message: str) -> None:
    device_codec = DeviceCodec(get_codec("lynx"), 0)
    view = device_view(cupy.asarray(np.zeros((64, 2, 64), np.uint16)), dtype="bfloat16")
    plan, stream = device_codec.plan(jobs), cupy.cuda.Stream(non_blocking=True)
    piece = cupy.full(plan.total_bytes, 0xA5, cupy.uint8)
    with pytest.raises(CodecError, match=message):
        device_codec.encode(view, plan, None, piece.data.ptr, stream)
    with pytest.raises(CodecError, match=message):
        device_codec.decode_checked(plan, 1, piece.data.ptr, view, stream)
    assert np.all(piece.get() == 0xA5)


@pytest.mark.parametrize("layout", ["b2thd", "2bthd", "bthd"])
@pytest.mark.parametrize("block_tokens", [16, 48, 256])
@pytest.mark.parametrize("name", ["lynx", "nested", "bf16"])
def test_paged_caches_are_read_and_written_in_place(cupy: Any, name: str, layout: Any, block_tokens: int) -> None:
    if not hasattr(cupy, "RawKernel") and (name, block_tokens, layout) not in EMULATED_PAGES:
        pytest.skip("takes the emulator too long")
    rng = np.random.default_rng(3)
    codec, heads, size, tokens = get_codec(name), 2, 64, 700
    blocks = -(-tokens // block_tokens)
    spare = blocks + 3
    table = rng.permutation(spare)[:blocks]
    axes = {"b2thd": (spare, 2, block_tokens), "2bthd": (2, spare, block_tokens), "bthd": (spare, block_tokens)}
    cache = rng.standard_normal((*axes[layout], heads, size)).astype(np.float32)
    bits = _as_dtype(cache, "bfloat16")
    shapes = [PageShape(256, heads, size, 4, 0, 5), PageShape(256, heads, size, 0, 0, 0), PageShape(188, heads, size)]
    jobs, fine, start = [], [], 0
    for shape in shapes:
        jobs.append(PageJob(start, shape, sum(map(len, fine))))
        fine.append(_fine(rng, shape))
        start += shape.tokens
    for kind in ("key", "value"):
        index = 0 if kind == "key" or layout == "bthd" else 1
        part = {"b2thd": lambda a, i=index: a[:, i], "2bthd": lambda a, i=index: a[i], "bthd": lambda a: a}[layout]
        flat = part(bits)[table].reshape(-1, heads, size)
        device_codec = DeviceCodec(codec, 0)
        view = paged_view(cupy.asarray(bits), kind, table.tolist(), tokens, layout=layout)
        found = _encode_on_device(cupy, device_codec, view, jobs, np.concatenate(fine))
        for job, streams, positions in zip(jobs, found, fine, strict=True):
            page = flat[job.start : job.start + job.shape.tokens]
            assert streams == _encode_on_cpu(codec, page, job.shape, positions)
        target = cupy.asarray(np.full_like(bits, 0x1234))
        device_table = cupy.asarray(table.astype(np.int32))
        view = paged_view(target, kind, device_table, tokens, layout=layout)
        _decode_on_device(cupy, device_codec, view, jobs, found)
        expected = np.full_like(bits, 0x1234)
        for job, streams in zip(jobs, found, strict=True):
            out = np.zeros(job.shape.array_shape, np.uint16)
            codec.decode([memoryview(s) for s in streams], job.shape, out)
            for token in range(job.shape.tokens):
                block, row = divmod(job.start + token, block_tokens)
                part(expected)[table[block], row] = out[token]
        assert np.array_equal(target.get(), expected)


@pytest.mark.parametrize("name", ["bf16", "int4", "lynx", "nested"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [40, 64])  # of whole tiles, runs are written by other code
def test_the_first_value_that_is_not_finite_is_named(cupy: Any, name: str, dtype: str, size: int) -> None:
    if not hasattr(cupy, "RawKernel") and (name, dtype) not in [("bf16", "float16"), ("lynx", "bfloat16")]:
        pytest.skip("takes the emulator too long")
    codec, shape = get_codec(name), PageShape(256, 2, size, 4, 3)
    device_codec = DeviceCodec(codec, 0)
    rng = np.random.default_rng(11)
    for bad in (np.nan, np.inf, -np.inf):
        values = rng.standard_normal(shape.array_shape).astype(np.float32)
        # Three in coded tokens; or one in a raw token, which the CPU looks at first.
        coded = rng.integers((4, 0, 0), (253, 2, size), (3, 3))
        for token, head, channel in coded if bad != -np.inf else [(255, 1, 7)]:
            values[token, head, channel] = bad
        page = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(dtype)
        with pytest.raises(NonFiniteError) as expected:
            _encode_on_cpu(codec, page, shape, np.empty(0, np.int32))
        view = device_view(cupy.asarray(page), dtype=dtype)
        with pytest.raises(NonFiniteError) as found:
            _encode_on_device(cupy, device_codec, view, [PageJob(0, shape)], np.empty(0, np.int32))
        for name_of in ("token", "head", "channel"):
            assert getattr(found.value, name_of) == getattr(expected.value, name_of)
        assert str(found.value) == str(expected.value)


def test_bytes_that_are_no_page_are_refused(cupy: Any) -> None:
    codec, shape = get_codec("nested", bits=[4, 4], chunk=128), PageShape(256, 2, 64, 4, 0, 5)
    device_codec = DeviceCodec(codec, 0)
    rng = np.random.default_rng(1)
    page = _as_dtype(_values(rng, shape, "plain"), "bfloat16")
    good = _encode_on_cpu(codec, page, shape, _fine(rng, shape))
    at = codec.sections(shape, False)  # type: ignore[attr-defined]
    changes = {
        "header": (0, b"?"),
        "page minimum": (at.page_low, b"\xc0\x7f"),
        "page scale": (at.page_scale, b"\x00\xff"),
        "raw": (at.raw, b"\x80\x7f"),
        "position": (at.fine_positions, b"\x00\x00"),
    }
    for where, new in changes.values():
        anchor = bytearray(good[0])
        anchor[where : where + len(new)] = new
        target = cupy.asarray(np.zeros(shape.array_shape, np.uint16))
        with pytest.raises(CodecError):
            _decode_on_device(cupy, device_codec, device_view(target), [PageJob(0, shape)], [[bytes(anchor), good[1]]])
    with pytest.raises(CodecError):
        _decode_on_device(cupy, device_codec, device_view(target), [PageJob(0, shape)], [[good[0], good[1][:-1]]])


@pytest.mark.parametrize(
    ("page", "part"), [(0, "first"), (0, "last"), (1, "last"), (2, "first"), (2, "last"), (2, "raw")]
)
def test_damage_is_found_in_whatever_block_of_the_decoder(cupy: Any, page: int, part: str) -> None:
    """Pages of one to three blocks of tokens and two of channels; some blocks of the grid have no tokens."""
    codec = get_codec("int4")
    shapes = [PageShape(40, 3, 128), PageShape(520, 3, 128), PageShape(300, 3, 128, 0, 2)]
    rng = np.random.default_rng(page)
    streams = []
    for shape in shapes:
        values = _as_dtype(_values(rng, shape, "plain"), "bfloat16")
        streams.append(_encode_on_cpu(codec, values, shape, np.empty(0, np.int32)))
    jobs = [PageJob(start, shape) for start, shape in zip((0, 40, 560), shapes, strict=True)]
    at = codec.sections(shapes[page], False)  # type: ignore[attr-defined]
    place = {"first": at.page_low, "last": at.page_low + 2 * 383, "raw": at.raw + 2 * (2 * 384 - 1)}[part]
    damaged = bytearray(streams[page][0])
    damaged[place : place + 2] = b"\x80\x7f"
    target = cupy.asarray(np.zeros((860, 3, 128), np.uint16))
    device_codec = DeviceCodec(codec, 0)
    _decode_on_device(cupy, device_codec, device_view(target), jobs, streams)
    streams[page] = [bytes(damaged)]
    with pytest.raises(CodecError, match="raw tokens" if part == "raw" else "out of range"):
        _decode_on_device(cupy, device_codec, device_view(target), jobs, streams)


@pytest.mark.parametrize(("alpha", "bits"), [(0.5, 8), (2.0**-10, 8), (2.0, 8), (4.0, 10)])
def test_search_tables_find_all_levels(alpha: float, bits: int) -> None:
    """Whole magnitudes beside all thresholds and cells; the sum of the kernel is exact, and is then rounded down."""
    codec = get_codec("lynx", alpha=alpha)
    assert isinstance(codec, LynxCodec)
    assert cell_bits(codec) == bits
    thresholds = codec.tables.thresholds.astype(np.int64)
    near = np.concatenate([thresholds, np.arange(0, UNIT + 1, UNIT >> bits)])
    units = np.clip(np.concatenate([near - 1, near, near + 1]), 0, UNIT)
    magnitudes = units * 2.0**bits / UNIT
    table = search_table(codec)
    sums = magnitudes + table[magnitudes.astype(np.int64)]
    assert np.all((sums >= 128) & (sums < 256))
    assert np.array_equal(np.floor(sums) - 135, np.searchsorted(thresholds, units, side="right"))


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.5, 0.7, 1.0, 2.0, 4.0, 20.0])
@pytest.mark.parametrize("direction", [-1, 0, 1])
def test_levels_by_the_logarithm_are_right_or_in_doubt(alpha: float, direction: int) -> None:
    """Magnitudes around all thresholds and elsewhere, the logarithm being off as far as it may be."""
    codec = get_codec("lynx", alpha=alpha)
    assert isinstance(codec, LynxCodec)
    defines = logarithm_defines(codec)
    start, scale, base, unit = (
        np.array(int(str(defines[f"LOG_{name}"])[:-1], 16), np.uint32).view(np.float32).astype(np.float64)
        for name in ("START", "SCALE", "BASE", "UNIT")
    )
    doubt = int(defines["DOUBT"])
    assert defines["QUICK_LEVELS"]
    thresholds = codec.tables.thresholds.astype(np.int64)
    around = [thresholds * 16 + offset for offset in range(-160, 161)]
    units = np.clip(np.concatenate([*around, np.random.default_rng(1).integers(0, 16 * UNIT, 1 << 16)]), 0, 16 * UNIT)
    cells = units / (16 * UNIT) * 2.0 ** cell_bits(codec)
    arguments = (cells * unit + start).astype(np.float32).astype(np.float64)
    logarithms = np.log2(arguments)
    off = 2.0**-22 * np.where(arguments <= 2, 1, np.abs(logarithms))
    logarithms = (logarithms + direction * off).astype(np.float32).astype(np.float64)
    sums = (logarithms * scale + base).astype(np.float32)
    assert np.all((sums >= 128) & (sums < 256))
    bits = sums.view(np.uint32)
    levels = np.searchsorted(thresholds, units // 16, side="right")
    right = (bits >> 16 & 0xFF) == levels + 7
    doubtful = (bits & 0xFFFF) < doubt
    assert np.all(right | doubtful)
    assert np.mean(doubtful[-(1 << 16) :]) < 2 * doubt / 65536 + 0.001


@pytest.mark.gpu
@pytest.mark.parametrize("cupy", ["device"], indirect=True)
def test_torch_tensors_go_in_and_out_without_copies(cupy: Any) -> None:
    torch = pytest.importorskip("torch")
    codec, shape = get_codec("lynx"), PageShape(256, 4, 64)
    whole = torch.randn(256, 6, 64, device="cuda", dtype=torch.bfloat16)
    part = whole[:, 1:5]
    view = device_view(part)
    assert view.pointer == part.data_ptr()
    device_codec = DeviceCodec(codec, 0)
    torch.cuda.synchronize()
    streams = _encode_on_device(cupy, device_codec, view, [PageJob(0, shape)], np.empty(0, np.int32))
    page = part.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    assert streams[0] == _encode_on_cpu(codec, page, shape, np.empty(0, np.int32))
    target = torch.zeros_like(whole)
    _decode_on_device(cupy, device_codec, device_view(target[:, 1:5]), [PageJob(0, shape)], streams)
    out = np.zeros(shape.array_shape, np.uint16)
    codec.decode([memoryview(s) for s in streams[0]], shape, out)
    assert np.array_equal(target[:, 1:5].contiguous().view(torch.int16).cpu().numpy().view(np.uint16), out)
    assert not target[:, 0].any()
    assert not target[:, 5].any()
