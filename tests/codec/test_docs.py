"""What docs/codec.md shows and states is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from codec_inputs import ALL_NAMES

from lynx_codec import get_codec
from lynx_codec.layout import HEADER_BYTES, LYNX_HEADER_BYTES, VERSION
from lynx_codec.limits import ESCAPE_STEPS, ESCAPE_TOKENS, FLAT_SCALE

TEXT = (Path(__file__).parents[2] / "docs" / "codec.md").read_text()


def test_example_runs():
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, np.ndarray] = {}
    exec(block, names)
    page = names["page"]
    errors = [((names[k] - page) ** 2).sum() / (page**2).sum() for k in ("coarse", "fine")]
    assert errors[1] < 1e-4 < errors[0] < 0.02


@pytest.mark.parametrize("name", ALL_NAMES)
def test_codec_ids(name):
    assert re.search(rf"^\| `{name}` \| {get_codec(name).codec_id} \|", TEXT, re.MULTILINE)


def test_constants():
    assert f"| 4 | 1 | version | {VERSION} |" in TEXT
    assert f"the header ({HEADER_BYTES} bytes, {LYNX_HEADER_BYTES} for `lynx`)" in TEXT
    assert f"at least {ESCAPE_TOKENS} coded tokens" in TEXT
    assert f"an extent below {ESCAPE_STEPS:.0f} `step`" in TEXT
    assert f"below 2^{np.log2(FLAT_SCALE):.0f} the channel is" in TEXT
