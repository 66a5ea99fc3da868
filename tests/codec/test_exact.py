"""The exact stream of `nested`: every bit comes back, both implementations write the same bytes, damage is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from codec_inputs import DTYPES, LAYOUTS, as_dtype, as_float32, decode, encode, normal, pages, shapes, with_layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lynx_codec import CodecError, PageShape, bits_per_value, get_codec
from lynx_codec.exact import CLOSED, OPEN, PLAIN

SETTINGS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
IMPLEMENTATIONS = ("compiled", "reference")
SIXTEEN = (np.uint16, np.float16)


def bits_of(page: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(page).view(np.uint16)


def check(page: np.ndarray, shape: PageShape, **params: Any) -> list[bytes]:
    """Both implementations write the same streams, and read every bit of the page out of them."""
    streams = encode(get_codec("nested", exact=True, implementation="reference", **params), page, shape)
    for implementation in IMPLEMENTATIONS:
        codec = get_codec("nested", exact=True, implementation=implementation, **params)
        assert encode(codec, page, shape) == streams
        back = decode(codec, streams, shape, page.dtype.type)
        assert np.array_equal(bits_of(back), bits_of(page))
        assert decode(codec, streams, shape, np.float32).tobytes() == as_float32(page).tobytes()
    return streams


@st.composite
def any_bits(draw: st.DrawFn) -> tuple[np.ndarray, PageShape]:
    """16-bit pages of any finite numbers that an encoder takes, from all patterns or from a few of them."""
    shape = draw(shapes(40))
    dtype = draw(st.sampled_from(SIXTEEN))
    largest = 0x7E80 if dtype is np.uint16 else 0x7BFF
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = st.sampled_from(("any", "subnormal", "zeros", "neighbours", "few", "huge"))
    bits = np.zeros(shape.array_shape, np.int64)
    for head in range(shape.heads):
        size = (shape.tokens, shape.head_size)
        match draw(kinds):
            case "any":
                part = rng.integers(0, largest + 1, size)
            case "subnormal":
                part = rng.integers(0, 0x80 if dtype is np.uint16 else 0x400, size)
            case "zeros":
                part = np.zeros(size, np.int64)
            case "neighbours":
                part = rng.integers(1, largest - 300) + rng.integers(0, draw(st.integers(1, 300)), size)
            case "few":
                values = draw(st.lists(st.integers(0, largest), min_size=1, max_size=4))
                part = rng.choice(np.array(values), size)
            case _:
                part = rng.integers(largest - 0x100, largest + 1, size)
        signs = rng.random(size) < draw(st.sampled_from((0.0, 0.5, 0.02, 1.0)))
        bits[:, head] = part | np.where(signs, 0x8000, 0)
    page = bits.astype(np.uint16)
    return (page if dtype is np.uint16 else page.view(np.float16)), shape


@SETTINGS
@given(
    pages(40),
    st.sampled_from(SIXTEEN),
    st.sampled_from(LAYOUTS),
    st.sampled_from((16, 32, 48, 256)),
    st.sampled_from(([4, 4], [2, 2, 4], [8], [1] * 8)),
)
def test_all_bits_of_pages(sample, dtype, layout, chunk, bits):
    page, shape = sample
    check(with_layout(as_dtype(page, dtype), layout), shape, chunk=chunk, bits=bits)


@SETTINGS
@given(any_bits(), st.sampled_from((16, 32, 80)))
def test_all_bits_of_any_patterns(sample, chunk):
    check(*sample, chunk=chunk)


def test_every_finite_number():
    """All patterns of both formats that an encoder takes, in a page of their own, ordered and shuffled."""
    for dtype, largest in ((np.uint16, 0x7E80), (np.float16, 0x7BFF)):
        one = np.arange(largest + 1)
        bits = np.concatenate([one, one | 0x8000]).astype(np.uint16)
        for order in (bits, np.random.default_rng(0).permutation(bits)):
            page = order[: len(order) // 128 * 128].reshape(-1, 2, 64).view(dtype)
            shape = PageShape(*page.shape)
            codec = get_codec("nested", exact=True)
            assert np.array_equal(bits_of(decode(codec, encode(codec, page, shape), shape, dtype)), bits_of(page))


def mode_of(stream: bytes) -> int:
    return stream[0]


def test_ordinary_pages_are_coded():
    page = as_dtype(normal(256, 2, 64) + np.linspace(-3, 3, 64, dtype=np.float32), np.uint16)
    streams = check(page, PageShape(256, 2, 64, 4, 0, 30))
    assert mode_of(streams[-1]) == CLOSED
    assert 8 * len(streams[-1]) / page.size < 2.6


def test_pages_of_random_bits_are_bounded():
    page = np.random.default_rng(1).integers(0, 0x7E80, (64, 1, 64)).astype(np.uint16)
    shape = PageShape(*page.shape)
    streams = check(page, shape)
    assert mode_of(streams[-1]) == PLAIN
    assert len(streams[-1]) == get_codec("nested", exact=True).stream_bytes(shape)[-1] == 8 + 2 * page.size


def test_open_ends():
    """A value beside the range of its chunk by more than the margin of a cell, found by a search: -61 is the least."""
    page = np.zeros((64, 1, 1), np.float32)
    page[:2, 0, 0] = -905216.0, 688128.0
    page[32:, 0, 0] = np.linspace(-61, 80, 32)
    streams = check(as_dtype(page, np.uint16), PageShape(*page.shape))
    assert mode_of(streams[-1]) == OPEN


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -(2.0**-130), 2.0**120])
def test_constant_channels_cost_nothing(value):
    page = as_dtype(np.full((256, 1, 64), value, np.float32), np.uint16)
    streams = check(page, PageShape(*page.shape))
    assert len(streams[-1]) < 200 + (page.size // 8 if str(value) == "-0.0" else 0)


def test_zeros_of_both_signs():
    """A channel of zeros takes one bit a value where their signs differ."""
    page = (np.random.default_rng(3).integers(0, 2, (256, 1, 64)) << 15).astype(np.uint16)
    streams = check(page, PageShape(*page.shape))
    assert len(streams[-1]) == 8 + (64 * 8 * 2 + page.size) // 8


def test_empty_and_raw_pages():
    codec = get_codec("nested", exact=True)
    for shape in (PageShape(0, 1, 3), PageShape(5, 2, 3, 5), PageShape(5, 2, 3, 2, 3)):
        page = as_dtype(normal(*shape.array_shape), np.uint16)
        assert check(page, shape)[-1] == b""
        assert codec.stream_bytes(shape)[-1] == 0


def test_streams_and_sizes():
    codec = get_codec("nested", bits=[2, 2, 4], exact=True)
    assert codec.stream_names == ("anchor", "residual1", "residual2", "exact")
    assert codec.variable_streams == {3}
    assert get_codec("nested").variable_streams == frozenset()
    shape = PageShape(256, 1, 64)
    assert bits_per_value(codec, shape, streams=3) == bits_per_value(get_codec("nested", bits=[2, 2, 4]), shape)


def test_prefixes_are_those_of_the_codec_without():
    page = as_dtype(normal(70, 2, 5), np.uint16)
    shape = PageShape(70, 2, 5, 2, 3, 9)
    plain, exact = get_codec("nested"), get_codec("nested", exact=True)
    streams = encode(exact, page, shape)
    assert streams[:2] == encode(plain, page, shape)
    for count in (1, 2):
        assert decode(exact, streams[:count], shape).tobytes() == decode(plain, streams[:count], shape).tobytes()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float32_pages_are_refused(implementation):
    codec = get_codec("nested", exact=True, implementation=implementation)
    with pytest.raises(CodecError, match="not for float32"):
        encode(codec, normal(40, 1, 2), PageShape(40, 1, 2))


@SETTINGS
@given(any_bits(), st.data())
def test_damaged_streams(sample, data):
    """Both implementations refuse the same bytes, and read the same finite values out of all others."""
    page, shape = sample
    streams = [bytearray(s) for s in encode(get_codec("nested", exact=True), page, shape)]
    victim = streams[data.draw(st.sampled_from((0, 1, 2, 2, 2, 2)))]
    match data.draw(st.sampled_from(("flip", "cut", "extend", "noise"))):
        case "cut" if victim:
            del victim[data.draw(st.integers(0, len(victim) - 1)) :]
        case "extend":
            victim += bytes(data.draw(st.integers(1, 3)))
        case "noise":
            rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
            start = 72 if victim is streams[0] else 8
            victim[start:] = rng.integers(0, 256, max(len(victim) - start, 0), dtype=np.uint8).tobytes()
        case _:
            for _ in range(data.draw(st.integers(1, 4)) if victim else 0):
                victim[data.draw(st.integers(0, len(victim) - 1))] ^= data.draw(st.integers(1, 255))
    for dtype in DTYPES:
        outcomes = []
        for implementation in IMPLEMENTATIONS:
            codec = get_codec("nested", exact=True, implementation=implementation)
            try:
                out = decode(codec, [bytes(s) for s in streams], shape, dtype)
            except CodecError:
                outcomes.append(b"")
            else:
                assert np.isfinite(as_float32(out)).all()
                outcomes.append(out.tobytes())
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_refusals_are_named(implementation):
    page = as_dtype(normal(40, 1, 4), np.uint16)
    page[:, 0, 3] = 0
    shape = PageShape(40, 1, 4)
    codec = get_codec("nested", exact=True, implementation=implementation)
    whole = encode(codec, page, shape)
    exact = bytearray(whole[-1])
    section_b = 8 + int.from_bytes(exact[4:8], "little")
    cases = {
        "between 8 and": exact[:7],
        "header of the exact stream is damaged": b"\x03" + exact[1:],
        "too short": exact[:-1],
        "longer than": exact + b"\x00",
        "plain page takes": bytes(8) + exact[8:],
        "unknown kind of flat": exact[:section_b] + bytes([exact[section_b] | 3]) + exact[section_b + 1 :],
    }
    for message, damaged in cases.items():
        with pytest.raises(CodecError, match=message):
            decode(codec, [*whole[:-1], bytes(damaged)], shape, np.uint16)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_fewer_bits_than_the_format(dtype):
    """The mean of bits a value in the exact stream is near the logarithm of the members of a cell."""
    page = as_dtype(normal(256, 1, 64, seed=5), dtype)
    streams = encode(get_codec("nested", exact=True, chunk=64), page, PageShape(*page.shape))
    assert 8 * len(streams[-1]) / page.size < (2.9 if dtype is np.uint16 else 5.9)
