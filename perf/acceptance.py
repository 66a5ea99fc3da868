"""How many drafts survive on real prompts: `python -m perf.acceptance --prompts 20 --json FILE`.

Every prompt is a document and a question in the chat template of SmolLM2, cut to the same length. The documents
are the texts of this repository, each begun at another section; the questions differ too. Each prompt goes
through the real pair of the demonstration: one process prefills and sends over a rate-limited loopback link, this one
drafts on the anchors, verifies on Q_full, and afterwards decodes the same text plainly on Q_full, to compare.
How many drafts are made depends on the machine (how many tokens it decodes while the residual is on the wire);
how many of them are accepted depends on the codec.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lynx_net.demo.display import PlainDisplay
from lynx_net.demo.experiment import Experiment, compare
from lynx_net.demo.options import DEFAULT, DemoOptions, add_arguments, options_from
from lynx_net.demo.pair import Pair
from lynx_net.demo.process import leave, limit_threads, run_loop
from lynx_net.demo.prompts import build_prompt, read_document
from lynx_net.demo.results import machine_facts
from lynx_net.errors import LynxError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lynx_net.demo.report import Line
    from lynx_net.demo.results import Piece, TransferResult

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("lynx_net/demo/document.txt", "docs/wire-format.md", "LICENSE", "docs/codec.md")
QUESTIONS = (
    "What is this text about? Answer in three sentences.",
    "Which problem does the text describe, and what is done about it?",
    "List the most important terms of the text and explain each of them briefly.",
    "What must a reader do first, according to the text?",
    "Explain the main idea of the text to somebody who has never heard of it.",
    "What does the text forbid, and what does it allow?",
    "Which numbers are given in the text, and what do they mean?",
    "Write a short summary of the last part of the text.",
    "What happens when something goes wrong, according to the text?",
    "Who is the text written for, and why?",
    "Name three facts from the text that surprised you.",
)


class QuietDisplay(PlainDisplay):
    """Shows the steps only; one line a prompt is printed elsewhere."""

    def received(self, stream_bytes: Sequence[int]) -> None:
        """Not shown."""

    def text(self, pieces: Sequence[Piece], detokenize: object) -> None:
        """Not shown."""

    def report(self, lines: Sequence[Line]) -> None:
        """Not shown."""


def documents() -> Iterator[tuple[str, str]]:
    """Name and text of one document after the other, without end and without repeating one.

    In round n each text begins at its n-th section and ends with the sections before; a section
    is what stands between two empty lines and has some length.
    """
    sections = {name: _sections(read_document(ROOT / name)) for name in DOCUMENTS}
    for turn in itertools.count():
        for name, parts in sections.items():
            start = turn * max(len(parts) // 8, 1) % len(parts)
            yield f"{name} from section {start}", "\n\n".join([*parts[start:], *parts[:start]])


def _sections(text: str) -> list[str]:
    """The text cut at empty lines, short pieces (headings) kept with what follows them."""
    sections: list[str] = []
    held = ""
    for part in text.split("\n\n"):
        held += f"{part}\n\n"
        if len(held) > 200:
            sections.append(held.rstrip())
            held = ""
    return [*sections, held.rstrip()] if held.strip() else sections


async def measure(options: DemoOptions, prompts: int, samples: list[dict[str, Any]]) -> None:
    """Run so many prompts and append a sample for each."""
    display = QuietDisplay()
    async with Pair.open(options, lambda progress: None) as pair:
        experiment = Experiment(pair, options, display)

        async def work() -> None:
            await experiment.load()
            tokenizer = experiment.loaded.tokenizer
            (codec,) = options.codecs
            chosen = zip(documents(), itertools.cycle(QUESTIONS), strict=False)
            for number, ((name, text), question) in enumerate(itertools.islice(chosen, prompts), 1):
                prompt = build_prompt(tokenizer, text, question, options.prompt_tokens)
                result, plain = await experiment.transfer(codec, prompt.tokens)
                compare([result], {codec: plain})
                samples.append(_sample(result, name, question, len(prompt.tokens)))
                display.note(
                    f"{number}/{prompts}: {result.accepted} of {result.drafted} drafts accepted, "
                    f"{'equal to' if result.matches_qfull else 'DIFFERENT FROM'} plain decoding on Q_full; {name}"
                )

        await pair.run(work())


def _sample(result: TransferResult, name: str, question: str, tokens: int) -> dict[str, Any]:
    """What is kept of one prompt."""
    first_rejected = next((at for at, piece in enumerate(result.pieces) if piece.kind == "retracted"), None)
    return {
        "document": name,
        "question": question,
        "prompt_tokens": tokens,
        "drafted": result.drafted,
        "accepted": result.accepted,
        "first_rejected": first_rejected,
        "matches_qfull": result.matches_qfull,
        "ttft_s": result.ttft_s,
        "tt32t_s": result.tt32t_s,
        "text": result.text,
    }


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all samples together."""
    drafted = [sample["drafted"] for sample in samples]
    accepted = [sample["accepted"] for sample in samples]
    shares = [sample["accepted"] / sample["drafted"] for sample in samples if sample["drafted"]]
    return {
        "prompts": len(samples),
        "matches_qfull": sum(sample["matches_qfull"] is True for sample in samples),
        "drafted_mean": statistics.fmean(drafted),
        "accepted_mean": statistics.fmean(accepted),
        "accept_rate": sum(accepted) / sum(drafted) if any(drafted) else None,
        "accept_rate_mean": statistics.fmean(shares) if shares else None,
        "all_accepted": sum(sample["drafted"] == sample["accepted"] for sample in samples),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m perf.acceptance", description=__doc__)
    parser.add_argument("--prompts", type=int, default=20, metavar="N", help="how many (default: %(default)s)")
    add_arguments(parser)
    parser.set_defaults(codecs=(DEFAULT,))
    limit_threads()
    arguments = parser.parse_args(argv)
    samples: list[dict[str, Any]] = []
    try:
        options = dataclasses.replace(options_from(arguments), temperature=0.0)
        run_loop(measure(options, arguments.prompts, samples))
    except LynxError as error:
        print(f"perf.acceptance: {error}", file=sys.stderr, flush=True)
        leave(1)
    except KeyboardInterrupt:
        leave(130)
    figures = summary(samples)
    print(json.dumps(figures, indent=2))
    if options.json is not None:
        data = {"machine": machine_facts(), "options": dataclasses.asdict(options), **figures, "samples": samples}
        options.json.write_text(json.dumps(data, indent=2, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
