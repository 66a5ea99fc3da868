"""How many bytes the streams of a page may have."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lynx_net.wire.layout import CacheLayout

__all__ = ["PageSizes", "largest_of", "page_bounds", "sizes_in", "smallest_of"]

FEW_PAGES = 64
"""Transfers of so many pages have the bytes of each stream added up when they are offered."""

PageSizes: TypeAlias = frozenset[int] | range
"""Byte sizes that a stream of a page may have: the few that there are, or a range of all up to a bound."""


def largest_of(sizes: PageSizes) -> int:
    """The largest of these sizes."""
    return sizes[-1] if isinstance(sizes, range) else max(sizes)


def smallest_of(sizes: PageSizes) -> int:
    """Of which a buffer may be lent (lending.py); -1 of a range."""
    return -1 if isinstance(sizes, range) else min(sizes)


def sizes_in(sizes: Callable[[int], Sequence[PageSizes]], stream: int, page: int) -> PageSizes:
    """Those of one stream of a page, of `sizes` that knows those of all its streams."""
    return sizes(page)[stream]


def page_bounds(
    layout: CacheLayout, streams: int, sizes: Callable[[int], Sequence[PageSizes]]
) -> tuple[list[int], Sequence[int | None]]:
    """Of each stream the most bytes that a page can have, and all pages together.

    The latter is known of small transfers only: a Credit less is worth counting there.
    """
    count = layout.page_count
    if count <= FEW_PAGES:
        pages = [sizes(page) for page in range(count)]
        most = [[largest_of(of_page[stream]) for of_page in pages] for stream in range(streams)]
        return [max(of_pages, default=0) for of_pages in most], [sum(of_pages) for of_pages in most]
    # All layers are cut alike, but may differ in codecs.
    unlike = [page.index for page in layout.unlike_pages()]
    pages = [sizes(start + index) for start in range(0, count, count // layout.layers) for index in unlike]
    return [max(largest_of(of_page[stream]) for of_page in pages) for stream in range(streams)], [None] * streams
