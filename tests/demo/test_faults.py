"""Either process of the demonstration killed or stopped at any moment: the other ends, in time, with one sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lynx_net.demo.pair import CONNECT_DEADLINES

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

SHORT_S, DEADLINE_S = 1.0, 8.0
"""Silence after which a peer counts as hung, before its link is there and later: importing torch may take a while."""
PATIENT_S = 60.0
"""The same where silence is not the point: what ends within the margin has not waited for it."""
MARGIN_S = 10.0
START_S = 240.0

START = "starting the prefill process"
LOAD = "loading the model"
PREFILL = "prefill process: prefill of 128 tokens ..."
ANCHOR = "lynx anchor: 25 %"
RESIDUAL = "lynx residual: 25 %"
DECODE = "lynx: decoding"


class Demo:
    """A running demonstration with a short prompt on a slow link, so that every phase lasts a while."""

    def __init__(self, deadline_s: float) -> None:
        arguments = ["--prompt-tokens", "128", "--rate", "5Mbit", "--new-tokens", "200", "--codecs", "lynx"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lynx_net", "demo", *arguments, "--timeout", str(deadline_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._seen = threading.Condition()
        self._ended = False
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.lines), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.errors), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._child: int | None = None

    def _read(self, pipe: Iterator[str], lines: list[str]) -> None:
        for line in pipe:
            with self._seen:
                lines.append(line.rstrip())
                self._seen.notify_all()
        with self._seen:
            self._ended = True
            self._seen.notify_all()

    def wait_for(self, marker: str) -> None:
        """Wait until the demonstration has printed a line with `marker`, or has ended."""

        def printed() -> bool:
            return any(marker in line for line in self.lines)

        with self._seen:
            self._seen.wait_for(lambda: printed() or self._ended, START_S)
            assert printed(), (marker, self.lines, self.errors)

    @property
    def child(self) -> int:
        """Process id of the prefill process."""
        until_s = time.monotonic() + START_S
        while self._child is None:
            assert time.monotonic() < until_s
            children = [pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and self._is_child(pid)]
            self._child = int(children[0].name) if children else None
        return self._child

    def _is_child(self, pid: Path) -> bool:
        with suppress(OSError):
            parent = (pid / "stat").read_text().rpartition(")")[2].split()[1]
            return int(parent) == self.process.pid and b"prefill_process" in (pid / "cmdline").read_bytes()
        return False

    def wait(self, limit_s: float) -> int:
        """Exit code, within the limit; its output is complete afterwards."""
        code = self.process.wait(limit_s)
        for reader in self._readers:
            reader.join(MARGIN_S)
        return code

    def close(self) -> None:
        for pid in (self.process.pid, self._child):
            if pid is not None and is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join(MARGIN_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def demo(request: pytest.FixtureRequest) -> Iterator[Demo]:
    """Its deadline is the test's parameter, if there is one."""
    running = Demo(getattr(request, "param", PATIENT_S))
    yield running
    running.close()


def is_running(pid: int) -> bool:
    """True if the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int, limit_s: float) -> None:
    until_s = time.monotonic() + limit_s
    while is_running(pid):
        assert time.monotonic() < until_s, f"process {pid} still runs after {limit_s} s"
        time.sleep(0.05)


@pytest.mark.parametrize("moment", [START, PREFILL, ANCHOR, RESIDUAL, DECODE])
def test_prefill_process_killed(demo: Demo, moment: str) -> None:
    demo.wait_for(moment)
    os.kill(demo.child, signal.SIGKILL)
    assert demo.wait(MARGIN_S) == 1
    assert demo.errors == ["lynx_net demo: the prefill process was killed by SIGKILL"]


@pytest.mark.parametrize(
    ("demo", "moment"),
    [(SHORT_S, START), (DEADLINE_S, PREFILL), (DEADLINE_S, RESIDUAL), (DEADLINE_S, DECODE)],
    indirect=["demo"],
)
def test_prefill_process_stopped(demo: Demo, moment: str) -> None:
    demo.wait_for(moment)
    os.kill(demo.child, signal.SIGSTOP)
    assert demo.wait((CONNECT_DEADLINES * SHORT_S if moment == START else DEADLINE_S) + MARGIN_S) == 1
    [sentence] = demo.errors
    assert sentence.startswith("lynx_net demo: the prefill process d")
    silence = ("did not connect within 12 s", "silent for 1 s") if moment == START else ("silent for 8 s",)
    assert any(clause in sentence for clause in silence)
    assert not is_running(demo.child)


@pytest.mark.parametrize("moment", [LOAD, PREFILL, RESIDUAL])
def test_decode_process_killed(demo: Demo, moment: str) -> None:
    demo.wait_for(moment)
    child = demo.child
    demo.process.kill()
    wait_until_gone(child, MARGIN_S)
    demo.wait(MARGIN_S)
    [sentence] = demo.errors
    assert sentence.startswith("lynx_net demo, prefill process: the decode process is gone: ")


@pytest.mark.parametrize(("demo", "moment"), [(DEADLINE_S, ANCHOR)], indirect=["demo"])
def test_decode_process_stopped(demo: Demo, moment: str) -> None:
    demo.wait_for(moment)
    child = demo.child
    demo.process.send_signal(signal.SIGSTOP)
    wait_until_gone(child, DEADLINE_S + MARGIN_S)
    demo.process.send_signal(signal.SIGCONT)
    assert demo.wait(MARGIN_S) == 1
    lost, ended = sorted(demo.errors, key=lambda line: "prefill process: the decode" not in line)
    assert lost.startswith("lynx_net demo, prefill process: the decode process is gone: ")
    assert "silent for 8 s" in lost
    assert ended == "lynx_net demo: the prefill process ended with exit code 1"


@pytest.mark.parametrize(("moment", "number", "code"), [(LOAD, signal.SIGTERM, 143), (ANCHOR, signal.SIGINT, 130)])
def test_decode_process_interrupted(demo: Demo, moment: str, number: signal.Signals, code: int) -> None:
    demo.wait_for(moment)
    child = demo.child
    demo.process.send_signal(number)
    assert demo.wait(MARGIN_S) == code
    assert not is_running(child)
    assert len(demo.errors) == 1
