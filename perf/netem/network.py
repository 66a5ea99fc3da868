"""Hosts around a switch, each in a network namespace of its own.

    host A  eth0 ---- to-a  switch  to-b ---- eth0  host B

Every line is a veth pair and the switch a bridge in one more namespace, so that nothing of it shows among the
interfaces of the machine. Rates are kept at the switch's ports towards the hosts: with many senders the link of the
receiver is the bottleneck. Where netem is absent and a delay is asked for, a process (delay_switch.py) takes the place
of the bridge.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import string
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perf.netem.commands import call, inside, require_privilege, require_tool, works
from perf.netem.errors import NetemError
from perf.netem.reaper import Reaper
from perf.netem.shaping import QUEUE_S, Means, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["MAX_HOSTS", "Host", "Network", "enter", "network", "two_hosts"]

MAX_HOSTS = 26
_PREFIX = "10.77.0."
_SUBNET = f"{_PREFIX}0/24"
_END_S = 2.0
"""Between asking a process to end and killing it."""
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Host:
    """A host: its letter, its network namespace and its IPv4 address on the interface eth0."""

    name: str
    namespace: str
    address: str


class Network:
    """A network that is up; made by `network` and `two_hosts`, which also take it down.

    Attributes:
        hosts: "A" first.
        description: one line for people: size, rate, delay, loss, and what makes them.
    """

    def __init__(self, count: int, shape: Shape, shaper: str | None, congestion: str) -> None:
        if not 2 <= count <= MAX_HOSTS:
            raise NetemError(f"a network has 2 to {MAX_HOSTS} hosts, not {count}")
        require_tool("ip")
        require_tool("tc")
        require_privilege()
        base = f"lynx-{os.getpid()}-{secrets.token_hex(3)}"
        self.hosts = tuple(
            Host(letter, f"{base}-{letter.lower()}", f"{_PREFIX}{number}")
            for number, letter in enumerate(string.ascii_uppercase[:count], start=1)
        )
        self.description = ""
        self._closed = False
        self._shape = shape
        self._congestion = congestion
        self._switch = f"{base}-switch"
        self._processes: list[subprocess.Popen[Any]] = []
        self._delay_switch: subprocess.Popen[str] | None = None
        self._reaper = Reaper([self._switch, *(host.namespace for host in self.hosts)])
        try:
            self._build(shaper)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Host:
        """The host with this letter."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise NetemError(f"there is no host {name!r}; there are {', '.join(host.name for host in self.hosts)}")

    @property
    def environment(self) -> dict[str, str]:
        """`LYNX_NET_HOST_A` and so on: addresses; `LYNX_NET_NETNS_A` and so on: names for `ip netns exec`."""
        addresses = {f"LYNX_NET_HOST_{host.name}": host.address for host in self.hosts}
        return addresses | {f"LYNX_NET_NETNS_{host.name}": host.namespace for host in self.hosts}

    def popen(
        self, host: Host | str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on a host; `options` go to `subprocess.Popen`.

        `environment` is added to its variables. It is ended, if it still runs, when the network is taken down.
        """
        where = self[host] if isinstance(host, str) else host
        variables = dict(os.environ if env is None else env) | self.environment
        process: subprocess.Popen[Any] = subprocess.Popen(inside(where.namespace, *argv), env=variables, **options)
        self._processes.append(process)
        return process

    def check(self) -> None:
        """Raise NetemError if a part of the network has stopped working."""
        if self._delay_switch is not None and (status := self._delay_switch.poll()) is not None:
            raise NetemError(f"the userspace switch ended with status {status}; nothing passes any more")

    def close(self) -> None:
        """End the processes of all hosts and remove the namespaces; raises NetemError if that fails."""
        if self._closed:
            return
        self._closed = True
        try:
            running = [process for process in self._processes if process.poll() is None]
            if self._delay_switch is not None:
                running.append(self._delay_switch)
            for process in running:
                process.terminate()
            for process in running:
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        finally:
            self._reaper.finish()

    def _build(self, shaper: str | None) -> None:
        shape, switch = self._shape, self._switch
        for namespace in (switch, *(host.namespace for host in self.hosts)):
            call(["ip", "netns", "add", namespace])
            call(["ip", "-n", namespace, "link", "set", "lo", "up"])
        means = Means.choose(switch, shape, shaper)
        in_userspace = bool(shape.delay_s) and not means.netem
        if not in_userspace:
            call(["ip", "-n", switch, "link", "add", "switch", "type", "bridge", "mcast_snooping", "0"])
            call(["ip", "-n", switch, "link", "set", "switch", "up"])
        for host in self.hosts:
            self._plug_in(host, means, bridged=not in_userspace)
        if in_userspace:
            self._start_delay_switch()
        self.description = f"{len(self.hosts)} hosts, {means.describe(shape)}, TCP {self._congestion}"

    def _plug_in(self, host: Host, means: Means, *, bridged: bool) -> None:
        """Connect a host with the switch."""
        switch, inner, port = self._switch, host.namespace, _port(host)
        call(["ip", "link", "add", "eth0", "netns", inner, "type", "veth", "peer", "name", port, "netns", switch])
        if bridged:
            call(["ip", "-n", switch, "link", "set", port, "master", "switch"])
        means.limit_rate(switch, port, self._shape)
        call(["ip", "-n", switch, "link", "set", port, "up"])
        means.impair(inner, "eth0", self._shape)
        call(["ip", "-n", inner, "address", "add", f"{host.address}/24", "dev", "eth0"])
        call(["ip", "-n", inner, "link", "set", "eth0", "up"])
        _set_congestion_control(inner, self._congestion)

    def _start_delay_switch(self) -> None:
        script = Path(__file__).with_name("delay_switch.py")
        argv = [sys.executable, str(script), repr(self._shape.delay_s), *map(_port, self.hosts)]
        self._delay_switch = subprocess.Popen(
            inside(self._switch, *argv), stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._delay_switch.stdout is not None
        with self._delay_switch.stdout as output:
            if output.readline() != "ready\n":
                raise NetemError("the userspace switch did not start; its message is above")


@contextlib.contextmanager
def network(
    hosts: int = 2,
    *,
    rate: str | float | None = None,
    delay: str | float = 0.0,
    loss: str | float = 0.0,
    queue: str | float = QUEUE_S,
    shaper: str | None = None,
    congestion: str = "cubic",
) -> Iterator[Network]:
    """Build a network for the time of a block.

    Whatever ends the block, or this process, the namespaces go and the processes in them; also on SIGKILL.

    Args:
        hosts: how many; with senders and one receiver, host A is as good a receiver as any.
        rate: of the link from the switch to each host, e.g. "1Gbit"; None does not limit it.
        delay: one way, from any host to any other, e.g. "2ms".
        loss: share of packets lost, one way, e.g. "0.1%".
        queue: what the switch keeps for a host before it drops, as time at the rate.
        shaper: "tbf" or "htb" to insist on one of them.
        congestion: TCP's congestion control on all hosts; the machine's own may be another.

    Raises:
        NetemError: a tool, a privilege or a part of the kernel is missing, or a value makes no sense.
        LocalProtocolError: the rate cannot be read.
    """
    built = Network(hosts, Shape.parse(rate, delay, loss, queue), shaper, congestion)
    try:
        yield built
        built.check()
    finally:
        built.close()


def two_hosts(**options: Any) -> contextlib.AbstractContextManager[Network]:
    """`network` with the hosts A and B."""
    return network(2, **options)


def enter(host: Host) -> None:
    """Move the calling thread, and every thread and process that it starts from now on, to a host.

    For child processes of `multiprocessing`; the thread cannot return. Raises OSError if the host is gone.
    """
    namespace = os.open(f"/var/run/netns/{host.namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if sys.version_info >= (3, 12):
            os.setns(namespace, os.CLONE_NEWNET)
        elif ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), host.namespace)
    finally:
        os.close(namespace)


def _port(host: Host) -> str:
    """The switch's end of a host's line."""
    return f"to-{host.name.lower()}"


def _set_congestion_control(namespace: str, algorithm: str) -> None:
    """For every connection of a host that does not choose its own, where the kernel lets a namespace do that."""
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    if works(inside(namespace, "sh", "-c", f'echo "$1" >{setting}', "sh", algorithm)):
        return
    # An algorithm that is not in tcp_allowed_congestion_control can still be had by the route.
    try:
        call(["ip", "-n", namespace, "route", "change", _SUBNET, "dev", "eth0", "congctl", algorithm])
    except NetemError as error:
        raise NetemError(f"this kernel has no TCP congestion control {algorithm!r} (tcp_{algorithm})") from error
