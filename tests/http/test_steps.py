"""The model's thread is shared fairly, and nothing stays in it."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from lynx_net.aio.offload import run_or_withdraw
from lynx_net.integrations.http.steps import StepThread


class Bench:
    """A thread whose clock is moved by its steps, and a gate that keeps it busy until all steps are queued."""

    def __init__(self):
        self.now_s = 0.0
        self.order = []
        self.thread = StepThread(clock=lambda: self.now_s)
        self._gate, began = threading.Event(), threading.Event()
        self.first = self.thread.lane().submit(lambda: (began.set(), self._gate.wait()))
        began.wait(10)

    def step(self, name, cost_s):
        self.order.append(name)
        self.now_s += cost_s

    def go(self):
        self._gate.set()
        self.first.result(10)


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.go()
    made.thread.close()


def test_time_is_shared_not_steps(bench):
    cheap, dear = bench.thread.lane(), bench.thread.lane()
    waiting = [dear.submit(bench.step, "dear", 4.0) for _ in range(3)]
    waiting += [cheap.submit(bench.step, "cheap", 1.0) for _ in range(12)]
    bench.go()
    for one in waiting:
        one.result(10)
    for count in range(1, len(bench.order) + 1):
        shares = bench.order[:count].count("dear") * 4, bench.order[:count].count("cheap")
        assert abs(shares[0] - shares[1]) <= 4


def test_who_comes_late_gets_no_arrears(bench):
    early = bench.thread.lane()
    done = [early.submit(bench.step, "early", 1.0) for _ in range(10)]
    bench.go()
    for one in done:
        one.result(10)
    bench.order.clear()
    gate = threading.Event()
    held = bench.thread.lane().submit(gate.wait)
    late = bench.thread.lane()
    waiting = [late.submit(bench.step, "late", 1.0) for _ in range(6)]
    waiting += [early.submit(bench.step, "early", 1.0) for _ in range(6)]
    gate.set()
    for one in (held, *waiting):
        one.result(10)
    assert bench.order[:6].count("early") >= 2


async def test_who_leaves_before_its_turn_is_over_at_once_and_its_step_is_not_made(bench):
    kept = bench.thread.lane().submit(bench.step, "kept", 1.0)
    task = asyncio.create_task(run_or_withdraw(bench.thread.lane(), bench.step, "never", 1.0))
    await asyncio.sleep(0)
    assert bench.thread.waiting == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task  # the thread is still busy with another's step
    assert bench.thread.waiting == 1
    bench.go()
    kept.result(10)
    assert bench.order == ["kept"]


def test_the_thread_keeps_nothing_of_a_step(bench):
    class Cache:
        pass

    cache = Cache()
    gone = weakref.ref(cache)
    bench.go()
    gc.disable()
    try:
        bench.thread.lane().submit(lambda cache: None, cache).result(10)
        del cache
        bench.thread.lane().submit(lambda: None).result(10)
        assert gone() is None
    finally:
        gc.enable()


def test_errors_go_to_who_waits(bench):
    bench.go()
    with pytest.raises(ZeroDivisionError):
        bench.thread.lane().submit(lambda: 1 / 0).result(10)
    assert bench.thread.lane().submit(lambda: 5).result(10) == 5
    assert bench.thread.steps >= 2


def test_after_the_end_nothing_is_taken():
    thread = StepThread()
    thread.close()
    with pytest.raises(RuntimeError, match="ended"):
        thread.lane().submit(print)
