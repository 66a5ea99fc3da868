"""One UCX worker an event loop: made when the first lane needs it, driven by the loop, freed after the last.

UCX offers to be polled, to be driven by a thread of its own, or to wake its user through a file descriptor. Here it is
the descriptor: the loop watches it, makes progress when it becomes readable, and arms it again. Nothing spins and no
other thread touches a buffer. Works with asyncio's loop and with uvloop.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lynx_net.errors import BackendMissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["UcxApi", "UcxWorker", "load_ucx", "worker_of_this_loop"]

_PROGRESS_CALLS = 64
"""At most so many calls in a row; then the other tasks of the loop run."""

_OPTIONS = {"RNDV_THRESH": "auto", "TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "256k"}
"""Of UCX, without their prefix. Segments of TCP are 8 KiB by default, which halves its speed."""

_YIELD_WAITS = 16
"""After so many waits that were over at once, the other tasks of the loop run."""

_TICK_S = 0.1
"""While somebody waits, UCX makes progress at least so often: not every transport raises its event in every case."""


@dataclass(frozen=True, slots=True)
class UcxApi:
    """The parts of ucxx that are used."""

    core: Any
    array: Any
    tag: Any
    error: type[Exception]
    options: dict[str, str]
    """What contexts are made with, where the environment does not say otherwise."""


_loaded: UcxApi | None = None


def load_ucx() -> UcxApi:
    """Import ucxx; raises BackendMissingError, which names the extra, if that cannot be done."""
    global _loaded
    if _loaded is None:
        # Asked before the import, which sets a variable of these to a value of its own.
        options = {name: value for name, value in _OPTIONS.items() if f"UCX_{name}" not in os.environ}
        try:
            libucxx: Any = importlib.import_module("ucxx").libucxx
            array = importlib.import_module("ucxx._lib.arr").Array
            tag = importlib.import_module("ucxx.types").Tag
        except ImportError as error:
            raise BackendMissingError("UCX (ucxx)", "ucx") from error
        _loaded = UcxApi(libucxx, array, tag, libucxx.UCXError, options)
    return _loaded


class UcxWorker:
    """A UCX worker and what waits for it. Everything is called in its event loop."""

    def __init__(self, api: UcxApi, loop: asyncio.AbstractEventLoop) -> None:
        self.api = api
        feature = api.core.Feature
        self._context = api.core.UCXContext(dict(api.options), (feature.TAG, feature.WAKEUP))
        self._worker = api.core.UCXWorker(self._context, False, False)
        self._worker.init_blocking_progress_mode()
        self.address = bytes(self._worker.address.tobytes())
        self._loop = loop
        self._fd = int(self._worker.epoll_file_descriptor)
        self._next_tag = 1
        self._users = 0
        self._waits: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._scheduled = False
        self._unyielded = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._discarded: list[tuple[Any, bytearray]] = []
        self._tick: asyncio.TimerHandle | None = None
        loop.add_reader(self._fd, self._drive)

    # ---- who uses it

    def acquire(self) -> None:
        """One user more."""
        self._users += 1

    def release(self) -> None:
        """One user less; the last one frees the worker."""
        self._users -= 1
        if self._users:
            return
        self._wake()
        _workers.pop(self._loop, None)
        if self._tick is not None:
            self._tick.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._discarded.clear()
        del self._worker, self._context

    # ---- endpoints and messages

    def new_tag(self) -> int:
        """A tag that no other lane of this worker receives on."""
        tag = self._next_tag
        self._next_tag += 1
        return tag

    def connect(self, address: bytes, on_close: Callable[[], None]) -> Any:
        """An endpoint to the worker with this address; `on_close` is called when UCX loses it."""
        core = self.api.core
        endpoint = core.UCXEndpoint.create_from_worker_address(
            self._worker, core.UCXAddress.create_from_buffer(address), True
        )
        endpoint.set_close_callback(on_close)
        return endpoint

    def waiting_bytes(self, tag: Any) -> int | None:
        """Length of the next message with this tag, if there is one."""
        probe = self._worker.tag_probe(tag)
        return int(probe.length) if probe.matched else None

    def fetch(self, tag: Any, into: Any) -> Any:
        """Receive the message that `waiting_bytes` found; returns the request."""
        probe = self._worker.tag_probe(tag, remove=True)
        return self._worker.tag_recv_with_handle(self.api.array(into), probe)

    def discard(self, tag: Any, limit_bytes: int) -> None:
        """Drop the messages that came for a tag nobody receives on any more."""
        self._discarded = [(request, memory) for request, memory in self._discarded if not request.completed]
        while (count := self.waiting_bytes(tag)) is not None:
            memory = bytearray(max(1, min(count, limit_bytes)))
            self._discarded.append((self.fetch(tag, memoryview(memory)), memory))

    # ---- progress

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background; it holds a user's share of the worker itself."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def kick(self) -> None:
        """Something was posted: make progress now, and arm the descriptor before the loop sleeps."""
        self._worker.progress_once()
        self._schedule()

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`, which is asked after every progress; whatever it raises is raised here."""
        if ready():
            self._unyielded += 1
            if self._unyielded >= _YIELD_WAITS:
                self._unyielded = 0
                await asyncio.sleep(0)
            return
        self._unyielded = 0
        future: asyncio.Future[None] = self._loop.create_future()
        self._waits[future] = ready
        self._schedule()
        try:
            await future
        finally:
            del self._waits[future]

    def progress_until(self, ready: Callable[[], bool], limit_s: float) -> bool:
        """Make progress without the loop, for so long at most; whether it is ready."""
        end_s = time.monotonic() + limit_s
        while not ready():
            if not self._worker.progress_once():
                if time.monotonic() > end_s:
                    return False
                time.sleep(0.0001)
        return True

    def recheck(self) -> None:
        """Something other than UCX changed: those who wait look again."""
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drive)

    def _drive(self) -> None:
        self._scheduled = False
        if not self._users:
            return
        for _ in range(_PROGRESS_CALLS):
            if not self._worker.progress_once():
                break
        self._wake()
        if not self._users:
            return  # the last lane was given up by one of those who waited
        if not self._worker.arm():
            self._schedule()
        elif self._waits and self._tick is None:
            self._tick = self._loop.call_later(_TICK_S, self._on_tick)

    def _wake(self) -> None:
        for future, ready in list(self._waits.items()):
            if future.done():
                continue
            try:
                if ready():
                    future.set_result(None)
            except Exception as error:
                future.set_exception(error)

    def _on_tick(self) -> None:
        self._tick = None
        self._drive()


_workers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, UcxWorker] = weakref.WeakKeyDictionary()


def worker_of_this_loop() -> UcxWorker:
    """The worker of the running loop, acquired once for the caller, who must release it."""
    loop = asyncio.get_running_loop()
    worker = _workers.get(loop)
    if worker is None:
        worker = _workers[loop] = UcxWorker(load_ucx(), loop)
    worker.acquire()
    return worker
