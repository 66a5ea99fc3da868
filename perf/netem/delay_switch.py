"""An Ethernet switch that delays every frame, for kernels without netem.

Run by path in the switch's namespace: `delay_switch.py DELAY_S PORT [PORT ...]`. It prints a line when it is ready
and runs until SIGTERM. Frames keep their order and their offload marks (PACKET_VNET_HDR), so that TCP's superframes of
64 KiB pass as one. What a port's queue has no room for is lost, as in any switch. Needs the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from typing import NoReturn

# From linux/if_packet.h, linux/if_ether.h and asm/socket.h; Python's socket module does not name them all.
SOL_PACKET = 263
PACKET_STATISTICS = 6
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
ETH_P_ALL = 3
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33

VNET_HEADER_BYTES = 10
FRAME_BYTES = VNET_HEADER_BYTES + 18 + 65_536
BUFFER_BYTES = 1 << 28
"""More than any queue of a port, and what arrives while this process waits for a core."""
FRAMES_AT_ONCE = 64
TO = slice(VNET_HEADER_BYTES, VNET_HEADER_BYTES + 6)
FROM = slice(VNET_HEADER_BYTES + 6, VNET_HEADER_BYTES + 12)


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


def run(ports: list[socket.socket], delay_s: float) -> NoReturn:
    """Switch until a signal ends it; one line of waiting frames, since all wait equally long."""
    line: deque[tuple[float, socket.socket, bytes]] = deque()
    port_of: dict[bytes, socket.socket] = {}
    while True:
        now_s = time.monotonic()
        while line and line[0][0] <= now_s:
            _, came_from, frame = line.popleft()
            port_of[frame[FROM]] = came_from
            known = port_of.get(frame[TO])
            for port in ports if known is None else (known,):
                if port is not came_from:
                    send(port, frame)
        timeout_s = max(line[0][0] - time.monotonic(), 0) if line else None
        ready, _, _ = select.select(ports, [], [], timeout_s)  # unlike epoll it waits to the microsecond
        due_s = time.monotonic() + delay_s
        for port in ready:
            with contextlib.suppress(BlockingIOError):
                for _ in range(FRAMES_AT_ONCE):
                    line.append((due_s, port, port.recv(FRAME_BYTES)))


def send(port: socket.socket, frame: bytes) -> None:
    """Write a frame, or lose it if the port's queue is full."""
    try:
        port.send(frame)
    except OSError as error:
        if error.errno not in (errno.ENOBUFS, errno.EAGAIN):
            raise


def unread(port: socket.socket) -> int:
    """Frames that were lost because they came faster than they were read."""
    return int(struct.unpack("II", port.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[1])


def main() -> None:
    """Switch until SIGTERM, then tell what was lost without having been asked for."""
    ports = [open_port(device) for device in sys.argv[2:]]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("ready", flush=True)
    try:
        run(ports, float(sys.argv[1]))
    finally:
        if lost := sum(map(unread, ports)):
            print(f"netem: the userspace delay was too slow and lost {lost} frames", file=sys.stderr)


if __name__ == "__main__":
    main()
