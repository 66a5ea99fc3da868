"""Whole transfers, over memory in virtual time and over TCP, with every codec."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import lynx_net
from lynx_net import CacheLayout, HostCache, LinkConfig
from lynx_net.aio import events as link_events
from lynx_net.errors import (
    CodecError,
    LocalProtocolError,
    LynxError,
    NonFiniteError,
    RequestRefusedError,
    TransferAbortedError,
)
from lynx_net.testing.clock import run_virtual

URLS = ["memory://transfers", "tcp://127.0.0.1:0"]


async def _transfer(cache: Any, url: str = "tcp://127.0.0.1:0", lanes: int = 1, **options: Any) -> Any:
    """Send a cache over a fresh link and return the complete incoming transfer."""
    async with lynx_net.serve(url) as server, lynx_net.connect(server.url, lanes=lanes) as link:
        sending = asyncio.create_task(cache.send_on(link, **options))
        async for transfer in server:
            await transfer.complete
            break
        sent = await sending
        assert sent.stats == transfer.stats
        return transfer


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("codec", ["lynx", "bf16", "int8", "int4", "kivi"])
async def test_every_codec_arrives_as_decoded_locally(codec: str, url: str, make_cache: Any, same: Any) -> None:
    cache = make_cache()
    transfer = await _transfer(cache, url, lanes=2, codec=codec)
    assert same(transfer.target, cache.decoded(codec))


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": 1},
        {"tokens": 31},
        {"tokens": 256, "raw_tail": 0, "raw_head": 0},
        {"tokens": 257},
        {"tokens": 70, "raw_tail": 300},
        {"tokens": 600, "raw_tail": 300},
        {"key_size": 1, "value_size": 7},
        {"heads": 1, "key_size": 576, "value_size": 0},
        {"key_size": 0, "value_size": 8},
        {"layers": 9, "tokens": 5},
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"page_tokens": 32, "tokens": 100},
    ],
)
async def test_odd_layouts(fields: dict[str, Any], make_cache: Any, same: Any) -> None:
    cache = make_cache(**fields)
    transfer = await _transfer(cache, lanes=3)
    assert same(transfer.target, cache.decoded("lynx"))


@pytest.mark.parametrize("fields", [{"layers": 0}, {"tokens": 0}])
async def test_an_empty_transfer_completes_at_once(fields: dict[str, Any], make_cache: Any) -> None:
    transfer = await _transfer(make_cache(**fields))
    assert transfer.anchor_ready.done()
    assert transfer.residual_ready.done()
    assert transfer.stats.total_bytes == 0


async def test_anchors_are_decoded_first_and_refined_in_place(make_cache: Any, same: Any) -> None:
    """At anchor_ready the target holds exactly the anchors' values, although residuals follow at once."""
    cache = make_cache(layers=8, tokens=512, heads=4, key_size=64, value_size=64)

    seen: list[HostCache] = []

    async def run() -> None:
        async with (
            lynx_net.serve("memory://anchors") as server,
            lynx_net.connect(server.url, rate="50Mbit") as link,
        ):
            sending = asyncio.create_task(cache.send_on(link))
            async for transfer in server:
                await transfer.anchor_ready
                snapshot = HostCache(cache.layout)
                for layer in range(cache.layout.layers):
                    for kind in cache.layout.kinds:
                        snapshot.view(layer, kind)[:] = transfer.target.view(layer, kind)
                seen.append(snapshot)
                assert not transfer.residual_ready.done()
                await transfer.residual_ready
                seen.append(transfer.target)
                break
            await sending
            times = [transfer.layer_ready(layer).at_s for layer in range(8)]
            assert times == sorted(times)
            assert times[-1] == transfer.anchor_ready.at_s
            later = [transfer.layer_ready(layer, 1).at_s for layer in range(8)]
            assert min(later) >= times[-1]
            assert max(later) == transfer.residual_ready.at_s

    await asyncio.to_thread(run_virtual, run())
    anchors, full = seen
    assert same(anchors, cache.decoded("lynx", streams=1))
    assert same(full, cache.decoded("lynx"))


@pytest.mark.parametrize("url", URLS)
async def test_residuals_use_the_time_in_which_the_next_layer_is_computed(url: str, make_cache: Any, same: Any) -> None:
    """A layer is refined before the anchors of the next one come, although the window is narrower than a page."""
    cache = make_cache(layers=2, tokens=600, heads=4, key_size=64, value_size=64)
    config = LinkConfig(segment_bytes=4096, early_residual_bytes=0)
    async with lynx_net.serve(url, config=config) as server, lynx_net.connect(server.url) as link:
        async with link.send("r", cache.layout, codec="lynx", fine=cache.fine) as sending:
            await sending.write(0, cache.arrays[0, "key"], cache.arrays[0, "value"])
            transfer = await anext(aiter(server))
            async with asyncio.timeout(20):
                await transfer.layer_ready(0, 1)
            await sending.write(1, cache.arrays[1, "key"], cache.arrays[1, "value"])
        await transfer.complete
    assert same(transfer.target, cache.decoded("lynx"))


async def test_the_rate_is_kept(make_cache: Any) -> None:
    """In virtual time the transfer takes its bytes over the rate, within 2 %."""
    cache = make_cache(layers=4, tokens=1024, heads=4, key_size=64, value_size=64)

    async def run() -> tuple[float, int]:
        async with (
            lynx_net.serve("memory://rate") as server,
            lynx_net.connect(server.url, rate="20Mbit", lanes=3) as link,
        ):
            sending = asyncio.create_task(cache.send_on(link))
            async for transfer in server:
                await transfer.complete
                break
            sent = await sending
            return transfer.complete.at_s - transfer.offered_at_s, sent.stats.total_bytes + 48 * sent.stats.segments

    elapsed_s, sent_bytes = await asyncio.to_thread(run_virtual, run())
    assert elapsed_s == pytest.approx(sent_bytes * 8 / 20e6, rel=0.02)


async def test_the_rate_can_be_changed_while_bytes_flow(make_cache: Any) -> None:
    """Half a second at one rate, the rest at another, and the end at none."""
    cache = make_cache(layers=8, tokens=1024, heads=4, key_size=64, value_size=64)

    async def run() -> list[float]:
        loop = asyncio.get_running_loop()
        async with lynx_net.serve("memory://change") as server, lynx_net.connect(server.url, rate="20Mbit") as link:
            sending = asyncio.create_task(cache.send_on(link))
            transfer = await anext(aiter(server))
            counted: list[float] = []
            for rate in ("20Mbit", "5Mbit", "40Mbit"):
                link.set_rate(rate)
                before = transfer.stats.total_bytes
                await asyncio.sleep(0.5)
                counted.append((transfer.stats.total_bytes - before) * 8 / 0.5)
            link.set_rate(None)
            began_s = loop.time()
            await sending
            counted.append(loop.time() - began_s)
            return counted

    first, second, third, rest_s = await asyncio.to_thread(run_virtual, run())
    assert first == pytest.approx(20e6, rel=0.1)
    assert second == pytest.approx(5e6, rel=0.2)
    assert third == pytest.approx(40e6, rel=0.1)
    assert rest_s < 0.1


async def test_many_transfers_at_once(make_cache: Any, same: Any) -> None:
    caches = {f"request-{index}": make_cache(seed=index, tokens=50 + index) for index in range(30)}
    done = {}
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:

        async def receive() -> None:
            async for transfer in server:
                await transfer.complete
                done[transfer.offer.request_id] = transfer.target
                if len(done) == len(caches):
                    return

        async with (
            lynx_net.connect(server.url, lanes=2) as first,
            lynx_net.connect(server.url) as second,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(receive())
            for index, (name, cache) in enumerate(caches.items()):
                group.create_task(cache.send_on((first, second)[index % 2], name))
    assert all(same(done[name], cache.decoded("lynx")) for name, cache in caches.items())


async def test_request_and_answer(make_cache: Any, same: Any) -> None:
    """The decode side asks; the prefill side answers or refuses, at once, and both may be the connecting one."""
    cache = make_cache()
    async with lynx_net.serve("tcp://127.0.0.1:0") as server, lynx_net.connect(server.url) as prefill:

        async def answer() -> None:
            async for request in prefill.requests():
                if request.id != "known":
                    request.refuse("no such cache")
                    continue
                async with request.send(
                    cache.layout, codec="int8", fine=cache.fine, meta={"asked": request.meta}
                ) as sending:
                    await cache.write_to(sending)

        answering = asyncio.create_task(answer())
        decode = await server.accept()
        with pytest.raises(RequestRefusedError, match="no such cache"):
            await decode.request("unknown")
        transfer = await decode.request("known", {"tokens": [1, 2, 3]})
        await transfer.complete
        assert transfer.offer.meta == {"asked": {"tokens": [1, 2, 3]}}
        assert same(transfer.target, cache.decoded("int8"))
    await answering


async def test_a_transfer_offered_as_its_waiting_is_cancelled_is_cancelled(
    make_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache()
    async with lynx_net.serve("tcp://127.0.0.1:0") as server, lynx_net.connect(server.url) as prefill:
        decode = await server.accept()
        asking = asyncio.create_task(decode.request("r"))
        announce = link_events._IN_LOOP[link_events._Taken]

        def announce_and_cancel(events: Any, taken: Any) -> None:
            announce(events, taken)
            asking.cancel()  # before the task has had its turn

        async def send(request: Any) -> None:
            async with request.send(cache.layout, codec="int8", fine=cache.fine) as sending:
                await cache.write_to(sending)
                await sending.delivered

        monkeypatch.setitem(link_events._IN_LOOP, link_events._Taken, announce_and_cancel)
        request = await anext(prefill.requests())
        with pytest.raises(lynx_net.errors.TransferAbortedError, match="nobody waits for it"):
            await send(request)
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not decode.events.incoming


async def test_meta_and_first_token_travel(make_cache: Any) -> None:
    transfer = await _transfer(make_cache(), meta={"started": 1.5, "ids": [1, 2]}, first_token=7)
    assert transfer.offer.meta == {"started": 1.5, "ids": [1, 2]}
    assert transfer.offer.first_token == 7
    assert transfer.offer.request_id == "r"


class TestBadInput:
    """Refused before anything is sent; the link stays usable."""

    @pytest.mark.parametrize(
        ("keys", "error"),
        [
            (np.zeros((300, 2, 15), np.float32), LocalProtocolError),
            (np.zeros((300, 2, 16), np.float64), LocalProtocolError),
            (np.zeros((300, 2, 16), np.float16), LocalProtocolError),
            (None, LocalProtocolError),
            ([[1.0]], LocalProtocolError),
        ],
    )
    async def test_wrong_arrays(self, keys: Any, error: type[Exception], make_cache: Any) -> None:
        cache = make_cache()
        async with lynx_net.serve("tcp://127.0.0.1:0") as server, lynx_net.connect(server.url) as link:
            with pytest.raises(error, match="layer 0"):
                async with link.send("bad", cache.layout) as sending:
                    await sending.write(0, keys, cache.arrays[0, "value"])
            await cache.send_on(link, "good")

    async def test_a_layer_twice_or_never(self, make_cache: Any) -> None:
        cache = make_cache()
        async with lynx_net.serve("tcp://127.0.0.1:0") as server, lynx_net.connect(server.url) as link:
            arrays = cache.arrays[0, "key"], cache.arrays[0, "value"]
            async with link.send("twice", cache.layout) as sending:
                await sending.write(0, *arrays)
                with pytest.raises(LocalProtocolError, match="already"):
                    await sending.write(0, *arrays)
                await sending.write(1, *arrays)
            with pytest.raises(LocalProtocolError, match="1 layers"):
                async with link.send("never", cache.layout) as sending:
                    await sending.write(0, *arrays)
            with pytest.raises(LocalProtocolError, match="layer 2 of"):
                async with link.send("beyond", cache.layout) as sending:
                    await sending.write(2, *arrays)

    async def test_nan_names_its_place_and_the_receiver_learns(self, make_cache: Any) -> None:
        cache = make_cache()
        cache.arrays[1, "value"][277, 1, 5] = np.nan
        async with lynx_net.serve("tcp://127.0.0.1:0") as server, lynx_net.connect(server.url) as link:
            sending = asyncio.create_task(cache.send_on(link))
            async for transfer in server:
                with pytest.raises(TransferAbortedError, match=r"layer 1.*nan"):
                    await transfer.complete
                break
            with pytest.raises(NonFiniteError) as caught:
                await sending
            assert (caught.value.head, caught.value.channel) == (1, 5)
            assert any("token 277" in note for note in caught.value.__notes__)

    async def test_unknown_codec_and_rate(self, make_cache: Any) -> None:
        cache = make_cache()
        async with lynx_net.serve("tcp://127.0.0.1:0") as server:
            with pytest.raises(LocalProtocolError, match="rate"):
                async with lynx_net.connect(server.url, rate="fast"):
                    pass
            async with lynx_net.connect(server.url) as link:
                with pytest.raises(CodecError, match="zip"):
                    link.send("r", cache.layout, codec="zip")

    async def test_too_much_metadata(self, make_cache: Any) -> None:
        async with lynx_net.serve("tcp://127.0.0.1:0") as server, lynx_net.connect(server.url) as link:
            with pytest.raises(LocalProtocolError, match="metadata"):
                link.send("r", make_cache().layout, meta={"blob": bytes(1 << 20)})
            await make_cache().send_on(link)


class TestEnds:
    @pytest.mark.parametrize("url", URLS)
    async def test_an_offer_that_is_withdrawn_at_once(self, url: str, make_cache: Any) -> None:
        """Offer and abort arrive together: the transfer fails with the reason, and nothing hangs at the end."""
        cache = make_cache()
        async with lynx_net.serve(url) as server, lynx_net.connect(server.url) as link:
            for _ in range(20):
                link.send("withdrawn", cache.layout).cancel("changed my mind")
                transfer = await anext(aiter(server))
                with pytest.raises(TransferAbortedError, match="changed my mind"):
                    await transfer.complete
            await cache.send_on(link, "meant")

    async def test_an_error_inside_the_block_reaches_the_receiver(self, make_cache: Any) -> None:
        cache = make_cache()
        async with lynx_net.serve("tcp://127.0.0.1:0") as server, lynx_net.connect(server.url) as link:

            async def fail() -> None:
                async with link.send("r", cache.layout, codec="lynx", fine=cache.fine) as sending:
                    await sending.write(0, cache.arrays[0, "key"], cache.arrays[0, "value"])
                    raise ZeroDivisionError("the model broke")

            failing = asyncio.create_task(fail())
            async for transfer in server:
                async with asyncio.timeout(1):
                    with pytest.raises(TransferAbortedError, match="the model broke"):
                        await transfer.anchor_ready
                break
            with pytest.raises(ZeroDivisionError):
                await failing
            await cache.send_on(link, "again")

    async def test_the_receiver_cancels(self, make_cache: Any) -> None:
        cache = make_cache(layers=6, tokens=1000)
        async with lynx_net.serve("tcp://127.0.0.1:0") as server, lynx_net.connect(server.url, rate="20Mbit") as link:
            sending = asyncio.create_task(cache.send_on(link))
            async for transfer in server:
                await transfer.layer_ready(0)
                transfer.cancel("not needed any more")
                await transfer.closed()
                with pytest.raises(TransferAbortedError, match="not needed"):
                    await transfer.residual_ready
                await transfer.layer_ready(0)
                break
            with pytest.raises(TransferAbortedError, match="not needed"):
                await sending

    async def test_the_sending_task_is_cancelled(self, make_cache: Any) -> None:
        cache = make_cache(layers=6, tokens=1000)
        async with lynx_net.serve("tcp://127.0.0.1:0") as server, lynx_net.connect(server.url, rate="20Mbit") as link:
            sending = asyncio.create_task(cache.send_on(link))
            async for transfer in server:
                await transfer.layer_ready(0)
                sending.cancel()
                with pytest.raises(TransferAbortedError):
                    await transfer.complete
                break
            with pytest.raises(asyncio.CancelledError):
                await sending
            await make_cache().send_on(link, "next")

    async def test_a_target_that_declines(self, make_cache: Any) -> None:
        def allocate(offer: Any) -> HostCache:
            raise LynxError(f"no room for {offer.request_id}")

        async with (
            lynx_net.serve("tcp://127.0.0.1:0", allocate=allocate) as server,
            lynx_net.connect(server.url) as link,
        ):
            with pytest.raises(TransferAbortedError, match="no room for r"):
                await make_cache().send_on(link)

    async def test_a_target_of_the_wrong_shape(self, make_cache: Any) -> None:
        wrong = HostCache(CacheLayout(layers=2, tokens=299, heads=2, key_size=16, value_size=16))
        async with (
            lynx_net.serve("tcp://127.0.0.1:0", allocate=lambda _: wrong) as server,
            lynx_net.connect(server.url) as link,
        ):
            with pytest.raises(TransferAbortedError, match="shape"):
                await make_cache().send_on(link)

    async def test_more_than_the_receiver_may_hold(self, make_cache: Any) -> None:
        """Too large for ever is refused; too large for now waits in order and completes."""
        config = LinkConfig(memory_bytes=60_000)
        async with (
            lynx_net.serve("tcp://127.0.0.1:0", config=config) as server,
            lynx_net.connect(server.url) as link,
        ):
            with pytest.raises(TransferAbortedError, match="holds at most 60000"):
                await make_cache(tokens=3000).send_on(link)
            async with asyncio.TaskGroup() as group:
                for index in range(8):
                    group.create_task(make_cache().send_on(link, f"r{index}"))


async def test_a_target_of_another_dtype(make_cache: Any) -> None:
    """The receiver chooses the dtype of its cache."""
    cache = make_cache()

    def allocate(offer: Any) -> HostCache:
        return HostCache(offer.layout, np.float16)

    async with (
        lynx_net.serve("tcp://127.0.0.1:0", allocate=allocate) as server,
        lynx_net.connect(server.url) as link,
    ):
        sending = asyncio.create_task(cache.send_on(link))
        async for transfer in server:
            await transfer.complete
            break
        await sending
    expected = cache.decoded("lynx")
    for layer in range(2):
        assert np.array_equal(transfer.target.view(layer, "key"), expected.view(layer, "key").astype(np.float16))
