"""How many bytes each page stream of a transfer may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lynx_net.wire.receiving import largest_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lynx_codec import Codec, PageShape
    from lynx_codec.plan import CodecTable
    from lynx_net.wire.layout import CacheLayout
    from lynx_net.wire.receiving import PageSizes

__all__ = ["TransferSizes"]


class TransferSizes:
    """The sizes that the codecs of a cache can produce for its pages.

    Attributes:
        need_bytes: the most that all page streams can have together.
        pages_per_layer: all layers are cut alike.
    """

    def __init__(self, layout: CacheLayout, codecs: CodecTable) -> None:
        # Layers with the same codecs have the same sizes.
        first = [layout.page(index) for index in layout.layer_pages(0)] if layout.layers else []
        by_codecs: dict[tuple[int, ...], list[list[PageSizes]]] = {}
        self._layers: list[list[list[PageSizes]]] = []
        self.need_bytes = 0
        for layer in range(layout.layers):
            numbers = tuple(codecs.number(layer, kind) for kind in layout.kinds)
            if numbers not in by_codecs:
                by_codecs[numbers] = [_sizes_of(codecs.codec(layer, page.kind), page.shape) for page in first]
            self._layers.append(by_codecs[numbers])
            self.need_bytes += sum(largest_of(size) for sizes in by_codecs[numbers] for size in sizes)
        self.pages_per_layer = len(first)

    def of(self, page: int) -> Sequence[PageSizes]:
        """Sizes of each stream of a page."""
        layer, position = divmod(page, self.pages_per_layer)
        return self._layers[layer][position]


def _sizes_of(codec: Codec, shape: PageShape) -> list[PageSizes]:
    """Two at most, or any up to a bound."""
    narrow, wide = (codec.stream_bytes(shape, wide=escaped) for escaped in (False, True))
    return [
        range(pair[1] + 1) if stream in codec.variable_streams else frozenset(pair)
        for stream, pair in enumerate(zip(narrow, wide, strict=True))
    ]
