"""One blocking TCP socket: what the kernel offers to a program that does nothing else.

With RAW_PEER_SUMS=1 both sides make the checksums that lynx_net makes, piece by piece while a piece is in the caches:
what is left, then, for whoever checks what has come.
"""

from __future__ import annotations

import os
import socket

import xxhash

from perf.peers.harness import Peer, Side, main

SUMS = os.environ.get("RAW_PEER_SUMS") == "1"
PIECE_BYTES = 256 * 1024
CONGESTION_CONTROL = os.environ.get("RAW_PEER_CONGESTION_CONTROL", "").encode()
"""The system's where it is empty."""


class Raw(Peer):
    """`sendall` and `recv_into`, straight into place."""

    async def start_receiver(self, side: Side) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            await side.give(str(server.getsockname()[1]).encode())
            self._sock = server.accept()[0]

    async def start_sender(self, side: Side) -> None:
        self._sock = socket.create_connection(("127.0.0.1", int(await side.take())))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if CONGESTION_CONTROL:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL)

    async def receive(self, size: int) -> None:
        for piece in self._pieces(size):
            view = piece
            while view.nbytes:
                view = view[self._sock.recv_into(view) :]
            if SUMS:
                xxhash.xxh3_64_intdigest(piece)

    async def send(self, size: int) -> None:
        for piece in self._pieces(size):
            if SUMS:
                xxhash.xxh3_64_intdigest(piece)
            self._sock.sendall(piece)

    def _pieces(self, size: int) -> list[memoryview]:
        piece_bytes = PIECE_BYTES if SUMS else size
        return [self.view[at : at + piece_bytes] for at in range(0, size, piece_bytes)]


if __name__ == "__main__":
    main(Raw)
