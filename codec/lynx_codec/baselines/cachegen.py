"""CacheGen (Liu et al., SIGCOMM 2024), section 5.2: anchors, differences to them, bins, and an entropy coder.

The tokens of a page are cut into groups of ten. The first of a group, its anchor token, is stored in 8 bits; of the
others, the difference to the anchor is rounded to whole bins and entropy-coded, with a distribution for each channel.

Decisions, since a codec sees one page of one layer and no profile of the model:

- The bin width belongs to a layer in the paper (0.5, 1 and 1.5 for the first, middle and last third of the layers).
  Here `bin` is a parameter, in units of the root mean square of the differences, which is our reading of these numbers:
  it gives 2.7 to 2.9 bits a value on caches of SmolLM2 and Gemma 3 (the paper, with larger models: 3.5 to 4.3 times
  less than 8-bit integers, 1.9 to 2.3 bits). A transfer gives each layer its codec.
  `unit="page"` takes one root mean square for the page: channels of small variance then cost few bits, which is what
  the paper's distribution for each channel is there for. `unit="channel"` takes one for each channel.
- The distributions of the paper are profiled offline, for each channel and layer of a model. Here each channel names
  one of 84 distributions (cachegen_tables.py) in a byte, which is counted.
- Anchor tokens have a minimum and a scale for each token and head. Their codes are not entropy-coded: on the same
  caches that would save 0.04 to 0.12 bits a value, of which the tables of a tenth of the tokens would take 0.06.
- Differences are taken to the anchor as it is decoded, so that its rounding does not add to theirs.
- The coder is a range coder (rans.py) where the paper has an arithmetic coder; both come within a few bytes a page of
  what the distributions allow.

What section 5.3 adds, levels that adapt to the bandwidth, is no business of a codec. The published code of the authors
has no differences at all (issue 6 of UChi-JCL/CacheGen); this follows the paper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec.baselines import rans
from lynx_codec.baselines.cachegen_tables import ESCAPE, PEAK, TABLES, symbol_tables
from lynx_codec.baselines.common import CACHEGEN_ID, BaselineCodec, bounded_scale, read_fields, write_fields
from lynx_codec.baselines.groups import dequantise, quantise
from lynx_codec.errors import CodecError
from lynx_codec.limits import MAX_MAGNITUDE
from lynx_codec.reference import ReferenceEngine, widen

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from lynx_codec.base import PageShape
    from lynx_codec.engine import Engine

    F32 = NDArray[np.float32]
    U8 = NDArray[np.uint8]
    I32 = NDArray[np.int32]

__all__ = ["GROUP_TOKENS", "CacheGenCodec"]

GROUP_TOKENS = 10
"""Tokens of a group (section 5.2)."""

MAX_BINS = 32767
"""Differences are limited to that many bins, which only a bin far below the paper's could reach."""

COUNT_BYTES = 8
STORED = 0xFFFFFFFF
"""Count of words of a page whose differences are stored as 16-bit integers, since the coder made them longer."""

ESCAPE_COST = 16.0
WHOLE_HEAD = 1 << 16


class CacheGenCodec(BaselineCodec):
    """CacheGen's codec for one page. The stream has no fixed length: `stream_bytes` is an upper bound.

    Body: minimum and scale of every anchor token and head, their codes, bin widths, the table of each channel, two u32
    counts, 16-bit words of the coder, and as 16-bit integers the differences that are no symbol.
    """

    name = "cachegen"
    codec_id = CACHEGEN_ID
    variable_streams = frozenset({0})

    def __init__(self, load_engine: Callable[[], Engine], *, bin: float = 1.0, unit: str = "page") -> None:
        if isinstance(bin, bool) or not 2.0**-6 <= bin <= 64.0:
            raise CodecError(f"bin must be between 1/64 and 64, not {bin!r}")
        if unit not in ("page", "channel"):
            raise CodecError(f"unit must be 'page' or 'channel', not {unit!r}")
        self._bin, self._unit = float(np.float32(bin)), unit
        width = int(np.float32(bin).view(np.uint32))
        super().__init__(load_engine, (0, int(unit == "channel"), GROUP_TOKENS, width))

    @property
    def _compiled(self) -> bool:
        return not isinstance(self._engine, ReferenceEngine)

    def params(self) -> dict[str, Any]:
        return {"bin": self._bin, "unit": self._unit}

    def warm_up(self) -> None:
        """Compile the coder and what handles raw tokens, or load them from numba's cache, and make the tables."""
        super().warm_up()
        one = self._code(np.full((1, 1), PEAK, np.uint8), np.zeros(1, np.int64), 4)
        assert one is not None
        self._read_symbols(one, np.zeros(1, np.int64), 1)

    # --- layout ------------------------------------------------------------------------------------------------------

    def _slot_bytes(self, shape: PageShape) -> int:
        return shape.channels if self._unit == "channel" else 1

    @staticmethod
    def _anchors(shape: PageShape) -> int:
        return -(-shape.coded_tokens // GROUP_TOKENS)

    def _fixed_bytes(self, shape: PageShape) -> int:
        """Bytes of the body without words and escapes."""
        anchors = self._anchors(shape) * (4 * shape.heads + shape.channels)
        return anchors + 2 * self._slot_bytes(shape) + shape.channels + COUNT_BYTES

    def _body_bytes(self, shape: PageShape) -> int:
        return self._fixed_bytes(shape) + 2 * (shape.coded_tokens - self._anchors(shape)) * shape.channels

    # --- encode ------------------------------------------------------------------------------------------------------

    def _encode_body(self, rows: F32, shape: PageShape, out: U8) -> int:
        tokens, heads, size = rows.shape
        low, scale, codes = quantise(rows[::GROUP_TOKENS], 2, WHOLE_HEAD, 8)
        anchors = dequantise(widen(low), widen(scale), codes, 2, WHOLE_HEAD, 8)
        others = np.arange(tokens) % GROUP_TOKENS != 0
        # float64: squares of large differences do not fit float32.
        delta = rows[others].astype(np.float64) - np.repeat(anchors, GROUP_TOKENS, axis=0)[:tokens][others]
        delta = delta.reshape(-1, heads * size)
        width = self._width(delta)
        length = widen(width).astype(np.float64)
        steps = np.zeros_like(delta)
        np.divide(delta, length, out=steps, where=length != 0)
        bins = np.clip(np.rint(steps), -MAX_BINS, MAX_BINS).astype(np.int32)

        symbols, tables = self._symbols(bins)
        at = write_fields(out, 0, low, scale)
        out[at : at + codes.size] = codes.reshape(-1)
        at = write_fields(out, at + codes.size, width)
        out[at : at + tables.size] = tables
        at += tables.size
        escapes = bins[symbols == ESCAPE]
        room = bins.size - escapes.size
        words = self._code(symbols, tables, room) if bins.size else np.zeros(0, np.uint16)
        if words is None:
            counts, words, escapes = (STORED, 0), np.zeros(0, np.uint16), bins.reshape(-1)
        else:
            counts = (words.size, escapes.size)
        out[at : at + COUNT_BYTES] = np.array(counts, "<u4").view(np.uint8)
        return write_fields(out, at + COUNT_BYTES, words, escapes.astype(np.int16).view(np.uint16))

    def _width(self, delta: NDArray[np.float64]) -> NDArray[np.uint16]:
        """bfloat16 bits of the bin widths, one or one for each channel."""
        if not len(delta):
            return np.zeros(delta.shape[1] if self._unit == "channel" else 1, np.uint16)
        axis = 0 if self._unit == "channel" else None
        width = self._bin * np.sqrt(np.mean(delta * delta, axis=axis))
        return bounded_scale(np.minimum(np.atleast_1d(width), float(MAX_MAGNITUDE)).astype(np.float32))

    @staticmethod
    def _symbols(bins: I32) -> tuple[U8, U8]:
        """The symbol of every difference and the table of every channel that makes its symbols shortest."""
        channels = bins.shape[1]
        within = np.abs(bins) <= PEAK
        symbols = np.where(within, bins + PEAK, ESCAPE).astype(np.uint8)
        flat = symbols.astype(np.int64) + np.arange(channels) * rans.ALPHABET
        counts = np.bincount(flat.reshape(-1), minlength=channels * rans.ALPHABET).reshape(channels, rans.ALPHABET)
        tables = symbol_tables()
        escape = tables.cost[ESCAPE] + ESCAPE_COST
        cost = np.where(np.isfinite(tables.cost), tables.cost, escape)
        cost[ESCAPE] = escape
        used = np.flatnonzero(counts.any(axis=0))
        # einsum and not a matrix product: a codec starts no threads, and sums must not depend on their number.
        bits = np.einsum("cs,st->ct", counts[:, used].astype(np.float64), cost[used])
        chosen = bits.argmin(axis=1).astype(np.uint8)
        homeless = ~np.isfinite(tables.cost[symbols, chosen])
        return np.where(homeless, np.uint8(ESCAPE), symbols), chosen

    def _code(self, symbols: U8, tables: NDArray[Any], room: int) -> NDArray[np.uint16] | None:
        """Words of the coder, or None if they are more than `room`."""
        known = symbol_tables()
        flat, chosen = symbols.reshape(-1).astype(np.int64), tables.astype(np.int64)
        if self._compiled:
            from lynx_codec.baselines import rans_compiled

            words = np.zeros(room, np.int64)
            first = rans_compiled.encode_words(flat, chosen, known.frequencies, known.starts, words)
        else:
            plain = [0] * room
            frequencies, starts = known.frequencies.tolist(), known.starts.tolist()
            first = rans.encode_words(flat.tolist(), chosen.tolist(), frequencies, starts, plain)
            words = np.array(plain, np.int64)
        return None if first == rans.BAD else words[first:].astype(np.uint16)

    # --- decode ------------------------------------------------------------------------------------------------------

    def _decode_body(self, body: U8, shape: PageShape) -> F32:
        count, tokens = self._anchors(shape), shape.coded_tokens
        if body.size < self._fixed_bytes(shape):
            raise CodecError(f"{body.size} bytes of anchors and tables, they take {self._fixed_bytes(shape)}")
        fields = (count, shape.heads, 1)
        low, at = read_fields(body, 0, fields)
        scale, at = read_fields(body, at, fields)
        codes = body[at : at + count * shape.channels].reshape(count, shape.heads, shape.head_size)
        anchors = dequantise(low, scale, codes, 2, WHOLE_HEAD, 8)
        width, at = read_fields(body, at + codes.size, (self._slot_bytes(shape),))
        if bool((width < 0).any()):
            raise CodecError("a bin width is negative")
        tables = body[at : at + shape.channels]
        if int(tables.max()) >= TABLES:
            raise CodecError(f"a channel names table {int(tables.max())}, there are {TABLES}")
        bins = self._read_bins(body[at + shape.channels :], tables, tokens - count)
        rows = np.repeat(anchors, GROUP_TOKENS, axis=0)[:tokens]
        others = np.arange(tokens) % GROUP_TOKENS != 0
        with np.errstate(over="ignore"):
            delta = bins.astype(np.float32) * width
            rows[others] += delta.reshape(-1, shape.heads, shape.head_size)
        return rows

    def _read_bins(self, data: U8, tables: U8, tokens: int) -> I32:
        """Differences in bins, [tokens, channels]; `data` are the counts and what follows them."""
        words, escapes = (int(n) for n in data[:COUNT_BYTES].copy().view("<u4"))
        values = tokens * tables.size
        stored = words == STORED
        expected = 2 * (values if stored else words + escapes)
        if data.size - COUNT_BYTES != expected or (stored and escapes) or escapes > values:
            raise CodecError(f"{data.size - COUNT_BYTES} bytes of differences, the counts say {expected}")
        numbers = data[COUNT_BYTES:].copy().view("<u2").astype(np.uint16)
        if stored or not values:
            if words and not stored:
                raise CodecError("words of the coder in a page without differences")
            return numbers.view(np.int16).astype(np.int32).reshape(tokens, tables.size)
        symbols = self._read_symbols(numbers[:words], tables.astype(np.int64), values)
        bins = symbols.astype(np.int32) - PEAK
        escaped = symbols == ESCAPE
        if int(escaped.sum()) != escapes:
            raise CodecError(f"{int(escaped.sum())} differences are no symbol, {escapes} were sent")
        bins[escaped] = numbers[words:].view(np.int16)
        return bins.reshape(tokens, tables.size)

    def _read_symbols(self, words: NDArray[np.uint16], tables: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        known = symbol_tables()
        wide = words.astype(np.int64)
        if self._compiled:
            from lynx_codec.baselines import rans_compiled

            symbols = np.zeros(count, np.int64)
            status = rans_compiled.decode_words(wide, tables, known.frequencies, known.starts, known.slots, symbols)
        else:
            plain = [0] * count
            status = rans.decode_words(
                wide.tolist(),
                tables.tolist(),
                known.frequencies.tolist(),
                known.starts.tolist(),
                known.slots.tolist(),
                plain,
            )
            symbols = np.array(plain, np.int64)
        if status == rans.BAD:
            raise CodecError("the words of the coder are not a valid page")
        return symbols
