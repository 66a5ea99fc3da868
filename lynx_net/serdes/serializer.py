"""The sending pipeline: page i is on the wire while page i + 1 is being encoded (Lynx section 4.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_net.aio.offload import run_blocking
from lynx_net.errors import CodecError, LocalProtocolError, NonFiniteError
from lynx_net.wire.messages import AbortCode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor
    from types import TracebackType

    from numpy.typing import NDArray

    from lynx_codec.plan import CodecTable
    from lynx_net.aio.readiness import Readiness
    from lynx_net.aio.timeline import Timeline
    from lynx_net.aio.transfer import Offer, OutgoingTransfer
    from lynx_net.wire.layout import Kind, PageRef
    from lynx_net.wire.stats import TransferStats

__all__ = ["Sending"]

GROUP_VALUES = 1 << 20
"""Values encoded in one visit to the encoder thread: many enough to be cheap, few enough to keep the wire fed."""

_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class Sending:
    """The sending end of a transfer, `async with link.send(...) as sending`.

    Leaving the block waits until the receiver has everything decoded in place. Leaving it by an
    exception aborts the transfer, and the receiver's waiters learn of it at once.
    """

    def __init__(
        self, transfer: OutgoingTransfer, codecs: CodecTable, fine: NDArray[np.int64], executor: Executor | None
    ) -> None:
        self._transfer = transfer
        self._codecs = codecs
        self._fine = fine
        self._executor = executor
        self._written: set[int] = set()

    @property
    def offer(self) -> Offer:
        """What was offered."""
        return self._transfer.offer

    @property
    def stats(self) -> TransferStats:
        """Bytes and segments sent so far, per stream."""
        return self._transfer.stats

    def timeline(self) -> Timeline:
        """What has happened to the transfer so far, and when."""
        return self._transfer.timeline()

    @property
    def delivered(self) -> Readiness:
        """Ready when the receiver has everything decoded in place."""
        return self._transfer.delivered

    async def write(self, layer: int, keys: NDArray[Any] | None, values: NDArray[Any] | None) -> None:
        """Encode and queue one layer; returns when it is queued and the queue has room again.

        Args:
            layer: 0 to layers - 1, in any order, each once.
            keys, values: [tokens, heads, size], any strides, in the dtype of the layout (uint16 holds
                the bits of bfloat16). Read only during the call. None where the layout has no such array.

        Cancelling waits for the encoder thread; the transfer then lacks pages and should be aborted.

        Raises:
            LocalProtocolError: wrong layer, shape or dtype; nothing was sent.
            NonFiniteError, CodecError: the layer cannot be encoded; the transfer is aborted.
            LynxError: the transfer has failed.
        """
        layout = self._transfer.offer.layout
        arrays: dict[Kind, NDArray[Any] | None] = {"key": keys, "value": values}
        self._check(layer, arrays)
        self._written.add(layer)
        pages = [layout.page(index) for index in layout.layer_pages(layer)]
        for group in _grouped(pages):
            await self._transfer.wait_for_room()
            try:
                encoded = await run_blocking(self._executor, self._encode, group, arrays)
            except CodecError as error:
                where = f"layer {layer}: {error}"
                self._transfer.link.abort(self._transfer.id, AbortCode.CODEC, where, error)
                error.add_note(f"in layer {layer}")
                raise
            for stream in range(len(self._codecs.stream_names)):
                for page, streams in encoded:
                    self._transfer.submit(page.index, stream, streams[stream], _rank(page) if stream else ())

    def _check(self, layer: int, arrays: dict[Kind, NDArray[Any] | None]) -> None:
        layout = self._transfer.offer.layout
        if not 0 <= layer < layout.layers:
            raise LocalProtocolError(f"layer {layer} of a layout with {layout.layers} layers")
        if layer in self._written:
            raise LocalProtocolError(f"layer {layer} was written already")
        dtype = _DTYPES[layout.dtype]
        for kind, array in arrays.items():
            if kind not in layout.kinds:
                if array is not None and array.size:
                    raise LocalProtocolError(f"layer {layer}: the layout has no {kind}s, but some were given")
                continue
            if not isinstance(array, np.ndarray):
                raise LocalProtocolError(f"layer {layer}: {kind}s must be a numpy array, not {type(array).__name__}")
            if array.shape != layout.array_shape(kind):
                raise LocalProtocolError(
                    f"layer {layer}: {kind}s have the shape {array.shape}, the layout says {layout.array_shape(kind)}"
                )
            if array.dtype != dtype:
                raise LocalProtocolError(
                    f"layer {layer}: {kind}s are {array.dtype}, the layout says {layout.dtype} ({np.dtype(dtype)})"
                )

    def _encode(
        self, group: list[PageRef], arrays: dict[Kind, NDArray[Any] | None]
    ) -> list[tuple[PageRef, list[memoryview]]]:
        encoded: list[tuple[PageRef, list[memoryview]]] = []
        for page in group:
            array = arrays[page.kind]
            assert array is not None
            codec = self._codecs.codec(page.layer, page.kind)
            outs = [memoryview(bytearray(size)) for size in codec.stream_bytes(page.shape, wide=True)]
            first, stop = np.searchsorted(self._fine, (page.start, page.stop))
            fine = self._fine[first:stop] - page.start
            try:
                lengths = codec.encode(array[page.start : page.stop], page.shape, outs, fine)
            except NonFiniteError as error:
                error.add_note(f"{page.kind}s, token {page.start + error.token} of the cache")
                raise
            encoded.append((page, [out[:length] for out, length in zip(outs, lengths, strict=True)]))
        return encoded

    def cancel(self, reason: str = "cancelled by the sender") -> None:
        """Give the transfer up."""
        self._transfer.cancel(reason)

    async def __aenter__(self) -> Sending:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._transfer.link.abort(
                self._transfer.id, AbortCode.SENDER_FAILED, f"the sender failed: {type(error).__name__}: {error}"
            )
            return
        missing = self._transfer.offer.layout.layers - len(self._written)
        if missing and self._transfer.offer.layout.page_count:
            self.cancel(f"{missing} layers were never written")
            raise LocalProtocolError(f"{missing} layers of the transfer were never written")
        try:
            await self.delivered
        except BaseException:
            self.cancel()
            raise


def _rank(page: PageRef) -> tuple[int, ...]:
    """Order of residuals that wait: keys first, late layers first, late tokens first.

    With half of them in place, drafts gain far more than in the order of the layers (docs/splits.md).
    """
    return (page.kind != "key", -page.layer, -page.start)


def _grouped(pages: list[PageRef]) -> Iterator[list[PageRef]]:
    """Consecutive pages of at most GROUP_VALUES values, at least one page."""
    group: list[PageRef] = []
    values = 0
    for page in pages:
        if group and values + page.shape.values > GROUP_VALUES:
            yield group
            group, values = [], 0
        group.append(page)
        values += page.shape.values
    if group:
        yield group
