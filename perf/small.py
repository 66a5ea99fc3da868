"""What a small transfer costs on a warm link: `python -m perf.small --json FILE`.

A round trip runs from the offer of a transfer of one page to the news that the receiver has it in place. The rate is
that of many such transfers, so many of them open at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

from lynx_net.demo.results import machine_facts
from perf.bytelevel import PACKAGES, endpoint, open_bytes, run
from perf.priority import receive

WARM_UP = 300


async def measure(url: str, size: int, samples: int, at_once: int) -> dict[str, Any]:
    """All figures of one run."""
    side = endpoint()
    link = await side.connect(url)
    page = memoryview(bytes(index % 251 for index in range(size)))

    async def transfer(name: str) -> float:
        began_s = time.monotonic()
        sending = open_bytes(link, 1, (size,), name)
        sending.submit(0, 0, page)
        await sending.delivered
        return (time.monotonic() - began_s) * 1e3

    for index in range(WARM_UP):
        await transfer(f"warm-{index}")
    alone = [await transfer(f"alone-{index}") for index in range(samples)]

    async def worker(number: int) -> None:
        for index in range(samples * 4 // at_once):
            await transfer(f"{number}-{index}")

    began_s = time.monotonic()
    await asyncio.gather(*(worker(number) for number in range(at_once)))
    elapsed_s = time.monotonic() - began_s
    await side.close()
    return {
        "round_trip_p50_ms": statistics.median(alone),
        "round_trip_p99_ms": statistics.quantiles(alone, n=100)[98],
        "transfers_per_s": samples * 4 // at_once * at_once / elapsed_s,
    }


def main() -> None:
    """Run and print or write the figures."""
    parser = argparse.ArgumentParser(description="Round trip and rate of small transfers")
    parser.add_argument("--bytes", type=int, default=4096, help="bytes of a transfer (default 4096)")
    parser.add_argument("--samples", type=int, default=1000, help="round trips (default 1000)")
    parser.add_argument("--at-once", type=int, default=64, help="transfers open at a time for the rate (default 64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(there,), daemon=True)
    process.start()
    there.close()
    figures = run(measure(here.recv(), options.bytes, options.samples, options.at_once))
    process.join(5)
    print(
        f"{options.bytes} bytes: {figures['round_trip_p50_ms']:.2f} ms at the median, "
        f"{figures['round_trip_p99_ms']:.2f} at p99; {figures['transfers_per_s']:.0f} a second "
        f"with {options.at_once} at once"
    )
    if options.json:
        facts = {"machine": machine_facts(PACKAGES), "bytes": options.bytes, "at_once": options.at_once}
        options.json.write_text(json.dumps(facts | figures, indent=1))


if __name__ == "__main__":
    main()
