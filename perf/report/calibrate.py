"""What the simulator is told of this machine, each measured by itself and none of it in a transfer that is compared.

1. Forward passes by their number of tokens (`passes`), with nothing else going on.
2. How long each stream takes to be in place where the link is not what limits it (`coding_s`): the slowest of encoder,
   loopback and decoder, as they run beside each other in two processes, and beside a pacer that wakes for each segment.
3. As many times longer as a pass takes while the streams behind the first one arrive (`receiving`): two processes
   share few cores, and one interpreter has one lock. Nobody drafts there: passes follow each other, and
   passes with nothing on the link follow them at once.

Transfers are looked at as often (`Timing.watched`) as those that are compared.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Any

from lynx_net.demo.exchange import STARTED_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lynx_net.integrations.transformers import TransformersModel
    from perf.report.measure_time import Timing

__all__ = ["DRAFTING", "PASSES", "coding_s", "passes", "pooled", "receiving", "undisturbed_s"]

PASSES = (1, 8, 16, 24, 32, 65)
"""Tokens of the forward passes that are timed."""

DRAFTING = ("lynx", "default")
"""Codecs of more than one stream."""

_UNPACED_BPS = 100e9
_LINK_SHARE = 0.5
"""Of the time that coding takes, the bytes need so much at the rate of the link."""

_IDLE_PASSES = 3


def passes(model: TransformersModel, tokens: int, repeats: int = 3) -> dict[str, float]:
    """Seconds of forward passes behind a cache of this many tokens, by their number of tokens. Blocks."""
    found: dict[str, float] = {}
    for count in PASSES:
        times = []
        for _ in range(repeats):
            began_s = time.perf_counter()
            model.forward([0] * count)
            times.append(time.perf_counter() - began_s)
            model.truncate(tokens)
        found[str(count)] = statistics.median(times)
    return found


async def coding_s(timing: Timing, series: str, prompt: Sequence[int], rounds: int) -> list[float]:
    """Seconds until each stream is in place, nothing being decoded, on a link that needs half of them; medians."""
    ready_s, stream_bytes = await _ready_s(timing, series, prompt, _UNPACED_BPS, rounds)
    ready_s, _ = await _ready_s(timing, series, prompt, 8 * stream_bytes / (_LINK_SHARE * ready_s[-1]), rounds)
    return ready_s


async def _ready_s(
    timing: Timing, series: str, prompt: Sequence[int], rate_bps: float, rounds: int
) -> tuple[list[float], int]:
    """Seconds until each stream is in place at this rate, medians; also returns the bytes of all streams."""
    found: list[list[float]] = []
    total_bytes = 0
    for _ in range(rounds):
        _, transfer = await timing.request(series, prompt, rate_bps)
        async with timing.watched(transfer):
            await transfer.complete
        began_s, total_bytes = transfer.offer.meta[STARTED_S], transfer.stats.total_bytes
        found.append([_at_s(transfer.stream_ready(at)) - began_s for at in range(len(transfer.stream_names))])
    return [statistics.median(one) for one in zip(*found, strict=True)], total_bytes


async def receiving(timing: Timing, series: str, prompt: Sequence[int], rate_bps: float, passes_wanted: int) -> float:
    """As many times longer as a pass takes while the streams behind the first one arrive at this rate.

    All passes of some transfers together count: of so many that about `passes_wanted` are made in them, but at most
    half that number.
    """
    loop = asyncio.get_running_loop()
    found: list[tuple[float, float]] = []
    made = 0
    while made < passes_wanted and 2 * len(found) < passes_wanted:
        model, transfer = await timing.request(series, prompt, rate_bps)
        tokens = model.length

        def once(model: TransformersModel = model, tokens: int = tokens) -> None:
            model.forward([0])
            model.truncate(tokens)

        async with timing.watched(transfer):
            await transfer.anchor_ready
            ends = [time.monotonic()]
            while not transfer.residual_ready.done():
                await loop.run_in_executor(timing.thread, once)
                ends.append(time.monotonic())
            await transfer.complete
        began_s = time.monotonic()
        for _ in range(_IDLE_PASSES):
            await loop.run_in_executor(timing.thread, once)
        idle_s = (time.monotonic() - began_s) / _IDLE_PASSES
        made += len(ends) - 1
        took_s = max(_at_s(transfer.residual_ready) - ends[0], 0.0)
        found.append((took_s, undisturbed_s(ends, ends[0] + took_s, idle_s)))
    return pooled(found)


def pooled(found: Sequence[tuple[float, float]]) -> float:
    """As many times longer as passes took in all transfers together.

    Of a ratio of each transfer a median would be of little use: where one or two passes are made, a little more or less
    of the last one doubles or halves it.

    Args:
        found: seconds that passes took in a transfer, and that they would have taken undisturbed.
    """
    took_s, alone_s = (sum(one) for one in zip(*found, strict=True))
    return max(took_s / alone_s, 1.0) if alone_s else 1.0


def undisturbed_s(ends_s: Sequence[float], until_s: float, idle_s: float) -> float:
    """Seconds that passes up to a moment would have taken alone; the rest of the one under way went undisturbed.

    Args:
        ends_s: when the passes began, and when each of them ended; the last one not before `until_s`.
        idle_s: of a pass with nothing else going on.
    """
    whole = len(ends_s) - 1
    left = min(max(ends_s[-1] - until_s, 0.0) / idle_s, 1.0)
    return max(whole - left, 0.0) * idle_s


def _at_s(readiness: Any) -> float:
    """When something became ready that is ready."""
    at_s = readiness.at_s
    assert at_s is not None
    return float(at_s)
