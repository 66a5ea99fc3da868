"""Pages in, streams out: what `Sending` asks of an encoder, and the one for arrays in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from lynx_net.aio.offload import run_blocking
from lynx_net.errors import LocalProtocolError, NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from lynx_codec import Codec
    from lynx_codec.plan import CodecTable
    from lynx_net.wire.layout import CacheLayout, Kind, PageRef

__all__ = ["EncodedGroup", "HostEncoder", "LayerEncoder", "Outlet", "encode_page", "fine_positions"]

GROUP_VALUES = 1 << 20
"""Values encoded in one visit to the encoder thread: many enough to be cheap, few enough to keep the wire fed."""

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""How numpy holds the dtypes of a layout."""


class EncodedGroup(NamedTuple):
    """Pages of a layer, and for each stream of the transfer one memoryview a page; the memory must not change while a
    view is left. All layers are cut alike: the pages are those of the first layer which lie so. `checksums` are xxh3-64
    of the views, as far as they are known."""

    layer: int
    pages: Sequence[PageRef]
    streams: Sequence[Sequence[memoryview]]
    checksums: Sequence[Sequence[int | None]] | None = None


class Outlet(Protocol):
    """Where encoded pages go."""

    async def wait_for_room(self) -> None:
        """Return when more may be encoded; raises the transfer's error."""
        ...

    def has_room(self) -> bool:
        """Whether `wait_for_room` would return at once, as far as is known now. For any thread."""
        ...

    def put(self, encoded: EncodedGroup) -> None:
        """Queue these pages."""
        ...


class LayerEncoder(Protocol):
    """Encodes layers whose arrays are all in one sort of memory."""

    def check(self, kind: Kind, array: Any, layout: CacheLayout) -> None:
        """Raise LocalProtocolError unless the array is one of this layout."""
        ...

    async def encode(self, layer: int, arrays: Mapping[Kind, Any], outlet: Outlet) -> None:
        """Put all pages of a layer into the outlet, in order, group by group.

        Nothing reads the arrays any more when this has returned, however it ends. Cancelling waits for the thread.

        Raises:
            CodecError: a page cannot be encoded; those before it were put.
            LynxError: the transfer has failed.
        """
        ...


class HostEncoder:
    """Numpy arrays; encoded in a thread while the pages before are on the wire."""

    def __init__(
        self, codecs: CodecTable, fine: NDArray[np.int64], pages: Sequence[PageRef], executor: Executor | None
    ) -> None:
        self._groups = list(_groups_of(pages, GROUP_VALUES))
        self._codecs = codecs
        self._fine = fine
        self._executor = executor

    def check(self, kind: Kind, array: Any, layout: CacheLayout) -> None:
        if not isinstance(array, np.ndarray):
            raise LocalProtocolError(f"{kind}s must be a numpy array, not {type(array).__name__}")
        dtype = DTYPES[layout.dtype]
        check_shape(kind, array.shape, layout)
        if array.dtype != dtype:
            raise LocalProtocolError(f"{kind}s are {array.dtype}, the layout says {layout.dtype} ({np.dtype(dtype)})")

    async def encode(self, layer: int, arrays: Mapping[Kind, Any], outlet: Outlet) -> None:
        for group in self._groups:
            await outlet.wait_for_room()
            outlet.put(await run_blocking(self._executor, self._encode, layer, group, arrays))

    def _encode(self, layer: int, group: Sequence[PageRef], arrays: Mapping[Kind, NDArray[Any]]) -> EncodedGroup:
        encoded = [
            encode_page(
                self._codecs.codec(layer, page.kind),
                page,
                arrays[page.kind][page.start : page.stop],
                fine_positions(self._fine, page),
            )
            for page in group
        ]
        return EncodedGroup(layer, group, list(zip(*encoded, strict=True)))


def encode_page(codec: Codec, page: PageRef, array: NDArray[Any], fine: NDArray[np.int64]) -> list[memoryview]:
    """Encode one page into memory of its own: one memoryview a stream."""
    outs = [memoryview(bytearray(size)) for size in codec.stream_bytes(page.shape, wide=True)]
    try:
        lengths = codec.encode(array, page.shape, outs, fine)
    except NonFiniteError as error:
        name_place(error, page)
        raise
    return [out[:length] for out, length in zip(outs, lengths, strict=True)]


def name_place(error: NonFiniteError, page: PageRef) -> None:
    """Add to the error of a page which token of the cache it means."""
    error.add_note(f"{page.kind}s, token {page.start + error.token} of the cache")


def check_shape(kind: Kind, shape: tuple[int, ...], layout: CacheLayout) -> None:
    """Raise LocalProtocolError unless keys or values of a layer have this shape."""
    if shape != layout.array_shape(kind):
        raise LocalProtocolError(f"{kind}s have the shape {shape}, the layout says {layout.array_shape(kind)}")


def fine_positions(fine: NDArray[np.int64], page: PageRef) -> NDArray[np.int64]:
    """Those of the fine tokens of a cache that are in a page, as positions in it."""
    first, stop = np.searchsorted(fine, (page.start, page.stop))
    positions: NDArray[np.int64] = fine[first:stop] - page.start
    return positions


def _groups_of(pages: Sequence[PageRef], most_values: int) -> Iterator[list[PageRef]]:
    """Consecutive pages of at most so many values, at least one page."""
    group: list[PageRef] = []
    values = 0
    for page in pages:
        if group and values + page.shape.values > most_values:
            yield group
            group, values = [], 0
        group.append(page)
        values += page.shape.values
    if group:
        yield group
