"""Encoded caches that are cropped, selected from, reordered, joined and extended without decoding them.

Everything here is immutable: an operation returns a new object that shares the bytes it did not have to cut, so that
reordering and joining copy no data. docs/packed.md says what each operation costs.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec.base import PAGE_TOKENS, Codec, PageShape
from lynx_codec.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import DTypeLike, NDArray

__all__ = ["PackedArray", "PackedCache", "PackedPage"]


@dataclass(frozen=True, slots=True)
class PackedPage:
    """One encoded page.

    Attributes:
        streams: a non-empty prefix of the streams of the codec.
        shape: what the header of stream 0 says.
        skip: tokens at the start of the page that do not count any more. They are less than a chunk, and stay because
            the chunks of a page are counted from its first token.
    """

    streams: tuple[bytes, ...]
    shape: PageShape
    skip: int = 0

    def __post_init__(self) -> None:
        if not self.streams or not 0 <= self.skip <= self.shape.tokens:
            raise CodecError(
                f"not a packed page: {len(self.streams)} streams, {self.skip} of {self.shape.tokens} skipped"
            )

    @property
    def tokens(self) -> int:
        """Tokens that count."""
        return self.shape.tokens - self.skip

    @property
    def nbytes(self) -> int:
        """Bytes of all streams."""
        return sum(len(stream) for stream in self.streams)


class PackedArray:
    """The keys or the values of one layer of one sequence, as encoded pages.

    Args:
        codec: what the pages were encoded with.
        heads, head_size: of every page.
        pages: in the order of their tokens; pages without tokens are left out.
        page_tokens: tokens of a full page, for what is appended.
    """

    __slots__ = ("codec", "head_size", "heads", "page_tokens", "pages", "tokens")

    def __init__(
        self,
        codec: Codec,
        heads: int,
        head_size: int,
        pages: Iterable[PackedPage] = (),
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        _check_page_tokens(page_tokens)
        PageShape(0, heads, head_size)
        self.codec = codec
        self.heads = heads
        self.head_size = head_size
        self.page_tokens = page_tokens
        self.pages = tuple(page for page in pages if page.tokens)
        self.tokens = sum(page.tokens for page in self.pages)
        for page in self.pages:
            if (page.shape.heads, page.shape.head_size) != (heads, head_size):
                raise CodecError(
                    f"a page of {page.shape.heads} heads of {page.shape.head_size} among {heads} of {head_size}"
                )
            if len(page.streams) > len(codec.stream_names):
                raise CodecError(
                    f"a page of {len(page.streams)} streams, codec {codec.name} has {len(codec.stream_names)}"
                )

    @classmethod
    def encode(
        cls,
        codec: Codec,
        array: NDArray[Any],
        *,
        page_tokens: int = PAGE_TOKENS,
        raw_head: int = 0,
        raw_tail: int = 0,
        fine: Sequence[int] = (),
    ) -> PackedArray:
        """Encode [tokens, heads, head size].

        `raw_head` and `raw_tail` count tokens of the array, `fine` names tokens of it whose bits are all in stream 0;
        those that are raw need not be fine.

        Raises:
            CodecError, NonFiniteError, TypeError: as `Codec.encode`.
        """
        if array.ndim != 3:
            raise CodecError(f"an array of {array.ndim} dimensions; needed is [tokens, heads, head size]")
        tokens, heads, head_size = array.shape
        if min(raw_head, raw_tail) < 0:
            raise CodecError(f"raw_head and raw_tail must not be negative: {raw_head}, {raw_tail}")
        chosen = np.unique(np.fromiter((operator.index(token) for token in fine), np.int64))
        _check_page_tokens(page_tokens)
        pages = []
        for start in range(0, tokens, page_tokens):
            stop = min(start + page_tokens, tokens)
            head = min(max(raw_head - start, 0), stop - start)
            tail = min(max(stop - max(tokens - raw_tail, 0), 0), stop - start - head)
            own = chosen[(chosen >= start + head) & (chosen < stop - tail)] - start
            shape = PageShape(stop - start, heads, head_size, head, tail, len(own))
            pages.append(PackedPage(_encode(codec, array[start:stop], shape, own), shape))
        return cls(codec, heads, head_size, pages, page_tokens=page_tokens)

    def decode(
        self, out: NDArray[Any] | None = None, *, dtype: DTypeLike = np.float32, streams: int | None = None
    ) -> NDArray[Any]:
        """The values, [tokens, heads, head size]: written into `out`, or into a new array of `dtype`.

        `streams` uses only the first so many streams of each page.
        """
        if out is None:
            out = np.empty((self.tokens, self.heads, self.head_size), dtype)
        elif out.shape != (self.tokens, self.heads, self.head_size):
            raise CodecError(f"array of shape {out.shape} given for {(self.tokens, self.heads, self.head_size)}")
        if streams is not None and streams < 1:
            raise CodecError(f"cannot decode {streams} streams")
        at = 0
        for page in self.pages:
            part = out[at : at + page.tokens]
            views = [memoryview(stream) for stream in page.streams[:streams]]
            if page.skip:
                whole = np.empty(page.shape.array_shape, out.dtype)
                self.codec.decode(views, page.shape, whole)
                part[...] = whole[page.skip :]
            else:
                self.codec.decode(views, page.shape, part)
            at += page.tokens
        return out

    @property
    def nbytes(self) -> int:
        """Encoded bytes, headers and skipped tokens included."""
        return sum(page.nbytes for page in self.pages)

    @property
    def streams(self) -> int:
        """Streams that every page has; 0 without pages."""
        return min((len(page.streams) for page in self.pages), default=0)

    def crop(self, start: int, stop: int) -> PackedArray:
        """Only tokens [start, stop). At most the first and the last page left are copied.

        Raises:
            CodecError: the range is not inside the array, or cuts a page that can only be kept whole.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise CodecError(f"tokens {start} to {stop} of {self.tokens}")
        pages, at = [], 0
        for page in self.pages:
            first, last = max(start - at, 0), min(stop - at, page.tokens)
            at += page.tokens
            if first < last:
                pages.append(_crop(self.codec, page, first, last))
        return self._with(pages)

    def select_tokens(self, tokens: Sequence[int]) -> PackedArray:
        """Only these tokens, in this order. Every run of neighbours becomes a page of its own, with its metadata.

        Raises:
            CodecError: a token is not inside the array, or a run cuts a page that can only be kept whole.
        """
        runs: list[list[int]] = []
        for token in map(operator.index, tokens):
            if not 0 <= token < self.tokens:
                raise CodecError(f"token {token} of {self.tokens}")
            if runs and token == runs[-1][1]:
                runs[-1][1] += 1
            else:
                runs.append([token, token + 1])
        return self._with(page for first, last in runs for page in self.crop(first, last).pages)

    def select_heads(self, heads: Sequence[int]) -> PackedArray:
        """Only these heads, in this order; a head may come twice. All bytes kept are copied.

        Raises:
            CodecError: no head, no such head, or pages that can only be kept whole.
        """
        chosen = [operator.index(head) for head in heads]
        if not chosen or not all(0 <= head < self.heads for head in chosen):
            raise CodecError(f"heads {chosen} of {self.heads}")
        codec = self.codec.for_heads(chosen)
        pages = []
        for page in self.pages:
            streams = self.codec.take_heads(page.streams, page.shape, chosen)
            left = PackedPage(streams, page.shape.with_heads(len(chosen)), page.skip)
            pages.append(_crop(codec, left, 0, left.tokens))  # chunks may be narrower: those that only skip can go
        return PackedArray(codec, len(chosen), self.head_size, pages, page_tokens=self.page_tokens)

    def first_streams(self, streams: int) -> PackedArray:
        """Without the streams behind the first so many: anchors alone, for example. Copies nothing."""
        if streams < 1:
            raise CodecError(f"{streams} streams of a page: at least stream 0 stays")
        return self._with(replace(page, streams=page.streams[:streams]) for page in self.pages)

    def concatenate(self, *others: PackedArray) -> PackedArray:
        """The tokens of this array, then those of the others. Copies nothing.

        Raises:
            CodecError: they differ in codec, parameters, heads or head size.
        """
        for other in others:
            mine, its = ((one.codec.name, one.codec.params(), one.heads, one.head_size) for one in (self, other))
            if mine != its:
                raise CodecError(f"cannot join arrays of (codec, parameters, heads, head size) {mine} and {its}")
        return self._with(page for array in (self, *others) for page in array.pages)

    def append(self, values: NDArray[Any], *, raw_tail: int = 0) -> PackedArray:
        """Encode new tokens, [tokens, heads, head size], behind those that are there; these are not touched.

        The last `raw_tail` of the new tokens stay raw. New tokens get pages of their own, since a page's minimum and
        range are those of the tokens it was encoded with. Where all new tokens are raw, or the codec is `bf16`, the
        last page takes them until it is full, which copies its bytes but adds no header.

        Raises:
            CodecError, NonFiniteError, TypeError: as `Codec.encode`.
        """
        if values.ndim != 3 or values.shape[1:] != (self.heads, self.head_size):
            raise CodecError(
                f"cannot append an array of shape {values.shape} to {self.heads} heads of {self.head_size}"
            )
        pages = list(self.pages)
        room = self.page_tokens - pages[-1].shape.tokens if pages else 0
        count = min(room, len(values))
        if count > 0 and (raw_tail >= len(values) or self.codec.grid_tokens == 1):
            last = pages[-1]
            more = PageShape(count, self.heads, self.head_size, 0, count)
            added = _encode(self.codec, values[:count], more)
            grown = self.codec.add_raw(last.streams, last.shape, added, more)
            if grown is not None:
                pages[-1] = PackedPage(grown, last.shape.with_raw(count), last.skip)
                values = values[count:]
        new = PackedArray.encode(self.codec, values, page_tokens=self.page_tokens, raw_tail=raw_tail)
        return self._with((*pages, *new.pages))

    def _with(self, pages: Iterable[PackedPage]) -> PackedArray:
        return PackedArray(self.codec, self.heads, self.head_size, pages, page_tokens=self.page_tokens)


class PackedCache:
    """Packed arrays of all layers and of one or more sequences, such as beams.

    Args:
        arrays: (layer, "key" or "value") to one array for each sequence. Arrays may have codecs of their own; those of
            one sequence have the same number of tokens.
    """

    __slots__ = ("arrays", "sequences")

    def __init__(self, arrays: Mapping[tuple[int, str], Sequence[PackedArray]]) -> None:
        self.arrays = {place: tuple(sequences) for place, sequences in arrays.items()}
        counts = {tuple(array.tokens for array in sequences) for sequences in self.arrays.values()}
        if len(counts) > 1:
            raise CodecError(f"the arrays of a cache differ in tokens or sequences: {sorted(counts)}")
        self.sequences = len(next(iter(counts), ()))

    @classmethod
    def encode(
        cls,
        codec: Codec | Callable[[int, str], Codec],
        arrays: Mapping[tuple[int, str], NDArray[Any]],
        *,
        page_tokens: int = PAGE_TOKENS,
        raw_head: int = 0,
        raw_tail: int = 0,
        fine: Sequence[int] = (),
    ) -> PackedCache:
        """Encode one sequence: (layer, kind) to [tokens, heads, head size]. `codec` may be chosen by layer and kind."""
        packed = {}
        for (layer, kind), array in arrays.items():
            chosen = codec if isinstance(codec, Codec) else codec(layer, kind)
            one = PackedArray.encode(
                chosen, array, page_tokens=page_tokens, raw_head=raw_head, raw_tail=raw_tail, fine=fine
            )
            packed[layer, kind] = [one]
        return cls(packed)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(array.tokens for array in next(iter(self.arrays.values()), ()))

    @property
    def nbytes(self) -> int:
        """Encoded bytes of all sequences; pages that sequences share count once."""
        pages = {id(page.streams): page.nbytes for array in self._all() for page in array.pages}
        return sum(pages.values())

    def _all(self) -> Iterable[PackedArray]:
        return (array for sequences in self.arrays.values() for array in sequences)

    def decode(self, sequence: int = 0, *, dtype: DTypeLike = np.float32) -> dict[tuple[int, str], NDArray[Any]]:
        """The values of one sequence, by layer and kind."""
        self._check_sequences([sequence])
        return {place: sequences[sequence].decode(dtype=dtype) for place, sequences in self.arrays.items()}

    def crop(self, start: int, stop: int) -> PackedCache:
        """Only tokens [start, stop) of every sequence."""
        return self._map(lambda array: array.crop(start, stop))

    def select_tokens(self, tokens: Sequence[int]) -> PackedCache:
        """Only these tokens of every sequence, in this order."""
        return self._map(lambda array: array.select_tokens(tokens))

    def select_heads(self, heads: Sequence[int]) -> PackedCache:
        """Only these heads of every layer, in this order."""
        return self._map(lambda array: array.select_heads(heads))

    def first_streams(self, streams: int) -> PackedCache:
        """Without the streams behind the first so many."""
        return self._map(lambda array: array.first_streams(streams))

    def reorder(self, sequences: Sequence[int]) -> PackedCache:
        """These sequences, in this order, as a beam search asks for; one may come twice. Copies nothing."""
        chosen = [operator.index(one) for one in sequences]
        self._check_sequences(chosen)
        return PackedCache({place: [arrays[one] for one in chosen] for place, arrays in self.arrays.items()})

    def stack(self, *others: PackedCache) -> PackedCache:
        """The sequences of this cache, then those of the others. Copies nothing."""
        self._check_places(others)
        return PackedCache(
            {place: [one for cache in (self, *others) for one in cache.arrays[place]] for place in self.arrays}
        )

    def concatenate(self, *others: PackedCache) -> PackedCache:
        """Each sequence followed by the tokens of the same sequence of the others. Copies nothing."""
        self._check_places(others)
        if any(other.sequences != self.sequences for other in others):
            raise CodecError(f"caches of {self.sequences} and of other numbers of sequences cannot be joined")
        return PackedCache(
            {
                place: [
                    array.concatenate(*(other.arrays[place][number] for other in others))
                    for number, array in enumerate(arrays)
                ]
                for place, arrays in self.arrays.items()
            }
        )

    def append(self, values: Mapping[tuple[int, str], Sequence[NDArray[Any]]], *, raw_tail: int = 0) -> PackedCache:
        """Encode new tokens behind each sequence: (layer, kind) to one array [tokens, heads, head size] for each."""
        if values.keys() != self.arrays.keys() or any(len(new) != self.sequences for new in values.values()):
            raise CodecError(f"new tokens are needed for {len(self.arrays)} arrays of {self.sequences} sequences")
        return PackedCache(
            {
                place: [array.append(new, raw_tail=raw_tail) for array, new in zip(arrays, values[place], strict=True)]
                for place, arrays in self.arrays.items()
            }
        )

    def _map(self, operation: Callable[[PackedArray], PackedArray]) -> PackedCache:
        return PackedCache({place: [operation(array) for array in arrays] for place, arrays in self.arrays.items()})

    def _check_sequences(self, sequences: Sequence[int]) -> None:
        for one in sequences:
            if not 0 <= one < self.sequences:
                raise CodecError(f"sequence {one} of {self.sequences}")

    def _check_places(self, others: Sequence[PackedCache]) -> None:
        if any(other.arrays.keys() != self.arrays.keys() for other in others):
            raise CodecError("the caches differ in layers or kinds")


def _check_page_tokens(page_tokens: int) -> None:
    if not 1 <= page_tokens <= 0xFFFF:
        raise CodecError(f"page_tokens must be 1 to 65535, not {page_tokens}")


def _encode(
    codec: Codec, values: NDArray[Any], shape: PageShape, fine: NDArray[np.int64] | None = None
) -> tuple[bytes, ...]:
    outs = [memoryview(bytearray(size)) for size in codec.stream_bytes(shape, wide=True)]
    sizes = codec.encode(values, shape, outs, fine)
    return tuple(bytes(out[:size]) for out, size in zip(outs, sizes, strict=True))


def _crop(codec: Codec, page: PackedPage, first: int, last: int) -> PackedPage:
    """Tokens [first, last) of a page, as few bytes as the chunks allow."""
    start, stop = page.skip + first, page.skip + last
    grid = codec.grid_tokens
    begin = start - start % grid if grid and page.shape.cut(start, stop).coded_tokens else start
    if begin == 0 and stop == page.shape.tokens:
        return page if start == page.skip else replace(page, skip=start)
    fine = sum(begin <= token < stop for token in codec.fine_tokens(page.streams, page.shape))
    left = page.shape.cut(begin, stop, fine)
    return PackedPage(codec.cut_page(page.streams, page.shape, begin, left), left, start - begin)
