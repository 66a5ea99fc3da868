"""Who may begin: so many requests at once, so many in a queue, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from typing import TYPE_CHECKING

from lynx_net.integrations.http.errors import overloaded, unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["Admission"]

LONGEST_RETRY_S = 60
_WEIGHT = 0.2
"""Of the newest request in the mean of how long requests take."""


class Admission:
    """First come, first served. For one event loop.

    Args:
        running: requests that may run at once.
        queued: requests that may wait.
    """

    def __init__(self, running: int, queued: int) -> None:
        self._limit = running
        self._queued_limit = queued
        self._queue: deque[asyncio.Future[None]] = deque()
        self._mean_s = 1.0
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0
        """Requests that run."""
        self.draining = False
        """No more requests are taken."""

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def drain(self) -> None:
        """Take no more requests; those that run or wait are not touched."""
        self.draining = True

    async def idle(self) -> None:
        """Wait until nothing runs or waits."""
        await self._idle.wait()

    @contextlib.asynccontextmanager
    async def place(self, on_wait: Callable[[int], None] | None = None) -> AsyncIterator[None]:
        """Hold one of the places; waits for it.

        Args:
            on_wait: called with the position in the queue, if it has to wait.

        Raises:
            ApiError: 429 if the queue is full, 503 if the server is about to end.
        """
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if self.running < self._limit:
            self.running += 1
            self._idle.clear()
        else:
            await self._wait(on_wait)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            yield
            self._mean_s += _WEIGHT * (loop.time() - began_s - self._mean_s)
        finally:
            self._pass_on()

    async def _wait(self, on_wait: Callable[[int], None] | None) -> None:
        """The place of a request that ends goes to the first that waits; its number does not change."""
        if len(self._queue) >= self._queued_limit:
            wait_s = math.ceil(self._mean_s * (len(self._queue) + 1) / self._limit)
            raise overloaded(f"{len(self._queue)} requests are waiting already", min(max(wait_s, 1), LONGEST_RETRY_S))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if on_wait is not None:
            on_wait(len(self._queue))
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # the place came at the moment in which nobody wanted it any more
            elif turn in self._queue:
                self._queue.remove(turn)
            raise

    def _pass_on(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1
        if not self.running:
            self._idle.set()
