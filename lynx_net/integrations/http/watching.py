"""For those who look on: the page at /, /events, /events/ID and /debug/trace/ID of the decode server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from lynx_net.integrations.http.answers import sse
from lynx_net.integrations.http.errors import bad_request
from lynx_net.integrations.http.pages import add_page
from lynx_net.integrations.http.trace import request_trace

if TYPE_CHECKING:
    from lynx_net.integrations.http.bus import EventBus, RequestLog

__all__ = ["Watching"]

PING_S = 15.0
"""Silence after which a comment is sent, so that what lies between keeps the connection."""

STALL_S = 30.0
"""A watcher that takes nothing for so long is given up."""


class Watching:
    """The handlers."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Serve them."""
        add_page(router)
        router.add_get("/events", self.events)
        router.add_get("/events/{request}", self.events)
        router.add_get("/debug/trace/{request}", self.trace)

    async def trace(self, request: web.Request) -> web.Response:
        """A recent request as a Chrome trace."""
        return web.json_response(request_trace(self._find(request), self._bus.clock()))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The bus as server-sent events: the `event` is the type, the data the whole event."""
        one = self._find(request).id if "request" in request.match_info else None
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers={**headers, "X-Accel-Buffering": "no"})
        with self._bus.subscribe(one) as events:
            try:
                await response.prepare(request)
                while True:
                    try:
                        async with asyncio.timeout(PING_S):
                            event = await anext(events)
                        data = sse(event, event["type"])
                    except TimeoutError:
                        data = b": still here\n\n"
                    except StopAsyncIteration:
                        break
                    async with asyncio.timeout(STALL_S):
                        await response.write(data)
            except (ConnectionError, TimeoutError):  # it has left, or takes nothing
                if request.transport is not None:
                    request.transport.abort()
        return response

    def _find(self, request: web.Request) -> RequestLog:
        name = request.match_info["request"]
        log = self._bus.find(name)
        if log is None:
            raise bad_request(f"no request {name!r}, or it ended too long ago", code="unknown_request", status=404)
        return log
