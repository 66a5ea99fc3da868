"""`python -m perf.report [--quick] [--device cpu|cuda] [--out DIR]`: measure everything, write one page.

Writes `index.html` (which needs nothing else), a file for every plot, `results.json` with all samples, and
`machine.json`. Cells that were measured before are kept in the user's cache folder, so a run
that was interrupted goes on where it was; `--fresh` takes nothing from them.
`--only PART` measures one part and takes the others from the results in the folder, so that they may be of
other times and machines. `--from FILE...` draws the page anew from raw results and measures nothing; parts of several
files are put together. `--device cuda` adds the part that runs on an accelerator; it needs nothing but torch,
transformers and CuPy there, and where nothing can be drawn it writes `results.json` alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lynx_net.demo.process import limit_threads, run_loop

if __name__ == "__main__":
    limit_threads()  # before torch is imported

from lynx_net.errors import BackendMissingError, LynxError
from perf.report.scope import FULL, QUICK, Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

MODELS = ("smollm2", "gemma3")
PARTS = ("time", "concurrent", "quality", "peers", "device")
WHOLE = (1, 1)
"""The only share of all rounds."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m perf.report", description="The whole evaluation, as one page.")
    parser.add_argument("--quick", action="store_true", help="few samples: about ten minutes on two cores")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: time a model of the shape of LLaMA 8B there, too (part device)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("report"), metavar="DIR", help="where to write (default: %(default)s)"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch for quality (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        choices=PARTS,
        action="append",
        metavar="PART",
        help=f"measure this part alone ({', '.join(PARTS)}), and keep the others of DIR; may be given again",
    )
    parser.add_argument(
        "--rounds",
        type=_positive,
        metavar="N",
        help="transfers of each codec in the parts time and device (default: 100, of other lengths and rates 10, and "
        "5 on a device); the others keep their share, at least 3",
    )
    parser.add_argument(
        "--share",
        type=_share,
        default=WHOLE,
        metavar="K/N",
        help="with --only time: the K-th of N shares of the rounds, kept but not drawn, for N such runs at a time on "
        "cores of their own (taskset); the same command without it takes what they measured",
    )
    parser.add_argument("--fresh", action="store_true", help="take nothing from earlier runs")
    parser.add_argument(
        "--from",
        type=Path,
        nargs="+",
        dest="results",
        metavar="FILE",
        help="draw from raw results and measure nothing; of several files, a part is taken from the last that has it",
    )
    parser.add_argument(
        "--readme", action="store_true", help="DIR is in this repository: put its figures into README.md, too"
    )
    options = parser.parse_args(arguments)
    if (options.device == "cuda") != ("device" in (options.only or ())) and options.only:
        parser.error("the part device needs --device cuda, which is for no other part")
    if options.share != WHOLE and (options.only != ["time"] or options.fresh or options.results or options.readme):
        parser.error("--share is of what --only time measures, and is no use with --fresh, --from or --readme")
    return options


def _share(text: str) -> tuple[int, int]:
    """An argparse type."""
    share, _, shares = text.partition("/")
    if not (share.isdecimal() and shares.isdecimal() and 1 <= int(share) <= int(shares)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 2/7")
    return int(share), int(shares)


def _positive(text: str) -> int:
    """An argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rounds")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluation; returns the exit code."""
    options = parse(arguments)
    given = list(sys.argv[1:] if arguments is None else arguments)
    progress = Progress()
    try:
        if options.share != WHOLE:
            _measured(options, given, progress)
            progress.tell("this share is measured; run the same without --share when all are")
            return 0
        write = _writer(raw_will_do=options.only == ["device"])
        from perf.report.device import check_device

        check_device(options.device)
        if options.results is not None:
            from perf.report.parts import load

            results = load(options.results)
        else:
            results = _measured(options, given, progress)
        page = write(results, options.out)
        if options.readme:
            publish(options.out)
    except (LynxError, OSError) as error:
        progress.tell(f"perf.report: {error}")
        return 1
    progress.tell(f"written: {page}")
    return 0


def _writer(*, raw_will_do: bool) -> Callable[[Mapping[str, Any], Path], Path]:
    """What writes the page, or raw results alone if there is nothing to draw with and they will do."""
    try:
        from perf.report.build import write
    except BackendMissingError as error:
        if not raw_will_do:
            raise
        reason = str(error)

        def write(results: Mapping[str, Any], folder: Path) -> Path:
            from perf.report.parts import dump

            file = dump(results, folder)
            print(f"perf.report: {reason}; draw elsewhere: python -m perf.report --from {file}", file=sys.stderr)
            return file

    return write


def publish(folder: Path) -> None:
    """Put the figures of results in this repository into README.md."""
    from perf.report.readme import README, ROOT, rewritten

    inside = folder.resolve().relative_to(ROOT).as_posix()
    README.write_text(rewritten(README.read_text("utf-8"), inside), "utf-8")


def _measured(options: argparse.Namespace, arguments: list[str], progress: Progress) -> dict[str, object]:
    from perf.report.parts import FORMAT
    from perf.report.run import measure

    found: list[dict[str, object]] = []
    held = options.out / "results.json"
    earlier = json.loads(held.read_text("utf-8")) if options.only and held.exists() else None
    if earlier is not None and earlier["format"] != FORMAT:
        progress.tell(f"{held} is of another version of this program: its parts are left out")
        earlier = None

    async def work() -> None:
        wanted = options.only or (PARTS if options.device == "cuda" else PARTS[:-1])
        scope = QUICK if options.quick else FULL
        results = await measure(
            scope if options.rounds is None else scope.with_rounds(options.rounds),
            options.models,
            options.device,
            arguments,
            progress,
            threads=options.threads,
            fresh=options.fresh,
            parts=[part for part in PARTS if part in wanted],
            earlier=earlier,
            share=options.share,
        )
        found.append(results)

    run_loop(work())
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
