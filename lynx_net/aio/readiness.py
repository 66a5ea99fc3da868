"""An awaitable that is not yet true, true, or never will be."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

    from lynx_net.errors import LynxError

__all__ = ["Readiness"]


class Readiness:
    """Await it as often and from as many tasks as you like.

    Awaiting returns once the thing is ready, and raises the transfer's typed error if it cannot
    become ready any more. Cancelling a wait affects nobody else. What became ready stays ready, also
    when its transfer fails later.
    """

    __slots__ = ("_error", "_settled", "_waiting", "at_s")

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] | None = None  # a transfer has many that nobody asks for
        self._settled = False
        self._error: LynxError | None = None
        self.at_s: float | None = None
        """`time.monotonic` of the moment it became ready."""

    def done(self) -> bool:
        """True once ready; raises the typed error if it failed."""
        if self._error is not None:
            raise self._error
        return self._settled

    def __await__(self) -> Generator[object, None, None]:
        if not self._settled:
            yield from self._wait()
        if self._error is not None:
            raise self._error

    async def settled(self) -> None:
        """Wait until it is ready or has failed, and say nothing about which."""
        if not self._settled:
            await self._wait()

    def _wait(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._waiting is None:
            self._waiting = [waiter]
        else:
            if self._waiting[-1].done():  # cancelled, as others may be
                self._waiting = [one for one in self._waiting if not one.done()]
            self._waiting.append(waiter)
        return waiter

    def set(self, at_s: float) -> None:
        """It is ready; only the first call of `set` and `fail` counts."""
        if not self._settled:
            self.at_s = at_s
            self._settle()

    def fail(self, error: LynxError) -> None:
        """It will never be ready; only the first call of `set` and `fail` counts."""
        if not self._settled:
            self._error = error
            self._settle()

    def _settle(self) -> None:
        self._settled = True
        for waiter in self._waiting or ():
            if not waiter.done():
                waiter.set_result(None)
        self._waiting = None
