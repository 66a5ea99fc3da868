"""The command line: defaults, refusals, and what stays usable without torch."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from lynx_gpu import device_count
from lynx_net.demo.exchange import CacheRequest, Progress
from lynx_net.demo.options import DemoError, DemoOptions, add_arguments, options_from


def parse(*arguments: str) -> DemoOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return options_from(parser.parse_args(arguments))


def test_no_arguments_give_the_documented_defaults() -> None:
    options = parse()
    assert options == DemoOptions()
    assert (options.prompt_tokens, options.rate, options.new_tokens) == (2048, "100Mbit", 32)
    assert options.codecs == ("bf16", "int8", "int4", "lynx", "default")
    assert options.first_token == "decode"


def test_arguments_arrive() -> None:
    options = parse("--rate", "1.25GB/s", "--codecs", "lynx,int8,lynx", "--temperature", "0.7", "--json", "x.json")
    assert options.rate == "1.25GB/s"
    assert options.codecs == ("lynx", "int8")
    assert options.temperature == 0.7
    assert options.json == Path("x.json")


@pytest.mark.skipif(device_count() > 0, reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(DemoError, match="no CUDA device"):
        parse("--device", "cuda")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rate", "fast"], "cannot read the rate"),
        (["--prompt-tokens", "12"], "not between 128 and 8192"),
        (["--prompt-tokens", "many"], "not a number"),
        (["--new-tokens", "0"], "not between 1 and"),
        (["--temperature", "nan"], "not between 0 and 10"),
        (["--codecs", "int8,int3"], "unknown codec 'int3'"),
        (["--first-token", "both"], "invalid choice"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        parse(*arguments)
    assert refusal.value.code == 2
    assert reason in capsys.readouterr().err


def test_options_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(DemoError, match="holds 8192 positions"):
        parse("--prompt-tokens", "8000", "--new-tokens", "300")
    with pytest.raises(DemoError, match="there is no folder"):
        parse("--json", "/nowhere/at/all/x.json")


def test_help_and_refusals_import_no_machine_learning_framework() -> None:
    code = (
        "import sys, lynx_net.__main__ as m\n"
        "try: m.main(['demo', '--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "assert not {'torch', 'transformers', 'rich'} & set(sys.modules), 'imported too early'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--prompt-tokens" in done.stdout


def test_cache_requests_survive_the_wire_and_nonsense_does_not() -> None:
    request = CacheRequest("lynx", (1, 2, 49151), first_token=True, temperature=0.5, seed=7)
    assert CacheRequest.from_meta(request.to_meta()) == request
    for change in ({"codec": "zip"}, {"prompt": b"abc"}, {"prompt": b""}, {"seed": "7"}):
        with pytest.raises(DemoError, match="malformed"):
            CacheRequest.from_meta(request.to_meta() | change)


def test_progress_lines_are_told_from_other_output() -> None:
    assert Progress.from_line(Progress("loading", 1.5).to_line()) == Progress("loading", 1.5)
    for line in ("", "hello", "[1]", '{"step": 3, "took_s": null}', '{"step": "x"}'):
        assert Progress.from_line(line) is None
