"""The range coder compiled (numba); imported at first use, since numba takes a second to load."""

# numba types these functions, from their arguments:
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from lynx_codec.baselines import rans
from lynx_codec.jit import compiled

__all__ = ["decode_words", "encode_words"]

encode_words = compiled(rans.encode_words)
decode_words = compiled(rans.decode_words)
