"""Opening links: `Endpoint.connect` and `Endpoint.serve`, and what all links of a process share."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from lynx_net.aio.handshake import (
    MAX_LANES,
    answer_hello,
    exchange_hellos,
    make_hello,
    read_received,
    send_message,
)
from lynx_net.aio.inbox import Inbox
from lynx_net.aio.link import Link, LinkParts
from lynx_net.errors import (
    ConnectionLostError,
    HandshakeError,
    LocalProtocolError,
    LynxError,
    PeerTimeoutError,
)
from lynx_net.transport import Address, Lane, SocketOptions, transport_for
from lynx_net.wire.connection import LinkCore
from lynx_net.wire.grants import CreditBook, Grant
from lynx_net.wire.messages import Received
from lynx_net.wire.pacing import parse_rate
from lynx_net.wire.proof import check_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from lynx_net.aio.timeline import Observer
    from lynx_net.aio.transfer import IncomingTransfer
    from lynx_net.transport import Listener, TlsConfig
    from lynx_net.wire.config import LinkConfig
    from lynx_net.wire.messages import Hello

__all__ = ["Endpoint", "Server"]

logger = logging.getLogger("lynx_net")

MAX_HANDSHAKES = 1024
"""Connections that may be between accept and handshake; more are closed at once."""

LinkT = TypeVar("LinkT", bound=Link)


class Endpoint(Generic[LinkT]):
    """One credit book, one incarnation, any number of links.

    Args:
        make_link: makes a link of its parts.
        config: settings of this side.
        rate: pacing of each link, e.g. "10Gbit"; None is unpaced.
        sockets: what is set on the sockets of every lane.
        tls: certificates for tls:// addresses, which need them; other addresses refuse them.
        key: shared with every peer, at least 16 bytes; both sides of each lane prove that they have it.
        observers: are told of every link and of every transfer that ends.

    Links go by `time.monotonic`, or by the clock of the event loop if it has a virtual one (lynx_net.testing).
    """

    def __init__(
        self,
        make_link: Callable[[LinkParts], LinkT],
        *,
        config: LinkConfig,
        rate: str | float | None,
        sockets: SocketOptions | None = None,
        tls: TlsConfig | None = None,
        key: bytes | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.config = config
        self._observers = tuple(observers)
        self._tls = tls
        self.key = check_key(key)
        self._rate_bps = parse_rate(rate)
        self._make_link = make_link
        self._sockets = sockets or SocketOptions()
        self._clock: Callable[[], float] = getattr(asyncio.get_running_loop(), "virtual_clock", time.monotonic)
        self.incarnation = secrets.token_bytes(8)
        # One lock for all links, since they share the credit book and threads of any link may change it.
        self._lock = threading.RLock()
        self._book = CreditBook(config.memory_bytes, kept_bytes=config.kept_bytes)
        self.links: dict[bytes, LinkT] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    async def connect(self, url: str, *, lanes: int = 1) -> LinkT:
        """Open a link of some lanes.

        Raises:
            ConnectionFailedError: nobody listens there.
            HandshakeError: somebody does, but something else, or somebody who is not trusted or does not trust us.
            PeerTimeoutError: the handshake took longer than the deadline.
        """
        if not 1 <= lanes <= MAX_LANES:
            raise LocalProtocolError(f"lanes must be 1 to {MAX_LANES}, not {lanes}")
        address = Address.parse(url)
        link = secrets.token_bytes(16)
        opened: list[Lane] = []
        try:
            async with asyncio.timeout(self.config.deadline_s):
                hellos = [await self._open_lane(address, link, index, lanes, opened) for index in range(lanes)]
            if len({hello.incarnation for hello in hellos}) > 1:
                raise HandshakeError(f"{url} restarted while its lanes were being opened")
        except TimeoutError as error:
            for lane in opened:
                lane.close()
            raise PeerTimeoutError(f"{url} did not answer the handshake in {self.config.deadline_s:g} s") from error
        except BaseException:
            for lane in opened:
                lane.close()
            raise
        return self.start_link(link, hellos[0], opened, dial=self._dialer(address, link, hellos[0], lanes))

    async def _open_lane(
        self, address: Address, link: bytes, index: int, lanes: int, opened: list[Lane], received: int | None = None
    ) -> Hello:
        transport = transport_for(address, self._tls)
        lane = await transport.connect(address, self._sockets.for_lane(index))
        opened.append(lane)
        answer = await exchange_hellos(lane, self.hello(link, index, lanes, received), self.key)
        lane.joined(lanes)
        return answer

    def hello(self, link: bytes, lane: int, lanes: int, received: int | None = None) -> Hello:
        """What this side says first on a new lane; never the same twice if there is a key."""
        return make_hello(self.config, link, self.incarnation, lane, lanes, received, keyed=self.key is not None)

    def _dialer(
        self, address: Address, link: bytes, first: Hello, lanes: int
    ) -> Callable[[int, int], Awaitable[tuple[Lane, int]]]:
        """Opens lost lanes of a link again."""

        async def dial(index: int, received: int) -> tuple[Lane, int]:
            opened: list[Lane] = []
            try:
                hello = await self._open_lane(address, link, index, lanes, opened, received)
                if hello.incarnation != first.incarnation:
                    raise HandshakeError(f"{address} is another process now")
                return opened[0], await read_received(opened[0], index)
            except BaseException:
                for lane in opened:
                    lane.close()
                raise

        return dial

    async def serve(self, url: str) -> Server[LinkT]:
        """Bind an address and accept links; raises ConnectionFailedError at once if it is taken."""
        address = Address.parse(url)
        listener = await transport_for(address, self._tls).listen(address, self._sockets)
        return Server(self, listener)

    async def close(self) -> None:
        """Close every link. A cancellation waits until that is done, which takes less than a second."""
        closing = {asyncio.create_task(link.close()) for link in self.links.values()} | self._watchers
        cancelled: asyncio.CancelledError | None = None
        while closing:
            try:
                _, closing = await asyncio.wait(closing)
            except asyncio.CancelledError as error:
                # A task that is cancelled before it has begun would leave its link open for ever.
                cancelled = error
                closing = {task for task in closing if not task.done()}
        if cancelled is not None:
            raise cancelled

    def start_link(
        self,
        key: bytes,
        hello: Hello,
        lanes: list[Lane],
        *,
        dial: Callable[[int, int], Awaitable[tuple[Lane, int]]] | None,
    ) -> LinkT:
        """Make a link of lanes whose handshakes are done; the side that dials is the initiator."""
        core = LinkCore(
            link=key,
            lanes=len(lanes),
            initiator=dial is not None,
            config=self.config,
            peer_segment_bytes=hello.segment_bytes,
            peer_initial_credit=hello.initial_credit,
            peer_deadline_s=hello.deadline_ms / 1000,
            book=self._book,
            route_grant=self._route_grant,
            rate_bps=self._rate_bps,
            now=self._clock(),
        )
        link = self._make_link(
            LinkParts(core, lanes, self._lock, self._clock, hello.incarnation, dial, self._observers)
        )
        self.links[key] = link
        link.start()
        watcher = asyncio.create_task(self._forget_when_closed(key, link))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        rate = "unpaced" if self._rate_bps is None else f"paced to {self._rate_bps / 1e6:g} Mbit/s"
        logger.info("link to %s is up: %d lanes moved by %s, %s", link.peer, len(lanes), link.driver, rate)
        return link

    async def _forget_when_closed(self, key: bytes, link: LinkT) -> None:
        await link.closed()
        self.links.pop(key, None)

    def _route_grant(self, grant: Grant) -> None:
        link = self.links.get(grant.link) if isinstance(grant.link, bytes) else None
        if link is not None:
            link.granted(grant)


class _HalfOpen:
    """A link some of whose lanes have not come yet."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.lanes: dict[int, Lane] = {}


class Server(Generic[LinkT]):
    """Accepts links. Iterating it yields the transfers that any of them offers without having been asked.

    The iteration ends when the server closes.
    """

    def __init__(self, endpoint: Endpoint[LinkT], listener: Listener) -> None:
        self.url = listener.url
        self._endpoint = endpoint
        self._listener = listener
        self._transfers: Inbox[IncomingTransfer] = Inbox()
        self._new_links: Inbox[LinkT] = Inbox()
        self._half_open: dict[bytes, _HalfOpen] = {}
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept_loop(), name=f"lynx_net server on {self.url}")

    def __aiter__(self) -> AsyncIterator[IncomingTransfer]:
        return self._transfers.iterate()

    async def accept(self) -> LinkT:
        """The next link that a peer has opened and that is still up, or was when it was the only one to wait.

        Raises:
            ConnectionLostError: the server closed.
        """
        link = await self._new_links.get()
        if link is None:
            raise ConnectionLostError(f"the server on {self.url} was closed on this side")
        return link

    async def close(self) -> None:
        """Stop accepting, close all links; every waiter gets an exception. Takes less than a second."""
        self._accepting.cancel()
        for task in self._handshakes:
            task.cancel()
        self._listener.close()
        self._new_links.end()
        try:
            await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)
        finally:
            for half_open in self._half_open.values():
                for lane in half_open.lanes.values():
                    lane.close()
            await self._endpoint.close()
            self._transfers.end()

    async def _accept_loop(self) -> None:
        while True:
            lane = await self._listener.accept()
            if len(self._handshakes) >= MAX_HANDSHAKES:
                logger.warning("%s: too many connections in their handshake, closing one from %s", self.url, lane.peer)
                lane.close()
                continue
            task = asyncio.create_task(self._handshake(lane))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _handshake(self, lane: Lane) -> None:
        """One connection; whatever is wrong with it costs only itself."""
        endpoint = self._endpoint
        try:
            async with asyncio.timeout(endpoint.config.deadline_s):
                hello = await answer_hello(lane, self._answer, endpoint.key)
                self._check(hello)  # once more: others may have connected in the meantime
                lane.joined(hello.lanes)
                if hello.received is not None:
                    await self._resume(hello, hello.received, lane)
                    return
                half_open = self._half_open.setdefault(hello.link, _HalfOpen(hello))
                half_open.lanes[hello.lane] = lane
        except (LynxError, TimeoutError) as error:
            logger.info("%s: refused %s: %s", self.url, lane.peer, str(error) or "no greeting in time")
            lane.close()
        except BaseException:
            lane.close()
            raise
        else:
            if len(half_open.lanes) == hello.lanes:
                del self._half_open[hello.link]
                self._take_up(hello, half_open)
            elif len(half_open.lanes) == 1:
                await self._wait_for_all(hello.link, half_open)

    async def _resume(self, hello: Hello, peer_received: int, lane: Lane) -> None:
        """The old connection ends only now, when the peer has shown who it is."""
        link = self._endpoint.links[hello.link]
        await send_message(lane, Received(hello.lane, await link.detach(hello.lane)))
        link.attach(hello.lane, lane, peer_received)

    def _answer(self, hello: Hello) -> Hello:
        self._check(hello)
        return self._endpoint.hello(hello.link, hello.lane, hello.lanes)

    def _check(self, hello: Hello) -> None:
        if hello.received is not None:
            link = self._endpoint.links.get(hello.link)
            if link is None or link.peer_incarnation != hello.incarnation or link.lane_count != hello.lanes:
                raise HandshakeError("link: it has ended here and cannot be resumed")
            return
        if hello.link in self._endpoint.links:
            raise HandshakeError("link: a link with this id is up already")
        half_open = self._half_open.get(hello.link)
        if half_open is not None:
            if hello.lane in half_open.lanes:
                raise HandshakeError(f"lane: {hello.lane} is connected already")
            if (hello.lanes, hello.incarnation) != (half_open.hello.lanes, half_open.hello.incarnation):
                raise HandshakeError("lanes or incarnation: differ from those of the link's first lane")

    async def _wait_for_all(self, key: bytes, half_open: _HalfOpen) -> None:
        await asyncio.sleep(self._endpoint.config.deadline_s)
        if self._half_open.get(key) is half_open:
            del self._half_open[key]
            logger.info("%s: only %d of %d lanes came", self.url, len(half_open.lanes), half_open.hello.lanes)
            for lane in half_open.lanes.values():
                lane.close()

    def _take_up(self, hello: Hello, half_open: _HalfOpen) -> None:
        lanes = [half_open.lanes[index] for index in range(hello.lanes)]
        link = self._endpoint.start_link(hello.link, hello, lanes, dial=None)
        link.events.on_offer = self._transfers.put
        # A server whose links nobody accepts must not keep those that are over.
        self._new_links.forget(lambda one: one.error is not None)
        self._new_links.put(link)
