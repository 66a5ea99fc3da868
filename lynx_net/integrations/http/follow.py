"""Tells the bus what happens to one transfer and to the text that is decoded from it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from lynx_net.integrations.http.tasks import stop_task
from lynx_net.integrations.http.text import TokenTexts
from lynx_net.integrations.http.wire import PREFILL_QUEUE_S, PREFILL_S
from lynx_net.serdes.links import codecs_of
from lynx_net.speculation import Commit, Done, Draft, Retract

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    import lynx_net
    from lynx_net.integrations.http.bus import RequestLog
    from lynx_net.speculation import Event

__all__ = ["Follower"]

POLL_S = 0.05
SLOW_POLL_S = 0.5
SLOW_AFTER_S = 10.0
"""A cache that takes minutes shall not leave thousands of events."""


class Follower:
    """Looks at a transfer from time to time. Use `Follower.of`."""

    def __init__(
        self,
        transfer: lynx_net.IncomingTransfer,
        log: RequestLog,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
    ) -> None:
        self._transfer = transfer
        self._log = log
        self._texts = TokenTexts(decode, prompt)
        self._lanes_before = [stats.received_bytes for stats in transfer.link.lane_stats]
        self._ready = 0
        self._seen: tuple[int, list[int]] | None = None
        self._committed = 0
        self._drafts = 0
        meta, sizes = transfer.offer.meta, _stream_sizes(transfer.offer)
        log.publish(
            "offer",
            transfer.offered_at_s,
            codec=transfer.offer.codec,
            tokens=transfer.offer.layout.tokens,
            layers=transfer.offer.layout.layers,
            lanes=len(self._lanes_before),
            streams=[{"name": name, "bytes": size} for name, size in zip(transfer.stream_names, sizes, strict=True)],
            prefill_queue_s=meta.get(PREFILL_QUEUE_S),
            prefill_s=meta.get(PREFILL_S),
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def of(
        cls,
        transfer: lynx_net.IncomingTransfer,
        log: RequestLog,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
    ) -> AsyncIterator[Follower]:
        """Follow a transfer while the block runs."""
        follower = cls(transfer, log, decode, prompt)
        watching = asyncio.create_task(follower._watch())
        try:
            yield follower
        finally:
            await stop_task(watching)
            follower.look()
            follower._progress()
            log.timeline = transfer.timeline()

    def tell(self, event: Event) -> None:
        """Publish an event of the decode loop, after what the transfer did before it."""
        self.look()
        log = self._log
        match event:
            case Draft(token=token, at_s=at_s):
                index = self._committed + self._drafts
                self._drafts += 1
                log.publish("draft", at_s, index=index, token=token, text=self._texts.draft(token))
            case Retract(count=count, at_s=at_s):
                self._drafts -= count
                self._texts.retract(count)
                log.publish("retract", at_s, count=count)
            case Commit(tokens=tokens, accepted=accepted, at_s=at_s):
                texts = self._texts.commit(tokens)
                log.publish("commit", at_s, index=self._committed, tokens=list(tokens), texts=texts, accepted=accepted)
                self._committed += len(tokens)
                self._drafts = 0
            case Done():
                pass  # the application says how the answer ended

    def look(self) -> None:
        """Publish what has become ready."""
        transfer = self._transfer
        while self._ready < len(transfer.stream_names):
            at_s = transfer.stream_ready(self._ready).at_s
            if at_s is None:
                return
            name = transfer.stream_names[self._ready]
            self._log.publish("ready", at_s, stream=self._ready, name=name)
            self._ready += 1

    def _progress(self) -> None:
        transfer = self._transfer
        ready = [sum(at_s is not None for at_s in layers) for layers in transfer.timeline().layers_ready_s]
        seen = (transfer.stats.total_bytes, ready)
        if seen == self._seen:
            return
        self._seen = seen
        lanes = [
            stats.received_bytes - before
            for stats, before in zip(transfer.link.lane_stats, self._lanes_before, strict=True)
        ]
        self._log.publish("progress", streams=list(transfer.stats.stream_bytes), layers=ready, lanes=lanes)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while self._ready < len(self._transfer.stream_names):
            self.look()
            self._progress()
            await asyncio.sleep(POLL_S if loop.time() - began_s < SLOW_AFTER_S else SLOW_POLL_S)


def _stream_sizes(offer: lynx_net.Offer) -> list[int]:
    """Bytes of every stream, if no page escapes to wide metadata; the most of an exact stream."""
    codecs = codecs_of(offer)
    pages = [codecs.codec(page.layer, page.kind).stream_bytes(page.shape) for page in offer.layout.pages()]
    return [sum(sizes[stream] for sizes in pages) for stream in range(offer.streams)]
