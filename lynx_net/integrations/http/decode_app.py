"""The decode server: OpenAI's completions and chat completions, streamed and whole."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING

from aiohttp import web

from lynx_net.integrations.http.answers import model_entry
from lynx_net.integrations.http.bus import EventBus
from lynx_net.integrations.http.errors import ApiError, bad_request
from lynx_net.integrations.http.exchange import Exchange
from lynx_net.integrations.http.generation import generation
from lynx_net.integrations.http.jobs import Job
from lynx_net.integrations.http.logs import request_id
from lynx_net.integrations.http.serving import Service, import_late, read_json
from lynx_net.integrations.http.shapes import CompletionRequest, parse_chat, parse_completion
from lynx_net.integrations.http.watching import Watching

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import Any

    from lynx_net.integrations.http.config import DecodeConfig
    from lynx_net.integrations.http.engine import DecodeEngine
    from lynx_net.integrations.http.models import ServedModel

__all__ = ["DecodeServer"]

SHOWN_PROMPT_CHARS = 2000


class DecodeServer:
    """The application. `service.run_service` runs it."""

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config
        self.service = Service(config.http, config.limits)
        watch = config.watch
        self.bus = EventBus(keep_requests=watch.requests, keep_events=watch.events, queue_events=watch.queue_events)
        self._engine: DecodeEngine | None = None

    def application(self) -> web.Application:
        """The routes."""
        app = self.service.application()
        router = app.router
        router.add_get("/health/ready", self._ready)
        router.add_get("/v1/models", self._models)
        router.add_get("/v1/models/{model:.+}", self._model)
        router.add_post("/v1/completions", self._completions)
        router.add_post("/v1/chat/completions", self._chat)
        if self.config.watch.enabled:
            Watching(self.bus).add_routes(router)
        return app

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[str]:
        """Load the model and listen for caches."""
        engine = await import_late("lynx_net.integrations.http.engine")
        async with engine.DecodeEngine.open(self.config, self.service.metrics) as opened:
            self._engine = opened
            yield f"serves {opened.model.name}; takes caches on {opened.deliver_to}"

    def ended(self) -> None:
        """End the watchers' streams."""
        self.bus.end()

    def _ready_engine(self) -> DecodeEngine:
        self.service.check_ready()
        assert self._engine is not None
        return self._engine

    async def _ready(self, _request: web.Request) -> web.Response:
        engine = self._ready_engine()
        if not await engine.prefill_is_ready():
            return web.json_response({"status": "the prefill server is not ready"}, status=503)
        return web.json_response({"status": "ready"})

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [model_entry(self._ready_engine().model)]})

    async def _model(self, request: web.Request) -> web.Response:
        engine = self._ready_engine()
        _check_model(request.match_info["model"], engine.model)
        return web.json_response(model_entry(engine.model))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, parse_completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, parse_chat)

    async def _complete(self, request: web.Request, parse: Callable[[Any], CompletionRequest]) -> web.StreamResponse:
        engine = self._ready_engine()
        wanted = parse(await read_json(request))
        _check_model(wanted.model, engine.model)
        prompt = await asyncio.to_thread(_encode, engine.model, wanted)
        job = Job(
            id=f"{'chatcmpl' if wanted.chat else 'cmpl'}-{uuid.uuid4().hex}",
            prompt=prompt,
            max_new_tokens=self._room(wanted, len(prompt), engine.model),
            temperature=wanted.temperature,
            seed=wanted.seed,
            max_drafts=0 if wanted.repeatable else self.config.limits.drafts,
            from_store=not wanted.repeatable,
        )
        request_id.set(job.id)
        log = self.bus.open(job.id, engine.model.name)
        log.publish(
            "request",
            log.started_s,
            endpoint=request.path,
            model=engine.model.name,
            prompt=engine.model.decode(prompt)[-SHOWN_PROMPT_CHARS:],
            prompt_tokens=len(prompt),
            max_tokens=job.max_new_tokens,
            temperature=job.temperature,
            stream=wanted.stream,
            drafts=wanted.drafts,
        )
        try:
            exchange = Exchange(request, wanted, job, log, engine.model, self.config.http.stall_s)
            async with self.service.admission.place(lambda position: log.publish("queued", position=position)):
                queue_s = self.bus.clock() - log.started_s
                log.publish("started", queue_s=round(queue_s, 6))
                self.service.metrics.waited(queue_s)
                async with aclosing(generation(engine, job, wanted.stop, log)) as pieces:
                    response, finished = await (exchange.stream(pieces) if wanted.stream else exchange.whole(pieces))
            if finished is not None:
                self.service.metrics.finished(len(prompt), finished)
            return response
        except ApiError as error:
            log.publish("error", message=str(error), code=error.code, status=error.status)
            raise
        except Exception as error:
            if not log.ended:
                log.publish("error", message=f"the server failed: {type(error).__name__}", code=None, status=500)
            raise
        finally:
            if not log.ended:
                log.publish("cancelled")

    def _room(self, wanted: CompletionRequest, prompt_tokens: int, model: ServedModel) -> int:
        """Tokens of the answer at most."""
        room = model.context_tokens - prompt_tokens
        asked = wanted.max_tokens
        if room < 1 or (asked is not None and asked > room):
            raise bad_request(
                f"the model takes {model.context_tokens} tokens; the prompt has {prompt_tokens}, "
                f"the answer {'one or more' if asked is None else f'up to {asked}'}",
                "messages" if wanted.chat else "prompt",
                "context_length_exceeded",
            )
        limit = self.config.limits.new_tokens
        if asked is not None and asked > limit:
            raise bad_request(f"an answer has {limit} tokens at most here, not {asked}", "max_tokens")
        return min(room, limit if asked is None else asked)


def _check_model(name: str, model: ServedModel) -> None:
    if name != model.name:
        raise bad_request(f"there is no model {name!r} here, only {model.name!r}", "model", "model_not_found", 404)


def _encode(model: ServedModel, wanted: CompletionRequest) -> tuple[int, ...]:
    """The prompt's tokens. Blocks."""
    if wanted.chat:
        tokens = model.encode_chat(wanted.messages)
    else:
        assert wanted.prompt is not None
        tokens = model.encode(wanted.prompt) if isinstance(wanted.prompt, str) else list(wanted.prompt)
    if not tokens:
        raise bad_request("the prompt is empty", "prompt")
    if max(tokens) >= model.vocab_size:
        raise bad_request(f"token {max(tokens)} is outside the model's vocabulary", "prompt")
    return tuple(tokens)
