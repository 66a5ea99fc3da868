"""One transfer and the text decoded from it; the same text decoded plainly, to compare with."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from lynx_net.demo.exchange import STARTED_S, CacheRequest
from lynx_net.demo.options import DEFAULT
from lynx_net.demo.process import warm_up_codecs
from lynx_net.demo.results import Agreement, Piece, TransferResult, agreement
from lynx_net.integrations import smollm2
from lynx_net.integrations.collector import freeze_loaded
from lynx_net.serdes.links import codecs_of
from lynx_net.speculation import Commit, Done, Draft, Retract, decode, decode_plain
from lynx_net.wire.frames import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lynx_net import IncomingTransfer, Offer, Readiness
    from lynx_net.demo.display import Display
    from lynx_net.demo.options import DemoOptions
    from lynx_net.demo.pair import Pair
    from lynx_net.integrations.smollm2 import LoadedModel
    from lynx_net.integrations.transformers import TransformersModel

__all__ = ["Experiment"]

T = TypeVar("T")

_POLL_S = 0.05
_WARM_UP_TOKENS = (16, 1, 1)


class Experiment:
    """The decode side: a loaded model that asks for caches and decodes from them.

    Blocking work runs in one thread of its own, so that the link's heartbeats go on meanwhile.
    """

    def __init__(self, pair: Pair, options: DemoOptions, display: Display) -> None:
        self._pair = pair
        self._options = options
        self._display = display
        self._thread = ThreadPoolExecutor(1, "decode")
        self._loaded: LoadedModel | None = None

    @property
    def loaded(self) -> LoadedModel:
        """The model; `load` comes first."""
        assert self._loaded is not None
        return self._loaded

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Token ids as text, special tokens included."""
        return str(self.loaded.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    async def load(self) -> None:
        """Load the model, compile what is compiled at first use, and touch both once."""
        self._loaded = await self._in_thread(lambda: _load(self._options.device))

    async def transfers(self, prompt: tuple[int, ...]) -> list[TransferResult]:
        """All transfers of the options, one after the other, compared with each other at the end."""
        results: list[TransferResult] = []
        plain: dict[str, list[int] | None] = {}
        for codec in self._options.codecs:
            result, plain[codec] = await self.transfer(codec, prompt)
            results.append(result)
        compare(results, plain)
        return results

    async def transfer(self, codec: str, prompt: tuple[int, ...]) -> tuple[TransferResult, list[int] | None]:
        """Transfer the cache of `prompt` and decode from it.

        Returns:
            The result, and the tokens of plain greedy decoding on the finished cache (None when
            tokens are sampled: two samplings need not agree).
        """
        from lynx_net.integrations.transformers import ProgressiveCache, TransformersModel, layout_of

        options = self._options
        layout = layout_of(self.loaded.model.config, len(prompt) - 1, dtype="float32")
        room = options.new_tokens + 80
        cache = await self._in_thread(lambda: ProgressiveCache(layout, room=room, device=options.device))
        model = TransformersModel(self.loaded.model, cache)
        send_first = options.first_token == "prefill"
        wanted = CacheRequest(codec, prompt, send_first, options.temperature, options.seed)
        transfer = await self._pair.request(wanted, cache)
        self._display.transfer(codec, _stream_totals(transfer.offer))
        watching = asyncio.create_task(self._show_bytes(transfer))
        try:
            result = await self._decode(codec, model, transfer, prompt)
            await transfer.complete
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        self._display.received(transfer.stats.stream_bytes)
        if options.temperature > 0:
            return result, None
        if result.residual_ready_s is None:
            return result, result.tokens  # one stream, hence no drafts: this was plain decoding
        first = transfer.offer.first_token
        return result, await self._in_thread(lambda: decode_again(model, prompt, options.new_tokens, first))

    async def _decode(
        self, codec: str, model: TransformersModel, transfer: IncomingTransfer, prompt: tuple[int, ...]
    ) -> TransferResult:
        """Follow the decode loop and time what it says."""
        options = self._options
        started_s: float = transfer.offer.meta[STARTED_S]
        pieces: list[Piece] = []
        done: Done | None = None
        events = decode(
            model,
            transfer,
            prompt_tail=prompt[-1:],
            max_new_tokens=options.new_tokens,
            temperature=options.temperature,
            seed=options.seed,
            executor=self._thread,
        )
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Done):
                    done = event
                else:
                    fold(pieces, event, started_s)
                    self._display.text(pieces, self.detokenize)
        assert done is not None
        await transfer.complete
        refined = transfer.timeline().residual_ready_s is not None
        return TransferResult(
            codec=codec,
            values=transfer.offer.layout.values,
            bytes_sent=transfer.stats.total_bytes + HEADER_BYTES * transfer.stats.segments,
            stream_bytes=list(transfer.stats.stream_bytes),
            tokens=list(done.tokens),
            token_times_s=[at_s - started_s for at_s in done.token_times_s],
            drafted=done.drafted,
            accepted=done.accepted,
            anchor_ready_s=_ready_at_s(transfer.anchor_ready) - started_s,
            residual_ready_s=_ready_at_s(transfer.residual_ready) - started_s if refined else None,
            verified_s=None if done.verified_at_s is None else done.verified_at_s - started_s,
            pieces=pieces,
            text=self.detokenize(done.tokens),
        )

    async def _show_bytes(self, transfer: IncomingTransfer) -> None:
        """Tell the display how far the streams are, until cancelled."""
        while True:
            self._display.received(transfer.stats.stream_bytes)
            await asyncio.sleep(_POLL_S)

    def _in_thread(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function)


def _ready_at_s(readiness: Readiness) -> float:
    """When something became ready that is ready."""
    assert readiness.at_s is not None
    return readiness.at_s


def compare(results: Sequence[TransferResult], plain: dict[str, list[int] | None]) -> None:
    """Fill in how every text agrees with plain decoding on Q_full and on the bf16 transfer."""
    for result in results:
        own = DEFAULT if result.codec == DEFAULT else "lynx"
        result.versus_qfull = _versus(result, plain.get(own))
        result.versus_bf16 = _versus(result, plain.get("bf16"))


def _versus(result: TransferResult, reference: list[int] | None) -> Agreement | None:
    return None if reference is None else agreement(result.tokens, reference)


def fold(pieces: list[Piece], event: Draft | Commit | Retract, started_s: float) -> None:
    """Bring the history of a text up to date with one event of the decode loop."""
    waiting = [piece for piece in pieces if piece.kind == "draft"]
    match event:
        case Draft():
            pieces.append(Piece("draft", event.token, event.at_s - started_s))
        case Commit():
            for piece in waiting[: event.accepted]:
                piece.kind = "accepted"
            fresh = event.tokens[event.accepted :]
            pieces += [Piece("commit", token, event.at_s - started_s) for token in fresh]
        case Retract():
            for piece in waiting[len(waiting) - event.count :]:
                piece.kind = "retracted"


def decode_again(
    model: TransformersModel, prompt: tuple[int, ...], new_tokens: int, first_token: int | None
) -> list[int]:
    """Plain greedy decoding, without drafts, on the cache of all of `prompt` but its last token."""
    model.truncate(len(prompt) - 1)
    given = [] if first_token is None else [first_token]
    if len(given) == new_tokens:
        return given
    return given + decode_plain(model, [prompt[-1], *given], max_new_tokens=new_tokens - len(given))


def _stream_totals(offer: Offer) -> dict[str, int]:
    """Bytes of every stream of a cache, if no page escapes to wide metadata; the most of an exact stream."""
    codecs = codecs_of(offer)
    per_page = [codecs.codec(page.layer, page.kind).stream_bytes(page.shape) for page in offer.layout.pages()]
    return {name: sum(counts[stream] for counts in per_page) for stream, name in enumerate(codecs.stream_names)}


def _load(device: str) -> LoadedModel:
    """Load the model and run it once at each size the decode loop starts with."""
    import torch

    from lynx_net.integrations.transformers import ProgressiveCache, TransformersModel, layout_of

    torch.set_num_threads(1)
    loaded = smollm2.load()
    loaded.model.to(device)  # type: ignore[arg-type]  # transformers annotates it wrongly
    warm_up_codecs()
    layout = layout_of(loaded.model.config, 256, dtype="float32")
    cache = ProgressiveCache(layout, room=sum(_WARM_UP_TOKENS), device=device)
    model = TransformersModel(loaded.model, cache)
    for count in _WARM_UP_TOKENS:
        model.forward([0] * count)
    freeze_loaded()
    return loaded
