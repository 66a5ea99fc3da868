"""What a KV cache looks like, and how it is cut into numbered pages."""

from __future__ import annotations

import bisect
import itertools
import operator
import struct
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from lynx_codec.base import PAGE_TOKENS, PageShape
from lynx_net.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["KINDS", "CacheLayout", "Kind", "PageRef", "WaitingOrder"]

Kind = Literal["key", "value"]
KINDS: tuple[Kind, Kind] = ("key", "value")

_DTYPES = ("float32", "float16", "bfloat16")
MAX_LAYERS = 4096
MAX_TOKENS = (1 << 32) - 1
MAX_PAGES = 1 << 22
MAX_PAGE_VALUES = 1 << 28
"""A stream of a page has its size in 32 bits."""


@dataclass(frozen=True, slots=True)
class PageRef:
    """One page of a cache: tokens `start` to `stop` of the keys or the values of one layer."""

    index: int
    layer: int
    kind: Kind
    start: int
    stop: int
    shape: PageShape


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Shape of one KV cache and how it is cut into pages.

    Attributes:
        layers: layers of the model, may be 0, at most 4096.
        tokens: tokens in the cache, may be 0.
        heads: KV heads of a layer.
        key_size, value_size: values per head and token in the keys, in the values; 0 where a
            layer has none (latent attention keeps one array only).
        dtype: of the cache at the sender: "float32", "float16" or "bfloat16".
        page_tokens: tokens of a full page; the last page of a layer may hold fewer.
        raw_head, raw_tail: the first and the last tokens of the cache, which travel as 16-bit
            floats in stream 0.
        fine: how many tokens of each page of an array are fine, that is, have all their bits in stream 0; the same
            in all arrays, empty if no token is. `with_fine` makes it.
    """

    layers: int
    tokens: int
    heads: int
    key_size: int
    value_size: int
    dtype: str = "float32"
    page_tokens: int = PAGE_TOKENS
    raw_head: int = 4
    raw_tail: int = 0
    fine: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers = _numbers(self)
        if set(map(type, numbers)) != {int} or min(numbers) < 0:
            for name, value in zip(_NUMBERS, numbers, strict=True):
                if type(value) is not int or value < 0:
                    raise LocalProtocolError(f"layout: {name} must be a non-negative integer, not {value!r}")
        if self.dtype not in _DTYPES:
            raise LocalProtocolError(f"layout: dtype must be one of {', '.join(_DTYPES)}, not {self.dtype!r}")
        if not 1 <= self.page_tokens <= 0xFFFF:
            raise LocalProtocolError(f"layout: page_tokens must be 1 to 65535, not {self.page_tokens}")
        if max(self.heads, self.key_size, self.value_size) > 0xFFFF or self.heads == 0:
            raise LocalProtocolError("layout: heads must be 1 to 65535, key_size and value_size at most 65535")
        # The limits hold for empty caches too: a peer must not make us count its layers when it sends nothing.
        if self.layers > MAX_LAYERS:
            raise LocalProtocolError(f"layout: {self.layers} layers, more than {MAX_LAYERS}")
        if max(self.tokens, self.raw_head, self.raw_tail) > MAX_TOKENS:
            raise LocalProtocolError(f"layout: tokens, raw_head and raw_tail must be at most {MAX_TOKENS}")
        if self.page_count > MAX_PAGES:
            raise LocalProtocolError(f"layout: {self.page_count} pages, more than {MAX_PAGES}")
        self._check_fine()
        page_values = min(self.tokens, self.page_tokens) * self.heads * max(self.key_size, self.value_size)
        if page_values > MAX_PAGE_VALUES:
            raise LocalProtocolError(f"layout: a page of {page_values} values, more than {MAX_PAGE_VALUES}")

    def _check_fine(self) -> None:
        if not isinstance(self.fine, tuple) or len(self.fine) not in (0, self.pages_per_array):
            raise LocalProtocolError(
                f"layout: fine must have a number for each of {self.pages_per_array} pages, or none"
            )
        for position, count in enumerate(self.fine):
            start, stop, raw_head, raw_tail = self._cut(position)
            if type(count) is not int or not 0 <= count <= stop - start - raw_head - raw_tail:
                raise LocalProtocolError(
                    f"layout: page {position} of an array cannot have {count!r} fine tokens: "
                    f"{stop - start} tokens, {raw_head + raw_tail} of them raw"
                )

    @property
    def pages_per_array(self) -> int:
        """Pages of the keys (or the values) of one layer."""
        return -(-self.tokens // self.page_tokens)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The arrays a layer has, in the order in which their pages are numbered."""
        if self.key_size:
            return KINDS if self.value_size else KINDS[:1]
        return KINDS[1:] if self.value_size else ()

    @property
    def page_count(self) -> int:
        """Pages of the whole cache."""
        return self.layers * ((self.key_size > 0) + (self.value_size > 0)) * -(-self.tokens // self.page_tokens)

    @property
    def values(self) -> int:
        """Numbers in the cache."""
        return self.layers * self.tokens * self.heads * (self.key_size + self.value_size)

    def size_of(self, kind: Kind) -> int:
        """Values per head and token in the keys or in the values."""
        return self.key_size if kind == "key" else self.value_size

    def array_shape(self, kind: Kind) -> tuple[int, int, int]:
        """Shape of the keys or the values of one layer: (tokens, heads, size)."""
        return (self.tokens, self.heads, self.size_of(kind))

    def page(self, index: int) -> PageRef:
        """The page with this number; pages are numbered layer by layer, keys before values, by token."""
        if not 0 <= index < self.page_count:
            raise LocalProtocolError(f"page {index} of a cache with {self.page_count} pages")
        array, position = divmod(index, self.pages_per_array)
        layer, which = divmod(array, len(self.kinds))
        kind = self.kinds[which]
        start, stop, raw_head, raw_tail = self._cut(position)
        fine = self.fine[position] if self.fine else 0
        shape = PageShape(stop - start, self.heads, self.size_of(kind), raw_head, raw_tail, fine)
        return PageRef(index, layer, kind, start, stop, shape)

    def first_layer(self) -> list[PageRef]:
        """The pages of layer 0, at a fraction of what `page` costs; those of the other layers lie alike."""
        if not self.layers:
            return []
        cuts = [self._cut(position) for position in range(self.pages_per_array)]
        fine = self.fine or (0,) * len(cuts)
        shapes: dict[tuple[int, ...], PageShape] = {}
        pages: list[PageRef] = []
        for kind in self.kinds:
            for (start, stop, raw_head, raw_tail), of_page in zip(cuts, fine, strict=True):
                like = (stop - start, self.heads, self.size_of(kind), raw_head, raw_tail, of_page)
                shape = shapes.get(like) or shapes.setdefault(like, PageShape(*like))
                pages.append(PageRef(len(pages), 0, kind, start, stop, shape))
        return pages

    def unlike_pages(self) -> list[PageRef]:
        """One page of layer 0 of each kind and shape that there is; looks at few pages where none are fine."""
        if not self.page_count:
            return []
        count = self.pages_per_array
        pages: Iterable[PageRef]
        if self.fine:
            pages = self.first_layer()
        else:  # all pages between the raw tokens of both ends are alike
            behind_head = -(-self.raw_head // self.page_tokens)
            tail = max(self.tokens - self.raw_tail, 0) // self.page_tokens
            positions = {*range(min(behind_head + 1, count)), *range(min(tail, count - 1), count)}
            pages = [self.page(first + at) for first in range(0, len(self.kinds) * count, count) for at in positions]
        unlike: dict[tuple[Kind, PageShape], PageRef] = {}
        for page in pages:
            unlike.setdefault((page.kind, page.shape), page)
        return list(unlike.values())

    def _cut(self, position: int) -> tuple[int, int, int, int]:
        """First token, token behind the last, and raw tokens at both ends of a page of an array."""
        start = position * self.page_tokens
        stop = min(start + self.page_tokens, self.tokens)
        raw_head = min(max(self.raw_head - start, 0), stop - start)
        raw_tail = min(max(stop - max(self.tokens - self.raw_tail, 0), 0), stop - start - raw_head)
        return start, stop, raw_head, raw_tail

    def with_fine(self, tokens: Sequence[int]) -> CacheLayout:
        """This layout with these fine tokens of the cache: increasing, and none of them raw.

        Raises:
            LocalProtocolError: naming what is wrong with them.
        """
        coded = range(min(self.raw_head, self.tokens), max(self.tokens - self.raw_tail, 0))
        # There may be many thousands of them, before the first byte is sent. If they increase, both ends tell of all.
        if not (all(one in coded for one in (*tokens[:1], *tokens[-1:])) and all(map(operator.lt, tokens, tokens[1:]))):
            pairs = zip((-1, *tokens), tokens, strict=False)
            before, token = next(pair for pair in pairs if pair[1] <= pair[0] or pair[1] not in coded)
            raise LocalProtocolError(f"fine tokens must increase and not be raw: {token} after {before}")
        ends = [bisect.bisect_left(tokens, page * self.page_tokens) for page in range(self.pages_per_array + 1)]
        counts = tuple(end - begin for begin, end in itertools.pairwise(ends))
        return replace(self, fine=counts if tokens else ())

    def layer_pages(self, layer: int) -> range:
        """Numbers of the pages of one layer."""
        per_layer = len(self.kinds) * self.pages_per_array
        return range(layer * per_layer, (layer + 1) * per_layer)

    def pages(self) -> Iterator[PageRef]:
        """All pages in order."""
        return (self.page(index) for index in range(self.page_count))

    def to_wire(self) -> dict[str, Any]:
        """The layout as a map for a control message."""
        data: dict[str, Any] = dict(zip(_FIELDS, _values(self), strict=True))
        data["fine"] = struct.pack(f"<{len(self.fine)}H", *self.fine)
        return data

    @classmethod
    def from_wire(cls, data: object) -> CacheLayout:
        """Build a layout from a peer's map; raises LocalProtocolError where it is not one."""
        if not isinstance(data, dict) or data.keys() != _FIELD_SET:
            raise LocalProtocolError("layout: the fields differ from those of this version")
        fine = data["fine"]
        if not isinstance(fine, bytes) or len(fine) % 2:
            raise LocalProtocolError("layout: fine must be bytes, two for each page of an array")
        return cls(**{**data, "fine": struct.unpack(f"<{len(fine) // 2}H", fine)})


class WaitingOrder:
    """Order in which later streams of pages go that wait to be sent: keys first, late layers first, late tokens first.

    With half of them in place, drafts gain far more than in the order of the layers (docs/splits.md).
    """

    __slots__ = ("_kinds", "_last", "_per_array", "_per_kind")

    def __init__(self, layout: CacheLayout) -> None:
        self._kinds = len(layout.kinds)
        self._per_array = layout.pages_per_array
        self._per_kind = layout.layers * self._per_array
        self._last = self._per_kind - 1

    def page(self, place: int) -> int:
        """Number of the page that so many go before."""
        kind, behind = divmod(place, self._per_kind)
        layer, position = divmod(self._last - behind, self._per_array)
        return (layer * self._kinds + kind) * self._per_array + position

    def place(self, page: int) -> int:
        """How many go before this page."""
        array, position = divmod(page, self._per_array)
        layer, kind = divmod(array, self._kinds)
        return kind * self._per_kind + self._last - (layer * self._per_array + position)


_FIELDS = tuple(field.name for field in fields(CacheLayout))
_NUMBERS = tuple(name for name in _FIELDS if name not in ("dtype", "fine"))
_FIELD_SET = frozenset(_FIELDS)
_values = operator.attrgetter(*_FIELDS)
_numbers = operator.attrgetter(*_NUMBERS)
