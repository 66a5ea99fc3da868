"""Cancelled at every await of connecting, sending, receiving, asking and closing: usable or ended, and no leak."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest

import lynx_net
from lynx_net import LinkConfig, LynxError
from lynx_net.testing.sweep import Canceller, Moment, cancel_sweep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

URL = "memory://sweep"
CONFIG = LinkConfig(
    segment_bytes=4096,
    anchor_window_bytes=8192,
    residual_window_bytes=8192,
    initial_credit_bytes=4096,
    send_queue_bytes=2048,
)
"""Small enough that every kind of waiting happens: for credit, for room in the queue, for the last segment."""

MOMENTS: list[Moment] = ["waiting", "woken", "step"]


STEP_STRIDE = int(os.environ.get("LYNX_NET_SWEEP_STRIDE", "17"))
"""A transfer takes hundreds of steps of the loop; every one of them is tried with a stride of 1."""


@pytest.fixture(params=MOMENTS)
def moment(request: pytest.FixtureRequest) -> Moment:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def cache(make_cache: Any) -> Any:
    return make_cache(layers=6, tokens=90, heads=2, key_size=16, value_size=16)


async def sweep(scenario: Callable[[Canceller], Awaitable[None]], moment: Moment, at_least: int) -> None:
    """In a thread, since the sweep has event loops of its own; and it must have found something to cancel."""
    stride = STEP_STRIDE if moment == "step" else 1
    points = await asyncio.to_thread(cancel_sweep, _without_leaks(scenario), moment, stride=stride)
    assert points * stride >= at_least


def _without_leaks(scenario: Callable[[Canceller], Awaitable[None]]) -> Callable[[Canceller], Awaitable[None]]:
    async def checked(canceller: Canceller) -> None:
        loop = asyncio.get_running_loop()
        unhandled: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: unhandled.append(context))
        before = asyncio.all_tasks()
        async with asyncio.timeout(600):
            await scenario(canceller)
        for _ in range(3):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        assert unhandled == []

    return checked


def check_empty(*links: Any) -> None:
    """No transfer, reservation, turn or waiter is left of anything."""
    for link in links:
        core, book = link.core, link.core.incoming._book
        assert core.open_transfers() == []
        assert not link.events.incoming
        assert not link.events.outgoing
        assert not core.liveness.receiving
        assert not core.liveness.sending
        assert not core.scheduler._queues
        assert not core.scheduler._turns
        assert not book._entries
        assert not book._waiting
        assert not any(book._owing.values())
        assert book.reserved_bytes == 0
        assert book.early_reserved_bytes == 0


@contextlib.asynccontextmanager
async def pair(**connect: Any) -> AsyncIterator[tuple[Any, Any, Any]]:
    """Server, its link, and the connecting link."""
    async with (
        lynx_net.serve(URL, config=CONFIG) as server,
        lynx_net.connect(server.url, config=CONFIG, **({"lanes": 2, "rate": "100Mbit"} | connect)) as link,
    ):
        yield server, await server.accept(), link


async def receive(server: Any, request_id: str) -> Any:
    """Take transfers until the one of this request, and wait for it."""
    async for transfer in server:
        if transfer.offer.request_id == request_id:
            await transfer.complete
            return transfer
    raise AssertionError("the server closed")


async def check_usable(cache: Any, same: Any, server: Any, *links: Any) -> None:
    """A whole transfer goes through, with the right bytes, and nothing is left of it or of what was before."""
    link = links[-1]
    receiving = asyncio.create_task(receive(server, "afterwards"))
    await cache.send_on(link, "afterwards")
    transfer = await receiving
    assert same(transfer.target, cache.decoded("lynx"))
    check_empty(*links)


async def test_a_sweep_that_finds_nothing_fails() -> None:
    """The driver itself: it cancels at each suspension once, and reports where a scenario failed."""

    async def fragile(canceller: Canceller) -> None:
        steps: list[int] = []

        async def work() -> None:
            for step in range(5):
                steps.append(step)
                await asyncio.sleep(1)

        await canceller.run(work())
        assert len(steps) != 3

    with pytest.raises(AssertionError) as caught:
        await asyncio.to_thread(cancel_sweep, fragile)
    assert caught.value.__notes__ == ["cancelled at point 2, waiting"]


async def test_connecting(moment: Moment, cache: Any, same: Any) -> None:
    """And sending and closing on the new link: the server serves the next peer."""

    async def scenario(canceller: Canceller) -> None:
        async def visit() -> None:
            async with lynx_net.connect(URL, config=CONFIG, lanes=3) as link:
                await cache.send_on(link, "visit")

        async with lynx_net.serve(URL, config=CONFIG) as server:
            receiving = asyncio.create_task(_all_ends(server))
            await canceller.run(visit())
            # A lane whose peer gave up between two lanes is given up at the deadline.
            await asyncio.sleep(2 * CONFIG.deadline_s)
            assert server._endpoint.links == {}
            assert server._half_open == {}
            assert not server._handshakes
            receiving.cancel()
            async with lynx_net.connect(URL, config=CONFIG, lanes=3) as link:
                await check_usable(cache, same, server, link)

    await sweep(scenario, moment, 12)


async def _all_ends(server: Any) -> None:
    async for transfer in server:
        await transfer.closed()


async def test_sending(moment: Moment, cache: Any, same: Any) -> None:
    async def scenario(canceller: Canceller) -> None:
        async with pair() as (server, served, link):
            sending = asyncio.create_task(canceller.run(cache.send_on(link, "swept")))
            transfer = await anext(aiter(server))
            await transfer.closed()
            await sending
            if transfer.complete._error is None:
                assert same(transfer.target, cache.decoded("lynx"))
            else:
                assert canceller.reached
                assert isinstance(transfer.complete._error, LynxError)
            await check_usable(cache, same, server, served, link)

    await sweep(scenario, moment, 6)


async def test_waiting_for_readiness(moment: Moment, cache: Any, same: Any) -> None:
    """A cancelled wait is nobody else's business: the transfer completes."""

    async def scenario(canceller: Canceller) -> None:
        async with pair() as (server, served, link):
            sending = asyncio.create_task(cache.send_on(link, "swept"))
            taken: list[Any] = []

            async def follow() -> None:
                taken.append(await anext(aiter(server)))
                for layer in range(6):
                    await taken[0].layer_ready(layer)
                await taken[0].anchor_ready
                await taken[0].layer_ready(1, 1)
                await taken[0].residual_ready
                await taken[0].stream_ready(1)
                await taken[0].complete
                await taken[0].closed()

            await canceller.run(follow())
            await sending
            transfer = taken[0] if taken else await anext(aiter(server))
            await transfer.complete
            assert same(transfer.target, cache.decoded("lynx"))
            await check_usable(cache, same, server, served, link)

    await sweep(scenario, moment, 9)


async def test_a_receiver_that_gives_its_transfer_up(moment: Moment, cache: Any, same: Any) -> None:
    """The usual shape, `try: ... finally: transfer.cancel()`: the sender learns it, or had delivered."""

    async def scenario(canceller: Canceller) -> None:
        async with pair() as (server, served, link):
            sending = asyncio.create_task(cache.send_on(link, "swept"))
            transfer = await anext(aiter(server))

            async def follow() -> None:
                try:
                    for layer in range(6):
                        await transfer.layer_ready(layer)
                    await transfer.residual_ready
                    await transfer.complete
                finally:
                    transfer.cancel("given up")
                    await transfer.closed()

            await canceller.run(follow())
            await asyncio.wait([sending])
            error = sending.exception()
            assert error is None or (isinstance(error, LynxError) and canceller.reached)
            await check_usable(cache, same, server, served, link)

    await sweep(scenario, moment, 7)


async def test_asking(moment: Moment, cache: Any, same: Any) -> None:
    """The asking side is cancelled; whatever is offered for it all the same is given up, and the link serves on."""

    async def scenario(canceller: Canceller) -> None:
        async with pair() as (server, served, link):
            answering = asyncio.create_task(_answer(link, cache))

            async def ask() -> None:
                transfer = await served.request("swept")
                try:
                    await transfer.complete
                    assert same(transfer.target, cache.decoded("lynx"))
                finally:
                    transfer.cancel()

            await canceller.run(ask())
            transfer = await served.request("again")
            await transfer.complete
            assert same(transfer.target, cache.decoded("lynx"))
            with pytest.raises(lynx_net.errors.RequestRefusedError):
                await served.request("refuse me")
            await asyncio.sleep(1)
            assert not served.events.asked
            answering.cancel()
            await asyncio.wait([answering])
            await check_usable(cache, same, server, served, link)

    await sweep(scenario, moment, 2)


async def _answer(link: Any, cache: Any) -> None:
    async for request in link.requests():
        if request.id == "refuse me":
            request.refuse("as you wish")
            continue
        with contextlib.suppress(LynxError):
            async with request.send(cache.layout, codec="lynx", fine=cache.fine) as sending:
                await cache.write_to(sending)


async def test_answering(moment: Moment, cache: Any, same: Any) -> None:
    """The answering side is cancelled: who asked gets a typed error at the latest when the link ends."""

    async def scenario(canceller: Canceller) -> None:
        async with pair() as (server, served, link):
            asking = asyncio.create_task(_outcome(served, "swept"))

            async def answer() -> None:
                request = await anext(link.requests())
                async with request.send(cache.layout, codec="lynx", fine=cache.fine) as sending:
                    await cache.write_to(sending)

            await canceller.run(answer())
            if not link.core.open_transfers() and not asking.done():
                await asyncio.sleep(1)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(asking), 1)
            if not asking.done():
                # Cancelled before it had taken the request: the next one to look finds it.
                request = await asyncio.wait_for(anext(link.requests()), 1)
                assert request.id == "swept"
                request.refuse("nobody is there")
            outcome = await asking
            assert outcome is None or (isinstance(outcome, LynxError) and canceller.reached)
            await check_usable(cache, same, server, served, link)

    await sweep(scenario, moment, 7)


async def _outcome(link: Any, request_id: str) -> LynxError | None:
    try:
        transfer = await link.request(request_id)
        await transfer.complete
    except LynxError as error:
        return error
    return None


async def test_closing_a_link(moment: Moment, cache: Any) -> None:
    """Closed all the same: both sides' waiters get a typed error, and nothing is left of the link."""

    async def scenario(canceller: Canceller) -> None:
        async with pair(rate="1Mbit") as (server, served, link):
            sending = asyncio.create_task(cache.send_on(link, "swept"))
            transfer = await anext(aiter(server))
            await transfer.layer_ready(0)
            began_s = asyncio.get_running_loop().time()
            await canceller.run(link.close())
            await asyncio.wait([sending])
            await transfer.closed()
            await served.closed()
            await link.closed()
            assert asyncio.get_running_loop().time() - began_s < 1
            assert isinstance(sending.exception(), LynxError)
            assert isinstance(transfer.complete._error, LynxError)
            assert transfer.layer_ready(0).done()
            for one in (served, link):
                assert isinstance(one.error, LynxError)
                check_empty(one)
                with pytest.raises(LynxError):
                    one.send("too late", cache.layout)

    await sweep(scenario, moment, 1)


async def test_serving(moment: Moment, cache: Any, same: Any) -> None:
    """A whole server is cancelled, from its first await to the last of its closing; the name is free again."""

    async def scenario(canceller: Canceller) -> None:
        ready = asyncio.Event()

        async def serve_one() -> None:
            async with lynx_net.serve(URL, config=CONFIG) as server:
                ready.set()
                async for transfer in server:
                    await transfer.complete
                    return

        async def visit() -> LynxError | None:
            await ready.wait()
            try:
                async with lynx_net.connect(URL, config=CONFIG, lanes=2) as link:
                    await cache.send_on(link, "swept")
            except LynxError as error:
                return error
            return None

        visiting = asyncio.create_task(visit())
        await canceller.run(serve_one())
        if not ready.is_set():
            visiting.cancel()
        await asyncio.wait([visiting])
        assert visiting.cancelled() or visiting.result() is None or canceller.reached
        async with lynx_net.serve(URL, config=CONFIG) as server, lynx_net.connect(URL, config=CONFIG) as link:
            await check_usable(cache, same, server, link)

    await sweep(scenario, moment, 4)


async def test_accepting(moment: Moment, cache: Any, same: Any) -> None:
    """A cancelled accept loses no link."""

    async def scenario(canceller: Canceller) -> None:
        async with lynx_net.serve(URL, config=CONFIG) as server:
            accepting = asyncio.create_task(canceller.run(server.accept()))
            await asyncio.sleep(0)
            async with lynx_net.connect(URL, config=CONFIG) as link:
                served = await accepting or await server.accept()
                await check_usable(cache, same, server, served, link)

    await sweep(scenario, moment, 1)
