"""Delays Ethernet frames between pairs of interfaces, for kernels without netem.

Run by path in the switch's namespace: `relay.py DELAY_S NEAR:FAR [NEAR:FAR ...]`. It prints a line when it is
ready and runs until SIGTERM. Frames keep their order and their offload marks (PACKET_VNET_HDR), so that TCP's
superframes of 64 KiB pass as one. Needs nothing but the standard library.
"""

from __future__ import annotations

import errno
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from typing import NoReturn

# From linux/if_packet.h and linux/socket.h; Python's socket module does not name them all.
SOL_PACKET = 263
PACKET_STATISTICS = 6
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
ETH_P_ALL = 3
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33

FRAME_BYTES = 10 + 18 + 65_536
BUFFER_BYTES = 1 << 26
FRAMES_AT_ONCE = 64


def open_port(device: str) -> socket.socket:
    """A socket that reads what arrives at an interface and writes what leaves it."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    port.bind((device, ETH_P_ALL))
    port.setblocking(False)
    return port


class Relay:
    """One delay line for all pairs; equal delays keep it in order."""

    def __init__(self, pairs: list[tuple[str, str]], delay_s: float) -> None:
        self.delay_s = delay_s
        self.lost = 0
        self.other_side: dict[socket.socket, socket.socket] = {}
        for near, far in pairs:
            ports = open_port(near), open_port(far)
            self.other_side[ports[0]], self.other_side[ports[1]] = ports[1], ports[0]

    def run(self) -> NoReturn:
        """Relay until a signal ends it."""
        line: deque[tuple[float, socket.socket, bytes]] = deque()
        ports = list(self.other_side)
        while True:
            now_s = time.monotonic()
            while line and line[0][0] <= now_s:
                _, port, frame = line.popleft()
                self.send(port, frame)
            timeout_s = max(line[0][0] - time.monotonic(), 0) if line else None
            ready, _, _ = select.select(ports, [], [], timeout_s)  # unlike epoll it waits to the microsecond
            due_s = time.monotonic() + self.delay_s
            for port in ready:
                for _ in range(FRAMES_AT_ONCE):
                    try:
                        frame = port.recv(FRAME_BYTES)
                    except BlockingIOError:
                        break
                    line.append((due_s, self.other_side[port], frame))

    def send(self, port: socket.socket, frame: bytes) -> None:
        """Write a frame; where the kernel has no room for it, it is lost, as in any network."""
        try:
            port.send(frame)
        except OSError as error:
            if error.errno not in (errno.ENOBUFS, errno.EAGAIN):
                raise
            self.lost += 1

    def all_lost(self) -> int:
        """Frames lost since the start, those that came faster than they were read included."""
        for port in self.other_side:
            self.lost += struct.unpack("II", port.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[1]
        return self.lost


def main() -> None:
    """Relay until SIGTERM, then tell how many frames were lost for want of speed."""
    relay = Relay([(near, far) for near, _, far in (pair.partition(":") for pair in sys.argv[2:])], float(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("ready", flush=True)
    try:
        relay.run()
    finally:
        if lost := relay.all_lost():
            print(f"netem: the delay relay was too slow and lost {lost} frames", file=sys.stderr)


if __name__ == "__main__":
    main()
