"""Links to the decode servers: opened when first wanted, shared by all requests, opened again when lost."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import lynx_net
from lynx_net.errors import ConnectionLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LinkPool"]


class LinkPool:
    """One link for each address. For one event loop.

    Args: those of `lynx_net.connect`.
    """

    def __init__(
        self,
        *,
        rate: str | None,
        lanes: int,
        config: lynx_net.LinkConfig,
        tls: lynx_net.TlsConfig | None,
        key: bytes | None,
        observers: Sequence[lynx_net.Observer] = (),
    ) -> None:
        self._rate = rate
        self._lanes = lanes
        self._config = config
        self._tls = tls
        self._key = key
        self._observers = observers
        self._entries: dict[str, _Entry] = {}
        self._closed = False

    async def link(self, url: str) -> lynx_net.KVLink:
        """The link to an address; it is up, or was a moment ago.

        Raises:
            LynxError: it cannot be opened.
        """
        if self._closed:
            raise ConnectionLostError("the server ends")
        entry = self._entries.setdefault(url, _Entry())
        async with entry.lock:
            await self._release_ended(besides=entry)
            if entry.link is None or entry.link.error is not None:
                await entry.stack.aclose()
                entry.link = None
                entry.link = await entry.stack.enter_async_context(
                    lynx_net.connect(
                        url,
                        rate=self._rate,
                        lanes=self._lanes,
                        config=self._config,
                        tls=self._tls,
                        key=self._key,
                        observers=self._observers,
                    )
                )
            return entry.link

    async def _release_ended(self, besides: _Entry) -> None:
        """A decode server that has gone may never come again; what its link had is not kept for it."""
        for entry in list(self._entries.values()):
            if entry is besides or entry.lock.locked() or entry.link is None or entry.link.error is None:
                continue
            async with entry.lock:
                entry.link = None
                await entry.stack.aclose()

    async def close(self) -> None:
        """Close all links."""
        self._closed = True
        for entry in self._entries.values():
            async with entry.lock:
                await entry.stack.aclose()
        self._entries.clear()


class _Entry:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.stack = contextlib.AsyncExitStack()
        self.link: lynx_net.KVLink | None = None
