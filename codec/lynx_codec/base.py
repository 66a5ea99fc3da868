"""What every codec is: a page in, an ordered list of streams out, and back after any prefix of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["CHUNK_TOKENS", "PAGE_TOKENS", "Codec", "PageShape"]

PAGE_TOKENS = 256
"""Tokens of a full page (Lynx section 6.1)."""

CHUNK_TOKENS = 32
"""Consecutive tokens of one channel that share their metadata (Lynx section 4.1)."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """Shape of one page: `tokens` rows of `heads` x `head_size` values, keys or values of one layer.

    The first `raw_head` and the last `raw_tail` tokens travel as 16-bit floats inside stream 0;
    only the tokens between them are quantised, and only they enter any minimum or maximum. `fine` of
    those, which the encoder is told, are coded like the others, but all their bits travel in
    stream 0, so that they are at full precision from the start; codecs of one stream have no use for it.
    """

    tokens: int
    heads: int
    head_size: int
    raw_head: int = 0
    raw_tail: int = 0
    fine: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.tokens <= 0xFFFF or not 1 <= self.heads <= 0xFFFF or not 1 <= self.head_size <= 0xFFFF:
            raise CodecError(f"page shape out of range: {self}")
        if min(self.raw_head, self.raw_tail, self.fine) < 0 or self.coded_tokens < self.fine:
            raise CodecError(f"raw and fine tokens do not fit into the page: {self}")

    @property
    def coded_tokens(self) -> int:
        """Tokens that are quantised."""
        return self.tokens - self.raw_head - self.raw_tail

    @property
    def channels(self) -> int:
        """Values a token."""
        return self.heads * self.head_size

    @property
    def values(self) -> int:
        """Values of the page, raw tokens included."""
        return self.tokens * self.channels

    @property
    def array_shape(self) -> tuple[int, int, int]:
        """Shape of the array that holds the page: (tokens, heads, head_size)."""
        return (self.tokens, self.heads, self.head_size)

    def cut(self, start: int, stop: int, fine: int = 0) -> PageShape:
        """Shape of the page that keeps tokens [start, stop), `fine` of them fine."""
        if not 0 <= start <= stop <= self.tokens:
            raise CodecError(f"tokens {start} to {stop} of a page of {self.tokens}")
        raw_head = max(min(self.raw_head, stop) - start, 0)
        raw_tail = max(stop - max(self.tokens - self.raw_tail, start), 0)
        return PageShape(stop - start, self.heads, self.head_size, raw_head, raw_tail, fine)

    def with_heads(self, heads: int) -> PageShape:
        """The same page with another number of heads."""
        return replace(self, heads=heads)

    def with_raw(self, tokens: int) -> PageShape:
        """The same page with so many raw tokens more at its end."""
        return replace(self, tokens=self.tokens + tokens, raw_tail=self.raw_tail + tokens)


class Codec(ABC):
    """Encodes pages into streams and decodes any prefix of these streams.

    Arrays are [tokens, heads, head_size] with any strides, dtype float32, float16, or uint16, where
    uint16 holds the bits of bfloat16 (numpy has no such type). Codecs hold no state between calls
    and may be called from several threads at once; the calls release the interpreter lock where the
    implementation is compiled.
    """

    name: str
    """Name in the registry and on the wire."""

    stream_names: tuple[str, ...]
    """The streams in order of importance, e.g. ("anchor", "residual")."""

    variable_streams: frozenset[int] = frozenset()
    """Indices of the streams whose size depends on the values: `stream_bytes` is a bound, `encode` says the size."""

    @abstractmethod
    def params(self) -> dict[str, Any]:
        """Plain numbers and strings that let a peer build the same codec: `get_codec(name, **params)`."""

    @abstractmethod
    def stream_bytes(self, shape: PageShape, *, wide: bool = False) -> tuple[int, ...]:
        """Exact bytes of each stream of a page; the most bytes of those in `variable_streams`.

        `wide` asks for the size of a page that escaped to 16-bit metadata; codecs without an
        escape ignore it. The wide size of every stream is an upper bound of the other.
        """

    @abstractmethod
    def encode(
        self,
        page: NDArray[Any],
        shape: PageShape,
        outs: Sequence[memoryview],
        fine: NDArray[np.integer[Any]] | None = None,
    ) -> tuple[int, ...]:
        """Encode `page` into one caller-owned writable byte buffer per stream.

        `fine` names the `shape.fine` fine tokens: positions in the page, increasing, none of them raw; by default they
        are the last ones that are not raw.

        Each buffer holds at least the wide `stream_bytes`; bytes past the returned lengths are left
        alone. The buffers may be reused as soon as the call returns.

        Raises:
            NonFiniteError: NaN, infinity, or a magnitude above 2**126.
            CodecError: wrong shape, a buffer that is too small, or bad positions (nothing is written then).
            TypeError: a dtype that is none of the three.
        """

    @abstractmethod
    def decode(self, streams: Sequence[memoryview], shape: PageShape, out: NDArray[Any]) -> None:
        """Decode a non-empty prefix of the streams of a page into `out`, overwriting all of it.

        `out` has shape `shape.array_shape`, any strides, and one of the three dtypes; float16 output
        saturates to the largest finite value instead of becoming infinite. The streams are only
        read, and only during the call.

        Raises:
            CodecError: the bytes are no valid page of this shape and codec; `out` is then undefined
                but nothing outside it was touched.
        """

    @property
    def grid_tokens(self) -> int:
        """An encoded page can be cut before tokens at multiples of this without touching a value; 0: it stays whole."""
        return 0

    def fine_tokens(self, streams: Sequence[bytes], shape: PageShape) -> tuple[int, ...]:
        """Which tokens of an encoded page are fine, as it says itself; none if the codec makes no difference."""
        return ()

    def cut_page(self, streams: Sequence[bytes], shape: PageShape, start: int, left: PageShape) -> tuple[bytes, ...]:
        """Streams of the page that keeps the tokens from `start` on that `left` has room for.

        Bytes are copied, nothing is decoded. `streams` is a non-empty prefix of the streams, and so is the result.
        `start` is a multiple of `grid_tokens` unless only raw tokens are left. `left` is `shape.cut(start, stop,
        fine)`, where `fine` is the number of fine tokens between.

        Raises:
            CodecError: the codec's pages can only be kept whole, or these streams are not of this shape.
        """
        raise CodecError(f"pages of codec {self.name} can only be kept whole: no token can be cut off")

    def take_heads(self, streams: Sequence[bytes], shape: PageShape, heads: Sequence[int]) -> tuple[bytes, ...]:
        """Streams of the page of these heads, in this order, for the codec `self.for_heads(heads)`; as `cut_page`."""
        raise CodecError(f"pages of codec {self.name} can only be kept whole: no head can be taken out")

    def for_heads(self, heads: Sequence[int]) -> Codec:
        """The codec of pages that keep only these heads: the same, but where heads have codecs of their own."""
        return self

    def add_raw(
        self, streams: Sequence[bytes], shape: PageShape, added: Sequence[bytes], more: PageShape
    ) -> tuple[bytes, ...] | None:
        """Streams of the page with the raw tokens of another behind its own, its shape `shape.with_raw(more.tokens)`.

        `added` is an encoded page of shape `more` that has only raw tokens (any, for `bf16`). None: the format does not
        allow it for these pages.
        """
        return None

    def warm_up(self) -> None:
        """Do now what the first page would have to wait for, such as compiling; may be called again at no cost."""
        return

    def check_page(self, page: NDArray[Any], shape: PageShape) -> None:
        """Refuse an array of the wrong shape or dtype before anything is read or written."""
        if page.shape != shape.array_shape:
            raise CodecError(f"array of shape {page.shape} given for a page of shape {shape.array_shape}")
        if page.dtype not in (np.float32, np.float16, np.uint16):
            raise TypeError(f"dtype {page.dtype} is not float32, float16 or uint16 (bfloat16 bits)")
