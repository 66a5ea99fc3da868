"""An urgent anchor behind a backlog of residuals to the same peer: `python -m perf.priority --json FILE`.

Times run from the offer of a 64 KiB transfer to the news that the receiver has all of it in place, alone and while
4 x 64 MiB of residual are queued and on their way. `--rate` paces the link.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lynx_net.demo.results import machine_facts
from perf.bytelevel import PACKAGES, endpoint, open_bytes, run

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from lynx_net.aio.link import Link

URGENT_BYTES = 64 * 1024
BACKLOG_TRANSFERS = 4
BACKLOG_PAGES = 64
PAGE_BYTES = 1 << 20
TINY_BYTES = 64


def receive(pipe: Connection) -> None:
    """Take whatever comes until the link ends."""

    async def serve() -> None:
        side = endpoint()
        server = await side.serve("tcp://127.0.0.1:0")
        pipe.send(server.url)
        link = await server.accept()
        await link.closed()
        await server.close()

    run(serve())


async def keep_busy(link: Link, source: memoryview, number: int) -> None:
    """Residual after residual, each in a transfer whose anchor is next to nothing."""
    count = 0
    while True:
        transfer = open_bytes(link, BACKLOG_PAGES, (TINY_BYTES, PAGE_BYTES), f"backlog-{number}-{count}")
        for page in range(BACKLOG_PAGES):
            transfer.submit(page, 0, source[:TINY_BYTES])
        for page in range(BACKLOG_PAGES):
            transfer.submit(page, 1, source[:PAGE_BYTES])
        await transfer.delivered
        count += 1


async def urgent(link: Link, source: memoryview, name: str) -> float:
    """Milliseconds until an urgent anchor is known to be in place."""
    began_s = time.monotonic()
    transfer = open_bytes(link, 1, (URGENT_BYTES,), name)
    transfer.submit(0, 0, source[:URGENT_BYTES])
    await transfer.delivered
    return (time.monotonic() - began_s) * 1e3


async def measure(url: str, rate: str | None, lanes: int, samples: int) -> dict[str, Any]:
    """All figures of one run."""
    side = endpoint(rate)
    link = await side.connect(url, lanes=lanes)
    source = memoryview(bytes(PAGE_BYTES))
    idle = []
    for index in range(samples):
        idle.append(await urgent(link, source, f"idle-{index}"))
        await asyncio.sleep(0.005)
    busy = [asyncio.create_task(keep_busy(link, source, number)) for number in range(BACKLOG_TRANSFERS)]
    await asyncio.sleep(0.5)
    loaded = []
    for index in range(samples):
        loaded.append(await urgent(link, source, f"loaded-{index}"))
        await asyncio.sleep(0.013)
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    await side.close()
    return {
        "idle_ms": statistics.median(idle),
        "loaded_p50_ms": statistics.median(loaded),
        "loaded_p99_ms": statistics.quantiles(loaded, n=100)[98],
        "loaded_max_ms": max(loaded),
    }


def main() -> None:
    """Run and print or write the figures."""
    parser = argparse.ArgumentParser(description="An urgent anchor behind a backlog of residuals")
    parser.add_argument("--rate", help="pace the link, e.g. 1Gbit (default: unpaced)")
    parser.add_argument("--lanes", type=int, default=2, help="connections (default 2)")
    parser.add_argument("--samples", type=int, default=200, help="urgent transfers of each kind (default 200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(there,), daemon=True)
    process.start()
    figures = run(measure(here.recv(), options.rate, options.lanes, options.samples))
    process.join(5)
    print(
        f"alone {figures['idle_ms']:.2f} ms; behind the backlog {figures['loaded_p50_ms']:.2f} ms at the median, "
        f"{figures['loaded_p99_ms']:.2f} at p99, {figures['loaded_max_ms']:.2f} at worst"
    )
    if options.json:
        facts = {
            "machine": machine_facts(PACKAGES),
            "rate": options.rate,
            "lanes": options.lanes,
            "samples": options.samples,
        }
        options.json.write_text(json.dumps(facts | figures, indent=1))


if __name__ == "__main__":
    main()
