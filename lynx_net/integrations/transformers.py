"""Hugging Face transformers: prefill a prompt, hold a cache that is refined in place, decode from it.

The three parts and who uses them:

    prefill           the prefill side: one forward pass, keys and values of every layer as numpy arrays
    ProgressiveCache  the decode side: what `allocate` returns; codec threads write the prompt region through
                      `view`, the model appends behind it
    TransformersModel the decode side: what `lynx_net.speculation.decode` drives

Importing this module imports torch and transformers (extra `torch`); `import lynx_net` does not.
Models on the CPU in float32, bfloat16 or float16 are supported, batch size 1, with one shape of keys
and values in all layers.

Grouped-query attention: where several query heads share one key head, transformers copies the keys
and values once per query head as soon as a mask is needed, which at 2,048 tokens of context costs more
than the attention itself. `TransformersModel` registers an attention function that folds the query
heads of a group into the rows of one matrix instead. The result differs only in rounding.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lynx_net.errors import BackendMissingError, LocalProtocolError
from lynx_net.integrations.scores import attention_scores, recorded_queries
from lynx_net.wire.layout import CacheLayout

try:
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, Cache
    from transformers.cache_utils import CacheLayerMixin
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    raise BackendMissingError(f"what lynx_net.integrations.transformers needs ({error.name})", "torch") from error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedConfig, PreTrainedModel

    from lynx_net.wire.layout import Kind

__all__ = ["Prefilled", "ProgressiveCache", "TransformersModel", "layout_of", "prefill"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_FOLDED = "lynx_net_folded"
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill leaves behind. The arrays are views of memory that the object keeps alive."""

    keys: list[Any]
    """Per layer [tokens, heads, size]; numpy arrays of float32, float16, or uint16 with the bits of bfloat16, or
    tensors on the model's device. Rotary positions are already applied, as the model caches them."""

    values: list[Any]
    """Per layer [tokens, heads, size], same dtype."""

    logits: NDArray[np.float32]
    """[vocab]: scores of the token that follows the prompt."""

    scores: NDArray[np.float32] | None = None
    """[layers, tokens]: share of the attention that each token gets (`attention_scores`), if it was asked for."""


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__ has no annotations
    """Keys and values of one layer in two preallocated tensors [1, heads, capacity, size]."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self, heads: int, capacity: int, key_size: int, value_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in transformers
        # Written to here and now, so that no page fault falls into the time between arrival and first token.
        self.all_keys = torch.empty(1, heads, capacity, key_size, dtype=dtype, device=device).zero_()
        self.all_values = torch.empty(1, heads, capacity, value_size, dtype=dtype, device=device).zero_()
        self.keys, self.values = self.all_keys, self.all_values
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is lazy here."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append positions; returns views of everything up to and including them."""
        start = self.length
        stop = start + key_states.shape[2]
        self.all_keys[:, :, start:stop] = key_states
        self.all_values[:, :, start:stop] = value_states
        self.length = stop
        return self.all_keys[:, :, :stop], self.all_values[:, :, :stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a mask must cover."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Positions held."""
        return self.length

    def get_max_length(self) -> int:
        """Positions there is room for."""
        return self.all_keys.shape[2]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions; given as a negative number, as transformers does."""
        self.length -= abs(tokens_to_remove)

    def reset(self) -> None:
        """Forget all positions."""
        self.length = 0


class ProgressiveCache(Cache):
    """A transformers cache whose prompt region other threads fill and refine in place.

    Every layer has preallocated tensors [1, heads, capacity, size]. The first `prompt_tokens` positions
    belong to the transfer: codec threads write them through `view` (this is the `KVTarget` protocol), first
    from anchors, then refined, while a model may be reading them. Positions behind are the model's alone.
    A new cache counts the prompt region as present: `length` starts at `prompt_tokens`.

    Args:
        layout: shape of the prompt's cache, for example `offer.layout`.
        room: positions that can be appended behind the prompt: new tokens plus drafts.
        dtype: of the model that will read the cache: "float32", "float16" or "bfloat16"; by
            default the layout's. Codecs write any of the three, whatever the sender's was.
        device: of that model: "cpu" or a CUDA device.
    """

    def __init__(
        self, layout: CacheLayout, *, room: int = 256, dtype: str | None = None, device: str | torch.device = "cpu"
    ) -> None:
        name = dtype or layout.dtype
        if name not in _DTYPES:
            raise LocalProtocolError(f"cache dtype must be one of {', '.join(_DTYPES)}, not {name!r}")
        self.prompt_tokens = layout.tokens
        self.capacity = layout.tokens + room
        self.dtype = name
        sizes = (layout.heads, self.capacity, layout.key_size, layout.value_size)
        self.device = torch.device(device)
        self._held = [_Layer(*sizes, _DTYPES[name], self.device) for _ in range(layout.layers)]
        super().__init__(layers=[*self._held])
        self.truncate(layout.tokens)

    @property
    def length(self) -> int:
        """Positions in the cache, the same in all layers between forward passes."""
        return self._held[0].length if self._held else self.prompt_tokens

    def view(self, layer: int, kind: Kind) -> Any:
        """Writable array [prompt_tokens, heads, size] over the prompt region of one layer.

        On the CPU a numpy array of float32, float16, or uint16 holding the bits of bfloat16; on a device a tensor. It
        aliases the cache and stays valid as long as the cache lives.
        """
        held = self._held[layer]
        tensor = (held.all_keys if kind == "key" else held.all_values)[0, :, : self.prompt_tokens]
        return _as_numpy(tensor) if self.device.type == "cpu" else tensor.transpose(0, 1)

    def set_prompt(self, tokens: int) -> None:
        """Let the prompt region be the first `tokens` positions, all of them present: less of a prompt is offered than
        there is room for. Only before a transfer writes to it; views that were given before are void.
        """
        self.truncate(tokens)
        self.prompt_tokens = tokens

    def truncate(self, length: int) -> None:
        """Forget positions at and behind `length`; their memory is reused by the next forward."""
        if not 0 <= length <= self.capacity:
            raise LocalProtocolError(f"cannot truncate to {length} positions: the cache has room for {self.capacity}")
        for layer in self._held:
            layer.length = length


class TransformersModel:
    """Drives a transformers model on a `ProgressiveCache`: the `DecodeModel` of the decode loop.

    Not for use by two threads at once. The same model may be given to several of these objects, one
    forward at a time.

    Args:
        model: a causal language model. Its attention function is replaced by the folding
            one of this module if it is `sdpa` and several query heads share a key head; the replacement
            computes the same, and stays.
        cache: the cache to read and extend; dtype and device must be the model's.
    """

    def __init__(self, model: PreTrainedModel, cache: ProgressiveCache) -> None:
        if model.dtype != _DTYPES[cache.dtype]:
            raise LocalProtocolError(f"the model computes in {model.dtype}, the cache holds {cache.dtype}")
        if model.device.type != cache.device.type or (cache.device.index or 0) != (model.device.index or 0):
            raise LocalProtocolError(f"the model is on {model.device}, the cache on {cache.device}")
        self.model = model
        self.cache = cache
        self._cache_argument = _cache_argument(model)
        _fold_attention(model)

    @property
    def length(self) -> int:
        """Positions in the cache now."""
        return self.cache.length

    def forward(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append `tokens` and return the scores of what follows each of them: float32 [len(tokens), vocab].

        Blocks for the whole pass. A pass that fails leaves the cache as it was.

        Raises:
            LocalProtocolError: no token, or more than the cache has room for.
        """
        return self._pass(tokens, len(tokens))

    def feed(self, tokens: Sequence[int]) -> None:
        """Append `tokens` whose scores nobody needs, such as a prompt but its last token; else as `forward`."""
        self._pass(tokens, 1)

    def _pass(self, tokens: Sequence[int], kept: int) -> NDArray[np.float32]:
        start = self.cache.length
        if not tokens:
            raise LocalProtocolError("a forward pass needs at least one token")
        if start + len(tokens) > self.cache.capacity:
            raise LocalProtocolError(
                f"no room for {len(tokens)} tokens: the cache holds {start} of {self.cache.capacity} positions"
            )
        inputs = torch.tensor([list(tokens)], dtype=torch.long, device=self.cache.device)
        done = False
        try:
            with torch.inference_mode():
                output = self.model(
                    input_ids=inputs, use_cache=True, logits_to_keep=kept, **{self._cache_argument: self.cache}
                )
                logits = output.logits[0].float().cpu().numpy()
            done = True
        finally:
            if not done:
                self.cache.truncate(start)
        scores: NDArray[np.float32] = logits
        return scores

    def truncate(self, length: int) -> None:
        """Forget positions at and behind `length`."""
        self.cache.truncate(length)


def layout_of(
    config: PreTrainedConfig,
    tokens: int,
    *,
    dtype: str | None = None,
    page_tokens: int = 256,
    raw_head: int = 4,
    raw_tail: int = 0,
) -> CacheLayout:
    """The layout of `tokens` positions of the cache of a model with this configuration.

    Args:
        config: `model.config`.
        tokens: positions that will be sent.
        dtype: of the cache at the sender; by default what the configuration says.
        page_tokens, raw_head, raw_tail: see `CacheLayout`.

    Raises:
        LocalProtocolError: the model keeps something other than keys and values of one shape in all layers.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - _PLAIN_LAYERS or getattr(text, "kv_lora_rank", None):
        raise LocalProtocolError(f"a model of type {text.model_type} does not keep plain keys and values in all layers")
    query_heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // query_heads
    return CacheLayout(
        layers=text.num_hidden_layers,
        tokens=tokens,
        heads=getattr(text, "num_key_value_heads", None) or query_heads,
        key_size=size,
        value_size=size,
        dtype=dtype or str(getattr(text, "dtype", None) or "float32").removeprefix("torch."),
        page_tokens=page_tokens,
        raw_head=raw_head,
        raw_tail=raw_tail,
    )


def prefill(model: PreTrainedModel, token_ids: Sequence[int], *, score_queries: int = 0) -> Prefilled:
    """Run the prompt through the model once and return its cache and the scores after its last token.

    For a transfer, send the first `len(token_ids) - 1` positions: the receiver feeds the last token
    itself. Blocks for the whole pass.

    Args:
        score_queries: if not 0, measure which tokens the attention of so many of the last positions leans on
            (`SCORE_QUERIES` is a good number); costs about a hundredth of the pass.

    Raises:
        LocalProtocolError: an empty prompt, or a model whose cache `layout_of` cannot describe.
    """
    if not token_ids:
        raise LocalProtocolError("a prompt needs at least one token")
    layout = layout_of(model.config, len(token_ids), dtype=str(model.dtype).removeprefix("torch."))
    cache = ProgressiveCache(layout, room=0, device=model.device)
    cache.truncate(0)
    inputs = torch.tensor([list(token_ids)], dtype=torch.long, device=model.device)
    recording: AbstractContextManager[list[torch.Tensor]] = (
        recorded_queries(model, score_queries) if score_queries else nullcontext([])
    )
    with torch.inference_mode(), recording as queries:
        output = model(input_ids=inputs, use_cache=True, logits_to_keep=1, **{_cache_argument(model): cache})
        logits: NDArray[np.float32] = output.logits[0, -1].float().cpu().numpy()
        tensors = [layer.keys[0].transpose(0, 1) for layer in cache.layers]  # type: ignore[index,union-attr]
        scores = attention_scores(model, queries, tensors) if score_queries else None
    layers = range(layout.layers)
    return Prefilled([cache.view(i, "key") for i in layers], [cache.view(i, "value") for i in layers], logits, scores)


def _as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """[heads, tokens, size] as a numpy array [tokens, heads, size] on the same memory."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: NDArray[Any] = tensor.numpy().transpose(1, 0, 2)
    return array


def _cache_argument(model: PreTrainedModel) -> str:
    """What `forward` calls its cache: transformers renamed the argument in 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _fold_attention(model: PreTrainedModel) -> None:
    """Let a model with grouped query heads use the folding attention function."""
    config = model.config.get_text_config()
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if model.config._attn_implementation == "sdpa" and key_heads != config.num_attention_heads:
        AttentionInterface.register(_FOLDED, _folded_attention)
        AttentionMaskInterface.register(_FOLDED, _additive_mask)
        model.set_attn_implementation(_FOLDED)


def _additive_mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor | None:
    """The mask of `sdpa` as zeros and minus infinities: converted once a pass instead of once a layer."""
    allowed = sdpa_mask(*args, dtype=dtype, **kwargs)
    if allowed is None:
        return None
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def _folded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for [1, query heads, q, size] on [1, key heads, n, size] without copying keys or values.

    Without a mask and with several queries (a prompt from its start) transformers' own function is as
    good, and it also takes what this one does not know (biases, caps, masks that differ by head).
    """
    batch, query_heads, queries, size = query.shape
    key_heads = key.shape[1]
    group = query_heads // key_heads
    plain = all(kwargs.get(name) is None for name in ("position_bias", "softcap", "s_aux"))
    causal_skip = attention_mask is None and queries > 1
    if not plain or causal_skip or dropout or (attention_mask is not None and attention_mask.shape[1] != 1):
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    folded = query.reshape(batch, key_heads, group * queries, size)
    mask = attention_mask.repeat(1, 1, group, 1) if attention_mask is not None and group > 1 else attention_mask
    mixed = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return mixed.reshape(batch, query_heads, queries, -1).transpose(1, 2).contiguous(), None
