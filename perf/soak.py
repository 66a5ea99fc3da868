"""Ten thousand transfers and a thousand aborts leave nothing behind: `python -m perf.soak --json FILE`.

Two processes, one link of several TCP lanes. Of the aborts half come from the sender (an error in its block, a
cancelled task) and half from the receiver, each at a random moment. After a warm-up, and at the end, both sides count
their resident memory, file descriptors, threads and tasks; every cache that was not aborted is compared with the first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import lynx_net
from lynx_net import CacheLayout, LynxError
from lynx_net.demo.results import machine_facts
from lynx_net.errors import ConnectionLostError
from perf.bytelevel import PACKAGES, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.connection import Connection

    from lynx_net import KVLink
    from lynx_net.aio.transfer import IncomingTransfer

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LAYOUTS = tuple(
    CacheLayout(layers=layers, tokens=tokens, heads=2, key_size=16, value_size=16)
    for layers, tokens in ((2, 1), (3, 70), (4, 300))
)
MOMENT_S = 0.004
"""Aborts come up to this long after the transfer began; about as long as one takes."""

SETTLE_S = 0.1
"""For tasks that have done their work and not yet ended."""

FULL = {"transfers": 10_000, "aborts": 1_000}
LIMIT_MB = 20


class Deliberate(Exception):
    """What the sender's application fails with."""


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


async def sample() -> dict[str, float]:
    """What this process holds when nothing is open any more."""
    await asyncio.sleep(SETTLE_S)
    gc.collect()
    return {
        "rss_mb": resident_bytes() / 1e6,
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()),
    }


def arrays_of(layout: CacheLayout) -> list[tuple[Any, Any]]:
    """The same numbers for every transfer of a layout."""
    rng = np.random.default_rng(layout.tokens)
    shape = layout.array_shape("key")
    return [
        (rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)) for _ in range(layout.layers)
    ]


# ---- the receiving process


async def serve(pipe: Connection, seed: int) -> None:
    """Take whatever comes, give up what says so, and answer with a sample where one is asked for."""
    rng = random.Random(seed)
    first: dict[int, bytes] = {}
    open_tasks: set[asyncio.Task[None]] = set()
    wrong: list[str] = []
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        pipe.send(server.url)
        async for transfer in server:
            if transfer.offer.meta.get("sample"):
                await transfer.closed()
                await asyncio.gather(*open_tasks)
                del transfer
                pipe.send(await sample())
            elif transfer.offer.meta.get("end"):
                break
            else:
                task = asyncio.create_task(_receive(transfer, rng.random(), first, wrong))
                open_tasks.add(task)
                task.add_done_callback(open_tasks.discard)
    pipe.send(wrong)


async def _receive(transfer: IncomingTransfer, chance: float, first: dict[int, bytes], wrong: list[str]) -> None:
    kind = transfer.offer.meta["end_by"]
    if kind == "receiver":
        await _some_moment(transfer, chance)
        transfer.cancel("enough")
        await transfer.closed()
        return
    try:
        await transfer.complete
    except LynxError as error:
        if kind == "nobody":
            wrong.append(f"{transfer.offer.request_id}: {error!r}")
        return
    layout = transfer.offer.layout
    got = b"".join(
        transfer.target.view(layer, kind).tobytes() for layer in range(layout.layers) for kind in layout.kinds
    )
    if got != first.setdefault(layout.tokens, got):
        wrong.append(f"{transfer.offer.request_id}: other bytes than the first of its kind")


async def _some_moment(transfer: IncomingTransfer, chance: float) -> None:
    with contextlib.suppress(LynxError):
        if chance < 0.3:
            await transfer.layer_ready(0)
        elif chance < 0.5:
            await transfer.anchor_ready
        else:
            await asyncio.sleep((chance - 0.5) * 2 * MOMENT_S)


def receiving_process(pipe: Connection, seed: int) -> None:
    """Entry of the other process."""
    run(serve(pipe, seed))


# ---- the sending process


async def send_all(
    link: KVLink, kinds: Iterable[tuple[int, str]], rng: random.Random, at_once: int, errors: list[str]
) -> None:
    """Send one transfer for each kind, some at once; what must not fail and does is written down."""
    caches = [(layout, arrays_of(layout)) for layout in LAYOUTS]
    left = iter(kinds)

    async def worker() -> None:
        for number, kind in left:
            layout, arrays = rng.choice(caches)
            task = asyncio.create_task(_send(link, f"r{number}", layout, arrays, kind, rng.random()))
            if kind == "cancel":
                await asyncio.sleep(rng.random() * MOMENT_S)
                task.cancel()
            await asyncio.wait([task])
            error = None if task.cancelled() else task.exception()
            if error is not None and (kind == "nobody" or not isinstance(error, LynxError | Deliberate)):
                errors.append(f"r{number}, ended by {kind}: {error!r}")

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())


async def _send(
    link: KVLink, name: str, layout: CacheLayout, arrays: list[tuple[Any, Any]], kind: str, chance: float
) -> None:
    async with link.send(name, layout, meta={"end_by": kind}) as sending:
        for layer, (keys, values) in enumerate(arrays):
            if kind == "error" and layer == int(chance * layout.layers):
                raise Deliberate
            await sending.write(layer, keys, values)


async def soak(
    hear: Callable[[], Any], transfers: int, aborts: int, at_once: int, lanes: int, seed: int
) -> dict[str, Any]:
    """Drive the other process, which `hear` listens to; the samples of both, before and after."""
    rng = random.Random(seed)
    errors: list[str] = []
    plan = ["nobody"] * transfers + [("receiver", "cancel", "receiver", "error")[index % 4] for index in range(aborts)]
    rng.shuffle(plan)
    numbered = list(enumerate(plan))
    warm_up = len(plan) // 5
    url = hear()
    samples: list[dict[str, dict[str, float]]] = []
    began_s = time.monotonic()
    async with lynx_net.connect(url, lanes=lanes) as link:
        for part in (numbered[:warm_up], numbered[warm_up:]):
            await send_all(link, part, rng, at_once, errors)
            await _mark(link, sample=True)
            received = await asyncio.to_thread(hear)
            samples.append({"sender": await sample(), "receiver": received})
        elapsed_s = time.monotonic() - began_s
        await _mark(link, end=True)
    errors += await asyncio.to_thread(hear)
    return {"samples": samples, "errors": errors, "elapsed_s": elapsed_s}


async def _mark(link: KVLink, **meta: bool) -> None:
    """A transfer with nothing in it, to say something in order."""
    layout = CacheLayout(layers=0, tokens=0, heads=1, key_size=1, value_size=1)
    with contextlib.suppress(ConnectionLostError):
        async with link.send("mark", layout, meta=meta):
            pass


def measure(transfers: int, aborts: int, at_once: int = 16, lanes: int = 2, seed: int = 1) -> dict[str, Any]:
    """Run both processes; growth is that of the side where it is larger."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receiving_process, args=(there, seed), daemon=True)
    process.start()
    there.close()
    try:
        result = run(soak(here.recv, transfers, aborts, at_once, lanes, seed))
        process.join(10)
    finally:
        process.kill()
        process.join()
        process.close()
        here.close()
    before, after = result["samples"]
    growth = {
        name: max((after[side][name] - before[side][name] for side in before), key=abs)
        for name in ("rss_mb", "fds", "threads", "tasks")
    }
    return {
        "transfers": transfers,
        "aborts": aborts,
        "seconds": result["elapsed_s"],
        "rss_growth_mb": growth["rss_mb"],
        "fd_growth": growth["fds"],
        "threads_growth": growth["threads"],
        "tasks_growth": growth["tasks"],
        "errors": result["errors"],
        "before": before,
        "after": after,
    }


def main() -> int:
    """Run the soak and print or write the figures; the exit code says whether everything held."""
    parser = argparse.ArgumentParser(description="Many transfers and aborts leave nothing behind")
    parser.add_argument("--transfers", type=int, default=FULL["transfers"], help="transfers that complete")
    parser.add_argument("--aborts", type=int, default=FULL["aborts"], help="transfers that one side gives up")
    parser.add_argument("--at-once", type=int, default=16, help="transfers open at the same time (default 16)")
    parser.add_argument("--lanes", type=int, default=2, help="connections (default 2)")
    parser.add_argument("--seed", type=int, default=1, help="of the order and the moments")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    figures = measure(options.transfers, options.aborts, options.at_once, options.lanes, options.seed)
    figures = {"machine": machine_facts(PACKAGES), "version": lynx_net.__version__, **figures}
    print(
        f"{options.transfers} transfers and {options.aborts} aborts in {figures['seconds']:.1f} s: resident memory "
        f"{figures['rss_growth_mb']:+.1f} MB, file descriptors {figures['fd_growth']:+d}, "
        f"threads {figures['threads_growth']:+d}, tasks {figures['tasks_growth']:+d}"
    )
    for error in figures["errors"][:10]:
        print(error)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    # A task that was ending when the first count was taken makes one fewer; that is no leak.
    counts = figures["fd_growth"] == figures["threads_growth"] == 0 and figures["tasks_growth"] <= 0
    held = not figures["errors"] and figures["rss_growth_mb"] <= LIMIT_MB and counts
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
