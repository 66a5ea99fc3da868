"""The prefill side of an HTTP pair, as short as it gets: POST /prefill computes a cache and sends it over lynx_net.

    python examples/http_prefill.py 127.0.0.1:8001

and then examples/http_decode.py. The servers that come with the library, `lynx-net prefill-server` and
`lynx-net decode-server`, add what a service needs: queues, limits, keys, metrics, an orderly end.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

import lynx_net
from lynx_net.integrations import smollm2
from lynx_net.integrations.scores import SCORE_QUERIES
from lynx_net.integrations.transformers import layout_of, prefill


class PrefillServer:
    """A model, and one link to the decode server that all requests share."""

    def __init__(self) -> None:
        self.loaded = smollm2.load()
        self.thread = ThreadPoolExecutor(1)  # one forward pass at a time

    async def answer(self, request: web.Request) -> web.Response:
        """Compute the cache of `tokens` and send it under `request_id`; the answer comes when it has been taken."""
        wanted = await request.json()
        tokens = wanted["tokens"]
        loop = asyncio.get_running_loop()
        made = await loop.run_in_executor(
            self.thread, lambda: prefill(self.loaded.model, tokens, score_queries=SCORE_QUERIES)
        )
        assert made.scores is not None
        # The decode server feeds the last token itself, so that it has scores to begin with.
        layout = layout_of(self.loaded.model.config, len(tokens) - 1, dtype="float32")
        fine = lynx_net.fine_tokens(layout, made.scores[:, :-1])
        async with (
            lynx_net.connect(wanted["deliver_to"]) as link,
            link.send(wanted["request_id"], layout, fine=fine) as transfer,
        ):
            for layer, (keys, values) in enumerate(zip(made.keys, made.values, strict=True)):
                await transfer.write(layer, keys[:-1], values[:-1])
        return web.json_response({"sent_bytes": transfer.stats.total_bytes})


def main() -> None:
    """Serve until interrupted."""
    host, _, port = sys.argv[1].rpartition(":")
    app = web.Application()
    app.router.add_post("/prefill", PrefillServer().answer)
    # A decode server that ends its request wants no cache any more: the handler and its transfer are cancelled.
    web.run_app(app, host=host, port=int(port), handler_cancellation=True)


if __name__ == "__main__":
    main()
