"""Buffers that are used again: what was in them must not be in a page, whose bytes go to somebody else."""

from __future__ import annotations

from typing import Any

import pytest
from codec_inputs import normal

from lynx_codec import PageShape, codec_names, get_codec

SPLIT = {"codecs": ["int8", "nested"], "params": [{}, {"bits": [3, 5]}]}
CODECS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in codec_names()),
    ("nested", {"bits": [3, 5], "chunk": 64}),
    ("nested", {"bits": [1, 2, 5], "chunk": 32, "exact": True}),
    ("kivi", {"axis": "token"}),
    ("by_head", {"heads": [1, 2], **SPLIT}),
]
SHAPES = [
    PageShape(256, 3, 16, 0, 0, 3),
    PageShape(70, 3, 5, 4, 6, 2),
    PageShape(33, 3, 7),
    PageShape(5, 3, 1, 2, 3),
    PageShape(1, 3, 9),
]


@pytest.mark.parametrize("implementation", ["compiled", "reference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "params"), CODECS, ids=str)
def test_the_same_page_whatever_was_in_the_buffers(
    name: str, params: dict[str, Any], shape: PageShape, implementation: str
) -> None:
    codec = get_codec(name, implementation=implementation, **params)
    page = normal(*shape.array_shape).astype("float16")
    page[:, 0, :] *= 100  # some of it escapes
    pages = []
    for content in (0x00, 0xFF, 0xA5):
        outs = [memoryview(bytearray([content]) * size) for size in codec.stream_bytes(shape, wide=True)]
        lengths = codec.encode(page, shape, outs)
        pages.append([bytes(out[:length]) for out, length in zip(outs, lengths, strict=True)])
    assert pages[1] == pages[0]
    assert pages[2] == pages[0]
