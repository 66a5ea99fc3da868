"""A transfer and the decoding on it as arithmetic: what measured parts say about models and links that are not here.

1. Pages are encoded, sent and decoded one behind the other. A stream is in place when the slowest of the three has
   passed over all bytes up to its end, the first page was encoded before, and the last one is decoded behind.
2. Tokens are drafted from when the first stream is in place until the last one is, `MAX_DRAFTS` at most; a pass takes
   longer meanwhile, since receiving needs a core and the interpreter, too. So many of the drafts stand as did for a
   recorded prompt: a time is computed for every prompt, and averaged.
3. One pass over the drafts verifies them and gives a token more; the rest is decoded plainly.

What a case is made of is measured where transfers were (`calibrate`) and stated for machines that are not here
(`predict`). perf.report shows the error on every setting that it measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lynx_net.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["MAX_DRAFTS", "Case", "relative_error", "streams_ready_s", "token_times_s"]

MAX_DRAFTS = 64
"""Of the decode loop, and of the paper's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One transfer.

    Attributes:
        stream_bytes: bytes of every stream, everything counted, in the order of sending; those behind the first may be
            empty (all tokens of a short cache are fine).
        values: numbers in the cache.
        pages: that it is cut into.
        rate_bps: of the link.
        latency_s: from the start of the transfer to the first byte at the receiver, with the handshake.
        encode_value_s, decode_value_s: seconds of coding a value, all streams together; of decoding one, per stream.
        pass_s: tokens of a forward pass -> its seconds, for some numbers; between them it is linear.
        receiving: as many times longer as a pass takes while streams behind the first one arrive.
        token_s: seconds of a pass over one token, which follow from `pass_s`.
    """

    stream_bytes: tuple[int, ...]
    values: int
    pages: int
    rate_bps: float
    latency_s: float
    encode_value_s: float
    decode_value_s: tuple[float, ...]
    pass_s: Mapping[int, float]
    receiving: float = 1.0
    token_s: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.stream_bytes or len(self.decode_value_s) != len(self.stream_bytes):
            raise LocalProtocolError("a case needs a stream, and seconds of decoding for every stream")
        numbers = (self.values, self.pages, self.rate_bps, self.stream_bytes[0], *self.pass_s.values())
        if (
            min(numbers) <= 0
            or min(*self.stream_bytes, self.latency_s, self.encode_value_s, *self.decode_value_s) < 0
            or not self.pass_s
            or self.receiving < 1
        ):
            raise LocalProtocolError(
                f"sizes, rate and passes of a case must be positive, its other times not negative: {self}"
            )
        object.__setattr__(self, "token_s", self.pass_of_s(1))  # needed for every token of thousands of cases

    def pass_of_s(self, tokens: int) -> float:
        """Seconds of a forward pass over so many tokens; beyond what was measured, as the last two go on."""
        at = sorted(self.pass_s)
        if tokens <= at[-1] or len(at) == 1:
            return float(np.interp(tokens, at, [self.pass_s[one] for one in at]))
        slope = (self.pass_s[at[-1]] - self.pass_s[at[-2]]) / (at[-1] - at[-2])
        return self.pass_s[at[-1]] + max(slope, 0.0) * (tokens - at[-1])

    def token_after_s(self, at_s: float, last_s: float) -> float:
        """When a token is there whose pass begins at `at_s`, if streams arrive until `last_s`."""
        slow_s = min(max(last_s - at_s, 0.0), self.token_s * self.receiving)
        return at_s + slow_s + self.token_s - slow_s / self.receiving


def streams_ready_s(case: Case) -> list[float]:
    """When each stream is in place, seconds from the start of the transfer."""
    encode_s = case.encode_value_s * case.values
    ready = []
    for stream in range(len(case.stream_bytes)):
        sent_s = 8 * sum(case.stream_bytes[: stream + 1]) / case.rate_bps
        decode_s = case.values * sum(case.decode_value_s[: stream + 1])
        last_page_s = case.values * case.decode_value_s[stream] / case.pages
        first_page_s = encode_s / case.pages
        ready.append(case.latency_s + first_page_s + max(sent_s, encode_s, decode_s) + last_page_s)
    return ready


def token_times_s(case: Case, stands: int, tokens: int, max_drafts: int = MAX_DRAFTS) -> list[float]:
    """When each of the first valid tokens is there, seconds from the start of the transfer.

    Args:
        stands: so many drafts stand, if so many are made.
        tokens: how many times are wanted.
        max_drafts: 0 decodes on the first stream alone, as if there were no other.
    """
    ready = streams_ready_s(case)
    anchor_s, last_s = ready[0], ready[-1]
    if len(ready) == 1 or not max_drafts:
        alone = []
        at_s = anchor_s
        for _ in range(tokens):
            at_s = case.token_after_s(at_s, last_s)
            alone.append(at_s)
        return alone
    drafts: list[float] = []
    at_s = anchor_s
    while at_s < last_s and len(drafts) < max_drafts:
        at_s = case.token_after_s(at_s, last_s)
        drafts.append(at_s)
    accepted = min(stands, len(drafts))
    verified_s = max(at_s, last_s) + case.pass_of_s(len(drafts) + 1)
    times = [*drafts[:accepted], *(verified_s + case.token_s * number for number in range(tokens - accepted))]
    return times[:tokens]


def relative_error(predicted_s: Sequence[float], measured_s: Sequence[float]) -> list[float]:
    """By how much of the measured times the predicted ones are off."""
    return [(guess - fact) / fact for guess, fact in zip(predicted_s, measured_s, strict=True)]
