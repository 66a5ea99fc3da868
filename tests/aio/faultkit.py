"""What the fault tests share: endpoints without codecs, whose page streams have any size, and a wall between peers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from typing import TYPE_CHECKING, Any

from lynx_net import CacheLayout, LinkConfig
from lynx_net.aio.endpoint import Endpoint
from lynx_net.aio.link import Link
from lynx_net.aio.transfer import IncomingTransfer
from lynx_net.errors import LynxError
from lynx_net.transport import Address, Lane, SocketOptions, transport_for

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from lynx_net.aio.endpoint import Server
    from lynx_net.aio.transfer import OutgoingTransfer


class Keep(IncomingTransfer):
    """Keeps the bytes of every page stream; their sizes stand in the offer, page by page or for all alike."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.got: dict[tuple[int, int], bytes] = {}

    def sizes(self, page: int) -> Sequence[frozenset[int]]:
        per_page = self.offer.meta["sizes"]
        return [frozenset({size}) for size in per_page[page % len(per_page)]]

    @property
    def need_bytes(self) -> int:
        return sum(max(size) for page in range(self.offer.layout.page_count) for size in self.sizes(page))

    def page_arrived(self, page: int, stream: int) -> None:
        for streams in self.link.page_streams(self, [page], stream):
            self.got.update({(page, index): bytes(data) for index, data in enumerate(streams)})
        self.link.decoded(self, [page], stream)


class SlowKeep(Keep):
    """Takes its time over every page: a decoder that cannot follow."""

    PAGE_S = 0.2

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._loop = asyncio.get_running_loop()

    def page_arrived(self, page: int, stream: int) -> None:
        loop = self._loop
        loop.call_soon_threadsafe(
            lambda: loop.call_later(self.PAGE_S, super(SlowKeep, self).page_arrived, page, stream)
        )


def byte_endpoint(
    *, rate: str | float | None = None, incoming: type[IncomingTransfer] = Keep, **config: Any
) -> Endpoint[Link]:
    """An endpoint without codecs; `config` are fields of LinkConfig."""
    return Endpoint(lambda parts: Link(parts, incoming), config=LinkConfig(**config), rate=rate)


def pages_layout(pages: int) -> CacheLayout:
    """A layout of this many pages."""
    return CacheLayout(layers=1, tokens=pages, heads=1, key_size=1, value_size=0, page_tokens=1)


def offer_bytes(link: Link, request_id: str, pages: int, sizes: Sequence[Sequence[int]]) -> OutgoingTransfer:
    """Offer pages whose streams have these sizes, taken in turn."""
    return link.open_transfer(
        request_id,
        pages_layout(pages),
        codec="none",
        codec_params={},
        streams=len(sizes[0]),
        meta={"sizes": [list(one) for one in sizes]},
    )


def content(page: int, stream: int, size: int) -> bytes:
    """Bytes that tell where they belong."""
    return bytes((page * 31 + stream * 7 + index * 13) % 251 for index in range(min(size, 251))) * (size // 251 + 1)


async def send_bytes(link: Link, request_id: str, pages: int, sizes: Sequence[Sequence[int]]) -> OutgoingTransfer:
    """Offer, submit stream by stream, and wait until all is delivered."""
    transfer = offer_bytes(link, request_id, pages, sizes)
    for stream in range(len(sizes[0])):
        for page in range(pages):
            await transfer.wait_for_room()
            size = sizes[page % len(sizes)][stream]
            transfer.submit(page, stream, memoryview(content(page, stream, size)[:size]))
    await transfer.delivered
    return transfer


async def take_all(server: Server[Link], times: dict[str, float]) -> None:
    """Take every transfer that comes and note when it was complete."""
    loop = asyncio.get_running_loop()

    async def follow(transfer: IncomingTransfer) -> None:
        await transfer.complete
        times[transfer.offer.request_id] = loop.time()

    async with asyncio.TaskGroup() as group:
        async for transfer in server:
            group.create_task(follow(transfer))


async def until(condition: Callable[[], bool]) -> None:
    """Look a thousand times a second; what is waited for has no event of its own."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


class Wall:
    """In-process relay between two `memory://` names that can let nothing pass while every connection stays open."""

    def __init__(self, front: str, back: str) -> None:
        self._front, self._back = Address.parse(front), Address.parse(back)
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Wall:
        self._listener = await transport_for(self._front).listen(self._front, SocketOptions())
        self._start(self._accept())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def shut(self) -> None:
        """From now on nothing passes, in either direction."""
        self._open.clear()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            near = await self._listener.accept()
            far = await transport_for(self._back).connect(self._back, SocketOptions())
            self._start(self._copy(near, far))
            self._start(self._copy(far, near))

    async def _copy(self, source: Lane, target: Lane) -> None:
        buffer = memoryview(bytearray(64 * 1024))
        with contextlib.suppress(LynxError):
            while count := await source.receive_into([buffer]):
                await self._open.wait()
                await target.send([buffer[:count]])
        target.close()


async def descriptors_and_tasks() -> tuple[int, int]:
    """How many there are, once that stays the same for half a second: earlier tests may leave some to close."""
    counts: list[tuple[int, int]] = []
    async with asyncio.timeout(30):
        while len(counts) < 6 or len(set(counts[-6:])) > 1:
            gc.collect()
            counts.append((len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())))
            await asyncio.sleep(0.1)
    return counts[-1]
