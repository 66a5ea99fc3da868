"""The HTTP client of the decode server."""

from __future__ import annotations

import contextlib
import ssl
from typing import TYPE_CHECKING

import aiohttp

from lynx_net.integrations.http.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

__all__ = ["client_session"]

CONNECT_S = 5.0


@contextlib.asynccontextmanager
async def client_session(ca_file: str | None, keys: Sequence[str]) -> AsyncIterator[aiohttp.ClientSession]:
    """A session for requests that stay open as long as it takes, as many as there are.

    Args:
        ca_file: the authority of https:// servers; None believes those that the system knows.
        keys: the first is sent as a bearer token.

    Raises:
        ConfigError: the file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"prefill.ca_file: {ca_file} cannot be used: {error}") from error
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    connector = aiohttp.TCPConnector(limit=0, ssl=context)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield session
