"""The doctor's other end: takes bytes and forgets them, and tells of its host.

An ordinary server cannot be measured against: it declines transfers that its codecs do not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lynx_net.aio.endpoint import Endpoint
from lynx_net.aio.link import Link
from lynx_net.aio.transfer import IncomingTransfer
from lynx_net.doctor.facts import DoctorError
from lynx_net.doctor.kernel import host_facts
from lynx_net.doctor.raw import RawSink
from lynx_net.errors import LynxError
from lynx_net.transport import Address, SocketOptions
from lynx_net.wire.config import LinkConfig
from lynx_net.wire.layout import CacheLayout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence

    from lynx_net.aio.transfer import Offer, OutgoingTransfer
    from lynx_net.doctor.facts import HostFacts

__all__ = ["CODEC", "FACTS_ID", "doctor_endpoint", "open_bytes", "serving"]

CODEC = "doctor"
FACTS_ID = "facts"
MAX_PAGE_BYTES = 1 << 24
MEMORY_BYTES = 1 << 40
"""Pages are forgotten as they arrive, so that what is held stays within the credit window whatever is offered."""


class _Forgotten(IncomingTransfer):
    """Takes pages of the size that its offer names, and is done with each as it arrives."""

    def __init__(self, link: Link, transfer: int, offer: Offer) -> None:
        super().__init__(link, transfer, offer)
        size = offer.meta.get("page_bytes")
        if offer.codec != CODEC or offer.streams != 1:
            raise DoctorError("this is a lynx-net doctor, it takes no caches")
        if type(size) is not int or not 1 <= size <= MAX_PAGE_BYTES:
            raise DoctorError(f"page_bytes must be 1 to {MAX_PAGE_BYTES}")
        self._page_bytes = size

    def sizes(self, page: int) -> Sequence[frozenset[int]]:
        return [frozenset({self._page_bytes})]

    @property
    def need_bytes(self) -> int:
        return self.offer.layout.page_count * self._page_bytes

    def page_arrived(self, page: int, stream: int) -> None:
        self.link.decoded(self, [page], stream)


def doctor_endpoint() -> Endpoint[Link]:
    """Both sides' endpoint: links that carry bytes without a codec, with the defaults of an ordinary one."""
    return Endpoint(lambda parts: Link(parts, _Forgotten), config=LinkConfig(memory_bytes=MEMORY_BYTES), rate=None)


def open_bytes(link: Link, pages: int, page_bytes: int, request_id: str = "bytes", **meta: Any) -> OutgoingTransfer:
    """Offer `pages` pages of `page_bytes`."""
    layout = CacheLayout(layers=1, tokens=pages, heads=1, key_size=1, value_size=0, page_tokens=1)
    return link.open_transfer(
        request_id, layout, codec=CODEC, codec_params={}, streams=1, meta={**meta, "page_bytes": page_bytes}
    )


@contextlib.asynccontextmanager
async def serving(url: str) -> AsyncIterator[str]:
    """Serve doctors on an address for the time of a block; yields the address that is bound.

    A second port, for the raw copy, is opened beside it: the next one, or any if that is taken. Nobody is asked who
    they are; serve where only friends can connect, and end it after the measurement.

    Raises:
        ConnectionFailedError: the address cannot be bound.
    """
    host = await asyncio.to_thread(host_facts)
    endpoint = doctor_endpoint()
    server = await endpoint.serve(url)
    try:
        address = Address.parse(server.url)
        with _open_sink(address) as sink:

            async def answer(link: Link) -> None:
                async for request in link.requests():
                    if request.id.partition(" ")[0] == FACTS_ID:
                        await _tell(link, request.id, host, sink.port)
                    else:
                        request.refuse("a doctor answers for facts only")

            async def accept() -> None:
                async with asyncio.TaskGroup() as group:
                    while True:
                        link = await server.accept()
                        group.create_task(_until_it_ends(answer(link)))

            accepting = asyncio.create_task(accept())
            try:
                yield server.url
            finally:
                accepting.cancel()
                await asyncio.wait([accepting])
    finally:
        await server.close()


def _open_sink(address: Address) -> RawSink:
    try:
        return RawSink(address.host, (address.port or 0) + 1)
    except (OSError, OverflowError):  # taken, or there is no next one
        return RawSink(address.host)


async def _until_it_ends(work: Coroutine[Any, Any, None]) -> None:
    """A link that fails is the business of the doctor at its other end."""
    with contextlib.suppress(LynxError):
        await work


async def _tell(link: Link, request_id: str, host: HostFacts, raw_port: int) -> None:
    sock = link.lanes[0].plain_socket
    config = link.core.config
    meta = {
        "host": asdict(host),
        "cpu_s": time.process_time(),
        "raw_port": raw_port,
        "receive_buffer": _receive_buffer_bytes(sock),
        "asked_receive_buffer": SocketOptions().receive_buffer_bytes,
        "anchor_window": config.anchor_window_bytes,
        "residual_window": config.residual_window_bytes,
    }
    transfer = open_bytes(link, 1, 1, request_id, **meta)
    transfer.submit(0, 0, memoryview(b"\0"))
    await transfer.delivered


def _receive_buffer_bytes(sock: socket.socket | None) -> int:
    return 0 if sock is None else sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


async def _serve_until_stdin_ends(url: str) -> None:
    async with serving(url) as bound:
        print(bound, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    # The self-test's child: it ends when its parent does, however that ends.
    asyncio.run(_serve_until_stdin_ends(sys.argv[1]))
