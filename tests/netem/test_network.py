"""The emulated network from outside: its rate, delay and loss, and that nothing of it stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lynx_net.errors import LynxError
from perf.netem import Host, NetemError, Network, Shape, enter, network, two_hosts
from perf.netem import commands as netem_commands
from perf.netem import shaping as netem_shaping
from perf.netem.shaping import Means, netem_options, nftables_rules

ROOT = Path(__file__).resolve().parents[2]


def socket_on(host: Host, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A socket of that host, bound to its address; made in a thread that goes there and ends."""

    def make() -> socket.socket:
        enter(host)
        sock = socket.socket(socket.AF_INET, kind)
        sock.bind((host.address, 0))
        sock.settimeout(20)
        return sock

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def two_hosts_or_skip(stack: ExitStack, **options: Any) -> Network:
    """A network, where this kernel has what it takes."""
    try:
        return stack.enter_context(two_hosts(**options))
    except NetemError as error:
        pytest.skip(str(error))


def connection(net: Network, stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    """A TCP connection from A to B."""
    listener, near = stack.enter_context(socket_on(net["B"])), stack.enter_context(socket_on(net["A"]))
    listener.listen()
    near.connect(listener.getsockname())
    return near, stack.enter_context(listener.accept()[0])


@pytest.mark.parametrize("shaper", ["tbf", "htb"])
def test_the_rate(shaper: str, namespaces: Any) -> None:
    """Payload over a connection comes at the rate less what headers take, whichever qdisc keeps it."""
    total_bytes, rate_bps = 6_000_000, 100e6
    with ExitStack() as stack:
        net = two_hosts_or_skip(stack, rate=rate_bps, shaper=shaper)
        assert f"rate 100 Mbit/s by {shaper}" in net.description
        near, far = connection(net, stack)
        sending = threading.Thread(target=near.sendall, args=(bytes(total_bytes),))
        began_s = time.monotonic()
        sending.start()
        left = total_bytes
        while left:
            left -= len(far.recv(1 << 16))
        took_s = time.monotonic() - began_s
        sending.join()
    assert 0.6 * rate_bps < total_bytes * 8 / took_s < 1.02 * rate_bps


def test_the_delay_and_the_congestion_control(namespaces: Any) -> None:
    with two_hosts(delay="20ms") as net, ExitStack() as stack:
        near, far = connection(net, stack)
        times_s = []
        for _ in range(5):
            began_s = time.monotonic()
            near.send(b"there")
            far.recv(5)
            far.send(b"back")
            near.recv(4)
            times_s.append(time.monotonic() - began_s)
        for one in (near, far):
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"cubic"
    assert min(times_s) >= 0.0395
    assert statistics.median(times_s) < 0.1
    assert "delay 20 ms each way by" in net.description


def test_the_loss(namespaces: Any) -> None:
    """Of 2,000 datagrams a fifth is lost, give or take five standard deviations; none without a loss."""
    count = 2000
    for loss, least, most in (("0%", count, count), ("20%", 0.755 * count, 0.845 * count)):
        with ExitStack() as stack:
            net = two_hosts_or_skip(stack, loss=loss)
            near = stack.enter_context(socket_on(net["A"], socket.SOCK_DGRAM))
            far = stack.enter_context(socket_on(net["B"], socket.SOCK_DGRAM))
            arrived = 0
            for _ in range(count // 50):
                for _ in range(50):
                    near.sendto(b"x", far.getsockname())
                far.settimeout(0.1 if loss == "0%" else 0.01)
                try:
                    for _ in range(50):
                        far.recv(10)
                        arrived += 1
                except TimeoutError:
                    continue
        assert least <= arrived <= most, loss


def test_nothing_stays_and_nobody_else_is_touched(namespaces: Any) -> None:
    with two_hosts() as other:
        others = namespaces()
        processes: list[subprocess.Popen[Any]] = []

        def fail_inside() -> None:
            with network(9, rate="1Gbit") as net:
                assert len(namespaces() - others) == 10
                assert [host.name for host in net.hosts] == list("ABCDEFGHI")
                argv = ["sh", "-c", "trap '' TERM; echo $LYNX_NET_HOST_A; sleep 60"]
                processes.append(net.popen("I", argv, stdout=subprocess.PIPE))
                with processes[0].stdout as output:  # type: ignore[union-attr]
                    assert output.readline().decode().strip() == net["A"].address
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_inside()
        (process,) = processes
        assert process.returncode == -signal.SIGKILL
        assert namespaces() == others
        with ExitStack() as stack:
            near, far = connection(other, stack)
            near.send(b"still here")
            assert far.recv(10) == b"still here"
    assert namespaces() == set()


def runs(process: int) -> bool:
    """Whether a process, which need not be a child of this one, has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "perf.netem", *arguments]


def test_the_command_hands_on_addresses_and_the_exit_status(namespaces: Any) -> None:
    script = "echo $LYNX_NET_HOST_A $LYNX_NET_HOST_B $LYNX_NET_HOST_C; exit 7"
    argv = command("--hosts", "3", "--on", "B", "exec sleep 60", "--", "sh", "-c", script)
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, messages = process.communicate(timeout=60)
    assert output.split() == ["10.77.0.1", "10.77.0.2", "10.77.0.3"], messages
    assert process.returncode == 7
    assert "3 hosts" in messages
    assert namespaces(process.pid) == set()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_leaves_neither_namespace_nor_process(number: int, status: int, namespaces: Any) -> None:
    argv = command("--delay", "1ms", "--", "sh", "-c", "echo $$; exec sleep 60")
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert len(namespaces(process.pid)) == 3
        process.send_signal(number)
        assert process.wait(30) == status
    # Only after a signal that cannot be handled does somebody else clean up, a moment later.
    deadline_s = time.monotonic() + (10 if number == signal.SIGKILL else 0)
    while (namespaces(process.pid) or runs(child)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert namespaces(process.pid) == set()
    assert not runs(child)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rate": "fast"}, "rate"),
        ({"delay": "2"}, "time"),
        ({"delay": -1.0}, "delay"),
        ({"loss": "much"}, "share"),
        ({"loss": "100%"}, "loss"),
        ({"queue": "0ms"}, "queue"),
        ({"hosts": 1}, "hosts"),
        ({"hosts": 27}, "hosts"),
    ],
    ids=str,
)
def test_values_that_make_no_sense(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(LynxError, match=words), network(**wrong):
        pass


@pytest.mark.parametrize(("tool", "package"), [("ip", "iproute2"), ("tc", "iproute2"), ("nft", "nftables")])
def test_a_missing_tool_names_its_package(tool: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == tool else which(name))
    with pytest.raises(NetemError, match=f"`{tool}` is not installed.*{package}"):
        netem_commands.require_tool(tool)


def test_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetemError, match="root"):
        netem_commands.require_privilege()


def test_what_is_wrong_inside_is_said(namespaces: Any) -> None:
    with pytest.raises(NetemError, match="congestion control 'nonsense'"), two_hosts(congestion="nonsense"):
        pass
    with pytest.raises(NetemError, match="by tbf or htb"), two_hosts(rate=1e9, shaper="fq"):
        pass
    with two_hosts() as net, pytest.raises(NetemError, match="no host 'C'"):
        net.popen("C", ["true"])
    assert namespaces() == set()


def test_means_follow_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel with netem is told, and one without tbf; neither need be this one."""
    shape = Shape.parse("1Gbit", "2ms", "0.1%")
    kernel: set[str] = set()
    monkeypatch.setattr(netem_shaping, "_has", lambda namespace, qdisc: qdisc in kernel)
    monkeypatch.setattr(netem_shaping, "require_tool", lambda tool: None)
    with pytest.raises(NetemError, match="no tbf and no htb"):
        Means.choose("x", shape)
    kernel = {"htb"}
    assert Means.choose("x", shape) == Means("htb", netem=False)
    kernel = {"htb", "tbf", "netem"}
    means = Means.choose("x", shape)
    assert means == Means("tbf", netem=True)
    assert means.describe(shape) == (
        "rate 1000 Mbit/s by tbf (queue 25 ms), delay 2 ms each way by netem, loss 0.1000% by netem"
    )
    assert " ".join(netem_options(shape)) == "netem limit 1000000 delay 2000us loss random 0.100000%"
    assert "mod 1000000 < 1000 " in nftables_rules("eth0", shape)
    assert (shape.burst_bytes, shape.queue_bytes) == (125_000, 3_125_000)
