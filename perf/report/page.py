"""The page: one HTML file that needs nothing else, readable in a light and a dark scheme, by eye and by ear."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

from perf.report.draw import STYLE_SHEET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.report.figure import Block, Results, Table

__all__ = ["render"]

_STYLE = """
html { background: var(--paper); color: var(--ink); color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem 1.25rem 4rem; }
h1 { line-height: 1.2; } h2 { margin-top: 3rem; border-bottom: 1px solid var(--grid); }
a { color: var(--accent-0); } a:focus-visible { outline: 2px solid var(--accent-4); }
figure { margin: 1rem 0; } figcaption { max-width: 60rem; }
figure svg { width: 100%; height: auto; display: block; }
figure svg text { fill: var(--ink); }
.table { overflow-x: auto; } table { border-collapse: collapse; margin: 0.75rem 0; font-size: 0.875rem; }
caption { text-align: left; padding-bottom: 0.25rem; }
th, td { border: 1px solid var(--grid); padding: 0.2rem 0.6rem; text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
.notice { border-left: 4px solid var(--accent-4); padding: 0.25rem 1rem; }
pre { overflow-x: auto; font-size: 0.8125rem; } nav ol { columns: 2; }
.skip { position: absolute; left: -999rem; } .skip:focus { position: static; }
@media (max-width: 40rem) { nav ol { columns: 1; } }
"""


def render(results: Results, blocks: Sequence[Block], verdicts: Table, notes: Sequence[str]) -> str:
    """The page of all figures.

    Args:
        results: the raw results; their command, machine and settings are shown.
        blocks: the figures, in order.
        verdicts: what was promised and what was found.
        notes: what a reader must know before the figures.
    """
    made = " ".join(
        f"{_text(part.capitalize())} by <code>{_text(one['command'])}</code>, version {_text(one['version'])}, on "
        f"{_text(one['date'])}, in {one['took_s'] / 60:.0f} minutes ({one['cells']['kept_from_earlier_runs']} of "
        f"{sum(one['cells'].values())} cells were measured before)."
        for part, one in results["parts"].items()
    )
    links = "".join(f'<li><a href="#{one.name}">{_text(one.title)}</a></li>' for one in blocks)
    sections = "".join(_section(one) for one in blocks)
    notices = "".join(f'<p class="notice">{_text(note)}</p>' for note in notes)
    facts = "".join(
        f"<h3>{_text(part)}</h3>" + _table(("what", "value"), [(name, _plain(value)) for name, value in about.items()])
        for part, about in results["parts"].items()
    )
    settings = _text(json.dumps(results["settings"], indent=1))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>lynx_net: the evaluation</title>
<link rel="icon" href="data:,">
<style>{STYLE_SHEET}{_STYLE}</style>
</head>
<body>
<a class="skip" href="#{blocks[0].name if blocks else "machine"}">To the first figure</a>
<header>
<h1>lynx_net: the evaluation</h1>
<p>{made} Times are medians, other figures means; brackets are 95 % confidence
intervals.</p> {notices}
</header>
<nav aria-label="Figures"><ol>{links}</ol></nav>
<main>
<section aria-labelledby="verdicts"><h2 id="verdicts">What was promised</h2>
{_table(verdicts.header, verdicts.rows)}</section>
{sections}
<section aria-labelledby="machine"><h2 id="machine">Machine and settings</h2>
{facts}
<pre tabindex="0">{settings}</pre></section>
</main>
</body>
</html>
"""


def _section(block: Block) -> str:
    paper = ""
    if block.paper is not None:
        answers = f"{_text(block.paper)} of the paper" if block.paper else "beyond the paper"
        paper = f" <small>({answers})</small>"
    tables = "".join(_table(one.header, one.rows) for one in block.tables)
    plot = block.svg or ""
    return (
        f'<section aria-labelledby="{block.name}"><h2 id="{block.name}">{_text(block.title)}{paper}</h2>\n'
        f'<figure data-figure="{block.name}">{plot}<figcaption>{_text(block.caption)}</figcaption></figure>\n'
        f"{tables}</section>\n"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{_text(row[0])}</th>' + "".join(f"<td>{_text(one)}</td>" for one in row[1:]) + "</tr>"
        for row in rows
    )
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    return str(value)


def _text(text: str) -> str:
    return html.escape(text, quote=True)
