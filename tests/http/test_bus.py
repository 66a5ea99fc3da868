"""Events are kept for a while, and given to whoever watches, within bounds."""

from __future__ import annotations

import asyncio

import pytest

from lynx_net.integrations.http.bus import EventBus


async def taken(subscription):
    return [event async for event in subscription]


async def test_who_follows_a_request_gets_its_whole_story_and_no_other():
    bus = EventBus()
    log, other = bus.open("a", "m"), bus.open("b", "m")
    log.publish("request")
    with bus.subscribe("a") as events:
        other.publish("request")
        log.publish("started")
        log.publish("done")
        assert [event["type"] for event in await taken(events)] == ["request", "started", "done"]
    with bus.subscribe("a") as late:
        assert [event["seq"] for event in await taken(late)] == [0, 1, 2]
    with pytest.raises(KeyError):
        bus.subscribe("c")


async def test_a_slow_watcher_loses_the_oldest_and_is_told():
    bus = EventBus(queue_events=3)
    with bus.subscribe() as events:
        log = bus.open("a", "m")
        for kind in ("request", "started", "offer", "progress", "done"):
            log.publish(kind)
        bus.end()
        got = await taken(events)
    assert [event["type"] for event in got] == ["recent", "dropped", "offer", "progress", "done"]
    assert got[1] == {"type": "dropped", "count": 2}


async def test_ended_requests_are_kept_within_bounds():
    bus = EventBus(keep_requests=3, keep_events=10)
    running = bus.open("running", "m")
    running.publish("request")
    for number in range(6):
        log = bus.open(str(number), "m")
        log.publish("request")
        log.publish("done")
    assert [log.id for log in bus.recent()] == ["5", "4", "3", "running"]
    assert bus.find("2") is None
    long = bus.open("long", "m")
    for _ in range(20):
        long.publish("progress")
    long.publish("cancelled")
    assert {log.id for log in bus.recent()} == {"long", "running"}
    assert [one["state"] for one in (log.summary() for log in bus.recent())] == ["cancelled", "running"]


async def test_a_watcher_that_leaves_is_forgotten():
    bus = EventBus()
    log = bus.open("a", "m")
    for key in (None, "a"):
        with bus.subscribe(key) as events:
            waiting = asyncio.create_task(taken(events))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
    assert bus._subscribers == {}
    log.publish("done")


async def test_times_count_from_the_arrival():
    now = [100.0]
    bus = EventBus(clock=lambda: now[0])
    log = bus.open("a", "m")
    log.publish("request", log.started_s)
    now[0] = 101.5
    log.publish("started")
    log.publish("ready", 101.25)
    assert [event["at_s"] for event in log.events] == [0.0, 1.5, 1.25]
