"""The bytes of every codec. A difference here breaks peers that run another version, unless only encoders choose it."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from codec_inputs import as_dtype, decode, encode
from golden_recipe import CASES, COMPARISON_CASES, golden_page, record

from lynx_codec import PageShape, get_codec

GOLDEN = Path(__file__).parent / "golden"
VECTORS = json.loads((GOLDEN / "vectors.json").read_text())
COMPARISON_VECTORS = json.loads((GOLDEN / "comparison.json").read_text())


def test_all_cases_are_stored():
    assert len(VECTORS) == len(CASES)
    assert len(COMPARISON_VECTORS) == len(COMPARISON_CASES)


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{i}-{CASES[i]['codec']}-{CASES[i]['dtype']}")
def test_vector(index, implementation):
    assert record(CASES[index], implementation) == VECTORS[index]


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
@pytest.mark.parametrize("index", range(len(COMPARISON_CASES)), ids=lambda i: f"{i}-{COMPARISON_CASES[i]['codec']}")
def test_comparison_vector(index, implementation):
    assert record(COMPARISON_CASES[index], implementation) == COMPARISON_VECTORS[index]


def test_some_vectors_escape():
    assert sum(bool(bytes.fromhex(v["streams"][0][:16])[7]) for v in VECTORS if v["spike"]) == 5


def test_what_the_encoder_chose_when_it_rounded_products_is_read_as_it_was():
    """One code of one vector was another one; these are the hashes that were stored for it."""
    [case] = [case for case in CASES if (case["codec"], case["dtype"]) == ("lynx", "float16")]
    codec, shape = get_codec("lynx"), PageShape(*case["shape"])
    anchor, residual = encode(codec, as_dtype(golden_page(shape, 0), np.float16), shape)
    earlier = residual[:16591] + bytes([252]) + residual[16592:]
    assert sha256(earlier).hexdigest() == "5c836ea6f01a2fac3864cc3f690f2a9404489a123b3d7a66f185e31d1465a34e"
    for implementation in ("reference", "compiled"):
        values = decode(get_codec("lynx", implementation=implementation), [anchor, earlier], shape).astype("<f4")
        assert (
            sha256(values.tobytes()).hexdigest() == "ae5b7a1347c327b5d0531829aa15f0004bc6a456427928e00c263ecef78d94b9"
        )
