"""Plots as SVG that follows the reader's colour scheme.

matplotlib draws with colours that stand for something; in the finished SVG each is replaced by a CSS variable, whose
value for a light and a dark scheme is in a style sheet. Text stays text: it is found, read aloud and scaled.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, cast

from lynx_net.errors import BackendMissingError
from perf.report.series import SERIES

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
except ImportError as error:
    raise BackendMissingError(f"what perf.report draws with ({error.name})", "report") from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from perf.report.stats import Estimate

__all__ = [
    "ACCENTS",
    "GRID",
    "INK",
    "STYLE_SHEET",
    "Rectangle",
    "band",
    "color",
    "errors_of",
    "grouped_bars",
    "legend_below",
    "panels",
    "standalone",
    "themed_svg",
]

INK, GRID, PAPER = "#010a00", "#010a01", "#010a02"
"""Stand for text and axes, for grid lines, and for what lies behind a plot."""

ACCENTS = tuple(f"#010b{number:02x}" for number in range(6))
"""Stand for what is no codec: kinds of time, models."""

_ACCENT_COLORS = (
    ("#0060a0", "#5ab4f0"),
    ("#a86b00", "#f0b040"),
    ("#00785a", "#3fd0a4"),
    ("#a0428a", "#e69ad0"),
    ("#c8401c", "#ff8a66"),
    ("#5a5a5a", "#b8b8b8"),
)
_SERIES_COLORS = {name: f"#010c{number:02x}" for number, name in enumerate(SERIES)}
_VARIABLES = {
    INK: ("ink", ("#1c1c1c", "#ececec")),
    GRID: ("grid", ("#d8d8d8", "#444444")),
    PAPER: ("paper", ("#ffffff", "#16181b")),
    **{one: (f"accent-{i}", _ACCENT_COLORS[i]) for i, one in enumerate(ACCENTS)},
    **{one: (f"series-{name}", SERIES[name].colors) for name, one in _SERIES_COLORS.items()},
}


def _rules(scheme: int) -> str:
    return " ".join(f"--{name}: {colors[scheme]};" for name, colors in _VARIABLES.values())


STYLE_SHEET = f":root {{ {_rules(0)} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {_rules(1)} }} }}"
"""What the variables are, in a light and in a dark scheme."""

_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "hatch.color": PAPER,
    "hatch.linewidth": 0.6,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}


def color(series: str) -> str:
    """The colour that stands for a codec of `SERIES`."""
    return _SERIES_COLORS[series]


def panels(count: int, *, height: float = 3.4, width: float | None = None) -> tuple[Figure, list[Axes]]:
    """A figure of so many plots side by side, two a row; sizes in inches."""
    columns = min(count, 2)
    rows = -(-count // columns)
    matplotlib.rcParams.update(cast("Any", _SETTINGS))  # what is drawn later into these plots asks for them, too
    figure = Figure(figsize=(width or (5.2 if columns == 1 else 9.6), height * rows), layout="constrained")
    axes: list[Axes] = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for extra in axes[count:]:
        extra.set_axis_off()
    return figure, axes[:count]


def themed_svg(figure: Figure, name: str, title: str) -> str:
    """The SVG of a figure, without a declaration, its ids made unique by `name`, titled for who cannot see it."""
    buffer = io.StringIO()
    with matplotlib.rc_context(cast("Any", {**_SETTINGS, "svg.hashsalt": name})):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for stands_for, (variable, _) in _VARIABLES.items():
        svg = svg.replace(stands_for, f"var(--{variable})")
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="', f' id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'xlink:href="#', f'xlink:href="#{name}-', svg)
    opening, rest = svg.split(">", 1)
    opening = re.sub(r' (width|height)="[^"]*"', "", opening)
    style = f"max-width: {figure.get_figwidth() * 96:.0f}px"
    label = f'<title id="{name}-title">{_escaped(title)}</title>'
    return f'{opening} style="{style}" role="img" aria-labelledby="{name}-title">{label}{rest}'


def standalone(svg: str) -> str:
    """The same SVG as a file of its own, with its colours."""
    opening, rest = svg.split(">", 1)
    head = '<?xml version="1.0" encoding="utf-8"?>\n'
    return f"{head}{opening}><style>{STYLE_SHEET} svg {{ background: var(--paper); }}</style>{rest}"


def errors_of(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Lengths of the error bars below and above; none for one sample."""
    return [
        [max(one.value - one.ends[0], 0.0) for one in estimates],
        [max(one.ends[1] - one.value, 0.0) for one in estimates],
    ]


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend for all plots of a figure, under them, with what `axes` shows."""
    columns = 2 if figure.get_figwidth() < 7 else 5
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns)


def band(axes: Axes, at: Sequence[float], estimates: Sequence[Estimate], shade: str) -> None:
    """The intervals of a curve, as a band around it."""
    lows, highs = ([one.ends[end] for one in estimates] for end in (0, 1))
    axes.fill_between(at, lows, highs, color=shade, alpha=0.18, linewidth=0)


def grouped_bars(axes: Axes, groups: Sequence[str], bars: dict[str, Sequence[Estimate | None]]) -> None:
    """A group of bars for each of `groups`, a bar for each codec of `SERIES` in it, with intervals."""
    width = 0.84 / len(bars)
    for number, (name, values) in enumerate(bars.items()):
        held = [(at, one) for at, one in enumerate(values) if one is not None]
        axes.bar(
            [at - 0.42 + width * (number + 0.5) for at, _ in held],
            [one.value for _, one in held],
            width=width,
            yerr=errors_of([one for _, one in held]),
            color=color(name),
            hatch=SERIES[name].hatch,
            edgecolor=PAPER,
            linewidth=0.4,
            label=SERIES[name].label,
            error_kw={"ecolor": INK, "elinewidth": 0.9, "capsize": 1.8},
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
