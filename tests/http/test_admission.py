"""So many run, so many wait, first come first served; whatever is cancelled, no place is lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lynx_net.integrations.http.admission import Admission
from lynx_net.integrations.http.errors import ApiError


async def hold(admission, until, log, name):
    async with admission.place(lambda position: log.append((name, position))):
        log.append(name)
        await until.wait()


async def test_first_come_first_served():
    admission, until, log = Admission(2, 3), asyncio.Event(), []
    tasks = []
    for name in "abcde":
        tasks.append(asyncio.create_task(hold(admission, until, log, name)))
        await asyncio.sleep(0)
    assert log == ["a", "b", ("c", 0), ("d", 1), ("e", 2)]
    assert (admission.running, admission.queued) == (2, 3)
    with pytest.raises(ApiError) as refusal:
        await hold(admission, until, log, "f")
    assert refusal.value.status == 429
    assert int(refusal.value.headers()["Retry-After"]) >= 1
    until.set()
    await asyncio.gather(*tasks)
    assert log[5:] == ["c", "d", "e"]
    assert (admission.running, admission.queued) == (0, 0)


async def test_a_draining_server_finishes_what_waits_and_takes_nothing_new():
    admission, until, log = Admission(1, 5), asyncio.Event(), []
    tasks = [asyncio.create_task(hold(admission, until, log, name)) for name in "ab"]
    await asyncio.sleep(0)
    admission.drain()
    with pytest.raises(ApiError) as refusal:
        await hold(admission, until, log, "c")
    assert refusal.value.status == 503
    waiting = asyncio.create_task(admission.idle())
    until.set()
    await waiting
    assert all(task.done() for task in tasks)
    assert "b" in log


@given(st.lists(st.tuples(st.sampled_from(["come", "leave", "finish"]), st.integers(0, 30)), max_size=60))
@settings(deadline=None)
def test_no_place_is_ever_lost(moves):
    async def main():
        admission = Admission(3, 4)
        requests: list[tuple[asyncio.Task[None], asyncio.Event]] = []
        refused = 0
        for move, number in moves:
            if move == "come":
                until = asyncio.Event()
                requests.append((asyncio.create_task(hold(admission, until, [], "")), until))
            elif requests:
                task, until = requests[number % len(requests)]
                if move == "leave":
                    task.cancel()
                else:
                    until.set()
            for _ in range(number % 3):  # sometimes two things happen at one moment
                await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        assert admission.running <= 3
        assert admission.queued <= 4
        assert admission.queued == 0 or admission.running == 3
        for _, until in requests:
            until.set()
        ends = await asyncio.gather(*(task for task, _ in requests), return_exceptions=True)
        refused = sum(isinstance(end, ApiError) for end in ends)
        assert all(end is None or isinstance(end, ApiError | asyncio.CancelledError) for end in ends)
        assert refused <= max(len(requests) - 7, 0)
        assert (admission.running, admission.queued) == (0, 0)
        await asyncio.wait_for(admission.idle(), 1)

    asyncio.run(main())
