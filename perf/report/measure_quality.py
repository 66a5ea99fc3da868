"""What every codec does to answers, texts, drafts, attention and perplexity, on real caches of both models.

A text is prefilled once, its cache coded by every codec, and all decoded caches go through the model as rows of one
batch (`batched`): ten questions about a document at once, or 64 tokens of a summary step by step. A cell is one text
and one codec. Text is decoded greedily on the cache as the codec leaves it; tokens that end an answer are never chosen.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from lynx_net.integrations.scores import SCORE_QUERIES
from lynx_net.integrations.transformers import layout_of, prefill
from lynx_net.wire.layout import CacheLayout
from perf.quality_capture import STEPS, Capture, bfloat16_bits, matching, widen
from perf.quality_codecs import BITS_TOKENS, bits, code
from perf.quality_measure import Attention
from perf.report.batched import batched
from perf.report.series import SERIES, SPLIT_BITS
from perf.report.tasks import ANSWER_TOKENS, is_right, rouge_l

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from perf.quality_codecs import Coded, Subject
    from perf.report.batched import Batched
    from perf.report.tasks import Question, Text

    Pair = tuple[NDArray[np.float32], NDArray[np.float32]]
    Stage = tuple[str, str]

__all__ = [
    "SOURCES",
    "SUBJECTS",
    "Codings",
    "distribution",
    "measure_prose",
    "measure_summary",
    "measure_text",
    "read_summary",
    "subject_digest",
]

SOURCES = (
    "lynx_net/integrations/scores.py",
    "lynx_net/integrations/transformers.py:prefill",
    "perf/quality_capture.py",
    "perf/quality_codecs.py:Subject",
    "perf/quality_codecs.py:code",
    "perf/quality_measure.py:Attention",
    "perf/report/batched.py",
    "perf/report/tasks.py",
    "perf/report/measure_quality.py",
)
"""What a figure depends on, beside the codec, which is known by what it makes of a probe (`subject_digest`)."""

SUBJECTS: Mapping[str, Subject] = {
    **{name: one.subject for name, one in SERIES.items() if name != "lynx_anchor"},
    **SPLIT_BITS,
}
"""All codecs; the anchors of `lynx` alone are a stage of it."""

_PROBE = CacheLayout(layers=3, tokens=600, heads=2, key_size=64, value_size=64, dtype="bfloat16")

GRID = 41
"""Points of the distribution, from -1 to 1."""

_EXACT = ("exact", "")

Found = dict[str, dict[str, Any]]
"""Codec -> what was measured, as plain JSON values."""


def subject_digest(subject: Subject) -> str:
    """Of everything that a codec makes of a small cache from a seed: changes only if the codec changes what it does.

    Keys and values with outliers, several layers and pages, raw, fine and other tokens: the sizes of all streams and
    the values after each.
    """
    layout = _PROBE
    rng = np.random.default_rng(7)
    keys, values = (
        (rng.standard_t(4, (layout.layers, layout.tokens, layout.heads, layout.key_size)) * [0.5, 3.0][at])
        .astype(np.float32)
        .view(np.uint32)
        >> 16
        for at in range(2)
    )
    nothing = np.zeros(0, np.float32)
    probe = Capture(
        keys.astype(np.uint16), values.astype(np.uint16), 0, np.zeros(0, np.int64), nothing, nothing, nothing,
        rng.random((layout.layers, layout.tokens)).astype(np.float32),
    )  # fmt: skip
    coded = code(subject, probe, layout)
    digest = xxhash.xxh3_64(repr((subject, coded.stream_bytes, coded.exact_ok)).encode())
    for array in (*coded.anchor, *coded.full):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


class Codings:
    """A prefilled text, coded by some codecs.

    Attributes:
        keys, values: bits of bfloat16, [layers, tokens, heads, size].
        coded: by codec.
    """

    def __init__(self, loaded: Any, ids: Sequence[int], names: Sequence[str]) -> None:
        layout = layout_of(loaded.model.config, len(ids), dtype="bfloat16")
        made = prefill(loaded.model, ids, score_queries=SCORE_QUERIES)
        assert made.scores is not None
        self.layout, self.scores = layout, made.scores
        self.keys, self.values = (np.stack([bfloat16_bits(one) for one in part]) for part in (made.keys, made.values))
        self.exact = (widen(self.keys), widen(self.values))
        nothing = np.zeros(0, np.float32)
        bare = Capture(self.keys, self.values, 0, np.zeros(0, np.int64), nothing, nothing, nothing, made.scores)
        self.coded: dict[str, Coded] = {name: code(SUBJECTS[name], bare, layout) for name in names}


def measure_text(loaded: Any, text: Text, names: Sequence[str]) -> Found:
    """For each codec `full` and, for `lynx`, `anchor`: whether each question about a text was answered rightly."""
    made = Codings(loaded, text.ids, names)
    caches, rows = _distinct(_stages(made.coded))
    room = sum(len(one.ids) + ANSWER_TOKENS for one in text.questions)
    with _filled(loaded, made.layout, caches, room) as batch:
        written = _answers(batch, loaded.tokenizer, text.questions)
    found: Found = {name: {} for name in names}
    for (name, stage), row in rows.items():
        found[name][stage] = [
            float(is_right(question.answer, answer.partition("\n")[0]))
            for question, answer in zip(text.questions, written[row], strict=True)
        ]
    return found


def _answers(batch: Batched, tokenizer: Any, questions: Sequence[Question]) -> list[list[str]]:
    """What each row writes behind each question: `ANSWER_TOKENS` tokens, fewer once all answers have ended a line."""
    tokens, many = batch.tokens, range(len(questions))
    fed = [token for one in questions for token in one.ids]
    branches = [at for at, one in enumerate(questions) for _ in one.ids]
    positions = [tokens + place for one in questions for place in range(len(one.ids))]
    last = np.cumsum([len(one.ids) for one in questions]) - 1
    chosen = batch.choose(batch.forward([fed] * batch.rows, branches, positions)[:, last])
    written = [[[token] for token in row] for row in chosen]
    for step in range(ANSWER_TOKENS - 1):
        texts = [[tokenizer.decode(one).lstrip() for one in row] for row in written]
        if all("\n" in one for row in texts for one in row):
            break
        chosen = batch.choose(batch.forward(chosen, many, [tokens + len(one.ids) + step for one in questions]))
        for row, more in zip(written, chosen, strict=True):
            for one, token in zip(row, more, strict=True):
                one.append(token)
    return [[tokenizer.decode(one).lstrip() for one in row] for row in written]


def measure_prose(loaded: Any, ids: Sequence[int], following: Sequence[int], names: Sequence[str]) -> Found:
    """For each codec `full` and, for `lynx`, `anchor`: mean nats a token that follows a text; `ids`: with the token
    that is not in the cache.
    """
    made = Codings(loaded, ids[:-1], names)
    caches, rows = _distinct(_stages(made.coded))
    with _filled(loaded, made.layout, caches, len(following)) as batch:
        paid = batch.losses(_forced(batch, [[ids[-1], *following[:-1]]] * batch.rows), following)
    found: Found = {name: {} for name in names}
    for (name, stage), row in rows.items():
        found[name][stage] = float(np.mean(paid[row]))
    return found


def measure_summary(loaded: Any, ids: Sequence[int], names: Sequence[str]) -> Found:
    """For each codec: agreement of its summary with that of the exact cache, accepted drafts, errors, bits.

    All codecs write 64 tokens side by side. Drafts are the same as the text up to the first that is not, and up to
    there one pass over the text on the anchors computes just what drafting computes. A codec of one stream is its own
    Q_full, which would accept everything; its drafts are held against the exact text instead.
    """
    made = Codings(loaded, ids[:-1], names)
    caches, rows = _distinct({_EXACT: made.exact, **_stages(made.coded)})
    written, captured = _summaries(loaded, made, ids[-1], caches)
    exact = written[rows[_EXACT]]
    full = {name: written[rows[name, "full"]] for name in names}
    accepted = {name: matching(full[name], exact) for name in names}
    if two := [name for name in names if not made.coded[name].single]:
        with _filled(loaded, made.layout, [made.coded[name].anchor for name in two], STEPS) as batch:
            hidden = _forced(batch, [[ids[-1], *full[name][:-1]] for name in two])
            for name, chosen in zip(two, batch.choose(hidden), strict=True):
                accepted[name] = matching(chosen, full[name])
    attention = Attention(loaded.model, captured)
    errors = [attention.errors(cache)["attn_err_paper"] for cache in caches]
    found: Found = {
        name: {"accepted": accepted[name], "bits_anchor": _bits_anchor(loaded, name, made)} for name in names
    }
    for (name, stage), row in rows.items():
        if (name, stage) != _EXACT:
            found[name][stage] = {"score": rouge_l(written[row], exact), "vnmse": errors[row]}
    return found


def read_summary(loaded: Any, ids: Sequence[int]) -> tuple[CacheLayout, Capture]:
    """The exact cache of a summary and what reads it, for errors of codecs that are not in `SUBJECTS`."""
    made = Codings(loaded, ids[:-1], ())
    return made.layout, _summaries(loaded, made, ids[-1], [made.exact])[1]


def _summaries(loaded: Any, made: Codings, last: int, caches: Sequence[Pair]) -> tuple[list[list[int]], Capture]:
    """The text on each cache, the first of which is the exact one, and what reads that."""
    written: list[list[int]] = [[] for _ in caches]
    queries = []
    with _filled(loaded, made.layout, caches, STEPS) as batch:
        fed = [[last]] * batch.rows
        for step in range(STEPS):
            fed = batch.choose(batch.forward(fed, [0], [batch.tokens + step]))
            queries.append([query.numpy() for query in batch.queries])
            for text, chosen in zip(written, fed, strict=True):
                text += chosen
        new = batch.behind(0)
    read = np.stack([np.concatenate(layer, axis=1) for layer in zip(*queries, strict=True)])
    captured = Capture(made.keys, made.values, last, np.array(written[0]), read, *new, made.scores)
    return written, captured


@contextlib.contextmanager
def _filled(loaded: Any, layout: CacheLayout, caches: Sequence[Pair], room: int) -> Iterator[Batched]:
    with batched(loaded.model, layout, len(caches), room) as batch:
        for row, cache in enumerate(caches):
            batch.fill(row, *cache)
        yield batch


def _distinct(caches: Mapping[Stage, Pair]) -> tuple[list[Pair], dict[Stage, int]]:
    """Caches without repetition, and which of them each is: nested codecs of all widths have the same Q_full."""
    places: dict[str, int] = {}
    found: list[Pair] = []
    rows = {}
    for stage, cache in caches.items():
        digest = xxhash.xxh3_128()
        for array in cache:
            digest.update(np.ascontiguousarray(array).data)
        rows[stage] = places.setdefault(digest.hexdigest(), len(found))
        if rows[stage] == len(found):
            found.append(cache)
    return found, rows


def _stages(coded: Mapping[str, Coded]) -> dict[Stage, Pair]:
    """The caches that something is decoded from: after all lossy streams, and for `lynx` after the first."""
    found = {(name, "full"): one.full for name, one in coded.items()}
    return found | {(name, "anchor"): one.anchor for name, one in coded.items() if name == "lynx"}


def _forced(batch: Batched, fed: Sequence[Sequence[int]]) -> Any:
    """One pass over known texts, one a row."""
    count = len(fed[0])
    return batch.forward(fed, [0] * count, range(batch.tokens, batch.tokens + count))


def _bits_anchor(loaded: Any, name: str, made: Codings) -> float:
    ends = layout_of(loaded.model.config, BITS_TOKENS, dtype="bfloat16")
    return bits(SUBJECTS[name], ends, [made.coded[name].stream_bytes], made.layout)["bits_anchor"]


def distribution(captured: Capture | Codings) -> list[dict[str, Any]]:
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
