"""The command line: `python -m lynx_net COMMAND`, or `lynx-net COMMAND`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from lynx_net.demo import cli as demo
from lynx_net.demo.options import add_arguments as add_demo_arguments
from lynx_net.doctor import cli as doctor
from lynx_net.integrations.http import cli as http
from lynx_net.store import cli as store

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    """The parser; every command sets `run`, a function from the parsed arguments to an exit code."""
    parser = argparse.ArgumentParser(prog="lynx_net", description="Moves KV caches so that decoding can start early.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo_parser = commands.add_parser(
        "demo",
        help="prefill in one process, decode in another, over four kinds of transfer",
        description="Prefills a prompt in one process, transfers its KV cache four times (bf16, int8, int4, lynx) to "
        "a second one that decodes from it, and compares times and texts.",
    )
    add_demo_arguments(demo_parser)
    demo_parser.set_defaults(run=demo.run)
    doctor_parser = commands.add_parser(
        "doctor",
        help="measure a link, and say why it is below its rate and what to change",
        description=doctor.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_arguments(doctor_parser)
    doctor_parser.set_defaults(run=doctor.run)
    store_parser = commands.add_parser(
        "store",
        help="keep encoded caches on a disk and serve them by prompt prefix",
        description=store.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    store.add_arguments(store_parser)
    store_parser.set_defaults(run=store.run)
    for name, text, description, add_arguments, run in (
        (
            "prefill-server",
            "compute KV caches and send them to a decode server",
            http.PREFILL_DESCRIPTION,
            http.add_prefill_arguments,
            http.run_prefill,
        ),
        (
            "decode-server",
            "answer clients of OpenAI's API from caches that are still arriving",
            http.DECODE_DESCRIPTION,
            http.add_decode_arguments,
            http.run_decode,
        ),
    ):
        server_parser = commands.add_parser(
            name, help=text, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add_arguments(server_parser)
        server_parser.set_defaults(run=run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = _parser().parse_args(argv)
    code: int = arguments.run(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
