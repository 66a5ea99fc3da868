"""Control messages: what one side packs the other unpacks, and nothing else is a message."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wirekit import LAYOUT, MESSAGE_TYPES, any_message, plain

from lynx_net.errors import LocalProtocolError, RemoteProtocolError
from lynx_net.wire import messages as m
from lynx_net.wire.frames import MAX_CONTROL_BYTES
from lynx_net.wire.messages import decode_message, encode_message

OFFER = m.OfferMessage(1, "r", LAYOUT.to_wire(), "lynx", {"alpha": 1.0}, 2, 4096, {"prompt": [1, 2]}, None)
CREDIT = m.Credit(1, 0, 100)


def as_map(message: m.Message) -> dict[str, Any]:
    unpacked: dict[str, Any] = msgpack.unpackb(encode_message(message))
    return unpacked


def nested(depth: int, leaf: object = 1) -> Any:
    value: Any = leaf
    for _ in range(depth):
        value = [value]
    return value


@given(any_message)
def test_every_message_comes_out_as_it_went_in(message: m.Message) -> None:
    assert decode_message(encode_message(message)) == message


def test_the_strategy_above_knows_every_message() -> None:
    assert set(MESSAGE_TYPES) == set(m.MESSAGE_TYPES.values())


def test_tuples_arrive_as_lists() -> None:
    received = decode_message(encode_message(replace(OFFER, meta={"a": (1, (2, 3))})))
    assert isinstance(received, m.OfferMessage)
    assert received.meta == {"a": [1, [2, 3]]}


@given(any_message, st.data())
def test_a_missing_or_unknown_field_is_named(message: m.Message, data: st.DataObject) -> None:
    packed = as_map(message)
    names = [field.name for field in fields(message)]
    if names and data.draw(st.booleans()):
        odd = data.draw(st.sampled_from(names))
        del packed[odd]
    else:
        odd = "surprise"
        packed[odd] = 1
    with pytest.raises(RemoteProtocolError, match=f"missing or unknown fields: {odd}"):
        decode_message(msgpack.packb(packed))


WRONG_VALUES: dict[str, list[Any]] = {
    "int": [True, False, -1, 1 << 63, (1 << 64) - 1, 1.0, "1", b"1", None, [1], {}],
    "int | None": [True, -1, 1 << 63, 0.0, "1", [], {}],
    "str": [1, b"text", None, ["a"], {}],
    "bytes": ["text", 1, None, [1]],
    "dict[str, Any]": [[], "text", None, 1],
}
EXAMPLES: list[m.Message] = [
    m.Hello(2, b"l" * 16, b"i" * 8, 0, 1, 4096, 0, 5000, None, b""),
    m.Proof(b"m" * 32),
    m.Reject("no"),
    m.Request("r", {}),
    m.Refuse("r", "no"),
    OFFER,
    m.Accept(1),
    CREDIT,
    m.Complete(1),
    m.Received(0, 64),
    m.Abort(1, 1, "why"),
    m.Bye("done"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.tag)
def test_a_field_of_a_wrong_type_is_named_at_both_ends(message: m.Message) -> None:
    for field in fields(message):
        for value in WRONG_VALUES[str(field.type)]:
            packed = as_map(message) | {field.name: value}
            with pytest.raises(RemoteProtocolError, match=rf"{message.tag} message whose {field.name} "):
                decode_message(msgpack.packb(packed))
            with pytest.raises(LocalProtocolError, match=rf"{message.tag} message whose {field.name} "):
                encode_message(replace(message, **{field.name: value}))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x80",
        msgpack.packb([]),
        msgpack.packb("ping"),
        msgpack.packb({"t": "nonsense"}),
        msgpack.packb({"t": 1}),
        msgpack.packb({"t": ["ping"]}),
        msgpack.packb({"t": b"ping"}),
        msgpack.packb({b"t": "ping"}),
        msgpack.packb({"t": "ping"}) + b"\x00",
        msgpack.packb({"t": "ping"})[:-1],
        b"\x91" * 3000,
        b"\x91" * 3000 + b"\xc0",
        b"\x81" * 3000,
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x81\xa1t\xa4\xff\xff\xff\xff",
    ],
)
def test_what_is_no_message_is_a_remote_protocol_error(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_message(payload)


@given(st.binary(max_size=200) | plain.map(msgpack.packb) | any_message.map(encode_message), st.data())
def test_any_bytes_are_a_message_or_a_remote_protocol_error(payload: bytes, data: st.DataObject) -> None:
    broken = bytearray(payload)
    for at in data.draw(st.lists(st.integers(0, max(len(payload) - 1, 0)), max_size=4)):
        if broken:
            broken[at] = data.draw(st.integers(0, 255))
    try:
        message = decode_message(bytes(broken))
    except RemoteProtocolError:
        return
    assert decode_message(encode_message(message)) == message or "nan" in repr(message)


REFUSED_META: list[Any] = [
    {1: 2},
    {"inner": [{2: 3}]},
    {b"bytes": 1},
    {"a": nested(m.MAX_DEPTH - 1)},
    {"a": 1 << 64},
    {"a": object()},
    {"a": "\ud800"},
    {"\ud800": 1},
    {"a": {1, 2}},
    {"a": msgpack.ExtType(1, b"")},
    {"a": msgpack.Timestamp(1)},
    {"a": nested(m.MAX_DEPTH - 2, msgpack.Timestamp(1))},
    {"a": [0] * m.MAX_ITEMS},
    {"a": [0] * (m.MAX_ITEMS // 2), "b": [0] * (m.MAX_ITEMS // 2)},
    {"a": "x" * MAX_CONTROL_BYTES},
    {"a": b"x" * MAX_CONTROL_BYTES},
]


@pytest.mark.parametrize("meta", REFUSED_META, ids=range(len(REFUSED_META)))
def test_what_the_peer_would_refuse_is_refused_before_it_is_sent(meta: dict[Any, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        encode_message(m.Request("r", meta))


@pytest.mark.parametrize("meta", [meta for meta in REFUSED_META if "\\u" not in ascii(meta)][:4])
def test_a_peer_that_sends_it_all_the_same_breaks_the_protocol(meta: dict[Any, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_message(msgpack.packb({"t": "request", "request_id": "r", "meta": meta}))


def test_extension_types_are_refused_on_arrival() -> None:
    for value in (msgpack.ExtType(1, b""), msgpack.ExtType(1, b"1"), msgpack.Timestamp(1)):
        for meta in ({"a": value}, {"a": nested(m.MAX_DEPTH - 2, value)}):
            with pytest.raises(RemoteProtocolError):
                decode_message(msgpack.packb({"t": "request", "request_id": "r", "meta": meta}))


def test_the_limits_themselves_are_allowed() -> None:
    for meta in (
        {"a": nested(m.MAX_DEPTH - 2)},
        {"a": [0] * (m.MAX_ITEMS - 4)},
        {"a": "x" * (MAX_CONTROL_BYTES - 100)},
        {"a": 2**64 - 1, "b": -(2**63), "c": float("inf"), "": None},
    ):
        assert decode_message(encode_message(m.Request("r", meta))) == m.Request("r", meta)


def test_metadata_that_contains_itself_is_refused_at_once() -> None:
    loop: list[Any] = []
    loop.extend([loop] * 1000)
    with pytest.raises(LocalProtocolError):
        encode_message(m.Request("r", {"a": loop}))
