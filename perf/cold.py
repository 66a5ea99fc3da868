"""What raw sockets move where memory is in no cache: `python -m perf.cold [--pinned] [--json FILE]`.

The raw copy of `perf.loopback`, without checksums, between memory that is used over and over (64 MiB at the sender, a
buffer a lane at the receiver) and so much that no cache holds it: as where a device has written pages, or will read
them. With --pinned that is pinned memory. It bounds what `perf.gpu_pair` can move with as many lanes. Every round runs
all four.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lynx_net.demo.results import machine_facts
from perf.loopback import Run, measure, raw_receive, raw_send

PIECE_BYTES = 1 << 20
KINDS = ("warm", "cold")
_OWNERS: list[Any] = []
"""Of pinned memory, for as long as the process lives."""


def cold_memory(lanes: int, size_bytes: int, *, pinned: bool) -> memoryview:
    """So much, in whole pieces for every lane, whose pages are there before any clock runs."""
    total = max(size_bytes // (lanes * PIECE_BYTES), 1) * lanes * PIECE_BYTES
    if pinned:
        from lynx_gpu.events import Runtime

        memory = Runtime(0).pinned(total)
        _OWNERS.append(memory)
        view = memoryview((ctypes.c_ubyte * total).from_address(memory.address)).cast("B")
    else:
        view = memoryview(np.empty(total, np.uint8).data)
    np.frombuffer(view, np.uint8)[:] = 1
    return view


def main() -> None:
    """Run the rounds and print or write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gib", type=float, default=8.0, help="moved in a run (default 8)")
    parser.add_argument("--cold-gib", type=float, default=2.0, help="of a side whose memory is cold (default 2)")
    parser.add_argument("--pinned", action="store_true", help="cold memory is pinned: needs a CUDA device")
    parser.add_argument("--congestion-control", metavar="NAME", default="reno", help="default: reno, as lynx_net has")
    options = parser.parse_args()
    total, cold_bytes = int(options.gib * 2**30), int(options.cold_gib * 2**30)
    if options.lanes < 1 or min(total, cold_bytes) < options.lanes * PIECE_BYTES:
        parser.error("a lane needs at least a MiB")
    if options.pinned:
        from lynx_gpu import device_count

        if device_count() == 0:
            raise SystemExit("there is no CUDA device here, or no CuPy")
    cold = partial(cold_memory, size_bytes=cold_bytes, pinned=options.pinned)
    source = cold(options.lanes)
    sends = {
        "warm": partial(raw_send, control=options.congestion_control),
        "cold": partial(raw_send, control=options.congestion_control, source=source),
    }
    receives = {"warm": raw_receive, "cold": partial(raw_receive, memory=cold)}
    runs: dict[str, list[Run]] = {f"{one} to {other}": [] for one, other in itertools.product(KINDS, KINDS)}
    for _ in range(options.rounds):
        for name, found in runs.items():
            one, _, other = name.split()
            found.append(measure(receives[other], sends[one], total, options.lanes, PIECE_BYTES))
    medians = {name: Run(*map(median, zip(*found, strict=True))) for name, found in runs.items()}
    print(f"{options.lanes} lanes, cold memory {'pinned' if options.pinned else 'ordinary'}")
    for name, (gbps, cpu, _) in medians.items():
        share = gbps / medians["warm to warm"].gbps
        print(f"{name:14}{gbps:7.1f} Gbit/s, {share:.2f} of warm to warm, {cpu:.3f} CPU s/GB")
    if options.json:
        facts = {"machine": machine_facts(()), "lanes": options.lanes, "pinned": options.pinned}
        gbps = {name: [run.gbps for run in found] for name, found in runs.items()}
        options.json.write_text(json.dumps({**facts, "gbps": gbps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
