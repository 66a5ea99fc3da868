"""Control messages: frozen dataclasses, packed as msgpack maps with size and depth limits.

Every message is a map {"t": type name, field: value, ...}. A map that lacks a field, has one too many, or a value of
the wrong type is a RemoteProtocolError, so that a version mismatch shows as a named field and never as a guess.
Whatever a receiver refuses is refused at the sender as well, as a LocalProtocolError and before anything is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

import msgpack

from lynx_net.errors import LocalProtocolError, RemoteProtocolError
from lynx_net.wire.frames import MAX_CONTROL_BYTES

__all__ = [
    "INTEGER_LIMIT",
    "MAX_DEPTH",
    "MAX_ITEMS",
    "MAX_REASON",
    "MAX_STREAMS",
    "MESSAGE_TYPES",
    "PROTOCOL_VERSION",
    "Abort",
    "AbortCode",
    "Accept",
    "Bye",
    "Complete",
    "Credit",
    "Hello",
    "Message",
    "OfferMessage",
    "Ping",
    "Proof",
    "Received",
    "Refuse",
    "Reject",
    "Request",
    "abort_message",
    "decode_message",
    "encode_message",
]

PROTOCOL_VERSION = 4

MAX_DEPTH = 8
"""Containers inside one another, the message itself included."""
MAX_ITEMS = 1 << 17
"""Values of a message in all, those inside its maps and lists included."""
INTEGER_LIMIT = 1 << 63
MAX_STREAMS = 16
"""Streams of a transfer."""
MAX_REASON = 1000
"""Characters of the reason of an Abort."""


class AbortCode:
    """Why a transfer was given up; the number travels."""

    CANCELLED = 1
    SENDER_FAILED = 2
    RECEIVER_FAILED = 3
    INTEGRITY = 4
    CODEC = 5
    TOO_LARGE = 6
    STALLED = 7
    MISUSE = 8
    OVERLOADED = 9


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all control messages; `tag` is the type name on the wire."""

    tag: ClassVar[str]


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First frame of every lane, in both directions.

    Attributes:
        version: PROTOCOL_VERSION of the sender.
        link: 16 random bytes of the connecting side that join the lanes of one link.
        incarnation: 8 random bytes made once per process, so that a restarted peer is a new peer.
        lane, lanes: which lane of how many this connection is.
        segment_bytes: the largest segment the sender of this message takes.
        initial_credit: bytes of stream 0 that may be sent with an offer before it is accepted.
        deadline_ms: silence after which the sender of this message gives its peer up.
        received: None on the first connection of a lane; on a later one the number of frames that its sender
            has received on this lane so far.
        nonce: 32 fresh random bytes if the sender has a shared key, and none if it has not.
    """

    tag: ClassVar[str] = "hello"
    version: int
    link: bytes
    incarnation: bytes
    lane: int
    lanes: int
    segment_bytes: int
    initial_credit: int
    deadline_ms: int
    received: int | None
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Proof(Message):
    """Shows, behind the Hellos of a lane, that its sender has the shared key; see lynx_net/wire/proof.py."""

    tag: ClassVar[str] = "proof"
    mac: bytes


@dataclass(frozen=True, slots=True)
class Reject(Message):
    """Answer to a Hello or Proof that does not fit; the connection is closed behind it."""

    tag: ClassVar[str] = "reject"
    reason: str


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Sent when nothing else was for a tenth of the deadline."""

    tag: ClassVar[str] = "ping"


@dataclass(frozen=True, slots=True)
class Request(Message):
    """Ask the peer to send the cache with this id."""

    tag: ClassVar[str] = "request"
    request_id: str
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refuse(Message):
    """The request will not be served."""

    tag: ClassVar[str] = "refuse"
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class OfferMessage(Message):
    """A transfer begins. Its id is odd when the connecting side sends, even otherwise, and grows."""

    tag: ClassVar[str] = "offer"
    transfer: int
    request_id: str
    layout: dict[str, Any]
    codec: str
    codec_params: dict[str, Any]
    streams: int
    segment_bytes: int
    meta: dict[str, Any]
    first_token: int | None


@dataclass(frozen=True, slots=True)
class Accept(Message):
    """The receiver has reserved the memory of a transfer."""

    tag: ClassVar[str] = "accept"
    transfer: int


@dataclass(frozen=True, slots=True)
class Credit(Message):
    """The sender may have sent `limit` payload bytes of this stream in total."""

    tag: ClassVar[str] = "credit"
    transfer: int
    stream: int
    limit: int


@dataclass(frozen=True, slots=True)
class Complete(Message):
    """Every page of every stream has arrived, was verified, and is decoded in place."""

    tag: ClassVar[str] = "complete"
    transfer: int


@dataclass(frozen=True, slots=True)
class Received(Message):
    """So many frames of a lane have arrived since it was first opened; their sender may forget them."""

    tag: ClassVar[str] = "received"
    lane: int
    frames: int


@dataclass(frozen=True, slots=True)
class Abort(Message):
    """Either side gives a transfer up; `code` is one of AbortCode."""

    tag: ClassVar[str] = "abort"
    transfer: int
    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Bye(Message):
    """The link closes in good order; nothing follows on this lane."""

    tag: ClassVar[str] = "bye"
    reason: str


_HANDSHAKE = (Hello, Proof, Reject)
_LINK = (Ping, Request, Refuse, OfferMessage, Accept, Credit, Complete, Received, Abort, Bye)
MESSAGE_TYPES: dict[str, type[Message]] = {kind.tag: kind for kind in (*_HANDSHAKE, *_LINK)}
_FIELD_TYPES: dict[str, frozenset[type]] = {
    "int": frozenset((int,)),
    "str": frozenset((str,)),
    "bytes": frozenset((bytes,)),
    "int | None": frozenset((int, type(None))),
    "dict[str, Any]": frozenset((dict,)),
}
_PLAIN = frozenset((int, str, bytes, float, bool, type(None)))
_STRINGS = frozenset((str,))
_LISTS = (list, tuple)
_EXTENSIONS = (msgpack.ExtType, msgpack.Timestamp)


class _Schema:
    """What a type of message looks like on the wire."""

    __slots__ = ("fields", "flat", "kind", "names")

    def __init__(self, kind: type[Message]) -> None:
        self.kind = kind
        types = {field.name: _FIELD_TYPES[str(field.type)] for field in fields(kind)}
        self.fields = tuple((name, of_field, int in of_field) for name, of_field in types.items())
        """Name, types, and whether it is a number."""
        self.names = {"t", *types}
        self.flat = all(dict not in of_field for of_field in types.values())
        """Nothing can be nested in its fields, so `_wrong_field` finds all that `_check_nested` would."""


_SCHEMAS = {tag: _Schema(kind) for tag, kind in MESSAGE_TYPES.items()}


def encode_message(message: Message) -> bytes:
    """Pack a message; raises LocalProtocolError if it is too large, too deep or cannot be packed."""
    schema = _SCHEMAS[message.tag]
    data: dict[str, Any] = {"t": message.tag}
    for name, _, _ in schema.fields:
        data[name] = getattr(message, name)
    wrong = _wrong_field(data, schema)
    if wrong is not None:
        raise LocalProtocolError(f"a {message.tag} message whose {wrong}")
    try:
        if not schema.flat:
            _check_nested(data)
        packed = cast("bytes", msgpack.packb(data))
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"a {message.tag} message cannot be packed: {error}") from error
    if len(packed) > MAX_CONTROL_BYTES:
        raise LocalProtocolError(
            f"a {message.tag} message of {len(packed)} bytes, at most {MAX_CONTROL_BYTES} fit; is the metadata large?"
        )
    return packed


def decode_message(payload: bytes) -> Message:
    """Unpack and check a message; raises RemoteProtocolError if it is none."""
    try:
        data = msgpack.unpackb(
            payload,
            max_str_len=MAX_CONTROL_BYTES,
            max_bin_len=MAX_CONTROL_BYTES,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
        tag = data.get("t") if type(data) is dict else None
        schema = _SCHEMAS.get(tag) if type(tag) is str else None
        if schema is None or not schema.flat or len(data) != len(schema.names):
            _check_nested(data)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"a control message cannot be unpacked: {error or type(error).__name__}") from error
    if schema is None:
        raise RemoteProtocolError(f"unknown control message {tag!r:.40}")
    if data.keys() != schema.names:
        odd = ", ".join(sorted(str(name)[:40] for name in data.keys() ^ schema.names)[:8])
        version = data.get("version")
        other = f"; its version is {version!r:.20}, this side speaks {PROTOCOL_VERSION}" if tag == Hello.tag else ""
        raise RemoteProtocolError(f"a {tag} message with missing or unknown fields: {odd}{other}")
    wrong = _wrong_field(data, schema)
    if wrong is not None:
        raise RemoteProtocolError(f"a {tag} message whose {wrong}")
    del data["t"]
    return schema.kind(**data)


def abort_message(transfer: int, code: int, reason: str) -> Abort:
    """An Abort that can be sent whatever its reason quotes: too much, or what UTF-8 cannot carry (a file name)."""
    return Abort(transfer, code, reason[:MAX_REASON].encode(errors="replace").decode())


def _wrong_field(data: dict[str, Any], schema: _Schema) -> str | None:
    for name, types, is_number in schema.fields:
        value = data[name]
        kind = type(value)
        # What was received has the very type; what is to be sent may be of a subclass.
        if kind not in types and (kind is bool or not isinstance(value, tuple(types))):
            return f"{name} has the type {kind.__name__}"
        if is_number and value is not None and not 0 <= value < INTEGER_LIMIT:
            return f"{name} is out of range"
    return None


def _check_nested(data: object) -> None:
    """Refuse what is nested too deep, holds too much, or msgpack would only carry one way; no recursion."""
    level: list[Any] = [data]
    items = 0
    for _ in range(MAX_DEPTH):
        following: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                if not _STRINGS.issuperset(map(type, container)) and not all(isinstance(key, str) for key in container):
                    raise ValueError("the keys of a map must be strings")
                following += container.values()
            elif isinstance(container, _EXTENSIONS):  # one of them is a tuple
                raise ValueError("extension types are not allowed")
            elif isinstance(container, _LISTS):
                following += container
        items += len(following)
        if items > MAX_ITEMS:
            raise ValueError(f"more than {MAX_ITEMS} values")
        level = [item for item in following if type(item) not in _PLAIN]
        if not level:
            return
    if any(isinstance(item, (dict, *_LISTS, *_EXTENSIONS)) for item in level):
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
