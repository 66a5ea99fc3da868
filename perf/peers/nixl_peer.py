"""NIXL with its UCX backend: a one-sided write between registered buffers, prepared before the clock starts."""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

from perf.peers.harness import Peer, Side, main


def pieces(address: int, size: int) -> list[tuple[int, int, int]]:
    """The descriptors of one payload."""
    piece = min(size, int(os.environ.get("NIXL_PEER_PIECE_BYTES", str(1 << 30))))
    return [(address + start, piece, 0) for start in range(0, size, piece)]


class Nixl(Peer):
    """Done when the state of the transfer says so, and then when the receiver sees the bytes."""

    one_sided = True

    def _agent(self, name: str) -> Any:
        api: Any = importlib.import_module("nixl_cu12._api")
        self._nixl = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        self._address = int(self.memory.ctypes.data)
        self._nixl.register_memory([(self._address, self.memory.nbytes, 0, "")], mem_type="DRAM")
        return self._nixl

    async def start_receiver(self, side: Side) -> None:
        agent = self._agent("receiver")
        await side.give(agent.get_agent_metadata())
        await side.give(json.dumps(self._address).encode())
        await side.hear(b"Y")

    async def start_sender(self, side: Side) -> None:
        agent = self._agent("sender")
        self._remote = agent.add_remote_agent(await side.take())
        self._remote_address = json.loads(await side.take())
        self._handles: dict[int, Any] = {}
        await side.say(b"Y")

    async def send(self, size: int) -> None:
        agent = self._nixl
        handle = self._handles.get(size)
        if handle is None:  # in the warm-up
            local = agent.get_xfer_descs(pieces(self._address, size), mem_type="DRAM")
            remote = agent.get_xfer_descs(pieces(self._remote_address, size), mem_type="DRAM")
            handle = self._handles[size] = agent.initialize_xfer("WRITE", local, remote, self._remote)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")

    async def stop(self) -> None:
        for handle in getattr(self, "_handles", {}).values():
            self._nixl.release_xfer_handle(handle)


if __name__ == "__main__":
    main(Nixl)
