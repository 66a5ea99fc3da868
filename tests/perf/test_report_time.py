"""What the evaluation makes of a transfer's times, its requests between processes, and devices that are not there."""

from __future__ import annotations

import importlib.util

import pytest

if not all(importlib.util.find_spec(needed) for needed in ("torch", "transformers")):
    pytest.skip("needs torch and transformers", allow_module_level=True)

from lynx_codec.plan import DEFAULT_PLAN
from lynx_net.demo.options import DemoError
from perf.report.device import SHAPES, DeviceMissingError, Shape, check_device, load_shape, noise_prompt
from perf.report.measure_concurrent import DECODE_TOKEN_S, times_s
from perf.report.measure_time import spent
from perf.report.prefill_process import TransferRequest, dtype_of
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
    monkeypatch.setitem(SHAPES, "tiny", Shape("tiny", 2, 32, 64, 4, 2, 50))
    made, again = load_shape("tiny", "cpu").model, load_shape("tiny", "cpu").model
    assert dtype_of(made) == "bfloat16"
    assert not made.training
    assert (made.config.num_key_value_heads, made.config.num_hidden_layers, made.config.vocab_size) == (2, 2, 50)
    assert all(bool((a == b).all()) for a, b in zip(made.parameters(), again.parameters(), strict=True))
    assert noise_prompt("tiny", 1, 20) == noise_prompt("tiny", 1, 20) != noise_prompt("tiny", 2, 20)
    assert len(noise_prompt("tiny", 1, 20)) == 21
    assert max(noise_prompt("tiny", 1, 500)) < 50
