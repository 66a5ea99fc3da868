"""Prompts have exactly the length that was asked for, and only the document gives way."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from lynx_net.demo.options import MIN_PROMPT_TOKENS, DemoError, DemoOptions
from lynx_net.demo.prompts import build_prompt, default_document, read_document, source_for

if TYPE_CHECKING:
    from pathlib import Path


class WordTokenizer:
    """Words, spaces and marks as tokens, and a chat template of the usual kind."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def apply_chat_template(self, messages: list[dict[str, str]], **options: object) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"<user>{message['content']}<end>" for message in messages) + "<assistant>"

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        ids = []
        for word in re.findall(r"<\w+>|\w+|\s+|.", text):
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return {"input_ids": ids}

    def text(self, tokens: tuple[int, ...]) -> str:
        return "".join(self.words[token] for token in tokens)


@pytest.mark.parametrize("tokens", [128, 129, 300, 1000])
def test_length_is_exact_and_the_question_stays(tokens: int) -> None:
    tokenizer = WordTokenizer()
    prompt = build_prompt(tokenizer, "one two three " * 1000, "Why is that?", tokens)
    assert len(prompt.tokens) == tokens
    assert prompt.cut
    text = tokenizer.text(prompt.tokens)
    assert text.startswith("<user>one two three")
    assert text.endswith("\n\nWhy is that?<end><assistant>")


def test_a_short_document_gives_a_shorter_prompt() -> None:
    tokenizer = WordTokenizer()
    prompt = build_prompt(tokenizer, "word " * 200, "Why?", 2048)
    assert len(prompt.tokens) < 2048
    assert not prompt.cut
    assert tokenizer.text(prompt.tokens).count("word") == 200


def test_a_document_that_is_much_too_short_is_refused_with_its_length() -> None:
    with pytest.raises(DemoError, match=f"has 11 tokens and needs {MIN_PROMPT_TOKENS}"):
        build_prompt(WordTokenizer(), "one two three", "Why?", 2048)


def test_a_question_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(DemoError, match="fills 128 prompt tokens"):
        build_prompt(WordTokenizer(), "document", "word " * 200, 128)


def test_the_mark_of_the_template_cannot_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "odd.txt"
    file.write_text("\x00document\x00 " + "word " * 200)
    tokenizer = WordTokenizer()
    prompt = build_prompt(tokenizer, read_document(file), "Why?", 200)
    assert len(prompt.tokens) == 200


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot read .*No such file"), (b"\xff\xfe\x00", "not UTF-8"), (b" \n", "holds no text")],
)
def test_files_that_are_no_document(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "prompt.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DemoError, match=reason):
        read_document(file)


def test_options_choose_document_and_question(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("mine " * 500)
    document, question = source_for(DemoOptions(prompt_file=file))
    assert document == file.read_text()
    assert question.startswith("Summarise the document")
    assert source_for(DemoOptions(prompt_file=file, question="How?"))[1] == "How?"
    document, question = source_for(DemoOptions())
    assert document == default_document()
    assert "lynx_net" in question


@pytest.mark.model
def test_the_default_prompt_fills_the_default_length(smollm2_tokenizer: Any) -> None:
    prompt = build_prompt(smollm2_tokenizer, *source_for(DemoOptions()), 2048)
    assert len(prompt.tokens) == 2048
    text = smollm2_tokenizer.decode(prompt.tokens)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert default_document()[:1000] in text
