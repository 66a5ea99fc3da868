"""The figures of the evaluation in README.md, made from committed raw results.

They are the table between two comments, of which the first names the folder of the results.
`python -m perf.report --from docs/results/NAME/results.json --out docs/results/NAME --readme` writes it anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perf.report.build import verdicts_of
from perf.report.parts import load

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["README", "block_of", "published", "rewritten"]

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"

_BLOCK = re.compile(r"<!-- evaluation: (\S+) -->\n(.*?)<!-- end of evaluation -->", re.DOTALL)


def block_of(results: Mapping[str, Any], folder: str) -> str:
    """What stands between the comments for the results in a folder of the repository."""
    table = verdicts_of(results)
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    rounds = results["settings"]["scope"]["rounds"]
    samples = f"{rounds} transfers of each codec, 100 answers and more"
    if results["settings"]["quick"]:
        samples = "few samples a cell"
    made: dict[str, list[str]] = {}
    for part, about in results["parts"].items():
        made.setdefault(_how(about), []).append(part)
    lines += ["", f"Medians of {samples}, in brackets intervals of 95 %. All of it: [{folder}]({folder}). Made by", ""]
    lines += [f"- {how}: {', '.join(parts)}" for how, parts in made.items()]
    return "\n".join(lines) + "\n"


def _how(about: Mapping[str, Any]) -> str:
    """By which command a part was measured, when and where."""
    machine = about["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores"
    if "load_before" in machine:  # not of runs that only kept cells
        where += f" (load {machine['load_before']:g} before)"
    if accelerator := machine.get("accelerator"):
        where = f"{accelerator}, {where}"
    return f"`{about['command']}` on {about['date']}, {where}"


def published(readme: str) -> tuple[str, str]:
    """The folder that a README names, and what stands there.

    Raises:
        ValueError: there is no such place, or there are several.
    """
    found = _BLOCK.findall(readme)
    if len(found) != 1:
        raise ValueError(f"README.md has {len(found)} places for the evaluation, not one")
    folder, text = found[0]
    return folder, text


def rewritten(readme: str, folder: str) -> str:
    """A README with the figures of the results in another folder of the repository."""
    published(readme)
    results = load([ROOT / folder / "results.json"])
    block = f"<!-- evaluation: {folder} -->\n{block_of(results, folder)}<!-- end of evaluation -->"
    return _BLOCK.sub(lambda _: block, readme)
