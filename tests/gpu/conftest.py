"""Let the tests of this folder import their helpers, in whatever way pytest imports the tests themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from emulated_cupy import emulated_cupy

from lynx_gpu import device_count

if TYPE_CHECKING:
    from collections.abc import Iterator


DEVICE = pytest.param("device", marks=[pytest.mark.gpu, pytest.mark.timeout(300)])
"""Eight streams in ten shapes are a hundred kernels, which each worker of a busy machine may have to compile."""


@pytest.fixture(params=["emulated", DEVICE])
def cupy(request: pytest.FixtureRequest) -> Iterator[Any]:
    """CuPy: of the emulator, and that of a device."""
    if request.param == "emulated":
        with emulated_cupy() as module:
            yield module
    elif device_count() == 0:
        pytest.skip("no CUDA device")
    else:
        yield pytest.importorskip("cupy")


@pytest.fixture
def reversed_cupy() -> Iterator[Any]:
    """The emulator with its threads running in another order: without races that makes no difference."""
    with emulated_cupy(1) as module:
        yield module
