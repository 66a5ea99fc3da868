"""Computed caches on their way from the prefill server to the context store: in the background, one at a time.

What becomes of them, as metrics count it:

    stored    it is durable there
    known     the store has it, or is just getting it from somebody else
    dropped   as many as may (`store.waiting`) were waiting
    down      there was no link to the store when its turn came
    failed    the store refused it, or the transfer failed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lynx_net.errors import LynxError
from lynx_net.integrations.http.logs import request_id
from lynx_net.integrations.http.tasks import stop_task
from lynx_net.store import is_already_stored, stored_as

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from lynx_net.integrations.http.metrics import ServerMetrics
    from lynx_net.integrations.http.store_link import StoreLink
    from lynx_net.integrations.transformers import Prefilled
    from lynx_net.wire.layout import CacheLayout

__all__ = ["StoreWriter", "Stored"]

logger = logging.getLogger("lynx_net.http")

LAST_S = 5.0
"""What waits when the server ends has so long to be stored."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A cache to be stored: of all tokens of a prompt but the last.

    Attributes:
        request_id: for which it was computed.
        tokens: the prompt.
        layout: of the cache.
        made: what prefill returned, with the last token.
        fine: see `KVLink.send`.
    """

    request_id: str
    tokens: Sequence[int]
    layout: CacheLayout
    made: Prefilled
    fine: Any


class StoreWriter:
    """Use `StoreWriter.open`. For one event loop."""

    def __init__(
        self, store: StoreLink, model: str, coding: dict[str, Any], waiting: int, metrics: ServerMetrics
    ) -> None:
        self._store = store
        self._model = model
        self._coding = coding
        self._limit = waiting
        self._metrics = metrics
        self._waiting: deque[Stored] = deque()
        self._busy = False
        self._more = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[StoreWriter]:
        """Store what `put` is given while the block runs, and for `LAST_S` after it."""
        writing = asyncio.create_task(self._write_all())
        try:
            yield self
        finally:
            try:
                async with asyncio.timeout(LAST_S):
                    await self._idle.wait()
            except TimeoutError:
                logger.warning("the server ends before everything was stored")
            finally:
                await stop_task(writing)

    @property
    def waiting(self) -> int:
        """Caches that wait or are being stored."""
        return len(self._waiting) + self._busy

    def put(self, cache: Stored) -> None:
        """Store a cache some time, or not at all. Returns at once."""
        if len(self._waiting) >= self._limit:
            self._metrics.put("dropped")
            logger.warning("not stored: %d caches wait for the store", len(self._waiting))
            return
        self._waiting.append(cache)
        self._idle.clear()
        self._more.set()

    async def _write_all(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            while self._waiting:
                cache, self._busy = self._waiting.popleft(), True
                token = request_id.set(cache.request_id)
                try:
                    self._metrics.put(await self._write(cache))
                finally:
                    request_id.reset(token)
                    self._busy = False
                del cache  # it is large, and the next one may not come for hours
            self._idle.set()

    async def _write(self, cache: Stored) -> str:
        link = self._store.link
        if link is None:
            logger.warning("not stored: there is no link to the store")
            return "down"
        try:
            meta = stored_as(self._model, cache.tokens[:-1])
            async with link.send(
                cache.request_id, cache.layout, fine=cache.fine, meta=meta, **self._coding
            ) as transfer:
                for layer, (keys, values) in enumerate(zip(cache.made.keys, cache.made.values, strict=True)):
                    await transfer.write(layer, keys[:-1], values[:-1])
        except LynxError as error:
            if is_already_stored(error):
                return "known"
            logger.warning("not stored: %s", str(error))  # not the error, which holds a cache
            return "failed"
        logger.info("stored", extra={"fields": {"tokens": cache.layout.tokens}})
        return "stored"
