"""One side of a link for tests that play its peer, message by message."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pairkit import CONFIG, Side
from wirekit import LAYOUT, STREAMS

from lynx_net.wire.bursts import SendBytes, seal
from lynx_net.wire.frames import HEADER_BYTES, SegmentHeader, checksum
from lynx_net.wire.layout import CacheLayout
from lynx_net.wire.messages import (
    Accept,
    Message,
    OfferMessage,
    decode_message,
)

if TYPE_CHECKING:
    from lynx_net.wire.config import LinkConfig

EMPTY = CacheLayout(layers=1, tokens=0, heads=1, key_size=4, value_size=4)
"""A cache with nothing in it."""


def make_side(*, initiator: bool = True, peer: LinkConfig = CONFIG, **settings: Any) -> Side:
    return Side(initiator=initiator, lanes=2, config=replace(CONFIG, **settings), peer=peer)


def said(side: Side) -> list[Message]:
    """The control messages that wait to be sent, taken out."""
    messages: list[Message] = []
    while side.core.scheduler.has_control():
        chosen = side.core.outgoing.next_send(0, side.now)
        assert isinstance(chosen, SendBytes)
        messages.append(decode_message(bytes(seal([chosen])[0])[HEADER_BYTES:]))
    return messages


def hear(side: Side, message: Message) -> None:
    side.handle(side.core.message(message, side.now))


def an_offer(transfer: int = 2, **changes: Any) -> OfferMessage:
    offer = OfferMessage(transfer, "r", LAYOUT.to_wire(), "none", {}, STREAMS, 4096, {}, None)
    return replace(offer, **changes)


def receiving(transfer: int = 2, **settings: Any) -> Side:
    """A side that has accepted a transfer."""
    side = make_side(**settings)
    hear(side, an_offer(transfer))
    side.take()
    assert said(side)[0] == Accept(transfer)
    return side


def arrive(side: Side, header: SegmentHeader, payload: bytes) -> memoryview | None:
    view = side.core.incoming.place(header, side.now)
    if view is not None:
        view[:] = payload
    side.handle(side.core.incoming.segment(header, checksum(view), side.now))
    return view


def segments_now(side: Side) -> list[SendBytes]:
    chosen: list[SendBytes] = []
    while isinstance(part := side.core.outgoing.next_send(1, side.now), SendBytes):
        chosen.append(part)
    return chosen
