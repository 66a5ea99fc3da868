"""`lynx-net prefill-server` and `lynx-net decode-server`. Importing this module imports neither aiohttp nor torch."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import TYPE_CHECKING

from lynx_net.errors import BackendMissingError, LynxError
from lynx_net.integrations.http.config import DecodeConfig, PrefillConfig, add_flags, read_config
from lynx_net.integrations.http.logs import set_up_logging

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine

__all__ = [
    "DECODE_DESCRIPTION",
    "PREFILL_DESCRIPTION",
    "add_decode_arguments",
    "add_prefill_arguments",
    "run_decode",
    "run_prefill",
]

PREFILL_DESCRIPTION = """\
Computes the KV cache of prompts and sends it over lynx_net to the decode server that asks for it.
docs/http.md has a walk through both servers. Settings come from a TOML file (--config) and from these flags."""

DECODE_DESCRIPTION = """\
Answers clients of OpenAI's API, /v1/completions and /v1/chat/completions, from caches that a prefill server computes;
decoding begins when the first stream of a cache is in. docs/http.md has a walk through both servers.
Settings come from a TOML file (--config) and from these flags."""

_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # two servers may share a host; torch's threads would fight for its cores
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def add_prefill_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the prefill server."""
    add_flags(parser, PrefillConfig)


def add_decode_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the decode server."""
    add_flags(parser, DecodeConfig)


def run_prefill(arguments: argparse.Namespace) -> int:
    """Run the prefill server until a signal; returns the exit code."""

    async def serve() -> None:
        from lynx_net.integrations.collector import freeze_loaded
        from lynx_net.integrations.http.prefill_app import PrefillServer
        from lynx_net.integrations.http.serving import run_service

        await run_service("prefill server", PrefillServer(config), freeze_loaded)

    try:
        config = read_config(PrefillConfig, arguments)
    except LynxError as error:
        return _fail("prefill-server", error)
    set_up_logging(config.log)
    return _run("prefill-server", serve)


def run_decode(arguments: argparse.Namespace) -> int:
    """Run the decode server until a signal; returns the exit code."""

    async def serve() -> None:
        from lynx_net.integrations.collector import freeze_loaded
        from lynx_net.integrations.http.decode_app import DecodeServer
        from lynx_net.integrations.http.serving import run_service

        await run_service("decode server", DecodeServer(config), freeze_loaded)

    try:
        config = read_config(DecodeConfig, arguments)
    except LynxError as error:
        return _fail("decode-server", error)
    set_up_logging(config.log)
    return _run("decode-server", serve)


def _run(command: str, serve: Callable[[], Coroutine[None, None, None]]) -> int:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        return _fail(command, BackendMissingError("aiohttp", "http"))
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve())
    except asyncio.CancelledError:
        logging.getLogger("lynx_net.http").warning("ended by a second signal; requests were given up")
        return 130
    except LynxError as error:
        return _fail(command, error)
    except OSError as error:
        return _fail(command, error)
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop takes less of the interpreter from the model's thread."""
    try:
        from uvloop import new_event_loop
    except ImportError:  # no uvloop for this platform
        return None
    return new_event_loop


def _fail(command: str, error: Exception) -> int:
    sys.stderr.write(f"lynx-net {command}: {error}\n")
    return 1
