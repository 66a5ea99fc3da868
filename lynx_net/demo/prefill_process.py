"""The prefill process: connects, loads the model, and sends the cache of every prompt it is asked for.

Started by the decode process as `python -m lynx_net.demo.prefill_process --url URL`. It imports torch, which holds the
interpreter too long for a link, then connects, and loads the model in a thread: the link's heartbeats tell each side
whether the other one is alive. It ends with code 0 on SIGTERM, which is how the decode process ends
it, and with code 1 and one sentence when the decode process was lost or fell silent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import lynx_net
from lynx_net.demo.exchange import STARTED_S, CacheRequest, Progress
from lynx_net.demo.options import DEFAULT, RAW_TAIL, DemoError
from lynx_net.demo.process import import_libraries, leave, limit_threads, run_loop
from lynx_net.errors import (
    ConnectionFailedError,
    ConnectionLostError,
    LynxError,
    PeerTimeoutError,
    TransferAbortedError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from numpy.typing import NDArray

    Serve = Callable[[lynx_net.KVLink, Callable[[Progress], None], ThreadPoolExecutor, str], Awaitable[None]]

    from lynx_net.integrations.smollm2 import LoadedModel
    from lynx_net.integrations.transformers import Prefilled

__all__ = ["DeviceSettings", "main"]

T = TypeVar("T")

_FIRST_TOKEN_DRAW = 1
"""Makes the draw of the first token independent of the decode loop's draws with the same seed."""


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """How the link is opened if the cache is on a device. The deadline is that of the command."""

    config: lynx_net.LinkConfig = field(default_factory=lynx_net.LinkConfig)
    buffers: lynx_net.DeviceBuffers | None = None


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The cache of a prompt, and the shape of what is sent: all positions but the last."""

    prompt: tuple[int, ...]
    layout: lynx_net.CacheLayout
    cache: Prefilled


class _Prefiller:
    """The model and the cache of the last prompt. All methods block and run in one thread."""

    def __init__(self, tell: Callable[[Progress], None], device: str) -> None:
        self._tell = tell
        self._device = device
        self._loaded: LoadedModel | None = None
        self._last: _Prefill | None = None

    def load(self) -> LoadedModel:
        """Load the model, compile the codecs' kernels or read them from their cache."""
        if self._loaded is None:
            started_s = time.monotonic()
            import torch

            from lynx_net.demo.process import warm_up_codecs
            from lynx_net.integrations import smollm2
            from lynx_net.integrations.collector import freeze_loaded

            torch.set_num_threads(1)
            self._loaded = smollm2.load()
            self._loaded.model.to(self._device)  # type: ignore[arg-type]  # transformers annotates it wrongly
            warm_up_codecs()
            freeze_loaded()
            self._tell(Progress("loading the model", time.monotonic() - started_s))
        return self._loaded

    def prefill(self, prompt: tuple[int, ...]) -> _Prefill:
        """The cache of `prompt` without its last token, computed once for requests in a row."""
        if self._last is None or self._last.prompt != prompt:
            from lynx_net.integrations.scores import SCORE_QUERIES
            from lynx_net.integrations.transformers import layout_of, prefill

            loaded = self.load()
            if max(prompt) >= loaded.model.config.vocab_size:
                raise DemoError(f"token {max(prompt)} is outside the model's vocabulary")
            self._last = None  # free it before the next one is made
            self._tell(Progress(f"prefill of {len(prompt)} tokens"))
            started_s = time.monotonic()
            layout = layout_of(loaded.model.config, len(prompt) - 1, dtype="float32")
            self._last = _Prefill(prompt, layout, prefill(loaded.model, prompt, score_queries=SCORE_QUERIES))
            self._tell(Progress(f"prefill of {len(prompt)} tokens", time.monotonic() - started_s))
        return self._last


async def _serve(
    link: lynx_net.KVLink, tell: Callable[[Progress], None], executor: ThreadPoolExecutor, device: str
) -> None:
    """Answer requests one after the other until the peer closes the link."""
    prefiller = _Prefiller(tell, device)

    def in_thread(function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(executor, function, *arguments)

    loading = in_thread(prefiller.load)
    async for request in link.requests():
        try:
            wanted = CacheRequest.from_meta(request.meta)
            await loading
            made = await in_thread(prefiller.prefill, wanted.prompt)
        except DemoError as error:
            request.refuse(str(error))
            continue
        first_token = _first_token(made.cache.logits, wanted) if wanted.first_token else None
        meta = {STARTED_S: time.monotonic()}
        try:
            async with _sending(link, request.id, wanted.codec, made, meta=meta, first_token=first_token) as transfer:
                for layer, (keys, values) in enumerate(zip(made.cache.keys, made.cache.values, strict=True)):
                    await transfer.write(layer, keys[:-1], values[:-1])
        except TransferAbortedError:
            continue  # the decode process did not want it after all, and may want another one
    if link.error is not None:
        raise link.error


def _sending(link: lynx_net.KVLink, request_id: str, codec: str, made: _Prefill, **options: Any) -> lynx_net.Sending:
    """The paper's transfers have raw tokens at both ends; the default has fine ones where attention leans."""
    if codec != DEFAULT:
        layout = dataclasses.replace(made.layout, raw_tail=RAW_TAIL)
        return link.send(request_id, layout, codec=codec, fine=(), **options)
    assert made.cache.scores is not None
    fine = lynx_net.fine_tokens(made.layout, made.cache.scores[:, :-1])
    return link.send(request_id, made.layout, fine=fine, **options)


def _first_token(logits: NDArray[Any], wanted: CacheRequest) -> int:
    """The first token of the answer, chosen as the decode process would choose it."""
    import numpy as np

    from lynx_net.speculation import draw, probabilities

    if wanted.temperature == 0:
        return int(logits.argmax())
    return draw(probabilities(logits, wanted.temperature), np.random.default_rng([wanted.seed, _FIRST_TOKEN_DRAW]))


async def _run(
    arguments: argparse.Namespace,
    executor: ThreadPoolExecutor,
    serve: Serve,
    device: DeviceSettings,
) -> None:
    """Connect, then serve; the link's errors end it, and so does SIGTERM, with code 0."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave, 0)
    on_device = arguments.device != "cpu"
    config = device.config if on_device else lynx_net.LinkConfig()
    config = dataclasses.replace(config, deadline_s=arguments.timeout_s)

    output = sys.stdout  # kept: libraries replace sys.stdout for moments while they are imported

    def tell(progress: Progress) -> None:
        with contextlib.suppress(BrokenPipeError):  # the link says more about a lost parent than its pipe
            output.write(progress.to_line())
            output.flush()

    async with lynx_net.connect(
        arguments.url,
        rate=arguments.rate,
        lanes=arguments.lanes,
        config=config,
        device_buffers=device.buffers if on_device else None,
    ) as link:
        await serve(link, tell, executor, arguments.device)


def main(argv: Sequence[str] | None = None, serve: Serve = _serve, device: DeviceSettings | None = None) -> int:
    """Run the prefill process; returns its exit code.

    Args:
        serve: answers the requests of a link, given also where to tell of progress, a thread for the model and a
           device.
        device: settings of the link if the cache is on a device; None for the library's own.
    """
    parser = argparse.ArgumentParser(prog="python -m lynx_net.demo.prefill_process", description=__doc__)
    parser.add_argument("--url", required=True, help="where the decode process listens, tcp://HOST:PORT")
    parser.add_argument("--rate", help="limit of the link, e.g. 100Mbit")
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=5.0, dest="timeout_s")
    parser.add_argument("--device", default="cpu", help="where the model and the cache are")
    parser.add_argument("--terminal-fd", type=int, default=2, help="where to say that the decode process is lost")
    arguments = parser.parse_args(argv)
    limit_threads()
    executor = ThreadPoolExecutor(1, "prefill")
    output = 2
    try:
        import_libraries()
        run_loop(_run(arguments, executor, serve, device or DeviceSettings()))
    except (ConnectionFailedError, ConnectionLostError, PeerTimeoutError) as error:
        output, sentence = arguments.terminal_fd, f"the decode process is gone: {error}"
    except LynxError as error:
        sentence = str(error)
    except OSError as error:
        sentence = f"{error.filename or 'the model'}: {error.strerror or error}"
    except KeyboardInterrupt:
        return leave(130)
    else:
        return leave(0)
    with contextlib.suppress(OSError):  # nobody is left to read it
        os.write(output, f"lynx_net demo, prefill process: {sentence}\n".encode())
    return leave(1)


if __name__ == "__main__":
    sys.exit(main())
