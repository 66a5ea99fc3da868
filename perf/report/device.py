"""The part of the evaluation that runs on an accelerator: a model of the shape of LLaMA 8B, random weights, for time.

All that knows of a device is here. `--device cuda` needs `lynx_gpu.DeviceCodec`, which codes pages where they lie; as
long as the library has none, asking for it is an error that says so.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lynx_net.errors import LynxError

if TYPE_CHECKING:
    from perf.report.scope import Progress, Scope

__all__ = ["DeviceMissingError", "check_device", "measure_device"]


class DeviceMissingError(LynxError):
    """The evaluation cannot run on the device that was asked for; the message names what is missing."""


def check_device(device: str) -> None:
    """Whether a run on this device can begin.

    Raises:
        DeviceMissingError: torch finds no such device, or the library has no codec for it.
    """
    if device == "cpu":
        return
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise DeviceMissingError("--device cuda: torch finds no CUDA device here")
    if not hasattr(importlib.import_module("lynx_gpu"), "DeviceCodec"):
        raise DeviceMissingError(
            "--device cuda: this version of the library has no lynx_gpu.DeviceCodec to code pages with"
        )


def measure_device(device: str, scope: Scope, progress: Progress) -> list[dict[str, Any]]:
    """Records of the raw results under `device`: none on the CPU.

    Raises:
        DeviceMissingError: as `check_device`, and as long as this part of the evaluation is not there.
    """
    check_device(device)
    if device == "cpu":
        return []
    del scope, progress
    raise DeviceMissingError("--device cuda: the evaluation has no part for lynx_gpu.DeviceCodec yet")
