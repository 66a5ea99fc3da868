"""What comes back: error bounds, and the inputs that break quantisers in the field."""

from __future__ import annotations

import numpy as np
import pytest
from codec_inputs import (
    NAMES,
    as_dtype,
    as_float32,
    decode,
    encode,
    fine_positions,
    from_bfloat16,
    normal,
    pages,
    round_trip,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lynx_codec import CHUNK_TOKENS, PageShape, bits_per_value, get_codec
from lynx_codec.layout import HEADER_BYTES, LYNX_HEADER_BYTES, Sections, chunk_spans

QUANTISED = ("int4", "int8", "lynx")


def error_share(name: str) -> float:
    """Largest error as a share of the stored chunk length: half the widest gap between two decoded values."""
    if name == "lynx":
        return (1 - 2 ** (-1 / 120)) * 2 / 2 * 1.001
    return {"int8": 0.5 / 255, "int4": 0.5 / 15}[name] * 1.001


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pages(), st.sampled_from(QUANTISED))
def test_error_bound(sample, name):
    """No value is further off than half a gap of its chunk (stored length: its range and two grid steps at most)."""
    page, shape = sample
    got = round_trip(name, page, shape).astype(np.float64)
    page = page.astype(np.float64)
    coded = page[shape.raw_head : shape.tokens - shape.raw_tail]
    if not coded.size:
        return
    top = np.abs(coded).max(axis=0)
    page_range = (coded.max(axis=0) - coded.min(axis=0)) * (1 + 2**-7) + top * 2**-7 * 1.01
    for start, stop in chunk_spans(shape):
        rows = page[start:stop]
        length = rows.max(axis=0) - rows.min(axis=0) + 2 * page_range / 255
        bound = length * error_share(name) + top * 2**-21 + 2.0**-79
        assert (np.abs(got[start:stop] - rows) <= bound).all()


@pytest.mark.parametrize(
    ("name", "streams", "limit"), [("lynx", 1, 2.5e-3 * 4), ("lynx", 2, 4e-5), ("int8", 1, 3e-5), ("int4", 1, 8e-3)]
)
def test_relative_error_on_noise(name, streams, limit):
    page = normal(256, 2, 32)
    codec = get_codec(name)
    shape = PageShape(256, 2, 32)
    got = decode(codec, encode(codec, page, shape)[:streams], shape)
    assert ((got - page) ** 2).sum() / (page**2).sum() < limit


def test_residual_improves_on_anchor():
    page, shape = normal(100, 2, 8), PageShape(100, 2, 8)
    codec = get_codec("lynx")
    streams = encode(codec, page, shape)
    coarse, fine = (np.abs(decode(codec, streams[:n], shape) - page).mean() for n in (1, 2))
    assert fine * 10 < coarse


@settings(max_examples=40, deadline=None)
@given(pages())
def test_lynx_nibbles(sample):
    """The anchor nibble holds the sign of the centred value and both nibbles rebuild a level of 0..120."""
    page, shape = sample
    codec = get_codec("lynx")
    anchor, residual = encode(codec, page, shape)
    wide = len(anchor) != codec.stream_bytes(shape)[0]
    sections = Sections.of(shape, LYNX_HEADER_BYTES, (4, 4), wide)
    data = np.frombuffer(anchor[sections.data : sections.fine], np.uint8)
    corrections = np.empty((shape.coded_tokens, sections.rows[1]), np.uint8)
    fine = np.isin(np.arange(shape.coded_tokens) + shape.raw_head, fine_positions(shape))
    for chosen, rows in ((~fine, residual), (fine, anchor[sections.fine :])):
        corrections[chosen] = np.frombuffer(rows, np.uint8).reshape(-1, sections.rows[1])
    corrections = corrections.reshape(-1)
    for shift in (0, 4):
        nibble = ((data >> shift) & 15).astype(int)
        signed = np.where(nibble >= 8, nibble - 16, nibble)
        magnitude = np.where(signed < 0, -signed - 1, signed)
        correction = ((corrections >> shift) & 15).astype(int)
        correction = np.where(correction >= 8, correction - 16, correction)
        level = 16 * magnitude - correction
        assert ((level >= 0) & (level <= 120)).all()
        assert ((level + 7) // 16 == magnitude).all()


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("spike", [1e4, 1e5, 1e6])
def test_spike_leaves_quiet_chunks_alone(name, spike):
    """Errata 6: one huge value must not cost the other chunks of its channel their precision."""
    page = normal(256, 1, 4)
    page[40, 0, 1] = spike
    shape = PageShape(256, 1, 4)
    codec = get_codec(name)
    streams = encode(codec, page, shape)
    assert len(streams[0]) == codec.stream_bytes(shape, wide=True)[0]
    got = decode(codec, streams, shape)
    quiet = np.ones(256, bool)
    quiet[32:64] = False
    error = ((got - page)[quiet] ** 2).sum() / (page[quiet] ** 2).sum()
    limit = {"lynx": 1e-3, "int8": 1e-3, "int4": 0.3}[name]
    assert error < limit
    assert abs(got[40, 0, 1] - spike) < spike * 2e-3


def test_spike_beside_constant_chunks():
    page = np.ones((128, 1, 2), np.float32)
    page[3, 0, 0] = 1e5
    got = round_trip("lynx", page)
    assert np.abs(got[32:] - 1).max() < 0.02


@pytest.mark.parametrize(("tokens", "wide"), [(39, False), (40, True), (64, True)])
@pytest.mark.parametrize("implementation", ["compiled", "reference"])
@pytest.mark.parametrize("name", QUANTISED)
def test_short_chunks_have_no_say_in_the_escape(name, implementation, tokens, wide):
    page = normal(tokens, 1, 2)
    page[3, 0, 1] = 1e5
    codec, shape = get_codec(name, implementation=implementation), PageShape(tokens, 1, 2)
    assert len(encode(codec, page, shape)[0]) == codec.stream_bytes(shape, wide=wide)[0]


@pytest.mark.parametrize("implementation", ["compiled", "reference"])
@pytest.mark.parametrize(("range_steps", "wide"), [(3.75, True), (4.25, False)])
@pytest.mark.parametrize("name", QUANTISED)
def test_escape_limit(name, range_steps, wide, implementation):
    """A chunk with an extent just below four steps of the grid makes a page wide, just above it does not."""
    page = np.zeros((64, 1, 1), np.float32)
    page[0] = 255
    page[32:] = np.linspace(100.3, 100.3 + range_steps, 32).reshape(-1, 1, 1)
    page[1:32] = np.linspace(0, 9, 31).reshape(-1, 1, 1)
    codec, shape = get_codec(name, implementation=implementation), PageShape(64, 1, 1)
    assert len(encode(codec, page, shape)[0]) == codec.stream_bytes(shape, wide=wide)[0]


@pytest.mark.parametrize("implementation", ["compiled", "reference"])
@pytest.mark.parametrize("name", QUANTISED)
def test_constant_chunk_far_from_zero_does_not_escape(name, implementation):
    """Its magnitude is what must be resolved, and the 8-bit grid does that."""
    page = normal(64, 1, 1) * np.float32(10) + np.float32(600)
    page[32:] = 601.37
    codec, shape = get_codec(name, implementation=implementation), PageShape(64, 1, 1)
    assert len(encode(codec, page, shape)[0]) == codec.stream_bytes(shape)[0]
    page[32:] = 0
    page[:32] -= np.float32(600.123)
    assert len(encode(codec, page, shape)[0]) == codec.stream_bytes(shape, wide=True)[0]


def test_ordinary_pages_do_not_escape():
    for seed in range(5):
        for tokens in (256, 33, 34, 36, 39, 1):
            page = normal(tokens, 3, 64, seed=seed)
            for name in QUANTISED:
                codec = get_codec(name)
                shape = PageShape(*page.shape)
                assert len(encode(codec, page, shape)[0]) == codec.stream_bytes(shape)[0]


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_beyond_float16(name):
    page = normal(64, 1, 8)
    page[10, 0, 3] = 1.25e5
    got = round_trip(name, as_dtype(page, np.uint16))
    assert np.isfinite(got).all()
    assert got[10, 0, 3] == pytest.approx(1.25e5, rel=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_float16_output_saturates(name):
    page = np.full((40, 1, 2), 1.25e5, np.float32)
    page[:, 0, 1] = -7e4
    codec = get_codec(name)
    shape = PageShape(40, 1, 2)
    for implementation in ("compiled", "reference"):
        codec = get_codec(name, implementation=implementation)
        got = decode(codec, encode(codec, page, shape), shape, np.float16)
        assert (got[:, 0, 0] == 65504).all()
        assert (got[:, 0, 1] == -65504).all()


@pytest.mark.parametrize(("name", "limit"), [("lynx", 1e-4), ("int8", 1e-4), ("int4", 1e-2)])
def test_large_bias_per_channel(name, limit):
    """Keys with a constant of 600 to 900 per channel beside a signal of norm 22: the signal survives."""
    signal = normal(256, 2, 64) * np.float32(22 / 8)
    bias = np.random.default_rng(1).uniform(600, 900, size=(1, 2, 64)).astype(np.float32)
    got = round_trip(name, signal + bias)
    centred = signal - signal.mean(axis=0)
    assert ((got - bias - signal) ** 2).sum() / (centred**2).sum() < limit


def test_bias_survives_in_the_anchor_alone():
    signal = normal(256, 2, 64) * np.float32(22 / 8)
    page = signal + np.float32(750)
    codec, shape = get_codec("lynx"), PageShape(256, 2, 64)
    got = decode(codec, encode(codec, page, shape)[:1], shape)
    assert ((got - page) ** 2).sum() / (signal**2).sum() < 0.015


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.25, 1.25e5, 2.0**126, -(2.0**126), 1e-30, 2.0**-149])
@pytest.mark.parametrize("name", NAMES)
def test_constant_channels_are_exact(name, value):
    """Constants that bfloat16 can hold come back exactly; below 2**-80 the format sees 0 or the value."""
    page = np.full((50, 1, 3), value, np.float32)
    page[:, 0, 1] = normal(50)
    got = round_trip(name, page)
    assert np.abs(got[:, 0, ::2] - np.float32(value)).max() <= max(abs(value) * 2**-8, 2.0**-80)
    if from_bfloat16(as_dtype(page, np.uint16))[0, 0, 0] == page[0, 0, 0]:
        assert (got[:, 0, ::2] == np.float32(value)).all()


@pytest.mark.parametrize("name", QUANTISED)
def test_constant_that_bfloat16_cannot_hold(name):
    page = np.full((50, 1, 2), 1234.567, np.float32)
    assert np.abs(round_trip(name, page) / page - 1).max() < 2e-4


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 255, 256, 257, 511, 512, 513])
def test_odd_token_counts(name, tokens):
    page = normal(tokens, 2, 5)
    got = round_trip(name, page)
    assert ((got - page) ** 2).sum() <= 0.02 * (page**2).sum()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("name", NAMES)
def test_raw_tokens_are_16_bit_copies(name, dtype):
    page = as_dtype(normal(100, 2, 6), dtype)
    got = round_trip(name, page, PageShape(100, 2, 6, 4, 64))
    raw = np.r_[0:4, 36:100]
    if dtype is np.float32:
        assert np.abs(got[raw] / page[raw] - 1).max() <= 2**-8
    else:
        assert (got[raw] == as_float32(page)[raw]).all()


@pytest.mark.parametrize("name", QUANTISED)
def test_raw_tokens_change_no_scale(name):
    """Whatever the raw tokens hold, the coded ones keep their bytes."""
    codec = get_codec(name)
    shape = PageShape(90, 1, 4, 5, 9)
    page = normal(90, 1, 4)
    other = page.copy()
    other[:5] = 1e30
    other[81:] = -1e30
    header = LYNX_HEADER_BYTES if name == "lynx" else HEADER_BYTES
    behind = header + 2 * 14 * 4
    ours, theirs = encode(codec, page, shape), encode(codec, other, shape)
    assert ours[0][behind:] == theirs[0][behind:]
    assert ours[1:] == theirs[1:]


@pytest.mark.parametrize("name", QUANTISED)
def test_chunks_are_independent(name):
    """A change inside one chunk that leaves the page extremes alone changes no other chunk."""
    page = normal(128, 1, 4)
    page[0], page[1] = -10, 10
    other = page.copy()
    other[40:60] *= np.float32(0.5)
    ours, theirs = round_trip(name, page), round_trip(name, other)
    assert (ours[:32] == theirs[:32]).all()
    assert (ours[64:] == theirs[64:]).all()
    assert (ours[32:64] != theirs[32:64]).any()


@pytest.mark.parametrize("name", QUANTISED)
def test_heads_and_channels_are_independent(name):
    page = normal(70, 3, 5)
    whole = round_trip(name, page)
    for head in range(3):
        alone = round_trip(name, page[:, head : head + 1])
        assert (alone == whole[:, head : head + 1]).all()


@settings(max_examples=30, deadline=None)
@given(pages(), st.sampled_from(NAMES))
def test_bits_are_the_bytes(sample, name):
    page, shape = sample
    codec = get_codec(name)
    streams = encode(codec, page, shape)
    wide = len(streams[0]) != codec.stream_bytes(shape)[0]
    if shape.values:
        found = 8 * sum(map(len, streams)) / shape.values
        assert bits_per_value(codec, shape, wide=wide) == found
        assert bits_per_value(codec, shape, streams=1, wide=wide) == 8 * len(streams[0]) / shape.values
    else:
        assert bits_per_value(codec, shape) == 0.0


def test_bits_of_a_full_page():
    shape = PageShape(256, 8, 128)
    small = 8 * LYNX_HEADER_BYTES / shape.values
    assert bits_per_value(get_codec("lynx"), shape, streams=1) == 4.625 + small
    assert bits_per_value(get_codec("lynx"), shape) == 8.625 + small
    small = 8 * HEADER_BYTES / shape.values
    assert bits_per_value(get_codec("int4"), shape) == 4.625 + small
    assert bits_per_value(get_codec("int8"), shape) == 8.625 + small
    assert bits_per_value(get_codec("bf16"), shape) == 16 + small
    assert CHUNK_TOKENS == 32
