"""Connections that are not what they should be, and what they cost: only themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any

import pytest

import lynx_net
from lynx_net import LinkConfig
from lynx_net.aio.handshake import make_hello
from lynx_net.errors import ConnectionFailedError, HandshakeError, LocalProtocolError, PeerTimeoutError
from lynx_net.wire.frames import pack_control
from lynx_net.wire.messages import Hello, Message, Ping, decode_message, encode_message

QUICK = LinkConfig(deadline_s=1.0)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


async def _raw(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", _port(url))


async def _until_closed(reader: asyncio.StreamReader) -> None:
    """The other side may reset the connection, since it does not read what it does not want."""
    with contextlib.suppress(ConnectionResetError):
        while await reader.read(4096):
            pass


def _frame(message: Message) -> bytes:
    return pack_control(encode_message(message))


def _hello(**changes: Any) -> Hello:
    fields = make_hello(QUICK, os.urandom(16), os.urandom(8), 0, 1)
    return Hello(**({name: getattr(fields, name) for name in Hello.__slots__} | changes))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
        bytes(200),
        os.urandom(4096),
        _frame(Ping()),
        _frame(_hello(version=99)),
        _frame(_hello(link=b"short")),
        _frame(_hello(lane=3, lanes=2)),
        _frame(_hello(lanes=1000)),
        _frame(_hello())[:30],
        b"",
    ],
)
async def test_bad_connections_cost_only_themselves(data: bytes, make_cache: Any) -> None:
    """The bad connection is closed within the deadline while a good one works."""
    async with lynx_net.serve("tcp://127.0.0.1:0", config=QUICK) as server:
        reader, writer = await _raw(server.url)
        writer.write(data)
        async with lynx_net.connect(server.url) as link:
            await make_cache(tokens=20).send_on(link)
        async with asyncio.timeout(4):
            await _until_closed(reader)
        writer.close()


async def test_a_rejected_peer_is_told_what_differs() -> None:
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        reader, writer = await _raw(server.url)
        writer.write(_frame(_hello(version=99)))
        answer = await reader.read()
        message = decode_message(answer[48:])
        assert message.tag == "reject"
        assert "version differs" in message.reason  # type: ignore[attr-defined]
        writer.close()


async def test_garbage_after_the_handshake_ends_that_link_only(make_cache: Any) -> None:
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        reader, writer = await _raw(server.url)
        writer.write(_frame(_hello()))
        await reader.readexactly(48)
        link = await server.accept()
        writer.write(os.urandom(500))
        async with asyncio.timeout(1):
            await link.closed()
        assert "not a lynx_net frame" in str(link.error)
        async with lynx_net.connect(server.url) as good:
            await make_cache(tokens=20).send_on(good)
        writer.close()


async def test_hundreds_of_idle_connections(make_cache: Any) -> None:
    """They neither block a good peer nor outlive the deadline."""
    async with lynx_net.serve("tcp://127.0.0.1:0", config=QUICK) as server:
        idle = await asyncio.gather(*(_raw(server.url) for _ in range(300)))
        async with lynx_net.connect(server.url, lanes=2) as link:
            await make_cache(tokens=20).send_on(link)
        async with asyncio.timeout(5):
            for reader, writer in idle:
                assert await reader.read() == b""
                writer.close()


async def test_a_lane_that_never_comes() -> None:
    """A link whose second lane stays away is given up and its first lane closed."""
    async with lynx_net.serve("tcp://127.0.0.1:0", config=QUICK) as server:
        reader, writer = await _raw(server.url)
        writer.write(_frame(_hello(lanes=2)))
        await reader.readexactly(48)
        async with asyncio.timeout(4):
            await _until_closed(reader)
        writer.close()


async def test_nobody_listens() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with pytest.raises(ConnectionFailedError, match=str(port)):
        async with lynx_net.connect(f"tcp://127.0.0.1:{port}"):
            pass


async def test_a_listener_that_says_nothing() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(PeerTimeoutError, match="1 s"):
            async with lynx_net.connect(f"tcp://127.0.0.1:{sock.getsockname()[1]}", config=QUICK):
                pass


async def test_something_else_listens() -> None:
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2p1 Debian, and some more words to fill a header\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(HandshakeError, match="does not speak this protocol"):
            async with lynx_net.connect(f"tcp://127.0.0.1:{port}"):
                pass


async def test_the_port_is_taken() -> None:
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        with pytest.raises(ConnectionFailedError, match="taken"):
            async with lynx_net.serve(server.url):
                pass


@pytest.mark.parametrize("url", ["127.0.0.1:7000", "tcp://127.0.0.1", "tcp://:70", "tcp://h:99999", "smoke://x:1"])
async def test_bad_addresses(url: str) -> None:
    with pytest.raises(LocalProtocolError):
        async with lynx_net.connect(url):
            pass


async def test_a_host_that_does_not_exist() -> None:
    with pytest.raises(ConnectionFailedError, match="cannot be resolved"):
        async with lynx_net.connect("tcp://no-such-host.invalid:7000"):
            pass


@pytest.mark.parametrize("lanes", [0, 65])
async def test_impossible_lane_counts(lanes: int) -> None:
    with pytest.raises(LocalProtocolError, match="lanes"):
        async with lynx_net.connect("tcp://127.0.0.1:1", lanes=lanes):
            pass
