"""What a context store has left after kill -9: used by `perf.store --kills` and by the tests.

A process writes entries, directly or as a server to which they are sent, and is killed with SIGKILL at a random point
of a write. Then every entry that was said to be stored must be there, and every page stream in the folder must be the
one that was written.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

import lynx_net
from lynx_codec import PackedCache, get_codec
from lynx_net.errors import LynxError, RequestRefusedError
from lynx_net.store import ContextStore, LocalStorage, serve_store, stored_as, wanted

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path

__all__ = ["Outcome", "kill_servers", "kill_writers"]

MODEL = "kills"
CONTENTS = 4
"""Different caches; the tokens of every entry are its own."""

TOKENS, LAYERS, HEADS, SIZE = 512, 4, 2, 64
"""About half a MB an entry: its write takes long enough to be hit."""

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["lynx_net.store", "perf.store_kills"])


@dataclass
class Outcome:
    """What was found.

    Attributes:
        kills: processes that were killed.
        during_write: of them, while an entry was being written.
        stored: writes that were said to be done.
        beyond: entries that were found whole though nobody had been told yet.
        unfinished: files of unfinished writes that the next process removed.
        lost: entries that were said to be stored and were not there.
        wrong: entries with other bytes than were written.
        wrong_received: caches that readers took for whole and that were not.
        received: caches that readers took for whole.
        examined: numbers of the entries whose bytes were compared.
    """

    kills: int = 0
    during_write: int = 0
    stored: int = 0
    beyond: int = 0
    unfinished: int = 0
    received: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    wrong_received: list[str] = field(default_factory=list)
    examined: set[int] = field(default_factory=set)


def tokens_of(number: int) -> np.ndarray:
    """The tokens of an entry: different from the first one on."""
    tokens: np.ndarray = np.arange(TOKENS, dtype=np.uint32) + number
    return tokens


@lru_cache
def cache_of(content: int) -> PackedCache:
    """One of the caches."""
    rng = np.random.default_rng(content)
    codec = get_codec("nested", implementation="reference")
    arrays = {
        (layer, kind): rng.standard_normal((TOKENS, HEADS, SIZE), np.float32)
        for layer in range(LAYERS)
        for kind in ("key", "value")
    }
    return PackedCache.encode(codec, arrays)


# ---- processes that are killed


def _write(folder: Path, first: int, pipe: Connection) -> None:
    store = ContextStore(LocalStorage(folder)).open()
    number = first
    while True:
        cache_of(number % CONTENTS)
        pipe.send(("begins", number))
        store.put(MODEL, tokens_of(number), cache_of(number % CONTENTS))
        pipe.send(("has stored", number))
        number += 1


def _serve(folder: Path, pipe: Connection) -> None:
    async def serve() -> None:
        with ContextStore(LocalStorage(folder)).open() as store:
            async with serve_store("tcp://127.0.0.1:0", store) as server:
                pipe.send(server.url)
                await asyncio.Event().wait()

    asyncio.run(serve())


def _start(target: Any, *arguments: Any) -> tuple[BaseProcess, Any]:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _kill(process: BaseProcess) -> None:
    process.kill()
    process.join()
    process.close()


# ---- the one that kills


def kill_writers(folder: Path, kills: int, seed: int = 0) -> Outcome:
    """Processes that write one entry after the other, each killed soon, until so many were killed in a write."""
    rng = random.Random(seed)
    outcome, stored = Outcome(), set[int]()
    write_s = 0.05
    while outcome.during_write < kills:
        kill = outcome.kills
        process, pipe = _start(_write, folder, 1000 * kill + kill % CONTENTS)
        with closing(pipe):
            number = pipe.recv()[1]
            began_s = time.monotonic()
            if kill % 5 == 0:  # how long one takes here
                pipe.recv()
                write_s = time.monotonic() - began_s
                stored.add(number)
            time.sleep(rng.uniform(0, write_s))
            _kill(process)
            writing = False
            try:
                while True:
                    what, number = pipe.recv()
                    writing = what == "begins"
                    if not writing:
                        stored.add(number)
            except EOFError:
                pass
            outcome.kills += 1
            outcome.during_write += writing or number not in stored
        _examine(folder, stored, outcome)
    _examine(folder, stored, outcome, all_bytes=True)
    return outcome


async def kill_servers(folder: Path, kills: int, seed: int = 0) -> Outcome:
    """Servers to which a cache is sent and from which it is read meanwhile, until so many were killed in a write."""
    rng = random.Random(seed)
    outcome, stored = Outcome(), set[int]()
    write_s = 0.05
    number = 0
    while outcome.during_write < kills:
        kill = outcome.kills
        process, pipe = await asyncio.to_thread(_start, _serve, folder)
        with closing(pipe):
            url = await asyncio.to_thread(pipe.recv)
            number += 1
            if kill % 5 == 0:
                began_s = time.monotonic()
                await _send(url, number)
                write_s = time.monotonic() - began_s
                stored.add(number)
                number += 1
            sending = asyncio.create_task(_send(url, number))
            reading = asyncio.create_task(_read(url, number, outcome))
            await asyncio.sleep(rng.uniform(0, write_s))
            await asyncio.to_thread(_kill, process)
            outcome.kills += 1
            if await sending:
                stored.add(number)
            else:
                outcome.during_write += 1
            await reading
        await asyncio.to_thread(_examine, folder, stored, outcome)
    await asyncio.to_thread(_examine, folder, stored, outcome, all_bytes=True)
    return outcome


async def _send(url: str, number: int) -> bool:
    """Whether it was said to be stored."""
    try:
        async with lynx_net.connect(url) as link:
            await link.send_packed("write", cache_of(number % CONTENTS), meta=stored_as(MODEL, tokens_of(number)))
    except LynxError:
        return False
    return True


async def _read(url: str, number: int, outcome: Outcome) -> None:
    """Ask until there is something, and take what comes."""
    try:
        async with lynx_net.connect(url) as link:
            while True:
                try:
                    transfer = await link.request("read", wanted(MODEL, tokens_of(number)))
                    break
                except RequestRefusedError:
                    await asyncio.sleep(0.002)
            await transfer.complete
    except LynxError:
        return
    outcome.received += 1
    expected = cache_of(number % CONTENTS)
    for place, array in expected.decode().items():
        if not np.array_equal(transfer.target.view(*place), array):
            outcome.wrong_received.append(f"{number}: {place}")


def _examine(folder: Path, stored: set[int], outcome: Outcome, *, all_bytes: bool = False) -> None:
    """What the next process finds; the bytes of entries that were examined before are read at the end once more."""
    outcome.unfinished += len(list((folder / "incoming").iterdir()))
    with ContextStore(LocalStorage(folder)).open() as store:
        outcome.wrong += [f"{key}: {reason}" for key, reason in store.damaged.items()]
        found = {int(np.frombuffer(entry.head.path.tail, "<u4")[0]): entry.key for entry in store.entries()}
        outcome.lost += [str(number) for number in sorted(stored - found.keys())]
        for number, key in found.items():
            if number not in outcome.examined or all_bytes:
                outcome.examined.add(number)
                if not _is_whole(store, key, cache_of(number % CONTENTS)):
                    outcome.wrong.append(f"{number}: other bytes")
    outcome.stored = len(stored)
    outcome.beyond = len(found.keys() - stored)


def _is_whole(store: ContextStore, key: str, cache: PackedCache) -> bool:
    held = store.hold_key(key)
    assert held is not None
    try:
        held.open()
        for page in held.head.layout.pages():
            own = cache.arrays[page.layer, page.kind][0].pages[page.start // held.head.layout.page_tokens]
            if any(held.read(page.index, stream) != data for stream, data in enumerate(own.streams)):
                return False
    except LynxError:
        return False
    finally:
        held.release()
    return True
