"""The receiving pipeline: arrived pages are decoded in a thread, anchors before residuals, while more arrive."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

from lynx_net.aio.transfer import IncomingTransfer, Offer
from lynx_net.errors import CodecError, LynxError
from lynx_net.serdes.decoder import HostDecoder, checked_array
from lynx_net.serdes.device_decoder import DeviceDecoders
from lynx_net.serdes.pages import LayerPages
from lynx_net.serdes.sizes import TransferSizes
from lynx_net.serdes.waiting import BATCH_PAGES, WaitingPages
from lynx_net.wire.credit import patience_bytes
from lynx_net.wire.messages import AbortCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Executor

    from lynx_codec.plan import CodecTable
    from lynx_net.aio.link import Link
    from lynx_net.serdes.decoder import ArrayDecoder, Started
    from lynx_net.serdes.device import Devices
    from lynx_net.serdes.target import KVTarget
    from lynx_net.wire.pagesizes import PageSizes

__all__ = ["ReceivedTransfer"]

DEVICE_BATCH_PAGES = 128
"""Pages decoded at once on a device, at most: what a batch costs Python is much the same whatever its size."""

DEVICE_BATCH_RUNS = 4
"""Runs that are due when the thread asks are begun together: after all the bytes that lanes have copied the first one
finds nothing of the interpreter in the caches and takes three times as long as those behind it."""

logger = logging.getLogger("lynx_net")


@dataclass(slots=True)
class _Begun:
    """Pages in decoding, with streams 0 to `stream`."""

    stream: int
    pages: list[int]
    of_runs: bool
    started: list[Started] = field(default_factory=list)


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
        devices: Devices,
    ) -> None:
        super().__init__(link, transfer, offer, stream_names=codecs.stream_names)
        layout = offer.layout
        self._codecs = codecs
        self._executor = executor
        self._pages = LayerPages(layout)
        self._sizes = TransferSizes(self._pages, layout, codecs)
        self.target = allocate(offer)
        on_devices = DeviceDecoders(devices, codecs, layout.page_tokens, self._sizes.need_bytes)
        self._per_array = self._pages.per_layer // max(len(layout.kinds), 1)
        self._decoders: list[ArrayDecoder] = []
        """Of keys and values in turn, as their pages are numbered."""
        for layer in range(layout.layers):
            for kind in layout.kinds:
                array, shape = self.target.view(layer, kind), layout.array_shape(kind)
                self._decoders.append(
                    on_devices.make(layer, kind, array, shape)
                    if devices.holds(array)
                    else HostDecoder(layer, codecs.codec(layer, kind), checked_array(array, shape))
                )
        self.pool = on_devices.pool
        # Bytes go to a device while it decodes what came before.
        self._most_begun = 1 if self.pool is None else 2
        self._waiting = WaitingPages(
            streams=offer.streams,
            pages_per_array=self._per_array,
            arrays=len(self._decoders),
            run_pages=BATCH_PAGES if self.pool is None else self._device_run(link),
            whole=self.pool is not None,
            bytes_of=self._sizes.most,
            most_runs=1 if self.pool is None else DEVICE_BATCH_RUNS,
        )
        """Under the link's lock."""
        self._decoding = False
        self._loop = link.loop
        self._error: LynxError | None = None

    def sizes(self, page: int) -> Sequence[PageSizes]:
        return self._sizes.of(page)

    @property
    def need_bytes(self) -> int:
        return self._sizes.need_bytes

    def page_arrived(self, page: int, stream: int) -> None:
        self.pages_arrived((page,), stream)

    def pages_arrived(self, pages: Sequence[int], stream: int) -> None:
        """Visits of the decoder thread cost more than a page: `WaitingPages` says when one is due."""
        state = self.link.core.incoming.state(self.id)
        if self._error is not None or state is None:
            return
        window = state.windows[stream].window
        limit_bytes = patience_bytes(window, state.largest_segment(stream))
        if self.pool is None:  # batches for a device had better be whole
            limit_bytes = min(limit_bytes, window // 4)
        due = False
        for page in pages:
            due |= self._waiting.add(page, stream, limit_bytes)
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
            self._waiting.clear()
            decoding = self._decoding
        if not decoding:
            super().fail(error)

    def _decode_waiting(self) -> None:
        """Runs in the decoder thread until nothing waits: one batch is begun while the one before is decoded."""
        begun: deque[_Begun] = deque()
        try:
            while True:
                if (batch := self._next_batch(idle=not begun)) is not None:
                    begun.append(batch)
                    self._begin(batch)
                elif not begun:
                    return
                if batch is None or len(begun) == self._most_begun:
                    oldest = begun[0]
                    for started in oldest.started:
                        started.finish()
                    self.link.decoded(self, oldest.pages, oldest.stream)
                    begun.popleft()
        except CodecError as error:
            self._settle(begun)
            self.link.abort(self.id, AbortCode.CODEC, f"the receiver cannot decode: {error}", error)
            self._loop.call_soon_threadsafe(self._let_go)
        except Exception as error:
            # Not ours to handle, but the transfer's waiters must not hang because of it.
            self._settle(begun)
            self.link.abort(self.id, AbortCode.RECEIVER_FAILED, f"the receiver's decoder failed: {error!r}")
            self._loop.call_soon_threadsafe(self._let_go)
            logger.exception("the decoder of transfer %d failed", self.id)

    def _begin(self, batch: _Begun) -> None:
        """Pages of one array together, or each run by itself; there are none if the transfer has ended."""
        streams = self.link.page_streams(self, batch.pages, batch.stream)
        if not streams:
            return
        first, per_array = self._pages.first, self._per_array
        order = sorted(zip(batch.pages, streams, strict=True), key=itemgetter(0))
        run_pages = self._waiting.run_pages if batch.of_runs else per_array
        for (array, _), run in itertools.groupby(
            order, key=lambda one: (one[0] // per_array, one[0] % per_array // run_pages)
        ):
            arrived = [(first[index % len(first)], of_page) for index, of_page in run]
            batch.started.append(self._decoders[array].start(arrived))

    def _device_run(self, link: Link) -> int:
        """Pages of a run for a device: what may wait for the rest of its run, or less, so that runs are alike."""
        config = link.core.config
        run_pages = DEVICE_BATCH_PAGES
        arrays = range(0, self._pages.per_layer, max(self._per_array, 1))
        for stream in range(self.offer.streams):
            window = config.residual_window_bytes if stream else config.anchor_window_bytes
            for first in arrays:
                # Of a usual page: the last one of a cache may have many times its bytes, for its fine tokens.
                usual = sorted(self._sizes.most(page, stream) for page in range(first, first + self._per_array))
                usual_bytes = max(usual[len(usual) // 2], 1)
                run_pages = min(
                    run_pages, patience_bytes(window, min(config.segment_bytes, usual_bytes)) // usual_bytes
                )
        runs = -(-self._per_array // max(run_pages, 1))
        return max(-(-self._per_array // max(runs, 1)), 1)

    def _settle(self, begun: Iterable[_Begun]) -> None:
        """After an error: wait until nothing writes to the target any more. The first error is the one that counts."""
        for batch in begun:
            for started in batch.started:
                with contextlib.suppress(Exception):
                    started.finish()

    def _next_batch(self, *, idle: bool) -> _Begun | None:
        """Pages of the earliest stream that has any: anchors first, also here.

        None if nothing waits; if the thread is `idle`, too, that is the end of the visit.
        """
        with self.link.lock:
            batch = self._waiting.next()
            if batch is not None:
                return _Begun(*batch)
            if not idle:
                return None
            self._decoding = False
            if self._error is not None:
                self._loop.call_soon_threadsafe(self._let_go)
            return None

    def _let_go(self) -> None:
        """The decoder thread has finished for good: now the waiters may know."""
        if self._error is not None:
            super().fail(self._error)
