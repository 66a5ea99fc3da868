"""Throughput over loopback beside a raw blocking-socket copy: `python -m perf.loopback --json FILE`.

Both move the same bytes between two processes with as many connections and the same buffer size, in turn, and lynx_net
checks every segment's checksum. Figures are medians over the rounds. CPU seconds are user and system time of both
processes and, beside that, of the whole machine meanwhile: the kernel receives in threads of its own (ksoftirqd) and on
idle cores, too, the more of it the larger the buffers are that raw sockets are given, and counts that for no process.
Nothing else should run then.

Raw sockets have the system's congestion control, and lynx_net what it chooses within a machine (docs/sockets.md); with
`--congestion-control reno` both have that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import resource
import socket
import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import lynx_net
from lynx_net import LinkConfig, SocketOptions
from lynx_net.demo.results import machine_facts
from perf.bytelevel import PACKAGES, endpoint, open_bytes, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from lynx_net.aio.endpoint import Endpoint
    from lynx_net.aio.link import Link

GIB = 1 << 30
SOURCE_BYTES = 64 << 20
"""Sent over and over, so that neither side is measured on page faults of its own making."""
PAGES_TOGETHER = 16
"""Handed over in one call, as an encoder does with what it has encoded together."""


def cpu_seconds() -> float:
    """User and system time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def machine_cpu_seconds() -> float:
    """The same of all cores, with what the kernel does for nobody in particular; NaN where it does not tell (Linux)."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return math.nan
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, first.split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


# ---- raw sockets


def raw_receive(
    pipe: Connection, total: int, lanes: int, size: int, memory: Callable[[int], memoryview] | None = None
) -> None:
    """Accept, then one blocking thread a connection, each with a buffer of `size` bytes.

    `memory(lanes)` makes what all lanes together receive into instead, piece by piece, over and over.
    """
    whole = memoryview(bytearray(lanes * size)) if memory is None else memory(lanes)
    lane_bytes = whole.nbytes // lanes
    with socket.create_server(("127.0.0.1", 0), backlog=lanes) as server:
        pipe.send(server.getsockname()[1])
        connections = [server.accept()[0] for _ in range(lanes)]

    def read(connection: socket.socket, own: memoryview) -> None:
        for at in itertools.cycle(range(0, lane_bytes, size)):
            if not connection.recv_into(own[at : at + size]):
                return

    began = cpu_seconds()
    threads = [
        threading.Thread(target=read, args=(one, whole[lane * lane_bytes : (lane + 1) * lane_bytes]))
        for lane, one in enumerate(connections)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send((time.monotonic(), cpu_seconds() - began))


def raw_connect(port: int, control: str | None) -> socket.socket:
    """A connection with this congestion control; None is the system's."""
    sock = socket.socket()
    if control is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    sock.connect(("127.0.0.1", port))
    return sock


def raw_send(
    port: int, total: int, lanes: int, size: int, control: str | None = None, source: memoryview | None = None
) -> tuple[float, float]:
    """Send from the same source memory, one blocking thread a connection; start time and CPU seconds."""
    if source is None:
        source = memoryview(bytes(range(256)) * (SOURCE_BYTES // 256))
    connections = [raw_connect(port, control) for _ in range(lanes)]
    per_lane = total // size // lanes

    def write(connection: socket.socket, lane: int) -> None:
        for index in range(per_lane):
            offset = (lane + index * lanes) * size % source.nbytes
            connection.sendall(source[offset : offset + size])
        connection.close()

    began_s, began = time.monotonic(), cpu_seconds()
    threads = [threading.Thread(target=write, args=(one, lane)) for lane, one in enumerate(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return began_s, cpu_seconds() - began


# ---- lynx_net, without a codec


def lynx_endpoint(size: int, sockets: SocketOptions | None) -> Endpoint[Link]:
    """One side of a link with segments of `size` bytes."""
    return endpoint(segment_bytes=size, residual_window_bytes=max(4 * size, 4 << 20), sockets=sockets)


def lynx_receive(pipe: Connection, total: int, lanes: int, size: int, sockets: SocketOptions | None = None) -> None:
    """Serve one transfer."""

    async def serve() -> None:
        server = await lynx_endpoint(size, sockets).serve("tcp://127.0.0.1:0")
        pipe.send(int(server.url.rpartition(":")[2]))
        transfer = await anext(aiter(server))
        began = cpu_seconds()
        await transfer.complete
        pipe.send((time.monotonic(), cpu_seconds() - began))
        await transfer.link.closed()
        await server.close()

    run(serve())


def lynx_send(
    port: int, total: int, lanes: int, size: int, sockets: SocketOptions | None = None
) -> tuple[float, float]:
    """Send pages of one segment each; start time and CPU seconds."""

    async def send() -> tuple[float, float]:
        side = lynx_endpoint(size, sockets)
        source = memoryview(bytes(range(256)) * (SOURCE_BYTES // 256))
        link = await side.connect(f"tcp://127.0.0.1:{port}", lanes=lanes)
        began_s, began = time.monotonic(), cpu_seconds()
        transfer = open_bytes(link, total // size, (size,))
        parts = [source[offset : offset + size] for offset in range(0, SOURCE_BYTES, size)]
        for first in range(0, total // size, PAGES_TOGETHER):
            await transfer.wait_for_room()
            pages = range(first, min(first + PAGES_TOGETHER, total // size))
            transfer.submit_all((page, 0, parts[page % len(parts)], (), None) for page in pages)
        await transfer.delivered
        spent = cpu_seconds() - began
        await side.close()
        return began_s, spent

    return run(send())


class Run(NamedTuple):
    """Gbit/s, and CPU seconds per GB of both processes and of the machine."""

    gbps: float
    cpu: float
    machine_cpu: float


def measure(
    receive: Callable[[Connection, int, int, int], None],
    send: Callable[[int, int, int, int], tuple[float, float]],
    total: int,
    lanes: int,
    size: int,
) -> Run:
    """One run."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=receive, args=(there, total, lanes, size), daemon=True)
    process.start()
    there.close()  # so that a receiver that dies ends the wait below
    port, machine_cpu = here.recv(), machine_cpu_seconds()
    began_s, sent_cpu = send(port, total, lanes, size)
    ended_s, received_cpu = here.recv()
    machine_cpu = machine_cpu_seconds() - machine_cpu
    process.join()
    gigabytes = total / 1e9
    return Run(gigabytes * 8 / (ended_s - began_s), (sent_cpu + received_cpu) / gigabytes, machine_cpu / gigabytes)


def main() -> None:
    """Run the rounds and print or write the figures."""
    parser = argparse.ArgumentParser(description="lynx_net over loopback beside raw sockets")
    parser.add_argument("--gib", type=float, default=4.0, help="GiB a run (default 4)")
    parser.add_argument("--lanes", type=int, default=min(8, os.cpu_count() or 1), help="connections")
    parser.add_argument("--segment-bytes", type=int, default=LinkConfig().segment_bytes, help="buffer and segment size")
    parser.add_argument("--unsent-bytes", type=int, help="SocketOptions.notsent_lowat_bytes (default: the library's)")
    parser.add_argument("--congestion-control", metavar="NAME", help="of all connections (SocketOptions)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind, in turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    size = options.segment_bytes
    if not 0 < size <= SOURCE_BYTES or SOURCE_BYTES % size:
        parser.error(f"--segment-bytes must divide {SOURCE_BYTES}, not be {size}")
    total = int(options.gib * GIB) // (size * options.lanes) * size * options.lanes
    control = options.congestion_control
    sockets = SocketOptions(notsent_lowat_bytes=options.unsent_bytes, congestion_control=control)
    sides = {
        "raw": (raw_receive, partial(raw_send, control=control)),
        "lynx": (partial(lynx_receive, sockets=sockets), partial(lynx_send, sockets=sockets)),
    }
    runs: dict[str, list[Run]] = {kind: [] for kind in sides}
    for round_ in range(options.rounds):
        for kind, (receive, send) in sides.items():
            runs[kind].append(measure(receive, send, total, options.lanes, size))
            gbps, cpu, machine_cpu = runs[kind][-1]
            costs = f"{cpu:.3f} CPU s/GB, {machine_cpu:.3f} of the machine"
            print(f"round {round_ + 1} {kind:5} {gbps:7.2f} Gbit/s  {costs}", flush=True)
    raw, lynx = (Run(*map(statistics.median, zip(*runs[kind], strict=True))) for kind in sides)
    ratios = [ours.gbps / theirs.gbps for theirs, ours in zip(runs["raw"], runs["lynx"], strict=True)]
    figures = {
        "machine": machine_facts(PACKAGES),
        "version": lynx_net.__version__,
        "lanes": options.lanes,
        "segment_bytes": size,
        "unsent_bytes": options.unsent_bytes,
        "congestion_control": control,
        "bytes": total,
        "raw_gbps": raw.gbps,
        "lynx_gbps": lynx.gbps,
        "ratio": statistics.median(ratios),
        "cpu_ratio": lynx.cpu / raw.cpu,
        "machine_cpu_ratio": lynx.machine_cpu / raw.machine_cpu,
        "rounds": runs,
    }
    print(
        f"raw {raw.gbps:.2f}, lynx_net {lynx.gbps:.2f} Gbit/s, ratio {figures['ratio']:.3f}, "
        f"CPU ratio {figures['cpu_ratio']:.3f}, of the machine {figures['machine_cpu_ratio']:.3f}"
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
