"""Ending tasks."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

__all__ = ["stop_task"]

logger = logging.getLogger("lynx_net.http")


async def stop_task(
    task: asyncio.Task[Any], expected: type[BaseException] | tuple[type[BaseException], ...] = ()
) -> None:
    """Cancel a task and wait until it has ended; an error that it ended with is logged, unless it is expected."""
    task.cancel()
    try:
        await asyncio.wait({task})
    finally:
        if task.done() and not task.cancelled():
            error = task.exception()
            if error is not None and not isinstance(error, expected):
                logger.error("a background task failed", exc_info=error)
