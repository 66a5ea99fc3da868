"""Lanes that lost their connections and are opened again, within `LinkConfig.resume_s` of each loss."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from lynx_net.errors import ConnectionFailedError, ConnectionLostError, LynxError, PeerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from lynx_net.aio.link import Link
    from lynx_net.aio.pump import Pump
    from lynx_net.transport import Lane

__all__ = ["FIRST_PAUSE_S", "LaneRecovery"]

logger = logging.getLogger("lynx_net")

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
"""Before a lost connection is opened again; the pause doubles from try to try."""


class _LaneDown:
    """A lane without a connection."""

    def __init__(self) -> None:
        self.back = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class LaneRecovery:
    """The lanes of a link that are down. All of it in the event loop.

    Args:
        dial: opens the next connection of a lane, as in `LinkParts`; None where the peer is waited for.
    """

    def __init__(self, link: Link, pump: Pump, dial: Callable[[int, int], Awaitable[tuple[Lane, int]]] | None) -> None:
        self._link = link
        self._pump = pump
        self._dial = dial
        self._down: dict[int, _LaneDown] = {}

    @property
    def lanes_down(self) -> int:
        """How many have no connection."""
        return len(self._down)

    def begin(self, index: int, lost: LynxError) -> None:
        """Have a lane opened again; the link fails with `lost` if it is not back in time."""
        if index not in self._down:
            down = self._down[index] = _LaneDown()
            down.task = asyncio.create_task(self._reopen(index, down, lost))

    def attach(self, index: int, lane: Lane, peer_received: int) -> None:
        """A lane is back, its handshake done; the peer has received so many frames on it."""
        link = self._link
        down = self._down.pop(index, None)
        if link.is_failed or down is None:
            lane.close()
            return
        try:
            with link.lock:
                link.core.lane_reopened(index, peer_received, link.clock())
        except LynxError as error:
            lane.close()
            link.pump_failed(error)
            return
        link.lanes[index] = lane
        self._pump.attach(index, lane)
        down.back.set()
        logger.info("lane %d to %s is open again", index, link.peer)

    def stop(self) -> None:
        """The link ends: no lane is opened again."""
        for down in self._down.values():
            if down.task is not None:
                down.task.cancel()

    async def _reopen(self, index: int, down: _LaneDown, lost: LynxError) -> None:
        link, resume_s = self._link, self._link.core.config.resume_s
        logger.info("lane %d: %s; it may be opened again for %g s", index, lost, resume_s)
        try:
            async with asyncio.timeout(resume_s):
                if self._dial is None:
                    await down.back.wait()
                else:
                    self.attach(index, *await self._dial_again(index, self._dial))
        except TimeoutError:
            link.pump_failed(lost)
        except LynxError as refused:
            link.pump_failed(ConnectionLostError(f"{lost}; it cannot be opened again: {refused}"))

    async def _dial_again(
        self, index: int, dial: Callable[[int, int], Awaitable[tuple[Lane, int]]]
    ) -> tuple[Lane, int]:
        pause_s = FIRST_PAUSE_S
        while True:
            # Also before the first try: a farewell may be on its way on another lane.
            await asyncio.sleep(pause_s)
            try:
                return await dial(index, self._link.core.received_frames(index))
            except (ConnectionFailedError, ConnectionLostError, PeerTimeoutError) as error:
                logger.debug("lane %d to %s: %s", index, self._link.peer, error)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
