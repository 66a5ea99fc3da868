"""The codecs that every figure compares: what each is, and how it is drawn.

Each is a `Subject` of perf.quality, so that a codec has the same parameters wherever it is measured. All have the
first 4 tokens raw, which helps the ones of others most; tokens that are fine are the default's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lynx_codec import CodecPlan
from lynx_codec.plan import CodecRule
from lynx_net.serdes.fine import FINE_LEAST, FINE_SHARE
from perf.quality_codecs import Subject

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lynx_net import IncomingTransfer

__all__ = ["RAW_HEAD", "SERIES", "SPLIT_BITS", "AnchorOnly", "Series", "codec_plan"]

RAW_HEAD = 4
_DEFAULT: Mapping[str, Any] = {"raw_head": RAW_HEAD, "fine": FINE_LEAST, "fine_share": FINE_SHARE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One codec in all figures.

    Attributes:
        label: as figures call it.
        subject: its codec, parameters and finer tokens.
        stage: the streams that the final text is decoded from: all lossy ones, or the first alone.
        colors: in the light and in the dark scheme.
        marker: of matplotlib; colours are never the only difference.
        hatch: of matplotlib, for bars.
    """

    label: str
    subject: Subject
    stage: Literal["full", "anchor"] = "full"
    colors: tuple[str, str]
    marker: str
    hatch: str


SERIES: Mapping[str, Series] = {
    "bf16": Series(label="bf16", subject=Subject("bf16"), colors=("#5a5a5a", "#b8b8b8"), marker="s", hatch=""),
    "int8": Series(
        label="int8",
        subject=Subject("int8", raw_head=RAW_HEAD),
        colors=("#0060a0", "#5ab4f0"),
        marker="^",
        hatch="//",
    ),
    "int4": Series(
        label="int4",
        subject=Subject("int4", raw_head=RAW_HEAD),
        colors=("#a86b00", "#f0b040"),
        marker="v",
        hatch="\\\\",
    ),
    "cachegen": Series(
        label="CacheGen-style",
        subject=Subject("cachegen", raw_head=RAW_HEAD, layer_params=({"bin": 0.5}, {"bin": 1.0}, {"bin": 1.5})),
        colors=("#a0428a", "#e69ad0"),
        marker="P",
        hatch="..",
    ),
    "lynx": Series(
        label="lynx",
        subject=Subject("lynx", {"alpha": 0.5}, raw_head=RAW_HEAD),
        colors=("#00785a", "#3fd0a4"),
        marker="o",
        hatch="xx",
    ),
    "lynx_anchor": Series(
        label="lynx, anchor only",
        subject=Subject("lynx", {"alpha": 0.5}, raw_head=RAW_HEAD),
        stage="anchor",
        colors=("#4c7a1e", "#a4d65e"),
        marker="X",
        hatch="--",
    ),
    "default": Series(
        label="default codec",
        subject=Subject("nested", {"bits": [4, 4], "chunk": 128}, {"bits": [3, 5]}, **_DEFAULT),
        colors=("#c8401c", "#ff8a66"),
        marker="D",
        hatch="++",
    ),
}
"""In the order of tables and legends."""

SPLIT_BITS: Mapping[str, Subject] = {
    "nested 2 bits": Subject("nested", {"bits": [2, 6], "chunk": 128}, **_DEFAULT),
    "nested 3 bits": Subject("nested", {"bits": [3, 5], "chunk": 128}, **_DEFAULT),
    "nested 4 bits": Subject("nested", {"bits": [4, 4], "chunk": 128}, **_DEFAULT),
    "nested 5 bits": Subject("nested", {"bits": [5, 3], "chunk": 128}, **_DEFAULT),
    "nested 6 bits": Subject("nested", {"bits": [6, 2], "chunk": 128}, **_DEFAULT),
}
"""The default codec's family with anchors of several widths: drafts' survival against bits."""


class AnchorOnly:
    """A transfer of which the decode loop sees the first stream only: it decodes plainly as soon as that is in.

    The others still arrive and are decoded into the cache; how long a token takes does not depend on what it is.
    """

    stream_names = ("anchor",)

    def __init__(self, transfer: IncomingTransfer) -> None:
        self.offer, self.offered_at_s = transfer.offer, transfer.offered_at_s
        self.anchor_ready = self.residual_ready = self.exact_ready = transfer.anchor_ready


def codec_plan(subject: Subject, layers: int) -> CodecPlan:
    """The codecs of a subject as a transfer takes them."""
    rules = [
        CodecRule(subject.codec, _of(subject, kind, layer, layers), layers=[layer], kind=kind)
        for layer in range(layers)
        for kind in ("key", "value")
    ]
    return CodecPlan(subject.codec, dict(rules[0].params), _merged(rules))


def _of(subject: Subject, kind: Literal["key", "value"], layer: int, layers: int) -> dict[str, Any]:
    return subject.codec_of(kind, layer, layers).params()


def _merged(rules: list[CodecRule]) -> list[CodecRule]:
    """Rules with equal parameters in one, so that a plan has as few codecs as it can."""
    merged: dict[str, CodecRule] = {}
    for rule in rules:
        key = f"{rule.kind} {sorted(rule.params.items())}"
        held = merged.get(key)
        layers = [*(held.layers or () if held else ()), *(rule.layers or ())]
        merged[key] = CodecRule(rule.codec, rule.params, layers=layers, kind=rule.kind)
    return list(merged.values())
