"""Set-up and end that both processes of the demonstration share."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from lynx_codec import get_codec
from lynx_net.demo.options import CODECS

__all__ = ["leave", "limit_threads", "warm_up_codecs"]

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # two processes share the host; torch's threads would fight for its cores
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",  # everything lies on this disk
    "TOKENIZERS_PARALLELISM": "false",
}


def limit_threads() -> None:
    """Set the environment that torch and transformers read when they are imported; call it before."""
    os.environ.update(_ENVIRONMENT)


def warm_up_codecs() -> None:
    """Compile the kernels of every codec or read them from their cache, so that no transfer waits for it."""
    for name in CODECS:
        get_codec(name).warm_up()


def leave(code: int) -> NoReturn:
    """End this process now, with what was printed flushed, without waiting for a worker thread's computation."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue  # nobody reads it any more
    os._exit(code)
