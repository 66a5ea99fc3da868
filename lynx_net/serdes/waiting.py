"""Pages that have arrived and wait to be decoded: which go together, and when."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BATCH_PAGES", "Batch", "WaitingPages"]

BATCH_PAGES = 32
"""Pages decoded at once, at most; bounds how long an abort waits for the decoder."""


class Batch(NamedTuple):
    """Pages to be decoded with streams 0 to `stream`: runs, or what there is of any."""

    stream: int
    pages: list[int]
    of_runs: bool


class WaitingPages:
    """Runs of pages are decoded together: every so many of an array, counted from its first page.

    A run is due when it is whole. Pages that hold back credit are due before, whatever is missing of their runs; but
    where only what is due is given out, not while pages of an earlier stream wait: the little credit that later streams
    have then would make batches of single pages, which take the time that the earlier stream needs.

    Args:
        streams: of the transfer.
        pages_per_array: pages of the keys or of the values of a layer.
        arrays: how many there are.
        run_pages: pages of a run.
        whole: only what is due is ever given out, so that batches of all arrays are alike. Else, whoever asks gets what
            there is.
        bytes_of: the most bytes that a stream of a page has.
        most_runs: so many runs that are due are given out together, at most.
    """

    def __init__(
        self,
        *,
        streams: int,
        pages_per_array: int,
        arrays: int,
        run_pages: int,
        whole: bool,
        bytes_of: Callable[[int, int], int],
        most_runs: int = 1,
    ) -> None:
        self._per_array = pages_per_array
        self.run_pages = run_pages
        self._runs_per_array = -(-pages_per_array // run_pages)
        self._whole = whole
        self._bytes_of = bytes_of
        self._most_runs = most_runs
        self._pages: list[dict[int, int]] = [{} for _ in range(streams)]
        """The most bytes that each has."""
        self._bytes = [0] * streams
        self._limits = [0] * streams
        self._arrived = [[0] * (self._runs_per_array * arrays) for _ in range(streams)]
        self._due: list[dict[int, None]] = [{} for _ in range(streams)]

    def add(self, page: int, stream: int, limit_bytes: int) -> bool:
        """A page has come with streams 0 to `stream`; True if something is due.

        So many waiting bytes of this stream hold back credit: at most `patience_bytes` (wire/credit.py).
        """
        array, position = divmod(page, self._per_array)
        run = array * self._runs_per_array + position // self.run_pages
        self._pages[stream][page] = most_bytes = self._bytes_of(page, stream)
        self._bytes[stream] += most_bytes
        self._limits[stream] = limit_bytes
        self._arrived[stream][run] += 1
        if not self._whole:
            self._drop(range(page, page + 1), stream)
        if self._arrived[stream][run] == len(self._pages_of(run)):
            self._due[stream][run] = None
            for earlier in self._due[:stream]:
                earlier.pop(run, None)
            self._drop(self._pages_of(run), stream)
            return True
        return self._holds_back(stream)

    def next(self) -> Batch | None:
        """What to decode now: of the earliest stream that has any, since anchors are first."""
        for stream, pages in enumerate(self._pages):
            chosen: list[int] = []
            runs = 0
            while self._due[stream] and runs < self._most_runs:
                run = next(iter(self._due[stream]))
                del self._due[stream][run]
                of_run = [page for page in self._pages_of(run) if page in pages]
                chosen += of_run
                runs += bool(of_run)
            of_runs = bool(chosen)
            if not chosen and pages and (not self._whole or self._holds_back(stream)):
                chosen = list(itertools.islice(pages, BATCH_PAGES))
                for page in chosen:
                    self._drop(range(page, page + 1), stream)
            if chosen:
                for page in chosen:
                    self._remove(page, stream)
                return Batch(stream, chosen, of_runs)
        return None

    def _holds_back(self, stream: int) -> bool:
        """Pages of this stream must not wait for the rest of their runs, since the peer waits for credit."""
        if self._bytes[stream] < self._limits[stream]:
            return False
        return not self._whole or not any(self._pages[:stream])

    def clear(self) -> None:
        """Nothing waits any more."""
        for pages, runs in zip(self._pages, self._due, strict=True):
            pages.clear()
            runs.clear()
        self._bytes = [0] * len(self._bytes)

    def _pages_of(self, run: int) -> range:
        array, position = divmod(run, self._runs_per_array)
        first = array * self._per_array + position * self.run_pages
        return range(first, min(first + self.run_pages, (array + 1) * self._per_array))

    def _drop(self, pages: range, stream: int) -> None:
        """What waits with more streams need not be decoded with fewer."""
        for earlier in range(stream):
            for page in pages:
                if page in self._pages[earlier]:
                    self._remove(page, earlier)

    def _remove(self, page: int, stream: int) -> None:
        self._bytes[stream] -= self._pages[stream].pop(page)
