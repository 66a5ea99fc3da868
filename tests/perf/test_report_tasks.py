"""Tasks of the evaluation: exact lengths, facts where they should be, scores; cells that are kept; where time goes."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.report import cells as cells_module
from perf.report import corpus as corpus_module
from perf.report.cells import Cells, fingerprint
from perf.report.corpus import Corpus, faq_body, load_corpus, paragraphs_of
from perf.report.tasks import ANSWER_TOKENS, DEPTHS, SAMPLES, is_right, make_task, make_text, rouge_l

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = Corpus("made up", tuple(f"Paragraph {n} has a few words. It ends here; more or less {n}." for n in range(150)))


class Words:
    """A tokenizer of words with the space before them; ids are places in a list that grows."""

    def __init__(self, chat: bool) -> None:
        self.chat_template = "yes" if chat else None
        self.words = ["<begin>"]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        pieces = text.replace("\n", " \n").replace(" ", "\x00 ").split("\x00")
        ids = []
        for piece in filter(None, pieces):
            if piece not in self.words:
                self.words.append(piece)
            ids.append(self.words.index(piece))
        return {"input_ids": [0] * (add_special_tokens and self.chat_template is None) + ids}

    def decode(self, ids: Any) -> str:
        return "".join(self.words[one] for one in ids)

    def apply_chat_template(self, messages: list[dict[str, str]], **_options: Any) -> str:
        return f"<user> {messages[0]['content']} <assistant> "


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("name", ["summary", "prose"])
@pytest.mark.parametrize("tokens", [200, 333])
def test_a_task_fills_its_cache_exactly_and_is_the_same_each_time(name: Any, chat: bool, tokens: int) -> None:
    for number in (0, 3, SAMPLES - 1):
        task = make_task(Words(chat), CORPUS, name, number, tokens, 8)
        assert len(task.prompt) == tokens + 1
        assert len(task.following) == (8 if name == "prose" else 0)
        assert task == make_task(Words(chat), CORPUS, name, number, tokens, 8)


@pytest.mark.parametrize("chat", [True, False])
def test_every_fact_stands_once_and_at_its_depth(chat: bool) -> None:
    kinds = set()
    for number in (0, 1, 2, 7, SAMPLES - 1):
        tokenizer = Words(chat)
        text = make_text(tokenizer, CORPUS, number, 500)
        assert text == make_text(tokenizer, CORPUS, number, 500)
        assert len(text.ids) == 500
        assert [one.task for one in text.questions] == ["needle"] * len(DEPTHS) + ["questions"] * len(DEPTHS)
        body = tokenizer.decode(text.ids)
        assert body.count("owns a collection of") == len(DEPTHS)
        for one in text.questions:
            asked = tokenizer.decode(one.ids)
            who = asked.split(" has ")[-2].split()[-1] if one.task == "questions" else asked.split(" of ")[1].split()[0]
            sentence = next(part for part in re.split(r"[.?]", body) if who in part)
            assert sentence.endswith(f" {one.answer}") or f" {one.answer} old" in sentence
            assert body.count(who) == 1, "nobody else is called so"
            found = len(tokenizer(body[: body.index(sentence)])["input_ids"]) / len(text.ids)
            assert found == pytest.approx(one.depth, abs=0.12)
        kinds |= {(one.depth, tokenizer.decode(one.ids).split(" of ")[0]) for one in text.questions[: len(DEPTHS)]}
    assert len(kinds) >= 15, "kinds change places from text to text"


def test_a_corpus_without_enough_prose_is_gone_round() -> None:
    short = Corpus("short", ("A single sentence that is a little longer than others are.",))
    assert len(make_text(Words(chat=False), short, 0, 500).ids) == 500


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("231", " 231 old stamps", True), ("231", "has 1231 stamps", False), ("231", "231,", True),
        ("anchor", " The Anchor.", True), ("anchor", "anchors", False), ("a.b", "axb", False),
    ],
)  # fmt: skip
def test_answers_are_whole_words(answer: str, text: str, right: bool) -> None:
    assert is_right(answer, text) is right


def test_rouge_l_of_known_texts() -> None:
    assert rouge_l([1, 2, 3], [1, 2, 3]) == 1
    assert rouge_l([1, 9, 2, 8, 3], [1, 2, 3]) == pytest.approx(2 * 3 / 8)
    assert rouge_l([4, 5], [1, 2]) == 0
    assert rouge_l([], [1]) == 0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_rouge_l_is_a_symmetric_share(left: list[int], right: list[int]) -> None:
    score = rouge_l(left, right)
    assert 0 <= score <= 1
    assert score == rouge_l(right, left)
    assert (score == 1) == (left == right)


def test_cells_are_measured_once_and_known_by_all_that_matters(tmp_path: Path) -> None:
    calls: list[int] = []

    def measure() -> dict[str, float]:
        calls.append(1)
        return {"at": len(calls)}

    cells = Cells(tmp_path, {"code": "a"})
    assert cells.get({"codec": "lynx", "n": 1}, measure) == {"at": 1}
    assert cells.get({"n": 1, "codec": "lynx"}, measure) == {"at": 1}
    assert Cells(tmp_path, {"code": "a"}).held({"codec": "lynx", "n": 1}) == {"at": 1}
    assert cells.get({"codec": "lynx", "n": 2}, measure) == {"at": 2}
    assert Cells(tmp_path, {"code": "b"}).get({"codec": "lynx", "n": 1}, measure) == {"at": 3}
    assert (cells.made, cells.reused) == (2, 1)
    fresh = Cells(tmp_path, {"code": "a"}, fresh=True)
    assert fresh.held({"codec": "lynx", "n": 1}) is None
    assert [fresh.get({"codec": "lynx", "n": 1}, measure) for _ in range(2)] == [{"at": 4}] * 2
    assert not list(tmp_path.rglob("*.part"))


def test_an_interrupted_cell_is_measured_again(tmp_path: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    cells = Cells(tmp_path, {})
    with pytest.raises(KeyboardInterrupt):
        cells.get({"n": 1}, interrupted)
    assert cells.get({"n": 1}, lambda: 5) == 5


def test_the_fingerprint_is_of_code_that_is_there() -> None:
    assert fingerprint(["perf/report/cells.py"]) != fingerprint(["perf/report/tasks.py"])
    assert fingerprint(["codec/lynx_codec"]) == fingerprint(["codec/lynx_codec"])
    assert fingerprint(["perf/report/cells.py:Cells"]) != fingerprint(["perf/report/cells.py:fingerprint"])
    with pytest.raises(FileNotFoundError):
        fingerprint(["perf/report/cells.py:Nothing"])
    with pytest.raises(FileNotFoundError):
        fingerprint(["perf/report/nothing"])


def test_comments_and_layout_do_not_change_a_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "ROOT", tmp_path)
    seen = []
    for text in (
        'def f(x):\n    return x + 1\n', '"""New."""\n# why\ndef f(\n    x\n):\n    "What."\n    return (x + 1)\n',
        'def f(x):\n    return x + 2\n',
    ):  # fmt: skip
        (tmp_path / "one.py").write_text(text)
        seen.append(fingerprint(["one.py"]))
    assert seen[0] == seen[1] != seen[2]


def test_without_the_faq_the_documents_of_the_project_stand_alone(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_arguments: Any, **_options: Any) -> None:
        raise subprocess.CalledProcessError(
            100, "apt-get", stderr="W: ignored\nE: Unable to locate package debian-faq\n"
        )

    monkeypatch.setattr(corpus_module.subprocess, "run", fail)
    monkeypatch.setattr(corpus_module.shutil, "which", lambda program: program)
    found = load_corpus(tmp_path)
    assert found.missing == "E: Unable to locate package debian-faq"
    assert len(found.paragraphs) > 100
    monkeypatch.setattr(corpus_module.shutil, "which", lambda _program: None)
    assert load_corpus(tmp_path).missing == "there is no apt-get here"
    (tmp_path / "debian-faq.txt").write_text("Chapter 1. Contents\n\nChapter 1. Begin\n\n" + "a long paragraph " * 9)
    assert load_corpus(tmp_path).missing is None


def test_paragraphs_are_unwrapped_and_headings_left_out() -> None:
    text = (
        "Chapter 1. Index\n\nChapter 1. Begin\n\n  One line of a paragraph that goes\n  on "
        + "and on " * 12
        + "\n\nTitle\n"
    )
    assert faq_body(text).startswith("Chapter 1. Begin")
    (found,) = paragraphs_of(faq_body(text))
    assert found.startswith("One line of a paragraph that goes on and on")


def test_a_corpus_can_begin_anywhere() -> None:
    assert CORPUS.from_start(0, 10)[0] == CORPUS.paragraphs[0]
    assert CORPUS.from_start(5, 10) == [*CORPUS.paragraphs[75:], *CORPUS.paragraphs[:75]]
    assert dataclasses.replace(CORPUS, paragraphs=("a",)).digest != CORPUS.digest
    assert ANSWER_TOKENS < 64
