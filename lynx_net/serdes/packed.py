"""Sending caches that are encoded already: page streams go from where they lie to the wire, past the encoder."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from lynx_codec import CodecError
from lynx_codec.composite import join_streams
from lynx_codec.plan import PLAN, CodecTable
from lynx_net.aio.offload import run_blocking
from lynx_net.errors import LynxError
from lynx_net.wire.layout import KINDS, CacheLayout, WaitingOrder
from lynx_net.wire.messages import AbortCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Executor

    from lynx_codec import Codec, PackedCache
    from lynx_net.aio.link import Link
    from lynx_net.aio.transfer import OutgoingTransfer

__all__ = ["READ_AHEAD_BYTES", "PackedPages", "PageSource", "packed_layout", "page_order", "send_pages"]

READ_AHEAD_BYTES = 8 << 20
"""Read from a source and not sent yet, of one transfer: covers the time to read more, and bounds the memory."""

BATCH_PAGES = 32
"""Page streams read in one visit to a thread, at most."""


class PageSource(Protocol):
    """Where encoded page streams come from: memory, a disk, a cache that is still being written.

    Attributes:
        layout: of the cache.
        codec, codec_params: as in an offer.
        stream_names: of the codec.
    """

    @property
    def layout(self) -> CacheLayout: ...
    @property
    def codec(self) -> str: ...
    @property
    def codec_params(self) -> dict[str, Any]: ...
    @property
    def stream_names(self) -> tuple[str, ...]: ...

    def size(self, page: int, stream: int) -> int | None:
        """Bytes of a page stream; None if it is not there yet. Called in the event loop."""
        ...

    async def more(self) -> None:
        """Return when page streams may be there that were not; raises a LynxError if they never will be."""
        ...

    def read(self, wanted: Sequence[tuple[int, int]]) -> Sequence[bytes | memoryview]:
        """Page streams by (page, stream); may block, called in a thread. What is returned must not change any more."""
        ...


def page_order(layout: CacheLayout, stream: int) -> list[int]:
    """Page numbers in the order in which a stream of them goes, as when a cache is encoded while it is sent."""
    if stream == 0:
        return list(range(layout.page_count))
    return list(map(WaitingOrder(layout).page, range(layout.page_count)))


async def send_pages(
    link: Link,
    request_id: str,
    source: PageSource,
    *,
    executor: Executor | None,
    read_ahead_bytes: int = READ_AHEAD_BYTES,
    meta: dict[str, Any] | None = None,
    first_token: int | None = None,
) -> OutgoingTransfer:
    """Offer what a source has, send it, and return when the receiver has everything in place.

    Streams are read one after the other, anchors first; of a stream that is not all there, what is there goes at once.
    At most `read_ahead_bytes` and a batch of half of it wait to be sent. Cancelling aborts the transfer.

    Raises:
        LynxError: of the source (the transfer is aborted with its message) or of the transfer.
    """
    transfer = link.open_transfer(
        request_id,
        source.layout,
        codec=source.codec,
        codec_params=source.codec_params,
        streams=len(source.stream_names),
        stream_names=source.stream_names,
        meta=meta,
        first_token=first_token,
    )
    try:
        for stream in range(len(source.stream_names)):
            await _send_stream(transfer, source, stream, executor, read_ahead_bytes)
        await transfer.delivered
    except LynxError as error:
        # Of a transfer that has ended nothing happens; else this is what its receiver learns.
        link.abort(transfer.id, AbortCode.SENDER_FAILED, str(error), error)
        raise
    except asyncio.CancelledError:
        transfer.cancel()
        raise
    except BaseException as error:
        reason = f"the sender failed: {type(error).__name__}: {error}"
        link.abort(transfer.id, AbortCode.SENDER_FAILED, reason)
        raise
    return transfer


async def _send_stream(
    transfer: OutgoingTransfer, source: PageSource, stream: int, executor: Executor | None, read_ahead_bytes: int
) -> None:
    left = dict.fromkeys(page_order(source.layout, stream))
    while left:
        batch: list[int] = []
        batch_bytes = 0
        for page in left:
            size = source.size(page, stream)
            if size is None:
                continue
            if batch and (batch_bytes + size > read_ahead_bytes // 2 or len(batch) == BATCH_PAGES):
                break
            batch.append(page)
            batch_bytes += size
        if not batch:
            # A transfer that fails meanwhile must not wait for its source.
            await _more(transfer, source)
            continue
        await transfer.wait_for_few(read_ahead_bytes)
        for page in batch:
            del left[page]
        found = await run_blocking(executor, source.read, [(page, stream) for page in batch])
        transfer.submit_all((page, stream, memoryview(data), (), None) for page, data in zip(batch, found, strict=True))


async def _more(transfer: OutgoingTransfer, source: PageSource) -> None:
    """Wait for the source, or for the transfer to fail."""
    waits = [asyncio.ensure_future(source.more()), asyncio.ensure_future(transfer.delivered.settled())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        transfer.delivered.done()
        if waits[0].done():
            waits[0].result()
    finally:
        for one in waits:
            one.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def packed_layout(cache: PackedCache, *, sequence: int = 0, dtype: str = "float32") -> CacheLayout:
    """The layout of a sequence of a packed cache, if its pages lie as those of a transfer do.

    That is so after `PackedCache.encode` and `crop(0, stop)`. It is not where pages of other sizes lie one behind the
    other (`append`, `concatenate`, `select_tokens`) or tokens are skipped (`crop` from a later token).

    Raises:
        CodecError: naming the first page that lies otherwise, or what differs between layers.
    """
    if not 0 <= sequence < cache.sequences:
        raise CodecError(f"sequence {sequence} of {cache.sequences}")
    arrays = {place: sequences[sequence] for place, sequences in cache.arrays.items()}
    layers = 1 + max(layer for layer, _ in arrays)
    kinds = [kind for kind in KINDS if (0, kind) in arrays]
    if set(arrays) != {(layer, kind) for layer in range(layers) for kind in kinds}:
        raise CodecError("a cache to send has the same kinds of arrays in all layers, which are numbered from 0")
    sizes = {kind: {arrays[layer, kind].head_size for layer in range(layers)} for kind in kinds}
    heads = {array.heads for array in arrays.values()}
    if len(heads) > 1 or any(len(one) > 1 for one in sizes.values()):
        raise CodecError("a cache to send has as many heads in all arrays, and heads of one size in all layers")
    first = arrays[0, kinds[0]]
    shapes = [page.shape for page in first.pages]
    layout = CacheLayout(
        layers=layers,
        tokens=first.tokens,
        heads=heads.pop(),
        key_size=min(sizes.get("key", {0})),
        value_size=min(sizes.get("value", {0})),
        dtype=dtype,
        page_tokens=shapes[0].tokens if len(shapes) > 1 else max(first.page_tokens, first.tokens),
        raw_head=_run((shape.raw_head, shape.tokens) for shape in shapes),
        raw_tail=_run((shape.raw_tail, shape.tokens) for shape in reversed(shapes)),
        fine=tuple(shape.fine for shape in shapes) if any(shape.fine for shape in shapes) else (),
    )
    for page in layout.pages():
        own = arrays[page.layer, page.kind].pages
        position = page.start // layout.page_tokens
        if position >= len(own) or own[position].shape != page.shape or own[position].skip:
            found = f"{own[position].shape}, {own[position].skip} skipped" if position < len(own) else "missing"
            raise CodecError(
                f"layer {page.layer}, {page.kind}s: page {position} is {found}, in a transfer it would be {page.shape}"
            )
    return layout


def _run(pages: Iterable[tuple[int, int]]) -> int:
    """Raw tokens at one end of a cache, of pages with so many raw tokens of all of theirs."""
    total = 0
    for raw, tokens in pages:
        total += raw
        if raw < tokens:
            break
    return total


class PackedPages:
    """A sequence of a packed cache as a source of page streams. It copies nothing.

    Raises:
        CodecError: as `packed_layout`; or pages lack streams of their codec.
    """

    def __init__(self, cache: PackedCache, *, sequence: int = 0, dtype: str = "float32") -> None:
        self.layout = packed_layout(cache, sequence=sequence, dtype=dtype)
        self._arrays = {place: sequences[sequence] for place, sequences in cache.arrays.items()}
        codecs: dict[str, Codec] = {}
        choices: dict[str, list[int]] = {kind: [] for kind in self.layout.kinds}
        for layer in range(self.layout.layers):
            for kind in self.layout.kinds:
                codec = self._arrays[layer, kind].codec
                name = repr((codec.name, sorted(codec.params().items())))
                codecs.setdefault(name, codec)
                choices[kind].append(list(codecs).index(name))
        table = CodecTable(list(codecs.values()), choices)
        places = join_streams(table.codecs)[1]
        # Of each array, in the order of its pages: its pages, and which of the transfer's streams theirs are.
        self._by_number = [
            (self._arrays[layer, kind].pages, places[table.number(layer, kind)])
            for layer in range(self.layout.layers)
            for kind in self.layout.kinds
        ]
        self.stream_names = table.stream_names
        alone = table.codecs[0] if len(table.codecs) == 1 else None
        self.codec = PLAN if alone is None else alone.name
        self.codec_params = table.params() if alone is None else alone.params()
        for (layer, of), array in self._arrays.items():
            lacking = next((page for page in array.pages if len(page.streams) < len(array.codec.stream_names)), None)
            if lacking is not None:
                raise CodecError(
                    f"layer {layer}, {of}s: a page has {len(lacking.streams)} streams of "
                    f"{len(array.codec.stream_names)}; all are needed to send it"
                )

    def size(self, page: int, stream: int) -> int:
        """Bytes of a page stream."""
        return len(self._stream(page, stream))

    async def more(self) -> None:
        """Everything is there."""

    def read(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """Page streams, the objects that the cache has."""
        return [self._stream(page, stream) for page, stream in wanted]

    def _stream(self, page: int, stream: int) -> bytes:
        number, position = divmod(page, self.layout.pages_per_array)
        pages, places = self._by_number[number]
        return pages[position].streams[places.index(stream)] if stream in places else b""
