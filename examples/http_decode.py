"""The decode side of an HTTP pair, as short as it gets: OpenAI's /v1/chat/completions, streamed.

    python examples/http_prefill.py 127.0.0.1:8001
    python examples/http_decode.py 127.0.0.1:8000 http://127.0.0.1:8001
    curl -N http://127.0.0.1:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello!"}]}'

`lynx-net decode-server` is the same with everything that a service needs; docs/http.md describes it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

import lynx_net
from lynx_net.integrations import smollm2
from lynx_net.integrations.transformers import ProgressiveCache, TransformersModel, layout_of
from lynx_net.speculation import Commit, decode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

NEW_TOKENS = 64


class DecodeServer:
    """A model, and the caches that were asked for, by request."""

    def __init__(self, prefill_url: str) -> None:
        self.loaded = smollm2.load()
        stop = self.loaded.tokenizer.eos_token_id
        assert isinstance(stop, int)
        self.stop = stop
        self.thread = ThreadPoolExecutor(1)  # one forward pass at a time, for all requests
        self.prefill_url = prefill_url
        self.caches: dict[str, ProgressiveCache] = {}
        self.offered: dict[str, asyncio.Future[lynx_net.IncomingTransfer]] = {}

    def allocate(self, offer: lynx_net.Offer) -> ProgressiveCache:
        """A cache goes to where its request waits for it; nobody else's is taken."""
        if offer.request_id not in self.caches:
            raise lynx_net.LynxError(f"nobody asked for {offer.request_id}")
        return self.caches[offer.request_id]

    async def running(self, _app: web.Application) -> AsyncIterator[None]:
        """Listen for caches as long as the application runs."""
        async with (
            lynx_net.serve("tcp://127.0.0.1:0", allocate=self.allocate) as server,
            aiohttp.ClientSession() as http,
        ):
            self.url, self.http = server.url, http
            taking = asyncio.create_task(self.take(server))
            yield
            taking.cancel()

    async def take(self, server: lynx_net.KVServer) -> None:
        """Give each transfer to the request that waits for it."""
        async for transfer in server:
            waiting = self.offered.get(transfer.offer.request_id)
            if waiting is None or waiting.done():
                transfer.cancel()
            else:
                waiting.set_result(transfer)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """One answer, as server-sent events. A client that leaves cancels this, and with it everything below."""
        messages = (await request.json())["messages"]
        text = self.loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = self.loaded.tokenizer(str(text), add_special_tokens=False)["input_ids"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async with aclosing(self.pieces(tokens)) as pieces:
            async for piece in pieces:
                chunk = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": piece}}]}
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def pieces(self, tokens: list[int]) -> AsyncGenerator[str, None]:
        """Ask for the cache of a prompt and decode while it arrives; only final tokens become text."""
        layout = layout_of(self.loaded.model.config, len(tokens) - 1, dtype="float32")
        request_id = uuid.uuid4().hex
        cache = self.caches[request_id] = ProgressiveCache(layout, room=NEW_TOKENS + 1)
        self.offered[request_id] = asyncio.get_running_loop().create_future()
        wanted = {"request_id": request_id, "tokens": tokens, "deliver_to": self.url}
        asking = asyncio.create_task(self.ask(wanted))
        try:
            # Whichever comes first: the offer, or the news that there will be none.
            await asyncio.wait({self.offered[request_id], asking}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                await asking
            transfer = await self.offered[request_id]
            events = decode(
                TransformersModel(self.loaded.model, cache),
                transfer,
                prompt_tail=tokens[-1:],
                max_new_tokens=NEW_TOKENS,
                stop_tokens=[self.stop],
                executor=self.thread,
            )
            shown, final = "", []
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Commit):
                        final += event.tokens
                        text = str(self.loaded.tokenizer.decode(final, skip_special_tokens=True))
                        if not text.endswith("\ufffd"):  # a character whose other bytes are still to come
                            yield text[len(shown) :]
                            shown = text
        finally:
            asking.cancel()  # which ends the request at the prefill server, and the transfer with it
            del self.caches[request_id], self.offered[request_id]

    async def ask(self, wanted: dict[str, object]) -> None:
        """Returns when the prefill server has sent the cache."""
        async with self.http.post(f"{self.prefill_url}/prefill", json=wanted, raise_for_status=True) as answer:
            await answer.read()


def main() -> None:
    """Serve until interrupted."""
    host, _, port = sys.argv[1].rpartition(":")
    server = DecodeServer(sys.argv[2])
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    app.cleanup_ctx.append(server.running)
    web.run_app(app, host=host, port=int(port), handler_cancellation=True)


if __name__ == "__main__":
    main()
