"""Names, parameters, and what importing costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from codec_inputs import ALL_NAMES, encode, normal

from lynx_codec import Codec, CodecError, LynxError, PageShape, bits_per_value, codec_names, get_codec


def test_names():
    assert codec_names() == tuple(sorted(ALL_NAMES))
    for name in codec_names():
        for implementation in ("compiled", "reference"):
            codec = get_codec(name, implementation=implementation)
            assert isinstance(codec, Codec)
            assert codec.name == name
            codec.warm_up()
    assert get_codec("lynx").stream_names == ("anchor", "residual")
    assert get_codec("int4").stream_names == ("anchor",)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_codec("zip"), "unknown codec 'zip'; known are bf16, cachegen, fp8, int4, "),
        (lambda: get_codec("lynx", beta=1), "no parameter beta; valid: alpha"),
        (lambda: get_codec("int8", alpha=1), "no parameter alpha; valid: none"),
        (
            lambda: get_codec("lynx", implementation="fpga"),
            "unknown implementation 'fpga'; known are compiled, reference",
        ),
        (lambda: get_codec("lynx", alpha="steep"), "bad parameters"),
        (lambda: get_codec("lynx", alpha=None), "bad parameters"),
        (lambda: get_codec("nested", bits=[4, 5]), r"add up to 8, not \[4, 5\]"),
        (lambda: get_codec("nested", bits=[0, 8]), "whole numbers from 1"),
        (lambda: get_codec("nested", bits=[3.5, 4.5]), "whole numbers from 1"),
        (lambda: get_codec("nested", bits=[]), "whole numbers from 1"),
        (lambda: get_codec("nested", bits=8), "bad parameters"),
        (lambda: get_codec("nested", chunk=15), "16 to 256 tokens"),
        (lambda: get_codec("nested", chunk=32.5), "16 to 256 tokens"),
        (lambda: get_codec("lynx", alpha=0.0), "alpha must be"),
        (lambda: get_codec("lynx", alpha=float("nan")), "alpha must be"),
        (lambda: get_codec("lynx", alpha=900.0), "too large"),
        (lambda: get_codec("kivi", bits=3), "kivi has 2 or 4 bits, not 3"),
        (lambda: get_codec("kivi", axis="head"), "axis must be 'channel' .keys. or 'token' .values., not 'head'"),
        (lambda: get_codec("kivi", group=4), "group must be"),
        (lambda: get_codec("kivi", group=True), "group must be"),
        (lambda: get_codec("turboquant", bits=5), "turboquant has 2, 3 or 4 bits, not 5"),
        (lambda: get_codec("turboquant", bits=[4]), "bad parameters"),
        (lambda: get_codec("turboquant", seed=-1), "seed must be"),
        (lambda: get_codec("cachegen", bin=0), "bin must be"),
        (lambda: get_codec("cachegen", bin=float("nan")), "bin must be"),
        (lambda: get_codec("cachegen", bin="wide"), "bad parameters"),
        (lambda: get_codec("cachegen", unit="layer"), "unit must be"),
        (lambda: get_codec("fp8", bits=8), "no parameter bits; valid: none"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(CodecError, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("nested", {"bits": [3, 5], "chunk": 64}),
        ("lynx", {"alpha": 1.3}),
        *((name, {}) for name in ALL_NAMES),
        ("kivi", {"bits": 4, "axis": "token", "group": 64}),
        ("turboquant", {"bits": 3, "seed": 9}),
        ("cachegen", {"bin": 0.3, "unit": "channel"}),
    ],
)
def test_params_build_the_same_codec(name, params):
    codec = get_codec(name, **params)
    twin = get_codec(name, **codec.params())
    shape = PageShape(40, 1, 4)
    assert twin.params() == codec.params()
    assert encode(twin, normal(40, 1, 4), shape) == encode(codec, normal(40, 1, 4), shape)
    assert bits_per_value(codec, shape) == bits_per_value(twin, shape)


@pytest.mark.parametrize(
    "dims", [(-1, 1, 1), (0x10000, 1, 1), (1, 0, 1), (1, 1, 0), (4, 1, 1, 3, 2), (4, 1, 1, -1, 0), (4, 1, 1, 0, -1)]
)
def test_impossible_shapes(dims):
    with pytest.raises(CodecError):
        PageShape(*dims)


def test_errors_are_one_tree():
    assert issubclass(CodecError, LynxError)


def test_import_is_light():
    """No numba before the first compiled codec, and no torch or transport at all."""
    code = (
        "import sys, lynx_codec; lynx_codec.get_codec('lynx', implementation='reference');"
        "print([m for m in ('numba', 'llvmlite', 'torch', 'lynx_net', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
