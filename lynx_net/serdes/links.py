"""`connect` and `serve`: links that know how to encode and decode a KV cache."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec import CodecPlan, PageShape
from lynx_codec.plan import DEFAULT_PLAN, PLAN, CodecTable
from lynx_codec.registry import CodecBuilder
from lynx_net.aio.endpoint import Endpoint, Server
from lynx_net.aio.link import Link
from lynx_net.aio.offload import run_blocking
from lynx_net.aio.requests import IncomingRequest
from lynx_net.errors import CodecError
from lynx_net.serdes.deserializer import ReceivedTransfer
from lynx_net.serdes.device import DeviceBuffers, Devices
from lynx_net.serdes.fine import fine_tokens
from lynx_net.serdes.packed import PackedPages, send_pages
from lynx_net.serdes.serializer import Sending
from lynx_net.serdes.split import AUTO, DEFAULT_RATE_BPS, auto_params
from lynx_net.serdes.target import HostCache
from lynx_net.wire.config import LinkConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from lynx_codec import PackedCache
    from lynx_net.aio.events import MakeIncoming
    from lynx_net.aio.link import LinkParts
    from lynx_net.aio.timeline import Observer
    from lynx_net.aio.transfer import Offer, OutgoingTransfer
    from lynx_net.serdes.target import KVTarget
    from lynx_net.transport import SocketOptions, TlsConfig
    from lynx_net.wire.layout import CacheLayout

__all__ = ["KVLink", "KVRequest", "KVServer", "connect", "serve"]


class KVRequest(IncomingRequest):
    """The peer asks for a cache: answer with `send` or `refuse`."""

    link: KVLink

    def send(self, layout: CacheLayout, **options: Any) -> Sending:
        """Answer with a transfer; arguments as in `KVLink.send`. `asked` is the request's `meta` if not given."""
        return self.link.send(self.id, layout, **{"asked": self.meta, **options})

    async def send_packed(self, cache: PackedCache, **options: Any) -> OutgoingTransfer:
        """Answer with a cache that is encoded already; arguments as in `KVLink.send_packed`."""
        return await self.link.send_packed(self.id, cache, **options)


class KVLink(Link):
    """A link that sends KV caches."""

    def __init__(
        self,
        parts: LinkParts,
        *,
        make_incoming: MakeIncoming,
        executor: Executor | None,
        accept_in_threads: bool,
        devices: Devices,
    ) -> None:
        super().__init__(parts, make_incoming, accept_in_threads=accept_in_threads)
        self._executor = executor
        self._devices = devices

    def send(
        self,
        request_id: str,
        layout: CacheLayout,
        *,
        codec: str | CodecPlan = DEFAULT_PLAN,
        codec_params: dict[str, Any] | None = None,
        fine: NDArray[np.integer[Any]] | Sequence[int] | None = None,
        meta: dict[str, Any] | None = None,
        first_token: int | None = None,
        asked: dict[str, Any] | None = None,
    ) -> Sending:
        """Offer a cache to the peer; use it as `async with link.send(...) as transfer`.

        Args:
            request_id: names the request for both applications.
            layout: shape and dtype of the cache.
            codec, codec_params: a codec of `lynx_codec`, by name; or a `CodecPlan`, for layers that differ.
                The default has fewer bits for values than for keys in the first stream (docs/codec-study.md). "auto" is
                `nested` with the split that fits this link (docs/splits.md); it takes the fields of
                `serdes.split.Situation` as parameters, and those of `nested` but `bits`.
            fine: tokens of the cache that have all their bits in the first stream: increasing, and none of them raw
                (see `fine_tokens`). By default the last tokens of the cache; codecs of one stream have no use for it.
            meta: anything msgpack can pack; the receiver finds it in `transfer.offer.meta`.
            first_token: first output token, if prefill has computed it.
            asked: what came with the request that this answers: "auto" uses its `decode_token_s`, seconds a token.

        Raises:
            CodecError: unknown codec or parameters, or a codec made for other heads than the layout's.
            LocalProtocolError, or the error that ended the link.
        """
        tokens = np.asarray(fine_tokens(layout) if fine is None else fine, dtype=np.int64)
        layout = layout.with_fine(tokens.tolist())
        if codec == AUTO:
            rate_bps = self.rate_bps or DEFAULT_RATE_BPS
            codec_params = auto_params(layout, codec_params or {}, rate_bps=rate_bps, asked=asked or {})
            codec = "nested"
        if isinstance(codec, CodecPlan):
            if codec_params is not None:
                raise CodecError("a plan holds the parameters of its codecs; codec_params are not for it")
            name, codecs = PLAN, codec.table(layout.layers, layout.kinds)
            params = codecs.params()
        else:
            name, chosen = codec, CodecBuilder().build(codec, codec_params or {})
            codecs, params = CodecTable.uniform(chosen, layout.layers, layout.kinds), chosen.params()
        codecs.check({kind: PageShape(0, layout.heads, layout.size_of(kind)) for kind in layout.kinds})
        transfer = self.open_transfer(
            request_id,
            layout,
            codec=name,
            codec_params=params,
            streams=len(codecs.stream_names),
            stream_names=codecs.stream_names,
            meta=meta,
            first_token=first_token,
        )
        return Sending(transfer, codecs, tokens, self._executor, self._devices)

    async def send_packed(
        self,
        request_id: str,
        cache: PackedCache,
        *,
        sequence: int = 0,
        dtype: str = "float32",
        meta: dict[str, Any] | None = None,
        first_token: int | None = None,
    ) -> OutgoingTransfer:
        """Send a cache that is encoded already; returns when the receiver has all of it decoded in place.

        Nothing is encoded or copied: the receiver gets the bytes that the cache holds. Cancelling aborts the transfer.

        Args:
            request_id, meta, first_token: as in `send`.
            cache: whole pages of one size, see `serdes.packed.packed_layout`; every codec may have its own arrays.
            sequence: which sequence of the cache.
            dtype: of the cache before it was encoded, for the layout.

        Raises:
            CodecError: the pages of the cache do not lie as those of a transfer, or lack streams.
            LynxError: the transfer has failed.
        """
        source = PackedPages(cache, sequence=sequence, dtype=dtype)
        return await send_pages(self, request_id, source, executor=None, meta=meta, first_token=first_token)

    def requests(self) -> AsyncIterator[KVRequest]:
        return super().requests()  # type: ignore[return-value]  # `make_request` makes no others

    def make_request(self, request_id: str, meta: dict[str, Any]) -> KVRequest:
        return KVRequest(self, request_id, meta)


KVServer = Server[KVLink]


def codecs_of(offer: Offer) -> CodecTable:
    """The codecs of an offered transfer.

    Raises:
        CodecError: a codec or parameters that this side does not have.
    """
    layers, kinds = offer.layout.layers, offer.layout.kinds
    if offer.codec == PLAN:
        return CodecTable.from_params(offer.codec_params, layers, kinds)
    # Not `get_codec`: a peer chooses the parameters of a codec, and nothing else that is an argument there.
    return CodecTable.uniform(CodecBuilder().build(offer.codec, offer.codec_params), layers, kinds)


class _KVEndpoint(Endpoint[KVLink]):
    """An endpoint whose transfers are coded in one worker thread of its own."""

    def __init__(
        self,
        allocate: Callable[[Offer], KVTarget] | None,
        config: LinkConfig | None,
        rate: str | float | None,
        sockets: SocketOptions | None,
        tls: TlsConfig | None,
        key: bytes | None,
        observers: Sequence[Observer],
        device_buffers: DeviceBuffers | None,
    ) -> None:
        super().__init__(
            self._make_kv_link,
            config=config or LinkConfig(),
            rate=rate,
            sockets=sockets,
            tls=tls,
            key=key,
            observers=observers,
        )
        self._devices = Devices(device_buffers or DeviceBuffers())
        # A caller's `allocate` may be used to the event loop; ours does not care.
        self._accept_in_threads = allocate is None
        self._allocate = allocate or (lambda offer: HostCache(offer.layout))
        # In virtual time nothing waits for threads, so the work is done in place.
        virtual = hasattr(asyncio.get_running_loop(), "virtual_clock")
        self._executor = None if virtual else ThreadPoolExecutor(1, thread_name_prefix="lynx_net-codec")

    def _make_kv_link(self, parts: LinkParts) -> KVLink:
        return KVLink(
            parts,
            make_incoming=self._receive,
            executor=self._executor,
            accept_in_threads=self._accept_in_threads,
            devices=self._devices,
        )

    def _receive(self, link: Link, transfer: int, offer: Offer) -> ReceivedTransfer:
        codecs = codecs_of(offer)
        return ReceivedTransfer(
            *(link, transfer, offer),
            codecs=codecs,
            allocate=self._allocate,
            executor=self._executor,
            devices=self._devices,
        )

    async def prepare(self) -> None:
        """Do what can be done before the first transfer."""
        await run_blocking(self._executor, self._devices.prepare)

    async def close(self) -> None:
        await super().close()
        self._devices.close()
        if self._executor is not None:
            self._executor.shutdown(wait=False)


@contextlib.asynccontextmanager
async def connect(
    url: str,
    *,
    rate: str | float | None = None,
    lanes: int = 1,
    config: LinkConfig | None = None,
    sockets: SocketOptions | None = None,
    allocate: Callable[[Offer], KVTarget] | None = None,
    tls: TlsConfig | None = None,
    key: bytes | None = None,
    observers: Sequence[Observer] = (),
    device_buffers: DeviceBuffers | None = None,
) -> AsyncIterator[KVLink]:
    """Open a link to a serving peer: `async with connect("tcp://host:7000") as link`.

    Args:
        url: "tcp://host:port" or "tls://host:port"; inside one machine "unix:///path" or "unix://@name"; inside
            one process "memory://name".
        rate: pace what this side sends, all lanes together: "100Mbit", "1.25GB/s", bits per second as a
            number; None does not pace.
        lanes: connections to open.
        config: deadlines, windows and sizes.
        sockets: buffers, local addresses, marks per class and whatever else is set on sockets (docs/sockets.md).
        allocate: gives the memory for a cache that the peer offers; plain numpy arrays by default. Raising a
            LynxError declines the transfer.
        tls: certificates, for tls:// alone and needed there; see docs/security.md.
        key: at least 16 random bytes that the peer has too. Each lane begins with both sides proving it; nothing is
            encrypted by it. A peer without the key, or with another, is refused.
        observers: are told of links and ended transfers; see `lynx_net.observe`.
        device_buffers: bounds of the memory that transfers from and to CUDA devices use (docs/gpu.md).

    Leaving the block closes the link; transfers still open on it fail.

    Raises:
        ConnectionFailedError, HandshakeError, PeerTimeoutError: there is no link.
        LocalProtocolError: an argument, key or certificate cannot be used, or the kernel refuses a socket option.
    """
    endpoint = _KVEndpoint(allocate, config, rate, sockets, tls, key, observers, device_buffers)
    try:
        await endpoint.prepare()
        yield await endpoint.connect(url, lanes=lanes)
    finally:
        await endpoint.close()


@contextlib.asynccontextmanager
async def serve(
    url: str,
    *,
    rate: str | float | None = None,
    config: LinkConfig | None = None,
    sockets: SocketOptions | None = None,
    allocate: Callable[[Offer], KVTarget] | None = None,
    tls: TlsConfig | None = None,
    key: bytes | None = None,
    observers: Sequence[Observer] = (),
    device_buffers: DeviceBuffers | None = None,
) -> AsyncIterator[KVServer]:
    """Accept links on an address: `async with serve("tcp://127.0.0.1:7000") as server`.

    Arguments are those of `connect`; `rate` paces each link by itself. Port 0 binds a free port,
    `server.url` names it. Iterate the server for the transfers that peers offer. Leaving the block closes all.

    Raises:
        ConnectionFailedError: the address cannot be bound.
        LocalProtocolError: an argument, key or certificate cannot be used, or the kernel refuses a socket option.
    """
    endpoint = _KVEndpoint(allocate, config, rate, sockets, tls, key, observers, device_buffers)
    try:
        await endpoint.prepare()
        server = await endpoint.serve(url)
        try:
            yield server
        finally:
            await server.close()
    finally:
        await endpoint.close()
