"""What the tests of TLS and of shared keys have in common: checks from outside, and peers that do as they like."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

import lynx_net
from lynx_net import LinkConfig
from lynx_net.errors import LynxError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

Speak: TypeAlias = "Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]"

QUICK = LinkConfig(deadline_s=1.0)


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.partition("://")[2].rpartition(":")
    return host, int(port)


async def move(url: str, server: Any, cache: Any, same: Any, **connect: Any) -> None:
    """A whole transfer, and that it arrived bit for bit."""
    async with lynx_net.connect(url, **connect) as link:
        sending = asyncio.create_task(cache.send_on(link))
        async for transfer in server:
            await transfer.complete
            break
        await sending
    assert same(transfer.target, cache.decoded("lynx"))


async def refused(url: str, **connect: Any) -> LynxError:
    """The error that opening a link ends with."""
    with pytest.raises(LynxError) as caught:
        async with lynx_net.connect(url, **({"config": QUICK} | connect)):
            pass
    return caught.value


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait until the server has said so."""
    async with asyncio.timeout(4):
        while text not in caplog.text:  # noqa: ASYNC110 (a log has no event)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def raw(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that says what the test likes."""
    reader, writer = await asyncio.open_connection(*address_of(url))
    try:
        yield reader, writer
    finally:
        await _close(writer)


@contextlib.asynccontextmanager
async def impostor(speak: Speak) -> AsyncIterator[str]:
    """A server that says what the test likes, and then listens until the peer goes; its tcp:// address."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await speak(reader, writer)
                await reader.read()
        finally:
            await _close(writer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        if tasks:
            await asyncio.wait(tasks, timeout=4)
    for task in tasks:
        assert task.done(), "the peer is gone and its connection still there"
        task.result()


class Tap:
    """A relay that remembers what passed to the server, and can end connections as a clean close does."""

    def __init__(self) -> None:
        self.url = ""
        self.passed = bytearray()
        self._writers: list[asyncio.StreamWriter] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, url: str) -> AsyncIterator[Tap]:
        tap = cls()

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with raw(url) as (far_reader, far_writer):
                tap._writers += [writer, far_writer]
                forth, back = tap._relay(reader, far_writer, tap.passed), tap._relay(far_reader, writer, bytearray())
                await asyncio.gather(forth, back)

        async with impostor(speak) as here:
            tap.url = url.partition("://")[0] + here.removeprefix("tcp")
            yield tap

    def end(self) -> None:
        for writer in self._writers:
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                seen += data
                writer.write(data)
                await writer.drain()
        writer.close()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
