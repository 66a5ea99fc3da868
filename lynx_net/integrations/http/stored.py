"""Prefixes from the context store at the decode server: asked for first, never waited for longer than configured.

What becomes of a lookup, as metrics count it and the log says it:

    hit      the cache came from the store
    miss     the store has no prefix that is long enough
    down     there is no link to it, or it was slow or failed a moment ago
    slow     no answer in `store.answer_s`, or not everything in `store.arrive_s`
    failed   it refused for another reason, or its transfer failed in mid-way

After all but the first the prefill server is asked, as if there were no store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from lynx_net.aio.timeline import has_exact
from lynx_net.errors import LynxError, RequestRefusedError
from lynx_net.store import is_not_stored, wanted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import lynx_net
    from lynx_net.aio.readiness import Readiness
    from lynx_net.integrations.http.bus import RequestLog
    from lynx_net.integrations.http.config import ReadStoreConfig
    from lynx_net.integrations.http.jobs import Job
    from lynx_net.integrations.http.metrics import ServerMetrics
    from lynx_net.integrations.http.store_link import StoreLink
    from lynx_net.integrations.transformers import ProgressiveCache
    from lynx_net.wire.layout import CacheLayout

__all__ = ["NotFromStore", "StoredPrefixes", "check_shape", "final_stream", "least_tokens"]

logger = logging.getLogger("lynx_net.http")

AVOID_S = 5.0
"""A store that was slow or failed is not asked for so long: each request that asks it waits for nothing."""


class NotFromStore(LynxError):
    """A request has to go on without the store.

    Attributes:
        outcome: see above.
    """

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class _Expected:
    """A prefix that was asked for."""

    def __init__(self, cache: ProgressiveCache, layout: CacheLayout, least: int) -> None:
        self.cache = cache
        self.layout = layout
        self.least = least


class StoredPrefixes:
    """Asks the store. For one event loop; the link that it gets must have `allocate` of it."""

    def __init__(self, config: ReadStoreConfig, model: str, metrics: ServerMetrics) -> None:
        self._config = config
        self._model = model
        self._metrics = metrics
        self._expected: dict[str, _Expected] = {}
        self._avoid_until_s = 0.0
        self.store: StoreLink | None = None
        """Once it is open."""

    def allocate(self, offer: lynx_net.Offer) -> lynx_net.KVTarget:
        """The memory of a prefix that was asked for."""
        expected = self._expected.get(offer.request_id)
        if expected is None:
            raise LynxError(f"nobody waits for a prefix of request {offer.request_id!r}")
        check_shape(offer.layout, expected.layout)
        if not expected.least <= offer.layout.tokens <= expected.layout.tokens:
            raise LynxError(f"a prefix of {offer.layout.tokens} tokens was not asked for")
        expected.cache.set_prompt(offer.layout.tokens)
        return expected.cache

    @contextlib.asynccontextmanager
    async def prefix(
        self, job: Job, cache: ProgressiveCache, layout: CacheLayout, log: RequestLog
    ) -> AsyncIterator[lynx_net.IncomingTransfer]:
        """The longest stored prefix of a prompt; the block runs from its offer on.

        The block must let errors of the transfer through. After it nothing writes to the cache.

        Args:
            layout: of the cache of all tokens but the last.

        Raises:
            NotFromStore: at the latest after `store.arrive_s`, and before the transfer's `final_stream` is ready.
        """
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        outcome, stored = "hit", 0
        try:
            transfer = await self._ask(job, cache, layout, asked_s)
            stored = transfer.offer.layout.tokens
            writing = bool(transfer.offer.meta.get("store", {}).get("writing"))
            log.publish("store", outcome="hit", tokens=stored, rest=len(job.prompt) - stored, writing=writing)
            late = loop.call_at(asked_s + self._config.arrive_s, _give_up, transfer)
            try:
                yield transfer
            except LynxError as error:
                if final_stream(transfer).at_s is not None:
                    raise  # not the store's fault
                slow = loop.time() >= asked_s + self._config.arrive_s
                raise self._failed("slow" if slow else "failed", f"its transfer failed: {error}") from error
            finally:
                late.cancel()
                transfer.cancel("the decode server does not need it any more")  # nothing happens if it is complete
                await transfer.closed()
        except NotFromStore as missed:
            outcome, stored = missed.outcome, 0
            log.publish("store", outcome=outcome, reason=str(missed))
            level = logging.DEBUG if outcome == "miss" else logging.WARNING
            logger.log(level, "without the store (%s): %s", outcome, str(missed))  # not the error, which holds a cache
            raise
        finally:
            self._metrics.looked_up(outcome, stored)

    async def _ask(
        self, job: Job, cache: ProgressiveCache, layout: CacheLayout, asked_s: float
    ) -> lynx_net.IncomingTransfer:
        assert self.store is not None
        link = self.store.link
        if link is None:
            raise NotFromStore("down", "there is no link to it")
        if asked_s < self._avoid_until_s:
            raise NotFromStore("down", "it was slow or failed a moment ago")
        least = least_tokens(len(job.prompt), self._config.rest_tokens)
        self._expected[job.id] = _Expected(cache, layout, least)
        try:
            async with asyncio.timeout(self._config.answer_s):
                return await link.request(job.id, wanted(self._model, job.prompt[:-1], least_tokens=least))
        except TimeoutError as error:
            raise self._failed("slow", f"no answer in {self._config.answer_s:g} s") from error
        except RequestRefusedError as error:
            if is_not_stored(error):
                raise NotFromStore("miss", str(error)) from error
            raise self._failed("failed", str(error)) from error
        except LynxError as error:
            raise self._failed("failed", str(error)) from error
        finally:
            del self._expected[job.id]
            self._metrics.store_answered(asyncio.get_running_loop().time() - asked_s)

    def _failed(self, outcome: str, reason: str) -> NotFromStore:
        self._avoid_until_s = asyncio.get_running_loop().time() + AVOID_S
        return NotFromStore(outcome, reason)


def _give_up(transfer: lynx_net.IncomingTransfer) -> None:
    if final_stream(transfer).at_s is None:
        transfer.cancel("it came too slowly")


def least_tokens(prompt_tokens: int, rest_tokens: int) -> int:
    """A shorter prefix is not worth it: half of the prompt, and all but `rest_tokens` of it."""
    return max(prompt_tokens - rest_tokens, prompt_tokens // 2, 1)


def final_stream(transfer: lynx_net.IncomingTransfer) -> Readiness:
    """What the tokens of an answer become final on."""
    return transfer.exact_ready if has_exact(transfer.stream_names) else transfer.residual_ready


def check_shape(theirs: CacheLayout, ours: CacheLayout) -> None:
    """Refuse a cache of another model; raises LynxError."""
    for name in ("layers", "heads", "key_size", "value_size"):
        if getattr(theirs, name) != getattr(ours, name):
            raise LynxError(f"{name}: the cache has {getattr(theirs, name)}, the model here {getattr(ours, name)}")
