"""The receiving side alone: `python -m perf.receiver --json FILE`.

A process with nothing of the library in its way sends frames whose checksums it computed before, as fast as the
receiver grants credit, to a link of lynx_net or to plain `recv_into` of the same bytes, in turn. Figures are of the
receiving process: Gbit/s, CPU seconds for a GB, page faults and voluntary context switches for a MiB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import secrets
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lynx_net import CacheLayout, LinkConfig
from lynx_net.demo.results import machine_facts
from lynx_net.transport.options import SocketOptions
from lynx_net.wire.framereader import FrameReader
from lynx_net.wire.frames import ControlFrame, SegmentHeader, checksum, pack_control, pack_segment_header
from lynx_net.wire.messages import (
    PROTOCOL_VERSION,
    Complete,
    Credit,
    Hello,
    OfferMessage,
    decode_message,
    encode_message,
)
from perf.bytelevel import PACKAGES, endpoint, run

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

GIB = 1 << 30
SOURCE_BYTES = 64 << 20
TRANSFER = 1
TOGETHER_BYTES = 2 << 20
"""Sent with one system call."""


class Used(NamedTuple):
    """What a run cost the receiving process, and its sender."""

    ended_s: float
    cpu_s: float
    faults: int
    switches: int

    @staticmethod
    def until_now() -> Used:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return Used(time.monotonic(), usage.ru_utime + usage.ru_stime, usage.ru_minflt, usage.ru_nvcsw)

    def since(self, before: Used) -> Used:
        return Used(
            self.ended_s, self.cpu_s - before.cpu_s, self.faults - before.faults, self.switches - before.switches
        )


# ---- receivers


def raw_receive(pipe: Connection, lanes: int, size: int) -> None:
    """One blocking thread a connection, one buffer each."""
    with socket.create_server(("127.0.0.1", 0), backlog=lanes) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SocketOptions().receive_buffer_bytes or 0)
        pipe.send(server.getsockname()[1])
        connections = [server.accept()[0] for _ in range(lanes)]

    def read(connection: socket.socket) -> None:
        buffer = memoryview(bytearray(size))
        while connection.recv_into(buffer):
            pass

    began = Used.until_now()
    threads = [threading.Thread(target=read, args=(one,)) for one in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(Used.until_now().since(began))


def lynx_receive(pipe: Connection, lanes: int, size: int) -> None:
    """Serve one transfer."""

    async def serve() -> None:
        server = await endpoint(segment_bytes=size).serve("tcp://127.0.0.1:0")
        pipe.send(int(server.url.rpartition(":")[2]))
        began = Used.until_now()
        transfer = await anext(aiter(server))
        await transfer.complete
        pipe.send(Used.until_now().since(began))
        await transfer.link.closed()
        await server.close()

    run(serve())


RECEIVERS = {"raw": raw_receive, "lynx": lynx_receive}


# ---- the sender


class Granted:
    """The credit of the only stream."""

    def __init__(self, limit_bytes: int) -> None:
        self._changed = threading.Condition()
        self._left_bytes = limit_bytes
        self._limit_bytes = limit_bytes

    def grant(self, limit_bytes: int) -> None:
        """The receiver says how many bytes may have been sent."""
        with self._changed:
            self._left_bytes += limit_bytes - self._limit_bytes
            self._limit_bytes = limit_bytes
            self._changed.notify_all()

    def take(self, count: int) -> None:
        """Wait for so much credit and use it."""
        with self._changed:
            while self._left_bytes < count:
                self._changed.wait()
            self._left_bytes -= count


class Frames:
    """What is sent, made before it is timed."""

    def __init__(self, total: int, size: int) -> None:
        self._source = memoryview(bytes(range(256)) * (SOURCE_BYTES // 256))
        sums = [checksum(self._source[at : at + size]) for at in range(0, SOURCE_BYTES, size)]
        self.size = size
        self.pages = total // size
        self._headers = [
            pack_segment_header(SegmentHeader(TRANSFER, page, 0, 0, size, size, sums[page % len(sums)]))
            for page in range(self.pages)
        ]

    def offer(self) -> bytes:
        """Of a transfer that has a page for each of them."""
        layout = CacheLayout(layers=1, tokens=self.pages, heads=1, key_size=1, value_size=0, page_tokens=1)
        meta = {"page_bytes": [self.size]}
        message = OfferMessage(TRANSFER, "bytes", layout.to_wire(), "none", {}, 1, self.size, meta, None)
        return pack_control(encode_message(message))

    def of(self, page: int) -> list[bytes | memoryview]:
        at = page * self.size % SOURCE_BYTES
        return [self._headers[page], self._source[at : at + self.size]]


def read_messages(sock: socket.socket, granted: Granted, complete: threading.Event) -> None:
    """What the receiver says."""
    reader = FrameReader()
    while not complete.is_set() and (count := sock.recv_into(reader.buffers()[0])):
        for frame in reader.received(count):
            match decode_message(frame.payload) if isinstance(frame, ControlFrame) else None:
                case Credit(_, _, limit):
                    granted.grant(limit)
                case Complete():
                    complete.set()


def greet(sock: socket.socket, lane: int, lanes: int, link: bytes, size: int) -> None:
    hello = Hello(PROTOCOL_VERSION, link, link[:8], lane, lanes, size, 0, 60_000, None, b"")
    sock.sendall(pack_control(encode_message(hello)))
    reader = FrameReader()
    while not reader.received(sock.recv_into(reader.buffers()[0])):
        pass


def send(kind: str, port: int, frames: Frames, lanes: int) -> tuple[float, float]:
    """Send all frames; start time and CPU seconds."""
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(lanes)]
    link = secrets.token_bytes(16)
    granted = Granted(frames.pages * frames.size if kind == "raw" else LinkConfig().initial_credit_bytes)
    complete = threading.Event()
    together = max(TOGETHER_BYTES // frames.size, 1)
    began = Used.until_now()
    if kind != "raw":
        for lane, sock in enumerate(socks):
            greet(sock, lane, lanes, link, frames.size)
        threading.Thread(target=read_messages, args=(socks[0], granted, complete), daemon=True).start()
        socks[0].sendall(frames.offer())

    def write(lane: int) -> None:
        mine = range(lane, frames.pages, lanes)
        for at in range(0, len(mine), together):
            pages = mine[at : at + together]
            granted.take(len(pages) * frames.size)
            views = [memoryview(part) for page in pages for part in frames.of(page)]
            while views:
                sent = socks[lane].sendmsg(views)
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if sent:
                    views[0] = views[0][sent:]
        if kind == "raw":
            socks[lane].close()

    threads = [threading.Thread(target=write, args=(lane,)) for lane in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if kind != "raw":
        complete.wait()
    spent = Used.until_now().since(began).cpu_s
    for sock in socks:
        sock.close()
    return began.ended_s, spent


def measure(kind: str, frames: Frames, lanes: int) -> dict[str, float]:
    """The figures of one run."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=RECEIVERS[kind], args=(there, lanes, frames.size), daemon=True
    )
    process.start()
    there.close()
    began_s, sent_cpu = send(kind, here.recv(), frames, lanes)
    used: Used = here.recv()
    process.join()
    total = frames.pages * frames.size
    return {
        "gbps": total * 8 / (used.ended_s - began_s) / 1e9,
        "cpu_s_per_gb": used.cpu_s / total * 1e9,
        "sender_cpu_s_per_gb": sent_cpu / total * 1e9,
        "faults_per_mib": used.faults / total * 2**20,
        "switches_per_mib": used.switches / total * 2**20,
    }


def main() -> None:
    """Run the rounds and print or write the figures."""
    parser = argparse.ArgumentParser(description="The receiving side of lynx_net beside plain recv_into")
    parser.add_argument("--gib", type=float, default=2.0, help="GiB a run (default 2)")
    parser.add_argument("--lanes", type=int, default=min(8, os.cpu_count() or 1), help="connections")
    parser.add_argument("--segment-bytes", type=int, default=LinkConfig().segment_bytes, help="of a page and a segment")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind, in turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    size, lanes = options.segment_bytes, options.lanes
    frames = Frames(int(options.gib * GIB) // (size * lanes) * size * lanes, size)
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in RECEIVERS}
    for _ in range(options.rounds):
        for kind, results in runs.items():
            results.append(measure(kind, frames, lanes))
    medians = {
        kind: {name: statistics.median(one[name] for one in results) for name in results[0]}
        for kind, results in runs.items()
    }
    ratios = [lynx["gbps"] / raw["gbps"] for raw, lynx in zip(runs["raw"], runs["lynx"], strict=True)]
    figures = {
        "machine": machine_facts(PACKAGES),
        "lanes": lanes,
        "segment_bytes": size,
        "bytes": frames.pages * size,
        "medians": medians,
        "ratio": statistics.median(ratios),
        "cpu_ratio": medians["lynx"]["cpu_s_per_gb"] / medians["raw"]["cpu_s_per_gb"],
        "rounds": runs,
    }
    for kind, median in medians.items():
        print(f"{kind:5} " + ", ".join(f"{name} {value:.3f}" for name, value in median.items()))
    print(f"ratio {figures['ratio']:.3f}, CPU ratio {figures['cpu_ratio']:.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
