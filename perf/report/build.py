"""From raw results to the page: all figures in order, the promises, the notes; and everything written to a folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from perf.report import figures_beyond, figures_drafts, figures_quality, figures_time
from perf.report.draw import standalone
from perf.report.figure import Block, Table, by_text, cell, only, samples, timed
from perf.report.page import render
from perf.report.parts import dump
from perf.report.scope import FULL
from perf.report.stats import Estimate, estimate, share

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from perf.report.figure import Results

__all__ = ["FIGURES", "blocks_of", "verdicts_of", "write"]

FIGURES: tuple[tuple[Callable[[Results], Block], tuple[str, ...]], ...] = (
    (figures_time.overview, ("time or device",)),
    (figures_time.time_spent, ("time or device",)),
    (figures_quality.distribution, ("quality",)),
    (figures_quality.quality, ("quality",)),
    (figures_time.time_to_token, ("time or device",)),
    (figures_drafts.acceptance, ("time", "quality")),
    (figures_time.context_and_bandwidth, ("time",)),
    (figures_quality.attention_errors, ("quality",)),
    (figures_quality.pareto, ("time", "quality")),
    (figures_drafts.survival, ("quality",)),
    (figures_time.waiting, ("time or device",)),
    (figures_beyond.concurrent, ("concurrent", "quality")),
    (figures_beyond.simulator_error, ("time",)),
    (figures_beyond.simulated, ("concurrent", "quality")),
    (figures_beyond.peers, ("peers",)),
    (figures_beyond.transports, ("peers",)),
)
"""Each with the parts of a run that it is drawn from; of two with "or" between them one is enough."""


def blocks_of(results: Results) -> list[Block]:
    """All figures; one of which a part was not measured says so."""
    return [
        _absent(figure, missing)
        if (missing := [part for part in needs if not set(part.split(" or ")) & set(results["parts"])])
        else figure(results)
        for figure, needs in FIGURES
    ]


def _absent(figure: Callable[[Results], Block], missing: Sequence[str]) -> Block:
    title = (figure.__doc__ or "").splitlines()[0].rstrip(".")
    wanted = " ".join(f"--only {part.partition(' or ')[0]}" for part in missing)
    caption = f"Not measured yet: python -m perf.report {wanted}, with the same --out, adds it."
    return Block(name=figure.__name__.replace("_", "-"), title=title, paper=None, caption=caption, svg=None, tables=())


def verdicts_of(results: Results) -> Table:
    """What was promised, what was found, and whether it holds."""
    rows: list[tuple[str, str, str, str]] = []
    for model, title in {**results["settings"]["models"], **results["settings"]["time_models"]}.items():
        found = figures_time.reference(results, model)
        for what, ours, theirs, field, bound in (
            ("TTFT of the default codec / of int4", "default", "int4", "ttft_s", 1.05),
            ("TT32T of the default codec / of int8", "default", "int8", "tt32t_s", 0.93),
        ):
            pairs = {(one["number"], one["round"]): one[field] for one in only(found, series=theirs)}
            ratios = [
                one[field] / pairs[one["number"], one["round"]]
                for one in only(found, series=ours)
                if (one["number"], one["round"]) in pairs
            ]
            if ratios:
                ratio = estimate(ratios, "median")
                rows.append((f"{title}: {what}", f"at most {bound}", cell(ratio), _word(ratio, bound)))
        equal = [one["equal_qfull"] for one in only(timed(results), model=model, series="default")]
        equal = [one for one in equal if one is not None]
        if equal:
            same = share(sum(equal), len(equal))
            rows.append(
                (
                    f"{title}: greedy text of the default codec equal to plain decoding on Q_full",
                    "all",
                    f"{sum(equal)} of {len(equal)}",
                    "holds" if same.value == 1 else "does not hold",
                )
            )
        for task in results["settings"]["checked_tasks"]:
            rows += _quality_verdict(results, model, title, task)
    if not results["simulator"]["checked"]:
        return Table(("promise", "bound", "found", "verdict"), rows)
    worst, typical, _ = figures_beyond.summary(results)
    bound = figures_beyond.BOUND
    rows.append(
        (
            "error of the simulator, largest (median)",
            f"at most {bound:.0%}",
            f"{worst:.1%} ({typical:.1%})",
            "holds" if worst <= bound else "does not hold",
        )
    )
    return Table(("promise", "bound", "found", "verdict"), rows)


def _quality_verdict(results: Results, model: str, title: str, task: str) -> list[tuple[str, str, str, str]]:
    from perf.report.stats import difference

    found = only(results["answers"], model=model, task=task)
    by_codec = {name: by_text(only(found, series=name)) for name in ("bf16", "default")}
    both = sorted(set(by_codec["bf16"]) & set(by_codec["default"]))
    if not both:
        return []
    one = difference([by_codec["default"][key] for key in both], [by_codec["bf16"][key] for key in both])
    shown = cell(Estimate(one.value, one.low, one.high, one.samples), " %", 1, 100)
    inside = one.low is None or one.high is None or one.low <= 0 <= one.high
    return [
        (
            f"{title}: {task}, default codec less bf16",
            "within noise: 0 in the interval",
            f"{shown}, p = {one.p:.2f}",
            "holds" if inside else "does not hold",
        )
    ]


def _word(ratio: Estimate, bound: float) -> str:
    if ratio.value > bound:
        return "does not hold"
    if ratio.high is None:
        return "holds, of one sample"
    return "holds" if ratio.high <= bound else "holds; the interval reaches beyond"


def notes_of(results: Results) -> list[str]:
    """What a reader must know first."""
    notes = list(results["settings"]["notes"])
    if "device" not in results["parts"]:
        notes.append(
            "The 8B-shaped model of table 1 has not been timed yet, which needs an accelerator: python -m perf.report "
            "--only device --device cuda --out DIR there, then --from with the results.json of both."
        )
    if (timing := results["parts"].get("time")) is not None and timing["scope"]["rounds"] < FULL.rounds:
        many = timing["scope"]
        notes.append(
            f"Times are of {many['rounds']} transfers a codec and model at the paper's ratio and of "
            f"{many['sweep_rounds']} at other lengths and rates, at higher rates as many times more."
        )
    if results["settings"]["quick"]:
        counts = sorted({len(samples(only(results["answers"], **key), "score")) for key in _cells(results)})
        many = f"{counts[0]} to {counts[-1]}" if counts else "no"
        notes.insert(
            0,
            f"This is a quick run with {many} samples a cell: it shows that everything works, and its intervals are "
            "wide. The full run (without --quick) has at least 100 a cell.",
        )
    return notes


def _cells(results: Results) -> list[dict[str, Any]]:
    fields = ("model", "task", "tokens", "series")
    return [dict(zip(fields, one, strict=True)) for one in {tuple(a[f] for f in fields) for a in results["answers"]}]


def write(results: Results, folder: Path) -> Path:
    """Write page, plots and raw results into a folder, which is made if need be; returns the page."""
    dump(results, folder)
    blocks = blocks_of(results)
    for block in blocks:
        if block.svg is not None:
            (folder / f"{block.name}.svg").write_text(standalone(block.svg), "utf-8")
    (folder / "machine.json").write_text(json.dumps(results["machine"], indent=1) + "\n", "utf-8")
    page = folder / "index.html"
    page.write_text(render(results, blocks, verdicts_of(results), notes_of(results)), "utf-8")
    return page
