"""Codecs by name."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from lynx_codec.codecs import AffineCodec, Bfloat16Codec, LynxCodec
from lynx_codec.errors import CodecError
from lynx_codec.nested import NestedCodec

if TYPE_CHECKING:
    from collections.abc import Callable

    from lynx_codec.base import Codec, PageShape
    from lynx_codec.codecs import Engine

__all__ = ["bits_per_value", "codec_names", "get_codec"]

_FACTORIES: dict[str, tuple[Callable[..., Codec], frozenset[str]]] = {
    "bf16": (Bfloat16Codec, frozenset()),
    "int8": (lambda load_engine: AffineCodec(load_engine, bits=8), frozenset()),
    "int4": (lambda load_engine: AffineCodec(load_engine, bits=4), frozenset()),
    "lynx": (LynxCodec, frozenset({"alpha"})),
    "nested": (NestedCodec, frozenset({"bits", "chunk", "exact"})),
}
_IMPLEMENTATIONS = ("compiled", "reference")


def codec_names() -> tuple[str, ...]:
    """Names that `get_codec` knows, sorted."""
    return tuple(sorted(_FACTORIES))


def get_codec(name: str, *, implementation: str = "compiled", **params: Any) -> Codec:
    """The codec called `name`.

    `implementation` is "compiled" (numba, loaded at the first page or `warm_up`) or "reference" (numpy); both read and
    write the same bytes. `params` are those of `Codec.params`.

    Raises:
        CodecError: an unknown name, implementation or parameter; the message lists the valid ones.
    """
    if name not in _FACTORIES:
        raise CodecError(f"unknown codec {name!r}; known are {', '.join(codec_names())}")
    factory, known = _FACTORIES[name]
    unknown = sorted(set(params) - known)
    if unknown:
        valid = ", ".join(sorted(known)) or "none"
        raise CodecError(f"codec {name} has no parameter {', '.join(unknown)}; valid: {valid}")
    if implementation not in _IMPLEMENTATIONS:
        raise CodecError(f"unknown implementation {implementation!r}; known are {', '.join(_IMPLEMENTATIONS)}")
    try:
        return factory(partial(_engine, implementation), **params)
    except (TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"codec {name}: bad parameters {params}: {error}") from error


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
