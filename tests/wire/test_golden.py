"""Golden vectors: the bytes of version 4, which no later change may move.

`python tests/wire/test_golden.py` writes them anew; that is right only together with a new protocol version.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pairkit import CONFIG, Pair, Side
from wirekit import page_bytes

from lynx_net.wire.bursts import SendBytes, seal
from lynx_net.wire.events import TransferComplete
from lynx_net.wire.framereader import FrameReader
from lynx_net.wire.frames import (
    HEADER_BYTES,
    ControlFrame,
    SegmentFrame,
    SegmentHeader,
    SegmentStart,
    checksum,
    pack_control,
    pack_segment_header,
)
from lynx_net.wire.layout import CacheLayout
from lynx_net.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortCode,
    Accept,
    Bye,
    Complete,
    Credit,
    Hello,
    Message,
    OfferMessage,
    Ping,
    Proof,
    Received,
    Refuse,
    Reject,
    Request,
    decode_message,
    encode_message,
)
from lynx_net.wire.proof import CONNECTING, SERVING, prove, proves

GOLDEN = Path(__file__).parent / "golden"
LAYOUT = CacheLayout(layers=1, tokens=2, heads=2, key_size=3, value_size=0, page_tokens=2, raw_head=1, raw_tail=0)
"""One page, whose streams have 4097 and 0 bytes."""

HELLO = Hello(PROTOCOL_VERSION, bytes(range(16)), bytes(range(8)), 0, 1, 4096, 5000, 6000, None, b"")
KEY = bytes(range(16))
MESSAGES: list[Message] = [
    HELLO,
    Proof(bytes(range(32))),
    Reject("version: this side speaks 4, the peer 3"),
    Ping(),
    Request("request-1", {"prompt": [1, 300, 70_000], "temperature": 0.5, "model": "modèle"}),
    Refuse("request-1", "no such cache"),
    OfferMessage(1, "request-1", LAYOUT.to_wire(), "lynx", {"alpha": 1.5}, 2, 4096, {"note": None, "on": True}, 42),
    Accept(1),
    Credit(1, 0, 33_554_432),
    Complete(1),
    Received(0, 128),
    Abort(1, AbortCode.INTEGRITY, "checksum mismatch in transfer 1, layer 0 (key), stream 0"),
    Bye("closed"),
]
SEGMENT = SegmentHeader(
    transfer=0x0102030405060708,
    page=0x11121314,
    stream=1,
    offset=0x21222000,
    length=5,
    stream_bytes=0x21222005,
    checksum=checksum(b"bytes"),
)


def frames_of(side: Side) -> list[bytes]:
    """Everything a side can send now, a frame each."""
    frames: list[bytes] = []
    while isinstance(chosen := side.core.outgoing.next_send(0, 0.0), SendBytes):
        frames.append(b"".join(seal([chosen], not side.core.outgoing.has_next(0, 0.0))))
        side.out[0].data += frames[-1]
    return frames


def transfer() -> list[tuple[str, bytes]]:
    """A whole link over one lane: handshake, one transfer, goodbye; ">" is the connecting side."""
    pair = Pair(1)
    lines = [(">", pack_control(encode_message(HELLO))), ("<", pack_control(encode_message(HELLO)))]
    sent = pair.left.offer(layout=LAYOUT)
    moved = True
    while moved:
        moved = False
        for mark, side, other in ((">", pair.left, pair.right), ("<", pair.right, pair.left)):
            for frame in frames_of(side):
                lines.append((mark, frame))
                while other.receive(0, 1 << 20):
                    pass
                while other.offers:
                    other.take()
                while other.to_decode:
                    other.decode()
                moved = True
    assert pair.right.ended[sent] == TransferComplete(sent)
    pair.left.core.bye("closed")
    lines += [(">", frame) for frame in frames_of(pair.left)]
    return lines


def keyed_handshake() -> list[tuple[str, bytes]]:
    """The four frames of a lane whose sides share KEY."""
    hellos = [encode_message(replace(HELLO, nonce=bytes([number] * 32))) for number in (1, 2)]
    proofs = [encode_message(Proof(prove(KEY, role, *hellos))) for role in (CONNECTING, SERVING)]
    return list(zip("><><", map(pack_control, [*hellos, *proofs]), strict=True))


def vectors() -> dict[str, list[str]]:
    files = {message.tag: [pack_control(encode_message(message)).hex()] for message in MESSAGES}
    files["segment-header"] = [
        pack_segment_header(SEGMENT, following, last).hex() for following, last in ((0, False), (2, False), (0, True))
    ]
    for name, lines in (("transfer", transfer()), ("keyed-handshake", keyed_handshake())):
        files[name] = [f"{mark} {frame.hex()}" for mark, frame in lines]
    return files


@pytest.mark.parametrize(
    "name", [*(message.tag for message in MESSAGES), "segment-header", "transfer", "keyed-handshake"]
)
def test_the_bytes_are_exactly_these(name: str) -> None:
    assert (GOLDEN / f"{name}.hex").read_text().splitlines() == vectors()[name]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.tag)
def test_the_recorded_bytes_are_understood(message: Message) -> None:
    frame = bytes.fromhex((GOLDEN / f"{message.tag}.hex").read_text())
    assert decode_message(frame[HEADER_BYTES:]) == message


def test_every_file_is_tested() -> None:
    assert {path.stem for path in GOLDEN.glob("*.hex")} == set(vectors())


def test_a_reader_understands_the_recorded_transfer() -> None:
    """Read from the file alone, knowing nothing of how it was made."""
    tags: list[str] = []
    readers = {">": FrameReader(), "<": FrameReader()}
    received: dict[tuple[int, int], bytearray] = {}
    for line in (GOLDEN / "transfer.hex").read_text().splitlines():
        mark, data = line[0], bytes.fromhex(line[2:])
        reader = readers[mark]
        at = 0
        while at < len(data):
            view = reader.buffers()[0]
            part = data[at : at + view.nbytes]
            view[: len(part)] = part
            at += len(part)
            for frame in reader.received(len(part)):
                match frame:
                    case ControlFrame(payload):
                        tags.append(mark + decode_message(payload).tag)
                    case SegmentStart(header):
                        for done in reader.deliver_to(memoryview(bytearray(header.length))):
                            assert done.payload is not None
                            received.setdefault((header.page, header.stream), bytearray()).extend(done.payload)
                        tags.append(mark + "segment")
                    case SegmentFrame(header, payload):
                        assert payload is not None
                        assert checksum(payload) == header.checksum
                        received.setdefault((header.page, header.stream), bytearray()).extend(payload)
        assert reader.idle
    assert tags[:3] == [">hello", "<hello", ">offer"]
    assert tags[-2:] == ["<complete", ">bye"]
    assert received == {(0, stream): page_bytes(1, 0, stream) for stream in (0, 1)}


def test_the_recorded_proofs_are_those_of_the_document() -> None:
    """Computed here from section 4 of docs/wire-format.md, and by the code."""
    lines = (GOLDEN / "keyed-handshake.hex").read_text().splitlines()
    payloads = [bytes.fromhex(line[2:])[HEADER_BYTES:] for line in lines]
    hellos, messages = payloads[:2], [decode_message(payload) for payload in payloads]
    text = b"".join(len(hello).to_bytes(4, "little") + hello for hello in hellos)
    labels = (b"lynx_net connecting ", b"lynx_net serving    ")
    for label, role, message in zip(labels, (CONNECTING, SERVING), messages[2:], strict=True):
        assert isinstance(message, Proof)
        assert message.mac == hmac.new(KEY, label + text, hashlib.sha256).digest()
        assert proves(message.mac, KEY, role, hellos[0], hellos[1])


def test_the_vectors_belong_to_this_configuration() -> None:
    assert (HELLO.segment_bytes, HELLO.initial_credit) == (CONFIG.segment_bytes, CONFIG.initial_credit_bytes)
    assert HELLO.deadline_ms == CONFIG.deadline_s * 1000


if __name__ == "__main__":
    for name, lines in vectors().items():
        (GOLDEN / f"{name}.hex").write_text("\n".join(lines) + "\n")
