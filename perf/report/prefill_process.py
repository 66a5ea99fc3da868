"""The prefill process of the time figures: sends the cache of a prompt with any codec of the report, at any rate.

Started like the demonstration's, as `python -m perf.report.prefill_process --url URL`, and ended like it.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_net.demo.exchange import STARTED_S, Progress
from lynx_net.demo.options import DemoError
from lynx_net.demo.prefill_process import DeviceSettings, main
from lynx_net.errors import TransferAbortedError
from lynx_net.serdes.device import DeviceBuffers
from lynx_net.wire.config import LinkConfig
from perf.report.device import SHAPES, load_shape
from perf.report.series import SERIES, codec_plan

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor

    import lynx_net
    from lynx_net.integrations.transformers import Prefilled
    from lynx_net.wire.layout import CacheLayout

__all__ = ["TransferRequest", "dtype_of", "load_model", "serve"]

_MOST_TOKENS = 1 << 15

_PAGE_TOKENS, _DEVICE_PAGE_TOKENS = 256, 1024
"""Of a page in host memory, the library's own, and on a device (docs/gpu.md, what to set)."""

_DEVICE = DeviceSettings(
    LinkConfig.for_devices(), DeviceBuffers(prepare=(0,), receive_pinned_bytes=0, send_pinned_bytes=4 << 30)
)
"""What docs/gpu.md advises; all residuals of a long cache wait behind its anchors."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """Ask for the cache of a prompt.

    Attributes:
        codec: a name of `SERIES`.
        model: a name of `perf.quality.MODELS` or of `perf.report.device.SHAPES`.
        prompt: token ids; the cache is that of all but the last.
        rate_bps: of the link from now on.
    """

    codec: str
    model: str
    prompt: tuple[int, ...]
    rate_bps: float

    def to_meta(self) -> dict[str, Any]:
        """The request as metadata of a link request."""
        packed = np.asarray(self.prompt, "<u4").tobytes()
        return {"codec": self.codec, "model": self.model, "prompt": packed, "rate_bps": self.rate_bps}

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> TransferRequest:
        """Read and check what the peer sent; raises DemoError where it makes no sense."""
        match meta:
            case {"codec": str(codec), "model": str(model), "prompt": bytes(packed), "rate_bps": float(rate_bps)} if (
                codec in SERIES and len(packed) % 4 == 0 and 2 <= len(packed) // 4 <= _MOST_TOKENS and rate_bps > 0
            ):
                return cls(codec, model, tuple(np.frombuffer(packed, "<u4").tolist()), rate_bps)
        raise DemoError(f"the request for a cache is malformed; its fields are {', '.join(sorted(map(str, meta)))}")


def load_model(name: str, device: str) -> Any:
    """A model on one thread, with the kernels of all codecs compiled, or on a device. Blocks for seconds."""
    import torch

    from perf.quality import MODELS

    torch.set_num_threads(1)
    if name in SHAPES:
        loaded: Any = load_shape(name, device)
    elif name in MODELS:
        loaded = MODELS[name].load(fetch=True)
        loaded.model.to(device)
    else:
        raise DemoError(f"there is no model {name!r}; known are {', '.join((*MODELS, *SHAPES))}")
    if device == "cpu":
        for series in SERIES.values():
            series.subject.codec_of("key", 0, 1).warm_up()
    return loaded


def dtype_of(model: Any) -> str:
    """For example "bfloat16"."""
    return str(model.dtype).removeprefix("torch.")


class _Prefiller:
    """One model and the cache of the last prompt. All methods block and run in one thread."""

    def __init__(self, tell: Callable[[Progress], None], device: str) -> None:
        self._tell, self._device = tell, device
        self._loaded: Any = None
        self._name = ""
        self._last: tuple[tuple[int, ...], CacheLayout, Prefilled] | None = None

    def prefill(self, wanted: TransferRequest) -> tuple[CacheLayout, Prefilled]:
        """The cache of a prompt without its last token, computed once for requests in a row."""
        from lynx_net.integrations.scores import SCORE_QUERIES
        from lynx_net.integrations.transformers import layout_of, prefill

        if wanted.model != self._name:
            self._loaded = self._last = None  # free one before the next is loaded
            self._loaded, self._name = load_model(wanted.model, self._device), wanted.model
        if self._last is None or self._last[0] != wanted.prompt:
            self._last = None
            began_s = time.monotonic()
            dtype = dtype_of(self._loaded.model)
            layout = layout_of(
                self._loaded.model.config,
                len(wanted.prompt) - 1,
                dtype=dtype,
                page_tokens=_PAGE_TOKENS if self._device == "cpu" else _DEVICE_PAGE_TOKENS,
            )
            made = prefill(self._loaded.model, wanted.prompt, score_queries=SCORE_QUERIES)
            self._last = (wanted.prompt, layout, made)
            self._tell(Progress(f"prefill of {len(wanted.prompt)} tokens", time.monotonic() - began_s))
        return self._last[1:]


async def serve(
    link: lynx_net.KVLink, tell: Callable[[Progress], None], executor: ThreadPoolExecutor, device: str
) -> None:
    """Answer requests one after the other until the peer closes the link."""
    import asyncio

    prefiller = _Prefiller(tell, device)

    async for request in link.requests():
        try:
            wanted = TransferRequest.from_meta(request.meta)
            made: asyncio.Future[tuple[CacheLayout, Prefilled]]
            made = asyncio.get_running_loop().run_in_executor(executor, prefiller.prefill, wanted)
            layout, cache = await made
        except DemoError as error:
            request.refuse(str(error))
            continue
        subject = SERIES[wanted.codec].subject
        assert cache.scores is not None
        layout = dataclasses.replace(layout, raw_head=subject.raw_head, raw_tail=0)
        fine = subject.fine_tokens(layout, cache.scores[:, :-1])
        plan = codec_plan(subject, layout.layers)
        link.set_rate(wanted.rate_bps)
        meta = {STARTED_S: time.monotonic()}
        try:
            async with link.send(request.id, layout, codec=plan, fine=fine, meta=meta) as transfer:
                for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
                    await transfer.write(layer, keys[:-1], values[:-1])
        except TransferAbortedError:
            continue  # the decode process did not want it after all, and may want another one
    if link.error is not None:
        raise link.error


if __name__ == "__main__":
    sys.exit(main(serve=serve, device=_DEVICE))
