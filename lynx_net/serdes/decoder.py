"""Streams in, pages in place: what `ReceivedTransfer` asks of a decoder, and the one for arrays in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lynx_net.errors import CodecError, LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lynx_codec import Codec
    from lynx_net.wire.layout import PageRef

__all__ = ["ArrayDecoder", "Arrived", "HostDecoder", "Started", "checked_array", "decode_page"]

Arrived = tuple["PageRef", "list[memoryview]"]
"""A page and the first streams of it. All layers are cut alike: the page is that of the first layer which lies so."""


class Started(Protocol):
    """Pages that are being decoded. In the decoder thread."""

    def finish(self) -> None:
        """Wait until they are in place.

        Raises:
            CodecError: the bytes of a page are not one.
        """
        ...


class ArrayDecoder(Protocol):
    """Decodes pages of one array of the target: the keys or the values of one layer."""

    def start(self, pages: Sequence[Arrived]) -> Started:
        """Begin to decode pages that all have as many streams. In the decoder thread.

        The streams must stay as they are until `finish` has returned, also if it raises.

        Raises:
            CodecError: the bytes of a page are not one.
        """
        ...


class _InPlace:
    """Decoded when it was started."""

    def finish(self) -> None:
        return


class HostDecoder:
    """Into a numpy array."""

    def __init__(self, layer: int, codec: Codec, array: NDArray[Any]) -> None:
        self._layer = layer
        self._codec = codec
        self._array = array

    def start(self, pages: Sequence[Arrived]) -> Started:
        for page, streams in pages:
            decode_page(self._codec, self._layer, page, streams, self._array[page.start : page.stop])
        return _InPlace()


def decode_page(codec: Codec, layer: int, page: PageRef, streams: Sequence[memoryview], out: NDArray[Any]) -> None:
    """Decode one page of a layer; its error says where it belongs."""
    try:
        codec.decode(streams, page.shape, out)
    except CodecError as error:
        error.add_note(f"layer {layer}, {page.kind}s, tokens {page.start} to {page.stop}")
        raise


def checked_array(view: object, shape: tuple[int, int, int]) -> NDArray[Any]:
    """What a target gave, if pages can be decoded into it."""
    if not isinstance(view, np.ndarray) or view.dtype not in (np.float32, np.float16, np.uint16):
        raise LocalProtocolError(
            "the target must give numpy arrays of float32, float16 or uint16 (bfloat16 bits), or device memory"
        )
    if view.shape != shape or not view.flags.writeable:
        raise LocalProtocolError(f"the target gave an array of shape {view.shape}, needed is a writable one of {shape}")
    return view
