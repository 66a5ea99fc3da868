"""Why a link is below its rate: facts in, findings out. Nothing here measures.

Each rule looks at one cause and names what was measured, why that limits, and what to do. Shares and factors below are
where a cause begins to matter, not where it becomes the only one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from lynx_net.doctor.facts import ConnectionFacts, Facts, HostFacts, Run

__all__ = ["RULES", "Finding", "diagnose", "size", "speed"]

LIMITED_SHARE = 0.2
"""Of the time in which bytes waited."""
LOSS_SHARE = 0.001
BUSY_SHARE = 0.85
LOADED_SHARE = 0.7
CHECKSUM_SHARE = 0.25
LANES_GAIN = 1.15
OVERHEAD = 0.8
JUMBO_BPS = 10e9
QUEUE_FACTOR, QUEUE_S = 4, 0.005
SLOW_SMALL_S = 0.005


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause.

    Attributes:
        key: a name for programs.
        what: the cause in a clause.
        measured: the figures that show it.
        why: why it limits.
        advice: what to change.
    """

    key: str
    what: str
    measured: str
    why: str
    advice: str


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, in the order of `RULES`; none for a link with nothing against it."""
    return [finding for rule in RULES if (finding := rule(facts)) is not None]


def speed(bps: float) -> str:
    """A rate for people."""
    return f"{bps / 1e9:.2f} Gbit/s" if bps >= 1e9 else f"{bps / 1e6:.1f} Mbit/s"


def size(count: float) -> str:
    """A number of bytes for people."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def _lanes_of(run: Run) -> str:
    return f"{run.lanes} lane{'s' * (run.lanes > 1)}"


def _share(part: float | None, whole: float | None) -> float:
    return part / whole if part is not None and whole else 0.0


def _total(facts: Facts, get: Callable[[ConnectionFacts], float | None]) -> float | None:
    """Sum over the lanes of the best run; None if the kernel does not say it of one of them."""
    values = [get(connection) for connection in facts.best.connections]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _in_flight_bytes(facts: Facts) -> float:
    """Rate times round trip: what must be on its way for the target rate."""
    return facts.target_bps / 8 * (facts.rtt_s or 0.0)


def _network(facts: Facts) -> Finding | None:
    raw_bps = facts.raw_bps
    if facts.wanted_bps is None or raw_bps is None or raw_bps >= 0.95 * facts.wanted_bps:
        return None
    return Finding(
        "network",
        "plain TCP does not reach the rate either",
        f"the fastest raw copy moved {speed(raw_bps)}, wanted are {speed(facts.wanted_bps)}",
        "what is between the hosts, or their kernels, is slower than the rate; lynx_net cannot be faster than that",
        "look at the findings below for the kernel's part; else ask for the speed of the network cards and switches, "
        "or for the virtual machine's limit, and test the path with nothing else on it",
    )


def _overhead(facts: Facts) -> Finding | None:
    pairs = [(run.bps / run.raw_bps, run) for run in facts.runs if run.raw_bps]
    if not pairs or facts.reaches:
        return None
    ratio, run = max(pairs, key=lambda pair: pair[0])
    if ratio >= OVERHEAD:
        return None
    return Finding(
        "overhead",
        "lynx_net is well below a raw copy with as many lanes",
        f"at its best {ratio:.2f} of it: {speed(run.bps)} beside {speed(run.raw_bps or 0)} over {_lanes_of(run)}",
        "checksums, headers and the interpreter cost processor time that the raw copy does not spend",
        "give both processes more cores, use more lanes, and keep other work out of the event loop's process",
    )


def _lanes(facts: Facts) -> Finding | None:
    fewest, best = facts.runs[0], facts.best
    if best.lanes == fewest.lanes or best.bps < LANES_GAIN * fewest.bps:
        return None
    return Finding(
        "lanes",
        "several lanes are faster than one",
        f"{speed(best.bps)} over {_lanes_of(best)}, {speed(fewest.bps)} over {_lanes_of(fewest)}",
        "a lane has one thread a direction and one window; several use several cores and fill a long path",
        f"connect(..., lanes={best.lanes})",
    )


def _receive_buffer(facts: Facts) -> Finding | None:
    # The kernel doubles what was asked for and keeps about half of it for its own overhead.
    given, asked = facts.receive_buffer_bytes // 2, facts.asked_receive_buffer_bytes
    lanes = facts.best.lanes
    needed = _in_flight_bytes(facts) / lanes
    if facts.asked_receive_buffer_bytes is None or given >= needed:
        return None
    wanted = 2 ** math.ceil(math.log2(needed))
    limit = facts.there.receive_limit_bytes
    advice = f"serve(..., sockets=SocketOptions(receive_buffer_bytes={wanted})) at the receiver, or more lanes"
    if limit is not None and wanted > limit:
        advice += f"; its kernel gives at most net.core.rmem_max = {limit}: sysctl -w net.core.rmem_max={wanted}"
    return Finding(
        "receive-buffer",
        "the receive buffer is smaller than rate times round trip",
        f"{size(given)} a lane (asked for: {size(asked or 0)}), needed {size(needed)} a lane for "
        f"{speed(facts.target_bps)} x {(facts.rtt_s or 0) * 1e3:.2f} ms over {lanes} lanes",
        "a sender may have no more on its way than the receiver's window, and then waits a round trip for the next",
        advice,
    )


def _receiver_limited(facts: Facts) -> Finding | None:
    share = _share(_total(facts, lambda one: one.receiver_limited_s), _total(facts, lambda one: one.busy_s))
    if facts.reaches or share < LIMITED_SHARE or _receive_buffer(facts) is not None:
        return None
    return Finding(
        "receiver",
        "the receiver takes bytes more slowly than they could come",
        f"its window was shut {share:.0%} of the time in which there was something to send",
        "the buffer covers the round trip, so the process behind it does not read fast enough",
        "give the receiving process cores of its own, more lanes, and faster allocation targets",
    )


def _send_buffer(facts: Facts) -> Finding | None:
    share = _share(_total(facts, lambda one: one.buffer_limited_s), _total(facts, lambda one: one.busy_s))
    limit = facts.here.send_limit_bytes
    needed = _in_flight_bytes(facts) / facts.best.lanes
    wanted = 2 ** math.ceil(math.log2(max(2 * needed, 2**23)))
    small = limit is not None and limit / 2 < needed
    if not small and (facts.reaches or share < LIMITED_SHARE):
        return None
    known = "" if limit is None else f"; net.ipv4.tcp_wmem allows {size(limit)} a lane, about half of it payload"
    return Finding(
        "send-buffer",
        "the send buffer is too small",
        f"it held up the sender {share:.0%} of the time{known}; needed {size(needed)} a lane",
        "bytes stay in the send buffer until they are acknowledged, so it must hold rate times round trip",
        f'more lanes, or sysctl -w net.ipv4.tcp_wmem="4096 65536 {wanted}" at the sender',
    )


def _loss(facts: Facts) -> Finding | None:
    lost = _total(facts, lambda one: one.retransmitted_segments)
    sent = _total(facts, lambda one: one.sent_segments)
    share = _share(lost, sent)
    if share < LOSS_SHARE:
        return None
    first = facts.best.connections[0]
    bound = ""
    if facts.rtt_s and first.mss_bytes and first.congestion != "bbr":
        # Mathis, Semke, Mahdavi, Ott (1997): rate = MSS / RTT * sqrt(3/2) / sqrt(p).
        bound_bps = first.mss_bytes * 8 / facts.rtt_s * math.sqrt(1.5 / share)
        bound = f"; at this loss a lane of {first.congestion} can do about {speed(bound_bps)}"
    other = "" if first.congestion == "bbr" else ", or sysctl -w net.ipv4.tcp_congestion_control=bbr at the sender"
    return Finding(
        "loss",
        "packets are lost",
        f"{share:.2%} of {sent:.0f} packets were sent again{bound}",
        "congestion control takes a lost packet for a full queue and slows down",
        f"pace the link below the bottleneck: connect(..., rate=...){other}; more lanes recover faster",
    )


def _congestion(facts: Facts) -> Finding | None:
    first = facts.best.connections[0]
    if first.congestion != "reno" or facts.local:
        return None
    return Finding(
        "congestion-control",
        "the congestion control is reno",
        f"reno, round trip {(facts.rtt_s or 0) * 1e3:.2f} ms",
        "after a loss it grows by one packet a round trip, which takes minutes on a fast or long path",
        "sysctl -w net.ipv4.tcp_congestion_control=cubic (or bbr) at the sender",
    )


def _mtu(facts: Facts) -> Finding | None:
    mtu = facts.best.connections[0].mtu_bytes
    if facts.local or mtu is None or mtu > 1500 or facts.target_bps < JUMBO_BPS:
        return None
    return Finding(
        "mtu",
        "packets are small for this rate",
        f"the path takes {mtu} bytes a packet, {facts.target_bps / 8 / mtu / 1e6:.1f} million packets a second",
        "the kernel works for every packet, and cards and switches have a limit of packets too",
        "ip link set DEVICE mtu 9000 on both hosts, if every switch between them allows it",
    )


def _processor(facts: Facts) -> Finding | None:
    used = (
        ("here", facts.best.cores_here, facts.here),
        ("there", facts.best.cores_there, facts.there),
    )
    # On one host both processes share the cores.
    together = facts.best.cores_here + facts.best.cores_there
    busy = [
        (where, together if facts.local else cores, host)
        for where, cores, host in used
        if (together if facts.local else cores) >= BUSY_SHARE * host.cores
    ]
    if not busy:
        return None
    where, cores, host = busy[0]
    return Finding(
        "cores",
        "the processor is busy",
        f"{cores:.1f} of {host.cores} cores {'by both sides' if facts.local else where}",
        "checksums and the kernel's copies need processor time for every byte",
        "more cores for the process (look at taskset, cgroup limits and the container's cpus), fewer lanes than cores",
    )


def _load(facts: Facts) -> Finding | None:
    busy: list[tuple[str, HostFacts]] = [
        (where, host)
        for where, host in (("here", facts.here), ("there", facts.there))
        if host.load > LOADED_SHARE * host.cores
    ]
    if not busy:
        return None
    told = ", ".join(f"{host.load:.1f} on {host.cores} cores {where}" for where, host in busy)
    return Finding(
        "load",
        "other processes were using the processor before the measurement",
        f"load average {told}",
        "threads of the link wait for a core, and what was measured is not what an idle host would do",
        "move the other work away, or give the process cores of its own (taskset, cpuset)",
    )


def _checksum(facts: Facts) -> Finding | None:
    slower = min((facts.here, facts.there), key=lambda host: host.checksum_bps)
    share = facts.target_bps / facts.best.lanes / slower.checksum_bps
    if share < CHECKSUM_SHARE:
        return None
    return Finding(
        "checksum",
        "checksums take a large part of a core",
        f"{speed(slower.checksum_bps)} on one core, {share:.0%} of it needed a lane for the rate",
        "every segment is checked at both ends, by the thread that moves it",
        "xxhash 4.1 or later, which hashes with the widest vectors there are; more lanes, on more cores",
    )


def _credit(facts: Facts) -> Finding | None:
    if facts.reaches or facts.best.credit_share < LIMITED_SHARE:
        return None
    return Finding(
        "credit",
        "the sender waits for credit",
        f"{facts.best.credit_share:.0%} of the lanes' time, with a window of {size(facts.anchor_window_bytes)}",
        "the receiver grants bytes as earlier ones are decoded, a window ahead at most",
        f"LinkConfig(anchor_window_bytes=...) at the receiver, above {size(_in_flight_bytes(facts))}; a faster decoder",
    )


def _residual_window(facts: Facts) -> Finding | None:
    needed = _in_flight_bytes(facts)
    if facts.residual_window_bytes >= needed:
        return None
    return Finding(
        "residual-window",
        "residuals cannot fill the path",
        f"window {size(facts.residual_window_bytes)}, rate times round trip {size(needed)}",
        "one transfer's residual has no more than its window on the way; several transfers have one each",
        f"LinkConfig(residual_window_bytes={2 ** math.ceil(math.log2(needed))}) at the receiver",
    )


def _small_transfers(facts: Facts) -> Finding | None:
    extra_s = facts.small_transfer_s - 2 * (facts.rtt_s or 0.0)
    if extra_s < SLOW_SMALL_S:
        return None
    return Finding(
        "small-transfers",
        "a small transfer takes much longer than the network does",
        f"median of 4 KiB {facts.small_transfer_s * 1e3:.1f} ms, round trip {(facts.rtt_s or 0) * 1e3:.2f} ms",
        "the rest is processes that wait for a core, or an event loop that does other things",
        "look at the load of both hosts; keep blocking calls out of the event loop",
    )


def _queueing(facts: Facts) -> Finding | None:
    loaded_s = max((one.rtt_s or 0.0 for one in facts.best.connections), default=0.0)
    idle_s = facts.rtt_s
    if idle_s is None or loaded_s < max(QUEUE_FACTOR * idle_s, idle_s + QUEUE_S):
        return None
    return Finding(
        "queueing",
        "the traffic makes a queue in front of itself",
        f"round trip {idle_s * 1e3:.2f} ms idle, {loaded_s * 1e3:.2f} ms under load",
        "the rate does not suffer, but an anchor has to wait behind what the network holds already",
        f'pace a little below the bottleneck: connect(..., rate="{facts.best.bps * 0.95 / 1e6:.1f}Mbit")',
    )


RULES: tuple[Callable[[Facts], Finding | None], ...] = (
    _network,
    _receive_buffer,
    _receiver_limited,
    _send_buffer,
    _loss,
    _congestion,
    _mtu,
    _processor,
    _load,
    _checksum,
    _lanes,
    _credit,
    _residual_window,
    _overhead,
    _small_transfers,
    _queueing,
)
