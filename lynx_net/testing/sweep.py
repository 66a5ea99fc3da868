"""Cancelling a task at every await, one run each: what a library must survive anywhere, tried everywhere.

A scenario is an async function that gets a `Canceller` and runs one coroutine under it; whatever else it needs stands
around that. `cancel_sweep` runs the scenario again and again in virtual time (lynx_net.testing.clock), cancelling at
the first suspension of that coroutine, at the second, and so on, or at every step of the event loop, until it ends
before its turn comes. The scenario checks after each run what must hold; a failure is noted with the place.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from lynx_net.testing.clock import VirtualClockLoop, run_virtual

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator

__all__ = ["Canceller", "Moment", "cancel_sweep"]

T = TypeVar("T")

Moment = Literal["waiting", "woken", "step"]
"""When to cancel, counted from 0.

    waiting   at the n-th suspension of the coroutine
    woken     when what the n-th suspension waits for has happened and the task has not run yet: results get lost there
    step      n steps of the event loop after its first suspension, wherever everything is by then
"""

MAX_POINTS = 100_000


class Canceller:
    """Runs one coroutine and cancels it at the `point`-th of its moments."""

    def __init__(self, point: int, moment: Moment) -> None:
        self.point = point
        self.moment: Moment = moment
        self.reached = False
        """Whether the coroutine was still running when its turn came."""
        self._suspensions = 0

    async def run(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What the coroutine returns, or None if the cancellation ended it; other exceptions pass."""
        task = asyncio.create_task(_drive(work, self))
        await asyncio.wait([task])
        if task.cancelled():
            assert self.reached, "cancelled by somebody else"
            return None
        return task.result()

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        self.reached = task.cancel()

    def _suspended(self, waits_for: Any) -> None:
        """Called as the coroutine is about to wait."""
        task = asyncio.current_task()
        assert task is not None
        if self.moment == "step":
            if self._suspensions == 0:
                loop = asyncio.get_running_loop()
                assert isinstance(loop, VirtualClockLoop)
                loop.after_steps(self.point, lambda: self._cancel(task))
        elif self._suspensions == self.point:
            if self.moment == "waiting" or waits_for is None:
                self._cancel(task)
            else:
                # Added before the task's own callback, so it runs before the task goes on.
                waits_for.add_done_callback(lambda _: self._cancel(task))
        self._suspensions += 1


class _Stepped(Generic[T]):
    """Awaits a coroutine and tells the canceller of every suspension."""

    def __init__(self, work: Coroutine[Any, Any, T], canceller: Canceller) -> None:
        self._work = work
        self._canceller = canceller

    def __await__(self) -> Generator[Any, Any, T]:
        inner = self._work.__await__()
        step: Callable[[], Any] = inner.__next__
        while True:
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            self._canceller._suspended(waits_for)
            try:
                yield waits_for
                step = inner.__next__
            except BaseException as error:
                step = _thrower(inner, error)


def _thrower(inner: Generator[Any, Any, Any], error: BaseException) -> Callable[[], Any]:
    return lambda: inner.throw(error)


async def _drive(work: Coroutine[Any, Any, T], canceller: Canceller) -> T:
    return await _Stepped(work, canceller)


def cancel_sweep(
    scenario: Callable[[Canceller], Awaitable[None]], moment: Moment = "waiting", *, stride: int = 1
) -> int:
    """Run the scenario once for each moment of the coroutine that it gives its canceller; returns how many.

    With a stride only every so-many-th moment is tried. Exceptions of the scenario pass, with a note that says where
    the cancellation was.
    """
    for point in range(0, MAX_POINTS, stride):
        canceller = Canceller(point, moment)

        async def run(canceller: Canceller = canceller) -> None:
            await scenario(canceller)

        try:
            run_virtual(run())
        except BaseException as error:
            error.add_note(f"cancelled at point {point}, {moment}")
            raise
        if not canceller.reached:
            return point // stride
    raise RuntimeError(f"the coroutine has more than {MAX_POINTS} points")
