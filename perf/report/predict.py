"""What the simulator is given: measured parts for the settings of this machine, and stated ones for others."""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec import PageShape
from lynx_net.wire.layout import CacheLayout
from perf.report.calibrate import times_longer
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


def checked(transfers: Sequence[Record], layouts: Mapping[str, CacheLayout]) -> list[dict[str, Any]]:
    """Predicted beside measured times for every setting of the transfers.

    Args:
        transfers: with what was measured behind each of them (`Timing.calibrate`).
        layouts: model -> a layout of its cache, of any length.
    """
    found = []
    for model in values(transfers, "model"):
        mine = only(transfers, model=model)
        for tokens, rate in sorted({(one["tokens"], one["rate_bps"]) for one in mine}):
            here = only(mine, tokens=tokens, rate_bps=rate)
            # Codecs take turns in a round, so all of them had the same machine; a few tokens behind one transfer say
            # little of it.
            steps: dict[int, list[float]] = {}
            for one in here:
                steps.setdefault(one["number"], []).append(one["plain_step_s"])
            token_s = {number: statistics.fmean(found_s) for number, found_s in steps.items()}
            for series in SERIES:
                records = only(here, series=series)
                if records:
                    told = {one["number"]: one for one in here if _tells_of(one, series)}
                    guesses = [
                        _predict(one, told[one["number"]], token_s[one["number"]], layouts[model]) for one in records
                    ]
                    times = {
                        field: {
                            "predicted": statistics.median(guess[at] for guess in guesses),
                            "measured": [one[field] for one in records],
                        }
                        for field, at in (("ttft_s", 0), ("tt32t_s", 31), ("tt64t_s", 63))
                    }
                    found.append({"model": model, "tokens": tokens, "rate_bps": rate, "series": series, **times})
    return found


def _tells_of(record: Record, series: str) -> bool:
    """Whether what was measured behind a transfer is of this codec, of whatever stage."""
    return "coding_s" in record and SERIES[record["series"]].subject == SERIES[series].subject


def _predict(record: Record, told: Record, token_s: float, layout: CacheLayout) -> list[float]:
    """Times of 64 tokens for one transfer, told how many of its drafts stood.

    Args:
        told: what was measured behind a transfer of the same codec and round.
        token_s: seconds of a token, as fast as the machine was then.
    """
    pass_s, passes = {1: token_s}, told.get("receiving")
    if told["drafted"]:
        pass_s[told["drafted"] + 1] = told["receiving"]["verify_s"]
    arriving = record["arriving_bytes"]
    case = Case(
        stream_bytes=tuple(round(one * record["wire_share"]) for one in arriving),
        values=record["values"],
        pages=2 * layout.layers * -(-record["tokens"] // PAGE_TOKENS),
        rate_bps=record["rate_bps"],
        latency_s=LATENCY_S,
        encode_value_s=0.0,
        decode_value_s=tuple(
            (at_s - before_s) / record["values"]
            for before_s, at_s in pairwise((0.0, *accumulate(told["coding_s"], max)))
        ),
        pass_s=pass_s,
        receiving=times_longer(passes["ends_s"], passes["until_s"], token_s) if passes else 1.0,
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
                    tt32t_s = {count: token_times_s(case, count, 32)[-1] for count in set(counts)}
                    by_prompt = [tt32t_s[count] for count in counts]
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
