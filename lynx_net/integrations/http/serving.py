"""What both servers share: their life from start to SIGTERM, keys, errors in the API's shape, health, access log."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hmac
import importlib
import json
import logging
import signal
import ssl
import sys
import time
from typing import TYPE_CHECKING, Any, Literal, Protocol

from aiohttp import web

from lynx_net.integrations.http.admission import Admission
from lynx_net.integrations.http.config import ConfigError, read_secrets
from lynx_net.integrations.http.errors import ApiError, bad_request, unavailable
from lynx_net.integrations.http.logs import request_id
from lynx_net.integrations.http.metrics import ServerMetrics
from lynx_net.integrations.http.notify import notify
from lynx_net.integrations.http.pages import PAGE_PATHS
from lynx_net.integrations.http.wire import PREFILL_PATH
from lynx_net.observe.prometheus import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from types import ModuleType

    from lynx_net.integrations.http.config import HttpConfig, LimitsConfig

__all__ = [
    "CLIENT_LEFT",
    "Service",
    "State",
    "drain",
    "import_late",
    "late_status",
    "read_json",
    "run_service",
    "serving",
]

logger = logging.getLogger("lynx_net.http")

State = Literal["starting", "ready", "draining"]

_OPEN_PATHS = ("/health", "/health/live", "/health/ready", *PAGE_PATHS)
"""Asked by load balancers, which have no key, and by browsers before they can ask for one."""

ENDPOINTS = {"/v1/completions": "completions", "/v1/chat/completions": "chat", PREFILL_PATH: "prefill"}
"""What metrics call the paths whose requests they count."""

late_status: contextvars.ContextVar[int | None] = contextvars.ContextVar("late_status", default=None)
"""Of a request whose answer went wrong after its status was sent: the status it would have had."""

CLIENT_LEFT = 499
"""The number that nginx logs for it."""

_LAST_WORDS_S = 5.0
"""Connections that are still open when all requests are answered."""


class Parts(Protocol):
    """The two applications, for `run_service`."""

    service: Service

    def application(self) -> web.Application:
        """The routes."""
        ...

    def started(self) -> AbstractAsyncContextManager[str]:
        """Load and open everything; gives a line for standard output. The server is ready inside the block."""
        ...

    def ended(self) -> None:
        """All requests are answered; end what watches."""
        ...


class Service:
    """The state of a server, and the handlers that do not depend on what it serves."""

    def __init__(self, http: HttpConfig, limits: LimitsConfig) -> None:
        self.http = http
        self.admission = Admission(limits.running, limits.queued)
        self.metrics = ServerMetrics(self.admission)
        self.state: State = "starting"
        self._keys = [key.encode() for key in read_secrets(http.api_key_file)]

    def application(self) -> web.Application:
        """An application with the middleware and the routes of health."""
        app = web.Application(middlewares=[self._middleware], client_max_size=self.http.max_body_bytes)
        app.router.add_get("/health", self.health)
        app.router.add_get("/health/live", self.live)
        app.router.add_get("/metrics", self._metrics)
        return app

    def check_ready(self) -> None:
        """Raises 503 before everything is loaded, and when the server is about to end."""
        if self.state == "starting":
            raise unavailable("the server is loading its model", "starting", 5)
        if self.state == "draining":
            raise unavailable("the server is shutting down", "shutting_down", 5)

    async def live(self, _request: web.Request) -> web.Response:
        """The process works."""
        return web.json_response({"status": "live"})

    async def health(self, _request: web.Request) -> web.Response:
        """What it does."""
        return web.json_response(
            {"status": self.state, "running": self.admission.running, "queued": self.admission.queued}
        )

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text().encode(), headers={"Content-Type": CONTENT_TYPE})

    @web.middleware
    async def _middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        began_s = time.monotonic()
        tokens = request_id.set(None), late_status.set(None)
        status = CLIENT_LEFT
        try:
            try:
                self._authorize(request)
                response = await handler(request)
            except ApiError as error:
                response = error_response(error)
            except web.HTTPException as error:
                if error.status < 400:
                    raise
                response = error_response(_from_http(request, error))
            except Exception:
                logger.exception("%s %s failed", request.method, request.path)
                failure = ApiError("the server failed; its log says why", status=500, kind="server_error")
                response = error_response(failure)
            status = response.status
            return response
        finally:
            status = late_status.get() or status
            if request.path in ENDPOINTS:
                self.metrics.answered(ENDPOINTS[request.path], status, time.monotonic() - began_s)
            level = logging.DEBUG if request.path.startswith(("/health", "/metrics")) else logging.INFO
            took_s = round(time.monotonic() - began_s, 4)
            fields = {"method": request.method, "path": request.path, "status": status, "took_s": took_s}
            logger.log(level, "request", extra={"fields": {**fields, "peer": request.remote}})
            request_id.reset(tokens[0])
            late_status.reset(tokens[1])

    def _authorize(self, request: web.Request) -> None:
        if not self._keys or request.path in _OPEN_PATHS:
            return
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if kind.lower() != "bearer" or not any(matches):
            raise bad_request("a key is needed: Authorization: Bearer KEY", code="invalid_api_key", status=401)


def error_response(error: ApiError) -> web.Response:
    """An error as an answer."""
    return web.json_response(error.to_json(), status=error.status, headers=error.headers())


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    sentence = {
        404: f"there is no {request.path} here",
        405: f"{request.path} does not take {request.method}",
        413: "the body is too large",
    }.get(error.status, error.reason)
    return bad_request(sentence, status=error.status)


async def read_json(request: web.Request) -> Any:
    """The body of a request.

    Raises:
        ApiError: 400, not JSON.
    """
    try:
        return json.loads(await request.read())
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from error


async def import_late(name: str) -> ModuleType:
    """Import a module that imports torch: in a thread, so that the server answers /health meanwhile."""
    return await asyncio.to_thread(importlib.import_module, name)


@contextlib.asynccontextmanager
async def serving(parts: Parts) -> AsyncIterator[str]:
    """Listen, and answer requests as far as the state of the service allows; the block gets the URL.

    Leaving it closes all connections, those of running requests too.

    Raises:
        ConfigError: the certificate cannot be used.
        OSError: the address is taken.
    """
    http = parts.service.http
    context = _server_context(http)
    runner = web.AppRunner(
        parts.application(), handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_WORDS_S
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, http.host, http.port, ssl_context=context).start()
        scheme = "http" if context is None else "https"
        host = f"[{http.host}]" if ":" in http.host else http.host
        yield f"{scheme}://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def drain(parts: Parts) -> None:
    """Take no more requests and wait, `http.grace_s` at most, until those that were accepted are answered."""
    service = parts.service
    service.state = "draining"
    service.admission.drain()
    logger.info("shutting down: %d requests run, %d wait", service.admission.running, service.admission.queued)
    try:
        async with asyncio.timeout(service.http.grace_s):
            await service.admission.idle()
    except TimeoutError:
        logger.error("requests have not finished in %g s and are given up", service.http.grace_s)
    parts.ended()


async def run_service(name: str, parts: Parts, when_loaded: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT; then finish what was accepted, for `http.grace_s` at most.

    A second signal ends it at once. The process answers /health from its first moment, and other requests once
    it is ready, when `when_loaded` has been called.

    Raises:
        LynxError: it cannot be started.
        OSError: the address is taken.
        CancelledError: there was a second signal.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    whole = asyncio.current_task()
    assert whole is not None

    def on_signal() -> None:
        if stop.is_set():
            whole.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        async with serving(parts) as url:
            say(f"{name} listens on {url}")
            async with parts.started() as line:
                if not stop.is_set():
                    when_loaded()
                    parts.service.state = "ready"
                    say(line)
                    say(f"{name} is ready")
                    notify("READY=1")
                await stop.wait()
                notify("STOPPING=1")
                await drain(parts)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def say(line: str) -> None:
    """For whoever started the server."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _server_context(http: HttpConfig) -> ssl.SSLContext | None:
    if http.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(http.certificate, http.private_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"http.certificate: {http.certificate} cannot be used: {error}") from error
    return context
