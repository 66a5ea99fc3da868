"""Figures about drafts: figure 10 of the paper, and drafts by the bits of the anchor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from perf.report.draw import ACCENTS, Rectangle, band, color, errors_of, legend_below, panels, themed_svg
from perf.report.figure import Block, Table, cell, mean_of, only, samples
from perf.report.series import SERIES
from perf.report.stats import estimate, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from perf.report.figure import Results

__all__ = ["acceptance", "survival"]


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
            band(curve, ks, shares, color(name))
            rows.append(
                (
                    SERIES[name].label,
                    *(cell(shares[k - 1], " %", 0, 100) for k in (1, 10, 20, 32, 64)),
                    str(len(counts)),
                )
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
            "Left: of 64 drafts from the first stream alone, the probability that at least k are what the refined "
            "cache says (the paper: 88 % for 10, 70 % for 20). Right: drafts made and accepted in the real transfers "
            "of this page with the default codec; on the diagonal all were accepted (the paper: 64.8 %)."
        ),
        svg=themed_svg(
            figure, "figure-10", "Acceptance of drafts: probability of at least k, and drafted against accepted"
        ),
        tables=tables,
    )


def _heat_map(axis: Axes, results: Results, model: str, step: int = 8) -> Table:
    """Share of transfers by drafted and accepted drafts, in steps."""
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
                    [bits],
                    [counts.value],
                    yerr=errors_of([counts]),
                    color=color(name),
                    marker=SERIES[name].marker,
                    markersize=7,
                    capsize=2,
                    linestyle="none",
                    label=SERIES[name].label,
                )
            else:
                family.append((bits, counts))
        family.sort(key=lambda one: one[0])
        axis.errorbar(
            [bits for bits, _ in family],
            [one.value for _, one in family],
            yerr=errors_of([one for _, one in family]),
            color=ACCENTS[5],
            marker=".",
            capsize=2,
            linewidth=1,
            label="nested, 2 to 6 bits",
        )
        axis.set_title(title)
        axis.set_xlabel("bits a value of the first stream, at 4,096 tokens")
        axis.set_ylabel("accepted drafts of 64")
        axis.set_ylim(0, 66)
        tables.append(Table((title, "bits of the anchor", "accepted of 64"), rows))
    legend_below(figure, axes[0])
    return Block(
        name="survival",
        title="Survival of drafts by the bits of the anchor",
        paper="",
        caption="Accepted drafts of 64 with nothing refined meanwhile; metadata, raw and fine tokens are counted.",
        svg=themed_svg(figure, "survival", "Accepted drafts against bits of the anchor"),
        tables=tables,
    )
