"""The two processes of the demonstration, joined by one link, as seen from the decode process."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import lynx_net
from lynx_net.demo.child import PREFILL_MODULE, PrefillChild
from lynx_net.demo.options import DemoError
from lynx_net.demo.process import import_libraries
from lynx_net.errors import ConnectionLostError, PeerTimeoutError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from lynx_net.demo.exchange import Progress
    from lynx_net.demo.options import DemoOptions

__all__ = ["Pair", "Wanted"]

T = TypeVar("T")

CONNECT_DEADLINES = 12.0
"""Deadlines of silence the child has to start Python, import torch and connect, which takes a while from a cold disk or
on a busy host. A child that ends is noticed at once."""

_LAST_WORDS_S = 3.0
"""A child that ends loses its link a moment before its exit code and its last lines are known."""


class Wanted(Protocol):
    """What is asked of the prefill process, such as a `CacheRequest`."""

    @property
    def codec(self) -> str:
        """What the request is called after."""
        ...

    def to_meta(self) -> dict[str, Any]:
        """The request as metadata of a link request."""
        ...


class Pair:
    """A server on the loopback address, the prefill process as its client, and the link between them."""

    def __init__(
        self,
        server: lynx_net.KVServer,
        targets: dict[str, lynx_net.KVTarget],
        child: PrefillChild,
        connect_s: float,
    ) -> None:
        self._targets = targets
        self._child = child
        self._connect_s = connect_s
        self._connect_until_s = asyncio.get_running_loop().time() + connect_s
        self._link = asyncio.create_task(server.accept())
        self._requests = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        options: DemoOptions,
        progress: Callable[[Progress], None],
        module: str = PREFILL_MODULE,
        config: lynx_net.LinkConfig | None = None,
        device_buffers: lynx_net.DeviceBuffers | None = None,
    ) -> AsyncIterator[Pair]:
        """Start the server and the prefill process; leaving the block ends both, whatever happened inside.

        Args:
            progress: called with what the prefill process tells about its work.
            module: what the prefill process runs; perf.report has one of its own.
            config: of the link; by default, that of the library with the deadline of the options.
            device_buffers: of the server, if the cache is on a device; None for the library's own, prepared.
        """
        targets: dict[str, lynx_net.KVTarget] = {}
        config = config or lynx_net.LinkConfig(deadline_s=options.timeout_s)
        buffers = device_buffers or lynx_net.DeviceBuffers(prepare=(0,)) if options.device == "cuda" else None

        def allocate(offer: lynx_net.Offer) -> lynx_net.KVTarget:
            try:
                return targets.pop(offer.request_id)
            except KeyError:
                raise DemoError(f"a transfer that nobody asked for: {offer.request_id!r}") from None

        async with lynx_net.serve(
            "tcp://127.0.0.1:0", allocate=allocate, config=config, device_buffers=buffers
        ) as server:
            child = await PrefillChild.start(server.url, options, progress, module)
            pair = cls(server, targets, child, CONNECT_DEADLINES * options.timeout_s)
            at_once = True
            try:
                await asyncio.to_thread(import_libraries)  # while the child does the same
                yield pair
                at_once = False
            finally:
                pair._link.cancel()
                await child.stop(at_once=at_once)

    async def run(self, work: Coroutine[None, None, T]) -> T:
        """Run `work` as long as the prefill process lives.

        Raises:
            DemoError: the prefill process ended, fell silent, or never connected.
        """
        task = asyncio.create_task(work)
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await watch
                raise DemoError(self._child.obituary() or "the prefill process ended")
            return await task
        except PeerTimeoutError as error:
            raise DemoError(f"the prefill process does not answer: {error}") from error
        except ConnectionLostError as error:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._child.ended()
            raise DemoError(self._child.obituary() or f"the prefill process is lost: {error}") from error
        finally:
            for part in (task, watch):
                part.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def request(self, wanted: Wanted, target: lynx_net.KVTarget) -> lynx_net.IncomingTransfer:
        """Ask for a cache that shall be written into `target`; returns when it has been offered."""
        link = await self._connected()
        self._requests += 1
        request_id = f"{wanted.codec}-{self._requests}"
        self._targets[request_id] = target
        return await link.request(request_id, meta=wanted.to_meta())

    async def _connected(self) -> lynx_net.KVLink:
        """The link, once the child has connected."""
        try:
            async with asyncio.timeout_at(self._connect_until_s):
                return await asyncio.shield(self._link)
        except TimeoutError:
            raise DemoError(f"the prefill process did not connect within {self._connect_s:g} s") from None

    async def _watch(self) -> None:
        """Return when the child has ended; raise when its link has, and why."""
        ended = asyncio.create_task(self._child.ended())
        lost = asyncio.create_task(self._link_lost())
        try:
            await asyncio.wait((ended, lost), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await lost
        finally:
            for part in (ended, lost):
                part.cancel()

    async def _link_lost(self) -> None:
        link = await self._connected()
        await link.closed()
        if link.error is not None:
            raise link.error
