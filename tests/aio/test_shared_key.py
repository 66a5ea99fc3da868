"""Shared keys from outside: who is let in, who is not and why, and what an attacker may try."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from securitykit import QUICK, Tap, impostor, logged, move, raw, refused

import lynx_net
from lynx_net.aio.handshake import make_hello
from lynx_net.errors import HandshakeError, LocalProtocolError, PeerTimeoutError
from lynx_net.wire.frames import HEADER_BYTES, pack_control
from lynx_net.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    Proof,
    Reject,
    decode_message,
    encode_message,
)
from lynx_net.wire.proof import CONNECTING, SERVING, prove

KEY = os.urandom(32)


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lynx_net")


@pytest.mark.parametrize("key", [b"", b"fifteen bytes..", "a text of more than sixteen characters"])
async def test_a_key_that_is_none(key: Any) -> None:
    for opening in (lynx_net.connect, lynx_net.serve):
        with pytest.raises(LocalProtocolError, match="shared key must"):
            async with opening("tcp://127.0.0.1:0", key=key):
                pass


@pytest.mark.parametrize("lanes", [1, 3])
async def test_a_transfer_with_a_key(lanes: int, make_cache: Any, same: Any) -> None:
    async with lynx_net.serve("tcp://127.0.0.1:0", key=KEY) as server:
        await move(server.url, server, make_cache(), same, key=KEY, lanes=lanes)


@pytest.mark.parametrize(
    ("serving", "connecting", "at_client", "at_server"),
    [
        (KEY, os.urandom(32), "rejects the connection: key: .* has another shared key", "has another shared key"),
        (KEY, None, "rejects the connection: key: .* has no shared key, and this side requires", "has no shared key"),
        (
            None,
            KEY,
            "rejects the connection: key: .* requires a shared key, and this side has none",
            "and this side has none",
        ),
    ],
    ids=["another", "none", "one too many"],  # the same in all workers
)
async def test_another_key_or_none_is_refused_on_both_sides(
    serving: bytes | None,
    connecting: bytes | None,
    at_client: str,
    at_server: str,
    make_cache: Any,
    same: Any,
    caplog: Any,
) -> None:
    async with lynx_net.serve("tcp://127.0.0.1:0", key=serving, config=QUICK) as server:
        with pytest.raises(HandshakeError, match=at_client):
            async with lynx_net.connect(server.url, key=connecting, config=QUICK):
                pass
        await logged(caplog, at_server)
        await move(server.url, server, make_cache(tokens=20), same, key=serving)


def _frame(message: Message) -> bytes:
    return pack_control(encode_message(message))


async def _read(reader: asyncio.StreamReader) -> Message:
    header = await reader.readexactly(HEADER_BYTES)
    return decode_message(await reader.readexactly(int.from_bytes(header[4:8], "little")))


def _hello(**changes: Any) -> Hello:
    return replace(make_hello(QUICK, os.urandom(16), os.urandom(8), 0, 1, keyed=True), **changes)


async def test_a_server_that_ignores_the_key_is_refused() -> None:
    """It would do as a server without a key does; the client stops before it proves or sends anything."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_frame(replace(await _read(reader), nonce=b"")))  # type: ignore[type-var]

    async with impostor(speak) as url:
        error = await refused(url, key=KEY)
        assert isinstance(error, HandshakeError)
        assert "has no shared key, and this side requires one" in str(error)


@pytest.mark.parametrize("answer", ["nothing", "own proof back", "guess", "hello again"])
async def test_a_server_that_cannot_prove_the_key_is_refused(answer: str) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await _read(reader)
        assert isinstance(hello, Hello)
        writer.write(_frame(replace(hello, nonce=hello.nonce if answer == "own proof back" else os.urandom(32))))
        proof = await _read(reader)
        replies = {"own proof back": proof, "guess": Proof(os.urandom(32)), "hello again": hello}
        if answer in replies:
            writer.write(_frame(replies[answer]))

    async with impostor(speak) as url:
        error = await refused(url, key=KEY)
        assert isinstance(error, PeerTimeoutError if answer == "nothing" else HandshakeError)


async def test_a_server_that_answers_for_another_lane_is_refused() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_frame(replace(await _read(reader), link=os.urandom(16))))  # type: ignore[type-var]

    async with impostor(speak) as url:
        assert "another lane" in str(await refused(url))


async def test_a_client_cannot_reflect_the_server() -> None:
    """All it could send back are the server's nonce and the proof of the other role."""
    async with lynx_net.serve("tcp://127.0.0.1:0", key=KEY, config=QUICK) as server:
        ours = _hello()
        async with raw(server.url) as (reader, writer):
            writer.write(_frame(ours))
            theirs = await _read(reader)
            # What the server itself would say to these greetings, had somebody made it say that.
            writer.write(_frame(Proof(prove(KEY, SERVING, encode_message(ours), encode_message(theirs)))))
            answer = await _read(reader)
            assert isinstance(answer, Reject)
            assert "has another shared key" in answer.reason
            assert await reader.read() == b""


async def test_a_server_proves_nothing_to_a_peer_that_has_not() -> None:
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", key=KEY, config=QUICK) as server,
        raw(server.url) as (reader, writer),
    ):
        writer.write(_frame(_hello()))
        assert isinstance(await _read(reader), Hello)
        async with asyncio.timeout(4):
            assert await reader.read() == b""


async def test_a_recorded_connection_cannot_be_replayed(make_cache: Any, caplog: Any) -> None:
    """Everything a good client ever sent, once more: the server's nonce is another, so the proof is worth nothing."""
    async with lynx_net.serve("tcp://127.0.0.1:0", key=KEY, config=QUICK) as server:
        async with (
            Tap.to(server.url) as tap,
            lynx_net.connect(tap.url, key=KEY) as link,
        ):
            sending = asyncio.create_task(make_cache(tokens=20).send_on(link))
            async for transfer in server:
                await transfer.complete
                break
            await sending
            recorded = await server.accept()
        await recorded.closed()
        async with raw(server.url) as (reader, writer):
            writer.write(bytes(tap.passed))
            await logged(caplog, "changed or recorded")
            async with asyncio.timeout(4):
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()
    assert caplog.text.count("is up") == 2  # both sides of the recorded one


@pytest.mark.parametrize(
    "field", ["version", "incarnation", "segment_bytes", "initial_credit", "deadline_ms", "nonce", "lanes"]
)
@pytest.mark.parametrize("to_server", [True, False])
async def test_a_greeting_changed_on_its_way_is_refused(field: str, to_server: bool, caplog: Any) -> None:
    """By somebody who makes every checksum right again; without a key most of these would go unseen."""
    changed = {"version": 1, "incarnation": bytes(8), "segment_bytes": 4096, "initial_credit": 1, "deadline_ms": 77}
    changed |= {"nonce": b"", "lanes": 2}
    async with lynx_net.serve("tcp://127.0.0.1:0", key=KEY, config=QUICK) as server:

        async def meddle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with raw(server.url) as (far_reader, far_writer):
                sides = [(reader, far_writer, to_server), (far_reader, writer, not to_server)]
                await asyncio.gather(*(_pass_on(*side, {field: changed[field]}) for side in sides))

        async with impostor(meddle) as url:
            error = await refused(url, key=KEY)
    assert isinstance(error, HandshakeError)
    assert "is up" not in caplog.text


async def test_a_relay_that_changes_nothing_passes(make_cache: Any, same: Any) -> None:
    """So that the test above fails for what it says."""
    async with lynx_net.serve("tcp://127.0.0.1:0", key=KEY) as server, Tap.to(server.url) as tap:
        await move(tap.url, server, make_cache(tokens=20), same, key=KEY)


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, meddle: bool, changes: dict[str, Any]
) -> None:
    """Relay the messages of one direction, the first of them changed."""
    while True:
        try:
            message = await _read(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        if meddle and isinstance(message, Hello):
            message = replace(message, **changes)  # type: ignore[arg-type]
        writer.write(_frame(message))


async def test_garbage_at_every_point_of_a_keyed_handshake(make_cache: Any, same: Any, caplog: Any) -> None:
    """Also from a peer that has the key and breaks off in the middle of its proof: none of them gets a link."""
    async with lynx_net.serve("tcp://127.0.0.1:0", key=KEY, config=QUICK) as server:
        for kept in range(0, 90, 6):
            ours = _hello()
            async with raw(server.url) as (reader, writer):
                writer.write(_frame(ours))
                theirs = await _read(reader)
                proof = _frame(Proof(prove(KEY, CONNECTING, encode_message(ours), encode_message(theirs))))
                assert kept < len(proof)
                writer.write(proof[:kept] + os.urandom(200))
                async with asyncio.timeout(4):
                    with contextlib.suppress(ConnectionResetError):
                        await reader.read()
        await move(server.url, server, make_cache(tokens=20), same, key=KEY)
    assert caplog.text.count("does not speak this protocol") == 15
    assert caplog.text.count("is up") == 2  # both sides of the good one


@pytest.mark.parametrize("message", [_hello(), Reject("no"), Proof(bytes(31)), Proof(b"")])
async def test_something_else_than_a_proof(message: Message, caplog: Any) -> None:
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", key=KEY, config=QUICK) as server,
        raw(server.url) as (reader, writer),
    ):
        writer.write(_frame(_hello()))
        await _read(reader)
        writer.write(_frame(message))
        assert isinstance(await _read(reader), Reject)
        await logged(caplog, "refused tcp://")


async def test_a_peer_of_another_version_is_told_so() -> None:
    """Even if its greeting has other fields."""
    old = msgpack.packb({"t": "hello", "version": 1, "link": bytes(16)})
    async with lynx_net.serve("tcp://127.0.0.1:0") as server, raw(server.url) as (reader, writer):
        writer.write(pack_control(old))
        answer = await _read(reader)
        assert isinstance(answer, Reject)
        assert f"its version is 1, this side speaks {PROTOCOL_VERSION}" in answer.reason
