"""A store on the network: takes caches as they come, and answers requests with the longest prefix it has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lynx_net.aio.endpoint import Endpoint, Server
from lynx_net.aio.link import Link
from lynx_net.aio.offload import run_blocking
from lynx_net.errors import EntryDamagedError, LocalProtocolError, LynxError
from lynx_net.serdes.packed import READ_AHEAD_BYTES, send_pages
from lynx_net.store.incoming import StoredTransfer
from lynx_net.store.messages import FIELD, NOT_STORED, Wanted
from lynx_net.store.source import EntryPages
from lynx_net.wire.config import LinkConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from lynx_net.aio.link import LinkParts
    from lynx_net.aio.requests import IncomingRequest
    from lynx_net.aio.timeline import Observer
    from lynx_net.aio.transfer import Offer
    from lynx_net.store.held import HeldEntry
    from lynx_net.store.store import ContextStore
    from lynx_net.transport import SocketOptions, TlsConfig

__all__ = ["StoreOptions", "serve_store"]

logger = logging.getLogger("lynx_net")

THREADS = 4
"""That read, and as many that write: a disk has a queue, and a slow write must not hold up a read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How a store serves.

    Attributes:
        read_ahead_bytes: read from the disk and not sent yet, of one transfer.
        max_transfers: caches that are sent at once; more requests wait.
        evict_every_s: how often it is looked for entries that are too old.
    """

    read_ahead_bytes: int = READ_AHEAD_BYTES
    max_transfers: int = 64
    evict_every_s: float = 30.0

    def __post_init__(self) -> None:
        if min(self.read_ahead_bytes, self.max_transfers) < 1 or not self.evict_every_s > 0:
            raise LocalProtocolError("read_ahead_bytes, max_transfers and evict_every_s must be positive")


class _StoreServer:
    """What the links of a store share."""

    def __init__(self, store: ContextStore, options: StoreOptions) -> None:
        self.store = store
        self.options = options
        self.readers = ThreadPoolExecutor(THREADS, thread_name_prefix="lynx_net-store-read")
        self.writers = ThreadPoolExecutor(THREADS, thread_name_prefix="lynx_net-store-write")
        self._turns = asyncio.Semaphore(options.max_transfers)

    def make_link(self, parts: LinkParts) -> Link:
        return Link(parts, self._receive)

    def _receive(self, link: Link, transfer: int, offer: Offer) -> StoredTransfer:
        return StoredTransfer(link, transfer, offer, store=self.store, executor=self.writers)

    async def accept(self, server: Server[Link]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._evict())
            while True:
                group.create_task(self._answer_all(await server.accept()))

    async def _evict(self) -> None:
        while True:
            await asyncio.sleep(self.options.evict_every_s)
            await run_blocking(self.writers, self.store.evict)

    async def _answer_all(self, link: Link) -> None:
        async with asyncio.TaskGroup() as group:
            async for request in link.requests():
                group.create_task(self._answer(request))

    async def _answer(self, request: IncomingRequest) -> None:
        """What is wrong with one request or link is no business of the others."""
        try:
            async with self._turns:
                source = await self._find(request)
                if source is not None:
                    try:
                        await self._send(request, source)
                    finally:
                        await run_blocking(self.readers, source.close)
        except LynxError as error:
            logger.info("store: request %r of %s: %s", request.id, request.link.peer, error)
        except Exception:
            logger.exception("store: request %r of %s", request.id, request.link.peer)

    async def _find(self, request: IncomingRequest) -> EntryPages | None:
        """The best entry that is not damaged, open and held; None if the request was refused."""
        try:
            wanted = Wanted.from_meta(request.meta)
            while (held := self._hold(wanted)) is not None:
                source = EntryPages(held)
                try:
                    await run_blocking(self.readers, source.open)
                    if source.layout.tokens >= wanted.least_tokens:
                        return source
                    await run_blocking(self.readers, source.close)
                    break
                except EntryDamagedError:
                    await run_blocking(self.readers, source.close)  # it is gone now; there may be another one
                except BaseException:
                    await run_blocking(self.readers, source.close)
                    raise
            request.refuse(NOT_STORED)
        except LynxError as error:
            request.refuse(str(error))
        except Exception:
            request.refuse("the store failed; its log says why")  # the asking side must not wait for nothing
            raise
        return None

    def _hold(self, wanted: Wanted) -> HeldEntry | None:
        if wanted.path is None:
            return None if wanted.key is None else self.store.hold_key(wanted.key)
        return self.store.hold(wanted.path, wanted=wanted.fits, least_tokens=wanted.least_tokens)

    async def _send(self, request: IncomingRequest, source: EntryPages) -> None:
        held = source.held
        stored = {"key": held.key, "tokens": held.head.path.count, "writing": held.writer is not None}
        await send_pages(
            request.link,
            request.id,
            source,
            executor=self.readers,
            read_ahead_bytes=self.options.read_ahead_bytes,
            meta={**held.head.meta, FIELD: stored},
        )

    def close(self) -> None:
        """Wait for the threads."""
        self.readers.shutdown()
        self.writers.shutdown()


@contextlib.asynccontextmanager
async def serve_store(
    url: str,
    store: ContextStore,
    *,
    options: StoreOptions | None = None,
    rate: str | float | None = None,
    config: LinkConfig | None = None,
    sockets: SocketOptions | None = None,
    tls: TlsConfig | None = None,
    key: bytes | None = None,
    observers: Sequence[Observer] = (),
) -> AsyncIterator[Server[Link]]:
    """Serve an open store on an address: `async with serve_store("tcp://127.0.0.1:7100", store) as server`.

    Arguments but the first three are those of `lynx_net.serve`; `rate` paces each link by itself. Leaving the block
    ends all transfers; what was not stored whole is removed. The store stays open.

    Raises:
        ConnectionFailedError: the address cannot be bound.
        LocalProtocolError: an argument, key or certificate cannot be used.
    """
    shared = _StoreServer(store, options or StoreOptions())
    endpoint = Endpoint(
        shared.make_link,
        config=config or LinkConfig(),
        rate=rate,
        sockets=sockets,
        tls=tls,
        key=key,
        observers=observers,
    )
    try:
        server = await endpoint.serve(url)
        accepting = asyncio.create_task(shared.accept(server))
        try:
            yield server
        finally:
            accepting.cancel()
            await asyncio.wait([accepting])
            await server.close()
    finally:
        await asyncio.to_thread(shared.close)
