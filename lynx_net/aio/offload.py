"""Running blocking work in a thread without ever leaving it behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

__all__ = ["run_blocking", "run_or_withdraw"]

P = ParamSpec("P")
T = TypeVar("T")


async def run_blocking(executor: Executor | None, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` with its arguments in the executor (None: here and now) and return what it returns.

    Cancelling waits until the work has finished, then raises CancelledError: whoever called knows that
    no thread still reads or writes the buffers.
    """
    if executor is None or _in_virtual_time():
        return work(*args, **kwargs)
    return await _finished(executor.submit(work, *args, **kwargs), withdraw=False)


async def run_or_withdraw(executor: Executor | None, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `run_blocking`, but work that has not begun when it is cancelled is withdrawn and never done."""
    if executor is None or _in_virtual_time():
        return work(*args, **kwargs)
    return await _finished(executor.submit(work, *args, **kwargs), withdraw=True)


def _in_virtual_time() -> bool:
    """Whether nothing waits for threads here: the clock would run ahead of them (`lynx_net.testing.clock`)."""
    return hasattr(asyncio.get_running_loop(), "virtual_clock")


async def _finished(work: Future[T], *, withdraw: bool) -> T:
    future = asyncio.wrap_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
            if withdraw:
                work.cancel()  # nothing happens if it has begun
    if cancelled is not None:
        if not future.cancelled():
            future.exception()
        try:
            raise cancelled
        finally:
            del cancelled  # its traceback holds this frame, and that the work's future: a cycle that may be large
    return future.result()
