"""The pages of a layout, made quickly: every layer is cut like the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lynx_net.wire.layout import PageRef

if TYPE_CHECKING:
    from lynx_net.wire.layout import CacheLayout

__all__ = ["LayerPages"]


class LayerPages:
    """What `CacheLayout.page` gives, at a fraction of its cost."""

    def __init__(self, layout: CacheLayout) -> None:
        self.first = layout.first_layer()
        """Those of the first layer."""

    @property
    def per_layer(self) -> int:
        """Pages of a layer."""
        return len(self.first)

    def of(self, layer: int) -> list[PageRef]:
        """All pages of a layer, in order."""
        before = layer * len(self.first)
        return [
            PageRef(before + index, layer, like.kind, like.start, like.stop, like.shape)
            for index, like in enumerate(self.first)
        ]

    def page(self, index: int) -> PageRef:
        """The page with this number."""
        layer, position = divmod(index, len(self.first))
        like = self.first[position]
        return PageRef(index, layer, like.kind, like.start, like.stop, like.shape)
