"""Which codec each layer's keys and values have, in one transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lynx_codec.composite import PlacedCodec, join_streams
from lynx_codec.errors import CodecError
from lynx_codec.registry import CodecBuilder

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from lynx_codec.base import Codec, PageShape

__all__ = ["PLAN", "CodecPlan", "CodecRule", "CodecTable"]

PLAN = "plan"
"""What stands in place of a codec's name where every layer and kind has its own."""

MAX_CODECS = 8192
"""Codecs of a plan: the keys and the values of as many layers as a cache may have."""


@dataclass(frozen=True, slots=True)
class CodecRule:
    """A codec for some layers, or for keys or values alone.

    Attributes:
        codec, params: as for `get_codec`.
        layers: numbers of the layers; negative ones count from the last layer. None: all.
        kind: "key" or "value". None: both.
    """

    codec: str
    params: Mapping[str, Any] = field(default_factory=dict)
    layers: Collection[int] | None = None
    kind: Literal["key", "value"] | None = None


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """A codec for every layer and kind: that of the first rule that speaks of it, else the default.

    Streams travel side by side: the first of all codecs are the anchors of the transfer, the second ones its first
    residual, and so on. A codec with fewer streams has said everything earlier; an exact stream comes last.

    Attributes:
        codec, params: the default, as for `get_codec`.
        rules: exceptions, the most important first.
    """

    codec: str
    params: Mapping[str, Any] = field(default_factory=dict)
    rules: Sequence[CodecRule] = ()

    def table(self, layers: int, kinds: Sequence[str] = ("key", "value")) -> CodecTable:
        """The codecs of a cache with so many layers.

        Raises:
            CodecError: a rule names a layer that the cache has not, or a codec cannot be made.
        """
        for rule in self.rules:
            outside = [layer for layer in rule.layers or () if not -layers <= layer < layers]
            if outside:
                raise CodecError(
                    f"a rule for codec {rule.codec} names layer {outside[0]} of a cache with {layers} layers"
                )
            if rule.kind not in (None, "key", "value"):
                raise CodecError(f"a rule for codec {rule.codec} is for {rule.kind!r}, not for keys or values")
        builder = CodecBuilder()
        numbers: dict[int, int] = {}
        codecs: list[Codec] = []

        def number_of(layer: int, kind: str) -> int:
            chosen: CodecPlan | CodecRule = next(
                (rule for rule in self.rules if _speaks_of(rule, layer, layers, kind)), self
            )
            if id(chosen) not in numbers:
                numbers[id(chosen)] = len(codecs)
                codecs.append(builder.build(chosen.codec, chosen.params))
            return numbers[id(chosen)]

        return CodecTable(codecs, {kind: [number_of(layer, kind) for layer in range(layers)] for kind in kinds})


DEFAULT_PLAN = CodecPlan(
    "nested", {"bits": [4, 4], "chunk": 128}, [CodecRule("nested", {"bits": [3, 5], "chunk": 128}, kind="value")]
)
"""What a transfer uses if nothing else is asked for: drafts need keys more than values (docs/codec-study.md)."""


def _speaks_of(rule: CodecRule, layer: int, layers: int, kind: str) -> bool:
    return rule.kind in (None, kind) and (rule.layers is None or layer in rule.layers or layer - layers in rule.layers)


class CodecTable:
    """The codec of each layer and kind of one cache.

    Args:
        codecs: the different ones.
        choices: kind to the number of the codec of each layer.
    """

    def __init__(self, codecs: Sequence[Codec], choices: Mapping[str, Sequence[int]]) -> None:
        self.codecs = tuple(codecs)
        self._choices = {kind: list(numbers) for kind, numbers in choices.items()}
        self.stream_names, self._places = join_streams(codecs) if codecs else (("anchor",), [])
        self._placed = [
            codec if len(place) == len(self.stream_names) else PlacedCodec(codec, self.stream_names, place)
            for codec, place in zip(codecs, self._places, strict=True)
        ]

    @classmethod
    def uniform(cls, codec: Codec, layers: int, kinds: Sequence[str]) -> CodecTable:
        """The same codec everywhere."""
        return cls([codec], {kind: [0] * layers for kind in kinds})

    @classmethod
    def from_params(cls, params: Mapping[str, Any], layers: int, kinds: Sequence[str]) -> CodecTable:
        """What `params` of another table describes; for bytes of a peer.

        Raises:
            CodecError: it is not a table for this cache, or a codec cannot be made.
        """
        if set(params) != {"codecs", "params", *kinds}:
            raise CodecError(
                f"a plan for {' and '.join(kinds) or 'nothing'} with the fields {sorted(map(str, params))}"
            )
        names, of_codecs = params["codecs"], params["params"]
        if not isinstance(names, list) or not isinstance(of_codecs, list) or len(names) != len(of_codecs):
            raise CodecError("a plan needs a list of codecs and one of as many parameters")
        if len(names) > MAX_CODECS:
            raise CodecError(f"a plan of {len(names)} codecs, more than {MAX_CODECS}")
        for kind in kinds:
            numbers = params[kind]
            if not isinstance(numbers, list) or len(numbers) != layers:
                raise CodecError(f"a plan that does not give each of {layers} layers a codec for its {kind}s")
            if not all(type(number) is int and 0 <= number < len(names) for number in numbers):
                raise CodecError(f"a plan whose {kind}s have a codec that is not among its {len(names)}")
        builder = CodecBuilder()
        codecs = [builder.build(name, own) for name, own in zip(names, of_codecs, strict=True)]
        return cls(codecs, {kind: params[kind] for kind in kinds})

    def check(self, shapes: Mapping[str, PageShape]) -> None:
        """Raise CodecError if a codec cannot have pages like that of its kind, in whatever layer."""
        for kind, numbers in self._choices.items():
            for number in set(numbers):
                self.codecs[number].stream_bytes(shapes[kind])

    def params(self) -> dict[str, Any]:
        """Plain values from which a peer makes the same table."""
        return {
            "codecs": [codec.name for codec in self.codecs],
            "params": [codec.params() for codec in self.codecs],
            **{kind: list(numbers) for kind, numbers in self._choices.items()},
        }

    def own(self, layer: int, kind: str) -> Codec:
        """The codec of a layer's keys or values, with its own streams: what `PackedCache.encode` takes."""
        return self.codecs[self._choices[kind][layer]]

    def codec(self, layer: int, kind: str) -> Codec:
        """The same with the streams of the transfer, of which it may leave some empty."""
        return self._placed[self._choices[kind][layer]]

    def places(self, layer: int, kind: str) -> tuple[int, ...]:
        """Which streams of the transfer those of `own` are."""
        return self._places[self._choices[kind][layer]]

    def number(self, layer: int, kind: str) -> int:
        """Which of `codecs` it is."""
        return self._choices[kind][layer]
