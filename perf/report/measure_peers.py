"""Codecs and transports of other projects, each in an environment of its own (`perf/peers/`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from perf.peers import codecs, transport
from perf.peers.environments import Failure
from perf.quality_codecs import Subject, code
from perf.quality_measure import Attention
from perf.report.measure_quality import SOURCES as QUALITY_SOURCES
from perf.report.measure_quality import read_summary
from perf.report.series import RAW_HEAD, SERIES
from perf.report.tasks import make_task

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lynx_net.wire.layout import CacheLayout
    from perf.quality_capture import Capture
    from perf.report.cells import Cells
    from perf.report.corpus import Corpus
    from perf.report.scope import Progress, Scope

__all__ = ["SOURCES", "measure_codecs", "measure_transports"]

SOURCES = (*QUALITY_SOURCES, "codec/lynx_codec", "lynx_net/transport", "lynx_net/aio", "lynx_net/wire", "perf/peers")
"""What a figure of the peers depends on, beside the machine."""

_DEFAULT = SERIES["default"].subject
OURS: Mapping[str, tuple[Subject, int, str]] = {
    "default, first stream": (_DEFAULT, 1, "keys 4, values 3 bits, fine tokens"),
    "default, Q_full": (_DEFAULT, 2, "8 bits"),
    "lynx, first stream": (SERIES["lynx"].subject, 1, "4 bits"),
    "lynx, Q_full": (SERIES["lynx"].subject, 2, "8 bits"),
    "KIVI-style, 4 bits": (
        Subject("kivi", {"bits": 4, "axis": "channel"}, {"axis": "token"}, raw_head=RAW_HEAD), 1, "keys by channel"
    ),
}  # fmt: skip
"""This project's, on the same caches: subject, streams that are counted, settings in words."""

QUICK_MIB, FULL_MIB = (4,), (1, 4, 16, 64)
_REPEATS = 20


def measure_codecs(
    loaded: Any, name: str, corpus: Corpus, scope: Scope, cells: Cells, progress: Progress
) -> list[dict[str, Any]]:
    """Records under `peers`: bits and error on the caches of the first summaries. A full run installs
    what is missing.
    """
    if not scope.quick:
        progress.tell("peers: environments of codecs")
        codecs.set_up()
    records: list[dict[str, Any]] = []
    for number in range(scope.peer_caches):
        prompt = _Prompt(loaded, make_task(loaded.tokenizer, corpus, "summary", number, scope.text_tokens, 0).prompt)
        where = {"model": name, "number": number}
        base = {"what": "peer", "model": name, "prompt": list(prompt.ids)}
        for label, (subject, streams, settings) in OURS.items():
            found = cells.get(
                {**base, "ours": label, "subject": repr(subject)}, lambda p=prompt, s=subject, n=streams: _ours(p, s, n)
            )
            records.append({**where, "name": label, "settings": settings, "ours": True, **found})
        keys = {label: {**base, "peer": repr(codec)} for label, codec in codecs.CODECS.items()}
        found_of = {label: cells.held(key) for label, key in keys.items()}
        for label, one in _measured(prompt, [label for label, held in found_of.items() if held is None]):
            found_of[label] = one
            if "failure" not in one:
                cells.put(keys[label], one)
        records += [
            {**where, "name": label, "settings": codec.settings, "ours": False, **found_of[label]}
            for label, codec in codecs.CODECS.items()
        ]
    failed = {one["name"] for one in records if "failure" in one}
    progress.tell(f"{name}: codecs of others" + (f"; not measured: {', '.join(sorted(failed))}" if failed else ""))
    return [one for one in records if "failure" in one or one["name"] not in failed]


class _Prompt:
    """A summary, prefilled when something has to be measured on it, not before."""

    def __init__(self, loaded: Any, ids: Sequence[int]) -> None:
        self.loaded, self.ids = loaded, ids
        self._read: tuple[CacheLayout, Capture, Attention] | None = None

    def read(self) -> tuple[CacheLayout, Capture, Attention]:
        """The cache, and what reads it."""
        if self._read is None:
            layout, captured = read_summary(self.loaded, self.ids)
            self._read = (layout, captured, Attention(self.loaded.model, captured))
        return self._read


def _ours(prompt: _Prompt, subject: Subject, streams: int) -> dict[str, float]:
    layout, captured, attention = prompt.read()
    coded = code(subject, captured, layout)
    decoded = coded.anchor if streams == 1 else coded.full
    bits = 8 * sum(coded.stream_bytes[:streams]) / layout.values
    return {"bits": bits, "vnmse": attention.errors(decoded)["attn_err_paper"]}


def _measured(prompt: _Prompt, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Bits, speed and error of codecs of others, or why there are none."""
    if not names:
        return
    _, captured, attention = prompt.read()
    for name, found, decoded in codecs.run_codecs(names, captured.keys, captured.values):
        if isinstance(found, Failure) or decoded is None:
            yield name, {"failure": str(found)}
            continue
        same = np.array_equal(decoded[0], attention.keys) and np.array_equal(decoded[1], attention.values)
        yield name, {**found, "vnmse": 0.0 if same else attention.errors(decoded)["attn_err_paper"]}


def measure_transports(scope: Scope, cells: Cells, progress: Progress) -> dict[str, Any]:
    """The raw results under `transports`; a full run installs what is missing."""
    sizes = QUICK_MIB if scope.quick else FULL_MIB
    names = list(transport.SYSTEMS)

    def measured() -> dict[str, Any]:
        progress.tell("transports of others")
        if not scope.quick:
            transport.set_up([name for name in names if not _installed(name)])
        sizes_bytes = [mib * transport.MIB for mib in sizes]
        found = transport.measure(names, sizes_bytes, scope.peer_rounds, _REPEATS)
        return transport.figures(found["runs"], found["failures"], sizes_bytes)

    return {"mib": list(sizes), "figures": measured() if scope.quick else cells.get({"what": "transports"}, measured)}


def _installed(name: str) -> bool:
    try:
        transport.python_of(name)
    except Failure:
        return False
    return True
