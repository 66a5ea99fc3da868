"""Unix sockets: whole links over them, and what becomes of their files."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import lynx_net
from lynx_net import SocketOptions
from lynx_net.errors import ConnectionFailedError, LocalProtocolError
from lynx_net.transport import Address, transport_for

if TYPE_CHECKING:
    from pathlib import Path

DEAD_SERVER = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
sock.listen()
print("listening", flush=True)
sys.stdin.read()
"""


def _mode(path: Path) -> int | None:
    """Type and permissions of a file, None if there is none."""
    return path.stat().st_mode if path.exists() else None


def _killed_server(path: Path) -> None:
    """Leave the file of a server that was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", DEAD_SERVER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        server.send_signal(signal.SIGKILL)


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    path = tmp_path / "lynx.sock"
    assert len(os.fsencode(path)) < 107
    return path


@pytest.mark.parametrize("kind", ["file", "abstract"])
async def test_a_link_with_lanes(kind: str, path: Path, make_cache: Any, same: Any) -> None:
    url = f"unix://{path}" if kind == "file" else f"unix://@lynx-test-{os.getpid()}"
    cache = make_cache()
    async with lynx_net.serve(url) as server, lynx_net.connect(server.url, lanes=3) as link:
        assert server.url == url == link.peer
        assert (await server.accept()).peer == f"{url} (process {os.getpid()})"
        assert "lynx_net-send-2" in {thread.name for thread in threading.enumerate()}, "threads drive such lanes"
        sending = asyncio.create_task(cache.send_on(link))
        async for transfer in server:
            await transfer.complete
            break
        await sending
        assert same(transfer.target, cache.decoded("lynx"))


async def test_the_file_comes_and_goes_with_the_server(path: Path) -> None:
    for _ in range(2):
        async with lynx_net.serve(f"unix://{path}"):
            assert stat.S_ISSOCK(_mode(path) or 0)
        assert _mode(path) is None


@pytest.mark.parametrize(("mode", "wanted"), [(None, 0o600), (0o660, 0o660), (0o606, 0o606)])
async def test_permissions(mode: int | None, wanted: int, path: Path) -> None:
    before = os.umask(0o077)
    try:
        async with lynx_net.serve(f"unix://{path}", sockets=SocketOptions(unix_mode=mode)):
            assert stat.S_IMODE(_mode(path) or 0) == wanted
    finally:
        os.umask(before)


async def test_the_file_of_a_killed_server_is_replaced(path: Path, make_cache: Any) -> None:
    _killed_server(path)
    assert _mode(path) is not None
    with pytest.raises(ConnectionFailedError, match="refused"):
        async with lynx_net.connect(f"unix://{path}"):
            pass
    async with lynx_net.serve(f"unix://{path}") as again, lynx_net.connect(again.url) as link:
        await make_cache(tokens=20).send_on(link)


async def test_a_live_server_is_not_disturbed(path: Path, make_cache: Any) -> None:
    async with lynx_net.serve(f"unix://{path}") as server, lynx_net.connect(server.url) as link:
        for _ in range(3):
            with pytest.raises(ConnectionFailedError, match="taken"):
                async with lynx_net.serve(server.url):
                    pass
        await make_cache(tokens=20).send_on(link)
        async with lynx_net.connect(server.url) as another:
            await make_cache(tokens=20).send_on(another)


async def test_of_many_servers_one_takes_a_dead_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    address = Address.parse(f"unix://{path}")
    outcomes = await asyncio.gather(
        *(transport_for(address).listen(address, SocketOptions()) for _ in range(8)), return_exceptions=True
    )
    listeners = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    assert len(listeners) == 1
    assert sum(isinstance(outcome, ConnectionFailedError) for outcome in outcomes) == 7
    (await transport_for(address).connect(address, SocketOptions())).close()
    listeners[0].close()


async def test_a_closing_server_leaves_the_file_of_its_successor(path: Path) -> None:
    async with lynx_net.serve(f"unix://{path}") as server:
        os.unlink(path)
        async with lynx_net.serve(server.url) as successor:
            await server.close()
            async with lynx_net.connect(successor.url):
                pass


async def test_a_file_that_is_no_socket_stays(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT, 0o640))
    before = _mode(path)
    with pytest.raises(ConnectionFailedError, match="a file that is no socket"):
        async with lynx_net.serve(f"unix://{path}"):
            pass
    assert _mode(path) == before


async def test_a_socket_of_another_type_stays(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(ConnectionFailedError, match="wrong type"):
            async with lynx_net.serve(f"unix://{path}"):
                pass
    assert _mode(path) is not None


async def test_the_folder_is_missing(path: Path) -> None:
    with pytest.raises(ConnectionFailedError, match="No such file or directory"):
        async with lynx_net.serve(f"unix://{path.parent}/missing/lynx.sock"):
            pass


async def test_a_full_queue_is_waited_for(path: Path) -> None:
    """A server that accepts slowly: the kernel says so at once, unlike for TCP."""
    address = Address.parse(f"unix://{path}")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(0)
        first = await transport_for(address).connect(address, SocketOptions())
        connecting = asyncio.create_task(transport_for(address).connect(address, SocketOptions()))
        await asyncio.wait([connecting], timeout=0.05)
        assert not connecting.done()
        server.accept()[0].close()
        second = await connecting
        # Its lane is usable: the peer that accepts it gets the bytes.
        await second.send([b"hello"])
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(16) == b"hello"
        first.close()
        second.close()


async def test_send_buffers_on_both_sides(path: Path) -> None:
    address, options = Address.parse(f"unix://{path}"), SocketOptions(send_buffer_bytes=96 * 1024)
    listener = await transport_for(address).listen(address, options)
    left = await transport_for(address).connect(address, options)
    right = await listener.accept()
    for lane in (left, right):
        assert lane.plain_socket is not None
        assert lane.plain_socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * 96 * 1024
        lane.close()
    listener.close()


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("unix://relative/path", "absolute"),
        ("unix://", "not an address"),
        ("unix://@", "abstract"),
        ("unix:///", "absolute"),
        ("unix:///a\0b", "absolute"),
        (f"unix:///{'x' * 107}", "107 bytes"),
    ],
)
async def test_bad_addresses(url: str, match: str) -> None:
    with pytest.raises(LocalProtocolError, match=match):
        async with lynx_net.connect(url):
            pass
