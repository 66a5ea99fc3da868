"""An event loop whose clock jumps: waiting costs no time, and hours of protocol time pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

__all__ = ["VirtualClockLoop", "run_virtual"]

T = TypeVar("T")

_LATE_S = 1e-9
"""Timers fire this much late: asyncio runs them up to its resolution early, and who then finds that it is not yet time
and waits for the rest, less than a rounding error, would wait without the clock ever moving."""


class _JumpingSelector(selectors.BaseSelector):
    """Looks for ready files, and instead of sleeping moves the clock."""

    def __init__(self) -> None:
        self._inner = selectors.DefaultSelector()
        self.now_s = 0.0
        self.countdown = -1
        self.at_zero: Callable[[], object] | None = None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.modify(fileobj, events, data)

    def close(self) -> None:
        self._inner.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.at_zero is not None:
            self.countdown -= 1
            if self.countdown < 0:
                callback, self.at_zero = self.at_zero, None
                callback()
                timeout = 0  # what it did may have given the loop work
        ready = self._inner.select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("every task waits and no timer is set: nothing can ever happen again")
            if timeout > 0:
                self.now_s += timeout + _LATE_S
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """For in-process transports; threads are not waited for, so executors run their work inline.

    Raises RuntimeError out of the loop where real time would hang for ever.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def virtual_clock(self) -> float:
        """The clock that links made on this loop go by."""
        return self._jumping.now_s

    def after_steps(self, steps: int, callback: Callable[[], object]) -> None:
        """Call back when the loop has run everything that is ready `steps` times more; one such call at a time."""
        self._jumping.countdown = steps
        self._jumping.at_zero = callback

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, starting at 0 s."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
