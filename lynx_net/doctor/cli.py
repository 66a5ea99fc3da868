"""The doctor as a command: from its options to its exit code."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lynx_net.demo.results import machine_facts
from lynx_net.doctor.facts import DoctorError
from lynx_net.doctor.findings import diagnose, speed
from lynx_net.doctor.probe import measure, self_test_server
from lynx_net.doctor.serving import serving
from lynx_net.errors import LynxError
from lynx_net.transport import Address
from lynx_net.wire.pacing import parse_rate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from lynx_net.doctor.facts import Facts
    from lynx_net.doctor.findings import Finding

__all__ = ["DESCRIPTION", "add_arguments", "report_lines", "run"]

DESCRIPTION = """\
Measures a link and says why it is below its rate: throughput over 1, 2, 4 ... lanes beside a raw TCP copy, small
transfers, what both kernels and hosts say, and what to change.

It sends from here to there, unpaced and for some seconds, so run it where the sender runs. At the other end it needs
a serving side of its own, since an ordinary server declines what its codecs do not know:
  there:  lynx-net doctor --serve tcp://0.0.0.0:7000    (opens port 7001 too, for the raw copy; Ctrl-C ends it)
  here:   lynx-net doctor tcp://there:7000 --rate 10Gbit
Without an address it measures this host over loopback.
The serving side asks nobody who they are: use it inside a network you trust, and only while you measure."""

MAX_LANES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.add_argument(
        "url", nargs="?", metavar="URL", help="tcp://host:port of a serving doctor; loopback without it"
    )
    parser.add_argument("--serve", metavar="URL", help="be the other end, on this address, until Ctrl-C")
    parser.add_argument(
        "--rate", help="what the link should reach, for example 10Gbit; without it, the raw copy is the measure"
    )
    parser.add_argument("--lanes", type=int, default=4, help="the most lanes to try (default 4)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured and found")


def run(arguments: argparse.Namespace) -> int:
    """Measure or serve; returns the exit code: 0, 1 after an error, 130 after Ctrl-C. Findings are no error."""
    try:
        asyncio.run(_main(arguments))
    except LynxError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename or 'operating system'}: {error.strerror or error}")
    except KeyboardInterrupt:
        return 0 if arguments.serve else 128 + signal.SIGINT
    return 0


def _failed(sentence: str) -> int:
    print(f"lynx_net doctor: {sentence}", file=sys.stderr, flush=True)
    return 1


async def _main(arguments: argparse.Namespace) -> None:
    if arguments.serve is not None:
        if arguments.url is not None:
            raise DoctorError("either measure an address or serve one")
        async with serving(_tcp(arguments.serve)) as url:
            print(f"serving on {url}; measure from the sender's host: lynx-net doctor {url}", flush=True)
            await asyncio.Event().wait()
    if not 1 <= arguments.lanes <= MAX_LANES or not 0 < arguments.seconds <= 60:
        raise DoctorError(f"--lanes must be 1 to {MAX_LANES}, --seconds above 0 and at most 60")
    wanted_bps = parse_rate(arguments.rate)
    lane_counts = [*(2**power for power in range(7) if 2**power < arguments.lanes), arguments.lanes]

    async def examine(url: str) -> Facts:
        return await measure(url, wanted_bps=wanted_bps, lane_counts=lane_counts, seconds=arguments.seconds, step=_step)

    if arguments.url is None:
        async with self_test_server() as url:
            facts = await examine(url)
    else:
        facts = await examine(_tcp(arguments.url))
    findings = diagnose(facts)
    print("\n".join(report_lines(facts, findings)), flush=True)
    if arguments.json is not None:
        write_json(arguments.json, facts, findings)
        _step(f"written to {arguments.json}")


def _tcp(url: str) -> str:
    if Address.parse(url).scheme != "tcp":
        raise DoctorError(f"{url}: the doctor knows tcp:// only")
    return url


def _step(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def write_json(file: Path, facts: Facts, findings: Sequence[Finding]) -> None:
    """Write everything that was measured and found, with the machine."""
    data: dict[str, Any] = {
        "machine": machine_facts(("numpy", "xxhash")),
        "facts": facts.to_json(),
        "findings": [asdict(finding) for finding in findings],
    }
    file.write_text(json.dumps(data, indent=2) + "\n")


def report_lines(facts: Facts, findings: Sequence[Finding]) -> list[str]:
    """The report for people."""
    best = facts.best
    held = "the wanted rate" if facts.wanted_bps else "the raw copy" if facts.raw_bps else None
    verdict = f"; {held}, {speed(facts.target_bps)}, is {'reached' if facts.reaches else 'NOT reached'}" if held else ""
    lines = [
        f"link to {facts.url}: {speed(best.bps)} at best, with lanes={best.lanes}{verdict}",
        "",
        "  lanes       lynx_net        raw TCP  ratio  credit   idle  cores here, there",
    ]
    for one in facts.runs:
        raw = "-" if one.raw_bps is None else speed(one.raw_bps)
        ratio = "-" if one.raw_bps is None else f"{one.bps / one.raw_bps:.2f}"
        lines.append(
            f"  {one.lanes:5} {speed(one.bps):>14} {raw:>14} {ratio:>6} {one.credit_share:7.0%} {one.idle_share:6.0%}"
            f"  {one.cores_here:.2f}, {one.cores_there:.2f}"
        )
    lines += ["", *_kernel_lines(facts), ""]
    if not findings:
        return [*lines, "nothing found that limits it"]
    lines.append("findings:")
    for number, finding in enumerate(findings, start=1):
        lines += [
            f"  {number}. {finding.what} [{finding.key}]",
            f"     measured: {finding.measured}",
            f"     why:      {finding.why}",
            f"     do:       {finding.advice}",
        ]
    return lines


def _kernel_lines(facts: Facts) -> list[str]:
    first, connections = facts.best.connections[0], facts.best.connections
    lost = sum(one.retransmitted_segments or 0 for one in connections)
    sent = sum(one.sent_segments or 0 for one in connections)

    def known(value: float | None, form: str, factor: float = 1.0) -> str:
        return "unknown" if value is None else form.format(value * factor)

    return [
        f"  path:     round trip {known(facts.rtt_s, '{:.3f} ms', 1e3)} idle, "
        f"{known(first.rtt_s, '{:.3f} ms', 1e3)} under load; MTU {known(first.mtu_bytes, '{:.0f}')}, "
        f"{known(first.mss_bytes, '{:.0f}')} bytes a packet; {lost} of {sent} packets sent again",
        f"  a lane:   {first.congestion or 'unknown congestion control'}, window "
        f"{known(first.window_segments, '{:.0f}')} packets, {known(first.notsent_bytes, '{:.0f}')} bytes not sent yet, "
        f"delivery {known(first.delivery_rate_bps, '{:.1f} Mbit/s', 1e-6)}, "
        f"receive buffer {facts.receive_buffer_bytes} bytes",
        f"  transfer: 4 KiB in {facts.small_transfer_s * 1e3:.2f} ms, median",
        *(
            f"  {where + ':':9} {host.cores} cores, load {host.load:.1f}, one core checks {speed(host.checksum_bps)}"
            for where, host in (("here", facts.here), ("there", facts.there))
        ),
    ]
