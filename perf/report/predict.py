"""What the simulator is given: measured parts for the settings of this machine, and stated ones for others."""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec import PageShape
from lynx_net.wire.layout import CacheLayout
from perf.report.figure import only, values
from perf.report.series import SERIES
from perf.report.simulator import MAX_DRAFTS, Case, token_times_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from perf.quality_codecs import Subject
    from perf.report.figure import Record
    from perf.report.measure_quality import Codings

__all__ = ["ELSEWHERE", "assumptions", "checked", "codec_speeds", "predicted"]

LATENCY_S = 0.001
"""Offer, answer and hand-overs of a transfer on loopback (`python -m perf.small`)."""

PAGE_TOKENS = 256
LENGTHS = tuple(1 << power for power in range(14, 21))
RATES_BPS = (10e9, 25e9, 50e9, 100e9, 200e9, 400e9)
SHOWN = ("bf16", "int8", "int4", "lynx", "lynx_anchor", "default")
"""CacheGen-style sizes depend on the values, so they are not predicted."""

_ROUNDS = 9
_DEVICES, _DEVICE_BYTES_S, _REACHED, _CORES = 8, 4.8e12, 0.6, 32
_SIZED_AT = 16384
"""Bits a value are the same at all greater lengths."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A model that is not here: shape of its cache, and parameters that a token passes through."""

    layers: int
    heads: int
    size: int
    active: float


ELSEWHERE: Mapping[str, Elsewhere] = {
    "Qwen3 32B": Elsewhere(64, 8, 128, 32.8e9),
    "Llama 3.1 70B": Elsewhere(80, 8, 128, 70.6e9),
    "Qwen3 235B-A22B": Elsewhere(94, 4, 128, 22e9),
}


def assumptions() -> str:
    """What is assumed of the machines that are not here."""
    return (
        f"Assumed: {_DEVICES} devices decode, each reading {_DEVICE_BYTES_S / 1e12:g} TB/s, of which {_REACHED:.0%} "
        "is reached; a token costs one reading of the active parameters and of the cache in 16 bits. Codecs run on "
        f"{_CORES} cores at the speed measured here on one. How many drafts stand is what was recorded for the two "
        "small models here; larger ones are surer of themselves."
    )


def codec_speeds(subject: Subject, cache: Codings, tokens: int) -> dict[str, Any]:
    """Seconds of coding and decoding one value on one core, keys and values averaged; decoding per stream.

    Args:
        cache: real values: how many bits some codecs make of them is a matter of the values.
        tokens: length of the caches that are spoken of; as many of their tokens are fine as with this length.
    """
    from perf.quality_capture import widen

    layers = cache.layout.layers
    layout = dataclasses.replace(cache.layout, tokens=tokens)
    share = len(subject.fine_tokens(layout, None)) / tokens
    shape = PageShape(PAGE_TOKENS, layout.heads, layout.key_size, fine=round(share * PAGE_TOKENS))
    fine = np.linspace(0, PAGE_TOKENS - 1, shape.fine).round().astype(np.int64)
    encode, decode = [], []
    for kind, stored in (("key", cache.keys), ("value", cache.values)):
        for layer in sorted({0, layers // 2, layers - 1}):
            codec = subject.codec_of(kind, layer, layers)
            page = widen(stored[layer, :PAGE_TOKENS])
            buffers = [memoryview(bytearray(size)) for size in codec.stream_bytes(shape, wide=True)]
            streams = [b[:n] for b, n in zip(buffers, codec.encode(page, shape, buffers, fine), strict=True)]
            out = np.empty_like(page)
            calls: list[Callable[[], object]] = [lambda c=codec, p=page, b=buffers: c.encode(p, shape, b, fine)]
            for count in range(1, len(streams) + 1):
                calls.append(lambda c=codec, s=streams[:count], o=out: c.decode(s, shape, o))
            times: list[list[float]] = [[] for _ in calls]
            for _ in range(_ROUNDS):
                for call, took in zip(calls, times, strict=True):
                    began_s = time.perf_counter()
                    call()
                    took.append((time.perf_counter() - began_s) / shape.values)
            medians = [statistics.median(took) for took in times]
            encode.append(medians[0])
            decode.append(medians[1:])
    return {"encode": statistics.fmean(encode), "decode": [statistics.fmean(one) for one in zip(*decode, strict=True)]}


def checked(
    transfers: Sequence[Record],
    passes: Mapping[str, Mapping[str, Mapping[str, float]]],
    speeds: Mapping[str, Mapping[str, Any]],
    layouts: Mapping[str, CacheLayout],
    calibrations: Mapping[str, Sequence[Record]],
) -> list[dict[str, Any]]:
    """Predicted beside measured times for every setting of the transfers.

    Args:
        passes: model -> length -> tokens of a pass -> seconds.
        speeds: model -> codec -> `codec_speeds`.
        layouts: model -> a layout of its cache, of any length.
        calibrations: `receiving` and `coding` of the raw results (`calibrate`); without the former, a pass takes as
            long while something arrives, without the latter `speeds` say how long coding takes.
    """
    found = []
    for model in values(transfers, "model"):
        mine = only(transfers, model=model)
        for tokens, rate in sorted({(one["tokens"], one["rate_bps"]) for one in mine}):
            # Codecs take turns in a round, so all of them had the same machine; four tokens behind one transfer say
            # little of it.
            of_round: dict[int, list[float]] = {}
            for one in only(mine, tokens=tokens, rate_bps=rate):
                of_round.setdefault(one["number"], []).append(one["plain_step_s"])
            for series in SERIES:
                records = only(mine, tokens=tokens, rate_bps=rate, series=series)
                if records:
                    slower = _times_longer(calibrations["receiving"], model, tokens, rate, series)
                    speed = _speed(calibrations["coding"], model, series, records[0]) or speeds[model][series]
                    pass_s = {int(count): at_s for count, at_s in passes[model][str(tokens)].items()}
                    guesses = []
                    for one in records:
                        longer = middle_mean(of_round[one["number"]]) / pass_s[1]
                        guesses.append(_predict(one, pass_s, slower, speed, layouts[model], longer))
                    times = {
                        field: {
                            "predicted": statistics.median(guess[at] for guess in guesses),
                            "measured": [one[field] for one in records],
                        }
                        for field, at in (("ttft_s", 0), ("tt32t_s", 31), ("tt64t_s", 63))
                    }
                    found.append({"model": model, "tokens": tokens, "rate_bps": rate, "series": series, **times})
    return found


def middle_mean(values: Sequence[float]) -> float:
    """Mean of the middle half: where a machine has two speeds, a median of few jumps between them."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _times_longer(receiving: Sequence[Record], model: str, tokens: int, rate_bps: float, series: str) -> float:
    """Of a pass while the streams behind the first one arrive; a codec of one stream has none."""
    subject = SERIES[series].subject
    found = [
        one["times_longer"]
        for one in only(receiving, model=model, tokens=tokens, rate_bps=rate_bps)
        if SERIES[one["series"]].subject == subject
    ]
    return float(found[0]) if found else 1.0


def _speed(coding: Sequence[Record], model: str, series: str, like: Record) -> dict[str, Any] | None:
    """Seconds a value takes through encoder, loopback and decoder, by stream, in the form of `codec_speeds`."""
    found = only(coding, model=model, series=series)
    if not found:
        return None
    values_ = like["values"] / like["tokens"] * found[0]["tokens"]
    ready: list[float] = found[0]["ready_s"]
    return {"encode": 0.0, "decode": [(at_s - before_s) / values_ for before_s, at_s in pairwise((0.0, *ready))]}


def _predict(
    record: Record,
    pass_s: Mapping[int, float],
    slower: float,
    speed: Mapping[str, Any],
    layout: CacheLayout,
    longer: float,
) -> list[float]:
    """Times of 64 tokens for one transfer, told how many of its drafts stood.

    The machine computed so many times `longer` then than when `pass_s` and `speed` were measured.
    """
    arriving = record.get("arriving_bytes", record["stream_bytes"])
    case = Case(
        stream_bytes=tuple(round(one * record["wire_share"]) for one in arriving),
        values=record["values"],
        pages=2 * layout.layers * -(-record["tokens"] // PAGE_TOKENS),
        rate_bps=record["rate_bps"],
        latency_s=LATENCY_S,
        encode_value_s=speed["encode"] * longer,
        decode_value_s=tuple(one * longer for one in speed["decode"][: len(arriving)]),
        pass_s={count: at_s * longer for count, at_s in pass_s.items()},
        receiving=slower,
    )
    all_stood = record["accepted"] == record["drafted"]
    drafts = 0 if SERIES[record["series"]].stage == "anchor" else MAX_DRAFTS
    return token_times_s(case, MAX_DRAFTS if all_stood else record["accepted"], 64, drafts)


def stream_bits(subject: Subject, model: Elsewhere) -> tuple[float, ...]:
    """Bits a value of every stream, everything counted."""
    from perf.quality_codecs import cut

    layout = CacheLayout(
        layers=1, tokens=_SIZED_AT, heads=model.heads, key_size=model.size, value_size=model.size, dtype="bfloat16"
    )
    fine = subject.fine_tokens(layout, None)
    totals: list[int] = []
    for page in layout.pages():
        sizes = subject.codec_of(page.kind, 0, 1).stream_bytes(cut(subject, page, fine)[0])
        totals = [total + size for total, size in zip(totals or [0] * len(sizes), sizes, strict=True)]
    return tuple(8 * total / layout.values for total in totals)


def predicted(stands: Mapping[str, Sequence[int]], speeds: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Times for the models that are not here, all lengths and rates.

    Args:
        stands: codec -> for each recorded prompt how many drafts stand.
        speeds: codec -> `codec_speeds`.
    """
    found = []
    for name, model in ELSEWHERE.items():
        for series in SHOWN:
            subject, stage = SERIES[series].subject, SERIES[series].stage
            bits = stream_bits(subject, model)[: 1 if stage == "anchor" else None]
            for tokens in LENGTHS:
                values_ = 2 * model.layers * model.heads * model.size * tokens
                token_s = (2 * model.active + 2 * values_) / (_DEVICES * _DEVICE_BYTES_S * _REACHED)
                for rate in RATES_BPS:
                    case = Case(
                        stream_bytes=tuple(round(one * values_ / 8) for one in bits),
                        values=values_,
                        pages=2 * model.layers * tokens // PAGE_TOKENS,
                        rate_bps=rate,
                        latency_s=LATENCY_S,
                        encode_value_s=speeds[series]["encode"] / _CORES,
                        decode_value_s=tuple(one / _CORES for one in speeds[series]["decode"][: len(bits)]),
                        pass_s={1: token_s, 65: 1.1 * token_s},
                    )
                    counts = stands[series] if len(bits) > 1 else [MAX_DRAFTS]
                    by_prompt = [token_times_s(case, count, 32)[-1] for count in counts]
                    found.append(
                        {
                            "model": name,
                            "series": series,
                            "tokens": tokens,
                            "rate_bps": rate,
                            "ttft_s": token_times_s(case, MAX_DRAFTS, 1)[0],
                            "tt32t_s": statistics.fmean(by_prompt),
                            "tt32t_by_prompt_s": by_prompt if len(bits) > 1 else [],
                        }
                    )
    return found
