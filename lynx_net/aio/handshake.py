"""The first frames of every lane: a Hello in both directions and, with a shared key, a Proof in both."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from lynx_net.errors import ConnectionLostError, HandshakeError, RemoteProtocolError
from lynx_net.wire.framereader import FrameReader
from lynx_net.wire.frames import MAX_SEGMENT_BYTES, MIN_SEGMENT_BYTES, ControlFrame, pack_control
from lynx_net.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    Proof,
    Received,
    Reject,
    decode_message,
    encode_message,
)
from lynx_net.wire.proof import CONNECTING, NONCE_BYTES, SERVING, prove, proves

if TYPE_CHECKING:
    from collections.abc import Callable

    from lynx_net.transport import Lane
    from lynx_net.wire.config import LinkConfig

__all__ = ["MAX_LANES", "answer_hello", "exchange_hellos", "make_hello", "read_received", "send_message"]

MAX_LANES = 64
MAX_HELLO_BYTES = 4096
"""Nothing longer is read from a peer that has not introduced itself."""

_TLS_HANDSHAKE = b"\x16\x03"
_TLS_ALERT = b"\x15\x03"
"""How the records of TLS begin with which a side of it would open, or refuse plain bytes."""


def make_hello(
    config: LinkConfig,
    link: bytes,
    incarnation: bytes,
    lane: int,
    lanes: int,
    received: int | None = None,
    *,
    keyed: bool = False,
) -> Hello:
    """Our side's greeting for one lane.

    `received` is given where it is re-opened; `keyed` says whether there is a shared key to be proved.
    """
    return Hello(
        version=PROTOCOL_VERSION,
        link=link,
        incarnation=incarnation,
        lane=lane,
        lanes=lanes,
        segment_bytes=config.segment_bytes,
        initial_credit=config.initial_credit_bytes,
        deadline_ms=max(1, round(config.deadline_s * 1000)),
        received=received,
        nonce=secrets.token_bytes(NONCE_BYTES) if keyed else b"",
    )


async def send_message(lane: Lane, message: Message) -> bytes:
    """Put one control message on a lane that no link owns yet; returns its payload."""
    payload = encode_message(message)
    await lane.send([pack_control(payload)])
    return payload


async def exchange_hellos(lane: Lane, ours: Hello, key: bytes | None) -> Hello:
    """The connecting side's handshake on a new lane; returns the peer's greeting.

    Raises:
        HandshakeError: the peer speaks something else, another version, has no or another key, or rejects us.
        ConnectionLostError: it closed before it had said anything useful.
    """
    our_payload = await send_message(lane, ours)
    theirs, their_payload = await _read_hello(lane, keyed=key is not None)
    if (theirs.link, theirs.lane, theirs.lanes) != (ours.link, ours.lane, ours.lanes):
        raise HandshakeError(f"link, lane or lanes: {lane.peer} answers for another lane than this one")
    if key is not None:
        await send_message(lane, Proof(prove(key, CONNECTING, our_payload, their_payload)))
        await _read_proof(lane, key, SERVING, our_payload, their_payload)
    return theirs


async def answer_hello(lane: Lane, answer: Callable[[Hello], Hello], key: bytes | None) -> Hello:
    """The serving side's handshake on a new lane; returns the peer's greeting. A peer that is refused is told why.

    Args:
        answer: gives our greeting for the peer's, or raises HandshakeError if that one does not fit.

    Raises:
        HandshakeError, ConnectionLostError: as `exchange_hellos`.
    """
    try:
        theirs, their_payload = await _read_hello(lane, keyed=key is not None)
        ours = answer(theirs)
        our_payload = await send_message(lane, ours)
        if key is not None:
            await _read_proof(lane, key, CONNECTING, their_payload, our_payload)
            await send_message(lane, Proof(prove(key, SERVING, their_payload, our_payload)))
    except HandshakeError as error:
        # The peer may be gone already, or the lane unable to carry anything; it is told if it still listens.
        with contextlib.suppress(ConnectionLostError, HandshakeError):
            await send_message(lane, Reject(str(error)))
        raise
    return theirs


async def read_received(lane: Lane, index: int) -> int:
    """The serving side's last word of a handshake that re-opens a lane: how many frames have come on it.

    Raises:
        HandshakeError, ConnectionLostError: as `exchange_hellos`.
    """
    message, _ = await _read_message(lane)
    if not isinstance(message, Received) or message.lane != index:
        raise HandshakeError(f"{lane.peer} sent a {message.tag} message instead of the count of this lane")
    return message.frames


async def _read_hello(lane: Lane, *, keyed: bool) -> tuple[Hello, bytes]:
    message, payload = await _read_message(lane)
    if not isinstance(message, Hello):
        raise HandshakeError(f"{lane.peer} began with a {message.tag} message instead of a greeting")
    _check(message, lane.peer)
    if keyed and not message.nonce:
        raise HandshakeError(f"key: {lane.peer} has no shared key, and this side requires one")
    if message.nonce and not keyed:
        raise HandshakeError(f"key: {lane.peer} requires a shared key, and this side has none")
    return message, payload


async def _read_proof(lane: Lane, key: bytes, role: bytes, connecting_hello: bytes, serving_hello: bytes) -> None:
    message, _ = await _read_message(lane)
    if not isinstance(message, Proof):
        raise HandshakeError(f"{lane.peer} sent a {message.tag} message instead of the proof of its key")
    if not proves(message.mac, key, role, connecting_hello, serving_hello):
        raise HandshakeError(f"key: {lane.peer} has another shared key, or its greeting was changed or recorded")


async def _read_message(lane: Lane) -> tuple[Message, bytes]:
    """Read one control message with its payload, and not a byte more."""
    reader = FrameReader(max_control_bytes=MAX_HELLO_BYTES)
    start = reader.buffers()[0]
    while True:
        # Only one view at a time: what lies behind the message belongs to the next, or to the link.
        count = await lane.receive_into(reader.buffers()[:1])
        if start[:2] in (_TLS_HANDSHAKE, _TLS_ALERT):
            ours = "this side does not" if start[:2] == _TLS_HANDSHAKE else "this side did not"
            raise HandshakeError(f"{lane.peer} speaks TLS, and {ours}; both sides must use tls://")
        if count == 0:
            raise ConnectionLostError(f"{lane.peer} closed the connection during the handshake")
        try:
            frames = reader.received(count)
            payload = frames[0].payload if frames and isinstance(frames[0], ControlFrame) else None
            message = None if payload is None else decode_message(payload)
        except RemoteProtocolError as error:
            raise HandshakeError(f"{lane.peer} does not speak this protocol: {error}") from error
        if frames and message is None:
            raise HandshakeError(f"{lane.peer} sent data before its greeting")
        if isinstance(message, Reject):
            raise HandshakeError(f"{lane.peer} rejects the connection: {message.reason}")
        if message is not None and payload is not None:
            return message, payload


def _check(hello: Hello, peer: str) -> None:
    if hello.version != PROTOCOL_VERSION:
        raise HandshakeError(f"version differs: {peer} speaks {hello.version}, this side speaks {PROTOCOL_VERSION}")
    wrong = [
        name
        for name, good in {
            "link": len(hello.link) == 16,
            "incarnation": len(hello.incarnation) == 8,
            "lanes": 1 <= hello.lanes <= MAX_LANES,
            "lane": hello.lane < hello.lanes,
            "segment_bytes": MIN_SEGMENT_BYTES <= hello.segment_bytes <= MAX_SEGMENT_BYTES,
            "deadline_ms": hello.deadline_ms >= 1,
            "nonce": len(hello.nonce) in (0, NONCE_BYTES),
        }.items()
        if not good
    ]
    if wrong:
        raise HandshakeError(f"{peer} greets with impossible values of {', '.join(wrong)}")
