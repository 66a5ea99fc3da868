"""Operations on encoded caches: what comes out is what the same operation makes of the decoded cache, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from codec_inputs import as_dtype, normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lynx_codec import Codec, CodecError, NonFiniteError, PackedArray, PackedCache, PackedPage, PageShape, get_codec
from lynx_codec.layout import FLAGS_AT
from lynx_codec.nested import NestedCodec

SETTINGS = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CODECS: list[tuple[str, dict[str, Any]]] = [("lynx", {}), ("int8", {}), ("int4", {}), ("bf16", {}), ("nested", {})]


def codec_for(kind: str, heads: int, size: int) -> Codec:
    """A codec, or one made of several, for pages of these heads."""
    match kind:
        case "by_head":
            names = ["int8", "nested", "bf16"][:heads]
            params: list[dict[str, Any]] = [{}, {"bits": [2, 2, 4], "chunk": 24}, {}]
            return get_codec("by_head", heads=[1] * heads, codecs=names, params=params[:heads])
        case "by_channel" if size > 1:
            return get_codec("by_channel", channels=[1, size - 1], codecs=["bf16", "lynx"], params=[{}, {"alpha": 1.0}])
        case "nested":
            return get_codec("nested", bits=[4, 4], chunk=32)
        case "nested 3 2 1 1 1":
            return get_codec("nested", bits=[3, 2, 1, 1, 1], chunk=48)
        case "nested 8":
            return get_codec("nested", bits=[8], chunk=16)
        case "both" if size > 1:
            inner = {"channels": [size - 1, 1], "codecs": ["int4", "lynx"], "params": [{}, {}]}
            return get_codec("by_head", heads=[heads], codecs=["by_channel"], params=[inner])
        case "by_channel" | "both":
            return get_codec("nested", bits=[2, 6], chunk=20)
        case _:
            return get_codec(kind)


KINDS = ("lynx", "int8", "int4", "bf16", "nested", "nested 3 2 1 1 1", "nested 8", "by_head", "by_channel", "both")
SIZES = (1, 2, 3, 5, 8, 17)


def prefixes(packed: PackedArray) -> list[np.ndarray]:
    """The values after each prefix of the streams."""
    return [packed.decode(streams=count + 1) for count in range(len(packed.codec.stream_names))]


@st.composite
def arrays(draw: st.DrawFn, heads: int, size: int, max_tokens: int = 150) -> np.ndarray:
    tokens = draw(st.integers(0, max_tokens))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.standard_normal((tokens, heads, size)).astype(np.float32)
    match draw(st.sampled_from(("normal", "spike", "bias", "constant channels"))):
        case "spike" if values.size:
            values.reshape(-1)[rng.integers(values.size)] = np.float32(10.0 ** draw(st.integers(2, 36)))
        case "bias":
            values += rng.uniform(-900, 900, size=(1, heads, size)).astype(np.float32)
        case "constant channels":
            values = np.where(rng.random((1, heads, size)) < 0.5, np.float32(draw(st.floats(-10, 10))), values)
        case _:
            pass
    return as_dtype(values, draw(st.sampled_from((np.float32, np.float16, np.uint16))))


@st.composite
def packed_arrays(draw: st.DrawFn, codec: Codec, heads: int, size: int) -> PackedArray:
    return PackedArray.encode(
        codec,
        draw(arrays(heads, size)),
        page_tokens=draw(st.sampled_from((7, 32, 70, 256))),
        raw_head=draw(st.sampled_from((0, 0, 2, 4, 40))),
        raw_tail=draw(st.sampled_from((0, 0, 1, 5, 33, 64))),
        fine=draw(st.one_of(st.just([]), st.lists(st.integers(-5, 160), max_size=30), st.just(range(20, 150)))),
    )


@SETTINGS
@given(st.data(), st.sampled_from(KINDS))
def test_any_operations_in_any_order(data: st.DataObject, kind: str) -> None:
    heads, size = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(SIZES))
    packed = data.draw(packed_arrays(codec_for(kind, heads, size), heads, size))
    expected = prefixes(packed)
    for _ in range(data.draw(st.integers(1, 5))):
        match data.draw(st.sampled_from(("crop", "tokens", "heads", "concatenate", "append", "append raw"))):
            case "crop":
                start = data.draw(st.integers(0, packed.tokens))
                stop = data.draw(st.integers(start, packed.tokens))
                packed = packed.crop(start, stop)
                expected = [values[start:stop] for values in expected]
            case "tokens" if packed.tokens:
                # Runs of neighbours, and some tokens of their own.
                chosen = [t for t in range(packed.tokens) if t % 11 < 6]
                chosen += data.draw(st.lists(st.integers(0, packed.tokens - 1), max_size=4))
                packed = packed.select_tokens(chosen)
                expected = [values[chosen] for values in expected]
            case "heads":
                heads_left = data.draw(st.lists(st.integers(0, packed.heads - 1), min_size=1, max_size=4))
                packed = packed.select_heads(heads_left)
                # Streams that only other heads have are gone.
                expected = [values[:, heads_left] for values in expected[: len(packed.codec.stream_names)]]
            case "concatenate":
                other = data.draw(packed_arrays(packed.codec, packed.heads, size))
                expected = [np.concatenate(pair) for pair in zip(expected, prefixes(other), strict=True)]
                packed = packed.concatenate(other)
            case "append" | "append raw" as kind:
                new = data.draw(arrays(packed.heads, size, max_tokens=40))
                raw_tail = len(new) if kind == "append raw" else data.draw(st.sampled_from((0, 3)))
                alone = PackedArray.encode(packed.codec, new, page_tokens=packed.page_tokens, raw_tail=raw_tail)
                expected = [np.concatenate(pair) for pair in zip(expected, prefixes(alone), strict=True)]
                before = packed.pages[:-1]
                packed = packed.append(new, raw_tail=raw_tail)
                assert packed.pages[: len(before)] == before
            case _:
                pass
        assert packed.tokens == len(expected[0])
        for found, values in zip(prefixes(packed), expected, strict=True):
            assert found.tobytes() == values.tobytes()
        for page in packed.pages:
            assert page.skip < max(packed.codec.grid_tokens, 1)
            assert page.shape.tokens <= 256


def test_heads_with_narrower_chunks_lose_the_chunks_that_only_skip() -> None:
    """The cut lies in the chunk of 64 of one head; the other head has chunks of 32."""
    codec = get_codec("by_head", heads=[1, 1], codecs=["nested", "nested"], params=[{"chunk": 64}, {"chunk": 32}])
    values = normal(128, 2, 4)
    packed = PackedArray.encode(codec, values)
    expected = packed.decode()
    (page,) = packed.crop(40, 128).pages
    assert page.skip == 40
    for head, skip in ((0, 40), (1, 8)):
        left = packed.crop(40, 128).select_heads([head])
        assert left.pages[0].skip == skip
        assert left.decode().tobytes() == expected[40:, [head]].tobytes()


@pytest.mark.parametrize(("name", "params"), CODECS)
@pytest.mark.parametrize("tail", [0, 60])
def test_a_page_that_escaped(name: str, params: dict[str, Any], tail: int) -> None:
    """Fields of 16 bits are cut and selected like those of 8; a page that lost its coded tokens has none."""
    values = normal(120, 3, 6)
    values[50, 1, 2] = 1e6
    packed = PackedArray.encode(get_codec(name, **params), values, raw_tail=tail)
    (page,) = packed.pages
    assert page.streams[0][FLAGS_AT] == (name != "bf16")
    whole = packed.decode()
    left = packed.crop(37, 111).select_heads([2, 1])
    assert left.decode().tobytes() == whole[37:111, [2, 1]].tobytes()
    assert left.nbytes < packed.nbytes * 0.7
    if tail:
        raw = packed.crop(70, 120)
        assert raw.pages[0].streams[0][FLAGS_AT] == 0
        assert raw.pages[0].skip == 0
        assert raw.decode().tobytes() == whole[70:].tobytes()


@pytest.mark.parametrize(("name", "params"), CODECS)
def test_a_crop_drops_the_bytes(name: str, params: dict[str, Any]) -> None:
    """What is left takes what an encoding of as many tokens takes, but for the tokens of one chunk at the front."""
    codec = get_codec(name, **params)
    packed = PackedArray.encode(codec, normal(600, 2, 16))
    left = packed.crop(100, 500)
    assert [page.skip for page in left.pages] == [100 % codec.grid_tokens, 0]
    shapes = [PageShape(156 + 100 % codec.grid_tokens, 2, 16), PageShape(244, 2, 16)]
    assert left.nbytes == sum(sum(codec.stream_bytes(shape)) for shape in shapes)
    assert left.crop(0, 156).pages[0] is left.pages[0]


def test_reordering_and_joining_share_the_bytes() -> None:
    codec = get_codec("lynx")
    caches = [
        PackedCache.encode(codec, {(0, "key"): normal(300, 2, 8, seed=n), (0, "value"): normal(300, 2, 4, seed=9 + n)})
        for n in range(3)
    ]
    beams = caches[0].stack(*caches[1:])
    assert beams.sequences == 3
    assert beams.tokens == (300,) * 3
    chosen = beams.reorder([2, 0, 2])
    assert chosen.nbytes == caches[0].nbytes + caches[2].nbytes
    for number, origin in enumerate((2, 0, 2)):
        for place, values in caches[origin].decode().items():
            assert chosen.decode(number)[place].tobytes() == values.tobytes()
    doubled = chosen.concatenate(chosen)
    assert doubled.tokens == (600,) * 3
    assert doubled.nbytes == chosen.nbytes
    new = {(0, "key"): [normal(1, 2, 8, seed=n) for n in range(3)], (0, "value"): [normal(1, 2, 4)] * 3}
    grown = chosen.crop(10, 290).append(new, raw_tail=1)
    assert grown.tokens == (281,) * 3
    assert grown.select_heads([1]).first_streams(1).decode(1)[0, "value"].shape == (281, 1, 4)
    last = grown.select_tokens([280]).decode(1, dtype=np.float16)[0, "key"]
    assert np.abs(last[0] - normal(1, 2, 8, seed=1)).max() < 0.02


def test_pages_with_an_exact_stream() -> None:
    """Whole pages move and raw tokens are added with every bit; without the exact stream the pages can be divided."""
    values = as_dtype(normal(300, 2, 8), np.uint16)
    more = as_dtype(normal(9, 2, 8, seed=1), np.uint16)
    by_head = {"heads": [1, 1], "codecs": ["nested", "bf16"], "params": [{"exact": True}, {}]}
    for codec in (get_codec("nested", exact=True), get_codec("by_head", **by_head)):
        packed = PackedArray.encode(codec, values, raw_head=2, raw_tail=5, fine=[7, 100]).append(more, raw_tail=9)
        both = np.concatenate([values, more])
        assert (packed.decode(dtype=np.uint16) == both).all()
        assert (packed.crop(256, 309).decode(dtype=np.uint16) == both[256:]).all()
        with pytest.raises(CodecError, match="stream exact of a page of codec nested can only be kept whole"):
            packed.crop(0, 20)
        lossy = packed.first_streams(2)
        left = lossy.crop(3, 299).select_heads([1])
        assert left.decode().tobytes() == lossy.decode()[3:299, [1]].tobytes()
    # The head that has no exact stream can go alone: nothing else is in its pages.
    raw = packed.select_heads([1])
    assert raw.codec.stream_names == ("anchor",)
    assert (raw.decode(dtype=np.uint16) == both[:, [1]]).all()


@pytest.mark.parametrize("name", ["bf16", "lynx"])
def test_token_by_token_is_the_same_as_at_once(name: str) -> None:
    """Raw tokens and bf16 pages grow in place: the same bytes in the end, whatever the steps."""
    values = normal(90, 2, 5)
    codec = get_codec(name)
    start = PackedArray.encode(codec, values[:40], page_tokens=64)
    once = start.append(values[40:], raw_tail=50)
    steps = start
    for token in range(40, 90):
        steps = steps.append(values[token : token + 1], raw_tail=1)
    assert [page.shape.tokens for page in steps.pages] == [64, 26]
    assert steps.pages == once.pages
    # A raw token of another 16-bit dtype cannot share the page.
    mixed = steps.append(np.zeros((3, 2, 5), np.float16), raw_tail=3)
    assert [page.shape.tokens for page in mixed.pages] == [64, 26, 3]


def test_new_tokens_alone_are_encoded() -> None:
    packed = PackedArray.encode(get_codec("int8"), normal(40, 1, 4))
    grown = packed.append(normal(3, 1, 4, seed=1))
    assert grown.pages[0] is packed.pages[0]
    assert [page.shape.tokens for page in grown.pages] == [40, 3]
    with pytest.raises(NonFiniteError):
        grown.append(np.full((1, 1, 4), np.nan, np.float32))


class TestRefusals:
    packed = PackedArray.encode(get_codec("lynx"), normal(50, 2, 4))

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda p: p.crop(-1, 3), "tokens -1 to 3 of 50"),
            (lambda p: p.crop(3, 51), "tokens 3 to 51 of 50"),
            (lambda p: p.crop(4, 3), "tokens 4 to 3"),
            (lambda p: p.select_tokens([50]), "token 50 of 50"),
            (lambda p: p.select_heads([]), "heads"),
            (lambda p: p.select_heads([2]), r"heads \[2\] of 2"),
            (lambda p: p.select_heads([-1]), r"heads \[-1\] of 2"),
            (lambda p: p.first_streams(0), "stream 0 stays"),
            (lambda p: p.decode(streams=0), "cannot decode 0 streams"),
            (lambda p: p.decode(np.empty((50, 2, 5), np.float32)), "given for"),
            (lambda p: p.append(normal(1, 2, 5)), "cannot append"),
            (lambda p: p.append(normal(2, 5)), "cannot append"),
            (lambda p: p.concatenate(PackedArray(get_codec("int8"), 2, 4)), "cannot join"),
            (lambda p: p.concatenate(PackedArray(get_codec("lynx", alpha=1.0), 2, 4)), "cannot join"),
            (lambda p: p.concatenate(PackedArray(get_codec("lynx"), 1, 4)), "cannot join"),
            (lambda p: PackedArray(get_codec("int8"), 2, 4, p.pages), "a page of 2 streams"),
            (lambda p: PackedArray(p.codec, 1, 4, p.pages), "a page of 2 heads"),
            (lambda p: PackedArray(p.codec, 1, 4, page_tokens=0), "page_tokens"),
            (lambda p: PackedArray.encode(p.codec, normal(3, 4, 5), page_tokens=0), "page_tokens"),
            (lambda p: PackedArray.encode(p.codec, normal(3, 4)), "2 dimensions"),
            (lambda p: PackedArray.encode(p.codec, normal(3, 4, 5), raw_tail=-1), "negative"),
            (lambda p: PackedPage((), PageShape(1, 1, 1)), "not a packed page"),
            (lambda p: PackedPage((b"",), PageShape(1, 1, 1), 2), "not a packed page"),
            (lambda p: PackedCache({(0, "key"): [p], (0, "value"): [p.crop(0, 3)]}), "differ in tokens"),
            (lambda p: PackedCache({(0, "key"): [p]}).reorder([1]), "sequence 1 of 1"),
            (lambda p: PackedCache({(0, "key"): [p]}).stack(PackedCache({(1, "key"): [p]})), "differ in layers"),
            (
                lambda p: PackedCache({(0, "key"): [p]}).concatenate(PackedCache({(0, "key"): [p, p]})),
                "cannot be joined",
            ),
            (lambda p: PackedCache({(0, "key"): [p]}).append({}), "new tokens are needed"),
        ],
    )
    def test_arguments(self, call: Any, message: str) -> None:
        with pytest.raises(CodecError, match=message):
            call(self.packed)

    @pytest.mark.parametrize("name", ["lynx", "int8", "bf16"])
    def test_bytes_of_another_length(self, name: str) -> None:
        codec = get_codec(name)
        (page,) = PackedArray.encode(codec, normal(50, 2, 4)).pages
        for streams in ((page.streams[0][:-1],), (page.streams[0] + b"x",), (b"",), page.streams * 3):
            with pytest.raises(CodecError):
                codec.cut_page(streams, page.shape, 0, page.shape.cut(0, 10))
            with pytest.raises(CodecError):
                codec.take_heads(streams, page.shape, [0])

    def test_a_cut_inside_a_chunk(self) -> None:
        (page,) = self.packed.pages
        with pytest.raises(CodecError, match="cannot begin at token 5"):
            self.packed.codec.cut_page(page.streams, page.shape, 5, page.shape.cut(5, 40))

    def test_fine_tokens_that_are_not_what_the_page_says(self) -> None:
        codec = get_codec("nested")
        (page,) = PackedArray.encode(codec, normal(50, 2, 4), fine=[3, 30, 31]).pages
        assert codec.fine_tokens(page.streams, page.shape) == (3, 30, 31)
        assert codec.fine_tokens(
            codec.cut_page(page.streams, page.shape, 0, page.shape.cut(0, 31, 2)), page.shape.cut(0, 31, 2)
        ) == (3, 30)
        with pytest.raises(CodecError, match="tokens 0 to 31 have 2 fine ones, not 0"):
            codec.cut_page(page.streams, page.shape, 0, page.shape.cut(0, 31))
        (first,) = (at for at in range(len(page.streams[0])) if page.streams[0][at : at + 6] == b"\x03\0\x1e\0\x1f\0")
        bad = (page.streams[0][:first] + b"\x04\0\x04\0" + page.streams[0][first + 4 :], page.streams[1])
        with pytest.raises(CodecError, match="positions of fine tokens"):
            codec.cut_page(bad, page.shape, 0, page.shape.cut(0, 31, 2))

    def test_one_stream_that_stays_whole(self) -> None:
        """The error names the stream; without it the page can be divided, and raw tokens do not concern it."""

        class Tailed(NestedCodec):
            def __init__(self) -> None:
                super().__init__(get_codec("nested")._load_engine)
                self.stream_names = ("anchor", "residual", "exact")

        codec = Tailed()
        (page,) = PackedArray.encode(get_codec("nested"), normal(50, 2, 4)).pages
        packed = PackedArray(codec, 2, 4, [PackedPage((*page.streams, b"tail"), page.shape)])
        for call in (lambda: packed.crop(0, 32), lambda: packed.select_heads([0])):
            with pytest.raises(CodecError, match=r"stream exact of a page of codec nested.*without it \(2 streams\)"):
                call()
        assert packed.first_streams(2).crop(32, 50).select_heads([1]).decode().shape == (18, 1, 4)
        added = PackedArray.encode(get_codec("nested"), normal(1, 2, 4), raw_tail=1).pages[0]
        grown = codec.add_raw(packed.pages[0].streams, page.shape, added.streams, added.shape)
        assert grown is not None
        assert grown[1:] == packed.pages[0].streams[1:]

    @pytest.mark.parametrize("name", ["cachegen", "kivi", "turboquant", "fp8", "int8_token"])
    def test_codecs_to_compare_with(self, name: str) -> None:
        """Whole pages can be joined and dropped; what would divide one is refused by the codec's name."""
        codec = get_codec(name)
        packed = PackedArray.encode(codec, normal(300, 2, 8), raw_tail=4)
        whole = packed.decode()
        assert (
            packed.crop(256, 300).concatenate(packed).decode().tobytes()
            == whole[[*range(256, 300), *range(300)]].tobytes()
        )
        with pytest.raises(CodecError, match=f"pages of codec {name} can only be kept whole"):
            packed.crop(0, 20)
        with pytest.raises(CodecError, match=f"pages of codec {name} can only be kept whole"):
            packed.select_heads([0])

    def test_pages_that_stay_whole(self) -> None:
        """A codec that says nothing of its bytes: whole pages are dropped and joined, less is refused by name."""
        values = normal(50, 2, 4)
        packed = PackedArray.encode(Sealed(), values, page_tokens=20)
        whole = packed.decode()
        left = packed.crop(20, 50).concatenate(packed.select_tokens(range(20)))
        assert left.decode().tobytes() == whole[[*range(20, 50), *range(20)]].tobytes()
        grown = left.append(values[:1], raw_tail=1)
        assert grown.decode()[:-1].tobytes() == left.decode().tobytes()
        for call in (lambda: packed.crop(20, 49), lambda: packed.crop(1, 50), lambda: packed.select_tokens([3])):
            with pytest.raises(CodecError, match="sealed can only be kept whole: no token can be cut off"):
                call()
        with pytest.raises(CodecError, match="sealed can only be kept whole: no head"):
            packed.select_heads([0])


class Sealed(Codec):
    """Pages whose bytes cannot be told apart, as an entropy coder makes them."""

    name = "sealed"
    stream_names = ("anchor",)
    _inner = get_codec("int8")

    def params(self) -> dict[str, Any]:
        return {}

    def stream_bytes(self, shape: PageShape, *, wide: bool = False) -> tuple[int, ...]:
        return self._inner.stream_bytes(shape, wide=wide)

    def encode(self, page: np.ndarray, shape: PageShape, outs: Any, fine: Any = None) -> tuple[int, ...]:
        return self._inner.encode(page, shape, outs, fine)

    def decode(self, streams: Any, shape: PageShape, out: np.ndarray) -> None:
        self._inner.decode(streams, shape, out)
