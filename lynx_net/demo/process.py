"""Set-up and end that both processes of the demonstration share."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from lynx_codec import get_codec
from lynx_net.demo.options import CODECS, DEFAULT

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["import_libraries", "leave", "limit_threads", "run_loop", "warm_up_codecs"]

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # two processes share the host; torch's threads would fight for its cores
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",  # everything lies on this disk
    "TOKENIZERS_PARALLELISM": "false",
}


def limit_threads() -> None:
    """Set the environment that torch and transformers read when they are imported; call it before."""
    os.environ.update(_ENVIRONMENT)


def import_libraries() -> None:
    """Import torch and transformers: before the link is there, since this holds the interpreter for seconds."""
    for name in ("lynx_net.integrations.transformers", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)


def run_loop(work: Coroutine[None, None, None]) -> None:
    """`asyncio.run` on uvloop, whose event loop takes a third less of the interpreter from the model's thread."""
    try:
        from uvloop import new_event_loop
    except ImportError:  # no uvloop for this platform
        asyncio.run(work)
        return
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)


def warm_up_codecs() -> None:
    """Compile the kernels of every codec or read them from their cache, so that no transfer waits for it."""
    for name in CODECS:
        get_codec("nested" if name == DEFAULT else name).warm_up()


def leave(code: int) -> NoReturn:
    """End this process now, with what was printed flushed, without waiting for a worker thread's computation."""
    for stream in (sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            continue  # nobody reads it any more
    os._exit(code)
