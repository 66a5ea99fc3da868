"""What the demonstration can be told on its command line, checked before anything is started."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lynx_gpu import device_count
from lynx_net.errors import LynxError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CODECS", "DemoError", "DemoOptions", "add_arguments", "options_from"]

DEFAULT = "default"
"""The codec of a transfer for which none is asked: fewer bits in the anchor, and fine tokens where attention leans."""

CODECS = ("bf16", "int8", "int4", "lynx", DEFAULT)
"""The four transfers of the paper's table 1, in its order, and this library's own."""

RAW_TAIL = 64
"""Last tokens that travel raw in the four transfers of the paper, for want of fine ones."""

MAX_CONTEXT = 8192
"""Positions SmolLM2 was trained for."""

MIN_PROMPT_TOKENS = 128
"""The chat template and a question take about 60 tokens, and 4 + 64 tokens travel raw."""


class DemoError(LynxError):
    """The demonstration cannot go on; the message is one sentence for its user."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the demonstration.

    Attributes:
        prompt_file: the document, None for the one that comes with the package.
        question: asked about the document, None for the default question.
        prompt_tokens: length of the prompt, chat template and question included.
        rate: limit of the link in the library's notation, e.g. "100Mbit".
        new_tokens: tokens to decode from each transfer.
        first_token: who computes the first token: the decode process from the transferred cache, as
            in the paper, or the prefill process, which sends it exactly with the offer.
        temperature: 0 for greedy decoding.
        seed: of the sampling.
        json: where to write the results, None for nowhere.
        lanes: connections of the link.
        codecs: transfers to run, in this order.
        timeout_s: silence after which a peer counts as hung.
        device: where both processes have model and cache.
    """

    prompt_file: Path | None = None
    question: str | None = None
    prompt_tokens: int = 2048
    rate: str = "100Mbit"
    new_tokens: int = 32
    first_token: Literal["decode", "prefill"] = "decode"
    temperature: float = 0.0
    seed: int = 0
    json: Path | None = None
    lanes: int = 1
    codecs: tuple[str, ...] = CODECS
    timeout_s: float = 5.0
    device: Literal["cpu", "cuda"] = "cpu"


def _bounded(kind: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    """An argparse type: a number of this kind from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high:  # also refuses NaN
            raise argparse.ArgumentTypeError(f"{text} is not between {low:g} and {high:g}")
        return value

    return parse


def _rate(text: str) -> str:
    """An argparse type: a rate the library understands, kept as it was written."""
    from lynx_net.wire.pacing import parse_rate

    try:
        parse_rate(text)
    except LynxError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _codecs(text: str) -> tuple[str, ...]:
    """An argparse type: names of transfers, separated by commas."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in CODECS]:
        raise argparse.ArgumentTypeError(f"unknown codec {unknown[0]!r}; known are {', '.join(CODECS)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the demonstration to `parser`."""
    default = DemoOptions()
    add = parser.add_argument
    add("--prompt-file", type=Path, metavar="FILE", help="document of the prompt (default: one about this project)")
    add("--question", metavar="TEXT", help="what is asked about the document")
    add(
        "--prompt-tokens",
        type=_bounded(int, MIN_PROMPT_TOKENS, MAX_CONTEXT),
        default=default.prompt_tokens,
        metavar="N",
        help="length of the prompt; the document is cut to fit (default: %(default)s)",
    )
    add("--rate", type=_rate, default=default.rate, help="limit of the link, e.g. 50Mbit (default: %(default)s)")
    add(
        "--new-tokens",
        type=_bounded(int, 1, 1024),
        default=default.new_tokens,
        metavar="N",
        help="tokens to decode from each transfer; stop tokens do not end the text (default: %(default)s)",
    )
    add(
        "--first-token",
        choices=("decode", "prefill"),
        default=default.first_token,
        help="who computes the first token; prefill sends it exactly with the offer (default: %(default)s)",
    )
    add(
        "--temperature",
        type=_bounded(float, 0, 10),
        default=default.temperature,
        metavar="T",
        help="0 decodes greedily (default: %(default)s)",
    )
    add("--seed", type=_bounded(int, 0, 2**32 - 1), default=default.seed, help="of the sampling (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    add("--lanes", type=_bounded(int, 1, 16), default=default.lanes, help="connections (default: %(default)s)")
    add(
        "--codecs",
        type=_codecs,
        default=default.codecs,
        metavar="NAMES",
        help=f"transfers to run (default: {','.join(CODECS)})",
    )
    add(
        "--timeout",
        type=_bounded(float, 1, 600),
        default=default.timeout_s,
        dest="timeout_s",
        metavar="SECONDS",
        help="silence after which the other process counts as hung (default: %(default)s)",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        default=default.device,
        help="where both processes have the model and the cache (default: %(default)s)",
    )


def options_from(arguments: argparse.Namespace) -> DemoOptions:
    """The options out of parsed arguments, checked against each other.

    Raises:
        DemoError: the options do not fit together, or a file cannot be used.
    """
    options = DemoOptions(**{name: getattr(arguments, name) for name in DemoOptions.__dataclass_fields__})
    if options.prompt_tokens + options.new_tokens > MAX_CONTEXT:
        raise DemoError(f"the model holds {MAX_CONTEXT} positions: fewer prompt tokens or fewer new tokens, please")
    if options.device == "cuda" and not device_count():
        raise DemoError("--device cuda: there is no CUDA device here, or CuPy is not installed")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise DemoError(f"--json: there is no folder {options.json.absolute().parent}")
    return options
