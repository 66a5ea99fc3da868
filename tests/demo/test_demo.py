"""The demonstration, the acceptance benchmark and the examples, run as a newcomer runs them, with short prompts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lynx_net.demo.options import MIN_PROMPT_TOKENS

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
PATIENT = ("--timeout", "60")
"""Silence is not the point here, and a host that is busy enough imports torch in more than the default."""
SHORT = ("--prompt-tokens", "256", "--rate", "50Mbit", *PATIENT)


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.model
def test_five_transfers(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = run("-m", "lynx_net", "demo", *SHORT, "--json", str(file), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    data: dict[str, Any] = json.loads(file.read_text())
    assert data["prompt"]["tokens"] == 256
    transfers = {entry["codec"]: entry for entry in data["transfers"]}
    assert list(transfers) == ["bf16", "int8", "int4", "lynx", "default"]
    lynx = transfers["lynx"]
    assert lynx["matches_qfull"] is transfers["default"]["matches_qfull"] is True
    assert transfers["default"]["bits_per_value"] < lynx["bits_per_value"]
    assert transfers["bf16"]["agreement_bf16"] == 1.0
    for entry in transfers.values():
        assert len(entry["tokens"]) == 32
        assert 0 < entry["anchor_ready_s"] < entry["ttft_s"] < entry["tt32t_s"]
        assert entry["bytes_sent"] > sum(entry["stream_bytes"])
        assert entry["bits_per_value"] == pytest.approx(entry["bytes_sent"] * 8 / (255 * 30 * 3 * 64 * 2))
        kept = [piece["token"] for piece in entry["pieces"] if piece["kind"] in ("accepted", "commit")]
        assert kept == entry["tokens"]
    assert transfers["int4"]["bytes_sent"] < transfers["int8"]["bytes_sent"] < transfers["bf16"]["bytes_sent"]
    assert lynx["anchor_ready_s"] < lynx["residual_ready_s"] < lynx["verified_s"]
    assert lynx["drafted"] >= lynx["accepted"] > 0
    rows = [
        line.split()[0] for line in done.stdout.splitlines() if re.match(r"(bf16|int8|int4|lynx|default) +\d", line)
    ]
    assert rows == list(transfers)


SLOW_IMPORT = """
import ctypes, sys

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers" and "--url" in sys.orig_argv:  # in the prefill process
            sys.meta_path.remove(self)
            ctypes.PyDLL(None).usleep(6_000_000)  # keeps the interpreter lock

sys.meta_path.insert(0, Slow())
"""


@pytest.mark.model
def test_libraries_that_hold_the_interpreter_are_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    short = ("--prompt-tokens", "128", "--new-tokens", "4", "--codecs", "lynx", "--rate", "1Gbit", "--timeout", "4")
    done = run("-m", "lynx_net", "demo", *short)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.model
def test_sampling_with_a_first_token_from_prefill_and_a_short_document(tmp_path: Path) -> None:
    document, file = tmp_path / "document.txt", tmp_path / "result.json"
    document.write_text("The lynx is a cat with short tail and long ears. It lives in the woods. " * 10)
    arguments = ("--prompt-file", str(document), "--first-token", "prefill", "--temperature", "0.8", "--seed", "3")
    link = ("--rate", "20Mbit", "--codecs", "lynx", *PATIENT)
    done = run("-m", "lynx_net", "demo", *arguments, *link, "--json", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert "(the document is shorter than 2048)" in done.stdout
    data = json.loads(file.read_text())
    assert MIN_PROMPT_TOKENS <= data["prompt"]["tokens"] < 2048
    [lynx] = data["transfers"]
    assert lynx["matches_qfull"] is None
    assert lynx["ttft_s"] < lynx["anchor_ready_s"]


def test_a_missing_document_is_one_sentence() -> None:
    done = run("-m", "lynx_net", "demo", "--prompt-file", "nowhere.txt")
    assert done.returncode == 1
    assert done.stderr == "lynx_net demo: cannot read nowhere.txt: No such file or directory\n"


@pytest.mark.model
def test_acceptance_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "acceptance.json"
    done = run("-m", "perf.acceptance", "--prompts", "2", *SHORT, "--json", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(file.read_text())
    first, second = data["samples"]
    assert data["matches_qfull"] == 2
    assert data["drafted_mean"] == (first["drafted"] + second["drafted"]) / 2
    assert data["accept_rate"] == data["accepted_mean"] / data["drafted_mean"]
    assert (first["document"], first["question"]) != (second["document"], second["question"])


@pytest.mark.model
def test_examples_work_together() -> None:
    decode = subprocess.Popen(
        [sys.executable, "examples/decode.py", "127.0.0.1:0", "--new-tokens", "12"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert decode.stdout is not None
    try:
        address = decode.stdout.readline().strip().rpartition("tcp://")[2]
        sent = run("examples/prefill.py", "--rate", "20Mbit", address, "Why is the sky blue? " * 10)
        assert sent.returncode == 0, sent.stderr
        assert "as plan" in sent.stdout
        printed = []
        while not printed or "drafts accepted" not in printed[-1]:
            line = decode.stdout.readline()
            assert line, (printed, decode.stderr and decode.stderr.read())
            printed.append(line)
        assert sum("commit" in line for line in printed) > 0
    finally:
        decode.kill()
        decode.communicate()


@pytest.mark.parametrize("name", ["prefill.py", "decode.py"])
def test_examples_stay_short(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) < 100
