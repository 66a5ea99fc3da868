"""Refusals: values that cannot be encoded, buffers that do not fit, bytes that are no page."""

from __future__ import annotations

import numpy as np
import pytest
from codec_inputs import ALL_NAMES, DTYPES, as_dtype, decode, encode, normal, pages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lynx_codec import CodecError, NonFiniteError, PageShape, get_codec

IMPLEMENTATIONS = ("compiled", "reference")
SHAPE = PageShape(70, 2, 5, 4, 6)


@pytest.mark.parametrize("token", [0, 3, 4, 31, 32, 63, 64, 69])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_not_finite_is_named(implementation, dtype, value, token):
    page = normal(*SHAPE.array_shape)
    page[token, 1, 3] = value
    for name in ALL_NAMES:
        codec = get_codec(name, implementation=implementation)
        with pytest.raises(NonFiniteError, match=f"token {token}, head 1, channel 3") as caught:
            encode(codec, as_dtype_keeping_nan(page, dtype), SHAPE)
        assert (caught.value.token, caught.value.head, caught.value.channel) == (token, 1, 3)


def as_dtype_keeping_nan(page: np.ndarray, dtype: type) -> np.ndarray:
    return page.astype(np.float16) if dtype is np.float16 else as_dtype(page, dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ALL_NAMES)
def test_magnitude_limit(name, implementation):
    codec = get_codec(name, implementation=implementation)
    page = normal(40, 1, 2)
    page[7, 0, 1] = -(2.0**126)
    page[9, 0, 1] = 2.0**126
    got = decode(codec, encode(codec, page, PageShape(40, 1, 2)), PageShape(40, 1, 2))
    assert np.isfinite(got).all()
    page[7, 0, 1] = np.nextafter(np.float32(-(2.0**126)), np.float32(-np.inf))
    with pytest.raises(NonFiniteError):
        encode(codec, page, PageShape(40, 1, 2))


@pytest.mark.parametrize("name", ALL_NAMES)
def test_wrong_arrays(name):
    codec = get_codec(name)
    outs = [memoryview(bytearray(n)) for n in codec.stream_bytes(SHAPE, wide=True)]
    with pytest.raises(CodecError, match="shape"):
        codec.encode(normal(69, 2, 5), SHAPE, outs)
    with pytest.raises(TypeError, match="float64"):
        codec.encode(normal(70, 2, 5).astype(np.float64), SHAPE, outs)
    streams = encode(codec, normal(70, 2, 5), SHAPE)
    with pytest.raises(TypeError, match="int16"):
        codec.decode([memoryview(s) for s in streams], SHAPE, np.zeros(SHAPE.array_shape, np.int16))
    locked = np.zeros(SHAPE.array_shape, np.float32)
    locked.flags.writeable = False
    with pytest.raises(CodecError, match="read-only"):
        codec.decode([memoryview(s) for s in streams], SHAPE, locked)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_wrong_buffers(name):
    codec = get_codec(name)
    page = normal(70, 2, 5)
    sizes = codec.stream_bytes(SHAPE, wide=True)
    for index in range(len(sizes)):
        buffers = [bytearray(b"\x11" * n) for n in sizes]
        buffers[index] = buffers[index][:-1]
        with pytest.raises(CodecError, match="are needed"):
            codec.encode(page, SHAPE, [memoryview(b) for b in buffers])
        assert all(set(b) == {0x11} for b in buffers)
    with pytest.raises(CodecError, match="read-only"):
        codec.encode(page, SHAPE, [memoryview(bytes(n)) for n in sizes])
    with pytest.raises(CodecError, match="not contiguous"):
        codec.encode(page, SHAPE, [memoryview(bytearray(2 * n))[::2] for n in sizes])
    with pytest.raises(CodecError, match="streams"):
        codec.encode(page, SHAPE, [memoryview(bytearray(n)) for n in (*sizes, 9)])


@pytest.mark.parametrize("name", ALL_NAMES)
def test_wrong_stream_counts(name):
    codec = get_codec(name)
    streams = [memoryview(s) for s in encode(codec, normal(70, 2, 5), SHAPE)]
    out = np.empty(SHAPE.array_shape, np.float32)
    for wrong in ([], [*streams, streams[0]]):
        with pytest.raises(CodecError, match="streams given"):
            codec.decode(wrong, SHAPE, out)


@pytest.mark.parametrize(
    ("offset", "field"),
    [
        (0, "magic"),
        (4, "version"),
        (5, "codec"),
        (6, "dtype of raw"),
        (7, "flags"),
        (8, "tokens"),
        (10, "heads"),
        (12, "head_size"),
        (14, "raw_head"),
        (16, "raw_tail"),
        (18, "chunk"),
        (20, "alpha"),
        (24, "fine"),
        (26, "reserved"),
        (31, "reserved"),
    ],
)
@pytest.mark.parametrize("name", ALL_NAMES)
def test_header_fields_are_named(name, offset, field):
    codec = get_codec(name)
    streams = [bytearray(s) for s in encode(codec, normal(70, 2, 5), SHAPE)]
    streams[0][offset] ^= 0x40
    with pytest.raises(CodecError, match=field):
        codec.decode([memoryview(s) for s in streams], SHAPE, np.empty(SHAPE.array_shape, np.float32))


def test_alpha_must_agree():
    streams = encode(get_codec("lynx", alpha=2.0), normal(70, 2, 5), SHAPE)
    with pytest.raises(CodecError, match=r"alpha is 2\.0, expected 1\.0"):
        decode(get_codec("lynx", alpha=1.0), streams, SHAPE)


def test_centroids_travel_in_the_header():
    """Another anchor table decodes without a change of format, and changes the anchor only."""
    codec = get_codec("lynx")
    streams = [bytearray(s) for s in encode(codec, normal(70, 2, 5), SHAPE)]
    before = [decode(codec, [bytes(s) for s in streams[:n]], SHAPE) for n in (1, 2)]
    streams[0][32:64] = (np.frombuffer(streams[0][32:64], "<f2") / 2).tobytes()
    after = [decode(codec, [bytes(s) for s in streams[:n]], SHAPE) for n in (1, 2)]
    assert (before[0][4:64] != after[0][4:64]).any()
    assert (before[1] == after[1]).all()
    streams[0][32:34] = np.float16(1.5).tobytes()
    with pytest.raises(CodecError, match="centroids"):
        decode(codec, [bytes(s) for s in streams], SHAPE)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pages(max_tokens=40), st.sampled_from(ALL_NAMES), st.data())
def test_corrupt_bytes(sample, name, data):
    """Any change of the bytes ends in CodecError or finite values, the same in both implementations."""
    page, shape = sample
    streams = [bytearray(s) for s in encode(get_codec(name), page, shape)]
    which = data.draw(st.integers(0, len(streams) - 1))
    victim = streams[which]
    kind = data.draw(st.sampled_from(("flip", "truncate", "extend", "noise")))
    if kind == "truncate" and victim:
        del victim[data.draw(st.integers(0, len(victim) - 1)) :]
    elif kind == "extend":
        victim += b"\x00"
    elif kind == "noise":
        start = 64 if which == 0 else 0
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        victim[start:] = rng.integers(0, 256, max(len(victim) - start, 0), dtype=np.uint8).tobytes()
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            if victim:
                at = data.draw(st.integers(0, len(victim) - 1))
                victim[at] ^= data.draw(st.integers(1, 255))
    for dtype in DTYPES:
        outcomes = []
        for implementation in IMPLEMENTATIONS:
            codec = get_codec(name, implementation=implementation)
            try:
                out = decode(codec, [bytes(s) for s in streams], shape, dtype)
            except CodecError:
                outcomes.append(b"")
            else:
                floats = out if dtype is not np.uint16 else (out.astype(np.uint32) << 16).view(np.float32)
                assert np.isfinite(floats).all()
                outcomes.append(out.tobytes())
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("low", "scale"), [(0x7F80, 0), (0x7FC0, 0), (0, 0x8001), (0, 0x7F80), (0x7E80, 0x7E80), (0xFF00, 0)]
)
def test_page_fields_out_of_range(implementation, low, scale):
    """A minimum or scale that could make a decoded value infinite is refused."""
    shape = PageShape(3, 1, 1)
    for name, header in (("lynx", 64), ("int8", 32), ("int4", 32)):
        codec = get_codec(name, implementation=implementation)
        streams = [bytearray(s) for s in encode(codec, normal(3, 1, 1), shape)]
        streams[0][header : header + 4] = low.to_bytes(2, "little") + scale.to_bytes(2, "little")
        with pytest.raises(CodecError, match="page minimum"):
            decode(codec, [bytes(s) for s in streams], shape)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_raw_tokens_out_of_range(implementation):
    shape = PageShape(3, 1, 1, 1, 1)
    for name, header in (("lynx", 64), ("int8", 32), ("bf16", 32)):
        codec = get_codec(name, implementation=implementation)
        streams = [bytearray(s) for s in encode(codec, normal(3, 1, 1), shape)]
        streams[0][header : header + 2] = b"\x80\x7f"
        with pytest.raises(CodecError, match="not finite"):
            decode(codec, [bytes(s) for s in streams], shape)


@pytest.mark.parametrize("name", ["int8", "nested"])
def test_scales_that_no_encoder_writes(name):
    """A page scale below the least that encoders know decodes like any other, and alike in both implementations."""
    page = normal(40, 1, 2)
    shape = PageShape(*page.shape)
    anchor, *later = encode(get_codec(name), page, shape)
    at = get_codec(name).sections(shape, False).page_scale
    changed = [anchor[:at] + b"\x01\x00\x40\x00" + anchor[at + 4 :], *later]
    found = [decode(get_codec(name, implementation=i), changed, shape) for i in IMPLEMENTATIONS]
    assert found[0].tobytes() == found[1].tobytes()
    assert np.isfinite(found[0]).all()
