"""The sending pipeline: page i is on the wire while page i + 1 is being encoded (Lynx section 4.2)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lynx_net.errors import CodecError, LocalProtocolError
from lynx_net.serdes.device_encoder import DeviceEncoder
from lynx_net.serdes.encoder import HostEncoder
from lynx_net.serdes.pages import LayerPages
from lynx_net.wire.layout import WaitingOrder
from lynx_net.wire.messages import AbortCode

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from lynx_codec.plan import CodecTable
    from lynx_net.aio.readiness import Readiness
    from lynx_net.aio.timeline import Timeline
    from lynx_net.aio.transfer import Offer, OutgoingTransfer
    from lynx_net.serdes.device import Devices
    from lynx_net.serdes.encoder import EncodedGroup, LayerEncoder
    from lynx_net.wire.layout import Kind
    from lynx_net.wire.stats import TransferStats

__all__ = ["Sending"]


class Sending:
    """The sending end of a transfer, `async with link.send(...) as sending`.

    Leaving the block waits until the receiver has everything decoded in place. Leaving it by an
    exception aborts the transfer, and the receiver's waiters learn of it at once.
    """

    def __init__(
        self,
        transfer: OutgoingTransfer,
        codecs: CodecTable,
        fine: NDArray[np.int64],
        executor: Executor | None,
        devices: Devices,
    ) -> None:
        self._transfer = transfer
        self._codecs = codecs
        self._fine = fine
        self._executor = executor
        self._devices = devices
        self._pages = LayerPages(transfer.offer.layout)
        self._outlet = _Outlet(transfer, self._pages.per_layer)
        self._host = HostEncoder(codecs, fine, self._pages.first, executor)
        self._device: DeviceEncoder | None = None
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

    async def write(self, layer: int, keys: Any, values: Any) -> None:
        """Encode and queue one layer; returns when it is queued and the queue has room again.

        Args:
            layer: 0 to layers - 1, in any order, each once.
            keys, values: [tokens, heads, size], any strides, in the dtype of the layout (uint16 holds
                the bits of bfloat16). Read only during the call. None where the layout has no such array. Numpy
                arrays; or device memory: arrays of torch or CuPy, what has the CUDA array interface or DLPack, or
                `lynx_gpu.views.DeviceView` for caches in blocks. Both of a layer are of one of these sorts. Device
                memory is read when the caller's current stream has got to where it is now (docs/gpu.md).

        Cancelling waits for the encoder thread; the transfer then lacks pages and should be aborted.

        Raises:
            LocalProtocolError: wrong layer, shape or dtype; nothing was sent.
            BackendMissingError: device memory, but no CuPy or no device.
            NonFiniteError, CodecError: the layer cannot be encoded; the transfer is aborted.
            LynxError: the transfer has failed.
        """
        given: dict[Kind, Any] = {"key": keys, "value": values}
        encoder, arrays = self._check(layer, given)
        self._written.add(layer)
        try:
            await encoder.encode(layer, arrays, self._outlet)
        except CodecError as error:
            where = f"layer {layer}: {error}"
            self._transfer.link.abort(self._transfer.id, AbortCode.CODEC, where, error)
            error.add_note(f"in layer {layer}")
            raise

    def _check(self, layer: int, given: dict[Kind, Any]) -> tuple[LayerEncoder, dict[Kind, Any]]:
        """Refuse what does not fit the layout; the encoder for these arrays, and those that the layout has."""
        layout = self._transfer.offer.layout
        if not 0 <= layer < layout.layers:
            raise LocalProtocolError(f"layer {layer} of a layout with {layout.layers} layers")
        if layer in self._written:
            raise LocalProtocolError(f"layer {layer} was written already")
        arrays: dict[Kind, Any] = {kind: given[kind] for kind in layout.kinds}
        for kind, array in given.items():
            if kind not in arrays and array is not None and math.prod(array.shape):
                raise LocalProtocolError(f"layer {layer}: the layout has no {kind}s, but some were given")
        on_device = [self._devices.holds(array) for array in arrays.values()]
        if any(on_device) and not all(on_device):
            raise LocalProtocolError(
                f"layer {layer}: keys and values must both be in device memory, or both in host memory"
            )
        encoder = self._encoder(on_device=any(on_device))
        for kind, array in arrays.items():
            try:
                encoder.check(kind, array, layout)
            except LocalProtocolError as error:
                raise LocalProtocolError(f"layer {layer}: {error}") from None
        return encoder, arrays

    def _encoder(self, *, on_device: bool) -> LayerEncoder:
        if not on_device:
            return self._host
        if self._device is None:
            layout = self._transfer.offer.layout
            self._device = DeviceEncoder(
                *(self._codecs, self._fine, layout, self._pages.first, self._devices, self._executor),
                segment_bytes=self._transfer.link.core.outgoing.segment_bytes,
            )
        return self._device

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


class _Outlet:
    """Queues encoded pages, the first stream of all before the second, and so on."""

    def __init__(self, transfer: OutgoingTransfer, pages_per_layer: int) -> None:
        self._transfer = transfer
        self._per_layer = pages_per_layer
        self._order = WaitingOrder(transfer.offer.layout)

    async def wait_for_room(self) -> None:
        await self._transfer.wait_for_room()

    def has_room(self) -> bool:
        return self._transfer.room

    def put(self, encoded: EncodedGroup) -> None:
        before = encoded.layer * self._per_layer
        indices = [before + page.index for page in encoded.pages]
        unknown = [[None] * len(indices)] * len(encoded.streams)
        self._transfer.submit_all(
            [
                (index, number, data, (self._order.place(index),) if number else (), checksum)
                for number, (stream, checksums) in enumerate(
                    zip(encoded.streams, encoded.checksums or unknown, strict=True)
                )
                for index, data, checksum in zip(indices, stream, checksums, strict=True)
            ]
        )
