"""Inputs of the golden vectors, by integer arithmetic only, and what the vectors record.

`python tests/codec/golden_recipe.py` prints the vectors as the reference makes them now, with the argument `comparison`
those of the comparison codecs. The stored ones change only together with the version number of the page header, or
where an encoder chooses other fields or codes; CHANGELOG.md says so then, and a test holds decoders to the earlier
ones.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np
from codec_inputs import as_dtype, decode, encode

from lynx_codec import PageShape, get_codec

DTYPE_NAMES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}

SMALL = (40, 2, 3, 2, 3)
CASES: tuple[dict[str, Any], ...] = (
    *(
        {"codec": name, "params": {}, "shape": SMALL, "dtype": "float32", "spike": 0}
        for name in ("bf16", "int4", "int8")
    ),
    {"codec": "lynx", "params": {"alpha": 1.0}, "shape": SMALL, "dtype": "float32", "spike": 0},
    {"codec": "lynx", "params": {"alpha": 2.0}, "shape": SMALL, "dtype": "bfloat16", "spike": 0},
    *(
        {"codec": name, "params": {}, "shape": (48, 1, 4, 0, 0), "dtype": "float32", "spike": 100000}
        for name in ("int4", "int8", "lynx")
    ),
    *(
        {"codec": name, "params": {}, "shape": (256, 3, 64, 4, 64), "dtype": dtype, "spike": 0}
        for name in ("bf16", "int4", "int8", "lynx")
        for dtype in DTYPE_NAMES
    ),
    *(
        {
            "codec": "nested",
            "params": {"bits": bits, "chunk": 48},
            "shape": (70, 2, 5, 2, 3, 11),
            "dtype": "bfloat16",
            "spike": 0,
        }
        for bits in ([4, 4], [2, 2, 4], [3, 5], [6, 2], [8], [1, 7])
    ),
    {"codec": "nested", "params": {}, "shape": (256, 3, 64, 4, 0, 64), "dtype": "float32", "spike": 0},
    *(
        {
            "codec": "nested",
            "params": {"exact": True, "chunk": 48},
            "shape": (70, 2, 5, 2, 3, 11),
            "dtype": dtype,
            "spike": spike,
        }
        for dtype in ("bfloat16", "float16")
        for spike in (0, 30000)
    ),
    {"codec": "lynx", "params": {}, "shape": (256, 3, 64, 4, 0, 64), "dtype": "float32", "spike": 0},
    *({"codec": n, "params": {}, "shape": (0, 1, 2, 0, 0), "dtype": "float32", "spike": 0} for n in ("bf16", "lynx")),
)

COMPARISON_CASES: tuple[dict[str, Any], ...] = tuple(
    {"codec": name, "params": params, "shape": SMALL, "dtype": "float32", "spike": 0}
    for name, params in (
        ("fp8", {}),
        ("int4_token", {}),
        ("int8_token", {}),
        ("kivi", {"bits": 2, "axis": "channel", "group": 16}),
        ("kivi", {"bits": 4, "axis": "token"}),
        ("turboquant", {"bits": 3, "seed": 5}),
        ("turboquant", {"bits": 4}),
        ("cachegen", {"bin": 0.5}),
        ("cachegen", {"unit": "channel"}),
    )
)


def golden_page(shape: PageShape, spike: int) -> np.ndarray:
    """float32 values k / 8192 with a hash of the position for k, scaled by a power of two and shifted per channel."""
    t, h, c = np.indices(shape.array_shape, dtype=np.uint64)
    mixed = (t * 1103 + h * 12345 + c * 2789 + 77) * 2654435761 % 2**32
    mixed = (mixed ^ (mixed >> np.uint64(15))) * 2246822519 % 2**32
    whole = (mixed >> np.uint64(16)).astype(np.int64) - 32768
    page = whole.astype(np.float32) * np.float32(2.0**-13)
    page = page * np.exp2(c % 5).astype(np.float32) + (c % 7).astype(np.float32) * np.float32(4.0)
    if spike:
        page[shape.tokens // 2, 0, 1] = spike
    return page.astype(np.float32)


def record(case: dict[str, Any], implementation: str) -> dict[str, Any]:
    """The case together with its streams (hex, or a hash where they are long) and hashes of what they decode to."""
    codec = get_codec(case["codec"], implementation=implementation, **case["params"])
    shape = PageShape(*case["shape"])
    page = as_dtype(golden_page(shape, case["spike"]), DTYPE_NAMES[case["dtype"]])
    streams = encode(codec, page, shape)
    decoded = [decode(codec, streams[:n], shape).astype("<f4").tobytes() for n in range(1, len(streams) + 1)]
    return {
        **case,
        "shape": list(case["shape"]),
        "bytes": [len(s) for s in streams],
        "streams": [s.hex() if len(s) <= 2000 else "sha256:" + hashlib.sha256(s).hexdigest() for s in streams],
        "decoded": ["sha256:" + hashlib.sha256(d).hexdigest() for d in decoded],
    }


if __name__ == "__main__":
    cases = COMPARISON_CASES if sys.argv[1:] == ["comparison"] else CASES
    print(json.dumps([record(case, "reference") for case in cases], indent=1))
