"""Whether `auto` picks the right split: `python -m perf.splits --json FILE`.

12 settings: caches of two sizes, links of three rates, receivers of two speeds. In each, every split of the nested
codec is sent over the real transport (in memory, paced, in virtual time), and a receiver drafts as the decode loop
would (`speculation.next_action`), a draft each so many virtual seconds. Which drafts stand is recorded, not modelled:
`perf/splits_traces.json` has, for real prompts and for each number of known bits, whether a draft made on those bits is
the token of Q_full (SmolLM2-135M, chat prompts of 1,024 tokens, a sixth of the tokens fine; `perf.quality` has the
captures). The time to the 32nd valid token, averaged over the prompts, is compared with that of the split that
`lynx_net.serdes.split` chooses before.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import lynx_net
from lynx_codec import get_codec
from lynx_net import CacheLayout
from lynx_net.demo.results import machine_facts
from lynx_net.serdes.fine import fine_tokens
from lynx_net.serdes.split import (
    EARLY_DRAFTS,
    SPLITS,
    SURVIVAL,
    Situation,
    choose_split,
    expected_time_s,
    stream_totals,
)
from lynx_net.speculation import Action, Limits, next_action
from lynx_net.testing.clock import run_virtual
from lynx_net.wire.pacing import parse_rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lynx_net import KVLink, ReceivedTransfer

TRACES = Path(__file__).parent / "splits_traces.json"
TOKENS = 32
"""The valid token whose time counts."""

LAYOUTS = {
    "small": CacheLayout(layers=4, tokens=1024, heads=4, key_size=64, value_size=64, dtype="bfloat16"),
    "large": CacheLayout(layers=8, tokens=2048, heads=4, key_size=64, value_size=64, dtype="bfloat16"),
}
RATES = ("10Mbit", "50Mbit", "250Mbit")
DECODE_TOKEN_S = (0.01, 0.05)

Trace = dict[int, list[bool]]
"""Known bits -> for each draft whether it stands."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a receiver did until the last stream was in; seconds from the offer."""

    known_bits: tuple[int, ...]
    """Of each draft, when it began."""

    made_s: tuple[float, ...]
    """When each draft was there."""

    verified_s: float
    """When the pass that verifies had ended; without drafts, when plain decoding could begin."""


def traces(file: Path = TRACES) -> list[Trace]:
    """The recorded prompts."""
    recorded = json.loads(file.read_text())["traces"]
    return [{int(bits): [flag == "1" for flag in flags] for bits, flags in one.items()} for one in recorded]


def time_to_s(drafted: Drafted, trace: Trace, situation: Situation) -> float:
    """When the k-th valid token was there, for one prompt."""
    flags = (trace[bits][number] for number, bits in enumerate(drafted.known_bits))
    accepted = len(list(itertools.takewhile(bool, flags)))
    if accepted >= situation.tokens:
        return drafted.made_s[situation.tokens - 1]
    confirmed = accepted + 1 if drafted.made_s else 0
    return drafted.verified_s + (situation.tokens - confirmed) * situation.decode_token_s


def fine(layout: CacheLayout) -> list[int]:
    """As many fine tokens as in the recorded caches."""
    return [int(token) for token in fine_tokens(layout, share=1 / 6, least=0)]


async def receive(transfer: ReceivedTransfer, bits: Sequence[int], situation: Situation) -> Drafted:
    """Draft in virtual time as the decode loop does."""
    loop = asyncio.get_running_loop()
    known = list(itertools.accumulate(bits))
    limits = Limits(max_new_tokens=1 << 20, max_drafts=situation.max_drafts)
    known_bits: list[int] = []
    made_s: list[float] = []
    await transfer.anchor_ready
    while True:
        ready = transfer.residual_ready.done()
        match next_action(limits, [], [0] * len(made_s), verify_ready=ready):
            case Action.DRAFT:
                in_place = sum(transfer.stream_ready(stream).done() for stream in range(len(bits)))
                known_bits.append(known[in_place - 1])
                await asyncio.sleep(situation.decode_token_s)
                made_s.append(loop.time() - transfer.offered_at_s)
            case Action.WAIT:
                await transfer.residual_ready
            case _:
                break
    verified_s = loop.time() - transfer.offered_at_s + (situation.decode_token_s if made_s else 0.0)
    return Drafted(tuple(known_bits), tuple(made_s), verified_s)


def run_split(bits: Sequence[int], layout: CacheLayout, arrays: np.ndarray, situation: Situation) -> Drafted:
    """One transfer over the real transport, in virtual time."""

    async def send(link: KVLink) -> None:
        options: dict[str, Any] = {"codec_params": {"bits": list(bits)}, "fine": fine(layout)}
        async with link.send("r", layout, codec="nested", **options) as sending:
            for layer in range(layout.layers):
                await sending.write(layer, arrays, arrays)

    async def run() -> Drafted:
        async with (
            lynx_net.serve("memory://splits") as server,
            lynx_net.connect(server.url, rate=situation.rate_bps) as link,
        ):
            sending = asyncio.create_task(send(link))
            transfer = await anext(aiter(server))
            assert isinstance(transfer, lynx_net.ReceivedTransfer)
            drafted = await receive(transfer, bits, situation)
            await sending
            return drafted

    return run_virtual(run())


def measure(recorded: Sequence[Trace]) -> list[dict[str, Any]]:
    """All settings: the time to the k-th valid token with every split, measured and expected, and the choice."""
    rng = np.random.default_rng(0)
    results = []
    known, unseen = recorded[::2], recorded[1::2]
    fitted = {**SURVIVAL, **hazards(known)}
    for (name, layout), rate, decode_s in itertools.product(LAYOUTS.items(), RATES, DECODE_TOKEN_S):
        rate_bps = parse_rate(rate)
        assert rate_bps is not None
        situation = Situation(rate_bps=rate_bps, decode_token_s=decode_s, tokens=TOKENS)
        values = rng.standard_normal(layout.array_shape("key"), np.float32)
        arrays = (values.view(np.uint32) >> 16).astype(np.uint16)
        sent = layout.with_fine(fine(layout))
        sizes = {bits: stream_totals(get_codec("nested", bits=list(bits)), sent) for bits in SPLITS}
        chosen = choose_split(sizes, situation)
        drafted = {bits: run_split(bits, layout, arrays, situation) for bits in SPLITS}
        measured = times(drafted, recorded, situation)
        best = min(measured, key=measured.__getitem__)
        held_out = times(drafted, unseen, situation)
        results.append(
            {
                "cache": name,
                "megabytes": sum(sizes[8,]) / 1e6,
                "rate": rate,
                "decode_token_s": decode_s,
                "chosen": text(chosen),
                "best": text(best),
                "ratio": measured[chosen] / measured[best],
                "ratio_held_out": held_out[choose_split(sizes, situation, fitted)] / min(held_out.values()),
                "measured_s": {text(bits): at_s for bits, at_s in measured.items()},
                "expected_s": {text(bits): expected_time_s(bits, sizes[bits], situation) for bits in SPLITS},
            }
        )
    return results


def times(
    drafted: Mapping[tuple[int, ...], Drafted], recorded: Sequence[Trace], situation: Situation
) -> dict[tuple[int, ...], float]:
    """Mean time to the k-th valid token with each split."""
    return {
        bits: statistics.fmean(time_to_s(one, trace, situation) for trace in recorded) for bits, one in drafted.items()
    }


def text(bits: Sequence[int]) -> str:
    """For example "2+2+4"."""
    return "+".join(map(str, bits))


def hazards(recorded: Sequence[Trace]) -> dict[int, tuple[float, float]]:
    """What `SURVIVAL` holds: share of drafts that stand of those whose predecessors stand, early and later ones."""
    result: dict[int, tuple[float, float]] = {}
    for bits in sorted(recorded[0]):
        stood, made = [0, 0], [0, 0]
        for trace in recorded:
            for number, flag in enumerate(trace[bits]):
                made[number >= EARLY_DRAFTS] += 1
                stood[number >= EARLY_DRAFTS] += flag
                if not flag:
                    break
        result[bits] = (stood[0] / max(made[0], 1), stood[1] / max(made[1], 1))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="The split that auto picks against every fixed split")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args()
    recorded = traces()
    results = measure(recorded)
    for one in results:
        each = ", ".join(f"{bits} {at_s:.3f}" for bits, at_s in one["measured_s"].items())
        print(
            f"{one['megabytes']:6.1f} MB at {one['rate']:>7}, {one['decode_token_s'] * 1e3:2.0f} ms a token: "
            f"auto {one['chosen']:>5}, best {one['best']:>5}, {one['ratio']:.3f} of its time; s: {each}"
        )
    worst, held_out = (max(one[name] for one in results) for name in ("ratio", "ratio_held_out"))
    print(f"worst choice: {worst:.3f} of the best time, {len(recorded)} prompts")
    print(f"with probabilities from one half of the prompts, times of the other: {held_out:.3f}")
    if options.json is not None:
        report = {"machine": machine_facts(("numpy",)), "prompts": len(recorded), "survival": hazards(recorded)}
        report |= {"worst": worst, "worst_held_out": held_out, "settings": results}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
