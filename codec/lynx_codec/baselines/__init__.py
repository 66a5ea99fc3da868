"""Codecs of other systems, so that a comparison is one run: fp8, per token, KIVI, TurboQuant, CacheGen.

Each has one stream and keeps the contract of `Codec`. Both implementations are numpy code, save the raw tokens and the
entropy coder of `cachegen`, which are compiled in "compiled". Formats and deviations from the papers: docs/codec.md,
"Comparison codecs".
"""

from lynx_codec.baselines.cachegen import CacheGenCodec
from lynx_codec.baselines.fp8 import Fp8Codec
from lynx_codec.baselines.groups import KiviCodec, TokenCodec
from lynx_codec.baselines.turboquant import TurboQuantCodec

__all__ = ["CacheGenCodec", "Fp8Codec", "KiviCodec", "TokenCodec", "TurboQuantCodec"]
