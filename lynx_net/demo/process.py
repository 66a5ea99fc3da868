"""Set-up and end that both processes of the demonstration share."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import numpy as np

from lynx_codec import get_codec
from lynx_codec.base import PageShape
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
    """Encode and decode one small page with every codec, so that no transfer waits for a compiler."""
    shape = PageShape(tokens=64, heads=1, head_size=64, raw_head=4, raw_tail=8)
    page = np.linspace(-1, 1, shape.values, dtype=np.float32).reshape(shape.array_shape)
    for name in CODECS:
        codec = get_codec(name)
        outs = [memoryview(bytearray(count)) for count in codec.stream_bytes(shape, wide=True)]
        streams = [out[:count] for out, count in zip(outs, codec.encode(page, shape, outs), strict=True)]
        for prefix in range(1, len(streams) + 1):
            codec.decode(streams[:prefix], shape, np.empty_like(page))


def leave(code: int) -> NoReturn:
    """End this process now, with what was printed flushed, without waiting for a worker thread's computation."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue  # nobody reads it any more
    os._exit(code)
