"""Codecs made of others: parts decode as they would alone, and what is no such page is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from codec_inputs import as_dtype, decode, normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lynx_codec import Codec, CodecError, CodecPlan, CodecRule, PackedCache, PageShape, bits_per_value, get_codec
from lynx_codec.composite import join_streams
from lynx_codec.plan import CodecTable
from lynx_codec.registry import MAX_DIFFERENT, CodecBuilder

SETTINGS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PARTS: list[tuple[str, dict[str, Any]]] = [
    ("int8", {}),
    ("lynx", {"alpha": 1.0}),
    ("bf16", {}),
    ("nested", {"bits": [2, 2, 4]}),
    ("nested", {"bits": [3, 5], "chunk": 48}),
    ("cachegen", {}),
    ("fp8", {}),
]


def encode(codec: Codec, page: np.ndarray, shape: PageShape) -> list[bytes]:
    room = codec.stream_bytes(shape, wide=True)
    outs = [bytearray(b"\xa5" * (size + 3)) for size in room]
    sizes = codec.encode(page, shape, [memoryview(out) for out in outs])
    for stream, (size, bound, narrow) in enumerate(zip(sizes, room, codec.stream_bytes(shape), strict=True)):
        assert size <= bound
        assert stream in codec.variable_streams or size in (narrow, bound)
    assert all(bytes(out[size:]) == b"\xa5" * (len(out) - size) for out, size in zip(outs, sizes, strict=True))
    return [bytes(out[:size]) for out, size in zip(outs, sizes, strict=True)]


def made(axis: str, counts: list[int], parts: list[tuple[str, dict[str, Any]]], **more: Any) -> Codec:
    name = {"heads": "by_head", "channels": "by_channel"}[axis]
    return get_codec(
        name, **{axis: counts}, codecs=[part[0] for part in parts], params=[part[1] for part in parts], **more
    )


@SETTINGS
@given(st.data(), st.sampled_from(("heads", "channels")), st.sampled_from((np.float32, np.float16, np.uint16)))
def test_parts_decode_as_they_would_alone(data: st.DataObject, axis: str, dtype: Any) -> None:
    """After any prefix of the streams, whichever of the parts escape; a part with fewer streams is done earlier."""
    parts = data.draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=4))
    counts = [data.draw(st.integers(1, 3)) for _ in parts]
    heads, size = (sum(counts), 3) if axis == "heads" else (2, sum(counts))
    shape = PageShape(data.draw(st.integers(0, 70)), heads, size, 0, 0)
    raw = data.draw(st.integers(0, shape.tokens))
    shape = PageShape(shape.tokens, heads, size, 0, raw, min(5, shape.tokens - raw))
    values = normal(*shape.array_shape, seed=data.draw(st.integers(0, 99)))
    for number in data.draw(st.lists(st.integers(0, max(values.size - 1, 0)), max_size=2)):
        values.reshape(-1)[number : number + 1] = 1e4
    page = as_dtype(values, dtype)
    codec = made(axis, counts, parts)
    streams = encode(codec, page, shape)
    assert encode(made(axis, counts, parts, implementation="reference"), page, shape) == streams
    assert encode(get_codec(codec.name, **codec.params()), page, shape) == streams
    for count in range(1, len(streams) + 1):
        found = decode(codec, streams[:count], shape)
        at = 0
        for (name, params), width in zip(parts, counts, strict=True):
            part = np.s_[:, at : at + width] if axis == "heads" else np.s_[:, :, at : at + width]
            alone = get_codec(name, **params)
            own = PageShape(shape.tokens, *found[part].shape[1:], 0, raw, shape.fine)
            room = [memoryview(bytearray(n)) for n in alone.stream_bytes(own, wide=True)]
            lengths = alone.encode(page[part], own, room)
            own_streams = [bytes(out[:length]) for out, length in zip(room, lengths, strict=True)]
            assert found[part].tobytes() == decode(alone, own_streams[:count], own).tobytes()
            at += width


def test_sizes_and_names() -> None:
    codec = made("heads", [1, 1, 1], [("int8", {}), ("nested", {"bits": [2, 2, 4]}), ("lynx", {})])
    assert codec.stream_names == ("anchor", "residual1", "residual2")
    assert codec.variable_streams == {0}
    shape = PageShape(64, 3, 8)
    own = PageShape(64, 1, 8)
    sizes = [
        get_codec(name, **params).stream_bytes(own)
        for name, params in (("int8", {}), ("nested", {"bits": [2, 2, 4]}), ("lynx", {}))
    ]
    assert codec.stream_bytes(shape) == (
        12 + sum(size[0] for size in sizes),
        12 + sizes[1][1] + sizes[2][1],
        12 + sizes[1][2],
    )
    assert 8 < bits_per_value(codec, shape) < 20
    codec.warm_up()


class Named(Codec):
    """Only the names of streams."""

    def __init__(self, name: str, *stream_names: str) -> None:
        self.name = name
        self.stream_names = stream_names

    params = stream_bytes = encode = decode = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("codecs", "names", "places"),
    [
        ([("a", "anchor"), ("b", "anchor", "residual")], ("anchor", "residual"), [(0,), (0, 1)]),
        ([("a", "anchor", "exact"), ("bf16", "anchor")], ("anchor", "exact"), [(0, 1), (0,)]),
        (
            [("a", "anchor", "residual1", "residual2", "exact"), ("b", "anchor", "exact")],
            ("anchor", "residual1", "residual2", "exact"),
            [(0, 1, 2, 3), (0, 3)],
        ),
        # With a codec that stays lossy beside it, the last stream must not promise the original bits.
        ([("a", "anchor", "exact"), ("b", "anchor")], ("anchor", "residual"), [(0, 1), (0,)]),
        (
            [("a", "anchor", "exact"), ("b", "anchor", "residual")],
            ("anchor", "residual1", "residual2"),
            [(0, 2), (0, 1)],
        ),
    ],
)
def test_streams_side_by_side(codecs: Any, names: tuple[str, ...], places: list[tuple[int, ...]]) -> None:
    assert join_streams([Named(*codec) for codec in codecs]) == (names, places)


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "params", "message"),
        [
            ("by_head", {}, "1 to 256 of each"),
            ("by_head", {"heads": [1], "codecs": ["int8"]}, "1 codecs with 0 params"),
            ("by_head", {"heads": [1, 1], "codecs": ["int8"], "params": [{}]}, "2 counts and 1 codecs"),
            ("by_head", {"heads": [0], "codecs": ["int8"], "params": [{}]}, "must be 1 to 65535"),
            ("by_head", {"heads": [True], "codecs": ["int8"], "params": [{}]}, "must be 1 to 65535"),
            ("by_head", {"heads": ["1"], "codecs": ["int8"], "params": [{}]}, "must be 1 to 65535"),
            ("by_head", {"heads": 1, "codecs": ["int8"], "params": [{}]}, "must be lists"),
            (
                "by_head",
                {"channels": [1], "codecs": ["int8"], "params": [{}]},
                "no parameter channels; valid: codecs, heads",
            ),
            ("by_head", {"heads": [1], "codecs": ["zip"], "params": [{}]}, "unknown codec 'zip'"),
            ("by_head", {"heads": [1], "codecs": [{}], "params": [{}]}, "unknown codec {}"),
            ("by_head", {"heads": [1], "codecs": ["int8"], "params": [3]}, "must be a map, not 3"),
            (
                "by_head",
                {"heads": [1], "codecs": ["int8"], "params": [{"implementation": "reference"}]},
                "no parameter",
            ),
            ("by_head", {"heads": [1], "codecs": ["by_head"], "params": [{}]}, "cannot be made of by_head"),
            ("by_channel", {"channels": [1], "codecs": ["by_head"], "params": [{}]}, "cannot be made of by_head"),
            ("by_channel", {"channels": [1], "codecs": ["by_channel"], "params": [{}]}, "cannot be made of by_channel"),
            (
                "by_channel",
                {"channels": [1] * 257, "codecs": ["int8"] * 257, "params": [{}] * 257},
                "at most 256 parts",
            ),
        ],
    )
    def test_parameters(self, name: str, params: dict[str, Any], message: str) -> None:
        with pytest.raises(CodecError, match=message):
            get_codec(name, **params)

    def test_too_many_different_codecs(self) -> None:
        count = MAX_DIFFERENT + 1
        chunks = [("nested", {"chunk": 16 + number}) for number in range(count)]
        made("heads", [1] * (count - 1), chunks[:-1])
        with pytest.raises(CodecError, match=f"more than {MAX_DIFFERENT} different codecs"):
            made("heads", [1] * count, chunks)
        assert CodecBuilder().build("int8", {}) is not CodecBuilder().build("int8", {})

    def test_pages(self) -> None:
        codec = made("heads", [1, 2], [("int8", {}), ("lynx", {})])
        shape = PageShape(20, 3, 4)
        page = normal(*shape.array_shape)
        streams = encode(codec, page, shape)
        out = np.empty_like(page)
        with pytest.raises(CodecError, match="parts of 3 heads for a page of 4"):
            codec.stream_bytes(PageShape(20, 4, 4))
        with pytest.raises(CodecError, match="needs buffers"):
            codec.encode(page, shape, [memoryview(bytearray(1))] * 2)
        bad: list[tuple[list[bytes], str]] = [
            ([], "0 streams given"),
            ([*streams, b""], "3 streams given"),
            ([streams[0][:7]], "take more"),
            ([streams[0] + b"x"], "its parts"),
            ([streams[0][:-1]], "its parts"),
            ([(2**32 - 1).to_bytes(4, "little") + streams[0][4:]], "its parts"),
            ([streams[0][4:8] + streams[0][:4] + streams[0][8:]], "page header|bytes"),
            (
                [streams[0], (1).to_bytes(4, "little") + (79).to_bytes(4, "little") + bytes(80)],
                "part 0 has no stream 1",
            ),
        ]
        for given_streams, message in bad:
            with pytest.raises(CodecError, match=message):
                codec.decode([memoryview(s) for s in given_streams], shape, out)
        with pytest.raises(CodecError, match="not contiguous"):
            codec.decode([memoryview(streams[0] * 2)[::2]], shape, out)


@SETTINGS
@given(st.data())
def test_corrupt_bytes(data: st.DataObject) -> None:
    """They are a CodecError or decode to finite numbers; cutting and selecting them is no worse."""
    parts: list[tuple[str, dict[str, Any]]] = [("nested", {"bits": [2, 6]}), ("lynx", {}), ("int8", {})]
    codec = made("heads", [1, 1, 1], parts)
    shape = PageShape(40, 3, 4, 1, 2, 3)
    streams = [bytearray(stream) for stream in encode(codec, normal(*shape.array_shape), shape)]
    for _ in range(data.draw(st.integers(1, 4))):
        stream = data.draw(st.sampled_from(streams))
        # Lengths, headers and positions lie at the beginning of a part; the rest is metadata and codes.
        stream[data.draw(st.integers(0, len(stream) - 1) | st.integers(0, 80))] = data.draw(st.integers(0, 255))
    broken = [bytes(stream) for stream in streams]
    out = np.empty(shape.array_shape, np.float32)
    try:
        codec.decode([memoryview(stream) for stream in broken], shape, out)
        assert np.isfinite(out).all()
    except CodecError:
        pass
    try:
        fine = [token for token in codec.fine_tokens(broken, shape) if token >= 32]
        codec.cut_page(broken, shape, 32, shape.cut(32, 40, len(fine)))
        codec.take_heads(broken, shape, [2, 0])
    except CodecError:
        pass


class TestPlans:
    plan = CodecPlan(
        "nested",
        {"bits": [4, 4]},
        rules=[
            CodecRule("bf16", layers=[0], kind="value"),
            CodecRule("int8", layers=(0, -1)),
            CodecRule("int4", kind="key"),
        ],
    )

    def test_the_first_rule_that_speaks_of_a_layer_counts(self) -> None:
        table = self.plan.table(4)
        names = {kind: [table.own(layer, kind).name for layer in range(4)] for kind in ("key", "value")}
        assert names == {
            "key": ["int8", "int4", "int4", "int8"],
            "value": ["bf16", "nested", "nested", "int8"],
        }
        assert table.stream_names == ("anchor", "residual")
        assert len(table.codecs) == 4
        twin = CodecTable.from_params(table.params(), 4, ("key", "value"))
        assert twin.params() == table.params()

    def test_fewer_streams_are_empty_ones(self) -> None:
        table = self.plan.table(3)
        codec, own = table.codec(0, "key"), table.own(0, "key")
        assert (codec.name, codec.params(), codec.stream_names) == ("int8", {}, ("anchor", "residual"))
        shape = PageShape(40, 1, 4)
        streams = encode(codec, normal(40, 1, 4), shape)
        assert streams == [*encode(own, normal(40, 1, 4), shape), b""]
        for count in (1, 2):
            assert decode(codec, streams[:count], shape).tobytes() == decode(own, streams[:1], shape).tobytes()
        out = np.empty((40, 1, 4), np.float32)
        with pytest.raises(CodecError, match="has no stream residual"):
            codec.decode([memoryview(streams[0]), memoryview(b"x")], shape, out)
        with pytest.raises(CodecError, match="3 streams given"):
            codec.decode([memoryview(s) for s in (*streams, b"")], shape, out)
        with pytest.raises(CodecError, match="writes 2 streams"):
            codec.encode(out, shape, [memoryview(bytearray(999))])

    def test_a_packed_cache_with_a_plan(self) -> None:
        arrays = {(layer, kind): normal(90, 2, 8, seed=layer) for layer in range(3) for kind in ("key", "value")}
        cache = PackedCache.encode(self.plan.table(3).own, arrays, raw_tail=8)
        whole = cache.decode()
        left = cache.crop(30, 88).select_heads([1])
        for place, values in left.decode().items():
            assert values.tobytes() == whole[place][30:88, [1]].tobytes()

    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            (CodecPlan("zip"), "unknown codec 'zip'"),
            (CodecPlan("int8", rules=[CodecRule("int4", layers=[4])]), "names layer 4 of a cache with 4 layers"),
            (CodecPlan("int8", rules=[CodecRule("int4", layers=[-5])]), "names layer -5"),
            (CodecPlan("int8", rules=[CodecRule("int4", kind="keys")]), "is for 'keys'"),  # type: ignore[arg-type]
            (CodecPlan("plan"), "unknown codec 'plan'"),
        ],
    )
    def test_plans_that_make_no_sense(self, plan: CodecPlan, message: str) -> None:
        with pytest.raises(CodecError, match=message):
            plan.table(4)
