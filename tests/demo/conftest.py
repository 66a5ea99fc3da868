"""Fixtures of the demonstration's tests."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Any:
    """The tokenizer of the converted SmolLM2."""
    from transformers import AutoTokenizer

    from lynx_net.integrations.smollm2 import ensure_model

    return AutoTokenizer.from_pretrained(ensure_model(), local_files_only=True)
