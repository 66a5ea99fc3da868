"""The compiled engine and the numpy reference write the same bytes and read the same floats, on any input."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from codec_inputs import ALL_NAMES, DTYPES, HEAD_SIZES, LAYOUTS, as_dtype, decode, encode, normal, pages, with_layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lynx_codec import CodecError, PageShape, get_codec
from lynx_codec.reference import read_fields
from lynx_codec.tables import UNIT

SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    get_codec("lynx").warm_up()


def check_agreement(name: str, page: np.ndarray, shape: PageShape, out_dtype: type, **params: float) -> None:
    reference = get_codec(name, implementation="reference", **params)
    compiled = get_codec(name, **params)
    streams = encode(reference, page, shape)
    assert encode(compiled, page, shape) == streams
    for count in range(1, len(streams) + 1):
        expected = decode(reference, streams[:count], shape, out_dtype)
        found = decode(compiled, streams[:count], shape, out_dtype)
        assert found.tobytes() == expected.tobytes()


@SETTINGS
@given(
    pages(),
    st.sampled_from(ALL_NAMES),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS),
    st.sampled_from((0.5, 1.0, 2.0, 15.0)),
)
def test_same_bytes_and_floats(sample, name, dtype, out_dtype, layout, alpha):
    page, shape = sample
    params = {"alpha": alpha} if name == "lynx" else {}
    check_agreement(name, with_layout(as_dtype(page, dtype), layout), shape, out_dtype, **params)


@SETTINGS
@given(st.data(), st.sampled_from(ALL_NAMES))
def test_same_on_any_bit_pattern(data, name):
    """float32 pages made of arbitrary bits: both refuse the page at the same place, or agree."""
    bits = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=48))
    page = np.array(bits, dtype=np.uint32).view(np.float32).reshape(-1, 1, 1)
    shape = PageShape(len(bits), 1, 1)
    outcomes = []
    for implementation in ("reference", "compiled"):
        try:
            outcomes.append(encode(get_codec(name, implementation=implementation), page, shape))
        except CodecError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("seed", "token", "channel"), [(403, 12, 45), (646, 11, 97)])
def test_a_product_just_below_a_threshold_is_not_rounded_up_to_it(seed, token, channel):
    """Found among thousands of pages: in float32 the product of this value would reach the next threshold."""
    shape = PageShape(32, 1, 128)
    page = np.random.default_rng(seed).standard_normal(shape.array_shape).astype(np.float32)
    codec = get_codec("lynx", implementation="reference")
    streams = encode(codec, page, shape)
    assert encode(get_codec("lynx"), page, shape) == streams
    anchor = np.frombuffer(streams[0], np.uint8)
    grid, mu_code, sigma_code = read_fields(anchor, codec.sections(shape, False), shape, False)
    size = abs(page[token, 0, channel] - grid.place(mu_code)[0, channel])
    per_unit = np.float32(UNIT) / grid.length(sigma_code)[0, channel]
    exact, rounded = Fraction(float(size)) * Fraction(float(per_unit)), float(size * per_unit)
    level, wrong = (int(np.searchsorted(codec.tables.thresholds, int(u), side="right")) for u in (exact, rounded))
    assert wrong == level + 1
    full = abs(decode(codec, streams, shape)[token, 0, channel] - grid.place(mu_code)[0, channel])
    values = codec.tables.values * grid.length(sigma_code)[0, channel]
    assert np.argmin(abs(values - full)) == level


@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("name", ALL_NAMES)
def test_head_sizes_of_real_models(name, size):
    check_agreement(name, normal(70, 2, size), PageShape(70, 2, size, 4, 5), np.float32)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_expanded_heads(name):
    """A key head shared by several query heads: stride 0."""
    page = np.broadcast_to(normal(40, 1, 6), (40, 4, 6))
    check_agreement(name, page, PageShape(40, 4, 6), np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL_NAMES)
def test_strided_output(name, dtype, layout):
    """Decoding into a view of a larger array writes the page and nothing else."""
    shape = PageShape(37, 2, 5, 3, 4)
    codec = get_codec(name)
    streams = encode(codec, normal(*shape.array_shape), shape)
    expected = decode(codec, streams, shape, dtype)
    out = with_layout(np.zeros(shape.array_shape, dtype=dtype), layout)
    owner = out.base if out.base is not None else out
    codec.decode([memoryview(s) for s in streams], shape, out)
    assert out.tobytes() == expected.tobytes()
    if layout == "window":
        out[...] = 7
        assert (owner == 7).all()


def test_threads_share_a_codec():
    shape = PageShape(256, 2, 32)
    codec = get_codec("lynx")
    inputs = [normal(*shape.array_shape, seed=i) for i in range(24)]
    expected = [encode(codec, page, shape) for page in inputs]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda page: encode(codec, page, shape), inputs)) == expected


def test_unaligned_buffers():
    shape = PageShape(40, 3, 7, 1, 2)
    page = normal(*shape.array_shape)
    for name in ALL_NAMES:
        codec = get_codec(name)
        expected = encode(codec, page, shape)
        store = [bytearray(size + 1) for size in codec.stream_bytes(shape, wide=True)]
        sizes = codec.encode(page, shape, [memoryview(s)[1:] for s in store])
        views = [memoryview(s)[1 : 1 + size] for s, size in zip(store, sizes, strict=True)]
        assert [bytes(v) for v in views] == expected
        out = np.empty(shape.array_shape, np.float32)
        codec.decode(views, shape, out)
        assert out.tobytes() == decode(codec, expected, shape).tobytes()
