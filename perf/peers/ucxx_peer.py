"""UCXX: tagged messages through its asyncio interface, received straight into place."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from perf.peers.harness import Peer, Side, main


class Ucxx(Peer):
    """The receive is posted before the clock starts; done when its await returns."""

    blocking = False
    _endpoint: Any = None
    _listener: Any = None

    async def start_receiver(self, side: Side) -> None:
        self._ucxx: Any = importlib.import_module("ucxx")
        arrived: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._listener = self._ucxx.create_listener(arrived.set_result)
        await side.give(str(self._listener.port).encode())
        self._endpoint = await arrived

    async def start_sender(self, side: Side) -> None:
        self._ucxx = importlib.import_module("ucxx")
        self._endpoint = await self._ucxx.create_endpoint("127.0.0.1", int(await side.take()))

    async def expect(self, size: int) -> None:
        self._receiving = asyncio.ensure_future(self._endpoint.recv(self.memory[:size]))
        await asyncio.sleep(0)

    async def receive(self, size: int) -> None:
        await self._receiving

    async def send(self, size: int) -> None:
        await self._endpoint.send(self.memory[:size])

    async def stop(self) -> None:
        self._endpoint.abort()
        self._endpoint = self._listener = None


if __name__ == "__main__":
    main(Ucxx)
