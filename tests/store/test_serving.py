"""Caches go to a store over a link as they are, and come back from it, bit for bit and anchors first."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import lynx_net
from lynx_codec import CodecPlan, CodecRule, PackedCache
from lynx_codec.plan import DEFAULT_PLAN
from lynx_net.errors import LynxError, RequestRefusedError, TransferAbortedError
from lynx_net.store import (
    ContextStore,
    LocalStorage,
    StoreOptions,
    is_already_stored,
    serve_store,
    stored_as,
    wanted,
)
from lynx_net.store.store import HeldEntry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from lynx_net.aio.link import Link

TOKENS = np.random.default_rng(5).integers(0, 50_000, 2000)


@contextlib.asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[tuple[ContextStore, str]]:
    limits = {name: options.pop(name) for name in ("max_bytes",) if name in options}
    with ContextStore(options.pop("storage", None) or LocalStorage(folder), **limits).open() as store:
        async with serve_store(options.pop("url", "tcp://127.0.0.1:0"), store, **options) as server:
            yield store, server.url


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # what is waited for happens in a thread that knows no event
            await asyncio.sleep(0.001)


async def fetch(url: str, tokens: Any, **options: Any) -> lynx_net.IncomingTransfer:
    async with lynx_net.connect(url) as link:
        transfer = await link.request("r", wanted("toy", tokens, **options))
        await transfer.complete
        return transfer


async def send(url: str, cache: Any, **options: Any) -> None:
    async with lynx_net.connect(url, **options.pop("connect", {})) as link:
        await cache.send_on(link, meta=stored_as("toy", TOKENS[: cache.layout.tokens]), **options)


def file_of(folder: Path) -> Path:
    (file,) = (folder / "entries").iterdir()
    return file


EXACT = {"codec": "nested", "codec_params": {"exact": True, "chunk": 64}}
MIXED = CodecPlan(
    "nested", {"bits": [4, 4]}, [CodecRule("int8", layers=(0,)), CodecRule("bf16", layers=(1,), kind="key")]
)
CODECS: dict[str, dict[str, Any]] = {
    "default": {"codec": DEFAULT_PLAN},
    "lynx": {"codec": "lynx"},
    "three streams": {"codec": "nested", "codec_params": {"bits": [2, 2, 4]}},
    "mixed": {"codec": MIXED},
    "int4": {"codec": "int4"},
}


@pytest.mark.parametrize("backend", ["local", "memory"])
@pytest.mark.parametrize("name", ["default", "mixed", "int4"])
async def test_what_was_stored_comes_back(name: str, backend: str, tmp_path: Path, make_cache: Any, same: Any) -> None:
    from lynx_net.store.remote import FsspecStorage

    cache = make_cache(tokens=600, layers=3)
    storage = FsspecStorage(f"memory://{tmp_path.name}") if backend == "memory" else None
    async with serving(tmp_path, storage=storage) as (store, url):
        async with lynx_net.serve("memory://direct") as server, lynx_net.connect(server.url) as link:
            sending = asyncio.create_task(cache.send_on(link, **CODECS[name]))
            direct = await anext(aiter(server))
            await direct.complete
            await sending
        await send(url, cache, **CODECS[name])
        transfer = await fetch(url, TOKENS[:600])
        assert same(transfer.target, direct.target)
        (entry,) = store.entries()
        assert transfer.offer.meta == {"store": {"key": entry.key, "tokens": 600, "writing": False}}
        assert transfer.stats.stream_bytes == direct.stats.stream_bytes
        async with lynx_net.connect(url) as link:
            by_key = await link.request("k", {"store": {"key": entry.key}})
            await by_key.complete
            assert same(by_key.target, direct.target)


async def test_what_is_not_stored_is_refused(tmp_path: Path, make_cache: Any) -> None:
    async with serving(tmp_path) as (_, url), lynx_net.connect(url) as link:
        await send(url, make_cache(tokens=300))
        for number, meta in enumerate(
            [
                wanted("another", TOKENS[:300]),
                wanted("toy", TOKENS[1:300]),
                wanted("toy", TOKENS[:300], codec="int8"),
                wanted("toy", TOKENS[:200], least_tokens=201),
                {"store": {"key": "f" * 32}},
            ]
        ):
            with pytest.raises(RequestRefusedError, match="not stored"):
                await link.request(str(number), meta)
        with pytest.raises(RequestRefusedError, match="says in meta"):
            await link.request("nonsense", {})
        await (await link.request("after all", wanted("toy", TOKENS))).complete


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("tokens", [128, 255, 256, 257, 512, 599])
async def test_a_part_of_the_prompt_is_the_cache_cropped(
    name: str, tokens: int, tmp_path: Path, make_cache: Any
) -> None:
    """The same values as those of the whole cache, after the anchors and after all streams."""
    cache = make_cache(tokens=600, layers=3, raw_tail=70)
    async with serving(tmp_path) as (_, url):
        await send(url, cache, **CODECS[name])
        whole = await fetch(url, TOKENS[:600])
        prompt = np.concatenate([TOKENS[:tokens], TOKENS[tokens:] + 1])
        part = await fetch(url, prompt)
        layout = part.offer.layout
        assert layout.tokens == tokens
        assert part.offer.meta["store"]["tokens"] == 600
        for layer in range(3):
            for kind in ("key", "value"):
                assert (part.target.view(layer, kind) == whole.target.view(layer, kind)[:tokens]).all()


async def test_pages_that_are_kept_whole_end_the_prefix(tmp_path: Path, make_cache: Any) -> None:
    cache = make_cache(tokens=600, dtype="float16")
    async with serving(tmp_path) as (_, url):
        await send(url, cache, **EXACT)
        part = await fetch(url, TOKENS[:599])
        assert part.offer.layout.tokens == 512
        assert (part.target.view(1, "key") == cache.arrays[1, "key"][:512]).all()
        async with lynx_net.connect(url) as link:
            for options, tokens in (({}, 255), ({"least_tokens": 513}, 599)):
                with pytest.raises(RequestRefusedError, match="not stored"):
                    await link.request("r", wanted("toy", TOKENS[:tokens], **options))


async def test_a_longer_prompt_gets_all_that_is_stored(tmp_path: Path, make_cache: Any, same: Any) -> None:
    cache = make_cache(tokens=301)
    async with serving(tmp_path) as (_, url):
        await send(url, cache)
        transfer = await fetch(url, TOKENS)
        assert transfer.offer.layout.tokens == 301
        assert same(transfer.target, cache.decoded("lynx"))


async def test_a_prompt_too_long_to_be_sent_whole(tmp_path: Path) -> None:
    """Its chain finds whole blocks, and the end where both end alike."""
    layout = lynx_net.CacheLayout(layers=1, tokens=40_001, heads=1, key_size=1, value_size=0, page_tokens=20_000)
    tokens = np.arange(40_100)
    async with serving(tmp_path) as (_, url), lynx_net.connect(url) as link:
        async with link.send("s", layout, codec="int8", fine=(), meta=stored_as("toy", tokens[:40_001])) as sending:
            await sending.write(0, np.ones((40_001, 1, 1), np.float32), None)
        for asked, found in ((40_001, 40_001), (40_100, 39_936)):
            transfer = await link.request("r", wanted("toy", tokens[:asked]))
            await transfer.complete
            assert transfer.offer.layout.tokens == found


async def test_other_meta_comes_along_and_a_first_token_does_not(tmp_path: Path, make_cache: Any) -> None:
    cache = make_cache(tokens=200)
    async with serving(tmp_path) as (_, url), lynx_net.connect(url) as link:
        await cache.send_on(link, meta={"note": [1, 2], **stored_as("toy", TOKENS[:200])}, first_token=7)
        transfer = await link.request("r", wanted("toy", TOKENS[:200]))
        await transfer.complete
        assert transfer.offer.meta["note"] == [1, 2]
        assert transfer.offer.first_token is None


async def test_packed_caches_go_in_and_come_out(tmp_path: Path, make_cache: Any) -> None:
    from lynx_codec import get_codec

    cache = make_cache(tokens=300)
    packed = PackedCache.encode(get_codec("lynx"), cache.arrays, raw_head=4, fine=cache.fine)
    async with serving(tmp_path) as (store, url), lynx_net.connect(url) as link:
        await link.send_packed("s", packed, meta=stored_as("toy", TOKENS[:300]))
        await asyncio.to_thread(store.put, "toy", TOKENS[1:301], packed)
        for start in (0, 1):
            transfer = await link.request("r", wanted("toy", TOKENS[start : start + 300]))
            await transfer.complete
            for place, array in packed.decode().items():
                assert (transfer.target.view(*place) == array).all()


async def test_the_same_cache_is_declined(tmp_path: Path, make_cache: Any) -> None:
    async with serving(tmp_path) as (store, url):
        await send(url, make_cache(tokens=200))
        with pytest.raises(TransferAbortedError) as failure:
            await send(url, make_cache(tokens=200))
        assert is_already_stored(failure.value)
        assert len(store.entries()) == 1


@pytest.mark.parametrize(
    ("meta", "complaint"),
    [
        ({}, "this is a context store"),
        (stored_as("toy", TOKENS[:7]), "cannot be stored under 7 tokens"),
        ({"store": {"model": "toy"}}, "tokens for a store"),
    ],
)
async def test_a_transfer_that_does_not_say_what_it_is_is_declined(
    meta: dict[str, Any], complaint: str, tmp_path: Path, make_cache: Any
) -> None:
    async with serving(tmp_path) as (store, url), lynx_net.connect(url) as link:
        with pytest.raises(TransferAbortedError, match=complaint):
            await make_cache(tokens=200).send_on(link, meta=meta)
        await make_cache(tokens=200).send_on(link, meta=stored_as("toy", TOKENS[:200]))
        assert len(store.entries()) == 1


async def test_a_store_without_room_declines(tmp_path: Path, make_cache: Any) -> None:
    async with serving(tmp_path, max_bytes=10_000) as (store, url):
        with pytest.raises(TransferAbortedError, match="no room"):
            await send(url, make_cache(tokens=2000))
        assert store.entries() == []


# ---- order and memory


async def test_anchors_come_first_and_little_waits_in_memory(tmp_path: Path, make_cache: Any) -> None:
    cache = make_cache(tokens=2000, layers=4, page_tokens=64)
    options = StoreOptions(read_ahead_bytes=30_000)
    async with serving(tmp_path, options=options, rate="20Mbit") as (store, url):
        await send(url, cache)
        (entry,) = store.entries()
        reads: list[tuple[int, int]] = []
        queued: list[int] = []
        links: list[Link] = []

        original = HeldEntry.read

        def watched(self: HeldEntry, page: int, stream: int) -> bytes:
            reads.append((stream, page))
            queued.extend(one.core.outgoing.all_queued_bytes(transfer) for one in links for transfer in (2, 4))
            return original(self, page, stream)

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(HeldEntry, "read", watched)
            monkeypatch.setattr("lynx_net.store.server.send_pages", _noting_links(links))
            await fetch(url, TOKENS)
        assert [stream for stream, _ in reads] == sorted(stream for stream, _ in reads)
        assert [page for stream, page in reads if stream == 0] == list(range(cache.layout.page_count))
        assert 0 < max(queued) <= 1.5 * options.read_ahead_bytes < entry.size_bytes / 4


def _noting_links(links: list[Link]) -> Any:
    from lynx_net.serdes.packed import send_pages

    async def noting(link: Link, *args: Any, **options: Any) -> Any:
        links.append(link)
        return await send_pages(link, *args, **options)

    return noting


async def test_the_event_loop_never_waits_for_the_disk(tmp_path: Path, make_cache: Any) -> None:
    """Storing, finding, reading, evicting, putting aside: no call of the storage comes from the loop's thread."""
    callers: dict[str, set[int]] = {}

    def noted(owner: object, name: str) -> None:
        call = getattr(owner, name)

        def noting(*arguments: Any) -> Any:
            callers.setdefault(name, set()).add(threading.get_ident())
            found = call(*arguments)
            for inner in ("read", "write", "publish", "discard", "close"):
                if name in ("read", "create") and hasattr(found, inner) and owner is storage:
                    noted(found, inner)
            return found

        setattr(owner, name, noting)

    storage = LocalStorage(tmp_path)
    for name in ("create", "read", "touch", "remove", "quarantine"):
        noted(storage, name)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("lynx_net.store.store.TOUCH_EVERY_S", 0.0)
        async with serving(tmp_path, storage=storage, max_bytes=220_000) as (store, url):
            await send(url, make_cache(tokens=600))
            await fetch(url, TOKENS[:300])
            async with half_written(url, make_cache(tokens=200), 1) as (_, sending):
                await until(lambda: any(entry.writing and entry.size_bytes for entry in store.entries()))
                sending.cancel()
                await until(lambda: len(store.entries()) == 1)
            await send(url, make_cache(tokens=1100))
            (entry,) = store.entries()
            file = tmp_path / "entries" / f"{entry.key}.lynx"
            file.write_bytes(file.read_bytes()[:-1])
            async with lynx_net.connect(url) as link:
                with pytest.raises(RequestRefusedError):
                    await link.request("r", wanted("toy", TOKENS))
    everything = {"create", "read", "touch", "remove", "quarantine", "write", "publish", "discard", "close"}
    assert callers.keys() == everything
    assert threading.get_ident() not in set().union(*callers.values())


# ---- while it is being written


@contextlib.asynccontextmanager
async def half_written(url: str, cache: Any, layers: int) -> AsyncIterator[tuple[lynx_net.KVLink, Any]]:
    """A cache of which so many layers have been sent."""
    async with lynx_net.connect(url) as link:
        meta = stored_as("toy", TOKENS[: cache.layout.tokens])
        sending = link.send("s", cache.layout, codec="lynx", fine=cache.fine, meta=meta)
        for layer in range(layers):
            await sending.write(layer, cache.arrays[layer, "key"], cache.arrays[layer, "value"])
        yield link, sending


async def test_readers_follow_the_writer(tmp_path: Path, make_cache: Any, same: Any) -> None:
    cache = make_cache(tokens=600, layers=6)
    async with serving(tmp_path) as (store, url), half_written(url, cache, 3) as (_, sending):
        async with lynx_net.connect(url) as link, lynx_net.connect(url) as other:
            transfers = [await one.request("r", wanted("toy", TOKENS)) for one in (link, other, link)]
            part = await link.request("p", wanted("toy", TOKENS[:300]))
            for transfer in transfers:
                assert transfer.offer.meta["store"]["writing"]
                await transfer.layer_ready(2)
                assert not transfer.layer_ready(3).done()
            await part.layer_ready(2)
            for layer in range(3, 6):
                await sending.write(layer, cache.arrays[layer, "key"], cache.arrays[layer, "value"])
            await sending.delivered
            for transfer in transfers:
                await transfer.complete
                assert same(transfer.target, cache.decoded("lynx"))
            await part.complete
            assert part.offer.layout.tokens in (256, 300)
            assert (part.target.view(5, "key") == transfers[0].target.view(5, "key")[: part.offer.layout.tokens]).all()
        (entry,) = store.entries()
        assert not entry.writing
        assert store.verify(entry.key) is None


@pytest.mark.parametrize("end", ["cancel", "close"])
async def test_readers_of_a_writer_that_ends_early_fail_at_once(end: str, tmp_path: Path, make_cache: Any) -> None:
    cache = make_cache(tokens=600, layers=6)
    async with serving(tmp_path) as (store, url), lynx_net.connect(url) as link:
        async with half_written(url, cache, 3) as (writing, sending):
            transfer = await link.request("r", wanted("toy", TOKENS))
            await transfer.layer_ready(2)
            if end == "cancel":
                sending.cancel()
            else:
                await writing.close()
            with pytest.raises(TransferAbortedError, match="its transfer has failed"):
                await transfer.complete
        with pytest.raises(RequestRefusedError, match="not stored"):
            await link.request("r2", wanted("toy", TOKENS))
        assert store.entries() == []
        assert list((tmp_path / "incoming").iterdir()) == []
        await send(url, cache)
        await fetch(url, TOKENS)


async def test_closing_the_server_ends_everything(tmp_path: Path, make_cache: Any) -> None:
    cache = make_cache(tokens=600, layers=6)
    with ContextStore(LocalStorage(tmp_path)).open() as store, contextlib.ExitStack() as stack:
        async with serve_store("tcp://127.0.0.1:0", store) as server:
            writing = lynx_net.connect(server.url)
            reading = lynx_net.connect(server.url)
            link, other = await writing.__aenter__(), await reading.__aenter__()
            sending = link.send("s", cache.layout, codec="lynx", fine=cache.fine, meta=stored_as("toy", TOKENS[:600]))
            await sending.write(0, cache.arrays[0, "key"], cache.arrays[0, "value"])
            await until(lambda: any(entry.size_bytes for entry in store.entries()))
            transfer = await other.request("r", wanted("toy", TOKENS))
        for waiting in (transfer.complete, sending.delivered):
            with pytest.raises(LynxError):
                await waiting
        assert store.entries() == []
        assert list((tmp_path / "incoming").iterdir()) == []
        for one in (writing, reading):
            await one.__aexit__(None, None, None)
        assert stack


# ---- damage, eviction, failing disks


async def test_damage_is_noticed_before_a_byte_of_it_leaves(tmp_path: Path, make_cache: Any, same: Any) -> None:
    cache = make_cache(tokens=600)
    async with serving(tmp_path) as (store, url):
        await send(url, cache)
        file = file_of(tmp_path)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0x10
        file.write_bytes(data)
        async with lynx_net.connect(url) as link:
            transfer = await link.request("r", wanted("toy", TOKENS))
            with pytest.raises(TransferAbortedError, match=r"the checksum of stream \d of page \d+ does not match"):
                await transfer.complete
            with pytest.raises(RequestRefusedError, match="not stored"):
                await link.request("r2", wanted("toy", TOKENS))
        assert (tmp_path / "quarantine" / file.name).exists()
        await send(url, cache)
        assert same((await fetch(url, TOKENS)).target, cache.decoded("lynx"))
        assert store.verify(store.entries()[0].key) is None


async def test_a_damaged_entry_gives_way_to_the_next_best(tmp_path: Path, make_cache: Any) -> None:
    async with serving(tmp_path) as (store, url):
        await send(url, make_cache(tokens=300))
        await send(url, make_cache(tokens=600))
        long = next(entry.key for entry in store.entries() if entry.head.path.count == 600)
        file = tmp_path / "entries" / f"{long}.lynx"
        file.write_bytes(file.read_bytes()[:-3])
        assert (await fetch(url, TOKENS)).offer.layout.tokens == 300
        assert len(store.entries()) == 1


async def test_what_is_being_sent_is_not_evicted(tmp_path: Path, make_cache: Any, same: Any) -> None:
    cache = make_cache(tokens=600)
    async with serving(tmp_path, rate="4Mbit") as (store, url):
        await send(url, cache)
        async with lynx_net.connect(url) as link:
            transfer = await link.request("r", wanted("toy", TOKENS))
            assert await asyncio.to_thread(store.evict, max_bytes=1) == []
            await transfer.complete
            assert same(transfer.target, cache.decoded("lynx"))
            cancelled = await link.request("r2", wanted("toy", TOKENS))
            cancelled.cancel()
            await until(lambda: not store.entries()[0].readers)
            assert len(await asyncio.to_thread(store.evict, max_bytes=1)) == 1


async def test_a_disk_that_fails_while_writing_fails_that_transfer(tmp_path: Path, make_cache: Any) -> None:
    from lynx_net.errors import StoreError

    class Full(LocalStorage):
        full = True

        def create(self) -> Any:
            file = super().create()
            write = file.write

            def limited(data: Any) -> None:
                if self.full and file.size_bytes > 20_000:
                    raise StoreError("cannot write: No space left on device")
                write(data)

            file.write = limited  # type: ignore[method-assign]
            return file

    storage = Full(tmp_path)
    async with serving(tmp_path, storage=storage) as (store, url):
        with pytest.raises(TransferAbortedError, match="No space left"):
            await send(url, make_cache(tokens=2000, layers=6))
        await until(lambda: not store.entries())
        storage.full = False
        await send(url, make_cache(tokens=2000, layers=6))
        await fetch(url, TOKENS)


async def test_many_readers_and_writers_on_many_links(tmp_path: Path, make_cache: Any, same: Any) -> None:
    caches = {tokens: make_cache(tokens=tokens, seed=tokens) for tokens in (200, 330, 470)}
    expected = {tokens: cache.decoded("lynx") for tokens, cache in caches.items()}
    async with serving(tmp_path, options=StoreOptions(max_transfers=5)) as (store, url):

        async def write(tokens: int) -> None:
            async with lynx_net.connect(url, lanes=2) as link:
                await caches[tokens].send_on(link, meta=stored_as("toy", TOKENS[tokens : 2 * tokens]))

        async def read(tokens: int, number: int) -> None:
            async with lynx_net.connect(url) as link:
                while True:
                    try:
                        transfer = await link.request(f"r{number}", wanted("toy", TOKENS[tokens:]))
                        break
                    except RequestRefusedError:
                        await asyncio.sleep(0.01)
                if number % 4 == 3:
                    transfer.cancel()
                    return
                await transfer.complete
                assert same(transfer.target, expected[tokens])

        async with asyncio.TaskGroup() as group:
            for number in range(24):
                group.create_task(read(list(caches)[number % 3], number))
            for tokens in caches:
                group.create_task(write(tokens))
        await until(lambda: not any(entry.readers for entry in store.entries()))
        assert len(store.entries()) == 3
