"""lynx_net without a codec, checksums on: a transfer a payload, offered after the clock has started.

With LYNX_PEER_OPEN=1 all payloads are pages of one transfer that was accepted before the clock starts, as the other
systems have their memory registered and their descriptors exchanged by then.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from lynx_net import LinkConfig, LynxError
from lynx_net.aio.endpoint import Endpoint, Server
from lynx_net.aio.link import Link
from perf.bytelevel import ROOMY, Swallow, open_bytes, run
from perf.peers.harness import Peer, Side, main

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lynx_net.aio.transfer import IncomingTransfer, OutgoingTransfer

LANES = int(os.environ.get("LYNX_PEER_LANES", "2"))
PAGE_BYTES = int(os.environ.get("LYNX_PEER_PAGE_BYTES", str(1 << 20)))
ONE_TRANSFER = os.environ.get("LYNX_PEER_OPEN") == "1"
URL = os.environ.get("LYNX_PEER_URL", "tcp://127.0.0.1:0")
ENDLESS_PAGES = 1 << 16
"""More than any run sends in one transfer."""


class Counter:
    """Pages that have arrived, and whoever waits for their number."""

    def __init__(self) -> None:
        self.wanted = self.arrived = 0
        self.there = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def count(self) -> None:
        """One page more; called from any thread, one at a time."""
        self.arrived += 1
        if self.arrived == self.wanted:
            self._loop.call_soon_threadsafe(self.there.set)


class Lynx(Peer):
    """Done when the receiver's `complete` is, or the last page of the payload is in; checksums are verified by then."""

    blocking = False
    in_memory = False

    _server: Server[Link] | None = None
    _failure: LynxError | None = None

    def _make_endpoint(self) -> Endpoint[Link]:
        counter = self._counter = Counter()

        class Counted(Swallow):
            def pages_arrived(self, pages: Sequence[int], stream: int) -> None:
                super().pages_arrived(pages, stream)
                for _ in pages:
                    counter.count()

        return Endpoint(
            lambda parts: Link(parts, Counted, accept_in_threads=True),  # as of `lynx_net.serve` that allocates itself
            config=LinkConfig(memory_bytes=ROOMY),
            rate=None,
        )

    async def start_receiver(self, side: Side) -> None:
        self._endpoint = self._make_endpoint()
        server = self._server = await self._endpoint.serve(URL)
        self._transfers = aiter(server)
        await side.give(server.url.encode())
        self._transfer: IncomingTransfer | None = None
        if ONE_TRANSFER:
            self._transfer = await anext(self._transfers)
            self._watch = asyncio.create_task(self._wait_for_the_end(self._transfer))
            await side.say(b"Y")

    async def _wait_for_the_end(self, transfer: IncomingTransfer) -> None:
        """A transfer that fails brings no more pages: whoever waits for some hears of it."""
        try:
            await transfer.complete
        except LynxError as error:
            self._failure = error
        self._counter.there.set()

    async def start_sender(self, side: Side) -> None:
        self._endpoint = self._make_endpoint()
        self._link = await self._endpoint.connect((await side.take()).decode(), lanes=LANES)
        self._next_page = 0
        self._open: OutgoingTransfer | None = None
        if ONE_TRANSFER:
            self._open = open_bytes(self._link, ENDLESS_PAGES, (PAGE_BYTES,))
            await side.hear(b"Y")

    async def expect(self, size: int) -> None:
        self._counter.there.clear()
        self._counter.wanted += size // PAGE_BYTES

    async def receive(self, size: int) -> None:
        if self._transfer is not None:
            await self._counter.there.wait()
            if self._failure is not None:
                raise self._failure
            return
        transfer = await anext(self._transfers)
        await transfer.complete
        if transfer.stats.total_bytes != size:
            raise AssertionError(f"{transfer.stats.total_bytes} bytes instead of {size}")

    async def send(self, size: int) -> None:
        source = self.view
        pages = size // PAGE_BYTES
        transfer = self._open
        if transfer is None:
            transfer = open_bytes(self._link, pages, (PAGE_BYTES,))
            self._next_page = 0
        for index in range(pages):
            part = source[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]
            transfer.submit(self._next_page, 0, part)
            self._next_page += 1

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()
        else:
            await self._endpoint.close()


if __name__ == "__main__":
    main(Lynx, run)
