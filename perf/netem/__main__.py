"""`python -m perf.netem --rate 1Gbit --delay 2ms -- COMMAND`: run a command on a host of an emulated network."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys

from lynx_net.errors import LynxError
from perf.netem.network import MAX_HOSTS, network
from perf.netem.shaping import QUEUE_S

_CTRL_C_S = 1.0
"""Ctrl-C reaches COMMAND as well; it has this long to end of itself."""

_EPILOG = """\
COMMAND runs on host A. Hosts have the addresses 10.77.0.1 (A), 10.77.0.2 (B) and so on. COMMAND and what --on starts
find them in LYNX_NET_HOST_A, LYNX_NET_HOST_B, ..., and the namespaces, for `ip netns exec`, in LYNX_NET_NETNS_A, ...
The exit status is that of COMMAND; 125 if the network cannot be built.

  python -m perf.netem --delay 10ms -- ping -c 3 10.77.0.2
  python -m perf.netem --rate 1Gbit --on B 'iperf3 -s -1' -- sh -c 'sleep 1; iperf3 -c $LYNX_NET_HOST_B'
"""


def main() -> int:
    """Build, run, take down."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.netem",
        description="Run a command in a network of Linux namespaces with a rate, a delay and loss. Needs root.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rate", help="of the link to each host, e.g. 1Gbit (default: no limit)")
    parser.add_argument("--delay", default=0.0, help="one way between any two hosts, e.g. 2ms (default: none)")
    parser.add_argument("--loss", default=0.0, help="share of packets lost, one way, e.g. 0.1%% (default: none)")
    parser.add_argument(
        "--queue", default=QUEUE_S, help="what a port of the switch keeps, as time at the rate (default 25ms)"
    )
    parser.add_argument("--hosts", type=int, default=2, help=f"2 to {MAX_HOSTS} (default 2)")
    parser.add_argument(
        "--shaper", choices=("tbf", "htb"), help="what keeps the rate (default: tbf if the kernel has it)"
    )
    parser.add_argument("--congestion", default="cubic", help="TCP's congestion control (default cubic)")
    parser.add_argument(
        "--on",
        nargs=2,
        action="append",
        default=[],
        metavar=("HOST", "SHELL_COMMAND"),
        help="also run this on a host, from before COMMAND starts until it ends; may be repeated",
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="behind --, with its arguments")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    try:
        return _run(options)
    except LynxError as error:
        print(f"netem: {error}", file=sys.stderr)
        return 125
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(options: argparse.Namespace) -> int:
    with network(
        options.hosts,
        rate=options.rate,
        delay=options.delay,
        loss=options.loss,
        queue=options.queue,
        shaper=options.shaper,
        congestion=options.congestion,
    ) as net:
        print(f"netem: {net.description}", file=sys.stderr, flush=True)
        for host, command in options.on:
            net.popen(host, ["sh", "-c", command])
        process = net.popen("A", options.command)
        try:
            status = int(process.wait())
        except KeyboardInterrupt:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CTRL_C_S)
            raise
    return 128 - status if status < 0 else status


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
