"""`python -m perf.gpu_codec`: what it measures of the default codec is the default codec, keys and values together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lynx_codec import get_codec
from lynx_codec.plan import DEFAULT_PLAN
from perf.gpu_codec import CODECS, together


def test_its_default_is_the_default() -> None:
    measured = [get_codec(name, **params) for name, params in CODECS["default"]]
    chosen = DEFAULT_PLAN.table(1).codecs
    assert [(one.name, one.params()) for one in measured] == [(one.name, one.params()) for one in chosen]
    assert CODECS["default"] == (*CODECS["default, keys"], *CODECS["default, values"])


def test_cases_together_do_and_move_what_each_does() -> None:
    done: list[str] = []

    def case(name: str, moved: int) -> Any:
        works = {work: (lambda work=work: done.append(f"{name} {work}"), moved) for work in ("encode", "refine")}
        return SimpleNamespace(measurements=lambda: works)

    works = together([case("keys", 5), case("values", 7)])
    assert {work: moved for work, (_, moved) in works.items()} == {"encode": 12, "refine": 12}
    works["refine"][0]()
    works["encode"][0]()
    assert done == ["keys refine", "values refine", "keys encode", "values encode"]
