"""Which split of the nested codec fits a link: the one whose k-th valid token is expected first.

The model, checked against the real transport in `perf/splits.py` and described in docs/splits.md:

1. Stream i of a cache is in when the bytes of streams 0 to i have passed at the link's rate.
2. The receiver drafts, a token each `decode_token_s`, from the moment stream 0 is in until the last stream is, at most
   `max_drafts`. A draft is made on the bits that are in when it begins.
3. Draft number j stands, if all before it stand, with a probability that depends on those bits and on j (`SURVIVAL`).
4. Then one pass of `verify_s` confirms the drafts before the first that falls, and yields one token more; the rest is
   decoded plainly. A draft that stands counts from the time when it was made, as in `speculation.Done`.

Coding takes no time in it, and neither do handshake and round trips: they are much the same for all splits.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from lynx_codec import get_codec
from lynx_net.errors import CodecError, LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lynx_codec import Codec
    from lynx_net.wire.layout import CacheLayout

__all__ = [
    "AUTO",
    "DEFAULT_DECODE_TOKEN_S",
    "DEFAULT_RATE_BPS",
    "SPLITS",
    "SURVIVAL",
    "Situation",
    "auto_params",
    "choose_split",
    "expected_time_s",
    "stream_totals",
    "survival",
]

AUTO = "auto"
"""Name of the codec that is `nested` with the split that fits."""

SPLITS: tuple[tuple[int, ...], ...] = ((2, 2, 4), (3, 5), (4, 4), (6, 2), (8,))
"""Splits that are chosen from."""

DEFAULT_RATE_BPS = 10e9
"""Assumed of a link that has not moved much yet and has no rate configured."""

DEFAULT_DECODE_TOKEN_S = 0.03
"""Assumed where nobody says how long the receiver decodes at a token."""

SURVIVAL: Mapping[int, tuple[float, float]] = {
    1: (0.80, 0.97),
    2: (0.896, 0.987),
    3: (0.953, 0.990),
    4: (0.968, 0.994),
    5: (0.983, 0.9945),
    6: (0.995, 0.995),
    7: (0.998, 0.998),
    8: (1.0, 1.0),
}
"""Known bits: how likely a draft stands if all before it stand, of the first `EARLY_DRAFTS` and of later ones.

Measured for 2 to 6 bits on 24 chat prompts of 1,024 tokens (docs/splits.md), the others extended from them.
"""

EARLY_DRAFTS = 16
"""Prompts differ: who gets past the first drafts keeps most of the others."""


def survival(bits: int, number: int, table: Mapping[int, tuple[float, float]] = SURVIVAL) -> float:
    """Probability that draft `number`, from 0, made on so many known bits stands if all before it stand."""
    return table[bits][number >= EARLY_DRAFTS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the expected time depends on, besides the sizes of the streams.

    Attributes:
        rate_bps: payload bits a second of the link.
        decode_token_s: seconds of a forward pass over one token at the receiver.
        verify_s: seconds of the pass that verifies; None is as long as that over one token.
        tokens: whose time is to be least: the k-th valid one.
        max_drafts: of the decode loop.
    """

    rate_bps: float
    decode_token_s: float
    verify_s: float | None = None
    tokens: int = 32
    max_drafts: int = 64

    def __post_init__(self) -> None:
        times = (self.rate_bps, self.decode_token_s, self.decode_token_s if self.verify_s is None else self.verify_s)
        if not all(isinstance(one, int | float) and math.isfinite(one) and one > 0 for one in times):
            raise LocalProtocolError(f"rate_bps, decode_token_s and verify_s must be positive numbers: {self}")
        if type(self.tokens) is not int or type(self.max_drafts) is not int or self.tokens < 1 or self.max_drafts < 0:
            raise LocalProtocolError(f"tokens must be 1 or more, max_drafts 0 or more: {self}")


def stream_totals(codec: Codec, layout: CacheLayout) -> list[int]:
    """Bytes of every stream of a cache, if no page escapes to wide metadata; bounds where sizes depend on values."""
    if not layout.page_count:
        return [0] * len(codec.stream_names)
    pages = [codec.stream_bytes(layout.page(index).shape) for index in layout.layer_pages(0)]
    return [layout.layers * sum(sizes) for sizes in zip(*pages, strict=True)]


def expected_time_s(
    bits: Sequence[int],
    stream_bytes: Sequence[int],
    situation: Situation,
    table: Mapping[int, tuple[float, float]] = SURVIVAL,
) -> float:
    """Expected seconds from the first byte to the k-th valid token.

    Args:
        bits: of each stream.
        stream_bytes: bytes of each of these streams for the whole cache.
        situation: of the link and the receiver.
        table: probabilities like `SURVIVAL`.
    """
    token_s = situation.decode_token_s
    verify_s = token_s if situation.verify_s is None else situation.verify_s
    wanted = situation.tokens
    ready_s = [sum(stream_bytes[: i + 1]) * 8 / situation.rate_bps for i in range(len(bits))]
    known = list(itertools.accumulate(bits))
    at_s, stands, expected_s = ready_s[0], 1.0, 0.0
    stood: list[float] = []
    fell: list[float] = []
    while at_s < ready_s[-1] and len(stood) < min(situation.max_drafts, wanted):
        usable = max(i for i, ready in enumerate(ready_s) if ready <= at_s)
        stay = stands * survival(known[usable], len(stood), table)
        fell.append(stands - stay)
        stands = stay
        at_s += token_s
        stood.append(at_s)
    verified_s = max(at_s, ready_s[-1]) + (verify_s if stood else 0.0)
    for accepted, share in enumerate([*fell, stands]):
        if accepted >= wanted:
            expected_s += share * stood[wanted - 1]
        else:
            confirmed = accepted + 1 if stood else 0
            expected_s += share * (verified_s + (wanted - confirmed) * token_s)
    return expected_s


def choose_split(
    sizes: Mapping[tuple[int, ...], Sequence[int]],
    situation: Situation,
    table: Mapping[int, tuple[float, float]] = SURVIVAL,
) -> tuple[int, ...]:
    """The split of least expected time; of equal ones, the one that is given first.

    Args:
        sizes: the splits to choose from, each with the bytes of its streams for the whole cache.
        situation: of the link and the receiver.
        table: probabilities like `SURVIVAL`.
    """
    return min(sizes, key=lambda bits: expected_time_s(bits, sizes[bits], situation, table))


def auto_params(
    layout: CacheLayout, params: Mapping[str, Any], *, rate_bps: float, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Parameters of the `nested` codec with the split that fits.

    Args:
        layout: of the cache.
        params: fields of `Situation` in any number, and parameters of `nested` other than `bits`.
        rate_bps: of the link, if `params` does not say.
        asked: what came with the receiver's request; its `decode_token_s` is used if `params` has none.

    Raises:
        CodecError: an unknown parameter, or one of `nested` that is out of range.
        LocalProtocolError: a field of the situation that is out of range.
    """
    names = [field.name for field in fields(Situation)]
    asked_s = asked.get("decode_token_s")
    if isinstance(asked_s, bool) or not isinstance(asked_s, int | float) or not 0 < asked_s < math.inf:
        asked_s = DEFAULT_DECODE_TOKEN_S  # a peer's nonsense is no error of ours
    given = {"rate_bps": rate_bps, "decode_token_s": asked_s}
    situation = Situation(**{**given, **{name: params[name] for name in names if name in params}})
    rest = {name: value for name, value in params.items() if name not in names}
    if "bits" in rest:
        raise CodecError(f"codec {AUTO} chooses bits itself; give codec nested to choose them")
    codecs = {bits: get_codec("nested", **rest, bits=list(bits)) for bits in SPLITS}
    sizes = {bits: stream_totals(codec, layout)[: len(bits)] for bits, codec in codecs.items()}
    return codecs[choose_split(sizes, situation)].params()
