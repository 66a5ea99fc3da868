"""One run: all that the figures need is measured, or one part of it, and put together with what other runs measured.

The parts are those of `parts`. Each says on what machine and by which command it was measured.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import os
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lynx_net
from lynx_net.demo.results import machine_facts
from lynx_net.integrations.weights import cache_folder
from perf.quality import MODELS
from perf.report import measure_concurrent, measure_device, measure_quality, measure_time, predict, quality_part
from perf.report.cells import Cells, fingerprint
from perf.report.corpus import load_corpus
from perf.report.device import check_device
from perf.report.measure_peers import SOURCES as PEER_SOURCES
from perf.report.measure_peers import measure_codecs, measure_transports
from perf.report.parts import PARTS, SCALING_MODEL, TITLES, merged
from perf.report.series import SERIES
from perf.report.tasks import make_task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from perf.report.corpus import Corpus
    from perf.report.measure_quality import Codings
    from perf.report.scope import Progress, Scope

__all__ = ["measure"]

DECIDING = ("numpy", "torch", "transformers")
"""Packages that figures of quality may depend on."""

PACKAGES = ("numpy", "numba", "torch", "transformers", "matplotlib", "scipy")
MACHINE = ("processor", "cores", "python", "packages")
"""What times depend on, of the facts that are known of a machine."""

IDLE_LOAD = 0.5
"""Processes that wanted a core, over the last minute; with more the page says that the machine was busy."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What all parts of one run share."""

    scope: Scope
    models: Sequence[str]
    device: str
    corpus: Corpus | None
    progress: Progress
    machine: Mapping[str, Any]
    fresh: bool
    threads: int
    share: tuple[int, int]
    held: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def prose(self) -> Corpus:
        """What tasks are made of; the device needs none."""
        assert self.corpus is not None
        return self.corpus

    def cells(self, basis: Mapping[str, Any]) -> Cells:
        return Cells(cache_folder() / "report" / "cells", basis, fresh=self.fresh)

    def timed_cells(self, sources: Sequence[str], facts: Sequence[str] = MACHINE) -> Cells:
        """Cells that depend on this code and on these facts of the machine."""
        return self.cells({"code": fingerprint(sources), "machine": {name: self.machine[name] for name in facts}})

    def loaded(self, name: str, threads: int) -> Any:
        """A model on so many threads of torch; loaded once."""
        import torch

        torch.set_num_threads(threads)
        if name not in self.held:
            self.progress.tell(f"{name}: loading the model")
            self.held[name] = MODELS[name].load(fetch=True)
        return self.held[name]

    def cache_of(self, name: str) -> Callable[[], Codings]:
        """The cache of the first summary, prefilled at the first call."""

        def prefilled() -> Codings:
            loaded = self.loaded(name, self.threads)
            prompt = make_task(loaded.tokenizer, self.prose, "summary", 0, self.scope.text_tokens, 0).prompt
            return measure_quality.Codings(loaded, prompt[:-1], ())

        return functools.cache(prefilled)


async def measure(
    scope: Scope,
    models: Sequence[str],
    device: str,
    arguments: Sequence[str],
    progress: Progress,
    *,
    threads: int,
    fresh: bool,
    parts: Sequence[str],
    earlier: Mapping[str, Any] | None = None,
    share: tuple[int, int] = (1, 1),
) -> dict[str, Any]:
    """Measure everything, or some parts, and return the raw results.

    Args:
        models: names of `perf.quality.MODELS`.
        device: of the part `device`: "cpu" or "cuda".
        arguments: of the command, for the page.
        threads: of torch, while quality is measured; transfers are timed with one a process.
        fresh: nothing is taken from earlier runs.
        parts: names of `PARTS`, measured in that order.
        earlier: raw results that all other parts are taken from.
        share: of the rounds of transfers, the first of how many equal ones; less than all are only kept as cells.
    """
    check_device(device)
    corpus = None
    if set(parts) - {"device"}:
        corpus = load_corpus(cache_folder() / "report" / "corpus")
        progress.tell(f"prose: {corpus.name}, {len(corpus.paragraphs)} paragraphs")
    machine = {**machine_facts(_installed(PACKAGES)), "load_before": round(os.getloadavg()[0], 2)}
    if "device" in parts:
        machine["accelerator"] = measure_device.accelerator(device)
    run = _Run(scope, models, device, corpus, progress, machine, fresh, threads, share)
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        began_s = progress.took_s
        match part:
            case "time":
                fields, cells = await _time(run)
            case "concurrent":
                fields, cells = await _concurrent(run)
            case "quality":
                fields, cells = _quality(run)
            case "device":
                fields, cells = await _device(run)
            case _:
                fields, cells = _peers(run)
        found[part] = {
            "fields": fields,
            "about": {
                "command": shlex.join(["python", "-m", "perf.report", *arguments]),
                "version": lynx_net.__version__,
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "machine": machine,
                "took_s": progress.took_s - began_s,
                "cells": {"measured": cells.made, "kept_from_earlier_runs": cells.reused},
                "scope": dataclasses.asdict(scope),
                "models": {} if part == "device" else {name: TITLES[name] for name in models},
                "notes": _notes(part, run),
            },
        }
    return merged(found, earlier)


async def _time(run: _Run) -> tuple[dict[str, Any], Cells]:
    """All transfers; nothing else runs meanwhile, on these cores at least."""
    cells = run.timed_cells(measure_time.SOURCES)
    fields: dict[str, Any] = {name: {} for name in PARTS["time"]} | {"transfers": []}
    for name in run.models:
        made = await measure_time.time_model(
            name, run.prose, run.scope, cells, run.progress, sweep=name == SCALING_MODEL, share=run.share
        )
        fields["transfers"] += made["transfers"]
        fields["reference"][name], fields["shapes"][name] = made["reference"], made["shape"]
    return fields, cells


async def _concurrent(run: _Run) -> tuple[dict[str, Any], Cells]:
    """Concurrent requests, and how fast a core is; nothing else runs meanwhile."""
    cells = run.timed_cells(measure_concurrent.SOURCES)
    fields: dict[str, Any] = {"speeds": {}}
    caches = {name: run.cache_of(name) for name in run.models}
    for name, cache in caches.items():
        fields["speeds"][name] = {
            series: cells.get(
                {"what": "speed", "subject": repr(one.subject), "model": name, "tokens": run.scope.time_tokens},
                lambda s=one.subject, c=cache: predict.codec_speeds(s, c(), run.scope.time_tokens),
            )
            for series, one in SERIES.items()
        }
    fields["sends"] = await measure_concurrent.measure_concurrent(
        caches[run.models[0]], run.scope.text_tokens, run.scope.concurrent_rounds, cells, run.progress
    )
    return fields, cells


async def _device(run: _Run) -> tuple[dict[str, Any], Cells]:
    """Times on an accelerator; needs no weights and nothing from a network."""
    cells = run.timed_cells((*measure_time.SOURCES, *measure_device.SOURCES), (*MACHINE, "accelerator"))
    made = await measure_device.measure_device(run.device, run.scope.device_rounds, cells, run.progress)
    return {"device": made}, cells


def _quality(run: _Run) -> tuple[dict[str, Any], Cells]:
    """All that is the same on every machine: cells are kept whatever happens to the code of the transport."""
    cells = run.cells(
        {
            "code": fingerprint(measure_quality.SOURCES),
            "packages": {name: run.machine["packages"][name] for name in DECIDING},
        }
    )
    fields: dict[str, list[Any]] = {name: [] for name in PARTS["quality"]}
    for name in run.models:
        made = quality_part.measure_model(
            lambda n=name: run.loaded(n, run.threads), name, run.prose, run.scope, cells, run.progress
        )
        for field, records in made.items():
            fields[field] += records
    return fields, cells


def _peers(run: _Run) -> tuple[dict[str, Any], Cells]:
    """Codecs and transports of others."""
    cells = run.timed_cells(PEER_SOURCES)
    found: list[dict[str, Any]] = []
    for name in run.models[:1] if run.scope.quick else run.models:
        found += measure_codecs(run.loaded(name, 1), name, run.prose, run.scope, cells, run.progress)
    return {"peers": found, "transports": measure_transports(run.scope, cells, run.progress)}, cells


def _notes(part: str, run: _Run) -> list[str]:
    notes = []
    load_before = run.machine["load_before"]
    if part in ("time", "concurrent") and load_before > IDLE_LOAD:
        notes.append(
            f"The machine had other work when the run began (load {load_before:g}): its times cannot be compared with "
            "others, and the simulator, which knows of no other work, cannot foretell them."
        )
    if run.corpus is not None and run.corpus.missing is not None and part != "device":
        notes.append(
            f"Debian's FAQ could not be had ({run.corpus.missing}): the tasks are made of documents of this project "
            "alone."
        )
    if part == "peers" and run.scope.quick:
        notes.append("A quick run measures those of the peers that are installed; the full run installs them first.")
    return notes


def _installed(packages: Sequence[str]) -> list[str]:
    """Those of these packages that are there: a machine that measures one part need not be able to draw it."""
    known = {one.metadata["Name"] for one in importlib.metadata.distributions()}
    return [name for name in packages if name in known]
