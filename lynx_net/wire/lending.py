"""Buffers lent to lanes, which receive whole streams of pages into them and are asked about each afterwards.

A lane that has to ask for the place of every segment spends more time on that than on the bytes. Rules:

1. Only a whole stream of a page in one segment is received so. A buffer has the smallest size that the codec can give
   the page for which it is lent; what has another size is received as ever.
2. Every header that came so is then checked as all are, by `ReceiveState.place`: what breaks a rule is found when the
   lane tells of it instead of before its payload is read, and has done no harm, since
3. the bytes lent never exceed the credit that the peer has left in that stream, and the buffers lent never the pages
   that have not begun: nothing is held for a peer that was not granted to it and reserved for its transfer.
4. A lent buffer is used by one lane for one segment and then handed back. What nobody uses is taken back when the
   credit is used up in another way, and when the transfer ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from lynx_net.wire.receiving import ReceiveState

__all__ = ["LEAST_LENT_BYTES", "Lender", "LentRun", "Stock"]

LEAST_LENT_BYTES = 32 * 1024
"""Smaller pages are read many at a time, with what is between them."""

MOST_LENT_BYTES = 8 << 20
MOST_LENT_PAGES = 4
"""Of one stream and size, for each lane, whichever is more: enough until Python has heard of those before, and few, so
that they are used again while they are warm (where they are not, `BufferPool.lend_factor` makes it more). Where pages
of another size follow, lanes are not equally far, and none should find its own size used up."""

LentRun: TypeAlias = "tuple[int, int, int, list[int], list[memoryview], bool]"
"""What a lane hands back: transfer, stream and bytes of some page streams, their pages in the order in which they came,
the buffers that they are in, and whether these match the checksums of their headers; what does not comes alone."""


class Stock(Protocol):
    """Where the lanes of a link find lent buffers. Its methods are called with the lock of the link."""

    def put(self, transfer: int, stream: int, buffers: list[memoryview], together_bytes: int, /) -> None:
        """Lend these, each to a page that has exactly its size in this stream.

        A lane tells of it when all together have `together_bytes` of it, or earlier.
        """

    def take_back(self, transfer: int, stream: int, /) -> list[memoryview]:
        """Those of a stream, or of all streams (-1), of a transfer that no lane uses. They are lent no more."""
        ...


class Lender:
    """Lends buffers of the transfers of one link of some lanes, for pages of `least_bytes` or more."""

    def __init__(self, stock: Stock, lanes: int = 1, least_bytes: int = LEAST_LENT_BYTES) -> None:
        self._stock = stock
        self._lanes = lanes
        self._least_bytes = least_bytes

    def lend(self, state: ReceiveState, stream: int) -> None:
        """Pages of a stream come in: lend buffers for those that may come next, as many as rule 3 allows."""
        shares = self._lanes * state.pool.lend_factor
        if buffers := state.lend(stream, self._least_bytes, shares * MOST_LENT_BYTES, shares * MOST_LENT_PAGES):
            # The peer is granted more when some of its credit is used (ReceiveWindow.grant_due): what all lanes have
            # received and not told of must leave it something until then.
            together_bytes = min(state.windows[stream].window // 4, self._lanes * state.pool.together_bytes)
            self._stock.put(state.transfer, stream, buffers, together_bytes)

    def segment_placed(self, state: ReceiveState, stream: int) -> None:
        """A segment used credit, or began a page, without a lent buffer (rule 4)."""
        if state.lent_too_much(stream):
            state.take_back(stream, self._stock.take_back(state.transfer, stream))

    def end(self, state: ReceiveState) -> None:
        """The transfer ends."""
        for stream in range(state.streams):
            if state.lent_bytes[stream]:
                state.take_back(stream, self._stock.take_back(state.transfer, stream))
