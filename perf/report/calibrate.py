"""What the simulator is told of this machine, each measured by itself and none of it in a transfer that is compared.

1. How long each stream takes to be in place where the link is not what limits it (`coding_s`): the slowest of encoder,
   loopback and decoder, as they run beside each other in two processes, and beside a pacer that wakes for each segment.
2. When passes end while the streams behind the first one arrive, and how long the one that verifies takes right behind
   (`receiving`): two processes share few cores, and one interpreter has one lock.

It is measured right behind every transfer that it is to foretell, since a machine is not equally fast all the time, and
compared with tokens that are decoded plainly in the same round. Transfers are looked at as often (`Timing.watched`) as
those that are compared.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Any

from lynx_net.demo.exchange import STARTED_S
from perf.report.simulator import MAX_DRAFTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lynx_net.integrations.transformers import TransformersModel
    from perf.report.measure_time import Timing

__all__ = ["coding_s", "receiving", "step_s", "times_longer", "undisturbed_s"]

_STEPS = 5
_UNPACED_BPS = 100e9
_LINK_SHARE = 0.5
"""Of the time that coding takes, the bytes need so much at the rate of the link."""


def step_s(model: TransformersModel, tokens: int) -> float:
    """Seconds of a forward pass over one token behind a cache of so many, a median. Blocks."""
    times = []
    for _ in range(_STEPS):
        began_s = time.perf_counter()
        model.forward([0])
        times.append(time.perf_counter() - began_s)
        model.truncate(tokens)
    return statistics.median(times)


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


async def receiving(timing: Timing, series: str, prompt: Sequence[int], rate_bps: float, drafts: int) -> dict[str, Any]:
    """Passes while the streams behind the first one arrive, as many as the decode loop makes at most, and a last one.

    Args:
        drafts: so many tokens and one more does the last pass have.

    Returns:
        `ends_s`, when the passes began and when each of them ended, seconds after the first stream was in place;
        `until_s`, when the last stream was, or when the last pass ended; `verify_s`, seconds of the pass behind both.
    """
    loop = asyncio.get_running_loop()
    model, transfer = await timing.request(series, prompt, rate_bps)
    tokens = model.length

    def verify() -> None:
        model.truncate(tokens)
        model.forward([0] * (drafts + 1))

    async with timing.watched(transfer):
        await transfer.anchor_ready
        ends = [_at_s(transfer.anchor_ready)]
        while not transfer.residual_ready.done() and len(ends) <= MAX_DRAFTS:
            await loop.run_in_executor(timing.thread, model.forward, [0])
            ends.append(time.monotonic())
        await transfer.residual_ready
        await loop.run_in_executor(timing.thread, verify)
        verified_s = time.monotonic()
        await transfer.complete
    ready_s = _at_s(transfer.residual_ready)
    return {
        "ends_s": [at_s - ends[0] for at_s in ends],
        "until_s": (ready_s if len(ends) <= MAX_DRAFTS else min(ready_s, ends[-1])) - ends[0],
        "verify_s": verified_s - max(ready_s, ends[-1]),
    }


def times_longer(ends_s: Sequence[float], until_s: float, idle_s: float) -> float:
    """As many times longer as passes take while something arrives; 1 where none is made.

    Args:
        ends_s, until_s: as `receiving` found them behind a transfer.
        idle_s: of a pass with nothing else going on.
    """
    alone_s = undisturbed_s(ends_s, until_s, idle_s)
    return max(until_s / alone_s, 1.0) if alone_s else 1.0


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
