"""How exactly a link keeps its rate: `python -m perf.pacing --json FILE`.

A receiver counts what arrives of an endless backlog, headers included, over windows of two seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lynx_net
from lynx_net.demo.results import machine_facts
from lynx_net.wire.frames import HEADER_BYTES
from lynx_net.wire.pacing import parse_rate
from perf.bytelevel import PACKAGES, endpoint, open_bytes, run

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

WINDOW_S = 2.0
PAGE_BYTES = 1 << 20
RATES = ("100Mbit", "300Mbit", "1Gbit", "5Gbit", "10Gbit")


def receive(pipe: Connection, windows: int) -> None:
    """Count the bytes of one transfer over some windows."""

    async def serve() -> list[float]:
        side = endpoint()
        server = await side.serve("tcp://127.0.0.1:0")
        pipe.send(server.url)
        transfer = await anext(aiter(server))
        await asyncio.sleep(0.5)
        measured: list[float] = []
        for _ in range(windows):
            began_s, before = time.monotonic(), transfer.stats.total_bytes + HEADER_BYTES * transfer.stats.segments
            await asyncio.sleep(WINDOW_S)
            after = transfer.stats.total_bytes + HEADER_BYTES * transfer.stats.segments
            measured.append((after - before) * 8 / (time.monotonic() - began_s))
        transfer.cancel("measured")
        await server.close()
        return measured

    pipe.send(run(serve()))


async def send(url: str, rate: str, lanes: int, pages: int) -> None:
    """A backlog that lasts until the receiver has measured; a receiver takes time for every page that is offered."""
    side = endpoint(rate)
    link = await side.connect(url, lanes=lanes)
    source = memoryview(bytes(PAGE_BYTES))
    transfer = open_bytes(link, pages, (PAGE_BYTES,))
    for page in range(pages):
        await transfer.wait_for_room()
        transfer.submit(page, 0, source)
    await transfer.delivered
    await side.close()


def measure(rate: str, lanes: int, windows: int) -> dict[str, Any]:
    """One rate, in a fresh pair of processes."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(there, windows), daemon=True)
    process.start()
    url = here.recv()
    wanted = parse_rate(rate)
    assert wanted is not None
    pages = int(wanted / 8 * 2 * WINDOW_S * (windows + 1) / PAGE_BYTES) + 64
    sender = multiprocessing.get_context("spawn").Process(
        target=run_sender, args=(url, rate, lanes, pages), daemon=True
    )
    sender.start()
    measured = here.recv()
    process.join(5)
    sender.join(5)
    worst = max(measured, key=lambda bps: abs(bps - wanted))
    return {"rate_bps": wanted, "measured_bps": worst, "error": worst / wanted - 1, "windows_bps": measured}


def run_sender(url: str, rate: str, lanes: int, pages: int) -> None:
    """The sending process; the receiver ends the transfer when it has measured."""
    with contextlib.suppress(lynx_net.LynxError):
        run(send(url, rate, lanes, pages))


def main() -> None:
    """Run all rates and print or write the figures."""
    parser = argparse.ArgumentParser(description="How exactly a link keeps its rate")
    parser.add_argument("--rates", nargs="+", default=RATES, help=f"rates (default {' '.join(RATES)})")
    parser.add_argument("--lanes", type=int, default=1, help="connections (default 1)")
    parser.add_argument("--windows", type=int, default=3, help="windows of two seconds each (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    figures = []
    for rate in options.rates:
        figures.append(measure(rate, options.lanes, options.windows))
        one = figures[-1]
        print(
            f"{rate:>8}: {one['measured_bps'] / 1e6:9.1f} Mbit/s in the worst window, {one['error']:+.2%}", flush=True
        )
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine_facts(PACKAGES), "lanes": options.lanes, "rates": figures}, indent=1)
        )


if __name__ == "__main__":
    main()
