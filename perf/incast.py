"""Eight senders at once, one receiver: `python -m perf.incast --json FILE` (needs root, see docs/netem.md).

Every sender is a process on a host of its own, with one link to the receiver, whose line is the bottleneck. At one
moment all of them offer a transfer of an anchor and a residual stream. Two figures count:

    anchor_ratio          time from then until the last anchor is in, over all anchor bytes at the rate of the line
    residual_early_share  share of the residual bytes whose segments had begun to arrive by then

The rate of the line counts Ethernet, IP and TCP headers as well, so that no transport gets below 1.05.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lynx_net.demo.results import machine_facts
from lynx_net.errors import LynxError
from lynx_net.wire.pacing import parse_rate
from perf.bytelevel import PACKAGES, Swallow, endpoint, open_bytes, run
from perf.netem import Host, Network, enter, network

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

__all__ = ["Incast", "measure"]

SENDERS = 8
PAGE_BYTES = 256 * 1024
MIB = 1 << 20
START_S = 0.3
"""From the order to the common start; every process must have read the order by then."""
PATIENCE_S = 60.0
"""A child process that says nothing for this long has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incast:
    """What every sender sends, and how often.

    Attributes:
        senders: how many, each a host.
        anchor_bytes: of each transfer, a multiple of PAGE_BYTES.
        residual_bytes: of each transfer, a multiple of its number of pages.
        lanes: connections of each link.
        rounds: how often it is done, on the same links.
    """

    senders: int = SENDERS
    anchor_bytes: int = 16 * MIB
    residual_bytes: int = 16 * MIB
    lanes: int = 1
    rounds: int = 5

    def __post_init__(self) -> None:
        if min(self.senders, self.anchor_bytes, self.residual_bytes, self.lanes, self.rounds) < 1:
            raise LynxError("senders, anchor, residual, lanes and rounds must be at least 1")
        if self.anchor_bytes % PAGE_BYTES or self.residual_bytes % self.pages:
            raise LynxError(
                f"an anchor must be a multiple of {PAGE_BYTES} bytes, a residual one of {self.pages}, its pages"
            )

    @property
    def pages(self) -> int:
        """Pages of a transfer."""
        return self.anchor_bytes // PAGE_BYTES

    @property
    def page_bytes(self) -> tuple[int, int]:
        """Anchor and residual bytes of a page."""
        return PAGE_BYTES, self.residual_bytes // self.pages


def receive(host: Host, incast: Incast, pipe: Connection) -> None:
    """Serve on the receiving host and time every round."""
    enter(host)

    class Timed(Swallow):
        """Knows when its last anchor came, and what had come of all residuals by then."""

        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            self.anchors = 0
            self.anchor_in_s = 0.0
            self.residual_bytes = 0
            current.append(self)

        def pages_arrived(self, pages: Sequence[int], stream: int) -> None:
            if stream == 0:
                self.anchors += len(pages)
                if self.anchors == incast.pages:
                    self.anchor_in_s = time.monotonic()
                    self.residual_bytes = sum(map(begun_residual, current))
            super().pages_arrived(pages, stream)

    current: list[Timed] = []

    def begun_residual(transfer: Timed) -> int:
        # Not `stats`, which count whole segments only. Called with the lock that all links of an endpoint share.
        state = transfer.link.core.incoming.state(transfer.id)
        return incast.residual_bytes if state is None else state.windows[1].received

    async def serve() -> None:
        side = endpoint(incoming=Timed)
        server = await side.serve(f"tcp://{host.address}:0")
        pipe.send(server.url)
        transfers = aiter(server)
        for _ in range(incast.rounds):
            for _ in range(incast.senders):
                await anext(transfers)
            for transfer in current:
                await transfer.complete
            end_s = time.monotonic()
            last = max(current, key=lambda transfer: transfer.anchor_in_s)
            current.clear()
            pipe.send((last.anchor_in_s, last.residual_bytes, end_s))
        await server.close()

    run(serve())


def send(host: Host, incast: Incast, url: str, pipe: Connection) -> None:
    """Connect, then send a transfer at each time that the pipe names."""
    enter(host)

    async def work() -> None:
        side = endpoint()
        link = await side.connect(url, lanes=incast.lanes)
        sources = [memoryview(bytes(size)) for size in incast.page_bytes]
        pipe.send("connected")
        for number in range(incast.rounds):
            start_s = await asyncio.to_thread(pipe.recv)
            await asyncio.sleep(start_s - time.monotonic())
            transfer = open_bytes(link, incast.pages, incast.page_bytes, f"{host.name}-{number}")
            for stream, source in enumerate(sources):
                for page in range(incast.pages):
                    transfer.submit(page, stream, source)
            await transfer.delivered
        await side.close()

    run(work())


def measure(net: Network, rate_bps: float, incast: Incast) -> dict[str, Any]:
    """All rounds on a network with one host more than senders; the receiver is its first host."""
    context = multiprocessing.get_context("spawn")
    receiver, *senders = net.hosts
    with contextlib.ExitStack() as stack:

        def start(target: Any, *arguments: Any) -> Connection:
            here: Any  # on Windows a pipe is of another class
            here, there = context.Pipe()
            process = context.Process(target=target, args=(*arguments, there), daemon=True)
            process.start()
            there.close()
            stack.callback(_end, process)
            return stack.enter_context(here)

        results = start(receive, receiver, incast)
        url = _read(results)
        pipes = [start(send, host, incast, url) for host in senders]
        for pipe in pipes:
            _read(pipe)
        rounds = []
        for _ in range(incast.rounds):
            start_s = time.monotonic() + START_S
            for pipe in pipes:
                pipe.send(start_s)
            rounds.append((start_s, *_read(results)))
    anchor_s = incast.senders * incast.anchor_bytes * 8 / rate_bps
    residual_bytes = incast.senders * incast.residual_bytes
    all_s = anchor_s + residual_bytes * 8 / rate_bps
    anchor_ratios = [(anchors_in_s - start_s) / anchor_s for start_s, anchors_in_s, _, _ in rounds]
    early_shares = [early_bytes / residual_bytes for _, _, early_bytes, _ in rounds]
    return {
        "anchor_ratio": statistics.median(anchor_ratios),
        "residual_early_share": statistics.median(early_shares),
        "total_ratio": statistics.median((end_s - start_s) / all_s for start_s, _, _, end_s in rounds),
        "anchor_ratios": anchor_ratios,
        "residual_early_shares": early_shares,
    }


def _read(pipe: Connection) -> Any:
    """What a child says next; raises LynxError if it has ended or hangs, after its own message on stderr."""
    try:
        if pipe.poll(PATIENCE_S):
            return pipe.recv()
    except EOFError:
        raise LynxError("a process of the benchmark has ended early; its message is above") from None
    raise LynxError(f"a process of the benchmark said nothing for {PATIENCE_S:g} s")


def _end(process: Any) -> None:
    process.join(2)
    if process.is_alive():
        process.kill()
        process.join()


def main() -> int:
    """Run and print or write the figures."""
    parser = argparse.ArgumentParser(description="Anchors of many senders before the residuals of any")
    parser.add_argument("--senders", type=int, default=SENDERS, help=f"sending hosts (default {SENDERS})")
    parser.add_argument("--anchor-mib", type=int, default=16, help="anchor of each sender (default 16)")
    parser.add_argument("--residual-mib", type=int, default=16, help="residual of each sender (default 16)")
    parser.add_argument("--rate", default="1Gbit", help="of the receiver's line (default 1Gbit)")
    parser.add_argument("--delay", default="0ms", help="one way (default none)")
    parser.add_argument("--queue", default="25ms", help="of the switch, as time at the rate (default 25ms)")
    parser.add_argument(
        "--shaper", choices=("tbf", "htb"), help="what keeps the rate (default: tbf if the kernel has it)"
    )
    parser.add_argument("--lanes", type=int, default=1, help="connections of each link (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="how often (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    try:
        incast = Incast(
            senders=options.senders,
            anchor_bytes=options.anchor_mib * MIB,
            residual_bytes=options.residual_mib * MIB,
            lanes=options.lanes,
            rounds=options.rounds,
        )
        rate_bps = parse_rate(options.rate)
        assert rate_bps is not None
        shape = {"rate": rate_bps, "delay": options.delay, "queue": options.queue, "shaper": options.shaper}
        with network(options.senders + 1, **shape) as net:
            print(f"netem: {net.description}", file=sys.stderr, flush=True)
            figures = measure(net, rate_bps, incast) | {"network": net.description}
    except LynxError as error:
        print(f"incast: {error}", file=sys.stderr)
        return 1
    print(
        f"all anchors in after {figures['anchor_ratio']:.3f} x their bytes at the rate of the line "
        f"(worst {max(figures['anchor_ratios']):.3f}); until then {figures['residual_early_share']:.2%} of the "
        f"residual bytes (worst {max(figures['residual_early_shares']):.2%}); "
        f"everything after {figures['total_ratio']:.3f} x"
    )
    if options.json:
        facts = {
            "machine": machine_facts(PACKAGES),
            "senders": options.senders,
            "anchor_mib": options.anchor_mib,
            "residual_mib": options.residual_mib,
            "lanes": options.lanes,
            "rounds": options.rounds,
        }
        options.json.write_text(json.dumps(facts | figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
