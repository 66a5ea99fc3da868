"""What the evaluation makes of a transfer's times, its requests between processes, and devices that are not there."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from pathlib import Path

if not all(importlib.util.find_spec(needed) for needed in ("torch", "transformers")):
    pytest.skip("needs torch and transformers", allow_module_level=True)

from lynx_codec.plan import DEFAULT_PLAN
from lynx_net.demo.options import DemoError, DemoOptions
from lynx_net.demo.pair import Pair
from lynx_net.wire.layout import CacheLayout
from perf.report.__main__ import main, parse
from perf.report.cells import Cells
from perf.report.device import SHAPES, DeviceMissingError, Shape, check_device, load_shape, noise_prompt
from perf.report.measure_concurrent import DECODE_TOKEN_S, times_s
from perf.report.measure_device import coded, measure_device, with_stands
from perf.report.measure_time import Timing, spent, turns_of
from perf.report.predict import checked
from perf.report.prefill_process import TransferRequest, dtype_of
from perf.report.scope import FULL, QUICK, Progress
from perf.report.series import SERIES, codec_plan
from perf.splits import Drafted

PLAIN = {
    "token_times_s": [1.1, 1.2, 1.3], "draft_times_s": [], "residual_ready_s": None, "verified_s": None,
    "anchor_arrived_s": 0.95, "anchor_ready_s": 1.0, "accepted": 0,
}  # fmt: skip


def test_plain_decoding_waits_until_the_cache_is_there() -> None:
    found = spent(PLAIN)
    assert found["spent"] == pytest.approx(
        {"communication_s": 0.95, "deserialise_s": 0.05, "verify_s": 0, "rejected_s": 0, "decode_s": 0.3}
    )
    assert found["idle_s"] == pytest.approx(1.0)


def test_parts_of_a_drafted_text_add_up() -> None:
    record = {
        **PLAIN, "draft_times_s": [1.1, 1.2, 1.3, 1.4], "accepted": 3, "residual_ready_s": 2.0, "verified_s": 2.25,
        "token_times_s": [1.1, 1.2, 1.3, 2.25, 2.35],
    }  # fmt: skip
    found = spent(record)
    parts = found["spent"]
    assert sum(parts.values()) == pytest.approx(2.35)
    assert parts["communication_s"] == pytest.approx(0.95 + 0.6)
    assert parts["verify_s"] == pytest.approx(0.25)
    assert parts["rejected_s"] == pytest.approx(0.1)
    assert found["idle_s"] == pytest.approx(1.6)


def test_a_text_that_ends_with_its_drafts_does_not_wait_for_their_proof() -> None:
    drafts = [1.1, 1.2, 1.3]
    record = {
        **PLAIN, "draft_times_s": drafts, "accepted": 3, "residual_ready_s": 2.0, "verified_s": 2.2,
        "token_times_s": drafts,
    }  # fmt: skip
    assert spent(record)["spent"]["verify_s"] == 0
    assert spent(record)["idle_s"] == pytest.approx(1.0)


def test_a_request_between_the_processes_comes_through_and_nonsense_is_refused() -> None:
    wanted = TransferRequest("default", "smollm2", (5, 70000, 3), 1e8)
    assert TransferRequest.from_meta(wanted.to_meta()) == wanted
    for field, bad in (("codec", "none"), ("prompt", b"123"), ("rate_bps", 0.0), ("model", 3)):
        with pytest.raises(DemoError, match="malformed"):
            TransferRequest.from_meta({**wanted.to_meta(), field: bad})


def test_concurrent_requests_count_like_single_ones() -> None:
    drafted = Drafted((4, 4), (1.0, 1.03), 2.0)
    assert times_s(drafted, 64, 4) == pytest.approx([1.0, 1.03, 2.0, 2.0 + DECODE_TOKEN_S])
    assert times_s(drafted, 0, 2) == pytest.approx([2.0, 2.0 + DECODE_TOKEN_S])
    assert times_s(Drafted((), (), 1.5), 0, 2) == pytest.approx([1.5 + DECODE_TOKEN_S, 1.5 + 2 * DECODE_TOKEN_S])


def test_the_default_codec_of_the_report_is_that_of_the_library() -> None:
    layers = 7
    ours = codec_plan(SERIES["default"].subject, layers).table(layers)
    theirs = DEFAULT_PLAN.table(layers)
    for layer in range(layers):
        for kind in ("key", "value"):
            a, b = ours.codec(layer, kind), theirs.codec(layer, kind)
            bits = lambda codec: (getattr(codec, "codec", codec).params()["bits"], codec.stream_names)  # noqa: E731
            assert bits(a) == bits(b)


def test_layers_that_differ_differ_in_a_plan() -> None:
    plan = codec_plan(SERIES["cachegen"].subject, 6).table(6)
    bins = [plan.codec(layer, "key").params()["bin"] for layer in range(6)]
    assert bins == [0.5, 0.5, 1.0, 1.0, 1.5, 1.5]


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import lynx_gpu

    check_device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceMissingError, match="no CUDA device"):
        check_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(lynx_gpu, "device_count", lambda: 0)
    with pytest.raises(DeviceMissingError, match="CuPy"):
        check_device("cuda")
    monkeypatch.delattr(lynx_gpu, "DeviceCodec")
    with pytest.raises(DeviceMissingError, match=r"lynx_gpu\.DeviceCodec"):
        check_device("cuda")


def test_a_model_of_a_shape_has_it_and_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "less", Shape("less", 2, 32, 64, 4, 2, 50))
    made, again = load_shape("less", "cpu").model, load_shape("less", "cpu").model
    assert dtype_of(made) == "bfloat16"
    assert not made.training
    assert (made.config.num_key_value_heads, made.config.num_hidden_layers, made.config.vocab_size) == (2, 2, 50)
    assert all(bool((a == b).all()) for a, b in zip(made.parameters(), again.parameters(), strict=True))
    assert noise_prompt("less", 1, 20) == noise_prompt("less", 1, 20) != noise_prompt("less", 2, 20)
    assert len(noise_prompt("less", 1, 20)) == 21
    assert max(noise_prompt("less", 1, 500)) < 50


def test_the_part_of_the_device_is_whole_where_its_model_is_tiny_and_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["lynx_anchor", "default"]
    monkeypatch.setattr(sys.modules[measure_device.__module__], "coded", lambda _: names)
    cells = Cells(tmp_path, {})
    work = measure_device("cpu", 1, cells, Progress(), name="tiny", tokens=256, rates_bps=(1e9,))
    made = asyncio.run(work)
    rates = {made["reference"]["rate_bps"], 1e9}
    assert {(one["series"], one["rate_bps"]) for one in made["transfers"]} == {(s, r) for s in names for r in rates}
    assert all(one["tokens"] == 256 and len(one["token_times_s"]) == 64 for one in made["transfers"])
    assert all(one["equal_qfull"] is None for one in made["transfers"]), "noise proves nothing"
    assert cells.made == 1 + len(made["transfers"])
    assert made["left_out"] == ["bf16", "int8", "int4", "cachegen", "lynx"]


def test_what_is_measured_behind_real_transfers_is_what_the_simulator_reads(tmp_path: Path) -> None:
    timing = Timing("tiny", "cpu")
    names = ["int8", "lynx", "lynx_anchor", "default"]

    async def work() -> list[dict[str, Any]]:
        await timing.load()
        prompt = noise_prompt("tiny", 0, 256)
        return await timing.round_of(names, prompt, 20e6, 0, Cells(tmp_path, {}), calibrated=True)

    async def run() -> list[dict[str, Any]]:
        options = DemoOptions(rate="20Mbit", timeout_s=60.0)
        async with Pair.open(options, lambda _: None, "perf.report.prefill_process") as pair:
            timing.pair = pair
            return await pair.run(work())

    records = asyncio.run(run())
    assert [one["series"] for one in records if "receiving" in one] == ["lynx", "default"]
    assert [one["series"] for one in records if "coding_s" not in one] == ["lynx_anchor"]
    layout = CacheLayout(layers=2, tokens=1, heads=2, key_size=64, value_size=64)
    found = checked(records, {"tiny": layout})
    assert {one["series"] for one in found} == set(names)
    assert all(0 < one[field]["predicted"] < 60 for one in found for field in ("ttft_s", "tt32t_s", "tt64t_s"))


def test_a_device_is_not_asked_for_what_it_has_no_kernels_for() -> None:
    assert [name for name in SERIES if name not in coded("cuda")] == ["cachegen"]


def drafted(number: int, accepted: int) -> dict[str, object]:
    drafts = [1.0 + number + 0.1 * i for i in range(10)]
    plain = [3.0 + number + 0.05 * i for i in range(64 - accepted)]
    return {
        "series": "default", "rate_bps": 1e9, "number": number, "draft_times_s": drafts, "drafted": 10,
        "accepted": accepted, "token_times_s": [*drafts[:accepted], *plain], "verified_s": 3.0 + number,
        "plain_step_s": 0.05, "residual_ready_s": 2.9 + number, "anchor_arrived_s": 0.8 + number,
        "anchor_ready_s": 0.9 + number,
    }  # fmt: skip


def test_transfers_of_noise_are_put_together_for_drafts_that_stood_elsewhere() -> None:
    measured = [drafted(0, 0), drafted(1, 10), {"series": "int8", "rate_bps": 1e9, "draft_times_s": []}]
    few, all_, plain = with_stands(measured, {"default": [64, 2]})
    assert few["token_times_s"][:4] == pytest.approx([1.0, 1.1, 3.0, 3.05])
    assert (few["accepted"], len(few["token_times_s"])) == (2, 64)
    assert few["tt32t_s"] == pytest.approx(3.0 + 0.05 * 29)
    assert few["spent"]["rejected_s"] == pytest.approx(1.0 * 8 / 10)
    assert all_["accepted"] == 10
    assert all_["token_times_s"] == pytest.approx(
        [2.0 + 0.1 * i for i in range(10)] + [4 + 0.05 * i for i in range(54)]
    )
    assert plain == measured[2]
    fewer = with_stands(measured[1:2], {"default": [3]})[0]["token_times_s"]
    assert fewer == pytest.approx([2.0, 2.1, 2.2, *(4 + 0.05 * i for i in range(61))]), "plain tokens go on as they did"
    assert with_stands(measured, {}) == measured


def test_other_settings_keep_their_rounds_while_there_are_as_many() -> None:
    less = FULL.with_rounds(12)
    assert (less.rounds, less.other_rounds, less.device_rounds) == (12, 12, 12)
    assert (less.sweep_rounds, less.concurrent_rounds) == (10, 3)
    assert FULL.with_rounds(100) == dataclasses.replace(FULL, device_rounds=100)
    assert FULL.with_rounds(2).sweep_rounds == 2
    assert [less.rounds_at(factor) for factor in (0.5, 1.0, 2.0, 4.0)] == [10, 10, 20, 40]
    assert QUICK.rounds_at(4.0) == QUICK.sweep_rounds


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "device"], "--device cuda"),
        (["--only", "time", "--device", "cuda"], "--device cuda"),
        (["--rounds", "0"], "not a number of rounds"),
        (["--rounds", "few"], "not a number of rounds"),
        (["--share", "1/2"], "--only time"),
        (["--share", "1/2", "--only", "time", "--fresh"], "--fresh"),
        (["--share", "1/2", "--only", "time", "--from", "results.json"], "--from"),
        (["--share", "1/2", "--only", "time", "--readme"], "--readme"),
        (["--share", "3/2", "--only", "time"], "not a share"),
        (["--share", "2", "--only", "time"], "not a share"),
    ],
)
def test_options_that_do_nothing_together_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert said in capsys.readouterr().err


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(1, 4), st.floats(1, 9), st.integers(1, 5)), max_size=6))
def test_every_round_is_in_one_of_the_shares(shares: int, plan: list[tuple[int, float, int]]) -> None:
    several = [turns_of(plan, (share, shares)) for share in range(1, shares + 1)]
    assert sorted(turn for turns in several for turn in turns) == turns_of(plan)
    assert max(map(len, several)) - min(map(len, several)) <= 1


def test_a_share_is_measured_and_draws_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[tuple[int, int]] = []
    monkeypatch.setattr("perf.report.__main__._measured", lambda options, *_: measured.append(options.share))
    out = tmp_path / "out"
    assert main(["--only", "time", "--share", "2/3", "--out", str(out)]) == 0
    assert measured == [(2, 3)]
    assert not out.exists()
    assert "without --share" in capsys.readouterr().err


def test_runs_that_share_their_cells_wait_for_what_another_measures(tmp_path: Path) -> None:
    def run(_: int) -> bool:
        cells = Cells(tmp_path, {})
        with cells.alone():
            held = cells.held({"what": "step"})
            if held is None:
                time.sleep(0.05)
                cells.put({"what": "step"}, 1.0)
        return held is None

    with ThreadPoolExecutor(4) as several:
        assert sum(several.map(run, range(4))) == 1


def test_where_nothing_can_be_drawn_the_device_is_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from perf.report import device, run

    async def measured(*_: object) -> dict[str, object]:
        at = {"tokens": 1, "rate_bps": 1.0}
        return {
            "model": "tiny",
            "accelerator": "a card",
            "transfers": [],
            "reference": at,
            "left_out": [],
        }

    for module in (device, run):
        monkeypatch.setattr(module, "check_device", lambda _: None)
    monkeypatch.setattr(run, "load_corpus", lambda _: pytest.fail("needs no prose"))
    monkeypatch.setattr("perf.report.measure_device.measure_device", measured)
    monkeypatch.setattr("perf.report.measure_device.accelerator", lambda _: "a card")
    monkeypatch.setattr(run, "cache_folder", lambda: tmp_path)
    for name in [one for one in sys.modules if one.startswith(("matplotlib", "perf.report.build", "perf.report.fig"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "perf.report.draw", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--only", "device", "--device", "cuda", "--out", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results["parts"]) == {"device"}
    assert results["parts"]["device"]["machine"]["accelerator"] == "a card"
    assert "--from" in capsys.readouterr().err
    assert main(["--only", "quality", "--out", str(tmp_path / "none")]) == 1
    assert "matplotlib" in capsys.readouterr().err
