"""The parts of the raw results, and how those of several runs become one: for the figures it is all the same.

Parts are `time` (transfers), `concurrent` (concurrent requests, codec speeds), `quality` (answers, drafts, errors: the
same on every machine), `peers` and `device` (transfers of a larger model on an accelerator). Each says on what machine
and by which command it was measured.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lynx_net.errors import LocalProtocolError
from lynx_net.wire.layout import CacheLayout
from perf.report import measure_concurrent, measure_device, predict
from perf.report.device import SHAPES
from perf.report.figure import only, samples
from perf.report.quality_part import FIELDS as QUALITY_FIELDS
from perf.report.series import SERIES
from perf.report.tasks import CHECKED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["FORMAT", "PARTS", "SCALING_MODEL", "TITLES", "dump", "load", "merged"]

FORMAT = 4
TITLES = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
SCALING_MODEL = "smollm2"

PARTS: Mapping[str, tuple[str, ...]] = {
    "time": ("transfers", "reference", "shapes"),
    "concurrent": ("speeds", "sends"),
    "quality": QUALITY_FIELDS,
    "peers": ("peers", "transports"),
    "device": ("device",),
}
"""Which fields of the raw results belong to which part."""

_DERIVED = ("device_transfers", "concurrent", "simulator")
"""Fields that follow from the others: they are not in the file."""

_EMPTY: Mapping[str, Any] = {
    **dict.fromkeys(("transfers", "sends", "peers", *QUALITY_FIELDS), ()),
    **{name: {} for name in ("reference", "shapes", "speeds", "device")},
    "transports": {"mib": [], "figures": {}},
}


def merged(found: Mapping[str, Mapping[str, Any]], earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The raw results of parts that were measured now and, for the others, of earlier results.

    Args:
        found: part -> its `fields` and what is told `about` it.
    """
    results: dict[str, Any] = {"format": FORMAT, "parts": dict(earlier["parts"]) if earlier else {}}
    for part, names in PARTS.items():
        source = found[part]["fields"] if part in found else (earlier or {})
        results |= {name: source.get(name, _EMPTY[name]) for name in names}
        if part in found:
            results["parts"][part] = found[part]["about"]
    about = results["parts"]
    first = about.get("time") or next(iter(about.values()))
    device = results["device"]
    on_device = {device["model"]: f"{SHAPES[device['model']].title}, {device['accelerator']}"} if device else {}
    models = {name: title for name, title in TITLES.items() if any(name in one["models"] for one in about.values())}
    results |= {
        "command": first["command"],
        "version": first["version"],
        "date": max(one["date"] for one in about.values()),
        "machine": first["machine"],
        "took_s": sum(one["took_s"] for one in about.values()),
        "settings": {
            "quick": any(one["scope"]["quick"] for one in about.values()),
            "scope": first["scope"],
            "models": models,
            "time_models": {name: TITLES[name] for name in results["reference"]} | on_device,
            "reference": {**results["reference"], **({device["model"]: device["reference"]} if device else {})},
            "checked_tasks": list(CHECKED),
            "scaling_model": SCALING_MODEL if SCALING_MODEL in models else next(iter(models), None),
            "codecs": {name: repr(series.subject) for name, series in SERIES.items()},
            "concurrent": {
                "requests": measure_concurrent.REQUESTS,
                "tokens": first["scope"]["text_tokens"],
                "rate_bps": measure_concurrent.RATE_BPS,
                "decode_token_s": measure_concurrent.DECODE_TOKEN_S,
            },
            "notes": list(dict.fromkeys(note for one in about.values() for note in one["notes"])),
        },
    }
    stands = _stands(results)
    results["device_transfers"] = measure_device.with_stands(device["transfers"], stands) if device else []
    results["concurrent"] = measure_concurrent.decoded(results["sends"], stands)
    results["simulator"] = _simulator(results, stands)
    return results


def dump(results: Mapping[str, Any], folder: Path) -> Path:
    """Write `results.json`, what was measured, into a folder, which is made if need be; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.json"
    kept = {name: value for name, value in results.items() if name not in _DERIVED}
    file.write_text(json.dumps(kept, separators=(",", ":")) + "\n", "utf-8")
    return file


def load(files: Sequence[Path]) -> dict[str, Any]:
    """The raw results of several runs as one; of a part that several have, the last one's are taken.

    What follows from what was measured, the simulator's figures among it, is as this version makes it.

    Raises:
        LocalProtocolError: a file is of another format.
    """
    several = [json.loads(file.read_text("utf-8")) for file in files]
    for file, one in zip(files, several, strict=True):
        if one["format"] != FORMAT:
            raise LocalProtocolError(f"{file} is of another version of this program, which has to draw it")
    found = {
        part: {"fields": {name: one[name] for name in names}, "about": one["parts"][part]}
        for one in several
        for part, names in PARTS.items()
        if part in one["parts"]
    }
    return merged(found)


def _stands(results: Mapping[str, Any]) -> dict[str, list[int]]:
    """How many drafts stand, of every recorded prompt of both models."""
    return {
        name: [int(one) for one in samples(only(results["drafts"], series=name), "accepted")]
        for name in ("lynx", "default")
    }


def _simulator(results: Mapping[str, Any], stands: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    layouts = {
        name: CacheLayout(
            layers=one["layers"], tokens=1, heads=one["heads"], key_size=one["size"], value_size=one["size"]
        )
        for name, one in results["shapes"].items()
    }
    transfers = [one for one in results["transfers"] if one["model"] in layouts]
    known = all(stands.values()) and results["speeds"]
    return {
        "checked": predict.checked(transfers, layouts),
        "predicted": predict.predicted(stands, next(iter(results["speeds"].values()))) if known else [],
        "assumptions": predict.assumptions(),
    }
