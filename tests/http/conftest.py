"""The servers and their tiny model, shared by the tests of this folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "aiohttp", "openai")):
    collect_ignore_glob = ["test_*.py"]
else:
    import torch
    from httpkit import Reference, Walk

    from perf.tiny_model import make_model

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def reference(tiny_model: Path):
    return Reference(tiny_model)


@pytest.fixture(scope="session")
def walk(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    """The walk of docs/http.md, not yet begun."""
    made = Walk(tmp_path_factory.mktemp("walk"), tiny_model)
    yield made
    made.end()


@pytest.fixture(scope="session")
def pair(walk):
    """The two servers that the walk has started."""
    *starting, asking = walk.first.splitlines()
    for command in starting:
        walk.run(command)
    walk.asking = asking
    return walk
