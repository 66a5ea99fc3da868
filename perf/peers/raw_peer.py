"""One blocking TCP socket: what the kernel offers to a program that does nothing else."""

from __future__ import annotations

import socket

from perf.peers.harness import Peer, Side, main


class Raw(Peer):
    """`sendall` and `recv_into`, straight into place."""

    async def start_receiver(self, side: Side) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            await side.give(str(server.getsockname()[1]).encode())
            self._sock = server.accept()[0]

    async def start_sender(self, side: Side) -> None:
        self._sock = socket.create_connection(("127.0.0.1", int(await side.take())))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def receive(self, size: int) -> None:
        view = self.view[:size]
        while view.nbytes:
            view = view[self._sock.recv_into(view) :]

    async def send(self, size: int) -> None:
        self._sock.sendall(self.view[:size])


if __name__ == "__main__":
    main(Raw)
