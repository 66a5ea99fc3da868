"""A CUDA of the mind for the tests of device memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fakecuda import FakeCuda

import lynx_net.serdes.device

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Stands in for CuPy and the kernels."""
    fake: Any = FakeCuda()
    monkeypatch.setattr(lynx_net.serdes.device, "BACKEND", fake)
    yield fake
    fake.close()
