"""What raw sockets move where memory is in no cache: `python -m perf.cold [--pinned] [--json FILE]`.

Blocking sockets over loopback, a thread each, no checksums, between two processes. Either side has 1 MiB a lane that it
uses over and over, or so much that no cache holds it: as where a device has written pages, or will read them. With
--pinned that is pinned memory. It bounds what `perf.gpu_pair` can move with as many lanes. Every round runs all four.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import multiprocessing
import socket
import threading
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_net.demo.results import machine_facts

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

PIECE_BYTES = 1 << 20
KINDS = ("warm", "cold")


class Buffers:
    """The memory of one side: pieces of a lane, in turn."""

    def __init__(self, kind: str, lanes: int, cold_bytes: int, *, pinned: bool) -> None:
        self._lane_bytes = PIECE_BYTES if kind == "warm" else cold_bytes // lanes // PIECE_BYTES * PIECE_BYTES
        total = self._lane_bytes * lanes
        if pinned and kind == "cold":
            from lynx_gpu.events import Runtime

            self._owner: Any = Runtime(0).pinned(total)
            self._view = memoryview((ctypes.c_ubyte * total).from_address(self._owner.address)).cast("B")
        else:
            self._view = memoryview(np.empty(total, np.uint8).data)
        np.frombuffer(self._view, np.uint8)[:] = 1  # its pages are there before any clock runs

    def piece(self, lane: int, number: int) -> memoryview:
        """Piece `number` that a lane moves."""
        at = lane * self._lane_bytes + number * PIECE_BYTES % self._lane_bytes
        return self._view[at : at + PIECE_BYTES]


def in_threads(work: Callable[[int], None], lanes: int) -> None:
    """Run it for every lane, each in a thread, until all are done."""
    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def receive(pipe: Connection, kind: str, lanes: int, pieces: int, cold_bytes: int, pinned: bool) -> None:
    """Accept as many connections as there are lanes; say over the pipe when everything is in."""
    buffers = Buffers(kind, lanes, cold_bytes, pinned=pinned)
    with socket.create_server(("127.0.0.1", 0), backlog=lanes) as server:
        pipe.send(server.getsockname()[1])
        connections = [server.accept()[0] for _ in range(lanes)]

    def read(lane: int) -> None:
        for number in range(pieces):
            piece = buffers.piece(lane, number)
            while piece:
                got = connections[lane].recv_into(piece)
                if not got:
                    raise ConnectionError("the sender closed the connection")
                piece = piece[got:]

    in_threads(read, lanes)
    pipe.send(time.monotonic())


def measure(kinds: tuple[str, str], lanes: int, total: int, cold_bytes: int, *, pinned: bool) -> float:
    """Gbit/s from memory of the first kind to memory of the second."""
    pieces = total // lanes // PIECE_BYTES
    here, there = multiprocessing.Pipe()
    arguments = (there, kinds[1], lanes, pieces, cold_bytes, pinned)
    process = multiprocessing.get_context("spawn").Process(target=receive, args=arguments, daemon=True)
    process.start()
    there.close()  # so that a receiver that dies ends the wait below
    buffers = Buffers(kinds[0], lanes, cold_bytes, pinned=pinned)
    port = here.recv()
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(lanes)]

    def write(lane: int) -> None:
        for number in range(pieces):
            connections[lane].sendall(buffers.piece(lane, number))

    began_s = time.monotonic()
    in_threads(write, lanes)
    ended_s = float(here.recv())
    process.join()
    for connection in connections:
        connection.close()
    return lanes * pieces * PIECE_BYTES * 8 / (ended_s - began_s) / 1e9


def main() -> None:
    """Run the rounds and print or write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gib", type=float, default=8.0, help="moved in a run (default 8)")
    parser.add_argument("--cold-gib", type=float, default=2.0, help="of a side whose memory is cold (default 2)")
    parser.add_argument("--pinned", action="store_true", help="cold memory is pinned: needs a CUDA device")
    options = parser.parse_args()
    total, cold_bytes = int(options.gib * 2**30), int(options.cold_gib * 2**30)
    if min(total, cold_bytes) < options.lanes * PIECE_BYTES or options.lanes < 1:
        parser.error("a lane needs at least a MiB")
    if options.pinned:
        from lynx_gpu import device_count

        if device_count() == 0:
            raise SystemExit("there is no CUDA device here, or no CuPy")
    runs: dict[str, list[float]] = {f"{source} to {target}": [] for source, target in itertools.product(KINDS, KINDS)}
    for _ in range(options.rounds):
        for name, speeds in runs.items():
            source, _, target = name.split()
            speeds.append(measure((source, target), options.lanes, total, cold_bytes, pinned=options.pinned))
    best = median(runs["warm to warm"])
    print(f"{options.lanes} lanes, cold memory {'pinned' if options.pinned else 'ordinary'}")
    for name, speeds in runs.items():
        print(f"{name:14}{median(speeds):7.1f} Gbit/s, {median(speeds) / best:.2f} of warm to warm")
    if options.json:
        facts = {"machine": machine_facts(()), "lanes": options.lanes, "pinned": options.pinned}
        options.json.write_text(json.dumps({**facts, "gbps": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
