"""What the simulator is told of this machine, each measured by itself and none of it in a transfer that is compared.

1. Forward passes by their number of tokens (`passes`), with nothing else going on.
2. How long each stream takes to be in place where the link is not what limits it (`coding_s`): the slowest of encoder,
   loopback and decoder, as they run beside each other in two processes, and beside a pacer that wakes for each segment.
3. As many times longer as a pass takes while the streams behind the first one arrive (`receiving`): two processes
   share few cores, and one interpreter has one lock. Nobody drafts there: passes follow each other, and
   passes with nothing on the link follow them at once.

Passes are timed once; the others right behind every transfer that they are to foretell, since a machine is not equally
fast all the time. Transfers are looked at as often (`Timing.watched`) as those that are compared.
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

__all__ = ["PASSES", "coding_s", "passes", "receiving", "times_longer", "undisturbed_s"]

PASSES = (1, 8, 16, 24, 32, 65)
"""Tokens of the forward passes that are timed."""

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


async def coding_s(timing: Timing, series: str, prompt: Sequence[int]) -> list[float]:
    """Seconds until each stream is in place, nothing being decoded, on a link that needs about half of them.

    How fast that link is follows from the last time (`Timing.coding_bps`); the first time a transfer more tells it.
    """
    at = series, len(prompt)
    if at not in timing.coding_bps:
        await _ready_s(timing, series, prompt, _UNPACED_BPS)
    return await _ready_s(timing, series, prompt, timing.coding_bps[at])


async def _ready_s(timing: Timing, series: str, prompt: Sequence[int], rate_bps: float) -> list[float]:
    """Seconds until each stream is in place at this rate; the next time the link needs half of them."""
    _, transfer = await timing.request(series, prompt, rate_bps)
    async with timing.watched(transfer):
        await transfer.complete
    began_s = transfer.offer.meta[STARTED_S]
    ready_s = [_at_s(transfer.stream_ready(at)) - began_s for at in range(len(transfer.stream_names))]
    timing.coding_bps[series, len(prompt)] = 8 * transfer.stats.total_bytes / (_LINK_SHARE * ready_s[-1])
    return ready_s


async def receiving(timing: Timing, series: str, prompt: Sequence[int], rate_bps: float) -> tuple[float, float]:
    """Seconds that passes took while the streams behind the first one arrived, and that they would have taken alone."""
    loop = asyncio.get_running_loop()
    model, transfer = await timing.request(series, prompt, rate_bps)
    tokens = model.length

    def once() -> None:
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
    took_s = max(_at_s(transfer.residual_ready) - ends[0], 0.0)
    return took_s, undisturbed_s(ends, ends[0] + took_s, idle_s)


def times_longer(found: Sequence[tuple[float, float]]) -> float:
    """As many times longer as passes took in all transfers together.

    Of a ratio of each transfer a median would be of little use: where one or two passes are made, a little more or less
    of the last one doubles or halves it.

    Args:
        found: of each transfer, what `receiving` returned.
    """
    took_s, alone_s = (sum(one) for one in zip(*found, strict=True)) if found else (0.0, 0.0)
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
