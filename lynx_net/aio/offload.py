"""Running blocking work in a thread without ever leaving it behind."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

__all__ = ["run_blocking"]

P = ParamSpec("P")
T = TypeVar("T")


async def run_blocking(executor: Executor | None, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` with its arguments in the executor (None: here and now) and return what it returns.

    Cancelling waits until the work has finished, then raises CancelledError: whoever called knows that
    no thread still reads or writes the buffers.
    """
    if executor is None:
        return work(*args, **kwargs)
    future = asyncio.get_running_loop().run_in_executor(executor, partial(work, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()
        try:
            raise cancelled
        finally:
            del cancelled  # its traceback holds this frame: a cycle, and `args` may hold much memory
    return future.result()
