"""The prefill server: one route that computes a cache and sends it to where it is wanted."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from aiohttp import web

from lynx_net.errors import CodecError, LynxError, TransferAbortedError
from lynx_net.integrations.http.errors import upstream_failed
from lynx_net.integrations.http.logs import request_id
from lynx_net.integrations.http.serving import Service, import_late, read_json
from lynx_net.integrations.http.wire import PREFILL_PATH, CacheWanted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lynx_net.integrations.http.config import PrefillConfig
    from lynx_net.integrations.http.prefill_engine import PrefillEngine

__all__ = ["PrefillServer"]

logger = logging.getLogger("lynx_net.http")


class PrefillServer:
    """The application. `serving.run_service` runs it."""

    def __init__(self, config: PrefillConfig) -> None:
        self.config = config
        self.service = Service(config.http, config.limits)
        self._engine: PrefillEngine | None = None

    def application(self) -> web.Application:
        """The routes."""
        app = self.service.application()
        app.router.add_get("/health/ready", self._ready)
        app.router.add_post(PREFILL_PATH, self._prefill)
        return app

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[str]:
        """Load the model."""
        engine = await import_late("lynx_net.integrations.http.prefill_engine")
        async with engine.PrefillEngine.open(self.config, self.service.metrics) as opened:
            self._engine = opened
            yield f"computes caches of {opened.model.name} for {' '.join(self.config.link.targets)}"

    def ended(self) -> None:
        """Nobody watches this server."""

    async def _ready(self, _request: web.Request) -> web.Response:
        self.service.check_ready()
        return web.json_response({"status": "ready"})

    async def _prefill(self, request: web.Request) -> web.Response:
        self.service.check_ready()
        assert self._engine is not None
        wanted = CacheWanted.from_json(await read_json(request))
        request_id.set(wanted.request_id)
        self._engine.check(wanted)
        asked_s = time.monotonic()
        async with self.service.admission.place():
            self.service.metrics.waited(time.monotonic() - asked_s)
            try:
                delivered = await self._engine.deliver(wanted, asked_s)
            except TransferAbortedError as error:
                raise upstream_failed(f"the cache was not taken: {error}") from error
            except CodecError as error:
                raise upstream_failed(f"the cache cannot be encoded: {error}") from error
            except LynxError as error:
                raise upstream_failed(f"the cache could not be delivered to {wanted.deliver_to}: {error}") from error
        self.service.metrics.prefilled(len(wanted.tokens), delivered.prefill_s)
        logger.info("delivered", extra={"fields": {"tokens": len(wanted.tokens), **delivered.to_json()}})
        return web.json_response(delivered.to_json())
