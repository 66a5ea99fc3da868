"""The link to the context store: kept up in the background, so that nobody waits for a store that is down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import lynx_net
from lynx_net.errors import LynxError
from lynx_net.integrations.http.config import read_key, tls_of
from lynx_net.integrations.http.tasks import stop_task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from lynx_net.integrations.http.config import StoreConfig

__all__ = ["StoreLink"]

logger = logging.getLogger("lynx_net.http")

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
"""Before the store is tried again; the pause doubles from try to try."""


class StoreLink:
    """Use `StoreLink.open`. For one event loop."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        rate: str | None = None,
        allocate: Callable[[lynx_net.Offer], lynx_net.KVTarget] | None = None,
        observer: lynx_net.Observer,
    ) -> None:
        assert config.url is not None
        self._url = config.url
        self._rate = rate
        self._config = lynx_net.LinkConfig(deadline_s=config.deadline_s)
        self._allocate = allocate
        self._tls = tls_of(config)
        self._key = read_key(config.key_file)
        self._observers = [observer]
        self._link: lynx_net.KVLink | None = None
        self._tried = asyncio.Event()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[StoreLink]:
        """Keep the link up while the block runs, which begins after the first try."""
        keeping = asyncio.create_task(self._keep())
        try:
            await self._tried.wait()
            yield self
        finally:
            await stop_task(keeping)

    @property
    def link(self) -> lynx_net.KVLink | None:
        """The link, if it is up."""
        return None if self._link is None or self._link.error is not None else self._link

    async def _keep(self) -> None:
        pause_s, said = FIRST_PAUSE_S, ""
        while True:
            was_up, why = await self._up()
            if was_up:
                pause_s, said = FIRST_PAUSE_S, ""
            if why != said:  # one line for each reason, not for each try
                logger.warning("the store at %s is away: %s", self._url, why)
                said = why
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _up(self) -> tuple[bool, str]:
        """One try: whether there was a link, and why there is none any more. Holds nothing of a link that has ended."""
        was_up = False
        try:
            async with lynx_net.connect(
                self._url,
                rate=self._rate,
                config=self._config,
                allocate=self._allocate,
                tls=self._tls,
                key=self._key,
                observers=self._observers,
            ) as link:
                self._link, was_up = link, True
                self._tried.set()
                logger.info("the store at %s is there", self._url)
                await link.closed()
                return was_up, str(link.error)
        except LynxError as error:
            return was_up, str(error)
        finally:
            self._link = None
            self._tried.set()
