"""The bytes of every codec. A difference here breaks peers that run another version, unless only encoders choose it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_recipe import CASES, COMPARISON_CASES, record

GOLDEN = Path(__file__).parent / "golden"
VECTORS = json.loads((GOLDEN / "vectors.json").read_text())
COMPARISON_VECTORS = json.loads((GOLDEN / "comparison.json").read_text())


def test_all_cases_are_stored():
    assert len(VECTORS) == len(CASES)
    assert len(COMPARISON_VECTORS) == len(COMPARISON_CASES)


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{i}-{CASES[i]['codec']}-{CASES[i]['dtype']}")
def test_vector(index, implementation):
    assert record(CASES[index], implementation) == VECTORS[index]


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
@pytest.mark.parametrize("index", range(len(COMPARISON_CASES)), ids=lambda i: f"{i}-{COMPARISON_CASES[i]['codec']}")
def test_comparison_vector(index, implementation):
    assert record(COMPARISON_CASES[index], implementation) == COMPARISON_VECTORS[index]


def test_some_vectors_escape():
    assert sum(bool(bytes.fromhex(v["streams"][0][:16])[7]) for v in VECTORS if v["spike"]) == 5
