"""The simulator of the evaluation: special cases worked out by hand, and orders that must hold everywhere."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynx_net.demo.exchange import STARTED_S
from lynx_net.errors import LocalProtocolError
from lynx_net.serdes.split import Situation, expected_time_s
from lynx_net.wire.layout import CacheLayout
from perf.report.calibrate import coding_s, receiving, times_longer, undisturbed_s
from perf.report.predict import checked
from perf.report.simulator import Case, relative_error, streams_ready_s, token_times_s

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

CASE = Case(
    stream_bytes=(500_000, 500_000), values=1_000_000, pages=100, rate_bps=8e6, latency_s=0.0, encode_value_s=0.0,
    decode_value_s=(0.0, 0.0), pass_s={1: 0.05, 65: 0.1},
)  # fmt: skip

cases = st.builds(
    Case,
    stream_bytes=st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)),
    values=st.integers(1, 10**9),
    pages=st.integers(1, 10_000),
    rate_bps=st.floats(1e6, 1e12),
    latency_s=st.floats(0, 1),
    encode_value_s=st.floats(0, 1e-8),
    decode_value_s=st.tuples(st.floats(0, 1e-8), st.floats(0, 1e-8)),
    pass_s=st.just({1: 0.03, 65: 0.06}),
)


def test_streams_come_in_at_the_rate_of_the_slowest_part() -> None:
    assert streams_ready_s(CASE) == [0.5, 1.0]
    slow = dataclasses.replace(CASE, encode_value_s=2e-6)
    assert streams_ready_s(slow) == pytest.approx(
        [2.02, 2.02]
    )  # both with the last page, and one page to fill the pipe
    decoding = dataclasses.replace(CASE, decode_value_s=(3e-6, 1e-6))
    assert streams_ready_s(decoding) == pytest.approx([3.03, 4.01])


def test_tokens_by_hand() -> None:
    times = token_times_s(CASE, 64, 20)  # drafts from 0.5 s to 1.0 s, ten of them; a pass over 11 tokens verifies
    assert times[:10] == pytest.approx([0.55 + 0.05 * i for i in range(10)])
    verified_s = 1.0 + 0.05 + 0.05 * 10 / 64
    assert times[10:] == pytest.approx([verified_s + 0.05 * i for i in range(10)])
    none = token_times_s(CASE, 0, 3)
    assert none == pytest.approx([verified_s, verified_s + 0.05, verified_s + 0.1])
    anchor = token_times_s(CASE, 64, 3, max_drafts=0)
    assert anchor == pytest.approx([0.55, 0.6, 0.65])
    single = dataclasses.replace(CASE, stream_bytes=(1_000_000,), decode_value_s=(0.0,))
    assert token_times_s(single, 64, 2) == pytest.approx([1.05, 1.1])


@given(cases, st.integers(0, 64), st.integers(1, 64))
def test_later_tokens_are_later_and_more_drafts_that_stand_are_never_worse(
    case: Case, stands: int, tokens: int
) -> None:
    times = token_times_s(case, stands, tokens)
    assert len(times) == tokens
    assert times == sorted(times)
    better = token_times_s(case, 64, tokens)
    assert all(a <= b + 1e-9 for a, b in zip(better, times, strict=True))
    anchor = token_times_s(case, stands, tokens, max_drafts=0)
    assert all(a <= b + 1e-9 for a, b in zip(anchor, times, strict=True)), "nothing is sooner than the anchor alone"
    faster = dataclasses.replace(case, rate_bps=2 * case.rate_bps)
    assert streams_ready_s(faster)[-1] <= streams_ready_s(case)[-1] + 1e-9


@pytest.mark.parametrize("rate", [4e6, 8e6, 40e6])
def test_where_every_draft_stands_it_agrees_with_the_model_that_chooses_splits(rate: float) -> None:
    case = dataclasses.replace(CASE, rate_bps=rate, pass_s={1: 0.05})
    sure = {bits: (1.0, 1.0) for bits in range(9)}
    situation = Situation(rate_bps=rate, decode_token_s=0.05, tokens=32)
    expected = expected_time_s((4, 4), case.stream_bytes, situation, sure)
    assert token_times_s(case, 64, 32)[-1] == pytest.approx(expected)


def test_passes_between_and_beyond_those_measured() -> None:
    assert CASE.pass_of_s(33) == pytest.approx(0.075)
    assert CASE.pass_of_s(129) == pytest.approx(0.15)
    assert dataclasses.replace(CASE, pass_s={1: 0.05}).pass_of_s(10) == 0.05


@pytest.mark.parametrize(
    "change",
    [
        {"stream_bytes": ()}, {"decode_value_s": (0.0,)}, {"rate_bps": 0.0}, {"values": 0}, {"latency_s": -1.0},
        {"pass_s": {}}, {"pass_s": {1: 0.0}},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(LocalProtocolError):
        dataclasses.replace(CASE, **change)  # type: ignore[arg-type]


def test_errors_are_relative_to_what_was_measured() -> None:
    assert relative_error([1.1, 0.5], [1.0, 1.0]) == pytest.approx([0.1, -0.5])


RECORD: dict[str, Any] = {
    "model": "m", "number": 0, "tokens": 256, "rate_bps": 8e6, "values": 1_000_000, "wire_share": 1.0,
    "accepted": 0, "drafted": 0, "plain_step_s": 0.05, "ttft_s": 1.0, "tt32t_s": 2.0, "tt64t_s": 3.0,
}  # fmt: skip
LAYOUTS = {"m": CacheLayout(layers=2, tokens=1, heads=1, key_size=64, value_size=64)}


def predicted(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is predicted for each codec of these records."""
    return checked(records, LAYOUTS)


def test_a_prediction_counts_headers_and_how_fast_the_machine_was_at_the_time() -> None:
    record = {
        **RECORD, "series": "int8", "arriving_bytes": [1_000_000], "wire_share": 1.25, "plain_step_s": 0.2,
        "coding_s": [0.0],
    }  # fmt: skip
    (found,) = predicted([record])
    assert found["ttft_s"]["predicted"] == pytest.approx(1.25 + 0.2, abs=0.01)
    assert found["tt32t_s"]["predicted"] == pytest.approx(1.25 + 32 * 0.2, abs=0.01)
    assert found["tt64t_s"]["measured"] == [3.0]
    rounds = [record, *({**record, "number": number, "plain_step_s": 0.4} for number in (1, 2))]
    (of_three,) = predicted(rounds)
    assert of_three["ttft_s"]["predicted"] == pytest.approx(1.25 + 0.4, abs=0.01), "each round at its own speed"


def test_passes_take_longer_while_streams_behind_the_first_one_arrive() -> None:
    case = dataclasses.replace(CASE, receiving=2.0)
    alone = token_times_s(case, 64, 7, max_drafts=0)
    assert alone == pytest.approx([0.6, 0.7, 0.8, 0.9, 1.0, 1.05, 1.1]), "until a second has passed"
    assert case.token_after_s(0.95, 1.0) == pytest.approx(1.0 + 0.025), "half of the pass is slow"
    sooner = dataclasses.replace(case, stream_bytes=(500_000, 490_000))
    drafted = token_times_s(sooner, 64, 6)
    assert drafted[:5] == pytest.approx([0.6, 0.7, 0.8, 0.9, 0.995]), "the last one ends faster than it began"
    assert drafted[5] == pytest.approx(0.995 + case.pass_of_s(6)), "only five drafts have to be verified"
    with pytest.raises(LocalProtocolError):
        dataclasses.replace(CASE, receiving=0.5)


def test_what_is_measured_behind_a_transfer_is_of_its_round_and_counts_for_both_stages() -> None:
    of_lynx = {"arriving_bytes": [500_000, 500_000]}
    lynx = {**RECORD, **of_lynx, "series": "lynx", "accepted": 5, "drafted": 5, "coding_s": [0.6, 0.7]}
    lynx["receiving"] = {"ends_s": [0.0, 0.1, 0.2], "until_s": 0.2, "verify_s": 0.3}
    anchor = {**RECORD, **of_lynx, "series": "lynx_anchor"}
    of_lynx_now, of_anchor = predicted([lynx, anchor])
    assert of_anchor["ttft_s"]["predicted"] == pytest.approx(0.6 + 0.6 / 4 + 0.1, abs=0.01), "coding, and four pages"
    assert of_lynx_now["ttft_s"]["predicted"] == of_anchor["ttft_s"]["predicted"]
    assert of_anchor["tt32t_s"]["predicted"] < of_lynx_now["tt32t_s"]["predicted"]
    quick = {**lynx, "coding_s": [0.1, 0.2]}
    assert predicted([quick, anchor])[1]["ttft_s"]["predicted"] == pytest.approx(0.5 + 0.1 / 4 + 0.1, abs=0.01), "link"
    later = [{**one, "number": 1} for one in (quick, anchor)]
    (_, of_both) = predicted([lynx, anchor, *later])
    first, second = (predicted(of)[1]["ttft_s"]["predicted"] for of in ([lynx, anchor], later))
    assert of_both["ttft_s"]["predicted"] == pytest.approx((first + second) / 2), "each round by its own"
    alone = {"ends_s": [0.0, 0.05, 0.1], "until_s": 0.1, "verify_s": 0.4}
    undisturbed = predicted([{**lynx, "receiving": alone}, anchor])[1]
    assert undisturbed["ttft_s"]["predicted"] == pytest.approx(0.6 + 0.6 / 4 + 0.05, abs=0.01)


def test_the_pass_that_verifies_takes_as_long_as_it_did_behind_a_transfer() -> None:
    beside = {"ends_s": [0.0, 0.05, 0.1], "until_s": 0.1, "verify_s": 0.4}
    record = {
        **RECORD, "series": "lynx", "arriving_bytes": [500_000, 150_000], "drafted": 3, "coding_s": [0.0, 0.0],
        "receiving": beside,
    }  # fmt: skip
    (found,) = predicted([record])
    assert found["ttft_s"]["predicted"] == pytest.approx(0.5 + 3 * 0.05 + 0.4, abs=0.01), "of three drafts none stood"
    (slow,) = predicted([{**record, "receiving": {**beside, "verify_s": 0.9}}])
    assert slow["tt32t_s"]["predicted"] - found["tt32t_s"]["predicted"] == pytest.approx(0.5)


class PassingModel:
    """Stands for a model whose passes take 10 ms a token, and behind one of which the residual is soon in place."""

    def __init__(self, passes: int) -> None:
        self.length = 7
        self.passes: list[int] = []
        self._until = passes
        self.arrive: Callable[[], object] = lambda: None

    def forward(self, tokens: list[int]) -> None:
        self.passes.append(len(tokens))
        self.length += len(tokens)
        time.sleep(0.01 * len(tokens))
        if len(self.passes) == self._until:
            self.arrive()

    def truncate(self, tokens: int) -> None:
        self.length = tokens


class Arriving:
    """Stands for `Timing`: the first stream is in place at once, the residual 5 ms after so many passes."""

    def __init__(self, passes: int) -> None:
        self.model, self.thread = PassingModel(passes), ThreadPoolExecutor(1)

    async def request(self, series: str, prompt: list[int], rate_bps: float) -> tuple[PassingModel, Any]:
        anchor, residual = Moment(), Moment()
        anchor.set_result(None)
        loop = asyncio.get_running_loop()
        self.model.arrive = lambda: loop.call_soon_threadsafe(loop.call_later, 0.005, residual.set_result, None)
        return self.model, SimpleNamespace(anchor_ready=anchor, residual_ready=residual, complete=residual)

    @contextlib.asynccontextmanager
    async def watched(self, transfer: object) -> AsyncIterator[None]:
        yield


class Moment(asyncio.Future[None]):
    """Knows when it was done."""

    at_s = 0.0

    def set_result(self, result: None) -> None:
        self.at_s = time.monotonic()
        super().set_result(result)


def test_passes_are_made_until_the_last_stream_is_in_place_and_then_one_verifies() -> None:
    timing: Any = Arriving(3)
    with timing.thread:
        found = asyncio.run(receiving(timing, "lynx", [1], 1e6, 4))
    drafts = len(timing.model.passes) - 1
    assert drafts >= 3
    assert timing.model.passes == [*[1] * drafts, 5]
    assert timing.model.length == 7 + 5, "the last one computes the drafts anew"
    assert len(found["ends_s"]) == 1 + drafts
    assert found["ends_s"] == sorted(found["ends_s"])
    assert found["ends_s"][-1] >= found["until_s"] > found["ends_s"][2] >= 0.02
    assert found["verify_s"] >= 0.05


def test_no_more_passes_are_made_than_the_decode_loop_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.report.calibrate.MAX_DRAFTS", 2)
    timing: Any = Arriving(2)
    with timing.thread:
        found = asyncio.run(receiving(timing, "lynx", [1], 1e6, 2))
    assert timing.model.passes == [1, 1, 3]
    assert found["until_s"] == found["ends_s"][-1], "nothing is computed behind them"
    assert found["verify_s"] >= 0.03


def test_a_stream_that_seems_to_be_in_place_before_the_one_ahead_of_it_takes_no_time() -> None:
    record = {**RECORD, "series": "lynx", "arriving_bytes": [1, 1], "coding_s": [0.6, 0.59]}
    (found,) = predicted([record])
    assert found["ttft_s"]["predicted"] == pytest.approx(0.6 + 0.6 / 4 + 0.05, abs=0.01)


@pytest.mark.parametrize(
    ("ends", "until", "found"),
    [
        ([0.0, 0.2, 0.4], 0.4, 0.2),
        ([0.0, 0.2, 0.35], 0.3, 0.15),
        ([0.0, 0.2, 0.5], 0.3, 0.1),
        ([0.0], 0.0, 0.0),
        ([1.0, 1.1], 1.0, 0.0),
    ],
)
def test_passes_are_counted_up_to_the_last_byte(ends: list[float], until: float, found: float) -> None:
    assert undisturbed_s(ends, until, 0.1) == pytest.approx(found)


def test_passes_take_longer_while_something_arrives() -> None:
    assert times_longer([0.0, 0.2, 0.4], 0.4, 0.1) == pytest.approx(2.0)
    assert times_longer([0.0, 0.2, 0.5], 0.3, 0.1) == pytest.approx(3.0)
    assert times_longer([0.0, 0.1], 0.1, 0.2) == 1.0
    assert times_longer([0.0], 0.0, 0.1) == 1.0


class PacedCoding:
    """Stands for `Timing`: streams in place after 1 and 2 s, a tenth later beside a pacer; or when all has come."""

    def __init__(self) -> None:
        self.rates_bps: list[float] = []
        self.coding_bps: dict[tuple[str, int], float] = {}

    async def request(self, series: str, prompt: list[int], rate_bps: float) -> tuple[None, Any]:
        self.rates_bps.append(rate_bps)
        slower = 1.1 if rate_bps < 1e9 else 1.0
        ready = [max(at_s * slower, 8 * 1_000_000 / rate_bps) for at_s in (1.0, 2.0)]
        complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        complete.set_result(None)
        return None, SimpleNamespace(
            complete=complete, stream_names=("anchor", "residual"), stats=SimpleNamespace(total_bytes=1_000_000),
            offer=SimpleNamespace(meta={STARTED_S: 5.0}),
            stream_ready=lambda stream: SimpleNamespace(at_s=5.0 + ready[stream]),
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def watched(self, transfer: object) -> AsyncIterator[None]:
        yield


def test_coding_is_timed_beside_a_pacer_that_does_not_limit_it() -> None:
    timing: Any = PacedCoding()
    for _ in range(2):
        assert asyncio.run(coding_s(timing, "lynx", [1, 2])) == pytest.approx([1.1, 2.2])
    assert timing.rates_bps[1:] == pytest.approx([8e6, 8e6 / 1.1]), "half of two seconds, and of the last time"


def test_a_cache_whose_residual_is_empty_has_its_first_draft_verified_at_once() -> None:
    case = Case(
        stream_bytes=(1_000_000, 0), values=1_000_000, pages=10, rate_bps=8e6, latency_s=0.0, encode_value_s=0.0,
        decode_value_s=(0.0, 0.0), pass_s={1: 0.1, 2: 0.1},
    )  # fmt: skip
    assert token_times_s(case, 64, 2) == pytest.approx([1.1, 1.2])
