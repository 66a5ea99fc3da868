"""How fast anchors come, whose buffers are held until their residuals are in: `python -m perf.held --json FILE`.

Transfers of pages of two streams, without a codec, over loopback. A page's first stream lies in memory until its second
has come and both are decoded, so all anchors of a cache do. Memory that the receiver has not kept from transfers before
(`LinkConfig.kept_bytes`) comes from the kernel, page by page, while bytes are copied into it. Receivers that keep more
and less are measured in turn, each in processes of its own; of each the first transfer, which finds nothing kept, and
the median of those behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import lynx_net
from lynx_net import LinkConfig
from lynx_net.demo.results import machine_facts
from perf.bytelevel import PACKAGES, endpoint, open_bytes, run

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PAGE_BYTES = 1 << 20
SOURCE_PAGES = 64
"""Sent over and over."""
STREAMS = ("anchors", "residuals")


class Speeds(NamedTuple):
    """Gbit/s of both streams of a transfer, each from the end of what is before it."""

    anchors: float
    residuals: float


def receive(pipe: Connection, kept_bytes: int) -> None:
    """Serve transfers; tell when each had all of its first stream, and all."""

    async def serve() -> None:
        server = await endpoint(kept_bytes=kept_bytes).serve("tcp://127.0.0.1:0")
        pipe.send(server.url)
        async for transfer in server:
            await transfer.stream_ready(0)
            anchors_s = time.monotonic()
            await transfer.complete
            pipe.send((anchors_s, time.monotonic()))

    run(serve())


def measure(kept_bytes: int, pages: int, lanes: int, transfers: int) -> list[Speeds]:
    """Some transfers over one link."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=receive, args=(there, kept_bytes), daemon=True)
    process.start()
    there.close()  # so that a receiver that dies ends the waits below

    async def send() -> list[Speeds]:
        side = endpoint()
        link = await side.connect(here.recv(), lanes=lanes)
        source = memoryview(bytes(range(256)) * (SOURCE_PAGES * PAGE_BYTES // 256))
        parts = [source[at : at + PAGE_BYTES] for at in range(0, source.nbytes, PAGE_BYTES)]
        found = []
        for number in range(transfers):
            began_s = time.monotonic()
            transfer = open_bytes(link, pages, (PAGE_BYTES, PAGE_BYTES), request_id=str(number))
            for stream in range(len(STREAMS)):
                transfer.submit_all((page, stream, parts[page % len(parts)], (), None) for page in range(pages))
            await transfer.delivered
            anchors_s, complete_s = await asyncio.to_thread(here.recv)
            gigabits = pages * PAGE_BYTES * 8 / 1e9
            found.append(Speeds(gigabits / (anchors_s - began_s), gigabits / (complete_s - anchors_s)))
        await side.close()
        return found

    try:
        speeds: list[Speeds] = run(send())
    finally:
        process.terminate()
        process.join()
    return speeds


def main() -> None:
    """Run the rounds and print or write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512, help="of each stream of a transfer (default 512)")
    parser.add_argument("--lanes", type=int, default=1, help="connections (default 1)")
    parser.add_argument("--kept-mib", type=int, nargs="+", default=[256, LinkConfig().kept_bytes >> 20], metavar="MIB")
    parser.add_argument("--transfers", type=int, default=5, help="of one receiver, one behind the other (default 5)")
    parser.add_argument("--rounds", type=int, default=3, help="receivers of each kind, in turn (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    if min(options.mib, options.lanes, options.rounds, *options.kept_mib) < 1 or options.transfers < 2:
        parser.error("at least one page, lane and round, two transfers and 1 MiB to keep are needed")
    kinds = {f"{mib} MiB kept": mib << 20 for mib in options.kept_mib}
    runs: dict[str, list[list[Speeds]]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind, kept_bytes in kinds.items():
            runs[kind].append(measure(kept_bytes, options.mib, options.lanes, options.transfers))
    figures: dict[str, Any] = {}
    for kind, of_kind in runs.items():
        first = Speeds(*(median(one) for one in zip(*(speeds[0] for speeds in of_kind), strict=True)))
        later = Speeds(*(median(one) for one in zip(*(one for speeds in of_kind for one in speeds[1:]), strict=True)))
        figures[kind] = {"kept_bytes": kinds[kind], "first_gbps": first._asdict(), "later_gbps": later._asdict()}
        for name, speeds in (("first transfer", first), ("those behind it", later)):
            print(f"{kind:14} {name:16} anchors {speeds.anchors:5.1f}, residuals {speeds.residuals:5.1f} Gbit/s")
    if options.json:
        facts = {"machine": machine_facts(PACKAGES), "version": lynx_net.__version__, "lanes": options.lanes}
        options.json.write_text(json.dumps({**facts, "mib": options.mib, "figures": figures, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
