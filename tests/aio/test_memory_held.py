"""What was handed to the library is free as soon as it is done with it, without a garbage collection."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import lynx_net
from lynx_net.aio.inbox import Inbox
from lynx_net.aio.offload import run_blocking, run_or_withdraw

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


class Large:
    pass


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def test_a_cancelled_wait_for_a_thread_keeps_nothing_of_its_work() -> None:
    large = Large()
    gone = weakref.ref(large)
    began, go_on = threading.Event(), threading.Event()

    def work(_large: Large) -> None:
        began.set()
        go_on.wait(10)

    with ThreadPoolExecutor(1) as executor:
        task = asyncio.create_task(run_blocking(executor, work, large))
        del large
        await asyncio.to_thread(began.wait, 10)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        await asyncio.sleep(0)
    assert gone() is None


async def test_a_cancelled_wait_takes_back_what_has_not_begun() -> None:
    done: list[int] = []
    go_on = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        busy = executor.submit(go_on.wait, 10)
        task = asyncio.create_task(run_or_withdraw(executor, done.append, 1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not busy.done()
        go_on.set()
    assert done == []


async def test_an_iteration_that_waits_does_not_keep_its_last_item() -> None:
    inbox: Inbox[Large] = Inbox()
    gone: list[weakref.ref[Large]] = []
    taken = asyncio.Event()

    async def take() -> None:
        async for item in inbox.iterate():
            gone.append(weakref.ref(item))
            del item
            taken.set()

    task = asyncio.create_task(take())
    inbox.put(Large())
    await taken.wait()
    await asyncio.sleep(0)
    assert gone[0]() is None
    inbox.end()
    await task


async def test_a_received_cache_is_free_once_nobody_has_its_transfer(make_cache: Any) -> None:
    cache = make_cache()
    targets: list[weakref.ref[lynx_net.HostCache]] = []

    def allocate(offer: lynx_net.Offer) -> lynx_net.HostCache:
        target = lynx_net.HostCache(offer.layout)
        targets.append(weakref.ref(target))
        return target

    async with (
        lynx_net.serve("tcp://127.0.0.1:0", allocate=allocate) as server,
        lynx_net.connect(server.url) as link,
    ):
        receiving = await server.accept()
        sending = asyncio.create_task(cache.send_on(link))
        transfer = await anext(aiter(server))
        assert targets[0]() is transfer.target
        await transfer.complete
        await sending
        assert receiving.error is None
        del transfer
        async with asyncio.timeout(5):
            while targets[0]() is not None:  # noqa: ASYNC110  # the decoder's thread has a last look at its queue
                await asyncio.sleep(0.01)
