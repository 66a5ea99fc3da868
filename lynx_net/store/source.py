"""The pages of a held entry as a source to send from: all of them, or those of its first tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lynx_codec.composite import join_streams
from lynx_net.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lynx_codec import Codec
    from lynx_codec.plan import CodecTable
    from lynx_net.store.held import HeldEntry
    from lynx_net.wire.layout import CacheLayout

__all__ = ["EntryPages"]


class EntryPages:
    """The first tokens of an entry, anchors to exact, as they lie on the disk.

    A page that the last token falls into is cut, by copying bytes, where its codecs can be cut; where they cannot, or
    the page has not been written yet, the pages before it are all there is.

    Args:
        held: the entry, and how many of its tokens; `close` releases it.

    `open` it first.
    """

    def __init__(self, held: HeldEntry) -> None:
        self.held = held
        self._tokens = held.tokens
        head = held.head
        self.codec = head.codec
        self.codec_params = head.codec_params
        self._table: CodecTable = head.table()
        self._places = join_streams(self._table.codecs)[1]
        self.stream_names = self._table.stream_names
        self.layout: CacheLayout = head.layout
        self._whole = head.layout
        self._per_array = self._whole.pages_per_array
        self._cuts = False
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        if held.writer is not None:
            held.writer.listen(self._tell)

    def open(self) -> None:
        """Open the entry and find out where it ends. Blocks.

        Raises:
            EntryDamagedError, StoreError: it cannot be read.
        """
        self.held.open()
        whole = self._whole
        if self._tokens < whole.tokens:
            self.layout = self._cropped(self._tokens)
            self._per_array = self.layout.pages_per_array
            self._cuts = self.layout.tokens % whole.page_tokens != 0

    def close(self) -> None:
        """Release the entry."""
        if self.held.writer is not None:
            self.held.writer.unlisten(self._tell)
        self.held.release()

    def size(self, page: int, stream: int) -> int | None:
        """Bytes of a page stream on the disk; a page that will be cut is there when all it is made of is."""
        pages = self.held.pages
        if pages is None:
            return None
        own = self._own(page)
        if self._is_cut(page) and any(pages.size(own, earlier) is None for earlier in range(stream)):
            return None
        return pages.size(own, stream)

    async def more(self) -> None:
        """Return when the writer has written more; raises StoreError when it has failed."""
        await self._changed.wait()
        self._changed.clear()
        writer = self.held.writer
        if writer is not None and writer.error is not None:
            raise writer.error

    def read(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """Page streams, checked. Blocks.

        Raises:
            EntryDamagedError: they are not what was written; the entry has been put aside.
            StoreError: the disk fails.
        """
        return [self._read(page, stream) for page, stream in wanted]

    def _read(self, page: int, stream: int) -> bytes:
        own = self._own(page)
        if not self._is_cut(page):
            return self.held.read(own, stream)
        left = self.layout.page(page)
        places = self._places[self._table.number(left.layer, left.kind)]
        if stream not in places:
            return b""
        streams = [self.held.read(own, place) for place in places if place <= stream]
        codec, shape = self._table.own(left.layer, left.kind), self._whole.page(own).shape
        return codec.cut_page(streams, shape, 0, left.shape)[-1]

    def _own(self, page: int) -> int:
        """Number of the page in the entry."""
        array, position = divmod(page, self._per_array)
        return array * self._whole.pages_per_array + position

    def _is_cut(self, page: int) -> bool:
        return self._cuts and page % self._per_array == self._per_array - 1

    def _tell(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)

    def _cropped(self, tokens: int) -> CacheLayout:
        """The layout of the first tokens, or of those in whole pages."""
        whole = self._whole
        position, rest = divmod(tokens, whole.page_tokens)
        counts = whole.fine[:position]
        if rest:
            fine = self._fine_tokens(position, rest)
            if fine is None:
                tokens -= rest
            elif whole.fine:
                counts = (*counts, fine)
        if not tokens:
            raise StoreError("not stored, but as the beginning of a page that must be kept whole")
        raw_tail = max(tokens - max(whole.tokens - whole.raw_tail, 0), 0)
        return replace(whole, tokens=tokens, raw_tail=raw_tail, fine=counts)

    def _fine_tokens(self, position: int, tokens: int) -> int | None:
        """How many of the first tokens of a page are fine; None if the page cannot be cut, or cannot be cut yet."""
        if not all(_can_be_cut(codec) for codec in self._table.codecs):
            return None
        whole = self._whole
        if not whole.fine:
            return 0
        for array in range(len(whole.kinds) * whole.layers):
            ref = whole.page(array * whole.pages_per_array + position)
            codec = self._table.own(ref.layer, ref.kind)
            if len(codec.stream_names) == 1:
                continue  # its pages need not say which tokens are fine
            pages = self.held.pages
            if pages is None or pages.size(ref.index, 0) is None:
                return None
            named = codec.fine_tokens([self.held.read(ref.index, 0)], ref.shape)
            return sum(token < tokens for token in named)
        return min(whole.fine[position], whole.page(position).shape.cut(0, tokens).coded_tokens)


def _can_be_cut(codec: Codec) -> bool:
    return bool(codec.grid_tokens) and not _has_exact(codec.params())


def _has_exact(params: dict[str, Any]) -> bool:
    """An exact stream is entropy-coded; it may be that of a part."""
    return bool(params.get("exact")) or any(_has_exact(part) for part in params.get("params", ()))
