"""Codecs of other systems, for comparison in one run: `fp8`, `int8_token`, `int4_token`, `kivi`, `turboquant`, `cachegen`.

Each has one stream and keeps the contract of `Codec`. They are numpy code for both implementations, save the raw tokens and
the entropy coder of `cachegen`, which are compiled. docs/codec.md, "Comparison codecs", gives formats and deviations.
"""

from lynx_codec.baselines.cachegen import CacheGenCodec
from lynx_codec.baselines.fp8 import Fp8Codec
from lynx_codec.baselines.groups import KiviCodec, TokenCodec
from lynx_codec.baselines.turboquant import TurboQuantCodec

__all__ = ["CacheGenCodec", "Fp8Codec", "KiviCodec", "TokenCodec", "TurboQuantCodec"]
