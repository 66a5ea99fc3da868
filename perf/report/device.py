"""The part of the evaluation that runs on an accelerator: a model of the shape of LLaMA 8B, random weights, for time.

What it writes is noise, and drafts on noise seldom stand; how long a token, a pass and a transfer take does not
depend on that. Both processes of a pair have a model of their own, so the device needs twice its memory (32 GB for
16-bit weights).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_net.errors import LynxError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = ["SHAPES", "DeviceMissingError", "Shape", "Shaped", "check_device", "load_shape", "noise_prompt"]


class DeviceMissingError(LynxError):
    """The evaluation cannot run on the device that was asked for; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model by its sizes, as transformers' LlamaConfig calls them."""

    title: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    vocabulary: int


SHAPES: MutableMapping[str, Shape] = {
    "llama8b": Shape("LLaMA 3.1 8B, random weights", 32, 4096, 14336, 32, 8, 128256),
    "tiny": Shape("a model of two layers, random weights", 2, 256, 512, 4, 2, 1000),
}
"""Models by their sizes: the one that is timed on a device, and one to try that with."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """What `load_shape` returns: like a `LoadedModel`, without a tokenizer."""

    model: Any
    tokenizer: None = None


def check_device(device: str) -> None:
    """Whether a run on this device can begin.

    Raises:
        DeviceMissingError: torch finds no such device, or the library cannot code pages on it.
    """
    if device == "cpu":
        return
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise DeviceMissingError("--device cuda: torch finds no CUDA device here")
    gpu: Any = importlib.import_module("lynx_gpu")
    if not hasattr(gpu, "DeviceCodec"):
        raise DeviceMissingError("--device cuda: this version of the library has no lynx_gpu.DeviceCodec to code with")
    if not gpu.device_count():
        raise DeviceMissingError("--device cuda: CuPy, which lynx_gpu needs, finds no device (extra gpu)")


def load_shape(name: str, device: str) -> Shaped:
    """A model of this shape in bfloat16, weights from a seed. Blocks for seconds."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    shape = SHAPES[name]
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=1 << 17,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return Shaped(model.train(False))


def noise_prompt(name: str, number: int, tokens: int) -> tuple[int, ...]:
    """`tokens` + 1 tokens from a seed: there is no text for a model that reads nothing."""
    drawn = np.random.default_rng([number, tokens]).integers(0, SHAPES[name].vocabulary, tokens + 1)
    return tuple(int(one) for one in drawn)
