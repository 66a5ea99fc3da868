"""The comparison codecs do what their papers say: levels, axes, rotations, bins, and the bits that they count."""

from __future__ import annotations

from itertools import pairwise
from math import erf, exp, pi, sqrt

import numpy as np
import pytest
from codec_inputs import COMPARISON, as_dtype, as_float32, decode, encode, normal, pages, round_trip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lynx_codec import CodecError, PageShape, bits_per_value, get_codec
from lynx_codec.baselines import rans, rans_compiled
from lynx_codec.baselines.cachegen_tables import ESCAPE, PEAK, TABLES, symbol_tables
from lynx_codec.baselines.fp8 import e4m3_nearest, e4m3_values
from lynx_codec.baselines.turboquant import HALF_LEVELS, rotate, rotate_back
from lynx_codec.layout import HEADER_BYTES

FULL = PageShape(256, 2, 64)
VARIANTS = (
    ("fp8", {}),
    ("int8_token", {}),
    ("int4_token", {}),
    ("kivi", {"bits": 2, "axis": "channel"}),
    ("kivi", {"bits": 4, "axis": "token"}),
    ("kivi", {"bits": 2, "axis": "token", "group": 64}),
    ("turboquant", {"bits": 2}),
    ("turboquant", {"bits": 3}),
    ("turboquant", {"bits": 4, "seed": 3}),
    ("cachegen", {"bin": 0.5}),
    ("cachegen", {"bin": 1.5, "unit": "channel"}),
)
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def error(page: np.ndarray, got: np.ndarray) -> float:
    """Squared error relative to the page."""
    page = page.astype(np.float64)
    return float(((got - page) ** 2).sum() / (page**2).sum())


def smooth(tokens: int, heads: int, size: int, seed: int = 0) -> np.ndarray:
    """Neighbouring tokens are alike, channels differ in scale and offset."""
    rng = np.random.default_rng(seed)
    page = normal(tokens, heads, size, seed=seed)
    for t in range(1, tokens):
        page[t] = 0.9 * page[t - 1] + np.sqrt(1 - 0.81) * page[t]
    page = page * np.exp(rng.normal(0, 1, (1, heads, size))) + rng.normal(0, 3, (1, heads, size))
    return page.astype(np.float32)


@SETTINGS
@given(pages(), st.sampled_from(VARIANTS), st.sampled_from((np.float32, np.float16, np.uint16)))
def test_finite_and_alike(sample, variant, dtype):
    """Any page comes back finite, and as the reference makes it."""
    page, shape = sample
    name, params = variant
    page = as_dtype(page, dtype)
    compiled, reference = (get_codec(name, implementation=i, **params) for i in ("compiled", "reference"))
    streams = encode(compiled, page, shape)
    assert encode(reference, page, shape) == streams
    got = decode(compiled, streams, shape)
    assert np.isfinite(got).all()
    assert decode(reference, streams, shape).tobytes() == got.tobytes()


@pytest.mark.parametrize(
    ("name", "params", "bits", "limit"),
    [
        ("fp8", {}, 8 + 16 / 256, 9e-4),
        ("int8_token", {}, 8 + 32 / 64, 4e-5),
        ("int4_token", {}, 4 + 32 / 64, 1e-2),
        ("kivi", {"bits": 2, "axis": "channel"}, 3, 0.18),
        ("kivi", {"bits": 4, "axis": "channel"}, 5, 7e-3),
        ("kivi", {"bits": 4, "axis": "token"}, 5, 7e-3),
        ("turboquant", {"bits": 2}, 2 + 16 / 64, 0.12),
        ("turboquant", {"bits": 3}, 3 + 16 / 64, 0.035),
        ("turboquant", {"bits": 4}, 4 + 16 / 64, 0.0097),
    ],
)
def test_bits_and_error_on_noise(name, params, bits, limit):
    """Exact bits of a full page; the errors of turboquant are those of table 1 of the paper (0.117, 0.03, 0.009)."""
    codec = get_codec(name, **params)
    assert bits_per_value(codec, FULL) == bits + 8 * codec.header_bytes / FULL.values
    page = normal(*FULL.array_shape)
    assert error(page, round_trip(name, page, **params)) < limit


def test_more_bits_are_better():
    page = normal(*FULL.array_shape)
    for name, each in (
        ("turboquant", [{"bits": b} for b in (4, 3, 2)]),
        ("kivi", [{"bits": b} for b in (4, 2)]),
        ("cachegen", [{"bin": b} for b in (0.25, 0.5, 1.0, 1.5)]),
    ):
        errors = [error(page, round_trip(name, page, **params)) for params in each]
        assert errors == sorted(errors)
        assert errors[-1] > 2 * errors[0]
    assert error(page, round_trip("int8_token", page)) * 100 < error(page, round_trip("int4_token", page))


@pytest.mark.parametrize("name", COMPARISON)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_raw_tokens(name, dtype):
    """They are 16-bit copies, and what they hold changes no coded token."""
    shape = PageShape(100, 2, 6, 4, 64)
    page = as_dtype(normal(*shape.array_shape), dtype)
    got = round_trip(name, page, shape)
    raw = np.r_[0:4, 36:100]
    assert np.abs(got[raw] - as_float32(page)[raw]).max() <= (0 if dtype is not np.float32 else 2**-6)
    page[raw] = as_dtype(np.full((1,), 3e4, np.float32), dtype)
    assert (round_trip(name, page, shape)[4:36] == got[4:36]).all()


@pytest.mark.parametrize("tokens", [1, 2, 9, 10, 11, 31, 32, 33, 257])
@pytest.mark.parametrize(("name", "params"), VARIANTS)
def test_odd_token_counts(name, params, tokens):
    page = normal(tokens, 2, 5)
    assert error(page, round_trip(name, page, **params)) < (0.02 if "bits" not in params else 0.35) + params.get(
        "bin", 0
    )


@pytest.mark.parametrize("name", COMPARISON)
def test_parameters_must_agree(name):
    """A peer with other parameters is told so, not given other numbers."""
    streams = [bytearray(s) for s in encode(get_codec(name), normal(20, 1, 8), PageShape(20, 1, 8))]
    streams[0][HEADER_BYTES + 4] ^= 1
    with pytest.raises(CodecError, match=f"parameters of {name}"):
        decode(get_codec(name), [bytes(s) for s in streams], PageShape(20, 1, 8))


@pytest.mark.parametrize("name", COMPARISON)
def test_fine_tokens_are_ordinary_here(name):
    """There is one stream, so all bits of every token are in it already."""
    page = normal(40, 2, 8)
    plain, fine = PageShape(40, 2, 8, 1, 4), PageShape(40, 2, 8, 1, 4, fine=16)
    assert get_codec(name).stream_bytes(plain) == get_codec(name).stream_bytes(fine)
    assert (round_trip(name, page, plain) == round_trip(name, page, fine)).all()


# --- the parts -------------------------------------------------------------------------------------------------------


def test_e4m3_is_nearest():
    """Against a search through all numbers of the format, ties included."""
    table = e4m3_values()[:127].astype(np.float64)
    assert table[-1] == 448
    assert table[1] == 2.0**-9
    rng = np.random.default_rng(0)
    middles = (table[1:] + table[:-1]) / 2
    values = np.concatenate(
        [table, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), rng.uniform(0, 448, 500), [1e6]]
    )
    codes = e4m3_nearest(values.astype(np.float32)).astype(int)
    distance = np.abs(table[None] - values.astype(np.float32).astype(np.float64)[:, None])
    assert (distance[np.arange(len(values)), codes] == distance.min(axis=1)).all()
    ties = e4m3_nearest(middles.astype(np.float32))
    assert (ties % 2 == 0).all()
    assert (e4m3_nearest(-values.astype(np.float32)) == codes + 128).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_lloyd_max(bits):
    """Each level is the mean of a normal variable between the midpoints to its neighbours."""

    def density(x: float) -> float:
        return exp(-x * x / 2) / sqrt(2 * pi)

    levels = HALF_LEVELS[bits]
    assert len(levels) == 2 ** (bits - 1)
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), 40.0]
    for level, (low, high) in zip(levels, pairwise(edges), strict=True):
        mass = (erf(high / sqrt(2)) - erf(low / sqrt(2))) / 2
        assert level == pytest.approx((density(low) - density(high)) / mass, abs=2e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 80, 96, 128, 192, 576])
def test_rotation_is_orthonormal(size):
    rows = normal(7, size).astype(np.float64)
    turned = rotate(rows, 1)
    assert rotate_back(turned, 1) == pytest.approx(rows, abs=1e-12)
    assert (turned**2).sum(axis=1) == pytest.approx((rows**2).sum(axis=1))
    assert size == 1 or (rotate(rows, 2) != turned).any()


@pytest.mark.parametrize("size", [64, 80, 96, 192])
def test_rotation_spreads_a_single_channel(size):
    """A channel that is 30 times the others does not cost them their levels, as it does without rotation."""
    page = normal(128, 1, size)
    page[:, 0, 3] *= 30
    assert error(page, round_trip("turboquant", page, bits=4)) < 0.014
    rest = np.arange(size) != 3
    assert error(page[..., rest], round_trip("int4_token", page)[..., rest]) > 0.3


def test_kivi_axes():
    """Per channel, a channel's offset costs nothing; per token, a token's does."""
    base = normal(128, 2, 64)
    channels = base + np.linspace(-50, 50, 64, dtype=np.float32)
    tokens = base + np.linspace(-50, 50, 128, dtype=np.float32)[:, None, None]
    for page, good, bad in ((channels, "channel", "token"), (tokens, "token", "channel")):
        errors = {axis: ((round_trip("kivi", page, bits=4, axis=axis) - page) ** 2).mean() for axis in (good, bad)}
        assert errors[good] * 5 < errors[bad]


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_kivi_groups_are_independent(axis):
    page = normal(70, 2, 70)
    other = page.copy()
    other[32:64, 1, 32:64] *= 9
    ours, theirs = (round_trip("kivi", p, axis=axis) for p in (page, other))
    changed = ours != theirs
    assert changed[32:64, 1, 32:64].any()
    changed[32:64, 1, 32:64] = False
    assert not changed.any()


# --- cachegen --------------------------------------------------------------------------------------------------------


def cachegen_bits(page: np.ndarray, **params: object) -> float:
    codec = get_codec("cachegen", **params)
    return 8 * len(encode(codec, page, PageShape(*page.shape))[0]) / page.size


def test_cachegen_takes_few_bits_on_smooth_data():
    page = smooth(256, 2, 64)
    codec = get_codec("cachegen")
    assert codec.variable_streams == {0}
    bits = [cachegen_bits(page, bin=b) for b in (0.5, 1.0, 1.5)]
    assert bits == sorted(bits, reverse=True)
    assert bits[0] < 4
    assert bits[2] < 2
    assert bits[0] < bits_per_value(codec, FULL)
    assert error(page, round_trip("cachegen", page, bin=0.5)) < 0.01


def test_cachegen_bits_are_close_to_the_entropy():
    """All bytes counted, the stream is within 0.1 bits a value of an ideal coder that knows the histogram."""
    page = normal(512, 2, 64)
    others = np.arange(512) % 10 != 0
    got = round_trip("cachegen", page)
    anchors = np.repeat(got[::10], 10, axis=0)[:512]
    bins = (got - anchors)[others]
    step = np.abs(bins[np.abs(bins) > 1e-3]).min()
    counts = np.unique(np.rint(bins / step), return_counts=True)[1] / bins.size
    entropy = -(counts * np.log2(counts)).sum() * others.mean() + 8 * (~others).mean()
    metadata = 32 / 64 / 10 + 8 / 512
    assert entropy + metadata < cachegen_bits(page) < entropy + metadata + 0.1


def test_cachegen_anchor_tokens_have_eight_bits():
    page = smooth(50, 1, 64)
    got = round_trip("cachegen", page, bin=1.5)
    assert error(page[::10], got[::10]) * 100 < error(page[1::10], got[1::10])


def test_cachegen_stores_what_the_coder_would_make_longer():
    """Two differences take less room than the state of the coder: they travel as they are, and the bound is exact."""
    page, shape = normal(3, 1, 1), PageShape(3, 1, 1)
    codec = get_codec("cachegen", bin=2.0**-6)
    streams = encode(codec, page, shape)
    assert len(streams[0]) == codec.stream_bytes(shape)[0]
    assert error(page, decode(codec, streams, shape)) < 1e-4


@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_cachegen_of_any_other_length_is_refused(tokens):
    """Its length is in no table, so each way to be too short or too long has to be found."""
    page, shape = normal(tokens, 1, 4), PageShape(tokens, 1, 4)
    codec = get_codec("cachegen")
    (stream,) = encode(codec, page, shape)
    for size in range(len(stream)):
        with pytest.raises(CodecError):
            decode(codec, [stream[:size]], shape)
    for extra in (1, 2, 1000):
        with pytest.raises(CodecError):
            decode(codec, [stream + bytes(extra)], shape)


def test_cachegen_escapes():
    """Differences beyond the alphabet still come back to within half a bin."""
    page = normal(256, 1, 64)
    page[77, 0, 5] = 5000
    got = round_trip("cachegen", page, bin=0.1)
    assert got[77, 0, 5] == pytest.approx(5000, abs=0.06 * 5000 / 100)


@given(st.lists(st.integers(0, 254), min_size=1, max_size=60), st.integers(1, 5), st.integers(0, 2**32 - 1))
@SETTINGS
def test_coder_round_trip(symbols, channels, seed):
    known = symbol_tables()
    rng = np.random.default_rng(seed)
    tables = rng.integers(0, TABLES, channels)
    room = known.frequencies.reshape(TABLES, -1)
    symbols = symbols * channels
    symbols = [s if room[tables[i % channels], s] else ESCAPE for i, s in enumerate(symbols)]
    words = np.zeros(2 * len(symbols) + 8, np.int64)
    first = rans_compiled.encode_words(np.array(symbols), tables, known.frequencies, known.starts, words)
    plain = [0] * len(words)
    arguments = (symbols, tables.tolist(), known.frequencies.tolist(), known.starts.tolist())
    assert rans.encode_words(*arguments, plain) == first
    assert plain == words.tolist()
    back = [0] * len(symbols)
    decoding = (tables.tolist(), known.frequencies.tolist(), known.starts.tolist(), known.slots.tolist())
    assert rans.decode_words(plain[first:], *decoding, back) == 0
    assert back == symbols
    assert rans.decode_words(plain[first:-1], *decoding, back) == rans.BAD
    assert rans.decode_words([*plain[first:], 0], *decoding, back) == rans.BAD
    assert rans.encode_words(*arguments, [0] * (len(words) - first - 1)) == rans.BAD


def test_symbol_tables():
    frequencies = symbol_tables().frequencies.reshape(TABLES, -1)
    assert (frequencies.sum(axis=1) == rans.TOTAL).all()
    assert (frequencies[:, ESCAPE] > 0).all()
    symmetric = frequencies[:, :ESCAPE]
    assert np.abs(symmetric - symmetric[:, ::-1]).max() <= 1
    assert (symmetric[:, PEAK] >= symmetric.max(axis=1) - 1).all()
    variance = (symmetric * np.arange(-PEAK, PEAK + 1) ** 2).sum(axis=1) / symmetric.sum(axis=1)
    assert variance.min() < 1e-2
    assert variance.max() > 60**2 / 2
