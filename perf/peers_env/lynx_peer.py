"""lynx_net without a codec, checksums on: one transfer a payload, offered after the clock has started."""

from __future__ import annotations

import os

from perf.bytelevel import endpoint, open_bytes, run
from perf.peers_env.harness import Peer, Side, main

LANES = int(os.environ.get("LYNX_PEER_LANES", "2"))
PAGE_BYTES = int(os.environ.get("LYNX_PEER_PAGE_BYTES", str(1 << 20)))
URL = os.environ.get("LYNX_PEER_URL", "tcp://127.0.0.1:0")


class Lynx(Peer):
    """Done when the receiver's `complete` is: every segment has arrived and its checksum was verified."""

    blocking = False
    in_memory = False

    async def start_receiver(self, side: Side) -> None:
        self._endpoint = endpoint()
        self._server = await self._endpoint.serve(URL)
        self._transfers = aiter(self._server)
        await side.give(self._server.url.encode())

    async def start_sender(self, side: Side) -> None:
        self._server = None
        self._endpoint = endpoint()
        self._link = await self._endpoint.connect((await side.take()).decode(), lanes=LANES)

    async def receive(self, size: int) -> None:
        transfer = await anext(self._transfers)
        await transfer.complete
        if transfer.stats.total_bytes != size:
            raise AssertionError(f"{transfer.stats.total_bytes} bytes instead of {size}")

    async def send(self, size: int) -> None:
        page = min(PAGE_BYTES, size)
        source = memoryview(self.memory)
        transfer = open_bytes(self._link, size // page, (page,))
        for index in range(size // page):
            transfer.submit(index, 0, source[index * page : (index + 1) * page])

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()
        else:
            await self._endpoint.close()


if __name__ == "__main__":
    main(Lynx, run)
