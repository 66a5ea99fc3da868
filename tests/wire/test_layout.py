"""The layout of a cache: pages partition every array, and nobody can make us believe an absurd one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wirekit import LAYOUT

from lynx_net.errors import LocalProtocolError
from lynx_net.wire import layout as limits
from lynx_net.wire.layout import CacheLayout, WaitingOrder

layouts = st.builds(
    CacheLayout,
    layers=st.integers(0, 4),
    tokens=st.integers(0, 40),
    heads=st.integers(1, 3),
    key_size=st.integers(0, 5),
    value_size=st.integers(0, 5),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    page_tokens=st.integers(1, 12),
    raw_head=st.integers(0, 30),
    raw_tail=st.integers(0, 50),
)


@given(layouts, st.data())
def test_fine_tokens_are_counted_page_by_page(layout: CacheLayout, data: st.DataObject) -> None:
    coded = range(min(layout.raw_head, layout.tokens), max(layout.tokens - layout.raw_tail, 0))
    tokens = sorted(data.draw(st.sets(st.sampled_from(coded)))) if coded else []
    layout = layout.with_fine(tokens)
    assert CacheLayout.from_wire(layout.to_wire()) == layout
    for page in layout.pages():
        assert page.shape.fine == sum(page.start <= token < page.stop for token in tokens)


@pytest.mark.parametrize("tokens", [[0], [4], [2, 1], [2, 2], [-1], [5]])
def test_tokens_that_cannot_be_fine(tokens: list[int]) -> None:
    with pytest.raises(LocalProtocolError, match="fine tokens"):
        LAYOUT.with_fine(tokens)


@given(layouts, st.data())
def test_one_page_of_each_shape(layout: CacheLayout, data: st.DataObject) -> None:
    coded = range(min(layout.raw_head, layout.tokens), max(layout.tokens - layout.raw_tail, 0))
    layout = layout.with_fine(sorted(data.draw(st.sets(st.sampled_from(coded), max_size=3))) if coded else [])
    unlike = layout.unlike_pages()
    assert {(page.kind, page.shape) for page in unlike} == {(page.kind, page.shape) for page in layout.first_layer()}
    assert len({(page.kind, page.shape) for page in unlike}) == len(unlike)
    assert all(page.layer == 0 and page == layout.page(page.index) for page in unlike)


@given(layouts)
def test_later_streams_wait_keys_first_late_layers_first_late_tokens_first(layout: CacheLayout) -> None:
    order = WaitingOrder(layout)
    ranked = sorted(layout.pages(), key=lambda page: (page.kind != "key", -page.layer, -page.start))
    assert [order.page(place) for place in range(layout.page_count)] == [page.index for page in ranked]
    assert [order.place(page.index) for page in ranked] == list(range(layout.page_count))


@given(layouts)
def test_the_pages_partition_every_array_and_its_raw_tokens(layout: CacheLayout) -> None:
    covered = {(layer, kind): np.zeros(layout.tokens, int) for layer in range(layout.layers) for kind in layout.kinds}
    raw = {where: np.zeros(layout.tokens, bool) for where in covered}
    pages = list(layout.pages())
    assert [page.index for page in pages] == list(range(layout.page_count))
    for page in pages:
        where = page.layer, page.kind
        covered[where][page.start : page.stop] += 1
        shape = page.shape
        assert (shape.tokens, shape.heads, shape.head_size) == (
            page.stop - page.start,
            layout.heads,
            layout.size_of(page.kind),
        )
        raw[where][page.start : page.start + shape.raw_head] = True
        raw[where][page.stop - shape.raw_tail : page.stop] = True
        assert 1 <= shape.tokens <= layout.page_tokens
        assert page.index in layout.layer_pages(page.layer)
    index = np.arange(layout.tokens)
    should_be_raw = (index < layout.raw_head) | (index >= layout.tokens - layout.raw_tail)
    for where, counts in covered.items():
        assert (counts == 1).all()
        assert (raw[where] == should_be_raw).all()
    assert layout.values == sum(page.shape.values for page in pages)
    assert sum(len(layout.layer_pages(layer)) for layer in range(layout.layers)) == layout.page_count


@given(layouts)
def test_a_layout_survives_the_wire(layout: CacheLayout) -> None:
    assert CacheLayout.from_wire(layout.to_wire()) == layout


def test_pages_are_numbered_layer_by_layer_keys_first_then_by_token() -> None:
    assert [(page.layer, page.kind, page.start, page.stop) for page in LAYOUT.pages()] == [
        (layer, kind, start, min(start + 2, 5)) for layer in (0, 1) for kind in ("key", "value") for start in (0, 2, 4)
    ]


def test_raw_tokens_across_page_borders() -> None:
    layout = CacheLayout(layers=1, tokens=10, heads=1, key_size=1, value_size=0, page_tokens=4, raw_head=5, raw_tail=3)
    assert [(page.shape.raw_head, page.shape.raw_tail) for page in layout.pages()] == [(4, 0), (1, 1), (0, 2)]


def test_latent_attention_has_one_array() -> None:
    layout = CacheLayout(layers=3, tokens=300, heads=1, key_size=576, value_size=0)
    assert layout.kinds == ("key",)
    assert layout.page_count == 6
    assert {page.kind for page in layout.pages()} == {"key"}


@pytest.mark.parametrize("fields", [{"layers": 0}, {"tokens": 0}, {"key_size": 0, "value_size": 0}], ids=str)
def test_a_cache_with_nothing_in_it_has_no_pages(fields: dict[str, int]) -> None:
    layout = CacheLayout(**({"layers": 2, "tokens": 3, "heads": 1, "key_size": 4, "value_size": 4} | fields))
    assert layout.page_count == 0
    assert list(layout.pages()) == []
    with pytest.raises(LocalProtocolError):
        layout.page(0)


@pytest.mark.parametrize("index", [-1, 12, 1 << 40])
def test_a_page_that_does_not_exist(index: int) -> None:
    with pytest.raises(LocalProtocolError):
        LAYOUT.page(index)


ABSURD: list[dict[str, Any]] = [
    *(
        {name: value}
        for name in LAYOUT.to_wire()
        if name not in ("dtype", "fine")
        for value in (-1, True, 1.0, "1", None, [1], 1 << 64)
    ),
    *({"fine": value} for value in (-1, None, "1", b"1", b"1234", [1], (0, 0), (1, 3, 0), (0, -1, 0), (0, True, 0))),
    {"fine": b"\xff\xff\0\0\0\0"},
    {"dtype": "int8"},
    {"dtype": 1},
    {"dtype": None},
    {"heads": 0},
    {"heads": 65536},
    {"key_size": 65536},
    {"value_size": 65536},
    {"page_tokens": 0},
    {"page_tokens": 65536},
    {"layers": limits.MAX_LAYERS + 1},
    {"layers": 1 << 40, "tokens": 0},
    {"layers": 1 << 40, "key_size": 0, "value_size": 0},
    {"tokens": 1 << 32},
    {"tokens": 1 << 40, "layers": 0},
    {"tokens": 1 << 31, "page_tokens": 1},
    {"layers": limits.MAX_LAYERS, "tokens": 1025, "page_tokens": 2},
    {"tokens": 256, "page_tokens": 256, "heads": 65535, "key_size": 17},
    {"tokens": 65535, "page_tokens": 65535, "heads": 65535, "value_size": 65535},
]


@pytest.mark.parametrize("change", ABSURD, ids=str)
def test_an_absurd_layout_is_refused_whether_ours_or_the_peers(change: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match="layout"):
        CacheLayout.from_wire(LAYOUT.to_wire() | change)
    with pytest.raises(LocalProtocolError, match="layout"):
        CacheLayout(**(LAYOUT.to_wire() | change))


@pytest.mark.parametrize("data", [None, [], "layout", {}, {"layers": 1}, LAYOUT.to_wire() | {"x": 1}], ids=str)
def test_a_map_that_is_no_layout(data: object) -> None:
    with pytest.raises(LocalProtocolError, match="fields differ"):
        CacheLayout.from_wire(data)


def test_large_real_models_fit() -> None:
    million = CacheLayout(layers=126, tokens=1_000_000, heads=8, key_size=128, value_size=128)
    assert million.page_count == 126 * 2 * 3907
    CacheLayout(layers=61, tokens=131_072, heads=1, key_size=576, value_size=0)
    CacheLayout(layers=96, tokens=8192, heads=128, key_size=192, value_size=128)
