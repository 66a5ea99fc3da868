"""Codecs of other projects on the caches of perf.report: each in an environment of its own, at its best settings.

The caches are handed over in a file and come back decoded, so errors are measured by the same code as for the codecs of
this project. What is not there, cannot be installed or fails is reported as such.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perf.peers.environments import ENVIRONMENTS, Environment, Failure, build, child_environment, last_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["CODECS", "PeerCodec", "run_codecs", "set_up"]

RAW_HEAD = 4
"""As for the codecs of the report."""

_RUN_LIMIT_S = 600
_SETUP = "python -m perf.report"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCodec:
    """One codec with its settings.

    Attributes:
        module: its function in `perf.peers.codec_child`.
        environment: what it runs in.
        bits: of a code; 0 for a lossless one.
        axis: along which values have a scale of their own, as its library counts; 0 where there is no choice.
        settings: the same in words.
    """

    module: str
    environment: Environment
    bits: int = 0
    axis: int = 0
    settings: str


QUANTO = Environment("quanto", ("optimum-quanto", "ninja"), inherits=True, setup=_SETUP)
HQQ = Environment("hqq", ("hqq", "termcolor", "einops"), inherits=True, settings={"DISABLE_CUDA": "1"}, setup=_SETUP)
TURBOQUANT = Environment("turboquant", ("turboquant", "numpy<2.4"), inherits=True, setup=_SETUP)
ZIPNN = Environment("zipnn", ("zipnn", "zstandard"), inherits=True, setup=_SETUP)

CODECS: Mapping[str, PeerCodec] = {
    "quanto, 4 bits": PeerCodec(module="quanto", environment=QUANTO, bits=4, axis=-1, settings="axis -1, groups of 64"),
    "quanto, 2 bits": PeerCodec(module="quanto", environment=QUANTO, bits=2, axis=-1, settings="axis -1, groups of 64"),
    "HQQ, 4 bits": PeerCodec(module="hqq", environment=HQQ, bits=4, axis=1, settings="axis 1, groups of 64"),
    "HQQ, 4 bits, axis 0": PeerCodec(module="hqq", environment=HQQ, bits=4, axis=0, settings="axis 0, groups of 64"),
    "turboquant, 4 bits": PeerCodec(
        module="turboquant", environment=TURBOQUANT, bits=4, settings="the form for least error"
    ),
    "turboquant, 3 bits": PeerCodec(
        module="turboquant", environment=TURBOQUANT, bits=3, settings="the form for least error"
    ),
    "zipnn": PeerCodec(module="zipnn", environment=ZIPNN, settings="bfloat16, lossless"),
}


def set_up(names: Iterable[str] = CODECS, folder: Path = ENVIRONMENTS) -> None:
    """Build the environments that are not there."""
    for one in {CODECS[name].environment.name: CODECS[name].environment for name in names}.values():
        try:
            one.python(folder)
        except Failure:
            build(one, folder)


def run_codecs(
    names: Sequence[str], keys: NDArray[np.uint16], values: NDArray[np.uint16], folder: Path = ENVIRONMENTS
) -> Iterator[tuple[str, dict[str, Any] | Failure, tuple[NDArray[np.float32], NDArray[np.float32]] | None]]:
    """Code a cache [layers, tokens, heads, size] with codecs of others, those of one environment in one process.

    Yields:
        Each name with `bits` a value and `encode_mvalues_s`, and the decoded keys and values; or with a Failure that
        says why there are none.
    """
    with tempfile.TemporaryDirectory() as where:
        source = Path(where) / "in.npz"
        np.savez(source, keys=keys, values=values, raw_head=RAW_HEAD)
        for environment in dict.fromkeys(CODECS[name].environment.name for name in names):
            held = [name for name in names if CODECS[name].environment.name == environment]
            try:
                told = _run(held, source, folder)
            except Failure as failure:
                yield from ((name, failure, None) for name in held)
                continue
            for name, one in zip(held, told, strict=True):
                if "failure" in one:
                    yield name, Failure(f"it failed: {one['failure']}"), None
                    continue
                with np.load(one.pop("out")) as decoded:
                    yield name, one, (decoded["keys"], decoded["values"])


def _run(names: Sequence[str], source: Path, folder: Path) -> list[dict[str, Any]]:
    """What the process says of each codec."""
    python = CODECS[names[0]].environment.python(folder)
    jobs = [f"{CODECS[name].module}:{CODECS[name].bits}:{CODECS[name].axis}" for name in names]
    try:
        done = subprocess.run(
            [python, "-m", "perf.peers.codec_child", str(source), *jobs],
            env=child_environment(_ONE_THREAD),
            capture_output=True,
            text=True,
            timeout=_RUN_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise Failure(f"nothing came in {_RUN_LIMIT_S} s") from error
    if done.returncode:
        raise Failure(f"it failed: {last_line(done.stderr)}")
    told: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return told
