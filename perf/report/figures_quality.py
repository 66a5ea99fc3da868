"""Figures about quality: figures 5, 8, 10 and 12 and table 3 of the paper, the Pareto front, drafts by bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from perf.report.draw import ACCENTS, INK, color, errors_of, grouped_bars, panels, themed_svg
from perf.report.figure import Block, Table, cell, mean_of, median_of, only, present, samples, values
from perf.report.figures_time import accuracy, reference
from perf.report.series import SERIES
from perf.report.stats import Estimate, difference, estimate, holm, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.report.figure import Record, Results

__all__ = ["acceptance", "attention_errors", "distribution", "pareto", "quality", "survival"]

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
    ends = [None if end is None else float(np.exp(end)) for end in (found.low, found.high)]
    return Estimate(float(np.exp(found.value)), *ends, found.samples)


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
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Block(
        name="figure-8-12",
        title="Quality of tasks by codec and context length",
        paper="Figures 8 and 12",
        caption=(
            "Greedy answers on the cache as each codec leaves it. Needle: one invented fact in prose; question answering: "
            "one of several such facts, asked in other words; depths from the beginning to the end. Summary: "
            "agreement with the text of the bf16 cache, which is 1 by definition. Perplexity: of 64 tokens of prose behind "
            "the cache. The last columns of the tables: difference from bf16, prompt by prompt, over all lengths, with the "
            "p-value of a sign-flip test, corrected for the number of codecs (Holm)."
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
    exact = {(one["tokens"], one["number"]): one["score"] for one in only(found, series="bf16")}
    differences = {}
    for name in bars:
        mine = {(one["tokens"], one["number"]): one["score"] for one in only(found, series=name)}
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
        name: [mean_of(only(found, series=name, model=model), "vnmse") for model in models]
        for name in present(found)
    }
    figure, (axis,) = panels(1, width=8)
    grouped_bars(axis, list(models.values()), bars)
    axis.set_yscale("log")
    axis.set_ylabel("vNMSE of attention outputs")
    axis.legend(ncols=3)
    rows = [
        (SERIES[name].label, *("not measured" if one is None else f"{one.value:.2e}" for one in estimates),
         *("" if one is None or one.low is None else f"{one.low:.1e} to {one.high:.1e}" for one in estimates))
        for name, estimates in bars.items()
    ]
    header = ("codec", *models.values(), *(f"{title}, interval" for title in models.values()))
    return Block(
        name="table-3",
        title="Error of attention outputs",
        paper="Table 3",
        caption=(
            "|o - ô|² / |ô|² with the model's own queries, over the 64 tokens behind the cache, mean over all layers, each "
            "layer by itself. The paper has, for LLaMA 8B: CacheGen 0.11, INT4 0.53, INT8 0.0042, Lynx 0.00017, its "
            "anchors 0.015. bf16 has no error by definition and no bar."
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
    for number, (model, kind) in enumerate(shown):
        curves = only(found, model=model, kind=kind)
        if not curves:
            continue
        grid = curves[0]["at"]
        points = [estimate([one["share_below"][i] for one in curves]) for i in range(len(grid))]
        label = f"{results['settings']['models'][model]}, {kind}s"
        line = {"linestyle": "-" if kind == "key" else "--", "color": ACCENTS[0 if model == models[0] else 4]}
        axis.plot(grid, [one.value for one in points], label=label, linewidth=1.5, **line)
        lows, highs = ([getattr(p, e) if getattr(p, e) is not None else p.value for p in points] for e in ("low", "high"))
        axis.fill_between(grid, lows, highs, color=line["color"], alpha=0.18, linewidth=0)
        half = estimate([one["middle_half"] for one in curves])
        rows.append((label, cell(half, " %", 1, 100), *(f"{points[i].value:.3f}" for i in range(0, len(grid), 10))))
        del number
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
            "Keys and values of a 1,024-token cache, each channel of each layer scaled to its own range over all tokens. "
            "The first column: the part of the range that the middle half of all values is in (the paper: 17 %)."
        ),
        svg=themed_svg(figure, "figure-5", "Cumulative distribution of normalised keys and values"),
        tables=[Table(("cache", "range of the middle half", *marks), rows)],
    )


def acceptance(results: Results) -> Block:
    """Figure 10: how many drafts are accepted, and what became of those of real transfers."""
    models = results["settings"]["models"]
    figure, axes = panels(2 * len(models), height=3.3)
    tables = []
    for at, model in enumerate(models):
        curve, heat = axes[2 * at], axes[2 * at + 1]
        rows = []
        for name in ("lynx", "default"):
            counts = samples(only(results["drafts"], model=model, series=name), "accepted")
            if not counts:
                continue
            ks = range(1, 65)
            shares = [share(sum(count >= k for count in counts), len(counts)) for k in ks]
            curve.plot(ks, [one.value for one in shares], color=color(name), label=SERIES[name].label)
            curve.fill_between(
                ks, [one.low for one in shares], [one.high for one in shares], color=color(name), alpha=0.18, linewidth=0
            )
            rows.append(
                (SERIES[name].label, *(cell(shares[k - 1], " %", 0, 100) for k in (1, 10, 20, 32, 64)), str(len(counts)))
            )
        curve.set_title(models[model])
        curve.set_xlabel("k")
        curve.set_ylabel("P(accepted ≥ k)")
        curve.set_ylim(0, 1.02)
        curve.legend()
        header = (models[model], *(f"k = {k}" for k in (1, 10, 20, 32, 64)), "prompts")
        tables.append(Table(header, rows))
        tables.append(_heat_map(heat, results, model))
    return Block(
        name="figure-10",
        title="Accepted drafts",
        paper="Figure 10",
        caption=(
            "Left: of 64 drafts from the first stream alone, the probability that at least k are what the refined cache "
            "says (the paper: 88 % for 10, 70 % for 20). Right: drafts made and accepted in the real transfers of this "
            "page with the default codec; on the diagonal all were accepted (the paper: 64.8 %)."
        ),
        svg=themed_svg(figure, "figure-10", "Acceptance of drafts: probability of at least k, and drafted against accepted"),
        tables=tables,
    )


def _heat_map(axis: object, results: Results, model: str, step: int = 8) -> Table:
    """Share of transfers by drafted and accepted drafts, in steps."""
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

    assert isinstance(axis, Axes)
    made = [one for one in only(results["transfers"], model=model, series="default") if one["drafted"]]
    cells: dict[tuple[int, int], int] = {}
    for one in made:
        key = (min(one["drafted"], 64) // step, min(one["accepted"], 64) // step)
        cells[key] = cells.get(key, 0) + 1
    for (drafted, accepted), count in cells.items():
        part = count / len(made)
        axis.add_patch(Rectangle((drafted, accepted), 1, 1, facecolor=color("default"), alpha=0.25 + 0.75 * part))
        axis.text(drafted + 0.5, accepted + 0.5, f"{part:.0%}", ha="center", va="center", fontsize=8)
    ticks = range(64 // step + 2)
    axis.set_xlim(0, 64 // step + 1)
    axis.set_ylim(0, 64 // step + 1)
    axis.set_xticks(ticks, [str(step * i) for i in ticks])
    axis.set_yticks(ticks, [str(step * i) for i in ticks])
    axis.set_xlabel("drafted")
    axis.set_ylabel("accepted")
    axis.set_title(f"default codec, {len(made)} transfers with drafts")
    whole = sum(one["drafted"] == one["accepted"] for one in made)
    drafted, accepted = (mean_of(made, field) for field in ("drafted", "accepted"))
    rows = [
        (
            "default codec",
            cell(drafted, "", 1),
            cell(accepted, "", 1),
            cell(share(whole, len(made)) if made else None, " %", 0, 100),
            str(len(made)),
        )
    ]
    return Table((results["settings"]["models"][model], "drafted", "accepted", "all accepted", "transfers"), rows)


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
                [at.value], [right.value], xerr=errors_of([at]), yerr=errors_of([right]), color=color(name),
                marker=SERIES[name].marker, markersize=8, capsize=2, linestyle="none", label=SERIES[name].label,
            )
        front = _front({name: (at.value, right.value) for name, (at, right) in points.items()})
        axis.plot(
            [points[name][0].value for name in front], [points[name][1].value for name in front],
            color=INK, linewidth=0.8, linestyle=":", zorder=0,
        )
        axis.set_title(results["settings"]["models"][model])
        axis.set_xlabel("seconds to the 32nd token")
        axis.set_ylabel("agreement with bf16 (ROUGE-L)")
        rows = [
            (SERIES[name].label, cell(at, " s"), cell(right, "", 3), cell(accuracy(results, model, name), " %", 1, 100),
             "yes" if name in front else "no")
            for name, (at, right) in points.items()
        ]
        header = (results["settings"]["models"][model], "TT32T", "ROUGE-L", "right answers", "on the front")
        tables.append(Table(header, rows))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Block(
        name="pareto",
        title="Time against quality",
        paper="",
        caption=(
            "Upper left is better. The dotted line joins the codecs that no other beats in both time and agreement with the "
            "text of the unquantised cache, at the ratio of table 1."
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


def survival(results: Results) -> Block:
    """Beyond the paper: accepted drafts against the bits of the anchor."""
    models = results["settings"]["models"]
    figure, axes = panels(len(models))
    tables = []
    for axis, (model, title) in zip(axes, models.items(), strict=True):
        found = only(results["drafts"], model=model)
        names = list(dict.fromkeys(one["series"] for one in found))
        family, rows = [], []
        for name in names:
            mine = only(found, series=name)
            counts, bits = estimate(samples(mine, "accepted")), float(np.mean(samples(mine, "bits_anchor")))
            rows.append((name if name not in SERIES else SERIES[name].label, f"{bits:.2f}", cell(counts, "", 1)))
            if name in SERIES:
                axis.errorbar(
                    [bits], [counts.value], yerr=errors_of([counts]), color=color(name), marker=SERIES[name].marker,
                    markersize=7, capsize=2, linestyle="none", label=SERIES[name].label,
                )
            else:
                family.append((bits, counts))
        family.sort(key=lambda one: one[0])
        axis.errorbar(
            [bits for bits, _ in family], [one.value for _, one in family], yerr=errors_of([one for _, one in family]),
            color=ACCENTS[5], marker=".", capsize=2, linewidth=1, label="nested, 2 to 6 bits",
        )
        axis.set_title(title)
        axis.set_xlabel("bits a value of the first stream, at 4,096 tokens")
        axis.set_ylabel("accepted drafts of 64")
        axis.set_ylim(0, 66)
        tables.append(Table((title, "bits of the anchor", "accepted of 64"), rows))
    axes[0].legend()
    return Block(
        name="survival",
        title="Survival of drafts by the bits of the anchor",
        paper="",
        caption="Accepted drafts of 64 with nothing refined meanwhile, metadata, raw and fine tokens counted in the bits.",
        svg=themed_svg(figure, "survival", "Accepted drafts against bits of the anchor"),
        tables=tables,
    )
