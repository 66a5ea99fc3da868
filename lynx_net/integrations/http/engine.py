"""One request at the decode server: ask for its cache, decode while that arrives, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import aiohttp

import lynx_net
from lynx_codec import get_codec
from lynx_net.aio.offload import run_or_withdraw
from lynx_net.errors import LynxError
from lynx_net.integrations.http.config import read_key, read_secrets, tls_of
from lynx_net.integrations.http.errors import ApiError, unavailable, upstream_failed
from lynx_net.integrations.http.follow import Follower
from lynx_net.integrations.http.models import ServedModel, load_model
from lynx_net.integrations.http.outgoing import client_session
from lynx_net.integrations.http.steps import StepThread
from lynx_net.integrations.http.store_link import StoreLink
from lynx_net.integrations.http.stored import NotFromStore, StoredPrefixes, check_shape, final_stream
from lynx_net.integrations.http.tasks import stop_task
from lynx_net.integrations.http.wire import PREFILL_PATH, CacheWanted
from lynx_net.integrations.transformers import ProgressiveCache, TransformersModel
from lynx_net.speculation import decode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from lynx_net.integrations.http.bus import RequestLog
    from lynx_net.integrations.http.config import DecodeConfig
    from lynx_net.integrations.http.jobs import Job
    from lynx_net.integrations.http.metrics import ServerMetrics
    from lynx_net.speculation import Event

__all__ = ["DecodeEngine"]

logger = logging.getLogger("lynx_net.http")

OFFER_LATE_S = 5.0
"""The answer that a cache was delivered may come before the loop has seen its offer, but not by more than this."""


DRAFTED_REST_TOKENS = 32
"""So many tokens behind a stored prefix are computed with the first draft, and again with its verification; of more it
pays to wait for the residuals and compute them once."""

FED_TOKENS = 64
"""Of a long rest, computed in one pass: the others that share the model wait no longer than for a verification."""


class _Expected:
    """A cache that was asked for, and the transfer it comes with."""

    def __init__(self, cache: ProgressiveCache, layout: lynx_net.CacheLayout) -> None:
        self.cache = cache
        self.layout = layout
        self.transfer: asyncio.Future[lynx_net.IncomingTransfer] = asyncio.get_running_loop().create_future()


class DecodeEngine:
    """The model, its thread, the links on which caches come, and the prefill server they are asked of.

    Use `DecodeEngine.open`.
    """

    def __init__(
        self, config: DecodeConfig, model: ServedModel, session: aiohttp.ClientSession, steps: StepThread
    ) -> None:
        self.model = model
        self.steps = steps
        self.clock = time.monotonic
        self.caches: weakref.WeakSet[object] = weakref.WeakSet()
        """Those that are in memory, for metrics."""
        self._config = config
        self._session = session
        self._prefill_url = config.prefill.url.rstrip("/")
        self._expected: dict[str, _Expected] = {}
        self._deliver_to = ""
        self._prefixes: StoredPrefixes | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, config: DecodeConfig, metrics: ServerMetrics) -> AsyncIterator[DecodeEngine]:
        """Load the model, listen for caches, and be ready to decode.

        Raises:
            BackendMissingError: see `load_model`.
            ConnectionFailedError: the address for caches cannot be bound.
            ConfigError: a key or a certificate cannot be read.
        """
        cache = config.cache
        keys = read_secrets(config.prefill.api_key_file)
        model = await asyncio.to_thread(load_model, config.model, config.limits.context_tokens)
        steps = StepThread()
        try:
            async with contextlib.AsyncExitStack() as stack:
                session = await stack.enter_async_context(client_session(config.prefill.ca_file, keys[:1]))
                engine = cls(config, model, session, steps)
                metrics.steps, metrics.caches = steps, engine.caches
                await asyncio.wrap_future(steps.lane().submit(engine.warm_up))
                server = await stack.enter_async_context(
                    lynx_net.serve(
                        cache.url,
                        allocate=engine.allocate,
                        config=lynx_net.LinkConfig(deadline_s=cache.deadline_s),
                        tls=tls_of(cache),
                        key=read_key(cache.key_file),
                        observers=[metrics.links],
                    )
                )
                engine._deliver_to = cache.advertise or server.url
                taking = asyncio.create_task(engine._take(server))
                stack.push_async_callback(stop_task, taking)
                if config.store.url is not None:
                    prefixes = engine._prefixes = StoredPrefixes(config.store, model.fingerprint, metrics)
                    link = StoreLink(config.store, allocate=prefixes.allocate, observer=metrics.links)
                    metrics.store = prefixes.store = await stack.enter_async_context(link.open())
                yield engine
        finally:
            await asyncio.to_thread(steps.close)

    @property
    def deliver_to(self) -> str:
        """Where caches are to be sent."""
        return self._deliver_to

    def warm_up(self) -> None:
        """Once through what is compiled or read at its first use. Blocks."""
        get_codec("nested").warm_up()
        cache = ProgressiveCache(self.model.layout(8), room=4, dtype=self.model.dtype)
        model = TransformersModel(self.model.model, cache)
        model.forward([0, 0, 0])
        model.forward([0])

    async def prefill_is_ready(self) -> bool:
        """Whether the prefill server says that it is."""
        try:
            async with self._session.get(
                f"{self._prefill_url}/health/ready", timeout=aiohttp.ClientTimeout(total=1.0)
            ) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def generate(self, job: Job, log: RequestLog) -> AsyncGenerator[Event, None]:
        """Decode one request; yields what `speculation.decode` yields, and publishes it.

        Cancelling it, or closing the generator, gives the request up on both servers and returns when nothing of it
        is left here.

        Raises:
            ApiError: the cache could not be had.
        """
        layout = self.model.layout(len(job.prompt) - 1)
        cache = await self._room(job, layout)
        if self._prefixes is not None and job.from_store and layout.tokens:
            try:
                async with (
                    self._prefixes.prefix(job, cache, layout, log) as transfer,
                    aclosing(self._decoded(job, cache, transfer, log)) as events,
                ):
                    async for event in events:
                        yield event
                return
            except NotFromStore as missed:
                if missed.outcome in ("slow", "failed"):
                    cache = await self._room(job, layout)  # something may yet be written to the other one
        try:
            async with (
                self._arriving(job, cache, layout) as transfer,
                aclosing(self._decoded(job, cache, transfer, log)) as events,
            ):
                async for event in events:
                    yield event
        except ApiError:
            raise
        except LynxError as error:
            raise upstream_failed(f"the cache did not arrive: {error}") from error

    async def _room(self, job: Job, layout: lynx_net.CacheLayout) -> ProgressiveCache:
        """Memory for the cache of a prompt and its answer."""
        cache = await asyncio.to_thread(ProgressiveCache, layout, room=job.max_new_tokens + 1, dtype=self.model.dtype)
        self.caches.add(cache)
        return cache

    async def _decoded(
        self, job: Job, cache: ProgressiveCache, transfer: lynx_net.IncomingTransfer, log: RequestLog
    ) -> AsyncGenerator[Event, None]:
        """Decode from an arriving cache, of all tokens of the prompt but the last, or of fewer."""
        model, lane = TransformersModel(self.model.model, cache), self.steps.lane()
        rest = job.prompt[transfer.offer.layout.tokens :]
        async with Follower.of(transfer, log, self.model.decode, job.prompt) as follower:
            if len(rest) > DRAFTED_REST_TOKENS:
                await final_stream(transfer)
                for first in range(0, len(rest) - 1, FED_TOKENS):
                    await run_or_withdraw(lane, model.feed, rest[first : min(first + FED_TOKENS, len(rest) - 1)])
                log.publish("rest", tokens=len(rest) - 1)
                rest = rest[-1:]
            events = decode(
                model,
                transfer,
                prompt_tail=rest,
                max_new_tokens=job.max_new_tokens,
                temperature=job.temperature,
                seed=job.seed,
                stop_tokens=self.model.stop_tokens,
                max_drafts=job.max_drafts,
                executor=lane,
            )
            async with aclosing(events):
                async for event in events:
                    follower.tell(event)
                    yield event

    @contextlib.asynccontextmanager
    async def _arriving(
        self, job: Job, cache: ProgressiveCache, layout: lynx_net.CacheLayout
    ) -> AsyncIterator[lynx_net.IncomingTransfer]:
        """Ask for the cache; the block runs from its offer on. After it neither server has anything of it."""
        expected = self._expected[job.id] = _Expected(cache, layout)
        asking = asyncio.create_task(self._ask(job))
        try:
            transfer = await self._offered(expected, asking)
            try:
                yield transfer
            finally:
                transfer.cancel("the decode server does not need it any more")  # nothing happens if it is complete
                await transfer.closed()
        finally:
            self._expected.pop(job.id, None)
            expected.transfer.cancel()
            await stop_task(asking, expected=ApiError)

    async def _offered(self, expected: _Expected, asking: asyncio.Task[None]) -> lynx_net.IncomingTransfer:
        waiting: set[asyncio.Future[Any]] = {asking, expected.transfer}
        timeout_s = self._config.prefill.timeout_s
        done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise upstream_failed(f"the prefill server has not offered the cache in {timeout_s:g} s")
        if expected.transfer not in done:
            asking.result()  # raises if it was refused
            await asyncio.wait({expected.transfer}, timeout=OFFER_LATE_S)
            if not expected.transfer.done():
                raise upstream_failed("the prefill server says that it has sent the cache, but it has not come")
        return expected.transfer.result()

    async def _ask(self, job: Job) -> None:
        """Returns when the prefill server has delivered the cache."""
        wanted = CacheWanted(job.id, self.model.fingerprint, job.prompt, self._deliver_to)
        try:
            async with self._session.post(self._prefill_url + PREFILL_PATH, json=wanted.to_json()) as answer:
                if answer.status == 200:
                    await answer.read()
                    return
                message = await _message_of(answer)
                retry = answer.headers.get("Retry-After", "")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise unavailable(f"the prefill server cannot be reached: {error}", "no_prefill_server") from error
        if answer.status in (429, 503):
            raise unavailable(f"prefill server: {message}", "prefill_busy", int(retry) if retry.isdigit() else 1)
        raise upstream_failed(f"prefill server: {message}")

    def allocate(self, offer: lynx_net.Offer) -> lynx_net.KVTarget:
        """Gives each offered cache the memory that waits for it."""
        expected = self._expected.get(offer.request_id)
        if expected is None:
            raise LynxError(f"nobody waits for a cache of request {offer.request_id!r}")
        check_shape(offer.layout, expected.layout)
        if offer.layout.tokens != expected.layout.tokens:
            raise LynxError(f"the cache has {offer.layout.tokens} tokens, not {expected.layout.tokens}")
        return expected.cache

    async def _take(self, server: lynx_net.KVServer) -> None:
        """Give each transfer to the request that waits for it."""
        async for transfer in server:
            self._give(transfer)
            del transfer  # it holds a cache, and the next one may not come for hours

    def _give(self, transfer: lynx_net.IncomingTransfer) -> None:
        expected = self._expected.pop(transfer.offer.request_id, None)
        if expected is None or expected.transfer.done():
            transfer.cancel("nobody waits for it any more")
        else:
            expected.transfer.set_result(transfer)


async def _message_of(answer: aiohttp.ClientResponse) -> str:
    """What an error answer says, in whatever shape."""
    text = await answer.text()
    try:
        body: Any = await answer.json(content_type=None)
    except ValueError:
        body = None
    match body:
        case {"error": {"message": str(message)}}:
            return message
    return f"status {answer.status}: {text[:200]}"
