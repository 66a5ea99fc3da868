"""Mooncake's transfer engine over TCP: a one-sided write between registered buffers."""

from __future__ import annotations

import importlib
import json
from typing import Any

from perf.peers.harness import Peer, Side, main


class Mooncake(Peer):
    """Done when `transfer_sync_write` returns, and then when the receiver sees the bytes."""

    one_sided = True

    def _start(self) -> Any:
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("the engine does not start")
        self._address = int(self.memory.ctypes.data)
        if self._engine.register_memory(self._address, self.memory.nbytes):
            raise RuntimeError("the memory cannot be registered")

    async def start_receiver(self, side: Side) -> None:
        self._start()
        await side.give(json.dumps([f"127.0.0.1:{self._engine.get_rpc_port()}", self._address]).encode())

    async def start_sender(self, side: Side) -> None:
        self._start()
        self._remote, self._remote_address = json.loads(await side.take())

    async def send(self, size: int) -> None:
        if self._engine.transfer_sync_write(self._remote, self._address, self._remote_address, size):
            raise RuntimeError("the transfer failed")

    async def stop(self) -> None:
        self._engine.unregister_memory(self._address)


if __name__ == "__main__":
    main(Mooncake)
