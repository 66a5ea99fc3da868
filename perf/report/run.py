"""One run: all that the figures need is measured, in an order that leaves the machine alone while times are taken."""

from __future__ import annotations

import dataclasses
import datetime
import os
import shlex
from typing import TYPE_CHECKING, Any

import lynx_net
from lynx_net.demo.results import machine_facts
from lynx_net.integrations.transformers import layout_of
from lynx_net.integrations.weights import cache_folder
from perf.quality import MODELS
from perf.report import measure_concurrent, measure_quality, measure_time, predict
from perf.report.cells import Cells, fingerprint
from perf.report.corpus import load_corpus
from perf.report.device import SHAPES, check_device
from perf.report.figure import only, samples
from perf.report.measure_peers import measure_codecs, measure_transports
from perf.report.series import SERIES
from perf.report.tasks import CHECKED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.report.cells import Cells as CellsType
    from perf.report.corpus import Corpus
    from perf.report.scope import Progress, Scope

__all__ = ["FORMAT", "measure"]

FORMAT = 1
DECIDING = ("numpy", "numba", "torch", "transformers")
"""Packages that a measured figure may depend on."""

PACKAGES = (*DECIDING, "matplotlib", "scipy")
TITLES = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
SCALING_MODEL = "smollm2"

IDLE_LOAD = 0.5
"""Processes that wanted a core, over the last minute; with more the page says that the machine was busy."""


async def measure(
    scope: Scope,
    models: Sequence[str],
    device: str,
    arguments: Sequence[str],
    progress: Progress,
    *,
    threads: int,
    fresh: bool,
) -> dict[str, Any]:
    """Measure everything and return the raw results.

    Args:
        models: names of `perf.quality.MODELS`.
        device: "cpu" or "cuda".
        arguments: of the command, for the page.
        threads: of torch, while quality is measured; transfers are timed with one a process.
        fresh: nothing is taken from earlier runs.
    """
    check_device(device)
    folder = cache_folder() / "report"
    corpus = load_corpus(folder / "corpus")
    progress.tell(f"prose: {corpus.name}, {len(corpus.paragraphs)} paragraphs")
    machine = {**machine_facts(PACKAGES), "load_before": round(os.getloadavg()[0], 2)}
    on_this = {"machine": {name: machine[name] for name in ("processor", "cores", "python", "packages")}}
    times = Cells(folder / "cells", {"code": fingerprint(measure_time.SOURCES), **on_this}, fresh=fresh)
    quality = Cells(
        folder / "cells",
        {
            "code": fingerprint(measure_quality.SOURCES),
            "packages": {name: machine["packages"][name] for name in DECIDING},
        },
        fresh=fresh,
    )
    results: dict[str, Any] = {
        "format": FORMAT,
        "command": shlex.join(["python", "-m", "perf.report", *arguments]),
        "version": lynx_net.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine,
        "transfers": [],
        "answers": [],
        "drafts": [],
        "attention": [],
        "distribution": [],
    }
    passes, reference = {}, {}
    for name in models:
        timed = await measure_time.time_model(name, corpus, scope, times, progress, sweep=name == SCALING_MODEL)
        results["transfers"] += timed["transfers"]
        passes[name], reference[name] = timed["passes"], timed["reference"]
    if device != "cpu":
        for name in SHAPES:
            timed = await measure_time.time_model(name, corpus, scope, times, progress, sweep=False, device=device)
            results["transfers"] += timed["transfers"]
            passes[name], reference[name] = timed["passes"], timed["reference"]
    layouts, speeds = {}, {}
    captured: Any = None
    results["peers"] = []
    for name in models:
        progress.tell(f"{name}: loading the model")
        loaded = load(name, threads)
        for field, records in measure_quality.measure_model(loaded, name, corpus, scope, quality, progress).items():
            results[field] += records
        layout = layouts[name] = layout_of(loaded.model.config, scope.text_tokens, dtype="bfloat16")
        speeds[name] = {
            series: times.get(
                {"what": "speed", "subject": repr(one.subject), "heads": layout.heads, "size": layout.key_size},
                lambda s=one.subject, at=layout: predict.codec_speeds(s, at.heads, at.key_size),
            )
            for series, one in SERIES.items()
        }
        if captured is None:
            captured = (layout, measure_quality.Prompt(loaded, corpus, "summary", 0, scope.text_tokens).captured)
        results["peers"] += measure_codecs(loaded, name, corpus, scope, quality, progress)
        del loaded
    results["concurrent"] = await _concurrent(results, captured, scope, times, progress)
    results["simulator"] = _simulator(results, models, passes, speeds, layouts)
    results["transports"] = measure_transports(scope, times, progress)
    results["settings"] = {
        "quick": scope.quick,
        "scope": dataclasses.asdict(scope),
        "models": {name: TITLES[name] for name in models},
        "time_models": {name: TITLES.get(name) or SHAPES[name].title for name in reference},
        "reference": reference,
        "passes_s": passes,
        "checked_tasks": list(CHECKED),
        "scaling_model": models[0] if SCALING_MODEL not in models else SCALING_MODEL,
        "corpus": {"name": corpus.name, "digest": corpus.digest},
        "codecs": {name: repr(series.subject) for name, series in SERIES.items()},
        "concurrent": {
            "requests": measure_concurrent.REQUESTS,
            "tokens": scope.text_tokens,
            "rate_bps": measure_concurrent.RATE_BPS,
            "decode_token_s": measure_concurrent.DECODE_TOKEN_S,
        },
        "cells": {"measured": times.made + quality.made, "kept_from_earlier_runs": times.reused + quality.reused},
        "notes": _notes(corpus, device, machine["load_before"], quick=scope.quick),
    }
    results["took_s"] = progress.took_s
    return results


def load(name: str, threads: int) -> Any:
    """A model for the quality figures."""
    import torch

    torch.set_num_threads(threads)
    return MODELS[name].load(fetch=True)


async def _concurrent(
    results: dict[str, Any], captured: Any, scope: Scope, cells: CellsType, progress: Progress
) -> list[dict[str, Any]]:
    stands = _stands(results)
    layout, cache = captured
    return await measure_concurrent.measure_concurrent(layout, cache, stands, scope.concurrent_rounds, cells, progress)


def _stands(results: dict[str, Any]) -> dict[str, list[int]]:
    """How many drafts stand, of every recorded prompt of both models."""
    return {
        name: [int(one) for one in samples(only(results["drafts"], series=name), "accepted")]
        for name in ("lynx", "default")
    }


def _simulator(
    results: dict[str, Any], models: Sequence[str], passes: Any, speeds: Any, layouts: Any
) -> dict[str, Any]:
    return {
        "checked": predict.checked(
            [one for one in results["transfers"] if one["model"] in speeds], passes, speeds, layouts
        ),
        "predicted": predict.predicted(_stands(results), speeds[models[0]]),
        "assumptions": predict.assumptions(),
    }


def _notes(corpus: Corpus, device: str, load_before: float, *, quick: bool) -> list[str]:
    notes = []
    if load_before > IDLE_LOAD:
        notes.append(
            f"The machine had other work when the run began (load {load_before:g}): its times cannot be compared with "
            "others, and the simulator, which knows of no other work, cannot foretell them."
        )
    if corpus.missing is not None:
        notes.append(
            f"Debian's FAQ could not be had ({corpus.missing}): the tasks are made of documents of this project alone."
        )
    if quick:
        notes.append("A quick run measures those of the peers that are installed; the full run installs them first.")
    if device == "cpu":
        notes.append("Measured on the CPU. The 8B-shaped model of table 1 needs an accelerator (--device cuda).")
    return notes
