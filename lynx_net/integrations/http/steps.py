"""One thread for the model, shared fairly: of the steps that wait, that of the request which has had least of it.

A decode loop has one step at a time, a forward pass, and waits for it. Passes differ: one that verifies forty drafts
takes as long as many that decode one token. So requests are charged for time, not for steps (start-time fair
queueing: Goyal, Vin and Cheng 1996): one that comes, or comes back after a wait, starts level with those being served.
"""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StepLane", "StepThread"]

P = ParamSpec("P")
T = TypeVar("T")


class StepThread:
    """The thread. `lane()` gives each request an executor of its own, for `speculation.decode(executor=...)`."""

    def __init__(self, name: str = "lynx-steps", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[_Step] = []
        self._numbers = itertools.count()
        self._level_s = 0.0
        self._closed = False
        self.busy_s = 0.0
        """Time spent in steps."""
        self.steps = 0
        """Steps made."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def lane(self) -> StepLane:
        """An executor for one request."""
        return StepLane(self)

    def close(self) -> None:
        """End the thread after its step; steps that wait are cancelled. Blocks for that step."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, []
            self._changed.notify()
        for step in waiting:
            step.future.cancel()
        self._thread.join()

    @property
    def waiting(self) -> int:
        """Steps that wait for the thread."""
        with self._changed:
            return sum(not step.future.cancelled() for step in self._waiting)

    def add(self, lane: StepLane, work: Callable[[], Any]) -> Future[Any]:
        """Called by a lane."""
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the model's thread has ended")
            lane.used_s = max(lane.used_s, self._level_s)
            self._waiting.append(_Step(lane, next(self._numbers), work, future))
            self._changed.notify()
        return future

    def _run(self) -> None:
        while (step := self._next()) is not None:
            lane = step.lane
            began_s = self._clock()
            step.run()
            # A step holds its request's cache through its closure: let go of it before waiting for the next one.
            del step
            took_s = self._clock() - began_s
            with self._changed:
                lane.used_s += took_s
                self.busy_s += took_s
                self.steps += 1
            del lane

    def _next(self) -> _Step | None:
        with self._changed:
            while True:
                self._waiting = [step for step in self._waiting if not step.future.cancelled()]
                if self._waiting:
                    break
                if self._closed:
                    return None
                self._changed.wait()
            step = min(self._waiting, key=lambda one: (one.lane.used_s, one.number))
            self._waiting.remove(step)
            self._level_s = max(self._level_s, step.lane.used_s)
            return step


class StepLane(Executor):
    """The executor of one request."""

    def __init__(self, thread: StepThread) -> None:
        self._thread = thread
        self.used_s = 0.0
        """Time of the thread it is charged with."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` in the thread when it is this request's turn. Cancelling the future takes it back until then."""
        return self._thread.add(self, lambda: fn(*args, **kwargs))


class _Step:
    """A piece of work that waits."""

    __slots__ = ("_work", "future", "lane", "number")

    def __init__(self, lane: StepLane, number: int, work: Callable[[], Any], future: Future[Any]) -> None:
        self.lane = lane
        self.number = number
        self.future = future
        self._work = work

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._work()
        except BaseException as error:  # the waiting task gets it, whatever it is
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
