"""Numbers that are part of the format, shared by every implementation. All are exact float32 values."""

from __future__ import annotations

import numpy as np

from lynx_codec.base import CHUNK_TOKENS

__all__ = [
    "ESCAPE_STEPS",
    "ESCAPE_TOKENS",
    "FLAT_SCALE",
    "FLOAT16_MAX",
    "MAX_LEVEL_NARROW",
    "MAX_LEVEL_WIDE",
    "MAX_MAGNITUDE",
    "MAX_TOP",
    "MEAN_CHUNK",
    "MEAN_WEIGHT",
]

MAX_MAGNITUDE = np.float32(2.0**126)
"""Largest magnitude an encoder takes: the difference of two such values is still finite."""

MAX_TOP = np.float32(2.0**126 * (1 + 2.0**-6))
"""Largest page minimum plus page scale: both are rounded outwards, by less than one part in 64."""

FLAT_SCALE = np.float32(2.0**-80)
"""A channel whose page range is below this is stored as its minimum; reciprocals then stay inside float32."""

MAX_LEVEL_NARROW = np.float32(255.0)
MAX_LEVEL_WIDE = np.float32(65535.0)
"""Largest code of a chunk field of 8 and of 16 bits."""

ESCAPE_STEPS = np.float32(4.0)
"""A page escapes if a chunk has to be resolved inside less than this many steps of the 8-bit grid."""

ESCAPE_TOKENS = 8
"""Chunks of fewer coded tokens have no say in it: a few values lie close together by mere chance."""

MEAN_WEIGHT = np.float32(1.0 / CHUNK_TOKENS)
"""Weight of one value in a mean: an exact power of two, so that no sum can overflow."""

MEAN_CHUNK = np.float32(CHUNK_TOKENS)

FLOAT16_MAX = np.float32(65504.0)
