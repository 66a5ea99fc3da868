"""Codecs by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from lynx_codec.baselines import CacheGenCodec, Fp8Codec, KiviCodec, TokenCodec, TurboQuantCodec
from lynx_codec.codecs import AffineCodec, Bfloat16Codec, LynxCodec
from lynx_codec.composite import MAX_PARTS, SplitCodec
from lynx_codec.errors import CodecError
from lynx_codec.nested import NestedCodec

if TYPE_CHECKING:
    from collections.abc import Callable

    from lynx_codec.base import Codec, PageShape
    from lynx_codec.engine import Engine

__all__ = ["CodecBuilder", "bits_per_value", "codec_names", "get_codec"]

_FACTORIES: dict[str, tuple[Callable[..., Codec], frozenset[str]]] = {
    "bf16": (Bfloat16Codec, frozenset()),
    "int8": (lambda load_engine: AffineCodec(load_engine, bits=8), frozenset()),
    "int4": (lambda load_engine: AffineCodec(load_engine, bits=4), frozenset()),
    "lynx": (LynxCodec, frozenset({"alpha"})),
    "nested": (NestedCodec, frozenset({"bits", "chunk", "exact"})),
    "cachegen": (CacheGenCodec, frozenset({"bin", "unit"})),
    "fp8": (Fp8Codec, frozenset()),
    "int4_token": (lambda load_engine: TokenCodec(load_engine, bits=4), frozenset()),
    "int8_token": (lambda load_engine: TokenCodec(load_engine, bits=8), frozenset()),
    "kivi": (KiviCodec, frozenset({"bits", "axis", "group"})),
    "turboquant": (TurboQuantCodec, frozenset({"bits", "seed"})),
}
_IMPLEMENTATIONS = ("compiled", "reference")
_SPLITS = {"by_head": "heads", "by_channel": "channels"}
"""Codecs that are made of others, and what they divide."""

MAX_DIFFERENT = 16
"""Different codecs in one `CodecBuilder`: making one may take a twentieth of a second."""


def codec_names() -> tuple[str, ...]:
    """Names of the codecs that need no parameters, sorted; `by_head` and `by_channel` are made of these."""
    return tuple(sorted(_FACTORIES))


def get_codec(name: str, *, implementation: str = "compiled", **params: Any) -> Codec:
    """The codec called `name`.

    `implementation` is "compiled" (numba, loaded at the first page or `warm_up`) or "reference" (numpy); both read and
    write the same bytes. `params` are those of `Codec.params`.

    Raises:
        CodecError: an unknown name, implementation or parameter; the message lists the valid ones.
    """
    return CodecBuilder(implementation).build(name, params)


class CodecBuilder:
    """Makes codecs from names and plain parameters, of a peer too; equal ones are made once.

    Raises:
        CodecError: an unknown implementation.
    """

    def __init__(self, implementation: str = "compiled") -> None:
        if implementation not in _IMPLEMENTATIONS:
            raise CodecError(f"unknown implementation {implementation!r}; known are {', '.join(_IMPLEMENTATIONS)}")
        self._implementation = implementation
        self._made: dict[str, Codec] = {}

    def build(self, name: object, params: object) -> Codec:
        """The codec called `name`.

        Raises:
            CodecError: an unknown name or parameter, or more than MAX_DIFFERENT different codecs.
        """
        if isinstance(name, str) and name in _SPLITS:
            return self._split(name, _checked(name, params, frozenset({_SPLITS[name], "codecs", "params"})))
        if not isinstance(name, str) or name not in _FACTORIES:
            raise CodecError(f"unknown codec {name!r:.80}; known are {', '.join((*codec_names(), *_SPLITS))}")
        factory, known = _FACTORIES[name]
        own = _checked(name, params, known)
        key = repr((name, sorted(own.items())))
        if key not in self._made:
            if len(self._made) == MAX_DIFFERENT:
                raise CodecError(f"more than {MAX_DIFFERENT} different codecs in one transfer")
            try:
                self._made[key] = factory(partial(_engine, self._implementation), **own)
            except (TypeError, ValueError, OverflowError) as error:
                raise CodecError(f"codec {name}: bad parameters {params}: {error}") from error
        return self._made[key]

    def _split(self, name: str, params: dict[str, Any]) -> Codec:
        axis = _SPLITS[name]
        counts, names, of_parts = (params.get(field, []) for field in (axis, "codecs", "params"))
        if not all(isinstance(field, list | tuple) for field in (counts, names, of_parts)):
            raise CodecError(f"codec {name}: {axis}, codecs and params must be lists, one entry for each part")
        if len(names) != len(of_parts) or len(names) > MAX_PARTS:
            raise CodecError(
                f"codec {name}: {len(names)} codecs with {len(of_parts)} params; at most {MAX_PARTS} parts"
            )
        # One inside another is of use in this order alone, and peers must not make us build towers.
        refused = {"by_head", name}
        for one in names:
            if isinstance(one, str) and one in refused:
                raise CodecError(f"codec {name} cannot be made of {one}")
        return SplitCodec(axis, counts, [self.build(*part) for part in zip(names, of_parts, strict=True)])


def _checked(name: str, params: object, known: frozenset[str]) -> dict[str, Any]:
    """The parameters, if they are a map with no others than the known ones."""
    if not isinstance(params, Mapping):
        raise CodecError(f"codec {name}: parameters must be a map, not {params!r:.80}")
    unknown = sorted(str(field) for field in set(params) - known)
    if unknown:
        valid = ", ".join(sorted(known)) or "none"
        raise CodecError(f"codec {name} has no parameter {', '.join(unknown)}; valid: {valid}")
    return dict(params)


@lru_cache(maxsize=2)
def _engine(implementation: str) -> Engine:
    if implementation == "compiled":
        from lynx_codec.compiled import CompiledEngine

        return CompiledEngine()
    from lynx_codec.reference import ReferenceEngine

    return ReferenceEngine()


def bits_per_value(codec: Codec, shape: PageShape, *, streams: int | None = None, wide: bool = False) -> float:
    """Exact bits a value of a page before it is encoded: header, raw tokens and metadata included.

    `streams` counts only the first so many streams; `wide` is as in `Codec.stream_bytes`. A page without values has 0.
    """
    if shape.values == 0:
        return 0.0
    return 8 * sum(codec.stream_bytes(shape, wide=wide)[:streams]) / shape.values
