"""What several test files of the wire core share: strategies, and a layout of small pages."""

from __future__ import annotations

from hypothesis import strategies as st

from lynx_net.wire import messages as m
from lynx_net.wire.frames import SegmentHeader, checksum
from lynx_net.wire.layout import CacheLayout

text = st.text(max_size=20)
number = st.integers(0, m.INTEGER_LIMIT - 1)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | text
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=8,
)
table = st.dictionaries(text, plain, max_size=3)

MESSAGE_TYPES = (
    m.Hello,
    m.Proof,
    m.Reject,
    m.Ping,
    m.Request,
    m.Refuse,
    m.OfferMessage,
    m.Accept,
    m.Credit,
    m.Complete,
    m.Received,
    m.Abort,
    m.Bye,
)

any_message = st.one_of(
    st.builds(
        m.Hello,
        number,
        st.binary(max_size=20),
        st.binary(max_size=20),
        *[number] * 5,
        st.none() | number,
        st.binary(max_size=40),
    ),
    st.builds(m.Proof, st.binary(max_size=40)),
    st.builds(m.Reject, text),
    st.builds(m.Ping),
    st.builds(m.Request, text, table),
    st.builds(m.Refuse, text, text),
    st.builds(m.OfferMessage, number, text, table, text, table, number, number, table, st.none() | number),
    st.builds(m.Accept, number),
    st.builds(m.Credit, number, number, number),
    st.builds(m.Received, number, number),
    st.builds(m.Complete, number),
    st.builds(m.Abort, number, number, text),
    st.builds(m.Bye, text),
)

LAYOUT = CacheLayout(layers=2, tokens=5, heads=2, key_size=3, value_size=4, page_tokens=2, raw_head=1, raw_tail=1)

SIZES = (4097, 0, 4096, 10_000, 1, 9000, 4095, 8192)
STREAMS = 2


def page_sizes(page: int, streams: int = STREAMS) -> list[frozenset[int]]:
    """Sizes a page may have: the one that is sent, and one that never is."""
    return [frozenset({sent_size(page, stream), 20_000}) for stream in range(streams)]


def sent_size(page: int, stream: int) -> int:
    return SIZES[(3 * page + stream) % len(SIZES)]


def page_bytes(transfer: int, page: int, stream: int) -> bytes:
    """What a page stream contains: different for each, so that nothing can land in a wrong place unseen."""
    seed = bytes((transfer % 251, page % 251, stream, 7, 11))
    return (seed * (sent_size(page, stream) // 5 + 1))[: sent_size(page, stream)]


NEED_BYTES = sum(max(sizes) for page in range(LAYOUT.page_count) for sizes in page_sizes(page))


def segments_of(transfer: int, page: int, stream: int, segment_bytes: int = 4096) -> list[tuple[SegmentHeader, bytes]]:
    """The segments that a sender cuts one page stream into."""
    data = page_bytes(transfer, page, stream)
    parts = [(at, data[at : at + segment_bytes]) for at in range(0, len(data), segment_bytes)] or [(0, b"")]
    return [
        (SegmentHeader(transfer, page, stream, at, len(part), len(data), checksum(part)), part) for at, part in parts
    ]
