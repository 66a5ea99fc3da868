"""The prefill server: computes the cache of a prompt, and sends it to where it is wanted."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import json
import logging
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

import lynx_net
from lynx_codec import get_codec
from lynx_codec.plan import DEFAULT_PLAN
from lynx_net.aio.offload import run_blocking
from lynx_net.errors import CodecError, LynxError, TransferAbortedError
from lynx_net.integrations.http.config import ConfigError, read_key, tls_of
from lynx_net.integrations.http.errors import bad_request, upstream_failed
from lynx_net.integrations.http.links import LinkPool
from lynx_net.integrations.http.logs import request_id
from lynx_net.integrations.http.models import load_model
from lynx_net.integrations.http.serving import Service, read_json
from lynx_net.integrations.http.steps import StepThread
from lynx_net.integrations.http.wire import PREFILL_PATH, PREFILL_QUEUE_S, PREFILL_S, CacheWanted, Delivered
from lynx_net.integrations.scores import SCORE_QUERIES
from lynx_net.integrations.transformers import prefill

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lynx_net.integrations.http.config import PrefillConfig
    from lynx_net.integrations.http.models import ServedModel
    from lynx_net.integrations.transformers import Prefilled

__all__ = ["PrefillServer"]

logger = logging.getLogger("lynx_net.http")


class PrefillServer:
    """The application. `service.run_service` runs it."""

    def __init__(self, config: PrefillConfig) -> None:
        self.config = config
        self.service = Service(config.http, config.limits)
        self._coding = _coding(config)
        self._model: ServedModel | None = None
        self._steps: StepThread | None = None
        self._links: LinkPool | None = None

    def application(self) -> web.Application:
        """The routes."""
        app = self.service.application()
        app.router.add_get("/health/ready", self._ready)
        app.router.add_post(PREFILL_PATH, self._prefill)
        return app

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[str]:
        """Load the model."""
        link = self.config.link
        self._model = await asyncio.to_thread(load_model, self.config.model, self.config.limits.context_tokens)
        self._steps = StepThread()
        try:
            await asyncio.wrap_future(self._steps.lane().submit(self._warm_up))
            self._links = LinkPool(
                rate=link.rate,
                lanes=link.lanes,
                config=lynx_net.LinkConfig(deadline_s=link.deadline_s),
                tls=tls_of(link),
                key=read_key(link.key_file),
            )
            try:
                yield f"computes caches of {self._model.name} for {' '.join(link.targets)}"
            finally:
                await self._links.close()
        finally:
            await asyncio.to_thread(self._steps.close)

    def ended(self) -> None:
        """Nobody watches this server."""

    def _warm_up(self) -> None:
        assert self._model is not None
        if "codec" in self._coding and isinstance(self._coding["codec"], str) and self._coding["codec"] != "auto":
            get_codec(self._coding["codec"]).warm_up()
        get_codec("nested").warm_up()
        prefill(self._model.model, [0, 0, 0, 0], score_queries=SCORE_QUERIES)

    async def _ready(self, _request: web.Request) -> web.Response:
        self.service.check_ready()
        return web.json_response({"status": "ready"})

    async def _prefill(self, request: web.Request) -> web.Response:
        self.service.check_ready()
        wanted = CacheWanted.from_json(await read_json(request))
        request_id.set(wanted.request_id)
        self._check(wanted)
        asked_s = time.monotonic()
        async with self.service.admission.place():
            try:
                delivered = await self._deliver(wanted, asked_s)
            except TransferAbortedError as error:
                raise upstream_failed(f"the cache was not taken: {error}") from error
            except CodecError as error:
                raise upstream_failed(f"the cache cannot be encoded: {error}") from error
            except LynxError as error:
                raise upstream_failed(f"the cache could not be delivered to {wanted.deliver_to}: {error}") from error
        logger.info("delivered", extra={"fields": {"tokens": len(wanted.tokens), **delivered.to_json()}})
        return web.json_response(delivered.to_json())

    def _check(self, wanted: CacheWanted) -> None:
        assert self._model is not None
        if wanted.model != self._model.fingerprint:
            raise bad_request(f"this server has another model, {self._model.name}", "model", "other_model", 409)
        if len(wanted.tokens) > self._model.context_tokens:
            raise bad_request(f"{len(wanted.tokens)} tokens; at most {self._model.context_tokens}", "tokens")
        if max(wanted.tokens) >= self._model.vocab_size:
            raise bad_request(f"token {max(wanted.tokens)} is outside the model's vocabulary", "tokens")
        if not any(fnmatch.fnmatchcase(wanted.deliver_to, pattern) for pattern in self.config.link.targets):
            raise bad_request(f"caches are not sent to {wanted.deliver_to}", "deliver_to", "not_a_target", 403)

    async def _deliver(self, wanted: CacheWanted, asked_s: float) -> Delivered:
        """Compute and send; gives the request up wherever it is cancelled."""
        assert self._model is not None
        assert self._steps is not None
        assert self._links is not None
        link = await self._links.link(wanted.deliver_to)  # before the pass: it is cheap, and may say no
        began_s = time.monotonic()
        lane = self._steps.lane()

        def compute() -> Prefilled:
            nonlocal began_s
            assert self._model is not None
            began_s = time.monotonic()
            return prefill(self._model.model, wanted.tokens, score_queries=self._score_queries)

        try:
            made = await run_blocking(lane, compute)
        finally:
            lane.drop()
        computed_s = time.monotonic()
        layout = self._model.layout(len(wanted.tokens) - 1)
        coding = dict(self._coding)
        if made.scores is not None:
            coding["fine"] = lynx_net.fine_tokens(layout, made.scores[:, :-1])
        meta = {PREFILL_QUEUE_S: began_s - asked_s, PREFILL_S: computed_s - began_s}
        async with link.send(wanted.request_id, layout, meta=meta, **coding) as transfer:
            for layer, (keys, values) in enumerate(zip(made.keys, made.values, strict=True)):
                await transfer.write(layer, keys[:-1], values[:-1])
        sent_s = time.monotonic() - computed_s
        return Delivered(
            transfer.offer.codec, transfer.stats.total_bytes, began_s - asked_s, computed_s - began_s, sent_s
        )

    @property
    def _score_queries(self) -> int:
        """Codecs with fine tokens want to know which."""
        return SCORE_QUERIES


def _coding(config: PrefillConfig) -> dict[str, Any]:
    """How caches are coded, as arguments of `link.send`."""
    link = config.link
    if link.codec == "default":
        return {"codec": DEFAULT_PLAN}
    if link.codec == "auto":
        return {"codec": "auto"}
    params: Any = {}
    if link.codec_params is not None:
        try:
            params = json.loads(link.codec_params)
        except ValueError as error:
            raise ConfigError(f"link.codec_params is not JSON: {error}") from error
        if not isinstance(params, dict):
            raise ConfigError("link.codec_params must be a JSON object")
    try:
        get_codec(link.codec, **params)
    except (CodecError, TypeError) as error:
        raise ConfigError(f"link.codec: {error}") from error
    return {"codec": link.codec, "codec_params": params}
