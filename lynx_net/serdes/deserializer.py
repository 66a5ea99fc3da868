"""The receiving pipeline: arrived pages are decoded in a thread, anchors before residuals, while more arrive."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_net.aio.offload import run_blocking
from lynx_net.aio.transfer import IncomingTransfer, Offer
from lynx_net.errors import CodecError, LocalProtocolError, LynxError
from lynx_net.wire.messages import AbortCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from lynx_codec import Codec, PageShape
    from lynx_net.aio.link import Link
    from lynx_net.serdes.target import KVTarget
    from lynx_net.wire.layout import Kind

__all__ = ["ReceivedTransfer"]

BATCH_PAGES = 32
"""Pages decoded in one visit to the decoder thread; bounds how long an abort waits for the thread."""


class ReceivedTransfer(IncomingTransfer):
    """An incoming transfer that decodes itself into its target.

    `target` is what `allocate(offer)` returned. It may be read at any time; what a readiness event has
    announced is whole. After a failure nothing is written once `await transfer.closed()` has returned.
    """

    def __init__(
        self,
        link: Link,
        transfer: int,
        offer: Offer,
        *,
        codec: Codec,
        allocate: Callable[[Offer], KVTarget],
        executor: Executor | None,
    ) -> None:
        super().__init__(link, transfer, offer)
        if len(codec.stream_names) != offer.streams:
            raise LocalProtocolError(
                f"streams: the offer has {offer.streams}, codec {codec.name} has {len(codec.stream_names)}"
            )
        layout = offer.layout
        self._codec = codec
        self._executor = executor
        self._sizes: dict[PageShape, list[frozenset[int]]] = {}
        self._need_bytes = self._count_need()
        self.target = allocate(offer)
        self._views: dict[tuple[int, Kind], NDArray[Any]] = {}
        for layer in range(layout.layers):
            for kind in layout.kinds:
                self._views[layer, kind] = _checked(self.target.view(layer, kind), layout.array_shape(kind))
        # Page numbers that wait for the decoder, by the last stream that is there.
        self._waiting: list[dict[int, None]] = [{} for _ in range(offer.streams)]
        self._decoding = False
        self._decoder: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._error: LynxError | None = None

    def sizes(self, page: int) -> Sequence[frozenset[int]]:
        return self._sizes_of(self.offer.layout.page(page).shape)

    @property
    def need_bytes(self) -> int:
        return self._need_bytes

    def page_arrived(self, page: int, stream: int) -> None:
        if self._error is not None:
            return
        for earlier in self._waiting[:stream]:
            earlier.pop(page, None)
        self._waiting[stream][page] = None
        if not self._decoding:
            self._decoding = True
            self._loop.call_soon_threadsafe(self._start_decoder)

    def fail(self, error: LynxError) -> None:
        """Everything waiting is dropped; the waiters learn of it when the decoder thread has let go of the target."""
        with self.link.lock:
            self._error = error
            for waiting in self._waiting:
                waiting.clear()
            decoding = self._decoding
        if not decoding:
            super().fail(error)

    def _start_decoder(self) -> None:
        self._decoder = asyncio.create_task(self._decode_waiting())

    async def _decode_waiting(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                stream, pages = batch
                arrived = ((page, self.link.page_streams(self, page, stream)) for page in pages)
                inputs = [(page, streams) for page, streams in arrived if streams]
                await run_blocking(self._executor, self._decode, inputs)
                self.link.decoded(self, pages, stream)
        except CodecError as error:
            self.link.abort(self.id, AbortCode.CODEC, f"the receiver cannot decode: {error}", error)
        except Exception as error:
            # Not ours to handle, but the transfer's waiters must not hang because of it.
            self.link.abort(self.id, AbortCode.RECEIVER_FAILED, f"the receiver's decoder failed: {error!r}")
            raise
        finally:
            if self._error is not None:
                super().fail(self._error)

    def _next_batch(self) -> tuple[int, list[int]] | None:
        """Pages of the earliest stream that has any: anchors first, also here."""
        with self.link.lock:
            for stream, waiting in enumerate(self._waiting):
                if waiting:
                    pages = list(itertools.islice(waiting, BATCH_PAGES))
                    for page in pages:
                        del waiting[page]
                    return stream, pages
            self._decoding = False
            return None

    def _decode(self, inputs: list[tuple[int, list[memoryview]]]) -> None:
        for index, streams in inputs:
            page = self.offer.layout.page(index)
            out = self._views[page.layer, page.kind][page.start : page.stop]
            try:
                self._codec.decode(streams, page.shape, out)
            except CodecError as error:
                error.add_note(f"layer {page.layer}, {page.kind}s, tokens {page.start} to {page.stop}")
                raise

    def _sizes_of(self, shape: PageShape) -> list[frozenset[int]]:
        sizes = self._sizes.get(shape)
        if sizes is None:
            narrow, wide = (self._codec.stream_bytes(shape, wide=escaped) for escaped in (False, True))
            sizes = self._sizes[shape] = [frozenset(pair) for pair in zip(narrow, wide, strict=True)]
        return sizes

    def _count_need(self) -> int:
        """Every layer is cut alike, so one layer tells."""
        layout = self.offer.layout
        if not layout.layers:
            return 0
        shapes = (layout.page(index).shape for index in layout.layer_pages(0))
        return layout.layers * sum(max(size) for shape in shapes for size in self._sizes_of(shape))


def _checked(view: object, shape: tuple[int, int, int]) -> NDArray[Any]:
    if not isinstance(view, np.ndarray) or view.dtype not in (np.float32, np.float16, np.uint16):
        raise LocalProtocolError("the target must give numpy arrays of float32, float16 or uint16 (bfloat16 bits)")
    if view.shape != shape or not view.flags.writeable:
        raise LocalProtocolError(f"the target gave an array of shape {view.shape}, needed is a writable one of {shape}")
    return view
