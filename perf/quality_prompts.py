"""The prompts of perf.quality. They are frozen: figures of two versions can be compared only on the same prompts.

`quality_texts.txt` holds ten short texts of several kinds (a story, minutes, a recipe, a letter, ...) and copies
of five documents of this project as they once were. It is cut into sections; prompt n of 40 begins at the n-th of 40
evenly spaced sections and goes on from there, round the end, until it has its length.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PROMPTS", "QUESTIONS", "chat_prompt", "prompt_set", "prose", "text_from"]

PROMPTS = 40
QUESTIONS = (
    "What is this text about? Explain it in detail.",
    "Which problem does the text describe, and what is done about it?",
    "List the most important points of the text and explain each of them.",
    "What should a reader do first, according to the text, and why?",
    "Explain the main idea of the text to somebody who has never heard of it.",
    "Write a summary of the last part of the text.",
    "Which numbers are given in the text, and what do they mean?",
    "What can go wrong, according to the text, and what happens then?",
    "Who is the text written for? Give your reasons.",
    "Name five facts from the text and say why each of them matters.",
)
_TEXTS = Path(__file__).with_name("quality_texts.txt")
_SECTION_CHARACTERS = 200
_MARK = "\x00text\x00"


def prompt_set() -> str:
    """Name of this set of prompts: changes with any of its texts or questions."""
    return xxhash.xxh3_64(_TEXTS.read_bytes() + "\n".join(QUESTIONS).encode()).hexdigest()[:8]


def text_from(number: int, text: str | None = None) -> str:
    """The whole text, rotated so that it begins where prompt `number` begins.

    Args:
        text: another text to take the place of the frozen one.
    """
    sections = _sections(_TEXTS.read_text("utf-8") if text is None else text)
    start = number % PROMPTS * len(sections) // PROMPTS
    return "\n\n".join([*sections[start:], *sections[:start]])


def chat_prompt(tokenizer: Any, number: int, tokens: int) -> list[int]:
    """Text and question `number` in the chat template, cut at the end of the text to exactly `tokens` tokens."""
    question = QUESTIONS[number % len(QUESTIONS)]
    message = {"role": "user", "content": f"{_MARK}\n\n{question}"}
    rendered = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, after = (_ids(tokenizer, part) for part in rendered.split(_MARK))
    body = _repeat(_ids(tokenizer, text_from(number)), tokens)
    return [*before, *body[: tokens - len(before) - len(after)], *after]


def prose(tokenizer: Any, number: int, tokens: int, text: str | None = None) -> list[int]:
    """The first `tokens` tokens of text `number`, behind the token that begins a text where the model has one."""
    begin: list[int] = tokenizer("")["input_ids"]
    return [*begin, *_repeat(_ids(tokenizer, text_from(number, text)), tokens)][:tokens]


def _repeat(ids: Sequence[int], tokens: int) -> list[int]:
    """At least `tokens` tokens: the text again and again where it is too short."""
    return [*ids] * -(-tokens // len(ids))


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _sections(text: str) -> list[str]:
    """The text cut at empty lines; what is short (a heading) stays with what follows it."""
    sections: list[str] = []
    held = ""
    for part in text.split("\n\n"):
        held += f"{part}\n\n"
        if len(held) > _SECTION_CHARACTERS:
            sections.append(held.strip())
            held = ""
    return [*sections, held.strip()] if held.strip() else sections
