"""Tasks whose answers can be checked without a data set: facts are invented and put into prose at known depths.

needle      one fact in prose that has nothing to do with it, asked in its own words
questions   four facts of one kind about different people, one of them asked in other words
summary     three documents and the wish for a summary; scored by agreement with the text of the bf16 cache (ROUGE-L)
prose       plain text; scored by what the model pays for the text that follows

A task of a number and a length is always the same: names and numbers come from a seed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.report.corpus import Corpus

__all__ = ["CHECKED", "DEPTHS", "SAMPLES", "Task", "TaskName", "is_right", "make_task", "rouge_l"]

TaskName = Literal["needle", "questions", "summary", "prose"]

CHECKED: tuple[TaskName, ...] = ("needle", "questions")
"""Tasks with an answer that is right or wrong."""

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where in the text the asked fact stands, in turn."""

SAMPLES = 100
"""Different begins in the corpus."""

ANSWER_TOKENS = 16
"""An answer that is not within so many tokens is wrong."""

_SEED = 7919
_MARK = "\x00text\x00"
_NAMES = (
    "Marta", "Tobias", "Ingrid", "Rashid", "Yuki", "Pavel", "Noor", "Callum", "Beatriz", "Anselm",
    "Leilani", "Viktor", "Saoirse", "Emeka", "Priya", "Halvard",
)  # fmt: skip
_WORDS = (
    "umbrella", "pineapple", "telescope", "sandcastle", "harmonica", "lantern", "cinnamon", "volcano",
    "marble", "penguin", "saddle", "orchid", "compass", "thunder", "velvet", "anchor",
)  # fmt: skip
_TRADES = ("baker", "pilot", "gardener", "tailor", "librarian", "sailor", "painter", "farmer")
_THINGS = ("stamps", "clocks", "teapots", "bicycles", "violins", "postcards", "lamps", "coins")


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and what is right.

    Attributes:
        prompt: token ids; the cache is that of all but the last.
        answer: the word that must be in the answer; None if there is no right or wrong.
        following: text behind the prompt that is scored; empty if the model is to write.
        depth: of the asked fact in the text.
    """

    prompt: tuple[int, ...]
    answer: str | None = None
    following: tuple[int, ...] = ()
    depth: float | None = None


def make_task(tokenizer: Any, corpus: Corpus, name: TaskName, number: int, tokens: int, steps: int) -> Task:
    """Task `number`, for a cache of exactly `tokens` tokens.

    Args:
        tokenizer: with a chat template, which is used then, or without.
        steps: tokens that follow a prompt of prose.
    """
    if name == "prose":
        begin: list[int] = tokenizer("")["input_ids"]
        text = _ids(tokenizer, "\n\n".join(_enough(corpus.from_start(number, SAMPLES), tokens + steps)))
        ids = [*begin, *text]
        return Task(tuple(ids[: tokens + 1]), following=tuple(ids[tokens + 1 : tokens + 1 + steps]))
    if name == "summary":
        documents = "\n\n".join(
            f"Document {at + 1}: "
            + " ".join(_enough(corpus.from_start(number + at * SAMPLES // 3, SAMPLES), tokens // 3))
            for at in range(3)
        )
        before, after = _frame(tokenizer, "Write a summary of the three documents.", "Summary: The three documents")
        body = _fitted(tokenizer, documents.split("\n\n"), tokens + 1 - len(before) - len(after), tokens)
        return Task((*before, *body, *after))
    rng = np.random.default_rng([_SEED, CHECKED.index(name), number])
    facts, question, lead, answer = _facts(name, rng)
    before, after = _frame(tokenizer, question, lead)
    depth = DEPTHS[number % len(DEPTHS)]
    room = tokens + 1 - len(before) - len(after)
    paragraphs = _enough(corpus.from_start(number, SAMPLES), room)
    depths = [depth, *(other for other in DEPTHS if other != depth)][: len(facts)]
    body = _with_facts(tokenizer, paragraphs, list(zip(depths, facts, strict=True)), room)
    return Task((*before, *body, *after), answer, depth=depth)


def _facts(name: TaskName, rng: np.random.Generator) -> tuple[list[str], str, str, str]:
    """Facts (the asked one first), the question, how an answer begins, and the word that it must have."""
    people = [_NAMES[i] for i in rng.permutation(len(_NAMES))[:4]]
    trade = _TRADES[rng.integers(len(_TRADES))]
    if name == "needle":
        word = _WORDS[rng.integers(len(_WORDS))]
        lead = f"The secret word of {people[0]} the {trade} is"
        return [f"{lead} {word}."], f"What is the secret word of {people[0]} the {trade}?", lead, word
    thing = _THINGS[rng.integers(len(_THINGS))]
    numbers = [str(100 + int(one)) for one in rng.permutation(900)[:4]]
    facts = [f"{who} owns a collection of {count} old {thing}." for who, count in zip(people, numbers, strict=True)]
    return facts, f"How many {thing} has {people[0]} collected?", f"{people[0]} has collected", numbers[0]


def is_right(answer: str, text: str) -> bool:
    """Whether the answer stands in the text as a word of its own, upper or lower case."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


def rouge_l(found: Sequence[int], reference: Sequence[int]) -> float:
    """F-measure of the longest common subsequence of two texts (Lin and Och, 2004), here of tokens."""
    if not found or not reference:
        return 0.0
    row = [0] * (len(reference) + 1)
    for one in found:
        diagonal = 0
        for at, other in enumerate(reference, 1):
            diagonal, row[at] = row[at], diagonal + 1 if one == other else max(row[at], row[at - 1])
    common = row[-1]
    return 2 * common / (len(found) + len(reference))


def _frame(tokenizer: Any, question: str, lead: str) -> tuple[list[int], list[int]]:
    """What stands before and behind the text: the chat template, or plain words for a base model."""
    if tokenizer.chat_template:
        message = {"role": "user", "content": f"{_MARK}\n\n{question}"}
        rendered = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True) + lead
        before, after = rendered.split(_MARK)
        return _ids(tokenizer, before), _ids(tokenizer, after)
    begin: list[int] = tokenizer("")["input_ids"]
    return begin, _ids(tokenizer, f"\n\nQuestion: {question}\nAnswer: {lead}")


def _with_facts(tokenizer: Any, paragraphs: Sequence[str], facts: Sequence[tuple[float, str]], room: int) -> list[int]:
    """Sentences of prose in exactly `room` tokens, each fact between two of them, at its depth."""
    told = [(depth, _ids(tokenizer, f" {fact}")) for depth, fact in sorted(facts)]
    left = room - sum(len(ids) for _, ids in told)
    prose: list[int] = []
    waiting = list(told)
    body: list[int] = []
    for sentence in _sentences(paragraphs):
        while waiting and len(prose) >= waiting[0][0] * left:
            body += waiting.pop(0)[1]
        ids = _ids(tokenizer, sentence)[: left - len(prose)]
        prose += ids
        body += ids
        if len(prose) == left:
            break
    for _, ids in waiting:  # behind a long last sentence
        body += ids
    if len(body) != room:
        raise ValueError(f"the prose is too short for a text of {room} tokens: {len(body)}")
    return body


def _fitted(tokenizer: Any, parts: Sequence[str], room: int, tokens: int) -> list[int]:
    """Documents in exactly `room` tokens: each cut to its share."""
    share = room // len(parts)
    pieces = [_ids(tokenizer, f"{part}\n\n")[:share] for part in parts]
    pieces[0] += _ids(tokenizer, parts[0])[share : share + room - sum(map(len, pieces))]
    body = [one for piece in pieces for one in piece]
    if len(body) != room:
        raise ValueError(f"the documents are too short for a text of {tokens} tokens: {len(body)} of {room}")
    return body


def _enough(paragraphs: Sequence[str], tokens: int) -> list[str]:
    """Paragraphs from the start with eight characters a token, more than prose has; again and again if few."""
    taken: list[str] = []
    characters = 0
    while characters < 8 * tokens + 64:
        for one in paragraphs:
            taken.append(one)
            characters += len(one)
            if characters >= 8 * tokens + 64:
                break
    return taken


def _sentences(paragraphs: Sequence[str]) -> list[str]:
    """Sentences, each with the space or the empty line before it."""
    found = []
    for paragraph in paragraphs:
        first, *others = re.split(r"(?<=[.!?:;]) ", paragraph)
        found += [f"\n\n{first}", *(f" {other}" for other in others)]
    return found


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
