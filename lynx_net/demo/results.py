"""What one transfer of the demonstration led to, and how two texts compare."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Agreement", "Piece", "TransferResult", "agreement", "machine_facts"]

PieceKind = Literal["commit", "accepted", "draft", "retracted"]


@dataclass(slots=True)
class Piece:
    """One token in the history of a text.

    Attributes:
        kind: "draft" while nobody knows; then "accepted" or "retracted"; "commit" for a token that
            never was a draft.
        token: its id.
        at_s: when it was decoded, on the clock of `TransferResult`.
    """

    kind: PieceKind
    token: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two texts compared position by position.

    Attributes:
        equal: positions with the same token.
        compared: positions in both texts.
        first_difference: the first position that differs, counted from 0; None if none does.
    """

    equal: int
    compared: int
    first_difference: int | None

    @property
    def share(self) -> float:
        """Equal positions divided by compared positions."""
        return self.equal / self.compared if self.compared else 1.0


@dataclass(slots=True)
class TransferResult:
    """One transfer and the text decoded from it.

    Times are seconds from the moment the prefill process started the transfer, with the prefill
    done; both processes read the same steady clock of the host.

    Attributes:
        codec: its name.
        values: numbers in the cache.
        bytes_sent: everything on the wire for this cache: all streams with their metadata, page headers and raw
            tokens, and the header of every segment.
        stream_bytes: bytes of each stream, without the headers of the segments.
        tokens: the valid tokens, in order.
        token_times_s: when each of them was decoded (a draft counts from its decoding if it was
            accepted later).
        drafted, accepted: drafts made and drafts kept.
        anchor_ready_s, residual_ready_s: when the streams were usable, None for a stream that the codec lacks.
        verified_s: when the drafts had been checked, None without drafts.
        pieces: drafts, commits and retractions in order.
        text: the valid tokens as text.
        versus_qfull: compared with plain decoding on Q_full, the cache that lynx refined; None if
            lynx did not run, or if tokens were sampled (two samplings need not agree).
        versus_bf16: compared with plain decoding on the bf16 transfer; None as above.
    """

    codec: str
    values: int
    bytes_sent: int
    stream_bytes: list[int]
    tokens: list[int]
    token_times_s: list[float]
    drafted: int
    accepted: int
    anchor_ready_s: float
    residual_ready_s: float | None
    verified_s: float | None
    pieces: list[Piece] = field(default_factory=list)
    text: str = ""
    versus_qfull: Agreement | None = None
    versus_bf16: Agreement | None = None

    @property
    def bits_per_value(self) -> float:
        """Bits sent for each number of the cache, everything counted."""
        return self.bytes_sent * 8 / self.values

    @property
    def ttft_s(self) -> float:
        """Time to the first valid token."""
        return self.token_times_s[0]

    @property
    def tt32t_s(self) -> float | None:
        """Time to the 32nd valid token, None if fewer were decoded."""
        return max(self.token_times_s[:32]) if len(self.token_times_s) >= 32 else None

    @property
    def matches_qfull(self) -> bool | None:
        """True if the tokens are exactly those of plain decoding on Q_full."""
        return None if self.versus_qfull is None else self.versus_qfull.first_difference is None

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        data = asdict(self)
        for name, compared in (("qfull", self.versus_qfull), ("bf16", self.versus_bf16)):
            del data[f"versus_{name}"]
            data[f"agreement_{name}"] = compared and compared.share
            data[f"first_difference_{name}"] = compared and compared.first_difference
        computed = ("bits_per_value", "ttft_s", "tt32t_s", "matches_qfull")
        return data | {name: getattr(self, name) for name in computed}


def agreement(tokens: Sequence[int], reference: Sequence[int]) -> Agreement:
    """Compare two texts position by position, over the length of the shorter one."""
    pairs = list(zip(tokens, reference, strict=False))
    first = next((position for position, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    return Agreement(sum(ours == theirs for ours, theirs in pairs), len(pairs), first)


def machine_facts(packages: Sequence[str] = ("numpy", "torch", "transformers")) -> dict[str, Any]:
    """Processor, cores, system and versions, for a file of results."""
    from importlib.metadata import version

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "congestion_control": _congestion_control(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def _congestion_control() -> str:
    """Of TCP connections that ask for none; "" on systems other than Linux."""
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _processor() -> str:
    """Name of the processor as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
