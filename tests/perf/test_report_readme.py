"""The figures of the evaluation in README.md are those of the results that are committed."""

from __future__ import annotations

import importlib.util

import pytest

if not all(importlib.util.find_spec(needed) for needed in ("matplotlib", "scipy")):
    pytest.skip("needs matplotlib and scipy (extra report)", allow_module_level=True)

from perf.report.parts import load
from perf.report.readme import README, ROOT, block_of, published, rewritten


def test_the_figures_in_the_readme_are_those_of_the_committed_results() -> None:
    folder, text = published(README.read_text("utf-8"))
    results = load([ROOT / folder / "results.json"])
    assert text == block_of(results, folder), "python -m perf.report --from FOLDER/results.json --out FOLDER --readme"
    assert "TT32T of the default codec / of int8" in text
    assert results["command"] in text


def test_a_readme_is_rewritten_in_its_one_place_alone() -> None:
    folder, text = published(README.read_text("utf-8"))
    begin, end = f"before\n<!-- evaluation: {folder} -->\n", "<!-- end of evaluation -->\nbehind"
    assert rewritten(f"{begin}| old |\n{end}", folder) == f"{begin}{text}{end}"
    with pytest.raises(ValueError, match="0 places"):
        rewritten("nothing", folder)
