"""Which texts the quality figures are made of, what is still to be measured of them, and what that will take."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from perf.report.series import SERIES
from perf.report.tasks import DEPTHS, make_task, make_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perf.report.cells import Cells
    from perf.report.corpus import Corpus
    from perf.report.scope import Progress, Scope
    from perf.report.tasks import Task, Text

__all__ = ["FIELDS", "Group", "groups", "measure_model"]

FIELDS = ("answers", "drafts", "attention", "distribution")
"""Of the raw results."""

Kind = Literal["text", "prose", "summary"]

_SECONDS = {"text": (1.5, 0.012), "prose": (1.0, 0.005), "summary": (7.0, 0.012)}
"""What one of each took on one idle core of the machine of docs/results, before anything is known of this one: seconds,
and more for each token of the cache.
"""


_TELL_S = 15.0


@dataclass(frozen=True, slots=True)
class Group:
    """Texts of one kind and length: `count` of them are measured with each codec."""

    kind: Kind
    tokens: int
    count: int


def groups(scope: Scope) -> list[Group]:
    """All texts of one model, the quickest first."""
    asked = -(-scope.answers // len(DEPTHS))
    return [
        *(Group("text", tokens, asked) for tokens in scope.answer_tokens),
        Group("prose", scope.text_tokens, scope.texts),
        Group("summary", scope.text_tokens, scope.texts),
    ]


class _Remaining:
    """How long the rest will take: by what texts of the same group took, here or when they were measured."""

    def __init__(self, wanted: Sequence[Group]) -> None:
        self._left = {one: one.count for one in wanted}
        self._took: dict[Group, list[float]] = {one: [] for one in wanted}

    def passed(self, group: Group, took_s: float | None, *, held: bool) -> None:
        """A text is done; held ones count for the estimate only."""
        self._left[group] -= 1
        if took_s is not None and (not held or not self._took[group]):
            self._took[group].append(took_s)

    def of_s(self, group: Group) -> float:
        """Seconds of a text."""
        if took := self._took[group]:
            return sum(took[-5:]) / len(took[-5:])
        begin_s, token_s = _SECONDS[group.kind]
        return begin_s + token_s * group.tokens

    @property
    def seconds(self) -> float:
        """Of all that is left."""
        return sum(self.of_s(group) * left for group, left in self._left.items())


def measure_model(
    load: Any, name: str, corpus: Corpus, scope: Scope, cells: Cells, progress: Progress
) -> dict[str, list[dict[str, Any]]]:
    """All records of one model, by `FIELDS`.

    Args:
        load: gives the model and its tokenizer; called once.
    """
    from perf.report import measure_quality

    loaded = load()
    digests = {label: measure_quality.subject_digest(one) for label, one in measure_quality.SUBJECTS.items()}
    wanted = groups(scope)
    remaining = _Remaining(wanted)
    records: dict[str, list[dict[str, Any]]] = {field: [] for field in FIELDS}
    plan: list[tuple[Group, int, Text | Task, dict[str, dict[str, Any]]]] = []
    missing = {group: 0 for group in wanted}
    for group in wanted:
        for number in range(group.count):
            text = _text(loaded.tokenizer, corpus, group, number)
            keys = _keys(name, group, text, digests)
            plan.append((group, number, text, keys))
            missing[group] += not all(cells.has(key) for key in keys.values())
    for group in wanted:
        about_s = remaining.of_s(group) * missing[group]
        progress.tell(
            f"{name}: {group.kind} of {group.tokens} tokens: {missing[group]} of {group.count} to measure"
            + (f", about {about_s / 60:.0f} min of a core" if missing[group] else "")
        )
    told_s = time.monotonic()
    for group, number, text, keys in plan:
        found = {label: cells.held(key) for label, key in keys.items()}
        todo = [label for label, value in found.items() if value is None]
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        if todo:
            made = _measured(loaded, group, text, todo)
            cpu_s = time.process_time() - began_cpu_s
            for label, value in made.items():
                found[label] = {"found": value, "cpu_s": cpu_s}
                cells.put(keys[label], found[label])
        took_s = time.monotonic() - began_s if len(todo) == len(keys) else found[next(iter(found))]["cpu_s"]
        remaining.passed(group, took_s, held=not todo)
        _sort_in(records, name, group, number, text, {label: one["found"] for label, one in found.items()})
        if group.kind == "summary" and number < scope.curves:
            key = {"what": "distribution", "model": name, "tokens": group.tokens, "text": _digest(text)}
            curves = cells.get(key, lambda t=text: _curves(loaded, t))
            records["distribution"] += [{"model": name, "number": number, **curve} for curve in curves]
        if time.monotonic() - told_s > _TELL_S or (number + 1 == group.count and todo):
            told_s = time.monotonic()
            progress.tell(
                f"{name}: {group.kind} of {group.tokens} tokens, {number + 1} of {group.count}; "
                f"about {remaining.seconds / 60:.0f} min left for {name}"
            )
    return records


def _text(tokenizer: Any, corpus: Corpus, group: Group, number: int) -> Text | Task:
    from perf.quality_capture import STEPS

    if group.kind == "text":
        return make_text(tokenizer, corpus, number, group.tokens)
    return make_task(tokenizer, corpus, group.kind, number, group.tokens, STEPS)


def _keys(name: str, group: Group, text: Text | Task, digests: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The cells of a text, by codec; drafts of the anchors of other widths are counted on summaries."""
    key = {"what": group.kind, "model": name, "tokens": group.tokens, "text": _digest(text)}
    return {
        label: {**key, "codec": digest}
        for label, digest in digests.items()
        if group.kind == "summary" or label in SERIES
    }


def _digest(text: Text | Task) -> str:
    return xxhash.xxh3_64(repr(dataclasses.astuple(text)).encode()).hexdigest()


def _measured(loaded: Any, group: Group, text: Any, labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    from perf.report.measure_quality import measure_prose, measure_summary, measure_text

    match group.kind:
        case "text":
            return measure_text(loaded, text, labels)
        case "prose":
            return measure_prose(loaded, text.prompt, text.following, labels)
        case "summary":
            return measure_summary(loaded, text.prompt, labels)


def _curves(loaded: Any, text: Any) -> list[dict[str, Any]]:
    from perf.report.measure_quality import Codings, distribution

    return distribution(Codings(loaded, text.prompt[:-1], ()))


def _sort_in(
    records: dict[str, list[dict[str, Any]]],
    name: str,
    group: Group,
    number: int,
    text: Any,
    found: Mapping[str, dict[str, Any]],
) -> None:
    """Bring what was measured of one text to where the figures look for it."""
    where = {"model": name, "tokens": group.tokens, "text": number}
    brief = {"model": name, "number": number}
    shown = {label: (label, "full") for label in SERIES} | {"lynx_anchor": ("lynx", "anchor")}
    for label, (subject, stage) in shown.items():
        value = found[subject][stage]
        if group.kind == "text":
            for at, (question, score) in enumerate(zip(text.questions, value, strict=True)):
                here = {"task": question.task, "number": number * len(text.questions) + at, "depth": question.depth}
                records["answers"].append({**where, **here, "series": label, "score": score})
            continue
        score = value["score"] if group.kind == "summary" else value
        records["answers"].append({**where, "task": group.kind, "number": number, "series": label, "score": score})
        if group.kind == "summary" and label != "bf16":
            records["attention"].append({**brief, "series": label, "vnmse": value["vnmse"]})
    if group.kind == "summary":
        records["drafts"] += [
            {**brief, "series": label, "accepted": one["accepted"], "bits_anchor": one["bits_anchor"]}
            for label, one in found.items()
            if label != "bf16"
        ]
