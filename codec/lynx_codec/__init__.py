"""Codecs for pages of a KV cache: a page in, an ordered list of streams out, and back after any prefix of them."""

from lynx_codec.base import CHUNK_TOKENS, PAGE_TOKENS, Codec, PageShape
from lynx_codec.errors import CodecError, LynxError, NonFiniteError
from lynx_codec.packed import PackedArray, PackedCache, PackedPage
from lynx_codec.plan import CodecPlan, CodecRule
from lynx_codec.registry import bits_per_value, codec_names, get_codec

__all__ = [
    "CHUNK_TOKENS",
    "PAGE_TOKENS",
    "Codec",
    "CodecError",
    "CodecPlan",
    "CodecRule",
    "LynxError",
    "NonFiniteError",
    "PackedArray",
    "PackedCache",
    "PackedPage",
    "PageShape",
    "bits_per_value",
    "codec_names",
    "get_codec",
]
