"""Which tokens of a prompt attention leans on: measured, since the keys and values alone do not tell.

A few tokens anywhere in a prompt ("the", a full stop, a line break) may take more than half of the attention of a
layer, besides the first tokens and the last. `attention_scores` asks the last queries of the prompt itself; those
of the answer look at much the same tokens (docs/codec-study.md). `lynx_net.serdes.fine.fine_tokens` takes the
scores. AnTKV (section 4) scores tokens in a similar way.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lynx_net.errors import BackendMissingError

try:
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise BackendMissingError(f"what lynx_net.integrations.scores needs ({error.name})", "torch") from error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

__all__ = ["SCORE_QUERIES", "attention_scores", "recorded_queries"]

SCORE_QUERIES = 64
"""Queries that are asked, from the end of the prompt; 16 give nearly the same scores."""

_RECORDING = "lynx_net_recording"


@contextlib.contextmanager
def recorded_queries(model: PreTrainedModel, last: int) -> Iterator[list[torch.Tensor]]:
    """Collect the queries of the last positions of one forward pass, layer by layer: float32 [query heads, last, size].

    Rotary positions are applied. The model's attention function is put back at the end; one forward at a time.
    """
    queries: list[torch.Tensor] = []
    usual = model.config.get_text_config()._attn_implementation or "eager"
    attend = AttentionInterface()[usual]  # type: ignore[no-untyped-call]  # not annotated in transformers

    def record(module: torch.nn.Module, query: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        queries.append(query[0, :, -last:].float().clone())
        return attend(module, query, *arguments, **options)

    AttentionInterface.register(_RECORDING, record)
    masks = AttentionMaskInterface()  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(_RECORDING, masks[usual])
    model.set_attn_implementation(_RECORDING)
    try:
        yield queries
    finally:
        model.set_attn_implementation(usual)


def attention_scores(
    model: PreTrainedModel, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor]
) -> NDArray[np.float32]:
    """Share of the attention of the last queries that each token gets: float32 [layers, tokens], rows add up to 1.

    The mean over queries and heads. Layers with a sliding window give 0 to what lies outside it.

    Args:
        queries: per layer [query heads, last, size], of the last positions in `keys`.
        keys: per layer [tokens, heads, size], any float dtype.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(keys)
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    scores = []
    for layer, kind, query, key in zip(decoder.layers, kinds, queries, keys, strict=True):
        tokens, heads, size = key.shape
        asked = query.shape[1]
        group = query.shape[0] // heads
        at = torch.arange(tokens - asked, tokens, device=key.device)[:, None]
        positions = torch.arange(tokens, device=key.device)
        hidden = positions > at
        if kind == "sliding_attention":
            hidden |= positions <= at - config.sliding_window
        folded = query.reshape(heads, group * asked, size) * layer.self_attn.scaling
        products = folded @ key.float().permute(1, 2, 0)
        products.masked_fill_(hidden.repeat(group, 1), float("-inf"))
        scores.append(products.softmax(-1).mean((0, 1)))
    result: NDArray[np.float32] = torch.stack(scores).cpu().numpy()
    return result
