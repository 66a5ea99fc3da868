"""Links that carry bytes without a codec, for measuring the transport alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import uvloop

from lynx_net import CacheLayout, LinkConfig
from lynx_net.aio.endpoint import Endpoint
from lynx_net.aio.link import Link
from lynx_net.aio.transfer import IncomingTransfer, Offer

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from lynx_net import SocketOptions
    from lynx_net.aio.transfer import OutgoingTransfer

__all__ = ["PACKAGES", "Swallow", "endpoint", "open_bytes", "run"]

ROOMY = 1 << 40
PACKAGES = ("uvloop", "xxhash")
"""Whose versions the transport's figures depend on."""


class Swallow(IncomingTransfer):
    """Takes pages whose stream sizes stand in the offer, and is done with each as it arrives."""

    def __init__(self, link: Link, transfer: int, offer: Offer) -> None:
        super().__init__(link, transfer, offer)
        self._sizes = [frozenset({size}) for size in offer.meta["page_bytes"]]

    def sizes(self, page: int) -> Sequence[frozenset[int]]:
        return self._sizes

    @property
    def need_bytes(self) -> int:
        return int(self.offer.layout.page_count * sum(self.offer.meta["page_bytes"]))

    def page_arrived(self, page: int, stream: int) -> None:
        self.pages_arrived([page], stream)

    def pages_arrived(self, pages: Sequence[int], stream: int) -> None:
        self.link.decoded(self, pages, stream)


def endpoint(
    rate: str | float | None = None,
    *,
    incoming: type[IncomingTransfer] = Swallow,
    sockets: SocketOptions | None = None,
    **config: Any,
) -> Endpoint[Link]:
    """An endpoint without codecs; `incoming` takes what arrives, `config` are fields of LinkConfig."""
    settings: dict[str, Any] = {"memory_bytes": ROOMY} | config
    return Endpoint(
        lambda parts: Link(parts, incoming, accept_in_threads=True),
        config=LinkConfig(**settings),
        rate=rate,
        sockets=sockets,
    )


def open_bytes(link: Link, pages: int, page_bytes: Sequence[int], request_id: str = "bytes") -> OutgoingTransfer:
    """Offer `pages` pages whose streams have these sizes."""
    layout = CacheLayout(layers=1, tokens=pages, heads=1, key_size=1, value_size=0, page_tokens=1)
    return link.open_transfer(
        request_id,
        layout,
        codec="none",
        codec_params={},
        streams=len(page_bytes),
        meta={"page_bytes": list(page_bytes)},
    )


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run on uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
