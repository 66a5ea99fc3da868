"""The receiving pipeline: arrived pages are decoded in a thread, anchors before residuals, while more arrive."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_net.aio.transfer import IncomingTransfer, Offer
from lynx_net.errors import CodecError, LocalProtocolError, LynxError
from lynx_net.wire.messages import AbortCode
from lynx_net.wire.receiving import largest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from lynx_codec import Codec, PageShape
    from lynx_codec.plan import CodecTable
    from lynx_net.aio.link import Link
    from lynx_net.serdes.target import KVTarget
    from lynx_net.wire.layout import Kind
    from lynx_net.wire.receiving import PageSizes

__all__ = ["ReceivedTransfer"]

logger = logging.getLogger("lynx_net")

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
        codecs: CodecTable,
        allocate: Callable[[Offer], KVTarget],
        executor: Executor | None,
    ) -> None:
        super().__init__(link, transfer, offer, stream_names=codecs.stream_names)
        layout = offer.layout
        self._codecs = codecs
        self._executor = executor
        # Every layer is cut alike, so one layer with the same codecs tells.
        first = [layout.page(index) for index in layout.layer_pages(0)] if layout.layers else []
        by_codecs: dict[tuple[int, ...], list[list[PageSizes]]] = {}
        self._layer_sizes: list[list[list[PageSizes]]] = []
        self._need_bytes = 0
        for layer in range(layout.layers):
            numbers = tuple(codecs.number(layer, kind) for kind in layout.kinds)
            if numbers not in by_codecs:
                by_codecs[numbers] = [_sizes_of(codecs.codec(layer, page.kind), page.shape) for page in first]
            self._layer_sizes.append(by_codecs[numbers])
            self._need_bytes += sum(largest_of(size) for sizes in by_codecs[numbers] for size in sizes)
        self._pages_per_layer = len(first)
        self.target = allocate(offer)
        self._views: dict[tuple[int, Kind], NDArray[Any]] = {}
        for layer in range(layout.layers):
            for kind in layout.kinds:
                self._views[layer, kind] = _checked(self.target.view(layer, kind), layout.array_shape(kind))
        # Page numbers that wait for the decoder, by the last stream that is there; all of it under the link's lock.
        self._waiting: list[dict[int, None]] = [{} for _ in range(offer.streams)]
        self._waiting_bytes = [0] * offer.streams
        self._layer_arrived = [[0] * layout.layers for _ in range(offer.streams)]
        self._decoding = False
        self._loop = link.loop
        self._error: LynxError | None = None

    def sizes(self, page: int) -> Sequence[PageSizes]:
        layer, position = divmod(page, self._pages_per_layer)
        return self._layer_sizes[layer][position]

    @property
    def need_bytes(self) -> int:
        return self._need_bytes

    def page_arrived(self, page: int, stream: int) -> None:
        """Visits of the decoder thread cost more than a page: one is due when a layer is whole, or much waits."""
        state = self.link.core.receive_state(self.id)
        if self._error is not None or state is None:
            return
        for earlier in self._waiting[:stream]:
            earlier.pop(page, None)
        self._waiting[stream][page] = None
        self._waiting_bytes[stream] += largest_of(self.sizes(page)[stream])
        layer = page // self._pages_per_layer
        self._layer_arrived[stream][layer] += 1
        due = (
            self._layer_arrived[stream][layer] == self._pages_per_layer
            or len(self._waiting[stream]) >= BATCH_PAGES
            or self._waiting_bytes[stream] >= state.windows[stream].window // 4
        )
        if due and not self._decoding:
            self._decoding = True
            if self._executor is None:
                self._decode_waiting()
            else:
                self._executor.submit(self._decode_waiting)

    def fail(self, error: LynxError) -> None:
        """Everything waiting is dropped; the waiters learn of it when the decoder thread has let go of the target."""
        with self.link.lock:
            self._error = error
            for waiting in self._waiting:
                waiting.clear()
            decoding = self._decoding
        if not decoding:
            super().fail(error)

    def _decode_waiting(self) -> None:
        """Runs in the decoder thread until nothing waits."""
        try:
            while (batch := self._next_batch()) is not None:
                stream, pages = batch
                arrived = ((page, self.link.page_streams(self, page, stream)) for page in pages)
                self._decode([(page, streams) for page, streams in arrived if streams])
                self.link.decoded(self, pages, stream)
        except CodecError as error:
            self.link.abort(self.id, AbortCode.CODEC, f"the receiver cannot decode: {error}", error)
            self._loop.call_soon_threadsafe(self._let_go)
        except Exception as error:
            # Not ours to handle, but the transfer's waiters must not hang because of it.
            self.link.abort(self.id, AbortCode.RECEIVER_FAILED, f"the receiver's decoder failed: {error!r}")
            self._loop.call_soon_threadsafe(self._let_go)
            logger.exception("the decoder of transfer %d failed", self.id)

    def _next_batch(self) -> tuple[int, list[int]] | None:
        """Pages of the earliest stream that has any: anchors first, also here."""
        with self.link.lock:
            for stream, waiting in enumerate(self._waiting):
                if waiting:
                    pages = list(itertools.islice(waiting, BATCH_PAGES))
                    for page in pages:
                        del waiting[page]
                    self._waiting_bytes[stream] = sum(largest_of(self.sizes(page)[stream]) for page in waiting)
                    return stream, pages
            self._decoding = False
            if self._error is not None:
                self._loop.call_soon_threadsafe(self._let_go)
            return None

    def _let_go(self) -> None:
        """The decoder thread has finished for good: now the waiters may know."""
        if self._error is not None:
            super().fail(self._error)

    def _decode(self, inputs: list[tuple[int, list[memoryview]]]) -> None:
        for index, streams in inputs:
            page = self.offer.layout.page(index)
            out = self._views[page.layer, page.kind][page.start : page.stop]
            try:
                self._codecs.codec(page.layer, page.kind).decode(streams, page.shape, out)
            except CodecError as error:
                error.add_note(f"layer {page.layer}, {page.kind}s, tokens {page.start} to {page.stop}")
                raise


def _sizes_of(codec: Codec, shape: PageShape) -> list[PageSizes]:
    """The byte sizes that each stream of a page may have: two at most, or any up to a bound."""
    narrow, wide = (codec.stream_bytes(shape, wide=escaped) for escaped in (False, True))
    return [
        range(pair[1] + 1) if stream in codec.variable_streams else frozenset(pair)
        for stream, pair in enumerate(zip(narrow, wide, strict=True))
    ]


def _checked(view: object, shape: tuple[int, int, int]) -> NDArray[Any]:
    if not isinstance(view, np.ndarray) or view.dtype not in (np.float32, np.float16, np.uint16):
        raise LocalProtocolError("the target must give numpy arrays of float32, float16 or uint16 (bfloat16 bits)")
    if view.shape != shape or not view.flags.writeable:
        raise LocalProtocolError(f"the target gave an array of shape {view.shape}, needed is a writable one of {shape}")
    return view
