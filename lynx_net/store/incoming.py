"""The receiving end of a cache that is stored as it comes: nothing is decoded."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

from lynx_net.aio.transfer import IncomingTransfer, Offer
from lynx_net.errors import LocalProtocolError, LynxError, StoreError
from lynx_net.serdes.pages import LayerPages
from lynx_net.serdes.sizes import TransferSizes
from lynx_net.store.format import EntryHead
from lynx_net.store.messages import FIELD, path_from
from lynx_net.wire.messages import AbortCode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from lynx_net.aio.link import Link
    from lynx_net.store.store import ContextStore
    from lynx_net.wire.pagesizes import PageSizes

__all__ = ["StoredTransfer"]

logger = logging.getLogger("lynx_net")

BATCH_PAGES = 32
"""Page streams written in one go."""


class StoredTransfer(IncomingTransfer):
    """An incoming transfer that goes to the disk. What is called decoded elsewhere is written here.

    `complete`, and with it what the sender's `delivered` waits for, comes when the entry is durable. After a failure
    nothing of the entry is left once `await transfer.closed()` has returned.

    Raises:
        AlreadyStoredError, StoreError, CodecError, LocalProtocolError: the offer is declined.
    """

    def __init__(self, link: Link, transfer: int, offer: Offer, *, store: ContextStore, executor: Executor) -> None:
        fields = offer.meta.get(FIELD)
        if not isinstance(fields, dict):
            raise LocalProtocolError(f"this is a context store; a transfer to it says in meta[{FIELD!r}] what it is")
        if not offer.layout.page_count:
            raise LocalProtocolError("a cache without a page cannot be stored")
        meta = {name: value for name, value in offer.meta.items() if name != FIELD}
        params, streams = offer.codec_params, offer.streams
        head = EntryHead(path_from(fields), offer.layout, offer.codec, params, streams, meta, store.now())
        codecs = head.table()
        super().__init__(link, transfer, offer, stream_names=codecs.stream_names)
        self._sizes = TransferSizes(LayerPages(offer.layout), offer.layout, codecs)
        self._store = store
        self._executor = executor
        self._loop = link.loop
        # Pages that wait for the writer, by stream; all of it under the link's lock.
        self._waiting: list[dict[int, None]] = [{} for _ in range(streams)]
        self._writing = False
        self._stopped = False
        self._error: LynxError | None = None
        self._writer = store.begin(head, self._sizes.need_bytes)

    @property
    def key(self) -> str:
        """Content address of the entry."""
        return self._writer.head.key

    def sizes(self, page: int) -> Sequence[PageSizes]:
        return self._sizes.of(page)

    @property
    def need_bytes(self) -> int:
        return self._sizes.need_bytes

    def page_arrived(self, page: int, stream: int) -> None:
        if self._stopped or self._error is not None:
            return
        self._waiting[stream][page] = None
        if not self._writing:
            self._writing = True
            self._executor.submit(self._write_waiting)

    def fail(self, error: LynxError) -> None:
        """What was written is removed in the writer's thread; the waiters learn of the failure afterwards."""
        with self.link.lock:
            if self._error is not None:
                return
            self._error = error
            for waiting in self._waiting:
                waiting.clear()
            writing = self._writing
        if not writing:
            self._executor.submit(self._give_up)

    def _write_waiting(self) -> None:
        """Runs in a writer's thread until nothing waits."""
        try:
            while (batch := self._next_batch()) is not None:
                stream, pages = batch
                self._writer.append(self._arrived(pages, stream))
                if self._writer.complete:
                    self._store.finish(self._writer)
                    logger.info("store: has %s, %d tokens", self.key, self.offer.layout.tokens)
                self.link.decoded(self, pages, stream)
        except StoreError as error:
            self._stop(f"the store failed: {error}", error)
        except Exception as error:
            # Not ours to handle, but the transfer's waiters must not hang because of it.
            logger.exception("the writer of transfer %d failed", self.id)
            self._stop(f"the store failed: {error!r}", None)

    def _arrived(self, pages: list[int], stream: int) -> list[tuple[int, int, memoryview]]:
        """The bytes of page streams; none if the transfer has ended meanwhile."""
        with self.link.lock:
            state = self.link.core.incoming.state(self.id)
            return [] if state is None else [(page, stream, state.page_streams(page, stream)[stream]) for page in pages]

    def _stop(self, reason: str, error: StoreError | None) -> None:
        """The writer's thread cannot go on; `fail` follows, if it was not called already."""
        with self.link.lock:
            self._stopped = True
            self._writing = False
            failed = self._error is not None
        if failed:
            self._give_up()
        else:
            self.link.abort(self.id, AbortCode.RECEIVER_FAILED, reason, error)

    def _next_batch(self) -> tuple[int, list[int]] | None:
        with self.link.lock:
            for stream, waiting in enumerate(self._waiting):
                if waiting:
                    pages = list(itertools.islice(waiting, BATCH_PAGES))
                    for page in pages:
                        del waiting[page]
                    return stream, pages
            if self._error is None:
                self._writing = False
                return None
        self._give_up()
        return None

    def _give_up(self) -> None:
        """In a writer's thread, for good: nothing is left of the entry, and now the waiters may know."""
        error = self._error
        reason = error if isinstance(error, StoreError) else StoreError(f"its transfer has failed: {error}")
        try:
            self._store.abandon(self._writer, reason)
        except StoreError as failure:
            logger.warning("store: %s", failure)
        if error is not None:
            self._loop.call_soon_threadsafe(super().fail, error)
