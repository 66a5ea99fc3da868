"""Figures about many requests at once, and about models and links that are not here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perf.report.draw import ACCENTS, INK, color, errors_of, grouped_bars, legend_below, panels, themed_svg
from perf.report.figure import Block, Table, cell, mean_of, median_of, only, present, rate_text, values
from perf.report.series import SERIES
from perf.report.stats import Estimate, estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.report.figure import Record, Results

__all__ = ["concurrent", "peers", "simulated", "simulator_error", "transports"]

BOUND = 0.10
"""The largest error of the simulator that is promised."""

FIELDS = {"ttft_s": "TTFT", "tt32t_s": "TT32T", "tt64t_s": "TT64T"}


def concurrent(results: Results) -> Block:
    """Eight requests at once on one link."""
    found = results["concurrent"]
    names = present(found)
    groups = {"ttft_s": "first token", "tt32t_s": "32nd token", "last_ttft_s": "first token of the last request"}
    rounds = _rounds(found)
    bars: dict[str, Sequence[Estimate | None]] = {
        name: [
            median_of(only(found, series=name), "ttft_s"),
            median_of(only(found, series=name), "tt32t_s"),
            median_of(only(rounds, series=name), "last_ttft_s"),
        ]
        for name in names
    }
    figure, (axis,) = panels(1, width=8)
    grouped_bars(axis, list(groups.values()), bars)
    axis.set_ylabel("seconds since all began")
    legend_below(figure, axis)
    rows = [(SERIES[name].label, *(cell(one, " s") for one in bars[name])) for name in names]
    at = results["settings"]["concurrent"]
    return Block(
        name="concurrent",
        title=f"{at['requests']} concurrent requests on one link",
        paper="",
        caption=(
            f"{at['requests']} caches of {at['tokens']:,} tokens (SmolLM2) are offered together on one link of "
            f"{rate_text(at['rate_bps'])} and decoded as one batch: a step of {at['decode_token_s'] * 1e3:.0f} ms "
            "gives each request that can be decoded a token (the step is a wait, the transfers are real). Anchors of "
            "all requests go before residuals of any. How many drafts stand is taken from the acceptance figure."
        ),
        svg=themed_svg(figure, "concurrent", "Times of concurrent requests on one link by codec"),
        tables=[Table(("codec", *groups.values()), rows)],
    )


def _rounds(found: Sequence[Record]) -> list[Record]:
    """The last first token of each round."""
    last: dict[tuple[str, int], float] = {}
    for one in found:
        key = (one["series"], one["round"])
        last[key] = max(last.get(key, 0.0), one["ttft_s"])
    return [{"series": series, "last_ttft_s": at_s} for (series, _), at_s in last.items()]


def simulator_error(results: Results) -> Block:
    """Predicted against measured times, on every setting that was measured."""
    found = results["simulator"]["checked"]
    figure, axes = panels(2)
    for axis, field in zip(axes, ("ttft_s", "tt32t_s"), strict=True):
        for name in present(found):
            mine = only(found, series=name)
            measured = [estimate(one[field]["measured"], "median") for one in mine]
            axis.errorbar(
                [one.value for one in measured],
                [one[field]["predicted"] for one in mine],
                xerr=errors_of(measured),
                color=color(name),
                marker=SERIES[name].marker,
                markersize=5,
                linestyle="none",
                capsize=2,
                label=SERIES[name].label,
            )
        most = max(one[field]["predicted"] for one in found) * 1.15
        axis.plot([0, most], [0, most], color=INK, linewidth=0.8)
        axis.fill_between([0, most], [0, most * (1 - BOUND)], [0, most * (1 + BOUND)], color=ACCENTS[5], alpha=0.15)
        axis.set_xlabel("measured, s")
        axis.set_ylabel("predicted, s")
        axis.set_title({"ttft_s": "first token", "tt32t_s": "32nd token"}[field])
    legend_below(figure, axes[0])
    rows = []
    for one in found:
        cells = []
        for field in FIELDS:
            middle = estimate(one[field]["measured"], "median")
            cells.append(f"{one[field]['predicted']:.2f} / {middle.value:.2f} s ({error_of(one, field):+.1%})")
        many = len(one["tt64t_s"]["measured"])
        spread = max(spread_of(one, field) for field in FIELDS)
        rows.append((_where(results, one), SERIES[one["series"]].label, *cells, f"± {spread:.1%} of {many}"))
    worst, typical, at = summary(results)
    spreads = [spread_of(one, field) for one in found for field in FIELDS if len(one[field]["measured"]) > 1]
    repeated = (
        f"Repeated transfers of a setting themselves differ from their median by {max(spreads):.1%} at most, "
        f"{estimate(spreads, 'median').value:.1%} in the median of all settings."
        if spreads
        else "Every setting has one transfer, so the error is also that of single samples."
    )
    return Block(
        name="simulator-error",
        title="The simulator against what was measured",
        paper="",
        caption=(
            f"Predicted time over the median of the measured ones for every setting of this page; the grey band is "
            f"± {BOUND:.0%}. Median error of all settings {typical:.1%}, largest {worst:.1%} ({at}). {repeated} The "
            "simulator gets the time that a transfer takes without a limit, the rate of the link, the seconds of a "
            "token, of the pass that verifies, and how much longer a token takes while something arrives, each "
            "measured by itself, and how many drafts of a transfer stood."
        ),
        svg=themed_svg(figure, "simulator-error", "Predicted against measured times"),
        tables=[Table(("setting", "codec", "TTFT, predicted / measured", "TT32T", "TT64T", "spread"), rows)],
    )


def error_of(checked: Record, field: str) -> float:
    """Of one setting: the predicted time over the median of the measured ones, less one."""
    return float(checked[field]["predicted"] / estimate(checked[field]["measured"], "median").value - 1)


def spread_of(checked: Record, field: str) -> float:
    """Of one setting: by how much a half of its transfers differ from their median, and more."""
    measured = checked[field]["measured"]
    middle = estimate(measured, "median").value
    return float(estimate([abs(one / middle - 1) for one in measured], "median").value)


def _where(results: Results, checked: Record) -> str:
    title = results["settings"]["models"][checked["model"]]
    return f"{title}, {checked['tokens']:,} tokens, {rate_text(checked['rate_bps'])}"


def summary(results: Results) -> tuple[float, float, str]:
    """Largest and median error of the simulator over all settings and the three times, and which is the largest."""
    errors = [
        (abs(error_of(one, field)), f"{FIELDS[field]} of {SERIES[one['series']].label}, {_where(results, one)}")
        for one in results["simulator"]["checked"]
        for field in FIELDS
    ]
    worst, at = max(errors)
    return worst, float(estimate([one for one, _ in errors], "median").value), at


def simulated(results: Results) -> Block:
    """Models and links that are not here."""
    found = results["simulator"]["predicted"]
    models = list(dict.fromkeys(one["model"] for one in found))
    figure, axes = panels(2 * len(models), height=3.2)
    tables = []
    for number, model in enumerate(models):
        left, right = axes[2 * number], axes[2 * number + 1]
        mine = only(found, model=model)
        rates, lengths = values(mine, "rate_bps"), values(mine, "tokens")
        middle = rates[len(rates) // 2]
        for name in present(mine):
            curve = [_one(mine, series=name, rate_bps=middle, tokens=length) for length in lengths]
            left.plot(
                lengths,
                [one["tt32t_s"] for one in curve],
                color=color(name),
                marker=SERIES[name].marker,
                markersize=4,
                linewidth=1.2,
                label=SERIES[name].label,
            )
        left.set_xscale("log", base=2)
        left.set_yscale("log")
        left.set_title(f"{model}, {rate_text(middle)}")
        left.set_ylabel("seconds to the 32nd token")
        rows = []
        for at, rate in enumerate(rates):
            ratios = [_ratio(mine, rate, length) for length in lengths]
            right.errorbar(
                lengths,
                [one.value for one in ratios],
                yerr=errors_of(ratios),
                color=ACCENTS[at % len(ACCENTS)],
                marker="osv^DP"[at % 6],
                markersize=4,
                linewidth=1.2,
                capsize=2,
                label=rate_text(rate),
            )
            rows.append((rate_text(rate), *(cell(one) for one in ratios)))
        right.set_xscale("log", base=2)
        right.set_title(f"{model}: TT32T of the default codec / of int8")
        for axis in (left, right):
            axis.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
            axis.minorticks_off()
            axis.set_xlabel("tokens of context")
        tables.append(Table((f"{model}: default / int8", *(f"{length // 1024}K" for length in lengths)), rows))
    legend_below(figure, axes[0])
    axes[1].legend()
    return Block(
        name="simulated",
        title="Predicted: larger models, faster links, longer contexts",
        paper="",
        caption=(
            f"{results['simulator']['assumptions']} Intervals come from the recorded prompts: how many of their drafts "
            "stand."
        ),
        svg=themed_svg(figure, "simulated", "Predicted times for larger models, links and contexts"),
        tables=tables,
    )


def _one(found: Sequence[Record], **wanted: object) -> Record:
    (record,) = only(found, **wanted)
    return record


def _ratio(found: Sequence[Record], rate_bps: float, tokens: int) -> Estimate:
    """Time of the default codec by prompts, over that of int8, which is the same for all."""
    ours, theirs = (_one(found, series=name, rate_bps=rate_bps, tokens=tokens) for name in ("default", "int8"))
    return estimate([at_s / theirs["tt32t_s"] for at_s in ours["tt32t_by_prompt_s"]])


def peers(results: Results) -> Block:
    """Codecs of others on the same tensors."""
    found = results["peers"]
    models = [model for model in results["settings"]["models"] if only(found, model=model)]
    figure, axes = panels(len(models), height=3.8)
    tables = []
    for axis, model in zip(axes, models, strict=True):
        rows = []
        for number, name in enumerate(dict.fromkeys(one["name"] for one in only(found, model=model))):
            mine = only(found, name=name, model=model)
            if "failure" in mine[0]:
                rows.append((name, mine[0]["settings"], f"not measured: {mine[0]['failure']}", "", ""))
                continue
            bits, error, speed = (mean_of(mine, field) for field in ("bits", "vnmse", "encode_mvalues_s"))
            assert bits is not None
            assert error is not None
            exact = error.value == 0
            rows.append(
                (
                    name,
                    mine[0]["settings"],
                    cell(bits),
                    "0" if exact else _scientific(error),
                    cell(speed, "", 0) if speed else "",
                )
            )
            if exact:
                continue  # has no place on a logarithmic scale
            ours = mine[0]["ours"]
            axis.errorbar(
                [bits.value],
                [error.value],
                yerr=errors_of([error]),
                color=ACCENTS[4 if ours else number % 4],
                marker="D" if ours else "osv^PX"[number % 6],
                markersize=6,
                capsize=2,
                linestyle="none",
                label=name,
            )
        axis.set_yscale("log")
        axis.set_xlabel("bits a value")
        axis.set_ylabel("vNMSE of attention outputs")
        axis.set_title(results["settings"]["models"][model])
        header = (
            results["settings"]["models"][model],
            "settings",
            "bits a value",
            "vNMSE",
            "million values coded a second",
        )
        tables.append(Table(header, rows))
    legend_below(figure, axes[0])
    return Block(
        name="peers",
        title="Codecs of other projects on the same caches",
        paper="",
        caption=(
            "Lower left is better; diamonds are this project's. The codecs of others run in environments of their "
            "own, at the best settings found, with the same first 4 tokens in 16 bits; all they need for decoding is "
            "counted. Speeds are of one thread and of what their libraries do on a CPU, for which not all were "
            "written."
        ),
        svg=themed_svg(figure, "peers", "Bits against error of attention outputs for codecs of other projects"),
        tables=tables,
    )


def _scientific(one: Estimate) -> str:
    ends = "" if one.low is None else f" [{one.low:.1e}, {one.high:.1e}]"
    return f"{one.value:.2e}{ends}"


def transports(results: Results) -> Block:
    """Transports of others with the same payloads."""
    found = results["transports"]["figures"]
    sizes = results["transports"]["mib"]
    rows = [
        (name, *(f"{one[str(mib)]['gbytes_per_s']:.2f}" for mib in sizes))
        if "failure" not in one
        else (name, *([f"not measured: {one['failure']}"] + [""] * (len(sizes) - 1)))
        for name, one in found.items()
    ]
    return Block(
        name="transports",
        title="Transports of other projects",
        paper="",
        caption=(
            "GB/s over loopback TCP, each payload acknowledged by its receiver, medians over rounds in which the "
            "systems take turns (python -m perf.peers). lynx makes a transfer of every payload, with checksums; "
            "lynx-open sends pages of one that is open. The others go without checksums."
        ),
        svg=None,
        tables=[Table(("system", *(f"{mib} MiB" for mib in sizes)), rows)],
    )
