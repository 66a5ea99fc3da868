"""Results of an evaluation that nobody has measured: small, of the right shape, from a seed."""

from __future__ import annotations

from typing import Any

import numpy as np

from perf.report.parts import PARTS
from perf.report.series import SERIES, SPLIT_BITS
from perf.report.simulator import Case, token_times_s

MODELS = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
REFERENCE = {"smollm2": {"tokens": 1024, "rate_bps": 100e6}, "gemma3": {"tokens": 1024, "rate_bps": 40e6}}
BYTES = {"bf16": 40, "int8": 21, "int4": 11, "cachegen": 8, "lynx": 21, "lynx_anchor": 21, "default": 20}


MACHINE = {"processor": "none", "cores": 2, "packages": {"numpy": "2"}}


def about(part: str) -> dict[str, Any]:
    """What is told about a part."""
    return {
        "command": f"python -m perf.report --quick --only {part}", "version": "0", "date": "2026-01-01",
        "machine": MACHINE, "took_s": 20.0, "cells": {"measured": 3, "kept_from_earlier_runs": 4},
        "scope": {"quick": True, "text_tokens": 1024, "rounds": 3, "sweep_rounds": 2},
        "models": MODELS if part != "device" else {}, "notes": ["A note <with> signs & more."],
    }  # fmt: skip


def transfer(
    rng: np.random.Generator, model: str, tokens: int, rate_bps: float, series: str, number: int
) -> dict[str, Any]:
    sent = BYTES[series] * tokens * 300
    times = (
        np.cumsum(rng.uniform(0.04, 0.05, 64))
        + 8 * sent * (0.55 if "lynx" in series or series == "default" else 1) / rate_bps
    )
    drafted = 20 if series in ("lynx", "default") else 0
    accepted = int(rng.integers(10, drafted + 1)) if drafted else 0
    return {
        "model": model, "tokens": tokens, "rate_bps": rate_bps, "series": series, "number": number, "round": 0,
        "ttft_s": float(times[0]), "tt32t_s": float(times[31]), "tt64t_s": float(times[63]),
        "token_times_s": times.tolist(), "bytes_sent": sent, "values": tokens * 300 * 20, "drafted": drafted,
        "accepted": accepted, "equal_qfull": True, "idle_s": float(times[0] - 0.04),
        "spent": {"communication_s": 1.0, "deserialise_s": 0.1, "decode_s": 2.0, "verify_s": 0.1, "rejected_s": 0.2},
    }  # fmt: skip


def canned() -> dict[str, Any]:
    """A whole `results.json`."""
    rng = np.random.default_rng(1)
    transfers = [
        transfer(rng, model, tokens, rate, series, number)
        for model in MODELS
        for tokens, rate in ((1024, REFERENCE[model]["rate_bps"]), (512, 100e6), (1024, 200e6))
        for series in SERIES
        for number in range(3)
    ]
    answers = [
        {"model": model, "task": task, "tokens": tokens, "number": number, "series": series, "score": float(score)}
        for model, tasks in (
            ("smollm2", ("needle", "questions", "summary", "prose")),
            ("gemma3", ("needle", "summary")),
        )
        for task in tasks
        for tokens in ((512, 1024) if task in ("needle", "questions") else (1024,))
        for series in SERIES
        for number, score in enumerate(rng.integers(0, 2, 4) if task != "prose" else rng.uniform(2, 3, 4))
    ]
    drafts = [
        {"model": model, "number": number, "series": series, "accepted": int(rng.integers(0, 65)),
         "bits_anchor": 4.5 + at / 3}
        for model in MODELS
        for at, series in enumerate(("lynx", "default", "int4", *SPLIT_BITS))
        for number in range(4)
    ]  # fmt: skip
    attention = [
        {"model": model, "number": number, "series": series, "vnmse": float(rng.uniform(1e-4, 1e-1))}
        for model in MODELS
        for series in SERIES
        for number in range(3)
        if series != "bf16"
    ]
    grid = np.linspace(-1, 1, 41)
    distribution = [
        {"model": model, "kind": kind, "number": number, "at": grid.tolist(),
         "share_below": (0.5 + 0.5 * np.tanh(4 * grid + 0.1 * number)).tolist(), "middle_half": 0.2}
        for model in MODELS
        for kind in ("key", "value")
        for number in range(2)
    ]  # fmt: skip
    concurrent = [
        {"series": series, "round": turn, "request": request, "ttft_s": 1 + at + request / 8, "tt32t_s": 3.0 + at}
        for at, series in enumerate(SERIES)
        for turn in range(2)
        for request in range(8)
    ]
    checked = [
        {"model": "smollm2", "tokens": 1024, "rate_bps": 100e6, "series": series,
         **{field: {"predicted": at, "measured": [at * 0.97, at * 1.05]}
            for field, at in (("ttft_s", 1.0), ("tt32t_s", 2.0), ("tt64t_s", 3.0))}}
        for series in SERIES
    ]  # fmt: skip
    on_device = [
        transfer(rng, "llama8b", 16384, rate, series, number) | {"equal_qfull": None}
        for rate in (8e9, 25e9)
        for series in SERIES
        if series != "cachegen"
        for number in range(3)
    ]
    device = {
        "model": "llama8b", "accelerator": "a card", "transfers": on_device,
        "reference": {"tokens": 16384, "rate_bps": 8e9}, "left_out": ["cachegen"],
    }  # fmt: skip
    return {
        "format": 4, "command": "python -m perf.report --quick", "version": "0", "date": "2026-01-01", "took_s": 60.0,
        "machine": MACHINE, "parts": {part: about(part) for part in PARTS},
        "settings": {"quick": True, "models": MODELS, "time_models": {**MODELS, "llama8b": "8B, a card"},
                     "reference": {**REFERENCE, "llama8b": device["reference"]},
                     "checked_tasks": ["needle", "questions"],
                     "scaling_model": "smollm2", "notes": ["A note <with> signs & more."],
                     "concurrent": {"requests": 8, "tokens": 1024, "rate_bps": 200e6, "decode_token_s": 0.03}},
        "transfers": transfers, "answers": answers, "drafts": drafts, "attention": attention,
        "distribution": distribution, "concurrent": concurrent,
        "simulator": {"checked": checked, "predicted": predictions(), "assumptions": "Eight devices."},
        "peers": [one for model in MODELS for one in peers_of(model)],
        "device": device, "device_transfers": on_device,
        "transports": {"mib": [1, 4], "figures": {
            "lynx": {"1": {"gbytes_per_s": 1.0}, "4": {"gbytes_per_s": 2.0}}, "nixl": {"failure": "not installed"}}},
    }  # fmt: skip


def predictions() -> list[dict[str, Any]]:
    """Of one model, two rates and two lengths."""
    found = []
    for rate in (10e9, 100e9):
        for tokens in (16384, 131072):
            for series, streams in (("int8", (8,)), ("int4", (4,)), ("default", (4, 4))):
                case = Case(
                    stream_bytes=tuple(bits * tokens * 1000 for bits in streams), values=tokens * 8000, pages=640,
                    rate_bps=rate, latency_s=0.0, encode_value_s=0.0, decode_value_s=(0.0,) * len(streams),
                    pass_s={1: 0.01, 64: 0.02},
                )  # fmt: skip
                by_prompt = [token_times_s(case, stands, 32)[-1] for stands in (3, 20, 64)]
                found.append(
                    {"model": "Qwen3 32B", "tokens": tokens, "rate_bps": rate, "series": series,
                     "ttft_s": token_times_s(case, 64, 1)[0], "tt32t_s": float(np.mean(by_prompt)),
                     "tt32t_by_prompt_s": by_prompt}
                )  # fmt: skip
    return found


def peers_of(model: str) -> list[dict[str, Any]]:
    """One of this project's, one without an error, one with, and one that failed."""
    of = {"model": model, "settings": "some", "ours": False}
    return [
        {**of, "name": "default, anchor", "ours": True, "bits": 4.5, "vnmse": 1e-3},
        {**of, "name": "zipnn", "bits": 10.8, "vnmse": 0.0, "encode_mvalues_s": 300.0},
        {**of, "name": "quanto", "bits": 4.5, "vnmse": 2e-2, "encode_mvalues_s": 30.0},
        {**of, "name": "hqq", "failure": "not installed"},
    ]
