"""What the two processes say to each other, beside the cache itself: a request, a start time, progress lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from lynx_net.demo.options import CODECS, MAX_CONTEXT, DemoError

__all__ = ["STARTED_S", "CacheRequest", "Progress"]

STARTED_S = "started_s"
"""Key of the offer's metadata: time.monotonic() of the prefill process when the transfer started."""


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """Ask the prefill process for the KV cache of a prompt.

    Attributes:
        codec: how it shall be sent.
        prompt: token ids. The cache is that of all but the last, which the decode process feeds
            itself, so that it has logits to begin with.
        first_token: True if the prefill process shall choose the first token and send it along.
        temperature, seed: how it chooses.
    """

    codec: str
    prompt: tuple[int, ...]
    first_token: bool = False
    temperature: float = 0.0
    seed: int = 0

    def to_meta(self) -> dict[str, Any]:
        """The request as metadata of a link request."""
        return {
            "codec": self.codec,
            "prompt": np.asarray(self.prompt, "<u4").tobytes(),
            "first_token": self.first_token,
            "temperature": self.temperature,
            "seed": self.seed,
        }

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> CacheRequest:
        """Read and check what the peer sent; raises DemoError where it makes no sense."""
        match meta:
            case {
                "codec": str(codec),
                "prompt": bytes(packed),
                "first_token": bool(first_token),
                "temperature": float(temperature),
                "seed": int(seed),
            } if codec in CODECS and len(packed) % 4 == 0 and 2 <= len(packed) // 4 <= MAX_CONTEXT:
                prompt = tuple(int(token) for token in np.frombuffer(packed, "<u4"))
                return cls(codec, prompt, first_token, temperature, seed)
        raise DemoError(f"the request for a cache is malformed; its fields are {', '.join(sorted(map(str, meta)))}")


@dataclass(frozen=True, slots=True)
class Progress:
    """One line on the standard output of the prefill process.

    Attributes:
        step: what it has begun to do, or has finished doing.
        took_s: how long a finished step took; None when the step begins.
    """

    step: str
    took_s: float | None = None

    def to_line(self) -> str:
        """The line, with its newline."""
        return json.dumps({"step": self.step, "took_s": self.took_s}) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Progress | None:
        """Read a line; None if it is no progress line (some library printed it)."""
        try:
            data = json.loads(line)
        except ValueError:
            return None
        match data:
            case {"step": str(step), "took_s": None | int() | float() as took_s}:
                return cls(step, took_s)
        return None
