"""The prefill process as seen by its parent: start it, follow it, end it, say how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from typing import TYPE_CHECKING

from lynx_net.demo.exchange import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from lynx_net.demo.options import DemoOptions

__all__ = ["PREFILL_MODULE", "PrefillChild"]

PREFILL_MODULE = "lynx_net.demo.prefill_process"

_KEPT_LINES = 3
_GRACE_S = 2.0
"""Time the child has to end by itself once it was asked to."""


class PrefillChild:
    """A running prefill process. Its error output is kept here, its progress lines go to a callback."""

    def __init__(self, process: asyncio.subprocess.Process, progress: Callable[[Progress], None]) -> None:
        self._process = process
        self._progress = progress
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._readers = [asyncio.create_task(self._read_progress()), asyncio.create_task(self._read_errors())]

    @classmethod
    async def start(
        cls, url: str, options: DemoOptions, progress: Callable[[Progress], None], module: str = PREFILL_MODULE
    ) -> PrefillChild:
        """Start the process that connects to `url`; `module` is run with the arguments of the demonstration's.

        It has a session of its own, so that Ctrl-C reaches the parent only, and it inherits this
        process's standard error a second time, to say there that its parent is lost.
        """
        terminal = os.dup(2)  # under another number: 2 will be the pipe there
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", module, "--url", url, "--rate", options.rate),
                *("--lanes", str(options.lanes), "--timeout", str(options.timeout_s), "--terminal-fd", str(terminal)),
                *("--device", options.device),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                pass_fds=(terminal,),
            )
        finally:
            os.close(terminal)
        return cls(process, progress)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def ended(self) -> None:
        """Wait until the process has ended and its last lines have been read."""
        await self._process.wait()
        await asyncio.wait(self._readers, timeout=1.0)

    def obituary(self) -> str | None:
        """How the process ended and the last it said, as a clause; None while it runs."""
        code = self._process.returncode
        if code is None:
            return None
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"
        said = "; ".join(line.removeprefix("lynx_net demo, prefill process: ") for line in self._last_lines)
        return f"the prefill process {how}" + (f": {said}" if said else "")

    async def stop(self, *, at_once: bool) -> None:
        """End the process if it still runs, and reap it.

        Args:
            at_once: kill it now (a stopped process reacts to nothing else) instead of asking it
                to end and giving it time.
        """
        with contextlib.suppress(ProcessLookupError):  # it may end by itself at any moment
            if not at_once:
                self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GRACE_S):
                        await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
        # Killed is gone, whether or not the event loop hears of it in time.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self.ended()
        for reader in self._readers:
            reader.cancel()

    async def _read_progress(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if (progress := Progress.from_line(line.decode(errors="replace"))) is not None:
                self._progress(progress)

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            if text := line.decode(errors="replace").strip():
                self._last_lines.append(text)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
