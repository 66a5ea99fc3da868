"""Tasks whose answers can be checked without a data set: facts are invented and put into prose at known depths.

needle      facts of five kinds in prose that has nothing to do with them, each asked in its own words
questions   five facts of one kind about different people in the same prose, each asked in other words
summary     three documents and the wish for a summary; scored by agreement with the text of the bf16 cache (ROUGE-L)
prose       plain text; scored by what the model pays for the text that follows

The cache of a checked text is that of the document; all questions stand behind it, so one prefill serves ten answers.
A text of a number and a length is always the same: names and numbers come from a seed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.report.corpus import Corpus

__all__ = [
    "ANSWER_TOKENS",
    "CHECKED",
    "DEPTHS",
    "SAMPLES",
    "Question",
    "Task",
    "TaskName",
    "Text",
    "is_right",
    "make_task",
    "make_text",
    "rouge_l",
]

TaskName = Literal["needle", "questions", "summary", "prose"]

CHECKED: tuple[TaskName, ...] = ("needle", "questions")
"""Tasks with an answer that is right or wrong."""

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where in a text a fact to find stands; facts about people stand a tenth of the text before them."""

SAMPLES = 100
"""Different begins in the corpus."""

ANSWER_TOKENS = 10
"""An answer that is not within so many tokens, or not before the end of a line, is wrong."""

_SEED = 7919
_STEP = 5
"""Texts begin so many begins of the corpus apart."""
_MARK = "\x00text\x00"
_NAMES = (
    "Marta", "Tobias", "Ingrid", "Rashid", "Yuki", "Pavel", "Noor", "Callum", "Beatriz", "Anselm",
    "Leilani", "Viktor", "Saoirse", "Emeka", "Priya", "Halvard",
)  # fmt: skip
_KINDS = {
    "secret word": (
        "umbrella", "pineapple", "telescope", "sandcastle", "harmonica", "lantern", "cinnamon", "volcano",
        "marble", "penguin", "saddle", "orchid", "compass", "thunder", "velvet", "anchor",
    ),
    "favourite colour": ("red", "blue", "green", "yellow", "purple", "orange", "brown", "black"),
    "home town": ("Lisbon", "Oslo", "Vienna", "Dublin", "Prague", "Athens", "Geneva", "Warsaw"),
    "favourite fruit": ("apple", "banana", "cherry", "lemon", "mango", "peach", "grape", "melon"),
    "room number": tuple(str(one) for one in range(100, 1000)),
}  # fmt: skip
"""What is to be found, and what it may be."""
_TRADES = ("baker", "pilot", "gardener", "tailor", "librarian", "sailor", "painter", "farmer")
_THINGS = ("stamps", "clocks", "teapots", "bicycles", "violins", "postcards", "lamps", "coins")


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and what follows it.

    Attributes:
        prompt: token ids; the cache is that of all but the last.
        following: text behind the prompt that is scored; empty if the model is to write.
    """

    prompt: tuple[int, ...]
    following: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about a text.

    Attributes:
        task: "needle" or "questions".
        ids: tokens behind those of the text, up to where the model answers.
        answer: the word that must be in the answer.
        depth: of the asked fact in the text.
    """

    task: TaskName
    ids: tuple[int, ...]
    answer: str
    depth: float


@dataclass(frozen=True, slots=True)
class Text:
    """A document with facts in it: `ids` are those of its cache, of exactly the wanted length."""

    ids: tuple[int, ...]
    questions: tuple[Question, ...]


def make_text(tokenizer: Any, corpus: Corpus, number: int, tokens: int) -> Text:
    """Text `number` of `tokens` tokens, with a fact of each kind to find and five to answer questions about."""
    rng = np.random.default_rng([_SEED, number])
    people = [_NAMES[i] for i in rng.permutation(len(_NAMES))[: 2 * len(DEPTHS)]]
    facts: list[tuple[float, str]] = []
    asked: list[tuple[TaskName, str, str, str, float]] = []
    for at, (who, depth) in enumerate(zip(people, DEPTHS, strict=False)):
        kind = list(_KINDS)[(at + number) % len(_KINDS)]  # every kind stands at every depth
        trade, word = (one[rng.integers(len(one))] for one in (_TRADES, _KINDS[kind]))
        lead = f"The {kind} of {who} the {trade} is"
        facts.append((depth, f"{lead} {word}."))
        asked.append(("needle", f"What is the {kind} of {who} the {trade}?", lead, word, depth))
    thing = _THINGS[rng.integers(len(_THINGS))]
    counts = rng.permutation(900)[: len(DEPTHS)] + 100
    for who, count, behind in zip(people[len(DEPTHS) :], counts, DEPTHS, strict=True):
        depth = round(behind - 0.1, 1)
        facts.append((depth, f"{who} owns a collection of {count} old {thing}."))
        asked.append(("questions", f"How many {thing} has {who} collected?", f"{who} has collected", str(count), depth))
    before = _frame(tokenizer, "", "")[0]
    room = tokens - len(before)
    body = _with_facts(
        tokenizer, _enough(corpus.from_start(number * _STEP + number // (SAMPLES // _STEP), SAMPLES), room), facts, room
    )
    questions = tuple(
        Question(task, tuple(_frame(tokenizer, question, lead)[1]), answer, depth)
        for task, question, lead, answer, depth in asked
    )
    return Text((*before, *body), questions)


def make_task(
    tokenizer: Any, corpus: Corpus, name: Literal["summary", "prose"], number: int, tokens: int, steps: int
) -> Task:
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
    documents = "\n\n".join(
        f"Document {at + 1}: " + " ".join(_enough(corpus.from_start(number + at * SAMPLES // 3, SAMPLES), tokens // 3))
        for at in range(3)
    )
    before, after = _frame(tokenizer, "Write a summary of the three documents.", "Summary: The three documents")
    body = _fitted(tokenizer, documents.split("\n\n"), tokens + 1 - len(before) - len(after), tokens)
    return Task((*before, *body, *after))


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
