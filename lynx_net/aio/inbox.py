"""A queue with an end, of things that lose their worth when nobody takes them in time."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["Inbox"]

T = TypeVar("T")


class Inbox(Generic[T]):
    """Any number of tasks may take from it; each item goes to one of them. Cancelling a wait loses nothing."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._ended = False
        self._changed = asyncio.Event()

    def put(self, item: T) -> None:
        """Add an item; after the end it is dropped."""
        if not self._ended:
            self._items.append(item)
            self._changed.set()

    def forget(self, unwanted: Callable[[T], bool]) -> None:
        """Drop the items that nobody has taken and that are unwanted."""
        self._items = deque(item for item in self._items if not unwanted(item))

    def end(self) -> None:
        """Nothing more will come: takers get what is there, then None."""
        self._ended = True
        self._changed.set()

    async def get(self) -> T | None:
        """The next item, or None for ever after the end."""
        while not self._items:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._items.popleft()

    async def iterate(self) -> AsyncIterator[T]:
        """The items until the end."""
        while (item := await self.get()) is not None:
            yield item
            del item  # it may hold much memory, and the next one may take long to come
