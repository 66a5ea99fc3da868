"""The same payloads through lynx_net and what people use, over loopback TCP: `python -m perf.peers --json FILE`.

`python -m perf.peers --setup` builds an environment for each system under `build/peers`, once. Every round runs every
system in turn, in two fresh processes, and takes the median time of a payload: from the call that sends it until an
acknowledgement of the receiver, who then holds all of it, has come back. `perf/peers/harness.py` says how
that is known of each system. Ratios compare within a round. A system that is not there or fails is reported as such.

`raw` is one blocking socket, `raw-sums` one with the checksums of lynx_net on both sides. `lynx` makes a transfer of
every payload, `lynx-open` moves them as pages of one that was accepted before; the others, too, have their memory
registered and its addresses exchanged by then. Settings are the best that were found; `-default` leaves everything but
the choice of TCP as it comes. All but lynx_net and `raw-sums` go without checksums.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lynx_net
from lynx_net.demo.results import machine_facts
from perf.bytelevel import PACKAGES
from perf.peers.environments import ENVIRONMENTS, Environment, Failure, build, child_environment, last_line

MIB = 1 << 20
RUN_LIMIT_S = 120
_LAST_WORDS_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to move bytes.

    Attributes:
        module: runs its two processes.
        environment: what it runs in; None for this interpreter.
        settings: environment variables, the best that were found.
        done: what the acknowledgement of the receiver follows.
    """

    module: str
    environment: Environment | None = None
    settings: dict[str, str] = field(default_factory=dict)
    done: str


UCXX = System(
    module="ucxx_peer",
    environment=Environment(
        "ucxx", ("ucxx-cu12", "libucxx-cu12", "libucx-cu12", "librmm-cu12", "rapids-logger", "numpy")
    ),
    settings={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
    done="the posted recv has completed",
)
NIXL = System(
    module="nixl_peer",
    environment=Environment("nixl", ("nixl-cu12", "numpy")),
    settings={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
    done="the write is DONE at the sender and the receiver sees its bytes",
)

SYSTEMS = {
    "raw": System(module="raw_peer", done="recv_into has filled the buffer"),
    "raw-sums": System(
        module="raw_peer",
        settings={"RAW_PEER_SUMS": "1", "RAW_PEER_CONGESTION_CONTROL": "reno"},
        done="recv_into has filled the buffer, and its checksum is made",
    ),
    "lynx": System(
        module="lynx_peer",
        settings={"LYNX_PEER_LANES": "1"},
        done="transfer.complete: offered, all segments in, checksums verified",
    ),
    "lynx-open": System(
        module="lynx_peer",
        settings={"LYNX_PEER_LANES": "1", "LYNX_PEER_OPEN": "1"},
        done="the last page of the payload is in, checksums verified; the transfer was accepted before",
    ),
    "ucxx": replace(
        UCXX,
        settings=UCXX.settings
        | {"UCXPY_PROGRESS_MODE": "blocking", "UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"},
    ),
    "ucxx-default": UCXX,
    "nixl": replace(
        NIXL,
        settings=NIXL.settings
        | {"UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m", "NIXL_PEER_PIECE_BYTES": str(MIB)},
    ),
    "nixl-default": NIXL,
    "mooncake": System(
        module="mooncake_peer",
        environment=Environment(
            "mooncake", ("mooncake-transfer-engine-non-cuda", "numpy"), needs="the system package libibverbs1"
        ),
        settings={"MC_FORCE_TCP": "1"},
        done="the write has returned at the sender and the receiver sees its bytes",
    ),
}


def python_of(name: str) -> str:
    """The interpreter of a system's environment."""
    environment = SYSTEMS[name].environment
    return sys.executable if environment is None else environment.python(ENVIRONMENTS)


def set_up(names: list[str]) -> None:
    """Build the environments that are missing; a package that cannot be had is said and left."""
    wanted = {one.name: one for name in names if (one := SYSTEMS[name].environment) is not None}
    for one in wanted.values():
        build(one, ENVIRONMENTS)


def run_once(name: str, sizes: list[int], repeats: int, settings: dict[str, str]) -> dict[int, float]:
    """Median seconds of each size, from two fresh processes."""
    command = [python_of(name), "-m", f"perf.peers.{SYSTEMS[name].module}"]
    environment = child_environment(settings)
    most = str(max(sizes))

    def start(*arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, *arguments], env=environment, stdout=pipe, stderr=pipe, text=True)

    receiver = start("receive", most)
    sender = None
    try:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        if not port.isdigit():
            raise Failure(f"the receiver does not start: {last_line(receiver.communicate(timeout=10)[1])}")
        sender = start("send", most, port, ",".join(map(str, sizes)), str(repeats))
        output, errors = sender.communicate(timeout=RUN_LIMIT_S)
        results = [line for line in output.splitlines() if line.startswith("SECONDS ")]
        if not results:
            raise Failure(f"the sender failed: {last_line(errors)}{_of_the_receiver(receiver)}")
    except subprocess.TimeoutExpired as error:
        raise Failure(f"nothing came in {RUN_LIMIT_S} s") from error
    finally:
        for process in (receiver, sender):
            if process is not None:
                process.kill()
                process.communicate()
    seconds = json.loads(results[0].removeprefix("SECONDS "))
    return {int(size): statistics.median(times) for size, times in seconds.items()}


def _of_the_receiver(receiver: subprocess.Popen[str]) -> str:
    """Its last words, if it has ended by itself: then it may be why the sender failed."""
    try:
        errors = receiver.communicate(timeout=_LAST_WORDS_S)[1]
    except subprocess.TimeoutExpired:
        return ""
    return f"; the receiver: {last_line(errors)}" if receiver.returncode else ""


def measure(names: list[str], sizes: list[int], rounds: int, repeats: int) -> dict[str, Any]:
    """Interleaved rounds; the order turns from round to round."""
    runs: dict[str, list[dict[int, float]]] = {name: [] for name in names}
    failures: dict[str, str] = {}
    for round_ in range(rounds):
        turn = round_ % len(names)
        for name in [*names[turn:], *names[:turn]]:
            if name in failures:
                continue
            try:
                seconds = run_once(name, sizes, repeats, SYSTEMS[name].settings)
            except Failure as problem:
                failures[name] = str(problem)
                print(f"round {round_ + 1} {name:12} failed: {problem}", flush=True)
                continue
            runs[name].append(seconds)
            speeds = "  ".join(f"{size // MIB:3} MiB {size / seconds[size] / 1e9:5.2f} GB/s" for size in sizes)
            print(f"round {round_ + 1} {name:12} {speeds}", flush=True)
    return {"runs": runs, "failures": failures}


def figures(runs: dict[str, list[dict[int, float]]], failures: dict[str, str], sizes: list[int]) -> dict[str, Any]:
    """Medians over the rounds, and lynx_net's speed over that of each system, within the rounds."""
    found: dict[str, Any] = {}
    for name, rounds in runs.items():
        if name in failures:
            found[name] = {"failure": failures[name]}
            continue
        found[name] = {
            str(size // MIB): {
                "ms": statistics.median(one[size] for one in rounds) * 1e3,
                "best_gbytes_per_s": size / min(one[size] for one in rounds) / 1e9,
                "gbytes_per_s": size / statistics.median(one[size] for one in rounds) / 1e9,
                "lynx_speed_ratio": statistics.median(
                    theirs[size] / ours[size] for ours, theirs in zip(runs["lynx"], rounds, strict=True)
                )
                if "lynx" in runs and "lynx" not in failures
                else None,
            }
            for size in sizes
        }
    return found


def main() -> None:
    """Build environments, or run the rounds and print or write the figures."""
    parser = argparse.ArgumentParser(description="lynx_net beside UCXX, NIXL, Mooncake and a raw socket")
    parser.add_argument("--setup", action="store_true", help=f"build the environments in {ENVIRONMENTS}, then stop")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    parser.add_argument("--mib", nargs="+", type=int, default=[1, 4, 16, 64], help="payloads (default 1 4 16 64)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each system, in turn (default 5)")
    parser.add_argument("--repeats", type=int, default=30, help="payloads of each size a run (default 30)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    if options.setup:
        set_up(options.systems)
        return
    sizes = [mib * MIB for mib in options.mib]
    measured = measure(options.systems, sizes, options.rounds, options.repeats)
    found = figures(measured["runs"], measured["failures"], sizes)
    print("\nmedian GB/s, best round (speed of lynx / theirs)")
    for name, results in found.items():
        if "failure" in results:
            print(f"{name:12} not measured: {results['failure']}")
            continue
        cells = []
        for mib, one in results.items():
            ratio = one["lynx_speed_ratio"]
            cells.append(
                f"{mib:>3} MiB {one['gbytes_per_s']:5.2f} {one['best_gbytes_per_s']:5.2f}"
                + (f" ({ratio:.2f})" if ratio else "")
            )
        print(f"{name:12} " + "   ".join(cells))
    if options.json:
        facts = {
            "machine": machine_facts(PACKAGES),
            "version": lynx_net.__version__,
            "rounds": options.rounds,
            "repeats": options.repeats,
            "systems": {
                name: {"settings": SYSTEMS[name].settings, "done": SYSTEMS[name].done} for name in options.systems
            },
            "figures": found,
            "runs": measured["runs"],
        }
        options.json.write_text(json.dumps(facts, indent=1))
