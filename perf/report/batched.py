"""One model on several caches of one length at once, several texts behind each: what makes many samples affordable.

Rows are caches, one for every codec; branches are texts behind them that do not see each other, such as the questions
about one document. All branches of all rows go through the model in one pass: weights are read once instead
of once a text. Attention is computed here, on buffers of this object; transformers' caches are not used.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from lynx_net.wire.layout import CacheLayout

__all__ = ["Batched", "batched"]

_NAME = "lynx_report_batched"
_CHUNK = 64
"""Positions whose scores are in memory at once: a vocabulary has up to 262,144 words."""


class Batched:
    """See the module. Made by `batched`, valid inside it; one forward at a time.

    Attributes:
        queries: of row 0, of the last pass: per layer [query heads, positions, size], rotary positions applied.
    """

    def __init__(self, model: Any, layout: CacheLayout, rows: int, room: int) -> None:
        config = model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * layout.layers
        self._windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        self._model, self._cap = model, getattr(config, "final_logit_softcapping", None)
        ends = model.generation_config.eos_token_id
        self._ends = [end for end in (ends if isinstance(ends, list) else [ends]) if end is not None]
        self.tokens, self.rows = layout.tokens, rows
        shape = (rows, layout.heads, layout.tokens + room)
        self._keys = [torch.zeros(*shape, layout.key_size) for _ in kinds]
        self._values = [torch.zeros(*shape, layout.value_size) for _ in kinds]
        self._positions = torch.cat([torch.arange(layout.tokens), torch.zeros(room, dtype=torch.long)])
        self._owners = torch.full((layout.tokens + room,), -1)
        self._start = self._stop = layout.tokens
        self._masks: dict[int | None, tuple[int, torch.Tensor]] = {}
        self.queries: list[torch.Tensor] = []

    def fill(self, row: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """Write a whole cache, [layers, tokens, heads, size]."""
        for held, source in ((self._keys, keys), (self._values, values)):
            for layer, one in enumerate(source):
                held[layer][row, :, : self.tokens] = torch.from_numpy(one).transpose(0, 1)

    def clear(self) -> None:
        """Forget what is behind the caches."""
        self._stop = self.tokens

    def behind(self, row: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Keys and values behind a cache, [layers, heads, positions, size]."""
        keys, values = (
            torch.stack([one[row, :, self.tokens : self._stop] for one in held]).numpy()
            for held in (self._keys, self._values)
        )
        return keys, values

    def forward(self, ids: Sequence[Sequence[int]], branches: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Append tokens to all rows; returns hidden states [rows, n, hidden] for `choose` and `losses`.

        Args:
            ids: [rows, n] tokens.
            branches: [n] the text that each belongs to; it sees the cache and what came before it in its text.
            positions: [n] its place, counted from the beginning of the cache.
        """
        self._start, self._stop = self._stop, self._stop + len(branches)
        if self._stop > len(self._owners):
            raise ValueError(f"no room for {len(branches)} tokens behind {self._start}")
        new = slice(self._start, self._stop)
        self._owners[new], self._positions[new] = torch.tensor(branches), torch.tensor(positions)
        self._masks, self.queries = {}, []
        with torch.inference_mode():
            found: torch.Tensor = self._model.get_decoder()(
                input_ids=torch.tensor(ids), position_ids=torch.tensor([list(positions)]), use_cache=False
            ).last_hidden_state
        return found

    def choose(self, hidden: torch.Tensor) -> list[list[int]]:
        """The best next token of each position, [rows, n]; tokens that end an answer are never chosen."""
        chosen: list[int] = []
        for scores in self._scores(hidden):
            scores[:, self._ends] = -torch.inf
            chosen += scores.argmax(-1).tolist()
        n = hidden.shape[1]
        return [chosen[at : at + n] for at in range(0, len(chosen), n)]

    def losses(self, hidden: torch.Tensor, following: Sequence[int]) -> list[list[float]]:
        """Nats that each row pays for each of the tokens that follow, [rows, n]; the whole vocabulary counts."""
        wanted = torch.split(torch.tensor(list(following)).repeat(len(hidden)), _CHUNK)
        paid: list[float] = []
        for scores, tokens in zip(self._scores(hidden), wanted, strict=True):
            paid += torch.nn.functional.cross_entropy(scores, tokens, reduction="none").tolist()
        n = hidden.shape[1]
        return [paid[at : at + n] for at in range(0, len(paid), n)]

    def _scores(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        head = self._model.get_output_embeddings()
        with torch.inference_mode():
            for part in torch.split(hidden.reshape(-1, hidden.shape[-1]), _CHUNK):
                scores = head(part)
                yield scores if self._cap is None else self._cap * torch.tanh(scores / self._cap)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """Attention of a layer: appends, then reads everything that may be seen."""
        layer = module.layer_idx
        self._keys[layer][:, :, self._start : self._stop] = key
        self._values[layer][:, :, self._start : self._stop] = value
        first, mask = self._mask(self._windows[layer])
        rows, query_heads, count, size = query.shape
        heads = key.shape[1]
        group = query_heads // heads
        self.queries.append(query[0])
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query.reshape(rows, heads, group * count, size),
            self._keys[layer][:, :, first : self._stop],
            self._values[layer][:, :, first : self._stop],
            attn_mask=mask.repeat(group, 1),
            scale=options.get("scaling"),
        )
        return mixed.reshape(rows, query_heads, count, -1).transpose(1, 2).contiguous(), None

    def _mask(self, window: int | None) -> tuple[int, torch.Tensor]:
        """The first position that anyone sees, and zeros and minus infinities [n, positions from there on]."""
        if window not in self._masks:
            at = self._positions[self._start : self._stop]
            first = 0 if window is None else max(int(at.min()) - window + 1, 0)
            keys = slice(min(first, self.tokens), self._stop)
            owners, mine = self._owners[keys], self._owners[self._start : self._stop]
            order = torch.arange(keys.start, self._stop)
            seen = (owners == -1) | (owners == mine[:, None])
            seen &= order <= torch.arange(self._start, self._stop)[:, None]
            if window is not None:
                seen &= self._positions[keys] > at[:, None] - window
            self._masks[window] = (keys.start, torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf))
        return self._masks[window]


@contextlib.contextmanager
def batched(model: Any, layout: CacheLayout, rows: int, room: int) -> Iterator[Batched]:
    """Let a float32 model on the CPU work on `rows` caches of this layout, with `room` positions behind each.

    The model's attention function is put back at the end.
    """
    made = Batched(model, layout, rows, room)
    usual = model.config.get_text_config()._attn_implementation or "eager"
    AttentionInterface.register(_NAME, made.attend)
    AttentionMaskInterface.register(_NAME, lambda *_args, **_options: None)
    model.set_attn_implementation(_NAME)
    try:
        yield made
    finally:
        model.set_attn_implementation(usual)
