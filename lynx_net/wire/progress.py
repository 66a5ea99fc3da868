"""What of an incoming transfer is ready: a layer when all its pages are decoded, a stream when all layers are.

Rule 5 of receiving.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from lynx_net.wire.events import LayerReady, StreamReady, TransferComplete

if TYPE_CHECKING:
    from lynx_net.wire.layout import CacheLayout

__all__ = ["Progress", "Ready"]

Ready: TypeAlias = LayerReady | StreamReady | TransferComplete


class Progress:
    """Counts what is missing, of each stream and layer."""

    def __init__(self, transfer: int, streams: int, layout: CacheLayout) -> None:
        self._transfer = transfer
        self._streams = streams
        self._layers = layout.layers
        self._pages_per_layer = layout.page_count // max(layout.layers, 1)
        self._pages_missing = [[self._pages_per_layer] * layout.layers for _ in range(streams)]
        self._layers_missing = [layout.layers if layout.page_count else 0] * streams

    @property
    def complete(self) -> bool:
        """True when everything is decoded."""
        return self._layers_missing[-1] == 0

    def without_pages(self) -> list[Ready]:
        """What is ready before any page has come: all of a transfer that has none."""
        if not self.complete:
            return []
        events: list[Ready] = []
        for stream in range(self._streams):
            events += [LayerReady(self._transfer, layer, stream) for layer in range(self._layers)]
            events.append(StreamReady(self._transfer, stream))
        return [*events, TransferComplete(self._transfer)]

    def page_decoded(self, page: int, stream: int, events: list[Ready]) -> None:
        """A page is in place with this stream, too; adds to `events` what is ready by that."""
        missing, layer = self._pages_missing[stream], page // self._pages_per_layer
        missing[layer] -= 1
        if missing[layer]:
            return
        events.append(LayerReady(self._transfer, layer, stream))
        self._layers_missing[stream] -= 1
        if not self._layers_missing[stream]:
            events.append(StreamReady(self._transfer, stream))
            if stream == self._streams - 1:
                events.append(TransferComplete(self._transfer))
