"""TLS from outside: who is let in, who is not and why, and what an attacker or a wrong setting may try."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from typing import Any

import pytest
from faultkit import descriptors_and_tasks
from securitykit import QUICK, Tap, address_of, logged, move, refused

import lynx_net
from lynx_net import LinkConfig
from lynx_net.errors import (
    ConnectionFailedError,
    ConnectionLostError,
    HandshakeError,
    LocalProtocolError,
    PeerTimeoutError,
)
from lynx_net.testing.relay import FaultyRelay

NO_RESUME = LinkConfig(resume_s=0)


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lynx_net")


# ---- TLS: what works


@pytest.mark.parametrize("lanes", [1, 3])
async def test_a_transfer_over_tls(lanes: int, certificates: Any, make_cache: Any, same: Any) -> None:
    tls = certificates.config()
    async with lynx_net.serve("tls://127.0.0.1:0", tls=tls) as server:
        assert server.url.startswith("tls://127.0.0.1:")
        await move(server.url, server, make_cache(layers=4, tokens=2000), same, tls=tls, lanes=lanes)


async def test_tls_and_a_key_together(certificates: Any, make_cache: Any, same: Any) -> None:
    """A server whose clients are anybody asks them for a key instead."""
    serving = certificates.config(require_client_certificate=False)
    connecting = certificates.config(certificate=None)
    async with lynx_net.serve("tls://[::1]:0", tls=serving, key=bytes(32)) as server:
        await move(server.url, server, make_cache(), same, tls=connecting, key=bytes(32))
        assert "another shared key" in str(await refused(server.url, tls=connecting, key=os.urandom(32)))


async def test_nothing_of_a_cache_travels_in_clear(certificates: Any, make_cache: Any) -> None:
    """The metadata of an offer can be read on a tcp:// link and not on a tls:// one."""
    tls = certificates.config()
    for scheme, options, seen in (("tcp", {}, True), ("tls", {"tls": tls}, False)):
        async with (
            lynx_net.serve(f"{scheme}://127.0.0.1:0", **options) as server,
            Tap.to(server.url) as tap,
            lynx_net.connect(tap.url, **options) as link,
        ):
            await make_cache(tokens=20).send_on(link, "a-secret-name")
        assert (b"a-secret-name" in tap.passed) == seen


async def test_a_name_of_choice_and_no_name_at_all(certificates: Any, make_cache: Any, same: Any) -> None:
    serving = certificates.config(certificate=certificates.elsewhere)
    async with lynx_net.serve("tls://127.0.0.1:0", tls=serving) as server:
        for tls in (certificates.config(server_name="elsewhere.example"), certificates.config(check_server_name=False)):
            await move(server.url, server, make_cache(tokens=20), same, tls=tls)


# ---- TLS: who is refused


@pytest.mark.parametrize(
    ("serving", "connecting", "at_client", "at_server"),
    [
        ({"certificate": "stranger"}, {}, "not believed: unable to get local issuer", "does not know the authority"),
        ({"certificate": "expired"}, {}, "not believed: certificate has expired", "refuses this side's certificate"),
        ({"certificate": "elsewhere"}, {}, "not valid for '127.0.0.1'", "refuses this side's certificate"),
        ({}, {"certificate": "stranger"}, "does not know the authority", "not believed: unable to get local issuer"),
        ({}, {"certificate": "expired"}, "refuses this side's certificate", "not believed: certificate has expired"),
        ({}, {"certificate": None}, "requires a certificate", "it shows no certificate"),
    ],
)
async def test_a_wrong_certificate_is_refused_on_both_sides(
    serving: Any,
    connecting: Any,
    at_client: str,
    at_server: str,
    certificates: Any,
    make_cache: Any,
    same: Any,
    caplog: Any,
) -> None:
    def config(changes: dict[str, str | None]) -> lynx_net.TlsConfig:
        named = {name: value and getattr(certificates, value) for name, value in changes.items()}
        return certificates.config(**named)

    async with lynx_net.serve("tls://127.0.0.1:0", tls=config(serving), config=QUICK) as server:
        for _ in range(5):
            error = await refused(server.url, tls=config(connecting))
            assert isinstance(error, HandshakeError)
            assert at_client in str(error)
        await logged(caplog, at_server)
        if not serving:
            await move(server.url, server, make_cache(tokens=20), same, tls=certificates.config())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2])
async def test_an_older_tls_is_refused(version: ssl.TLSVersion, certificates: Any, caplog: Any) -> None:
    tls = certificates.config()
    async with lynx_net.serve("tls://127.0.0.1:0", tls=tls, config=QUICK) as server:
        context = tls.client_context()
        context.minimum_version = context.maximum_version = version
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection(*address_of(server.url), ssl=context)
        await logged(caplog, "speaks no TLS 1.3")


async def test_plain_to_tls_and_tls_to_plain(certificates: Any, make_cache: Any, same: Any, caplog: Any) -> None:
    tls = certificates.config()
    async with lynx_net.serve("tls://127.0.0.1:0", tls=tls, config=QUICK) as server:
        error = await refused(server.url.replace("tls", "tcp"))
        assert isinstance(error, HandshakeError)
        assert "speaks TLS" in str(error)
        await logged(caplog, "does not speak TLS")
        await move(server.url, server, make_cache(tokens=20), same, tls=tls)
    async with lynx_net.serve("tcp://127.0.0.1:0", config=QUICK) as server:
        error = await refused(server.url.replace("tcp", "tls"), tls=tls)
        assert isinstance(error, HandshakeError)
        assert "does not speak TLS" in str(error)
        await logged(caplog, "speaks TLS, and this side does not")
        await move(server.url, server, make_cache(tokens=20), same)


async def test_something_else_listens_or_nobody(certificates: Any) -> None:
    tls = certificates.config()

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        error = await refused(f"tls://127.0.0.1:{port}", tls=tls)
        assert isinstance(error, HandshakeError)
        assert "no TLS" in str(error)
    assert isinstance(await refused(f"tls://127.0.0.1:{port}", tls=tls), ConnectionFailedError)


async def test_a_server_that_says_nothing(certificates: Any) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        error = await refused(f"tls://127.0.0.1:{sock.getsockname()[1]}", tls=certificates.config())
        assert isinstance(error, PeerTimeoutError)


async def test_clients_that_hang_in_the_handshake_hold_up_nobody(certificates: Any, make_cache: Any, same: Any) -> None:
    """Some say nothing, some stop after half a greeting; a good one gets through, and they are closed in time."""
    tls = certificates.config()
    half = _client_hello(tls)[:60]
    async with lynx_net.serve("tls://127.0.0.1:0", tls=tls, config=QUICK) as server:
        hanging = [await asyncio.open_connection(*address_of(server.url)) for _ in range(40)]
        for _, writer in hanging[::2]:
            writer.write(half)
        await move(server.url, server, make_cache(tokens=20), same, tls=tls, config=QUICK)
        async with asyncio.timeout(4):
            for reader, writer in hanging:
                await reader.read()
                writer.close()


async def test_a_server_closes_while_clients_hang(certificates: Any) -> None:
    tls = certificates.config()
    before = asyncio.all_tasks()
    async with lynx_net.serve("tls://127.0.0.1:0", tls=tls) as server:
        writers = [(await asyncio.open_connection(*address_of(server.url)))[1] for _ in range(5)]
        await asyncio.sleep(0.05)
        began_s = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began_s < 1
    for writer in writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == before


def _client_hello(tls: lynx_net.TlsConfig) -> bytes:
    """What a client of TLS says first."""
    outgoing = ssl.MemoryBIO()
    engine = tls.client_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        engine.do_handshake()
    return outgoing.read()


async def test_garbage_at_every_point_of_a_tls_handshake(certificates: Any, make_cache: Any, same: Any) -> None:
    """A greeting cut off anywhere and continued with garbage costs that connection only."""
    tls = certificates.config()
    greeting = _client_hello(tls)
    async with lynx_net.serve("tls://127.0.0.1:0", tls=tls, config=QUICK) as server:
        connections = []
        for kept in [*range(12), *range(12, len(greeting) + 1, 41), len(greeting)]:
            reader, writer = await asyncio.open_connection(*address_of(server.url))
            writer.write(greeting[:kept] + os.urandom(3000))
            connections.append((reader, writer))
        await move(server.url, server, make_cache(tokens=20), same, tls=tls, config=QUICK)
        async with asyncio.timeout(4):
            for reader, writer in connections:
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()
                writer.close()


async def test_a_byte_changed_anywhere_in_a_tls_handshake(certificates: Any, make_cache: Any, same: Any) -> None:
    """No link comes up, or one that ends; never a wrong byte, and the next link works."""
    tls = certificates.config()
    short = LinkConfig(deadline_s=0.25)  # a changed length makes both sides wait for bytes that never come
    async with lynx_net.serve("tls://127.0.0.1:0", tls=tls, config=QUICK) as server:
        for position in [0, 1, 3, 5, 8, 40, 120, 200, 400, 700, 1000]:
            async with FaultyRelay.to(*address_of(server.url)) as relay:
                relay.faults.flip_at = {position}
                with pytest.raises((HandshakeError, ConnectionLostError, PeerTimeoutError)):
                    async with lynx_net.connect(relay.url.replace("tcp", "tls"), tls=tls, config=short) as link:
                        await make_cache(tokens=300).send_on(link)
        await move(server.url, server, make_cache(tokens=20), same, tls=tls)


async def test_a_byte_changed_later_ends_the_link(certificates: Any, make_cache: Any) -> None:
    """On both sides, with an error that says so: TLS checks every byte, so that nothing wrong is ever decoded."""
    tls = certificates.config()
    async with (
        lynx_net.serve("tls://127.0.0.1:0", tls=tls, config=NO_RESUME) as server,
        FaultyRelay.to(*address_of(server.url)) as relay,
        lynx_net.connect(relay.url.replace("tcp", "tls"), tls=tls, config=NO_RESUME) as link,
    ):
        relay.faults.flip_at = {relay.passed_bytes + 3000}
        sending = asyncio.create_task(make_cache(layers=4, tokens=1000).send_on(link))
        async for transfer in server:
            with pytest.raises(ConnectionLostError, match="changed on their way"):
                await transfer.complete
            break
        with pytest.raises(ConnectionLostError):
            await sending


async def test_a_byte_changed_later_costs_a_connection_and_nothing_else(
    certificates: Any, make_cache: Any, same: Any
) -> None:
    """Where links resume: the lane is opened again, with its certificates and its key, and the transfer completes."""
    tls, key = certificates.config(), bytes(range(16))
    cache = make_cache(layers=4, tokens=1000)
    async with (
        lynx_net.serve("tls://127.0.0.1:0", tls=tls, key=key) as server,
        FaultyRelay.to(*address_of(server.url)) as relay,
        lynx_net.connect(relay.url.replace("tcp", "tls"), tls=tls, key=key) as link,
    ):
        relay.faults.flip_at = {relay.passed_bytes + 3000}
        sending = asyncio.create_task(cache.send_on(link))
        async for transfer in server:
            await transfer.complete
            break
        await sending
        assert relay.connections == 2
    assert same(transfer.target, cache.decoded("lynx"))


async def test_a_truncated_tls_stream_is_no_clean_end(certificates: Any, make_cache: Any) -> None:
    """The connection is closed, in good order for TCP, in the middle of a transfer."""
    tls = certificates.config()
    async with (
        lynx_net.serve("tls://127.0.0.1:0", tls=tls, config=NO_RESUME) as server,
        Tap.to(server.url) as tap,
        lynx_net.connect(tap.url, tls=tls, rate="4Mbit", config=NO_RESUME) as link,
    ):
        sending = asyncio.create_task(make_cache(layers=8, tokens=1000).send_on(link))
        async for transfer in server:
            await transfer.layer_ready(0)
            tap.end()
            with pytest.raises(ConnectionLostError, match="cut off"):
                await transfer.complete
            break
        with pytest.raises(ConnectionLostError):
            await sending


async def test_tls_links_give_back_files_and_tasks(certificates: Any, make_cache: Any, same: Any) -> None:
    tls = certificates.config()

    async def rounds(count: int) -> None:
        async with lynx_net.serve("tls://127.0.0.1:0", tls=tls) as server:
            for _ in range(count):
                await move(server.url, server, make_cache(tokens=20), same, tls=tls, lanes=2)
                await refused(server.url, tls=certificates.config(certificate=certificates.stranger))
                await refused(server.url.replace("tls", "tcp"))

    await rounds(1)
    before = await descriptors_and_tasks()
    await rounds(8)
    assert await descriptors_and_tasks() == before


# ---- settings that cannot be used


async def test_certificates_and_scheme_must_agree(certificates: Any) -> None:
    tls = certificates.config()
    for opening in (lynx_net.connect, lynx_net.serve):
        with pytest.raises(LocalProtocolError, match="needs certificates"):
            async with opening("tls://127.0.0.1:0"):
                pass
        with pytest.raises(LocalProtocolError, match="in clear"):
            async with opening("tcp://127.0.0.1:0", tls=tls):
                pass


async def test_files_that_cannot_be_used_are_named(certificates: Any, tmp_path: Any) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no certificate")
    for changes, text in (
        ({"certificate": tmp_path / "missing.pem"}, "missing.pem: No such file"),
        ({"certificate": nonsense}, "nonsense.pem: no PEM"),
        ({"ca_file": tmp_path / "missing.pem"}, "missing.pem: No such file"),
        ({"ca_file": nonsense}, "nonsense.pem: no PEM"),
        ({"private_key": certificates.stranger}, "the key is not that of the certificate"),
    ):
        for opening in (lynx_net.connect, lynx_net.serve):
            with pytest.raises(LocalProtocolError, match=text):
                async with opening("tls://127.0.0.1:0", tls=certificates.config(**changes)):
                    pass


async def test_an_encrypted_key_needs_its_password(certificates: Any, make_cache: Any, same: Any) -> None:
    """And is never asked for at the terminal, where a server would wait for ever."""
    locked = certificates.lock(certificates.node, "open sesame")
    for password in (None, "wrong"):
        with pytest.raises(LocalProtocolError, match="password"):
            async with lynx_net.serve(
                "tls://127.0.0.1:0", tls=certificates.config(private_key=locked, private_key_password=password)
            ):
                pass
    tls = certificates.config(private_key=locked, private_key_password="open sesame")
    assert "sesame" not in repr(tls)
    async with lynx_net.serve("tls://127.0.0.1:0", tls=tls) as server:
        await move(server.url, server, make_cache(tokens=20), same, tls=tls)


async def test_settings_that_contradict_themselves(certificates: Any) -> None:
    with pytest.raises(LocalProtocolError, match="without a certificate"):
        async with lynx_net.serve("tls://127.0.0.1:0", tls=certificates.config(certificate=None)):
            pass
    with pytest.raises(LocalProtocolError, match="needs its certificate"):
        certificates.config(certificate=None, private_key=certificates.node)
    with pytest.raises(LocalProtocolError, match="means nothing"):
        certificates.config(server_name="x", check_server_name=False)
