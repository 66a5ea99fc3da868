"""`python -m perf.report [--quick] [--device cpu|cuda] [--out DIR]`: measure everything, write one page.

Writes `index.html` (which needs nothing else), a file for every plot, `results.json` with all samples, and
`machine.json`. Cells that were measured before are kept in the user's cache folder, so a run
that was interrupted goes on where it was; `--fresh` takes nothing from them.
`--only PART` measures one part and takes the others from the results in the folder, so that they may be of
other times and machines. `--from FILE` draws the page anew from raw results and measures nothing.
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

from lynx_net.errors import LocalProtocolError, LynxError
from perf.report.scope import FULL, QUICK, Progress

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

MODELS = ("smollm2", "gemma3")
PARTS = ("time", "quality", "peers")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m perf.report", description="The whole evaluation, as one page.")
    parser.add_argument("--quick", action="store_true", help="few samples: about ten minutes on two cores")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where models run (default: %(default)s)"
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
    parser.add_argument("--fresh", action="store_true", help="take nothing from earlier runs")
    parser.add_argument(
        "--from", type=Path, dest="results", metavar="FILE", help="draw from raw results; measure nothing"
    )
    parser.add_argument(
        "--readme", action="store_true", help="DIR is in this repository: put its figures into README.md, too"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluation; returns the exit code."""
    options = parse(arguments)
    progress = Progress()
    try:
        from perf.report.build import write  # says at once if there is nothing to draw with
        from perf.report.device import check_device

        check_device(options.device)
        if options.results is not None:
            results = _derived_anew(options.results)
        else:
            results = _measured(options, list(sys.argv[1:] if arguments is None else arguments), progress)
        page = write(results, options.out)
        if options.readme:
            publish(options.out)
    except (LynxError, OSError) as error:
        progress.tell(f"perf.report: {error}")
        return 1
    progress.tell(f"written: {page}")
    return 0


def _derived_anew(file: Path) -> dict[str, Any]:
    """Raw results of an earlier run, with the simulator's figures as this version makes them."""
    from perf.report.parts import FORMAT, merged

    held = json.loads(file.read_text("utf-8"))
    if held["format"] != FORMAT:
        raise LocalProtocolError(f"{file} is of another version of this program, which has to draw it")
    return merged({}, held)


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
        results = await measure(
            QUICK if options.quick else FULL,
            options.models,
            options.device,
            arguments,
            progress,
            threads=options.threads,
            fresh=options.fresh,
            parts=[part for part in PARTS if part in (options.only or PARTS)],
            earlier=earlier,
        )
        found.append(results)

    run_loop(work())
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
