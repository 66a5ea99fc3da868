"""The first frame of every lane, in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lynx_net.errors import ConnectionLostError, HandshakeError, RemoteProtocolError
from lynx_net.wire.frames import MAX_SEGMENT_BYTES, MIN_SEGMENT_BYTES, ControlFrame, FrameReader, pack_control
from lynx_net.wire.messages import PROTOCOL_VERSION, Hello, Message, Reject, decode_message, encode_message

if TYPE_CHECKING:
    from lynx_net.transport import Lane
    from lynx_net.wire.config import LinkConfig

__all__ = ["MAX_LANES", "make_hello", "read_hello", "send_message"]

MAX_LANES = 64
MAX_HELLO_BYTES = 4096
"""Nothing longer is read from a peer that has not introduced itself."""


def make_hello(
    config: LinkConfig, link: bytes, incarnation: bytes, lane: int, lanes: int, received: int | None = None
) -> Hello:
    """Our side's greeting for one lane; `received` where it is re-opened."""
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
    )


async def send_message(lane: Lane, message: Message) -> None:
    """Put one control message on a lane that no link owns yet."""
    await lane.send([pack_control(encode_message(message))])


async def read_hello(lane: Lane) -> Hello:
    """Read the peer's greeting, and not a byte more.

    Raises:
        HandshakeError: the peer speaks something else, another version, or rejects us; names what differs.
        ConnectionLostError: it closed before it had said anything useful.
    """
    reader = FrameReader(max_control_bytes=MAX_HELLO_BYTES)
    while True:
        # Only one view at a time: what lies behind the Hello belongs to the link.
        count = await lane.receive_into(reader.buffers()[:1])
        if count == 0:
            raise ConnectionLostError(f"{lane.peer} closed the connection during the handshake")
        try:
            frames = reader.received(count)
            message = decode_message(frames[0].payload) if frames and isinstance(frames[0], ControlFrame) else None
        except RemoteProtocolError as error:
            raise HandshakeError(f"{lane.peer} does not speak this protocol: {error}") from error
        if frames and message is None:
            raise HandshakeError(f"{lane.peer} sent data before its greeting")
        if message is not None:
            return _check(message, lane.peer)


def _check(message: Message, peer: str) -> Hello:
    if isinstance(message, Reject):
        raise HandshakeError(f"{peer} rejects the connection: {message.reason}")
    if not isinstance(message, Hello):
        raise HandshakeError(f"{peer} began with a {message.tag} message instead of a greeting")
    if message.version != PROTOCOL_VERSION:
        raise HandshakeError(f"version differs: {peer} speaks {message.version}, this side speaks {PROTOCOL_VERSION}")
    wrong = [
        name
        for name, good in {
            "link": len(message.link) == 16,
            "incarnation": len(message.incarnation) == 8,
            "lanes": 1 <= message.lanes <= MAX_LANES,
            "lane": message.lane < message.lanes,
            "segment_bytes": MIN_SEGMENT_BYTES <= message.segment_bytes <= MAX_SEGMENT_BYTES,
            "deadline_ms": message.deadline_ms >= 1,
        }.items()
        if not good
    ]
    if wrong:
        raise HandshakeError(f"{peer} greets with impossible values of {', '.join(wrong)}")
    return message
