"""Which buffers to lend for the pages of a stream that come next (lending.py)."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from lynx_net.wire.pagesizes import smallest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from lynx_net.wire.pagesizes import PageSizes

__all__ = ["Loans"]

LOOK_AHEAD_PAGES = 1024
"""Pages looked at in a call: there may be many for which nothing is lent."""

UNLENT_PAGES = 32
"""Pages of sizes of which no more may be lent are looked past, up to so many: some behind them have sizes of their own,
as the last ones of arrays."""


def _most(size: int, most_bytes: int, most_pages: int, pages: int) -> int:
    """How many of a size may be lent; of empty ones as many as there are pages."""
    return max(most_bytes // size, most_pages) if size else pages


class Loans:
    """Buffers lent for one stream of a transfer, by size, and the pages that are expected in them.

    As many of a size are lent as pages of it are expected, up to a bound: lanes overtake one another, so a page may
    have come in a buffer that was lent with an earlier one in view, which then needs another.

    Args:
        page_count: of the transfer.
        page_at, place_of: the page at a place in the order in which a sender of ours sends them, and its place.
        sizes_of: what a page may have in this stream.

    Attributes:
        lent_bytes, lent_pages: all that is lent.
    """

    def __init__(
        self,
        page_count: int,
        page_at: Callable[[int], int],
        place_of: Callable[[int], int],
        sizes_of: Callable[[int], PageSizes],
    ) -> None:
        self._page_count = page_count
        self._page_at, self._place_of = page_at, place_of
        self._sizes_of = sizes_of
        self.lent_bytes = self.lent_pages = 0
        self._lent: defaultdict[int, int] = defaultdict(int)
        self._expected: defaultdict[int, int] = defaultdict(int)
        """Pages before `_looked_up_to` that have not begun, by the size of the buffers that are lent for them."""
        self._looked_up_to = 0

    def next(
        self,
        has_begun: Callable[[int], bool],
        room_bytes: int,
        room_pages: int,
        sizes: range,
        most_bytes: int,
        most_pages: int,
    ) -> list[int]:
        """Sizes of buffers to lend now, no more than there is room for; they count as lent.

        Args:
            has_begun: whether a page has come, or some of it.
            sizes: of which any are lent, beside empty ones: segments that come together are received into lent buffers
                as a whole, or not at all.
            most_bytes, most_pages: of a size no more is lent than one of these.
        """
        lent, expected = self._lent, self._expected
        chosen: list[int] = []
        unlent = 0
        for size, pages in expected.items():
            count = min(_most(size, most_bytes, most_pages, pages), pages) - lent[size]
            count = min(count, room_pages - len(chosen), room_bytes // size if size else count)
            if count > 0:
                lent[size] += count
                room_bytes -= count * size
                chosen += [size] * count
            unlent += max(pages - lent[size], 0)
        known: PageSizes | None = None
        size, most, is_lent = -1, 0, False
        place, stop = self._looked_up_to, min(self._looked_up_to + LOOK_AHEAD_PAGES, self._page_count)
        while place < stop:
            page = self._page_at(place)
            own = self._sizes_of(page)
            if own is not known:
                known, size = own, smallest_of(own)
                most, is_lent = _most(size, most_bytes, most_pages, self._page_count), size in sizes or not size
            if is_lent and not has_begun(page):
                if lent[size] <= expected[size]:  # none for this page
                    if lent[size] >= most:
                        unlent += 1
                    elif size > room_bytes or len(chosen) == room_pages:
                        break
                    else:
                        lent[size] += 1
                        room_bytes -= size
                        chosen.append(size)
                    if unlent > UNLENT_PAGES:
                        break
                expected[size] += 1
            place += 1
        self._looked_up_to = place
        self.lent_pages += len(chosen)
        self.lent_bytes += sum(chosen)
        return chosen

    def came_back(self, size: int, pages: int) -> None:
        """Buffers of a size are lent no more, used or not."""
        self._lent[size] -= pages
        self.lent_pages -= pages
        self.lent_bytes -= size * pages

    def begins(self, page: int, sizes: PageSizes) -> None:
        """A page that may have these sizes has come, or some of it: it is expected no more."""
        if self._place_of(page) < self._looked_up_to:
            size = smallest_of(sizes)
            if size in self._expected:
                self._expected[size] -= 1
