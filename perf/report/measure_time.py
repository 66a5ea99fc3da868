"""Times of real transfers between two processes over a paced link, decoded by a real model as they arrive.

Codecs alternate, and their order turns from round to round; each round has another prompt. Texts go to their 64th
token.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from lynx_net.demo.exchange import STARTED_S
from lynx_net.demo.experiment import decode_again
from lynx_net.demo.options import DemoOptions
from lynx_net.demo.pair import Pair
from lynx_net.integrations.transformers import ProgressiveCache, TransformersModel, layout_of
from lynx_net.speculation import Done, Draft, decode
from lynx_net.wire.frames import HEADER_BYTES
from perf.report.calibrate import coding_s, receiving, step_s
from perf.report.prefill_process import TransferRequest, dtype_of, load_model
from perf.report.scope import PAPER_RESIDUAL_TOKENS
from perf.report.series import SERIES, AnchorOnly, codec_plan
from perf.report.tasks import make_task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from lynx_net import IncomingTransfer, Readiness
    from lynx_net.speculation.protocols import ProgressiveTransfer
    from perf.report.cells import Cells
    from perf.report.corpus import Corpus
    from perf.report.scope import Progress, Scope

__all__ = ["SILENCE_S", "SOURCES", "Timing", "reference_rate_bps", "spent", "time_model", "turns_of"]

SOURCES = (
    "codec/lynx_codec",
    "lynx_net",
    "perf/report/calibrate.py",
    "perf/report/measure_time.py",
    "perf/report/prefill_process.py",
    "perf/report/series.py",
)
"""What a transfer's times depend on, beside the machine."""

NEW_TOKENS = 64
"""Also the most drafts, as in the paper."""

PLAIN_TOKENS = 12
"""Decoded behind each transfer, for the simulator: a machine is not equally fast all the time, nor in all of them."""

_ROOM = 2 * NEW_TOKENS + 16
_POLL_S = 0.004
_ROUND_S = 75.0
"""A round of a small model on two cores; what is told before the first one is measured."""
SILENCE_S = 60.0
"""A prefill of thousands of tokens on a busy machine may keep the other process from answering for long."""


class Timing:
    """The decode side: a model that asks for caches and decodes from them.

    Attributes:
        thread: that the model computes in.
        loaded: the model, once `load` is done.
        pair: of the processes; whoever times transfers opens it and sets it.
        coding_bps: codec and length of a prompt -> the rate at which the link takes half as long as coding did.
    """

    def __init__(self, name: str, device: str) -> None:
        self._name, self._device = name, device
        self.pair: Pair | None = None
        self.thread = ThreadPoolExecutor(1, "decode")
        self.loaded: Any = None
        self.coding_bps: dict[tuple[str, int], float] = {}

    async def load(self) -> None:
        """Load the model; the prefill process loads its own at the first request."""
        self.loaded = await asyncio.get_running_loop().run_in_executor(
            self.thread, load_model, self._name, self._device
        )

    def model_on(self, tokens: int) -> TransformersModel:
        """The model on a new cache of so many tokens."""
        model = self.loaded.model
        layout = layout_of(model.config, tokens, dtype=dtype_of(model))
        return TransformersModel(model, ProgressiveCache(layout, room=_ROOM, device=self._device))

    async def step_s(self, tokens: int, cells: Cells) -> float:
        """Seconds of a token behind a cache of so many, measured once: a rate that follows from it has to be the same
        in all runs.
        """
        key = {"what": "step", "model": self._name, "tokens": tokens}
        held = cells.held(key)
        if held is None:
            loop = asyncio.get_running_loop()
            model = await loop.run_in_executor(self.thread, self.model_on, tokens)
            held = await loop.run_in_executor(self.thread, step_s, model, tokens)
            cells.put(key, held)
        return float(held)

    async def request(
        self, series: str, prompt: Sequence[int], rate_bps: float
    ) -> tuple[TransformersModel, IncomingTransfer]:
        """Ask for the cache of all of a prompt but its last token; also returns the model on it."""
        assert self.pair is not None
        model = await asyncio.get_running_loop().run_in_executor(self.thread, self.model_on, len(prompt) - 1)
        wanted = TransferRequest(series, self._name, tuple(prompt), float(rate_bps))
        return model, await self.pair.request(wanted, model.cache)

    async def transfer(
        self, series: str, prompt: Sequence[int], rate_bps: float, *, check: bool = False
    ) -> dict[str, Any]:
        """One transfer and what was decoded from it; `check` decodes plainly behind it and compares the texts."""
        loop = asyncio.get_running_loop()
        anchor_only = SERIES[series].stage == "anchor"
        model, transfer = await self.request(series, prompt, rate_bps)
        async with self.watched(transfer) as polled:
            source = AnchorOnly(transfer) if anchor_only else transfer
            done, draft_times = await self._decode(model, source, prompt, NEW_TOKENS, 0 if anchor_only else NEW_TOKENS)
            await transfer.complete
        began_s: float = transfer.offer.meta[STARTED_S]
        times = [at_s - began_s for at_s in done.token_times_s]
        anchor_bytes = transfer.stats.stream_bytes[0]
        arrived = [at_s for at_s, count in polled if count >= anchor_bytes]
        timeline = transfer.timeline()
        ready = None if anchor_only else timeline.residual_ready_s
        record = {
            "ttft_s": times[0],
            "tt32t_s": times[31],
            "tt64t_s": times[63],
            "token_times_s": times,
            "bytes_sent": anchor_bytes
            if anchor_only
            else transfer.stats.total_bytes + HEADER_BYTES * transfer.stats.segments,
            "values": transfer.offer.layout.values,
            "wire_share": 1 + HEADER_BYTES * transfer.stats.segments / transfer.stats.total_bytes,
            "stream_bytes": list(transfer.stats.stream_bytes)[: 1 if anchor_only else None],
            "arriving_bytes": list(transfer.stats.stream_bytes),
            "drafted": done.drafted,
            "accepted": done.accepted,
            "anchor_arrived_s": (arrived[0] if arrived else _at_s(transfer.anchor_ready)) - began_s,
            "anchor_ready_s": _at_s(transfer.anchor_ready) - began_s,
            "residual_ready_s": None if ready is None else ready - began_s,
            "verified_s": None if done.verified_at_s is None else done.verified_at_s - began_s,
            "draft_times_s": [at_s - began_s for at_s in draft_times],
        }
        await loop.run_in_executor(self.thread, model.truncate, len(prompt) - 1)
        again_s = time.monotonic()
        again, _ = await self._decode(model, transfer, prompt, PLAIN_TOKENS, 0)
        record["plain_step_s"] = (again.token_times_s[-1] - again_s) / PLAIN_TOKENS
        record["equal_qfull"] = None
        if check:
            plain = await loop.run_in_executor(self.thread, decode_again, model, tuple(prompt), NEW_TOKENS, None)
            record["equal_qfull"] = plain == list(done.tokens)
        return {**record, **spent(record)}

    async def calibrate(self, series: str, prompt: Sequence[int], rate_bps: float, drafts: int) -> dict[str, Any]:
        """What the simulator is told of a codec that made so many drafts; of `lynx, anchor only` nothing, since it is
        sent like lynx.
        """
        if SERIES[series].stage == "anchor":
            return {}
        found: dict[str, Any] = {"coding_s": await coding_s(self, series, prompt)}
        if len(found["coding_s"]) > 1:
            found["receiving"] = await receiving(self, series, prompt, rate_bps, drafts)
        return found

    @staticmethod
    @contextlib.asynccontextmanager
    async def watched(transfer: IncomingTransfer) -> AsyncIterator[list[tuple[float, int]]]:
        """Note how many bytes of the first stream were in when, until all streams are or the block is left."""
        polled: list[tuple[float, int]] = []
        watching = asyncio.create_task(_watch(transfer, polled))
        try:
            yield polled
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def round_of(
        self,
        names: Sequence[str],
        prompt: Sequence[int],
        rate_bps: float,
        turn: int,
        cells: Cells,
        checked: str | None = None,
        *,
        calibrated: bool = False,
    ) -> list[dict[str, Any]]:
        """One prompt with each of these codecs, of which `checked` has its text checked; who is first turns, too.

        Behind each transfer it is measured what the simulator is told of it, if they are to be `calibrated`.
        """
        first = turn % len(names)
        found = []
        for series in [*names[first:], *names[:first]]:
            at = {"model": self._name, "tokens": len(prompt) - 1, "rate_bps": rate_bps, "series": series}
            where = {**at, "number": turn, "round": 0}
            key = {**where, "prompt": list(prompt)}
            held = cells.held(key)
            if held is None:
                held = await self.transfer(series, prompt, rate_bps, check=series == checked)
                if calibrated:
                    held |= await self.calibrate(series, prompt, rate_bps, held["drafted"])
                cells.put(key, held)
            found.append({**where, **held})
        return found

    async def _decode(
        self,
        model: TransformersModel,
        transfer: ProgressiveTransfer,
        prompt: Sequence[int],
        tokens: int,
        max_drafts: int,
    ) -> tuple[Done, list[float]]:
        """Run the decode loop to its end; also returns when each draft was made."""
        drafts: list[float] = []
        done: Done | None = None
        events = decode(
            model,
            transfer,
            prompt_tail=list(prompt[-1:]),
            max_new_tokens=tokens,
            max_drafts=max_drafts,
            executor=self.thread,
        )
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Draft):
                    drafts.append(event.at_s)
                elif isinstance(event, Done):
                    done = event
        assert done is not None
        return done, drafts


async def _watch(transfer: IncomingTransfer, polled: list[tuple[float, int]]) -> None:
    """Note how many bytes of the first stream were in when, until all streams are."""
    while not transfer.complete.done():
        polled.append((time.monotonic(), transfer.stats.stream_bytes[0]))
        await asyncio.sleep(_POLL_S)


def _at_s(readiness: Readiness) -> float:
    """When something became ready that is ready."""
    assert readiness.at_s is not None
    return readiness.at_s


def spent(record: dict[str, Any]) -> dict[str, Any]:
    """Figure 2: what the time to the last token consists of, and the seconds in which nothing was computed."""
    end_s: float = record["token_times_s"][-1]
    drafts: list[float] = record["draft_times_s"]
    ready_s, verified_s = record["residual_ready_s"], record["verified_s"]
    arrived_s = min(record["anchor_arrived_s"], record["anchor_ready_s"])
    deserialise_s = record["anchor_ready_s"] - arrived_s
    waited_s = verify_s = rejected_s = 0.0
    if drafts and ready_s is not None and verified_s is not None and end_s > drafts[-1]:
        waited_s = max(ready_s - drafts[-1], 0.0)
        verify_s = verified_s - max(ready_s, drafts[-1])
        wrong = len(drafts) - record["accepted"]
        rejected_s = (drafts[-1] - record["anchor_ready_s"]) * wrong / len(drafts)
    parts = {
        "communication_s": arrived_s + waited_s,
        "deserialise_s": deserialise_s,
        "verify_s": verify_s,
        "rejected_s": rejected_s,
    }
    return {
        "spent": {**parts, "decode_s": end_s - sum(parts.values())},
        "idle_s": record["anchor_ready_s"] + waited_s,
    }


def reference_rate_bps(layout_tokens: int, config: Any, token_s: float) -> float:
    """The rate at which the residual of lynx takes as long as the paper's: so many tokens of decoding; two digits."""
    layout = layout_of(config, layout_tokens, dtype="float32")
    table = codec_plan(SERIES["lynx"].subject, layout.layers).table(layout.layers)
    residual = sum(table.codec(page.layer, page.kind).stream_bytes(page.shape)[1] for page in layout.pages())
    rate_bps = 8 * residual / (PAPER_RESIDUAL_TOKENS * token_s)
    return float(f"{rate_bps:.1e}")


def turns_of(
    plan: Sequence[tuple[int, float, int]], share: tuple[int, int] = (1, 1)
) -> list[tuple[int, int, float, int]]:
    """Rounds as tokens, number, rate and how many there are of this setting; those of one prompt stand together, so
    that it is prefilled once.

    Args:
        plan: tokens, rate and rounds of every setting.
        share: the first of how many equal ones.
    """
    turns = sorted((tokens, turn, rate, rounds) for tokens, rate, rounds in plan for turn in range(rounds))
    return turns[share[0] - 1 :: share[1]]


async def time_model(
    name: str,
    corpus: Corpus,
    scope: Scope,
    cells: Cells,
    progress: Progress,
    *,
    sweep: bool,
    share: tuple[int, int] = (1, 1),
) -> dict[str, Any]:
    """All transfers of one model: the reference, and with `sweep` other lengths and rates.

    Args:
        share: the first of how many equal ones, of the rounds; of so many runs at a time that share their cells.

    Returns:
        `transfers`, `reference` and `shape` of the raw results.
    """
    timing = Timing(name, "cpu")
    await timing.load()
    config = timing.loaded.model.config
    with cells.alone():
        token_s = await timing.step_s(scope.time_tokens, cells)
    rate_bps = reference_rate_bps(scope.time_tokens, config, token_s)
    reference = {"tokens": scope.time_tokens, "rate_bps": rate_bps}
    plan = [(scope.time_tokens, rate_bps, scope.rounds if sweep else scope.other_rounds)]
    if sweep:
        plan += [(tokens, rate_bps, scope.sweep_rounds) for tokens in scope.sweep_tokens]
        plan += [(scope.time_tokens, rate_bps * factor, scope.rounds_at(factor)) for factor in scope.sweep_rates]
    turns = turns_of(plan, share)
    records: list[dict[str, Any]] = []
    # Segments are as small as the lowest rate wants them, whatever the rate of a transfer is.
    options = DemoOptions(rate=f"{min(rate for _, rate, _ in plan) / 1e6:g}Mbit", timeout_s=SILENCE_S)

    async def work() -> None:
        left = _Left(len(turns))
        for tokens, turn, rate, rounds in turns:
            with left.one():
                prompt = make_task(timing.loaded.tokenizer, corpus, "summary", turn, tokens, 0).prompt
                at_reference = {"tokens": tokens, "rate_bps": rate} == reference
                checked = "default" if at_reference else None
                made = await timing.round_of(list(SERIES), prompt, rate, turn, cells, checked, calibrated=True)
                records.extend(made)
            progress.tell(
                f"{name}: transfers of {tokens} tokens at {rate / 1e6:g} Mbit/s, round {turn + 1} of {rounds}; "
                f"about {left.seconds / 60:.0f} min left for {name}"
            )

    async with Pair.open(options, lambda _progress: None, "perf.report.prefill_process") as pair:
        timing.pair = pair
        await pair.run(work())
    shape = layout_of(config, 1)
    return {
        "transfers": records,
        "reference": reference,
        "shape": {"layers": shape.layers, "heads": shape.heads, "size": shape.key_size},
    }


class _Left:
    """How long the remaining rounds will take, as long as the last ones that were not known before."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self._took_s = rounds, [_ROUND_S]

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Around a round; one that takes no time was known."""
        began_s = time.monotonic()
        yield
        self._rounds -= 1
        if (took_s := time.monotonic() - began_s) > 1:
            self._took_s.append(took_s)

    @property
    def seconds(self) -> float:
        """Of all that is left."""
        last = self._took_s[-1:] if len(self._took_s) == 1 else self._took_s[1:][-10:]
        return self._rounds * statistics.fmean(last)
