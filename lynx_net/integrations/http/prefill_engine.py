"""One cache at the prefill server: compute it, send it, let go of it."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import json
import time
from typing import TYPE_CHECKING, Any

import lynx_net
from lynx_codec import get_codec
from lynx_codec.plan import DEFAULT_PLAN
from lynx_net.aio.offload import run_or_withdraw
from lynx_net.errors import CodecError
from lynx_net.integrations.http.config import ConfigError, read_key, tls_of
from lynx_net.integrations.http.errors import bad_request
from lynx_net.integrations.http.links import LinkPool
from lynx_net.integrations.http.models import ServedModel, load_model
from lynx_net.integrations.http.steps import StepThread
from lynx_net.integrations.http.store_link import StoreLink
from lynx_net.integrations.http.storing import Stored, StoreWriter
from lynx_net.integrations.http.wire import PREFILL_QUEUE_S, PREFILL_S, CacheWanted, Delivered
from lynx_net.integrations.scores import SCORE_QUERIES
from lynx_net.integrations.transformers import Prefilled, prefill

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from lynx_net.integrations.http.config import PrefillConfig
    from lynx_net.integrations.http.metrics import ServerMetrics

__all__ = ["PrefillEngine"]


class PrefillEngine:
    """The model, its thread, and the links to the decode servers. Use `PrefillEngine.open`."""

    def __init__(self, config: PrefillConfig, model: ServedModel, steps: StepThread, links: LinkPool) -> None:
        self.model = model
        self.steps = steps
        self._targets = config.link.targets
        self._coding = _coding(config)
        self._links = links
        self._writer: StoreWriter | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, config: PrefillConfig, metrics: ServerMetrics) -> AsyncIterator[PrefillEngine]:
        """Load the model and be ready to compute.

        Raises:
            BackendMissingError: see `load_model`.
            ConfigError: the codec is unknown, or a key cannot be read.
        """
        link = config.link
        links = LinkPool(
            rate=link.rate,
            lanes=link.lanes,
            config=lynx_net.LinkConfig(deadline_s=link.deadline_s),
            tls=tls_of(link),
            key=read_key(link.key_file),
            observers=[metrics.links],
        )
        model = await asyncio.to_thread(load_model, config.model, config.limits.context_tokens)
        metrics.steps = steps = StepThread()
        try:
            engine = cls(config, model, steps, links)
            await asyncio.wrap_future(steps.lane().submit(engine.warm_up))
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(links.close)
                if config.store.url is not None:
                    store = StoreLink(config.store, rate=config.store.rate, observer=metrics.links)
                    metrics.store = await stack.enter_async_context(store.open())
                    writer = StoreWriter(store, model.fingerprint, engine._coding, config.store.waiting, metrics)
                    engine._writer = metrics.writer = await stack.enter_async_context(writer.open())
                yield engine
        finally:
            await asyncio.to_thread(steps.close)

    def warm_up(self) -> None:
        """Once through what is compiled or read at its first use. Blocks."""
        codec = self._coding["codec"]
        params = self._coding.get("codec_params", {})
        get_codec(codec if isinstance(codec, str) and codec != "auto" else "nested", **params).warm_up()
        self._compute([0, 0, 0, 0])

    def check(self, wanted: CacheWanted) -> None:
        """Refuse what cannot be served.

        Raises:
            ApiError: another model, tokens that it does not have, or an address that is not in `link.targets`.
        """
        if wanted.model != self.model.fingerprint:
            raise bad_request(f"this server has another model, {self.model.name}", "model", "other_model", 409)
        if len(wanted.tokens) > self.model.context_tokens:
            raise bad_request(f"{len(wanted.tokens)} tokens; at most {self.model.context_tokens}", "tokens")
        if max(wanted.tokens) >= self.model.vocab_size:
            raise bad_request(f"token {max(wanted.tokens)} is outside the model's vocabulary", "tokens")
        if not any(fnmatch.fnmatchcase(wanted.deliver_to, pattern) for pattern in self._targets):
            raise bad_request(f"caches are not sent to {wanted.deliver_to}", "deliver_to", "not_a_target", 403)

    async def deliver(self, wanted: CacheWanted, asked_s: float) -> Delivered:
        """Compute a cache and send it; returns when it has been taken. Cancelling gives it up at both ends.

        Args:
            wanted: checked.
            asked_s: `time.monotonic` of its arrival.

        Raises:
            LynxError: the transfer failed.
        """
        link = await self._links.link(wanted.deliver_to)  # before the pass, since this may say no at once
        # Cancelled before its turn, the pass is not made.
        began_s, made = await run_or_withdraw(self.steps.lane(), self._compute, wanted.tokens)
        computed_s = time.monotonic()
        layout = self.model.layout(len(wanted.tokens) - 1)
        assert made.scores is not None
        fine = lynx_net.fine_tokens(layout, made.scores[:, :-1])
        try:
            async with link.send(
                wanted.request_id,
                layout,
                fine=fine,
                meta={PREFILL_QUEUE_S: began_s - asked_s, PREFILL_S: computed_s - began_s},
                **self._coding,
            ) as transfer:
                for layer, (keys, values) in enumerate(zip(made.keys, made.values, strict=True)):
                    await transfer.write(layer, keys[:-1], values[:-1])
        finally:  # it is computed, also if nobody waits for it any more
            if self._writer is not None and layout.tokens:
                self._writer.put(Stored(wanted.request_id, wanted.tokens, layout, made, fine))
        return Delivered(
            codec=transfer.offer.codec,
            sent_bytes=transfer.stats.total_bytes,
            queue_s=began_s - asked_s,
            prefill_s=computed_s - began_s,
            send_s=time.monotonic() - computed_s,
        )

    def _compute(self, tokens: Sequence[int]) -> tuple[float, Prefilled]:
        """When the pass began, and what it made."""
        return time.monotonic(), prefill(self.model.model, tokens, score_queries=SCORE_QUERIES)


def _coding(config: PrefillConfig) -> dict[str, Any]:
    """How caches are coded, as arguments of `link.send`."""
    link = config.link
    if link.codec == "default":
        return {"codec": DEFAULT_PLAN}
    if link.codec == "auto":
        return {"codec": "auto"}
    params: Any = {}
    if link.codec_params is not None:
        try:
            params = json.loads(link.codec_params)
        except ValueError as error:
            raise ConfigError(f"link.codec_params is not JSON: {error}") from error
        if not isinstance(params, dict):
            raise ConfigError("link.codec_params must be a JSON object")
    try:
        get_codec(link.codec, **params)
    except (CodecError, TypeError) as error:
        raise ConfigError(f"link.codec: {error}") from error
    return {"codec": link.codec, "codec_params": params}
