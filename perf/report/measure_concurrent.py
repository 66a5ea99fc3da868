"""Eight requests at once on one link: real transfers over loopback, decoded by a batch whose step is a wait.

A device decodes eight requests in one batch nearly as fast as one; a processor core does not, so the model's step is
a wait of fixed length here, as in perf.splits, and what becomes of drafts is taken from what was recorded elsewhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import lynx_net
from lynx_net.serdes.split import Situation
from perf.report.series import SERIES, AnchorOnly, codec_plan
from perf.splits import receive

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lynx_net import IncomingTransfer, KVLink
    from perf.report.cells import Cells
    from perf.report.measure_quality import Codings
    from perf.report.scope import Progress
    from perf.splits import Drafted

__all__ = [
    "DECODE_TOKEN_S",
    "RATE_BPS",
    "REQUESTS",
    "SOURCES",
    "all_at_once",
    "decoded",
    "measure_concurrent",
    "times_s",
]

SOURCES = (
    "codec/lynx_codec",
    "lynx_net",
    "perf/report/measure_concurrent.py",
    "perf/report/predict.py:codec_speeds",
    "perf/report/series.py",
    "perf/splits.py",
)
"""What these times depend on, and those of codecs, beside the machine."""

REQUESTS = 8
RATE_BPS = 400e6
DECODE_TOKEN_S = 0.03
"""The paper's, of a model with 32 billion parameters."""

TOKENS = 32


async def all_at_once(series: str, cache: Codings, requests: int = REQUESTS) -> list[Drafted]:
    """Send a cache so many times at once; what each receiver did, in seconds since the first offer."""
    subject = SERIES[series].subject
    layout = cache.layout
    kept = dataclasses.replace(layout, raw_head=subject.raw_head, raw_tail=0)
    options: dict[str, Any] = {
        "codec": codec_plan(subject, layout.layers),
        "fine": subject.fine_tokens(kept, cache.scores),
    }
    situation = Situation(rate_bps=RATE_BPS, decode_token_s=DECODE_TOKEN_S)

    async def send(link: KVLink, number: int) -> None:
        async with link.send(f"r{number}", kept, **options) as sending:
            for layer in range(layout.layers):
                await sending.write(layer, cache.keys[layer], cache.values[layer])

    async def decode(transfer: IncomingTransfer) -> tuple[float, Drafted]:
        seen: Any = AnchorOnly(transfer) if SERIES[series].stage == "anchor" else transfer
        drafted = await receive(seen, [1] * len(seen.stream_names), situation)
        await transfer.complete
        return transfer.offered_at_s, drafted

    async with (
        lynx_net.serve("tcp://127.0.0.1:0") as server,
        lynx_net.connect(server.url, rate=RATE_BPS) as link,
        asyncio.TaskGroup() as group,
    ):
        for number in range(requests):
            group.create_task(send(link, number))
        transfers = aiter(server)
        receiving = [group.create_task(decode(await anext(transfers))) for _ in range(requests)]
        await asyncio.wait(receiving)
    began_s = min(task.result()[0] for task in receiving)
    return [_shifted(drafted, offered_s - began_s) for offered_s, drafted in (task.result() for task in receiving)]


def _shifted(drafted: Drafted, by_s: float) -> Drafted:
    made_s = tuple(at_s + by_s for at_s in drafted.made_s)
    return dataclasses.replace(drafted, made_s=made_s, verified_s=drafted.verified_s + by_s)


def times_s(drafted: Drafted, stands: int, tokens: int = TOKENS) -> list[float]:
    """When each of the first valid tokens was there, if so many drafts stand."""
    accepted = min(stands, len(drafted.made_s), tokens)
    first = 0 if drafted.made_s else 1  # the pass that verifies gives a token itself
    rest = [drafted.verified_s + (first + number) * DECODE_TOKEN_S for number in range(tokens - accepted)]
    return [*drafted.made_s[:accepted], *rest]


async def measure_concurrent(
    cache: Callable[[], Codings], tokens: int, rounds: int, cells: Cells, progress: Progress
) -> list[dict[str, Any]]:
    """What the receivers of every round did, by codec; `decoded` makes times of it.

    Args:
        cache: gives the cache that is sent; called only if something has to be measured.
        tokens: its length.
    """
    records = []
    names = list(SERIES)
    for turn in range(rounds):
        first = turn % len(names)
        for series in [*names[first:], *names[:first]]:
            key = {"what": "concurrent", "series": series, "round": turn, "tokens": tokens, "rate_bps": RATE_BPS}
            held = cells.held(key)
            if held is None:
                held = [dataclasses.asdict(one) for one in await all_at_once(series, cache())]
                cells.put(key, held)
            records.append({"series": series, "round": turn, "receivers": held})
        progress.tell(f"{REQUESTS} concurrent requests, round {turn + 1} of {rounds}")
    return records


def decoded(sends: Sequence[Mapping[str, Any]], stands: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Records of the raw results.

    Args:
        sends: of `measure_concurrent`.
        stands: for the codecs that draft, how many drafts of recorded prompts stand; they are left out where
            none were recorded.
    """
    records = []
    for sent in sends:
        counts = stands.get(sent["series"], [0])
        for request, one in enumerate(sent["receivers"] if counts else ()):
            times = times_s(_drafted(one), counts[(sent["round"] * REQUESTS + request) % len(counts)])
            where = {"series": sent["series"], "round": sent["round"], "request": request}
            records.append({**where, "ttft_s": times[0], "tt32t_s": times[-1]})
    return records


def _drafted(held: Mapping[str, Any]) -> Drafted:
    from perf.splits import Drafted

    return Drafted(tuple(held["known_bits"]), tuple(held["made_s"]), held["verified_s"])
