"""Figures about quality: figures 5, 8 and 12 and table 3 of the paper, and time against quality."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from perf.report.draw import ACCENTS, INK, band, color, errors_of, grouped_bars, legend_below, panels, themed_svg
from perf.report.figure import Block, Table, by_text, cell, mean_of, median_of, only, present, samples, values
from perf.report.figures_time import accuracy, reference
from perf.report.series import SERIES
from perf.report.stats import Estimate, difference, estimate, holm, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.report.figure import Record, Results

__all__ = ["attention_errors", "distribution", "pareto", "quality"]

_TASKS = {
    "needle": "needle: right answers",
    "questions": "question answering: right answers",
    "summary": "summary: ROUGE-L against bf16",
    "prose": "perplexity of prose",
}


def _score(records: Sequence[Record], task: str) -> Estimate | None:
    """The figure of a task: share of right answers, mean ROUGE-L, or perplexity."""
    scores = samples(records, "score")
    if not scores:
        return None
    if task in ("needle", "questions"):
        return share(sum(score == 1 for score in scores), len(scores))
    found = estimate(scores)
    if task != "prose":
        return found
    low, high = (None if end is None else float(np.exp(end)) for end in (found.low, found.high))
    return Estimate(float(np.exp(found.value)), low, high, found.samples)


def quality(results: Results) -> Block:
    """Figures 8 and 12: quality of tasks by codec and by context length."""
    answers = results["answers"]
    shown = [(m, t) for m in results["settings"]["models"] for t in _TASKS if only(answers, model=m, task=t)]
    figure, axes = panels(len(shown), height=2.9)
    tables = []
    for axis, (model, task) in zip(axes, shown, strict=True):
        found = only(answers, model=model, task=task)
        lengths = values(found, "tokens")
        title = f"{results['settings']['models'][model]}, {_TASKS[task]}"
        bars: dict[str, Sequence[Estimate | None]] = {
            name: [_score(only(found, series=name, tokens=length), task) for length in lengths]
            for name in present(found)
        }
        grouped_bars(axis, [f"{length:,}" for length in lengths], bars)
        axis.set_title(title)
        axis.set_xlabel("tokens of context")
        percent = task in ("needle", "questions")
        tables.append(_quality_table(found, task, lengths, title, bars, percent=percent))
    legend_below(figure, axes[0])
    return Block(
        name="figure-8-12",
        title="Quality of tasks by codec and context length",
        paper="Figures 8 and 12",
        caption=(
            "Greedy answers on the cache as each codec leaves it. Needle: invented facts of five kinds in prose, each "
            "asked in its own words; question answering: five facts of one kind, asked in other words; depths from the "
            "beginning to the end. The cache is that of the text; the question stands behind it. "
            "Summary: agreement with the text of the bf16 cache, which is 1 by definition. Perplexity: of 64 tokens "
            "of prose behind the cache. The last columns of the tables: difference from bf16, text by text, over "
            "all lengths, with the p-value of a sign-flip test, corrected for the number of codecs (Holm)."
        ),
        svg=themed_svg(figure, "figure-8-12", "Quality of tasks by codec and context length"),
        tables=tables,
    )


def _quality_table(
    found: Sequence[Record],
    task: str,
    lengths: Sequence[int],
    title: str,
    bars: dict[str, Sequence[Estimate | None]],
    *,
    percent: bool,
) -> Table:
    unit, digits, factor = (" %", 1, 100.0) if percent else ("", 3, 1.0)
    exact = by_text(only(found, series="bf16"))
    differences = {}
    for name in bars:
        mine = by_text(only(found, series=name))
        both = [key for key in mine if key in exact]
        if name != "bf16" and both:
            differences[name] = difference([mine[key] for key in both], [exact[key] for key in both])
    corrected = holm({name: one.p for name, one in differences.items()})
    rows = []
    for name, estimates in bars.items():
        last = ("", "")
        if name in differences:
            one = differences[name]
            as_estimate = Estimate(one.value, one.low, one.high, one.samples)
            last = (cell(as_estimate, unit, digits, factor), f"{corrected[name]:.3f}")
        rows.append((SERIES[name].label, *(cell(one, unit, digits, factor) for one in estimates), *last))
    what = "difference from bf16" + (", nats a token" if task == "prose" else "")
    return Table((title, *(f"{length:,} tokens" for length in lengths), what, "p"), rows)


def attention_errors(results: Results) -> Block:
    """Table 3: normalised squared error of the attention output, all layers."""
    found = results["attention"]
    models = results["settings"]["models"]
    bars: dict[str, Sequence[Estimate | None]] = {
        name: [mean_of(only(found, series=name, model=model), "vnmse") for model in models] for name in present(found)
    }
    figure, (axis,) = panels(1, width=8)
    grouped_bars(axis, list(models.values()), bars)
    axis.set_yscale("log")
    axis.set_ylabel("vNMSE of attention outputs")
    legend_below(figure, axis)
    rows = [
        (
            SERIES[name].label,
            *("not measured" if one is None else f"{one.value:.2e}" for one in estimates),
            *("" if one is None or one.low is None else f"{one.low:.1e} to {one.high:.1e}" for one in estimates),
        )
        for name, estimates in bars.items()
    ]
    header = ("codec", *models.values(), *(f"{title}, interval" for title in models.values()))
    return Block(
        name="table-3",
        title="Error of attention outputs",
        paper="Table 3",
        caption=(
            "|o - ô|² / |ô|² with the model's own queries, over the 64 tokens behind the cache, mean over all "
            "layers, each layer by itself. The paper has, for LLaMA 8B: CacheGen 0.11, INT4 0.53, INT8 0.0042, Lynx "
            "0.00017, its anchors 0.015. bf16 has no error by definition and no bar."
        ),
        svg=themed_svg(figure, "table-3", "Error of attention outputs by codec"),
        tables=[Table(header, rows)],
    )


def distribution(results: Results) -> Block:
    """Figure 5: cumulative distribution of values normalised per channel, keys and values apart."""
    found = results["distribution"]
    models = list(results["settings"]["models"])
    shown = [(model, kind) for model in models for kind in ("key", "value")]
    figure, axes = panels(1, width=7)
    axis = axes[0]
    rows = []
    for model, kind in shown:
        curves = only(found, model=model, kind=kind)
        if not curves:
            continue
        grid = curves[0]["at"]
        points = [estimate([one["share_below"][i] for one in curves]) for i in range(len(grid))]
        label = f"{results['settings']['models'][model]}, {kind}s"
        shade = ACCENTS[0 if model == models[0] else 4]
        style = "-" if kind == "key" else "--"
        axis.plot(grid, [one.value for one in points], label=label, linewidth=1.5, linestyle=style, color=shade)
        band(axis, grid, points, shade)
        half = estimate([one["middle_half"] for one in curves])
        rows.append((label, cell(half, " %", 1, 100), *(f"{points[i].value:.3f}" for i in range(0, len(grid), 10))))
    axis.plot([-1, 1], [0, 1], color=INK, linewidth=0.7, linestyle=":", label="uniform")
    axis.set_xlabel("value, normalised per channel to -1 to 1")
    axis.set_ylabel("share of values below")
    axis.legend()
    marks = [f"below {found[0]['at'][i]:+.1f}" for i in range(0, len(found[0]["at"]), 10)] if found else []
    return Block(
        name="figure-5",
        title="Distribution of normalised values",
        paper="Figure 5",
        caption=(
            "Keys and values of a 1,024-token cache, each channel of each layer scaled to its own range over all "
            "tokens. The first column: the part of the range that the middle half of all values is in (the paper: 17 "
            "%)."
        ),
        svg=themed_svg(figure, "figure-5", "Cumulative distribution of normalised keys and values"),
        tables=[Table(("cache", "range of the middle half", *marks), rows)],
    )


def pareto(results: Results) -> Block:
    """Beyond the paper: time to the 32nd token against quality, all codecs."""
    models = [model for model in results["settings"]["models"] if reference(results, model)]
    figure, axes = panels(len(models))
    tables = []
    for axis, model in zip(axes, models, strict=True):
        found = reference(results, model)
        points: dict[str, tuple[Estimate, Estimate]] = {}
        for name in present(found):
            at, right = median_of(only(found, series=name), "tt32t_s"), agreement(results, model, name)
            if at is not None and right is not None:
                points[name] = (at, right)
        for name, (at, right) in points.items():
            axis.errorbar(
                [at.value],
                [right.value],
                xerr=errors_of([at]),
                yerr=errors_of([right]),
                color=color(name),
                marker=SERIES[name].marker,
                markersize=8,
                capsize=2,
                linestyle="none",
                label=SERIES[name].label,
            )
        front = _front({name: (at.value, right.value) for name, (at, right) in points.items()})
        axis.plot(
            [points[name][0].value for name in front],
            [points[name][1].value for name in front],
            color=INK,
            linewidth=0.8,
            linestyle=":",
            zorder=0,
        )
        axis.set_title(results["settings"]["models"][model])
        axis.set_xlabel("seconds to the 32nd token")
        axis.set_ylabel("agreement with bf16 (ROUGE-L)")
        rows = [
            (
                SERIES[name].label,
                cell(at, " s"),
                cell(right, "", 3),
                cell(accuracy(results, model, name), " %", 1, 100),
                "yes" if name in front else "no",
            )
            for name, (at, right) in points.items()
        ]
        header = (results["settings"]["models"][model], "TT32T", "ROUGE-L", "right answers", "on the front")
        tables.append(Table(header, rows))
    legend_below(figure, axes[0])
    return Block(
        name="pareto",
        title="Time against quality",
        paper="",
        caption=(
            "Upper left is better. The dotted line joins the codecs that no other beats in both time and agreement "
            "with the text of the unquantised cache, at the ratio of table 1."
        ),
        svg=themed_svg(figure, "pareto", "Time to the 32nd token against agreement with bf16"),
        tables=tables,
    )


def agreement(results: Results, model: str, series: str) -> Estimate | None:
    """Mean ROUGE-L of summaries against those of bf16."""
    return mean_of(only(results["answers"], model=model, series=series, task="summary"), "score")


def _front(points: dict[str, tuple[float, float]]) -> list[str]:
    """Names that no other beats in both, by time."""
    kept = []
    best = -np.inf
    for name in sorted(points, key=lambda one: (points[one][0], -points[one][1])):
        if points[name][1] > best:
            kept.append(name)
            best = points[name][1]
    return kept
