"""Models for the tests of this folder: a tiny random one, and the real one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "speculation"))

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore = ["test_transformers.py"]
else:
    import torch
    import transformers

    torch.set_num_threads(1)


@pytest.fixture
def tiny():
    """Make a Llama of random weights: 3 layers, 6 query heads on 2 key heads of 8."""

    def make(dtype="float32", **kwargs):
        config = transformers.LlamaConfig(
            vocab_size=60,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=6,
            eos_token_id=None,
            **{"num_key_value_heads": 2, **kwargs},
        )
        torch.manual_seed(5)
        model = transformers.LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    parameter.normal_(std=0.3)
        return model.to(getattr(torch, dtype)).train(False)

    return make


@pytest.fixture(scope="session")
def smollm():
    """The real model, converted at its first use on a machine."""
    from lynx_net.integrations import smollm2

    return smollm2.load()
