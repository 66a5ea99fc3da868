"""Where a received cache goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from lynx_net.wire.layout import CacheLayout, Kind

__all__ = ["HostCache", "KVTarget"]


class KVTarget(Protocol):
    """Memory that a transfer is decoded into, in place: first from anchors, then refined, layer by layer."""

    def view(self, layer: int, kind: Kind) -> NDArray[Any]:
        """The writable keys or values of a layer: [tokens, heads, size], any strides; float32, float16 or uint16.

        Called once per layer and kind when the transfer is offered. A decoder thread writes to the array until
        the transfer has ended (`await transfer.closed()`).
        """
        ...


class HostCache:
    """A cache in plain numpy arrays, zero until something is decoded into it."""

    def __init__(self, layout: CacheLayout, dtype: DTypeLike = np.float32) -> None:
        self.layout = layout
        self._arrays = {
            (layer, kind): np.zeros(layout.array_shape(kind), dtype)
            for layer in range(layout.layers)
            for kind in layout.kinds
        }

    def view(self, layer: int, kind: Kind) -> NDArray[Any]:
        """The array [tokens, heads, size] of a layer's keys or values, not a copy."""
        return self._arrays[layer, kind]
