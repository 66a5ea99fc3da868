"""The nested codec: every split, any chunk, fine tokens anywhere, and every prefix of its streams."""

from __future__ import annotations

from itertools import pairwise

import msgpack
import numpy as np
import pytest
from codec_inputs import (
    DTYPES,
    LAYOUTS,
    as_dtype,
    decode,
    encode,
    fine_positions,
    normal,
    pages,
    round_trip,
    with_layout,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lynx_codec import CodecError, PageShape, get_codec
from lynx_codec.nested import cell_middles, cell_points

SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SPLITS = [[8], [4, 4], [3, 5], [5, 3], [6, 2], [2, 6], [7, 1], [1, 7], [2, 2, 4], [1, 2, 5], [4, 3, 1], [1] * 8]


@st.composite
def splits(draw: st.DrawFn) -> list[int]:
    """Any way to cut 8 bits."""
    cuts = draw(st.sets(st.integers(1, 7)))
    edges = [0, *sorted(cuts), 8]
    return [b - a for a, b in pairwise(edges)]


@SETTINGS
@given(pages(), splits(), st.integers(16, 256), st.sampled_from(DTYPES), st.sampled_from(LAYOUTS))
def test_both_implementations_agree(sample, bits, chunk, dtype, layout):
    page, shape = sample
    page = with_layout(as_dtype(page, dtype), layout)
    compiled = get_codec("nested", bits=bits, chunk=chunk)
    reference = get_codec("nested", bits=bits, chunk=chunk, implementation="reference")
    streams = encode(compiled, page, shape)
    assert encode(reference, page, shape) == streams
    for count in range(1, len(streams) + 1):
        found = decode(compiled, streams[:count], shape, dtype)
        assert found.tobytes() == decode(reference, streams[:count], shape, dtype).tobytes()


@SETTINGS
@given(pages(), splits(), st.integers(16, 256))
def test_splits_only_cut_the_same_codes(sample, bits, chunk):
    """All streams together give the floats of the uncut codec, which at 32 tokens a chunk is int8."""
    page, shape = sample
    found = round_trip("nested", page, shape, bits=bits, chunk=chunk)
    assert found.tobytes() == round_trip("nested", page, shape, bits=[8], chunk=chunk).tobytes()
    if chunk == 32:
        assert found.tobytes() == round_trip("int8", page, shape).tobytes()


@pytest.mark.parametrize("bits", SPLITS, ids=str)
def test_int8_after_the_last_stream(bits):
    shape = PageShape(70, 2, 5, 3, 2, 9)
    page = normal(*shape.array_shape)
    assert round_trip("nested", page, shape, bits=bits).tobytes() == round_trip("int8", page, shape).tobytes()


@SETTINGS
@given(pages(), splits(), st.integers(16, 256))
def test_fine_and_raw_tokens_are_final_from_the_start(sample, bits, chunk):
    page, shape = sample
    codec = get_codec("nested", bits=bits, chunk=chunk)
    streams = encode(codec, page, shape)
    full = decode(codec, streams, shape)
    final = np.r_[0 : shape.raw_head, shape.tokens - shape.raw_tail : shape.tokens, fine_positions(shape)]
    for count in range(1, len(streams)):
        assert decode(codec, streams[:count], shape)[final].tobytes() == full[final].tobytes()


@pytest.mark.parametrize("position", range(2, 37))
def test_one_fine_token_at_every_position(position):
    shape = PageShape(40, 2, 5, 2, 3, 1)
    page = normal(*shape.array_shape)
    codec = get_codec("nested", bits=[3, 2, 3])
    buffers = [bytearray(n) for n in codec.stream_bytes(shape, wide=True)]
    sizes = codec.encode(page, shape, [memoryview(b) for b in buffers], np.array([position]))
    streams = [bytes(b[:n]) for b, n in zip(buffers, sizes, strict=True)]
    exact = (decode(codec, streams[:1], shape) == decode(codec, streams, shape)).all(axis=(1, 2))
    assert exact[position]
    assert exact.sum() <= 8  # beside it the raw tokens, and chance


@pytest.mark.parametrize("bits", SPLITS[1:], ids=str)
def test_every_stream_improves(bits):
    page = normal(256, 2, 64)
    shape = PageShape(256, 2, 64)
    codec = get_codec("nested", bits=bits, chunk=64)
    streams = encode(codec, page, shape)
    errors = [float(((decode(codec, streams[:n], shape) - page) ** 2).mean()) for n in range(1, len(bits) + 1)]
    for before, after, width in zip(errors, errors[1:], bits[1:], strict=False):
        assert after < before / 1.5**width


@pytest.mark.parametrize("chunk", [16, 31, 32, 64, 128, 255, 256])
@pytest.mark.parametrize("tokens", [1, 2, 257, 300])
def test_tails_and_single_tokens(tokens, chunk):
    page = normal(tokens, 1, 3)
    for bits in ([4, 4], [2, 2, 4]):
        found = round_trip("nested", page, bits=bits, chunk=chunk)
        assert np.abs(found - page).max() <= np.ptp(page, axis=0).max() / 255 + 0.05


@SETTINGS
@given(pages(max_tokens=40), splits(), st.sampled_from((16, 32, 100)), st.data())
def test_corrupt_bytes(sample, bits, chunk, data):
    """CodecError or finite numbers, the same in both implementations, after any prefix."""
    page, shape = sample
    codecs = [get_codec("nested", bits=bits, chunk=chunk, implementation=i) for i in ("compiled", "reference")]
    streams = [bytearray(s) for s in encode(codecs[0], page, shape)]
    victim = streams[data.draw(st.integers(0, len(streams) - 1))]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    start = data.draw(st.integers(0, len(victim)))
    victim[start:] = rng.integers(0, 256, len(victim) - start, dtype=np.uint8).tobytes()
    for count in range(1, len(streams) + 1):
        outcomes = []
        for codec in codecs:
            try:
                found = decode(codec, [bytes(s) for s in streams[:count]], shape)
            except CodecError:
                outcomes.append(b"")
            else:
                assert np.isfinite(found).all()
                outcomes.append(found.tobytes())
        assert outcomes[0] == outcomes[1]


def test_tokens_written_one_by_one():
    """A page of one token has the range of that token only: near to exact, and no state is left in the codec."""
    page = normal(48, 2, 8)
    codec = get_codec("nested", chunk=16)
    alone = [round_trip("nested", page[t : t + 1], chunk=16) for t in range(48)]
    assert np.abs(np.concatenate(alone) - page).max() <= np.abs(page).max() * 2**-7
    shape = PageShape(1, 2, 8)
    again = [decode(codec, encode(codec, page[t : t + 1], shape), shape) for t in range(48)]
    assert np.concatenate(again).tobytes() == np.concatenate(alone).tobytes()


def test_points_are_read_after_the_first_stream_only():
    shape = PageShape(64, 1, 8)
    codec = get_codec("nested", bits=[2, 2, 4])
    streams = [bytearray(s) for s in encode(codec, normal(64, 1, 8), shape)]
    before = [decode(codec, [bytes(s) for s in streams[:n]], shape) for n in (1, 2, 3)]
    streams[0][40:48] = cell_middles(2).astype("<f2").tobytes()
    after = [decode(codec, [bytes(s) for s in streams[:n]], shape) for n in (1, 2, 3)]
    assert [(a == b).all() for a, b in zip(before, after, strict=True)] == [False, True, True]
    streams[0][40:42] = np.float16(-1).tobytes()
    with pytest.raises(CodecError, match="outside"):
        decode(codec, [bytes(streams[0])], shape)


@pytest.mark.parametrize("chunk", [16, 32, 128, 256])
@pytest.mark.parametrize("bits", range(1, 7))
def test_points_lie_in_their_cells(bits, chunk):
    points = cell_points(bits, chunk).astype(np.float64)
    cell = 256 >> bits
    assert (points >= np.arange(1 << bits) * cell).all()
    assert (points <= np.arange(1 << bits) * cell + cell - 1).all()
    assert points + points[::-1] == pytest.approx(255, abs=0.26)


def test_widths_must_agree():
    shape = PageShape(40, 1, 4)
    streams = encode(get_codec("nested", bits=[4, 2, 2]), normal(40, 1, 4), shape)
    with pytest.raises(CodecError, match=r"have \[4, 2, 2\] bits, expected \[4, 1, 3\]"):
        decode(get_codec("nested", bits=[4, 1, 3]), streams[:1], shape)
    with pytest.raises(CodecError, match="chunk"):
        decode(get_codec("nested", bits=[4, 2, 2], chunk=64), streams, shape)


@pytest.mark.parametrize("bits", [(3, 5), [3, 5], np.array([3, 5]), [np.int8(3), np.int64(5)]])
def test_params_are_plain(bits):
    codec = get_codec("nested", bits=bits, chunk=np.int32(64))
    params = msgpack.unpackb(msgpack.packb(codec.params()))
    assert params["bits"] == [3, 5]
    assert get_codec("nested", **params).params() == codec.params()


@pytest.mark.parametrize(
    "bits", [[4, 5], [9, -1], [8, 0], [1] * 9, [4.5, 3.5], [], "44", [float("nan"), 4], [float("inf"), 4], 8, None]
)
def test_bad_bits(bits):
    with pytest.raises(CodecError):
        get_codec("nested", bits=bits)


@pytest.mark.parametrize("chunk", [0, 15, 257, -32, 32.5, float("nan"), float("inf"), "32", None])
def test_bad_chunks(chunk):
    with pytest.raises(CodecError):
        get_codec("nested", chunk=chunk)
