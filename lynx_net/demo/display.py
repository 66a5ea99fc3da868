"""What the demonstration shows while it works: live bars on a terminal, plain lines everywhere else."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Protocol

from lynx_net.demo.report import Line, marked_text, plain_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from rich.console import Group
    from rich.progress import TaskID
    from rich.text import Text

    from lynx_net.demo.results import Piece

__all__ = ["Display", "PlainDisplay", "RichDisplay", "open_display"]


_STYLES = {
    "": "",
    "head": "bold",
    "dim": "dim",
    "good": "magenta",
    "commit": "green",
    "accepted": "cyan",
    "draft": "yellow",
    "retracted": "red strike",
}
_QUARTERS = 4


class Display(Protocol):
    """What the demonstration tells about its progress. All calls come from one thread."""

    def step(self, text: str) -> None:
        """A step begins; it lasts until the next call of `step`, `transfer` or `close`."""
        ...

    def note(self, text: str) -> None:
        """One remark that stays on the screen."""
        ...

    def transfer(self, codec: str, stream_bytes: Mapping[str, int]) -> None:
        """A transfer begins, with streams of these names and (at most) this many payload bytes, in order."""
        ...

    def received(self, stream_bytes: Sequence[int]) -> None:
        """So many payload bytes of each stream of the current transfer are in."""
        ...

    def text(self, pieces: Sequence[Piece], detokenize: Callable[[Sequence[int]], str]) -> None:
        """The text so far; called after every change."""
        ...

    def report(self, lines: Sequence[Line]) -> None:
        """Show the final report."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was found; nothing is shown after it."""
        ...


def stream_titles(codec: str, names: Collection[str]) -> list[str]:
    """How the streams of a codec are called on the screen."""
    return [codec] if len(names) == 1 else [f"{codec} {name}" for name in names]


class PlainDisplay:
    """Plain lines on standard output, each flushed at once, so that a pipe sees them in time."""

    def __init__(self) -> None:
        self._output = sys.stdout  # kept: libraries replace sys.stdout for moments, in another thread
        self._codec = ""
        self._titles: list[str] = []
        self._totals: list[int] = []
        self._shown: list[int] = []
        self._kinds: list[str] = []

    def step(self, text: str) -> None:
        print(f"{text} ...", file=self._output, flush=True)

    def note(self, text: str) -> None:
        print(text, file=self._output, flush=True)

    def transfer(self, codec: str, stream_bytes: Mapping[str, int]) -> None:
        self._codec = codec
        self._titles = stream_titles(codec, stream_bytes)
        self._totals = list(stream_bytes.values())
        self._shown = [0] * len(self._totals)
        self._kinds = []

    def received(self, stream_bytes: Sequence[int]) -> None:
        for stream, (count, total) in enumerate(zip(stream_bytes, self._totals, strict=False)):
            quarters = count * _QUARTERS // total if total else _QUARTERS
            if quarters > self._shown[stream]:
                self._shown[stream] = quarters
                told = f"{quarters * 100 // _QUARTERS} % of {total / 1e6:.2f} MB"
                print(f"  {self._titles[stream]}: {told}", file=self._output, flush=True)

    def text(self, pieces: Sequence[Piece], detokenize: Callable[[Sequence[int]], str]) -> None:
        del detokenize  # the text itself comes with the report
        kinds = [piece.kind for piece in pieces]
        for kind, told in (("draft", "drafting"), ("accepted", "drafts verified"), ("commit", "decoding")):
            if kind in kinds and kind not in self._kinds:
                self._kinds.append(kind)
                print(f"  {self._codec}: {told}", file=self._output, flush=True)

    def report(self, lines: Sequence[Line]) -> None:
        for line in lines:
            print(plain_text(line).rstrip(), file=self._output, flush=True)

    def close(self) -> None:
        """Nothing to restore."""


class RichDisplay:
    """Bars and text that change in place, drawn with rich (extra `demo`)."""

    def __init__(self) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn
        from rich.text import Text

        self._group = Group
        self._text_type = Text
        self._console = Console()
        self._steps = Progress(SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.fields[took]}"))
        self._bars = Progress(
            TextColumn("{task.description:<14}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        )
        self._step: TaskID | None = None
        self._streams: list[TaskID] = []
        self._body = Text()
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=12)
        self._live.start()

    def _render(self) -> Group:
        for task in self._steps.tasks:
            if not task.finished:
                self._steps.update(task.id, took=f"{task.elapsed or 0:.1f} s")
        return self._group(self._steps, self._bars, self._body)

    def _finish_step(self) -> None:
        if self._step is not None:
            self._steps.update(self._step, total=1, completed=1)
            self._step = None

    def step(self, text: str) -> None:
        self._finish_step()
        self._step = self._steps.add_task(text, total=None, took="")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def transfer(self, codec: str, stream_bytes: Mapping[str, int]) -> None:
        self._finish_step()
        self._streams = [
            self._bars.add_task(title, total=total)
            for title, total in zip(stream_titles(codec, stream_bytes), stream_bytes.values(), strict=True)
        ]

    def received(self, stream_bytes: Sequence[int]) -> None:
        for task, count in zip(self._streams, stream_bytes, strict=False):
            self._bars.update(task, completed=count)

    def text(self, pieces: Sequence[Piece], detokenize: Callable[[Sequence[int]], str]) -> None:
        body = self._text_type()
        for line in marked_text(pieces, detokenize):
            body.append_text(self._styled(line))
            body.append("\n")
        self._body = body

    def report(self, lines: Sequence[Line]) -> None:
        self._finish_step()
        self._body = self._text_type()
        self._live.stop()
        for line in lines:
            self._console.print(self._styled(line), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _styled(self, line: Line) -> Text:
        text = self._text_type()
        for part, style in line:
            text.append(part, style=_STYLES[style])
        return text


def open_display() -> Display:
    """The live display on a terminal where rich is installed, plain lines otherwise."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return RichDisplay()
    return PlainDisplay()
