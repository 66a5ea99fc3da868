"""Figures about time: table 1, figures 2, 9 and 11 of the paper, and what waiting costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perf.report.draw import ACCENTS, INK, PAPER, band, color, errors_of, grouped_bars, legend_below, panels, themed_svg
from perf.report.figure import Block, Table, cell, mean_of, median_of, only, present, rate_text, timed, values
from perf.report.series import SERIES
from perf.report.stats import Estimate, estimate, share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perf.report.figure import Record, Results

__all__ = ["context_and_bandwidth", "overview", "reference", "time_spent", "time_to_token", "waiting"]

SPENT = {
    "communication_s": "exposed communication",
    "deserialise_s": "deserialisation",
    "decode_s": "decode",
    "verify_s": "verification",
    "rejected_s": "rejected drafts",
}

_SHOWN_TOKENS = (1, 8, 16, 32, 48, 64)


def reference(results: Results, model: str) -> list[Record]:
    """The transfers of a model at the paper's ratio of transfer to compute."""
    at = results["settings"]["reference"].get(model)
    return only(timed(results), model=model, **at) if at else []


def _setting(results: Results, model: str) -> str:
    return _setting_of(results["settings"]["reference"][model])


def _setting_of(at: Mapping[str, Any]) -> str:
    return f"{at['tokens']:,} tokens, {rate_text(at['rate_bps'])}"


def _table_settings(results: Results, model: str) -> list[dict[str, Any]]:
    """Settings that table 1 shows: the reference, and of a model on a device all rates."""
    at = results["settings"]["reference"].get(model)
    if at is None:
        return []
    rates = values(only(results["device_transfers"], model=model), "rate_bps")
    return [at, *({**at, "rate_bps": rate} for rate in rates if rate != at["rate_bps"])]


def _device_words(results: Results) -> str:
    """What a reader must know of the model on a device; empty without one."""
    device = results["device"]
    if not device:
        return ""
    told = (
        f" {results['settings']['time_models'][device['model']]}: time only, since it writes noise; model and cache of "
        "both processes are on the device. Beside the ratio of the paper, its rates."
    )
    if device["left_out"]:
        labels = " and ".join(SERIES[name].label for name in device["left_out"])
        told += f" {labels} is left out: there are no kernels for it."
    if any(one["drafted"] for one in device["transfers"]) and results["drafts"]:
        told += (
            " Its drafts would seldom stand on noise; so many of them count as did of those of the models above, "
            "at the moments when they were made."
        )
    return told


def _models(results: Results) -> dict[str, str]:
    return results["settings"]["time_models"]


def accuracy(results: Results, model: str, series: str) -> Estimate | None:
    """Share of right answers over needle and question answering, all lengths."""
    tasks = results["settings"]["checked_tasks"]
    scores = [one["score"] for one in only(results["answers"], model=model, series=series) if one["task"] in tasks]
    return share(sum(score == 1 for score in scores), len(scores)) if scores else None


def overview(results: Results) -> Block:
    """Table 1: bits, TTFT, TT32T and quality."""
    tables, told = [], []
    shown = [(model, at) for model in _models(results) for at in _table_settings(results, model)]
    for model, at in shown:
        title = _models(results)[model]
        found = only(timed(results), model=model, **at)
        rows = []
        for name in present(found):
            mine = only(found, series=name)
            bits = estimate([8 * one["bytes_sent"] / one["values"] for one in mine])
            rows.append(
                (
                    SERIES[name].label,
                    f"{bits.value:.2f}",
                    cell(median_of(mine, "ttft_s"), " s"),
                    cell(median_of(mine, "tt32t_s"), " s"),
                    cell(accuracy(results, model, name), " %", 1, 100),
                )
            )
        if rows:
            header = (f"{title}, {_setting_of(at)}", "bits a value sent", "TTFT", "TT32T", "right answers")
            tables.append(Table(header, rows))
            told.append(title)
    told = list(dict.fromkeys(told))
    return Block(
        name="table-1",
        title="Time to the first and to the 32nd token, and quality",
        paper="Table 1",
        caption=(
            f"Real transfers between two processes over a paced link, for {' and '.join(told)}, at the paper's ratio "
            "of transfer to compute: the residual of lynx takes as long as 21.4 tokens of decoding. Time counts from "
            "the start of the transfer, with the prefill done. Quality: answers found in long texts, both tasks of "
            "the quality figure together. The text of lynx and of the default codec is that of the verified cache."
            + _device_words(results)
        ),
        svg=None,
        tables=tables,
    )


def time_to_token(results: Results) -> Block:
    """Figure 9: time to the k-th valid token."""
    models = [model for model in _models(results) if reference(results, model)]
    figure, axes = panels(len(models))
    tables = []
    for axis, model in zip(axes, models, strict=True):
        found = reference(results, model)
        rows = []
        for number, name in enumerate(present(found)):
            curves = [one["token_times_s"] for one in only(found, series=name)]
            points = [estimate(one, "median") for one in zip(*curves, strict=True)]
            ks = range(1, len(points) + 1)
            axis.plot(
                ks,
                [one.value for one in points],
                color=color(name),
                label=SERIES[name].label,
                linewidth=1.5,
                marker=SERIES[name].marker,
                markevery=(number, 8),
                markersize=4.5,
            )
            band(axis, ks, points, color(name))
            rows.append((SERIES[name].label, *(cell(points[k - 1], " s") for k in _SHOWN_TOKENS)))
        axis.set_title(f"{_models(results)[model]}, {_setting(results, model)}")
        axis.set_xlabel("k-th valid token")
        axis.set_ylabel("seconds since the transfer began")
        axis.set_ylim(bottom=0)
        tables.append(Table((_models(results)[model], *(f"k = {k}" for k in _SHOWN_TOKENS)), rows))
    legend_below(figure, axes[0])
    return Block(
        name="figure-9",
        title="Time to the k-th token",
        paper="Figure 9",
        caption=(
            "Medians over transfers, bands are intervals. A draft counts from when it was made if it was accepted "
            "later. The knee of lynx and of the default codec is where drafts end and verification begins."
        ),
        svg=themed_svg(figure, "figure-9", "Time to the k-th token by codec"),
        tables=tables,
    )


def time_spent(results: Results) -> Block:
    """Figure 2: what the time to the 64th token consists of."""
    models = [model for model in _models(results) if reference(results, model)]
    figure, axes = panels(len(models))
    tables = []
    for axis, model in zip(axes, models, strict=True):
        found = reference(results, model)
        names = present(found)
        lefts = [0.0] * len(names)
        rows = [[SERIES[name].label] for name in names]
        for number, (part, title) in enumerate(SPENT.items()):
            parts = [estimate([one["spent"][part] for one in only(found, series=name)]) for name in names]
            axis.barh(
                range(len(names)),
                [one.value for one in parts],
                left=lefts,
                color=ACCENTS[number],
                edgecolor=PAPER,
                hatch=("", "//", "", "..", "xx")[number],
                label=title,
                height=0.7,
                linewidth=0.4,
            )
            lefts = [left + one.value for left, one in zip(lefts, parts, strict=True)]
            for row, one in zip(rows, parts, strict=True):
                row.append(cell(one, " s"))
        totals = [estimate([sum(one["spent"].values()) for one in only(found, series=name)]) for name in names]
        axis.errorbar(
            [one.value for one in totals], range(len(names)), xerr=errors_of(totals), fmt="none", ecolor=INK, capsize=2
        )
        for row, one in zip(rows, totals, strict=True):
            row.append(cell(one, " s"))
        axis.set_yticks(range(len(names)), [SERIES[name].label for name in names])
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set_xlabel("seconds to the 64th token")
        axis.set_title(f"{_models(results)[model]}, {_setting(results, model)}")
        tables.append(Table((_models(results)[model], *SPENT.values(), "in all"), rows))
    legend_below(figure, axes[0])
    return Block(
        name="figure-2",
        title="Where the time goes",
        paper="Figure 2",
        caption=(
            "Time to the 64th valid token by what the decode process did. Exposed communication: nothing to compute "
            "on, bytes on their way (before the first stream is in; after the last draft that may be made). "
            "Deserialisation: from the last byte of the first stream until it is in place. Verification is the pass "
            "over the drafts on the refined cache; the paper has no bar for it. Error bars are those of the sums."
        ),
        svg=themed_svg(figure, "figure-2", "Time to the 64th token, stacked by what it is spent on"),
        tables=tables,
    )


def context_and_bandwidth(results: Results) -> Block:
    """Figure 11: TT64T by context length and by bandwidth."""
    model = results["settings"]["scaling_model"]
    at = results["settings"]["reference"][model]
    sweeps = [
        ("tokens", only(results["transfers"], model=model, rate_bps=at["rate_bps"]), "tokens of context"),
        ("rate_bps", only(results["transfers"], model=model, tokens=at["tokens"]), "link, Mbit/s"),
    ]
    device = results["device"].get("model")
    if device is not None:
        sweeps.append(("rate_bps", results["device_transfers"], f"{_models(results)[device]}: link, Mbit/s"))
    figure, axes = panels(len(sweeps))
    tables = []
    for axis, (field, found, title) in zip(axes, sweeps, strict=True):
        points = values(found, field)
        scale = 1e6 if field == "rate_bps" else 1
        rows = []
        for name in present(found):
            medians = [median_of(only(found, series=name, **{field: at}), "tt64t_s") for at in points]
            held = [(point, one) for point, one in zip(points, medians, strict=True) if one is not None]
            axis.errorbar(
                [point / scale for point, _ in held],
                [one.value for _, one in held],
                yerr=errors_of([one for _, one in held]),
                color=color(name),
                marker=SERIES[name].marker,
                markersize=4.5,
                linewidth=1.3,
                capsize=2,
                label=SERIES[name].label,
            )
            rows.append((SERIES[name].label, *(cell(one, " s") for one in medians)))
        axis.set_xscale("log", base=2)
        axis.set_xticks([point / scale for point in points], [f"{point / scale:g}" for point in points])
        axis.minorticks_off()
        axis.set_xlabel(title)
        axis.set_ylabel("seconds to the 64th token")
        axis.set_ylim(bottom=0)
        tables.append(Table((title, *(f"{point / scale:g}" for point in points)), rows))
    axes[0].set_title(f"by context length, {rate_text(at['rate_bps'])}")
    axes[1].set_title(f"by bandwidth, {at['tokens']:,} tokens")
    if device is not None:
        axes[2].set_title(f"by bandwidth, {results['settings']['reference'][device]['tokens']:,} tokens, on a device")
    legend_below(figure, axes[1])
    return Block(
        name="figure-11",
        title="Time to the 64th token by context length and bandwidth",
        paper="Figure 11",
        caption=f"{_models(results)[model]}, medians over transfers with intervals. The slower the link beside the "
        "decoding, the more drafting saves." + _device_words(results),
        svg=themed_svg(figure, "figure-11", "Time to the 64th token by context length and by bandwidth"),
        tables=tables,
    )


def waiting(results: Results) -> Block:
    """Beyond the paper: seconds a request occupies the decoder without being decoded."""
    models = [model for model in _models(results) if reference(results, model)]
    names = present([one for model in models for one in reference(results, model)])
    bars: dict[str, Sequence[Estimate | None]] = {
        name: [mean_of(only(reference(results, model), series=name), "idle_s") for model in models] for name in names
    }
    figure, (axis,) = panels(1, width=8)
    grouped_bars(axis, [_models(results)[model] for model in models], bars)
    axis.set_ylabel("idle decode seconds a request")
    legend_below(figure, axis)
    rows = [(SERIES[name].label, *(cell(one, " s") for one in bars[name])) for name in names]
    return Block(
        name="waiting",
        title="The energy of waiting",
        paper="",
        caption=(
            "Seconds during which a decoder holds a request and its memory and computes nothing for it, from the start "
            "of the transfer to the 64th token: what a device that waits burns for nothing. Nothing else was decoded."
        ),
        svg=themed_svg(figure, "waiting", "Idle decode seconds a request by codec"),
        tables=[Table(("codec", *(_models(results)[model] for model in models)), rows)],
    )
