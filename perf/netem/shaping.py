"""Rate, delay and loss: what is asked for, and which part of this kernel does it.

what     where                                    done by
-------  ---------------------------------------  ---------------------------------------------------
rate     the switch's port towards a host         tbf, or htb where tbf is absent
delay    what a host sends                        netem; a userspace switch where netem is absent
loss     what a host sends, or receives           netem, or nftables where netem is absent
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lynx_net.wire.pacing import parse_rate
from perf.netem.commands import call, inside, require_tool, works
from perf.netem.errors import NetemError

__all__ = ["QUEUE_S", "Means", "Shape", "parse_seconds", "parse_share"]

_SECONDS = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>us|ms|s)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_MAX_DELAY_S = 60.0

_LOSS_STEPS = 1_000_000
_SUPERFRAME_BYTES = 66_000
"""What TCP hands to an interface at once; a smaller burst makes the kernel cut it up first, which costs time."""
_BURST_S = 0.001
"""A timer of the kernel may fire this late without lowering the rate."""
_NETEM_PACKETS = 1_000_000
"""Of netem's queue, which must hold everything that is being delayed."""
_MAX_TC_BYTES = (1 << 32) - 1
_MAX_QUEUE_S = 10.0

QUEUE_S = 0.025
"""What a port of the switch keeps unless told otherwise: at 1 Gbit/s 3 MB."""

_PROBES = {
    "netem": ["netem", "delay", "1ms"],
    "tbf": ["tbf", "rate", "1mbit", "burst", "10kb", "limit", "10kb"],
    "htb": ["htb"],
}


def parse_seconds(text: str | float) -> float:
    """Seconds from "2ms", "500us", "0.1s" or a number of seconds."""
    if isinstance(text, str):
        match = _SECONDS.fullmatch(text.strip())
        if match is None:
            raise NetemError(f"cannot read the time {text!r}; write for example 500us, 2ms or 0.1s")
        return float(match["number"]) * _UNITS[match["unit"]]
    return float(text)


def parse_share(text: str | float) -> float:
    """A share of one from "0.1%" or a number from 0 to 1."""
    try:
        return float(text[:-1]) / 100 if isinstance(text, str) and text.endswith("%") else float(text)
    except ValueError:
        raise NetemError(f"cannot read the share {text!r}; write for example 0.1% or 0.001") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the network does to packets.

    Attributes:
        rate_bps: of the link from the switch to each host, Ethernet headers included; None is as fast as it goes.
        delay_s: from any host to any other, one way.
        loss: share of the packets that get lost between two hosts, one way.
        queue_s: how much the switch keeps for a host before it drops, as time at `rate_bps`.
    """

    rate_bps: float | None = None
    delay_s: float = 0.0
    loss: float = 0.0
    queue_s: float = QUEUE_S

    def __post_init__(self) -> None:
        if not 0 <= self.delay_s <= _MAX_DELAY_S:
            raise NetemError(f"a delay must be 0 to {_MAX_DELAY_S:g} s, not {self.delay_s:g}")
        if not 0 <= self.loss < 1:
            raise NetemError(f"a loss must be 0 to less than 1 (100%), not {self.loss:g}")
        if not 0 < self.queue_s <= _MAX_QUEUE_S:
            raise NetemError(f"a queue must be more than 0 and at most {_MAX_QUEUE_S:g} s, not {self.queue_s:g}")

    @classmethod
    def parse(
        cls,
        rate: str | float | None = None,
        delay: str | float = 0.0,
        loss: str | float = 0.0,
        queue: str | float = QUEUE_S,
    ) -> Shape:
        """From what people write: "10Gbit", "2ms", "0.1%", "25ms". Raises LynxError for what cannot be read."""
        return cls(
            rate_bps=parse_rate(rate),
            delay_s=parse_seconds(delay),
            loss=parse_share(loss),
            queue_s=parse_seconds(queue),
        )

    @property
    def burst_bytes(self) -> int:
        """Bytes that may pass at once at more than the rate."""
        return max(_SUPERFRAME_BYTES, math.ceil((self.rate_bps or 0) / 8 * _BURST_S))

    @property
    def queue_bytes(self) -> int:
        """`queue_s` in bytes; at least room for one burst."""
        return min(max(int((self.rate_bps or 0) / 8 * self.queue_s), self.burst_bytes), _MAX_TC_BYTES)


@dataclass(frozen=True, slots=True)
class Means:
    """Which parts of this kernel make the network.

    Attributes:
        rate: "tbf" or "htb".
        netem: whether delay and loss are done by netem.
    """

    rate: str
    netem: bool

    @classmethod
    def choose(cls, namespace: str, shape: Shape, shaper: str | None = None) -> Means:
        """Try in `namespace` what this kernel has; `shaper` asks for "tbf" or "htb". Raises NetemError."""
        if shaper not in (None, "tbf", "htb"):
            raise NetemError(f"the rate can be made by tbf or htb, not by {shaper!r}")
        rate = "tbf"
        if shape.rate_bps is not None:
            wanted = ["tbf", "htb"] if shaper is None else [shaper]
            rates = [name for name in wanted if _has(namespace, name)]
            if not rates:
                raise NetemError(f"this kernel has no {' and no '.join(wanted)} to make a rate (CONFIG_NET_SCH_*)")
            rate = rates[0]
        netem = bool(shape.delay_s or shape.loss) and _has(namespace, "netem")
        if shape.loss and not netem:
            require_tool("nft")
        return cls(rate, netem)

    def describe(self, shape: Shape) -> str:
        """One line for people: what is done by which."""
        parts = ["no limit of the rate"]
        if shape.rate_bps is not None:
            parts = [f"rate {shape.rate_bps / 1e6:g} Mbit/s by {self.rate} (queue {shape.queue_s * 1e3:g} ms)"]
        if shape.delay_s:
            parts.append(
                f"delay {shape.delay_s * 1e3:g} ms each way by {'netem' if self.netem else 'a userspace switch'}"
            )
        if shape.loss:
            parts.append(f"loss {shape.loss:.4%} by {'netem' if self.netem else 'nftables'}")
        return ", ".join(parts)

    def limit_rate(self, namespace: str, device: str, shape: Shape) -> None:
        """Let a device send at most at the rate."""
        if shape.rate_bps is None:
            return
        rate, burst, limit = f"{round(shape.rate_bps)}bit", str(shape.burst_bytes), str(shape.queue_bytes)
        add = ["tc", "-n", namespace, "qdisc", "add", "dev", device]
        if self.rate == "tbf":
            call([*add, "root", "tbf", "rate", rate, "burst", burst, "limit", limit])
            return
        call([*add, "root", "handle", "1:", "htb", "default", "1"])
        htb = ["htb", "rate", rate, "ceil", rate, "burst", burst, "cburst", burst]
        call(["tc", "-n", namespace, "class", "add", "dev", device, "parent", "1:", "classid", "1:1", *htb])
        call([*add, "parent", "1:1", "bfifo", "limit", limit])

    def impair(self, namespace: str, device: str, shape: Shape) -> None:
        """Lose packets of a host and, where netem can, delay them."""
        if shape.loss:
            # Otherwise a lost packet would be a whole superframe, 64 KiB, and losses as much rarer.
            call(["ip", "-n", namespace, "link", "set", device, "gso_max_segs", "1"])
        if self.netem:
            call(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *netem_options(shape)])
        elif shape.loss:
            call(inside(namespace, "nft", "-f", "-"), stdin=nftables_rules(device, shape))


def nftables_rules(device: str, shape: Shape) -> str:
    """A random drop of IP packets that arrive; a lost ARP packet would cost a second, as on no real network."""
    return f"""table inet netem {{
        chain input {{
            type filter hook input priority 0; policy accept;
            iifname "{device}" numgen random mod {_LOSS_STEPS} < {round(shape.loss * _LOSS_STEPS)} counter drop
        }}
    }}"""


def netem_options(shape: Shape) -> list[str]:
    """How `tc` is told of a shape's delay and loss."""
    options = ["netem", "limit", str(_NETEM_PACKETS)]
    if shape.delay_s:
        options += ["delay", f"{round(shape.delay_s * 1e6)}us"]
    if shape.loss:
        options += ["loss", "random", f"{shape.loss * 100:.6f}%"]
    return options


def _has(namespace: str, qdisc: str) -> bool:
    """Whether this kernel has a qdisc; tried on the loopback of a namespace of our own."""
    device = ["dev", "lo", "root"]
    found = works(["tc", "-n", namespace, "qdisc", "add", *device, *_PROBES[qdisc]])
    if found:
        call(["tc", "-n", namespace, "qdisc", "del", *device])
    return found
