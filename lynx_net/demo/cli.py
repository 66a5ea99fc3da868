"""The demonstration as a command: from its options to its exit code."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lynx_net.demo.display import open_display
from lynx_net.demo.options import DemoError, options_from
from lynx_net.demo.process import leave, limit_threads, run_loop
from lynx_net.demo.report import report_lines
from lynx_net.demo.results import machine_facts
from lynx_net.errors import LynxError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from lynx_net.demo.display import Display
    from lynx_net.demo.exchange import Progress
    from lynx_net.demo.options import DemoOptions
    from lynx_net.demo.prompts import Prompt
    from lynx_net.demo.results import TransferResult

__all__ = ["run", "write_json"]


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration; returns the exit code: 0, 1 after an error, 130 after Ctrl-C, 143 after SIGTERM."""
    limit_threads()
    try:
        options = options_from(arguments)
    except DemoError as error:
        return _failed(str(error))
    display = open_display()
    try:
        run_loop(_main(options, display))
    except LynxError as error:
        display.close()
        leave(_failed(str(error)))
    except OSError as error:
        display.close()
        leave(_failed(f"{error.filename or 'operating system'}: {error.strerror or error}"))
    except asyncio.CancelledError:
        display.close()
        _failed("ended by SIGTERM")
        leave(128 + signal.SIGTERM)
    except KeyboardInterrupt:
        display.close()
        _failed("interrupted")
        leave(128 + signal.SIGINT)
    return 0


def _failed(sentence: str) -> int:
    """Say why the demonstration ends; on the real standard error, since libraries replace sys.stderr for moments."""
    print(f"lynx_net demo: {sentence}", file=sys.__stderr__, flush=True)
    return 1


async def _main(options: DemoOptions, display: Display) -> None:
    """The whole demonstration."""
    from lynx_net.demo.experiment import Experiment
    from lynx_net.demo.pair import Pair
    from lynx_net.demo.prompts import build_prompt, source_for
    from lynx_net.integrations import smollm2

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    document, question = source_for(options)
    display.step("checking the model (converted on the first run)")
    await asyncio.to_thread(smollm2.ensure_model)
    display.step("starting the prefill process")
    async with Pair.open(options, lambda progress: _show(progress, display)) as pair:
        experiment = Experiment(pair, options, display)

        async def work() -> tuple[Prompt, list[TransferResult]]:
            display.step("loading the model")
            await experiment.load()
            prompt = build_prompt(experiment.loaded.tokenizer, document, question, options.prompt_tokens)
            display.note(_describe(prompt, options))
            return prompt, await experiment.transfers(prompt.tokens)

        prompt, results = await pair.run(work())
    display.report(report_lines(results, options, experiment.detokenize))
    if options.json is not None:
        write_json(options.json, options, prompt, results)
        display.note(f"results written to {options.json}")
    display.close()


def write_json(file: Path, options: DemoOptions, prompt: Prompt, results: Sequence[TransferResult]) -> None:
    """Write everything that was measured, with the machine and the options."""
    data: dict[str, Any] = {
        "machine": machine_facts(),
        "options": asdict(options),
        "prompt": {"tokens": len(prompt.tokens), "document_tokens": prompt.document_tokens, "cut": prompt.cut},
        "transfers": [result.to_json() for result in results],
    }
    file.write_text(json.dumps(data, indent=2, default=str) + "\n")


def _describe(prompt: Prompt, options: DemoOptions) -> str:
    """One line about the prompt and the link."""
    short = (
        ""
        if len(prompt.tokens) == options.prompt_tokens
        else f" (the document is shorter than {options.prompt_tokens})"
    )
    return (
        f"prompt: {len(prompt.tokens)} tokens, {prompt.document_tokens} of them from the document{short}; "
        f"link: {options.rate} over {options.lanes} lane{'s' if options.lanes > 1 else ''}"
    )


def _show(progress: Progress, display: Display) -> None:
    """Show what the prefill process tells."""
    if progress.took_s is None:
        display.step(f"prefill process: {progress.step}")
    else:
        display.note(f"prefill process: {progress.step} took {progress.took_s:.1f} s")
