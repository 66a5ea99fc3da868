"""The fuzz target of fuzz/, run briefly, and proof that it notices what it is there to notice."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lynx_net.wire.grants import CreditBook
from lynx_net.wire.incoming import Incoming
from lynx_net.wire.receiving import ReceiveState

if TYPE_CHECKING:
    from types import ModuleType

FUZZ = Path(__file__).parents[2] / "fuzz"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FUZZ / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def target() -> ModuleType:
    return _load("fuzz_frames")


@pytest.fixture(scope="module")
def links(target: ModuleType) -> ModuleType:
    """It imports `fuzz_frames` by name, which `target` has put in its place."""
    return _load("fuzz_links")


@pytest.fixture(scope="module")
def corpus(target: ModuleType) -> Any:
    return target.load_corpus(FUZZ / "corpus")


def test_every_end_of_a_broken_stream(target: ModuleType, corpus: Any) -> None:
    ends = target.fuzz(1.0, 2024, corpus)
    assert set(ends) == {"read", "refused", "truncated", "waits for an offer"}


def test_every_end_of_a_broken_link(links: ModuleType) -> None:
    """Links between two cores with somebody between them: honest ones arrive, others end as they may."""
    ends = links.fuzz(2.0, 2024)
    assert set(ends) >= {"honest: read", "noise: refused", "hostile: refused", "hostile: read", "hostile: no link"}


@pytest.mark.parametrize(
    ("broken", "name", "replacement"),
    [
        (Incoming, "place", lambda *_: [][0]),
        (ReceiveState, "page_streams", lambda *_: [memoryview(b"other bytes")]),
        (CreditBook, "remove", lambda *_: []),
    ],
)
def test_a_core_that_breaks_on_a_link_is_noticed(
    links: ModuleType, broken: Any, name: str, replacement: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken, name, replacement)
    with pytest.raises(links.InvariantBroken, match="--replay"):
        links.fuzz(5.0, 0)


def test_the_corpus_itself_is_read_or_refused_as_it_should(target: ModuleType, corpus: Any) -> None:
    """Streams of a side that serves its peer well are read to their end; at least half of the corpus is such."""
    ends = [
        target.run_one(b"".join(frame.to_bytes() for frame in frames), seed) for frames in corpus for seed in range(8)
    ]
    assert ends.count("read") > len(ends) / 2


def test_the_same_seed_makes_the_same_streams(target: ModuleType, corpus: Any) -> None:
    first, second = ([target.mutate(corpus, rng) for _ in range(20)] for rng in (random.Random(5), random.Random(5)))
    assert first == second


def test_a_crash_is_noticed_kept_and_can_be_replayed(
    target: ModuleType, corpus: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(Incoming, "place", lambda *_: [][0])
        with pytest.raises(target.InvariantBroken, match=r"IndexError.*--replay"):
            target.fuzz(5.0, 0, corpus, tmp_path)
        (kept,) = tmp_path.iterdir()
        with pytest.raises(target.InvariantBroken, match="IndexError"):
            target.main(["--replay", str(kept)])
    assert target.main(["--replay", str(kept)]) == 0
    assert capsys.readouterr().out


def test_memory_beyond_what_was_reserved_is_noticed(
    target: ModuleType, corpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReceiveState, "early_bytes", lambda _: 100)
    with pytest.raises(target.InvariantBroken, match="more than was reserved"):
        target.fuzz(5.0, 0, corpus)


def test_the_commands(target: ModuleType, links: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert target.main(["--seconds", "0.2", "--seed", "3"]) == 0
    assert "streams" in capsys.readouterr().out
    assert links.main(["--seconds", "0.2", "--seed", "3"]) == 0
    assert links.main(["--replay", "5"]) == 0
    assert "links" in capsys.readouterr().out
