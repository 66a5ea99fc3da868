"""Times on a device: a model of the shape of LLaMA 8B decodes from caches of 16K tokens, over links like the paper's.

Weights are random, so what the model writes is noise, on which drafts seldom stand; how long a token, a pass and a
transfer take does not depend on that. What is measured of a transfer is therefore put together anew
(`with_stands`) for as many drafts as stood on real models, where those were recorded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import lynx_gpu
from lynx_net.demo.options import DemoOptions
from lynx_net.demo.pair import Pair
from lynx_net.serdes.device import DeviceBuffers
from lynx_net.wire.config import LinkConfig
from perf.report.device import SHAPES, check_device, noise_prompt
from perf.report.measure_time import SILENCE_S, Timing, reference_rate_bps, spent
from perf.report.series import SERIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perf.report.cells import Cells
    from perf.report.scope import Progress

__all__ = ["MODEL", "RATES_BPS", "SOURCES", "TOKENS", "accelerator", "coded", "measure_device", "with_stands"]

SOURCES = ("gpu/lynx_gpu", "perf/report/measure_device.py", "perf/report/device.py")
"""What these times depend on beside those of transfers on the CPU."""

MODEL = "llama8b"
TOKENS = 16384
RATES_BPS = (10e9, 25e9, 50e9)
"""The paper's, beside the rate of its ratio of transfer to compute."""

_LANES = 4
_WARM_RATE_BPS = 100e9
"""Also that of the link when it opens, which segments are made for."""

_CONFIG = LinkConfig.for_devices(deadline_s=SILENCE_S)
_BUFFERS = DeviceBuffers(prepare=(0,), send_pinned_bytes=64 << 20, receive_pinned_bytes=4 << 30)
"""Anchors are kept until their residuals are decoded."""


def coded(device: str) -> list[str]:
    """The codecs that are timed: those that this device has kernels for. Others would be coded on a core of the host,
    which takes CacheGen-style most of a minute for a cache of this length.
    """
    if device == "cpu":
        return list(SERIES)
    return [name for name, one in SERIES.items() if lynx_gpu.has_kernels(one.subject.codec_of("key", 0, 1))]


def accelerator(device: str) -> str:
    """What the device is called."""
    if device == "cpu":
        return "no accelerator"
    torch: Any = importlib.import_module("torch")
    return str(torch.cuda.get_device_name(0))


async def measure_device(
    device: str,
    rounds: int,
    cells: Cells,
    progress: Progress,
    *,
    name: str = MODEL,
    tokens: int = TOKENS,
    rates_bps: Sequence[float] = RATES_BPS,
) -> dict[str, Any]:
    """All transfers, of one prompt a round at every rate; the first ones, unpaced, warm up and are not counted.

    Args:
        rounds: prompts; each is sent by every codec at every rate.
        name: of `SHAPES`.
        rates_bps: beside that of the paper's ratio, which depends on how fast the model decodes.

    Raises:
        DeviceMissingError: there is no such device.
    """
    check_device(device)
    options = DemoOptions(
        rate=f"{_WARM_RATE_BPS / 1e9:g}Gbit",
        lanes=_LANES,
        timeout_s=SILENCE_S,
        device="cuda" if device == "cuda" else "cpu",
    )
    records: list[dict[str, Any]] = []
    names = coded(device)
    timing = Timing(name, device)
    async with Pair.open(options, lambda _: None, "perf.report.prefill_process", _CONFIG, _BUFFERS) as pair:
        timing.pair = pair

        async def work() -> float:
            await timing.load()
            progress.tell(f"{SHAPES[name].title}: loaded")
            first = noise_prompt(name, 0, tokens)
            for series in names:
                await timing.transfer(series, first, _WARM_RATE_BPS)
            progress.tell(f"{name}: every codec has been used once")
            token_s = await timing.step_s(tokens, cells)
            reference = reference_rate_bps(tokens, timing.loaded.model.config, token_s)
            rates = list(dict.fromkeys((reference, *rates_bps)))
            for turn in range(rounds):
                prompt = noise_prompt(name, turn, tokens)
                for rate in rates:
                    records.extend(await timing.round_of(names, prompt, rate, turn, cells))
                progress.tell(f"{name}: round {turn + 1} of {rounds}, {len(rates)} rates")
            return reference

        reference = await pair.run(work())
    return {
        "model": name,
        "accelerator": accelerator(device),
        "transfers": records,
        "reference": {"tokens": tokens, "rate_bps": reference},
        "left_out": [one for one in SERIES if one not in names],
    }


def with_stands(records: Sequence[Mapping[str, Any]], stands: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """The transfers as they would have gone if as many drafts had stood as did elsewhere.

    Drafts that stand count from when they were made, the pass that verifies them takes as long as it did, and behind
    it tokens come one by one as they did. The transfers of a codec at a rate get evenly spaced ones of the
    recorded numbers, so that together they are like all of them. Without recorded ones nothing is changed.

    Args:
        stands: codec -> for each recorded prompt how many drafts stand.
    """
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for one in records:
        groups.setdefault((one["series"], one["rate_bps"]), []).append(one)
    found = []
    for one in records:
        group = groups[one["series"], one["rate_bps"]]
        counts = sorted(stands.get(one["series"], ()))
        if not one["draft_times_s"] or not counts:
            found.append(dict(one))
            continue
        at = (2 * group.index(one) + 1) * len(counts) // (2 * len(group))
        found.append(_with(one, min(counts[at], one["drafted"])))
    return found


def _with(record: Mapping[str, Any], stands: int) -> dict[str, Any]:
    wanted = len(record["token_times_s"])
    drafts, plain = record["draft_times_s"][:stands], list(record["token_times_s"][record["accepted"] :])
    while len(plain) < wanted - len(drafts):
        plain.append((plain[-1] if plain else record["verified_s"]) + record["plain_step_s"])
    times = [*drafts, *plain][:wanted]
    changed = {
        **record,
        "accepted": stands,
        "token_times_s": times,
        "ttft_s": times[0],
        "tt32t_s": times[31],
        "tt64t_s": times[63],
    }
    return {**changed, **spent(changed)}
