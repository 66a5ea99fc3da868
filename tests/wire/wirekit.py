"""What several test files of the wire core share: strategies, and a layout of small pages."""

from __future__ import annotations

from hypothesis import strategies as st

from lynx_net.wire import messages as m
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
    m.Reject,
    m.Ping,
    m.Request,
    m.Refuse,
    m.OfferMessage,
    m.Accept,
    m.Credit,
    m.Complete,
    m.Abort,
    m.Bye,
)

any_message = st.one_of(
    st.builds(m.Hello, number, st.binary(max_size=20), st.binary(max_size=20), number, number, number, number, number),
    st.builds(m.Reject, text),
    st.builds(m.Ping),
    st.builds(m.Request, text, table),
    st.builds(m.Refuse, text, text),
    st.builds(m.OfferMessage, number, text, table, text, table, number, number, table, st.none() | number),
    st.builds(m.Accept, number),
    st.builds(m.Credit, number, number, number),
    st.builds(m.Complete, number),
    st.builds(m.Abort, number, number, text),
    st.builds(m.Bye, text),
)

LAYOUT = CacheLayout(layers=2, tokens=5, heads=2, key_size=3, value_size=4, page_tokens=2, raw_head=1, raw_tail=1)
