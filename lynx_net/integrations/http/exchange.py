"""The way one answer goes back to its client: whole, or piece by piece."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from lynx_net.integrations.http.answers import DONE, Answer, Usage, sse
from lynx_net.integrations.http.errors import ApiError
from lynx_net.integrations.http.generation import Committed, Drafted, Finished, Retracted
from lynx_net.integrations.http.serving import CLIENT_LEFT, late_status

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from typing import Any

    from lynx_net.integrations.http.bus import RequestLog
    from lynx_net.integrations.http.generation import Piece
    from lynx_net.integrations.http.jobs import Job
    from lynx_net.integrations.http.models import ServedModel
    from lynx_net.integrations.http.shapes import CompletionRequest

__all__ = ["Exchange"]

logger = logging.getLogger("lynx_net.http")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and the way its answer goes back.

    Both methods return the response, already sent if it was streamed, and how the answer ended; None if it did not.
    """

    request: web.Request
    wanted: CompletionRequest
    job: Job
    log: RequestLog
    model: ServedModel
    stall_s: float

    async def whole(self, pieces: AsyncGenerator[Piece, None]) -> tuple[web.StreamResponse, Finished | None]:
        """Answer at the end."""
        text = ""
        async for piece in pieces:
            match piece:
                case Committed():
                    text += piece.text
                case Finished():
                    usage = Usage(len(self.job.prompt), piece.completion_tokens)
                    body = self._answer().whole(text, piece.reason, usage)
                    if self.wanted.timings:
                        body["lynx"] = piece.timings()
                    self.log.publish("done", **piece.to_event())
                    return web.json_response(body, headers={"X-Request-Id": self.job.id}), piece
        raise AssertionError("a generation ends with Finished")

    async def stream(self, pieces: AsyncGenerator[Piece, None]) -> tuple[web.StreamResponse, Finished | None]:
        """Answer as it comes. Until the first token a failure is still a status of HTTP; after it, an event."""
        finished: Finished | None = None
        first = await anext(pieces)
        answer = self._answer()
        headers = {
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            "X-Request-Id": self.job.id,
        }
        response = web.StreamResponse(headers=headers)
        try:
            await response.prepare(self.request)
            opening = answer.opening()
            if opening is not None:
                await self._write(response, sse(opening))
            await self._piece(response, answer, first)
            finished = await self._rest(response, answer, pieces)
        except ConnectionError:
            self._gone("the client left")
        except TimeoutError:
            self._gone(f"the client took nothing for {self.stall_s:g} s")
        return response, finished

    async def _rest(
        self, response: web.StreamResponse, answer: Answer, pieces: AsyncGenerator[Piece, None]
    ) -> Finished | None:
        finished = None
        try:
            async for piece in pieces:
                await self._piece(response, answer, piece)
                if isinstance(piece, Finished):
                    finished = piece
            last = DONE
        except ApiError as error:
            self.log.publish("error", message=str(error), code=error.code, status=error.status)
            late_status.set(error.status)
            last = sse(error.to_json())
        await self._write(response, last)
        return finished

    def _gone(self, why: str) -> None:
        logger.info("%s", why)
        late_status.set(CLIENT_LEFT)
        if self.request.transport is not None:
            self.request.transport.abort()

    async def _piece(self, response: web.StreamResponse, answer: Answer, piece: Piece) -> None:
        match piece:
            case Committed(text=text, accepted=accepted):
                if self.wanted.drafts:
                    await self._aside(response, answer, "commit", accepted=accepted, tokens=piece.tokens)
                if text:
                    await self._write(response, sse(answer.piece(text)))
            case Drafted(token=token, text=text):
                if self.wanted.drafts:
                    await self._aside(response, answer, "draft", token=token, text=text)
            case Retracted(count=count):
                if self.wanted.drafts:
                    await self._aside(response, answer, "retract", count=count)
            case Finished():
                self.log.publish("done", **piece.to_event())
                closing = answer.closing(piece.reason)
                if self.wanted.timings:
                    closing["lynx"] = piece.timings()
                await self._write(response, sse(closing))
                if self.wanted.include_usage:
                    usage = Usage(len(self.job.prompt), piece.completion_tokens)
                    await self._write(response, sse(answer.usage(usage)))

    async def _aside(self, response: web.StreamResponse, answer: Answer, kind: str, **fields: Any) -> None:
        await self._write(response, sse(answer.aside(kind, **fields), f"lynx.{kind}"))

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        async with asyncio.timeout(self.stall_s):
            await response.write(data)

    def _answer(self) -> Answer:
        return Answer.to(self.job.id, self.model, chat=self.wanted.chat, include_usage=self.wanted.include_usage)
