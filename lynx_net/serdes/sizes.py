"""How many bytes each page stream of a transfer may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lynx_net.wire.pagesizes import largest_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lynx_codec import Codec, PageShape
    from lynx_codec.plan import CodecTable
    from lynx_net.serdes.pages import LayerPages
    from lynx_net.wire.layout import CacheLayout
    from lynx_net.wire.pagesizes import PageSizes

__all__ = ["TransferSizes"]


class TransferSizes:
    """The sizes that the codecs of a cache can produce for its pages.

    Attributes:
        need_bytes: the most that all page streams can have together.
    """

    def __init__(self, pages: LayerPages, layout: CacheLayout, codecs: CodecTable) -> None:
        # Every layer is cut alike, so one layer with the same codecs tells.
        by_codecs: dict[tuple[int, ...], tuple[list[list[PageSizes]], list[list[int]], int]] = {}
        known: dict[tuple[int, PageShape], list[PageSizes]] = {}
        self._per_layer = pages.per_layer
        self._layers: list[list[list[PageSizes]]] = []
        self._most: list[list[list[int]]] = []
        self.need_bytes = 0
        for layer in range(layout.layers):
            numbers = tuple(codecs.number(layer, kind) for kind in layout.kinds)
            if numbers not in by_codecs:
                of_layer: list[list[PageSizes]] = []
                for page in pages.first:
                    key = (codecs.number(layer, page.kind), page.shape)
                    if key not in known:
                        known[key] = _sizes_of(codecs.codec(layer, page.kind), page.shape)
                    of_layer.append(known[key])
                most = [[largest_of(size) for size in sizes] for sizes in of_layer]
                by_codecs[numbers] = of_layer, most, sum(map(sum, most))
            sizes, most, need_bytes = by_codecs[numbers]
            self._layers.append(sizes)
            self._most.append(most)
            self.need_bytes += need_bytes

    def most(self, page: int, stream: int) -> int:
        """The most bytes that a stream of a page can have."""
        layer, position = divmod(page, self._per_layer)
        return self._most[layer][position][stream]

    def of(self, page: int) -> Sequence[PageSizes]:
        """Sizes of each stream of a page."""
        layer, position = divmod(page, self._per_layer)
        return self._layers[layer][position]


def _sizes_of(codec: Codec, shape: PageShape) -> list[PageSizes]:
    """Two at most, or any up to a bound."""
    narrow, wide = (codec.stream_bytes(shape, wide=escaped) for escaped in (False, True))
    return [
        range(pair[1] + 1) if stream in codec.variable_streams else frozenset(pair)
        for stream, pair in enumerate(zip(narrow, wide, strict=True))
    ]
