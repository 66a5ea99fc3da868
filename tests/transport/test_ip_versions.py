"""IPv6: which addresses accept which peers, and addresses that need their interface."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from typing import Any

import pytest

import lynx_net
from lynx_net import PerClass, SocketOptions
from lynx_net.errors import ConnectionFailedError, LocalProtocolError
from lynx_net.transport import Address, transport_for


def _on(url: str, host: str) -> str:
    return f"tcp://{host}:{url.rpartition(':')[2]}"


@pytest.mark.parametrize(
    ("served", "reached", "not_reached"),
    [
        ("[::]", ["[::1]", "127.0.0.1", "[::ffff:127.0.0.1]"], []),
        ("[::1]", ["[::1]"], ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1", "127.0.0.5"], ["[::1]"]),
    ],
)
async def test_who_reaches_whom(served: str, reached: list[str], not_reached: list[str], make_cache: Any) -> None:
    async with lynx_net.serve(f"tcp://{served}:0") as server:
        assert server.url.startswith(f"tcp://{served}:")
        for host in reached:
            async with lynx_net.connect(_on(server.url, host), lanes=2) as link:
                await make_cache(tokens=20).send_on(link)
                peer = Address.parse((await server.accept()).peer).host
                assert peer == ("::1" if host == "[::1]" else "127.0.0.1"), "IPv4 is shown as IPv4"
        for host in not_reached:
            with pytest.raises(ConnectionFailedError, match="refused"):
                async with lynx_net.connect(_on(server.url, host)):
                    pass


async def test_marks_reach_ipv4_peers_of_a_server_for_both() -> None:
    """The socket is of IPv6, the packets are of IPv4: both options are set."""
    address, options = Address.parse("tcp://[::]:0"), SocketOptions(dscp=PerClass(anchor=46))
    listener = await transport_for(address).listen(address, options)
    target = Address.parse(_on(listener.url, "127.0.0.1"))
    left = await transport_for(target).connect(target, SocketOptions())
    right = await listener.accept()
    right.mark(0)
    sock = right.plain_socket
    assert sock is not None
    assert sock.family == socket.AF_INET6
    assert sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) >> 2 == 46
    assert sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS) >> 2 == 46
    for closable in (left, right, listener):
        closable.close()


LINK_LOCAL = """
import asyncio, subprocess, time, uvloop
from lynx_net import SocketOptions
from lynx_net.transport import Address, transport_for

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["ip", "address", "add", "fe80::7/64", "dev", "lo", "nodad"], check=True)
routes = ["ip", "-6", "route", "show", "table", "local"]
while "fe80::7" not in subprocess.run(routes, check=True, capture_output=True, text=True).stdout:
    time.sleep(0.01)  # the kernel does that later

async def main():
    address = Address.parse("tcp://[fe80::7%lo]:0")
    listener = await transport_for(address).listen(address, SocketOptions())
    options = SocketOptions(local_addresses=["fe80::7%lo"])
    left = await transport_for(address).connect(Address.parse(listener.url), options)
    right = await listener.accept()
    await left.send([b"hello"])
    got = bytearray(5)
    await right.receive_into([memoryview(got)])
    print(listener.url.rpartition(":")[0], right.peer.rpartition(":")[0], bytes(got))
    for closable in (left, right, listener):
        closable.close()

asyncio.run(main())
uvloop.run(main())
"""


def _own_network(*command: str) -> list[str]:
    return ["unshare", "--map-root-user", "--net", *command]


@pytest.mark.skipif(
    shutil.which("ip") is None
    or shutil.which("unshare") is None
    or subprocess.run(_own_network("true"), capture_output=True).returncode != 0,
    reason="needs a network namespace",
)
def test_link_local_addresses_keep_their_interface() -> None:
    done = subprocess.run(_own_network(sys.executable, "-c", LINK_LOCAL), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 2 * "tcp://[fe80::7%lo] tcp://[fe80::7%lo] b'hello'\n"


@pytest.mark.parametrize(
    ("host", "match"),
    [
        ("[fe80::1]", r"needs its interface, as in \[fe80::1%eth0\]"),
        ("[fe80::1%no-such]", "no-such no interface"),
        ("x" * 70, "cannot be a host name|cannot be resolved"),
    ],
)
async def test_hosts_that_cannot_be(host: str, match: str) -> None:
    with pytest.raises(ConnectionFailedError, match=match):
        async with lynx_net.connect(f"tcp://{host}:7000"):
            pass
    with pytest.raises(ConnectionFailedError, match=match):
        async with lynx_net.serve(f"tcp://{host}:7000"):
            pass


@pytest.mark.parametrize("url", ["tcp://::1:7000", "tcp://[::1]", "tcp://[::1]7000", "tcp://[]:7000"])
async def test_brackets(url: str) -> None:
    with pytest.raises(LocalProtocolError):
        async with lynx_net.connect(url):
            pass


async def test_a_server_on_an_address_of_another_machine() -> None:
    with pytest.raises(ConnectionFailedError, match=r"198\.51\.100\.7 is not an address of this machine"):
        async with lynx_net.serve("tcp://198.51.100.7:0"):
            pass
