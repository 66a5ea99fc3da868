"""A thread that hears of what lanes have received into lent buffers, so that these need not leave their sockets."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from lynx_net.aio import _lanes

__all__ = ["Teller"]


class Teller:
    """Takes the place of the lane that would leave its socket to tell, until it is stopped or fails.

    Args:
        stock: of the link; it has no other teller.
        act: takes what is full; called in the thread, whenever that is much or old.
        failed: hears, in the event loop, what `act` has raised. Lanes tell themselves from then on.
    """

    def __init__(self, stock: _lanes.Stock, act: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        self._stock = stock
        self._act = act
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        threading.Thread(target=self._run, name="lynx_net-tell", daemon=True).start()

    async def stop(self) -> None:
        """Returns when the thread does nothing any more."""
        self._stock.end_wait()
        await self._ended.wait()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._stock.wait_full():
                self._act()
        except BaseException as problem:
            failure = problem
            self._stock.end_wait()
        self._loop.call_soon_threadsafe(self._has_ended, failure)

    def _has_ended(self, failure: BaseException | None) -> None:
        self._ended.set()
        if failure is not None:
            self._failed(failure)
