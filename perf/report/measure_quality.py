"""What every codec does to answers, texts, drafts, attention and perplexity, on real caches of both models.

One prompt is prefilled once and coded by every codec; the tools are those of perf.quality. A cell is one prompt and one
codec. Text is decoded greedily on the cache as the codec leaves it; tokens that end an answer are never chosen.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_net.integrations.transformers import layout_of
from perf.quality_capture import STEPS, Greedy, capture, fill, widen
from perf.quality_codecs import BITS_TOKENS, bits, code
from perf.quality_measure import Attention, drafts, errors
from perf.report.series import SERIES, SPLIT_BITS
from perf.report.tasks import ANSWER_TOKENS, CHECKED, is_right, make_task, rouge_l

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lynx_net.wire.layout import CacheLayout
    from perf.quality_capture import Capture
    from perf.quality_codecs import Coded, Subject
    from perf.report.cells import Cells
    from perf.report.corpus import Corpus
    from perf.report.scope import Progress, Scope
    from perf.report.tasks import TaskName

__all__ = ["distribution", "measure_model"]

SOURCES = (
    "codec/lynx_codec",
    "lynx_net/integrations",
    "lynx_net/serdes/fine.py",
    "perf/quality_capture.py",
    "perf/quality_codecs.py",
    "perf/quality_measure.py",
    "perf/quality_texts.txt",
    "perf/report/corpus.py",
    "perf/report/tasks.py",
    "perf/report/measure_quality.py",
)
"""What a cell depends on."""

GRID = 41
"""Points of the distribution, from -1 to 1."""


class Prompt:
    """A task on a model: prefilled when something has to be measured on it, not before."""

    def __init__(self, loaded: Any, corpus: Corpus, name: TaskName, number: int, tokens: int) -> None:
        self.loaded, self.name, self.tokens = loaded, name, tokens
        self.steps = ANSWER_TOKENS if name in CHECKED else STEPS
        self.task = make_task(loaded.tokenizer, corpus, name, number, tokens, STEPS)
        self.layout: CacheLayout = layout_of(loaded.model.config, tokens, dtype="bfloat16")
        self._captured: Capture | None = None
        self._attention: Attention | None = None
        self._greedy: Greedy | None = None

    @property
    def captured(self) -> Capture:
        """The cache, and what follows on it."""
        if self._captured is None:
            kind = "prose" if self.task.following else "chat"
            ids = [*self.task.prompt, *self.task.following]
            self._captured = capture(self.loaded.model, ids, self.tokens, kind, self.steps)
        return self._captured

    @property
    def attention(self) -> Attention:
        """What reads the cache."""
        if self._attention is None:
            self._attention = Attention(self.loaded.model, self.captured)
        return self._attention

    @property
    def greedy(self) -> Greedy:
        """The model on a cache that can be exchanged."""
        if self._greedy is None:
            self._greedy = Greedy(self.loaded.model, self.tokens)
        return self._greedy

    def score(self, cache: tuple[Any, Any], target: list[int] | None = None) -> float:
        """The score of the task on a cache; `target`: the text on it, if it is known."""
        captured, greedy = self.captured, self.greedy
        following = [int(token) for token in captured.following]
        fill(greedy.cache, *cache)
        if self.name == "prose":
            return float(np.mean(greedy.losses(captured.last, following)))
        written = greedy.target(captured.last, following) if target is None else target
        if self.task.answer is None:
            return rouge_l(written, following)
        return float(is_right(self.task.answer, self.loaded.tokenizer.decode(written)))


def measure_model(
    loaded: Any, name: str, corpus: Corpus, scope: Scope, cells: Cells, progress: Progress
) -> dict[str, list[dict[str, Any]]]:
    """All records of one model: `answers`, `drafts`, `attention` and `distribution` of the raw results."""
    records: dict[str, list[dict[str, Any]]] = {"answers": [], "drafts": [], "attention": [], "distribution": []}
    plan: list[tuple[TaskName, int, int]] = [
        *(("summary", scope.text_tokens, number) for number in range(scope.texts)),
        *(("prose", scope.text_tokens, number) for number in range(scope.texts)),
        *(
            (task, tokens, number)
            for task in CHECKED
            for tokens in scope.answer_tokens
            for number in range(scope.answers)
        ),
    ]
    for at, (task, tokens, number) in enumerate(plan, 1):
        prompt = Prompt(loaded, corpus, task, number, tokens)
        key = {"model": name, "task": task, "tokens": tokens, "prompt": list(prompt.task.prompt)}
        where = {"model": name, "task": task, "tokens": tokens, "number": number, "depth": prompt.task.depth}
        for one in dict.fromkeys(series.subject.codec for series in SERIES.values()):
            held = {label: series for label, series in SERIES.items() if series.subject.codec == one}
            subject = next(iter(held.values())).subject
            found = cells.get({**key, "subject": _spelled(subject)}, lambda p=prompt, s=subject: _coded(p, s))
            for label, series in held.items():
                _sort_in(records, where, label, found, series.stage)
        if task == "summary":
            for label, subject in SPLIT_BITS.items():
                found = cells.get({**key, "subject": _spelled(subject)}, lambda p=prompt, s=subject: _drafted(p, s))
                records["drafts"].append({**_brief(where), "series": label, **found})
            if number < scope.curves:
                curves = cells.get({**key, "what": "distribution"}, lambda p=prompt: distribution(p.captured))
                records["distribution"] += [{**_brief(where), **curve} for curve in curves]
        if at % 5 == 0 or at == len(plan):
            progress.tell(
                f"{name}: quality, prompt {at} of {len(plan)} ({cells.made} cells measured, {cells.reused} kept)"
            )
    return records


def _sort_in(
    records: dict[str, list[dict[str, Any]]], where: Mapping[str, Any], label: str, found: Any, stage: str
) -> None:
    """Bring what was measured of one codec to where the figures look for it."""
    records["answers"].append({**where, "series": label, "score": found[stage]["score"]})
    if "vnmse" in found[stage] and label != "bf16":
        records["attention"].append({**_brief(where), "series": label, "vnmse": found[stage]["vnmse"]})
    if "accepted" in found and label not in ("lynx_anchor", "bf16"):
        records["drafts"].append(
            {**_brief(where), "series": label, "accepted": found["accepted"], "bits_anchor": found["bits_anchor"]}
        )


def _brief(where: Mapping[str, Any]) -> dict[str, Any]:
    return {name: where[name] for name in ("model", "number")}


def _spelled(subject: Subject) -> dict[str, Any]:
    """A subject as plain JSON values."""
    return {name: _plain(value) for name, value in dataclasses.asdict(subject).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _coded(prompt: Prompt, subject: Subject) -> dict[str, Any]:
    """Everything about one prompt and one codec: scores after the last lossy stream and after the first."""
    captured = prompt.captured
    coded = code(subject, captured, prompt.layout)
    result: dict[str, Any] = {"full": {}, "anchor": {}}
    target: list[int] | None = None
    if prompt.name == "summary":
        counted = drafts(prompt.greedy, captured, coded)
        result |= {"accepted": counted.accepted, "bits_anchor": _bits_anchor(prompt, subject, coded)}
        target = None if coded.single else list(counted.target)
        found = errors(prompt.attention, coded)
        for stage in ("full", "anchor"):
            result[stage]["vnmse"] = found[f"attn_err_paper_{stage}"]
    result["full"]["score"] = prompt.score(coded.full, target)
    result["anchor"]["score"] = result["full"]["score"] if coded.single else prompt.score(coded.anchor)
    return result


def _drafted(prompt: Prompt, subject: Subject) -> dict[str, Any]:
    """How many drafts stand, for a codec that is not in the other figures."""
    coded = code(subject, prompt.captured, prompt.layout)
    counted = drafts(prompt.greedy, prompt.captured, coded)
    return {"accepted": counted.accepted, "bits_anchor": _bits_anchor(prompt, subject, coded)}


def _bits_anchor(prompt: Prompt, subject: Subject, coded: Coded) -> float:
    ends = layout_of(prompt.loaded.model.config, BITS_TOKENS, dtype="bfloat16")
    return bits(subject, ends, [coded.stream_bytes], prompt.layout)["bits_anchor"]


def distribution(captured: Capture) -> list[dict[str, Any]]:
    """Figure 5: share of the values below points from -1 to 1, each channel of each layer scaled to its own range."""
    grid = np.linspace(-1, 1, GRID)
    curves = []
    for kind, stored in (("key", captured.keys), ("value", captured.values)):
        data = widen(stored)
        low, high = data.min(axis=1, keepdims=True), data.max(axis=1, keepdims=True)
        moving = high > low  # a channel that never moves has no range
        scaled = np.where(moving, 2 * (data - low) / np.where(moving, high - low, 1) - 1, np.nan)
        flat = np.sort(scaled[np.isfinite(scaled)])
        below = np.searchsorted(flat, grid, side="right") / len(flat)
        quarter, rest = flat[len(flat) // 4], flat[3 * len(flat) // 4]
        curves.append(
            {"kind": kind, "at": grid.tolist(), "share_below": below.tolist(), "middle_half": float(rest - quarter) / 2}
        )
    return curves
