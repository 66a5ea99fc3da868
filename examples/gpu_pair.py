"""Prefill and decode of an 8B-shaped model on a GPU, in two processes, with the cache going from one to the other.

    python examples/gpu_pair.py --tokens 16384 --rate 25Gbit

The model has the shape of Llama 3 8B (32 layers, 8 KV heads of 128) and random weights, the same in both processes: it
needs no download, its times are those of a real model of this shape, and its text is noise. How many drafts are
accepted says nothing about real models, whose attention is not random. `--layers 2` makes it small.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import lynx_net
from lynx_gpu import device_count
from lynx_net.integrations.transformers import ProgressiveCache, TransformersModel, layout_of, prefill
from lynx_net.speculation import Done, decode

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SENDER_BUFFERS = lynx_net.DeviceBuffers(prepare=(0,), send_pinned_bytes=4 << 30, receive_pinned_bytes=0)
"""All residuals of a long cache wait behind its anchors."""

RECEIVER_BUFFERS = lynx_net.DeviceBuffers(prepare=(0,), send_pinned_bytes=64 << 20, receive_pinned_bytes=4 << 30)
"""Anchors are kept until their residuals are decoded."""

CONFIG = lynx_net.LinkConfig.for_devices()


def make_model(layers: int) -> Any:
    """Random weights on the GPU, bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=131072,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def prompt_of(tokens: int) -> list[int]:
    """Token ids, the same in both processes."""
    return [(7919 * index + 13) % 32000 for index in range(tokens + 1)]


async def send(url: str, pipe: Any, options: argparse.Namespace) -> None:
    """The prefill process: compute the cache once, then send it as each codec, when the other one is ready for it."""
    model = make_model(options.layers)
    ids = prompt_of(options.tokens)
    await asyncio.to_thread(prefill, model, ids[:256])  # what is compiled at first use
    began_s = time.monotonic()
    made = await asyncio.to_thread(prefill, model, ids)
    print(f"prefill of {len(ids)} tokens: {time.monotonic() - began_s:.2f} s", flush=True)
    layout = layout_of(model.config, options.tokens, dtype="bfloat16", page_tokens=options.page_tokens)
    async with lynx_net.connect(
        url, rate=options.rate, lanes=options.lanes, config=CONFIG, device_buffers=SENDER_BUFFERS
    ) as link:
        for codec in options.codecs * 2:
            await asyncio.to_thread(pipe.recv)
            chosen: dict[str, Any] = {} if codec == "default" else {"codec": codec}
            meta = {"codec": codec, "started_s": time.monotonic()}
            async with link.send(codec, layout, meta=meta, **chosen) as transfer:
                for layer, (keys, values) in enumerate(zip(made.keys, made.values, strict=True)):
                    await transfer.write(layer, keys[:-1], values[:-1])


async def answer(model: Any, transfer: lynx_net.IncomingTransfer, options: argparse.Namespace) -> None:
    """The decode side of one transfer."""
    offer = transfer.offer
    decoder = TransformersModel(model, transfer.target)
    tail = prompt_of(options.tokens)[-1:]
    async with aclosing(decode(decoder, transfer, prompt_tail=tail, max_new_tokens=options.new_tokens)) as events:
        *_, done = [event async for event in events]
    assert isinstance(done, Done)
    await transfer.complete
    times = [at_s - offer.meta["started_s"] for at_s in done.token_times_s]
    line = transfer.timeline()
    print(
        f"{offer.meta['codec']:8} {transfer.stats.total_bytes / 1e6:8.1f} MB  anchors after "
        f"{(line.streams_ready_s[0] or 0) - offer.meta['started_s']:.3f} s, all after "
        f"{(transfer.complete.at_s or 0) - offer.meta['started_s']:.3f} s; token 1 at {times[0]:.3f} s, "
        f"token {len(times)} at {max(times):.3f} s; {done.accepted} of {done.drafted} drafts accepted",
        flush=True,
    )


async def receive(pipe: Connection, options: argparse.Namespace) -> None:
    """The decode process."""
    model = make_model(options.layers)

    def allocate(offer: lynx_net.Offer) -> ProgressiveCache:
        return ProgressiveCache(offer.layout, room=options.new_tokens + 80, device="cuda")

    warm = TransformersModel(model, ProgressiveCache(layout_of(model.config, 256, dtype="bfloat16"), device="cuda"))
    for count in (16, 1, 1):
        await asyncio.to_thread(warm.forward, [0] * count)
    async with lynx_net.serve(
        "tcp://127.0.0.1:0", allocate=allocate, config=CONFIG, device_buffers=RECEIVER_BUFFERS
    ) as server:
        pipe.send(server.url)
        for codec in options.codecs:
            pipe.send("ready")
            transfer = await anext(aiter(server))
            await transfer.complete
            took_s = (transfer.complete.at_s or 0) - transfer.offer.meta["started_s"]
            print(f"{codec:8} {took_s:.2f} s at its first use, when kernels are compiled or loaded", flush=True)
        for _ in options.codecs:
            pipe.send("ready")
            await answer(model, await anext(aiter(server)), options)


def run_receiver(pipe: Connection, options: argparse.Namespace) -> None:
    """What the decode process runs."""
    asyncio.run(receive(pipe, options))


def main() -> int:
    """Read the arguments and run both processes."""
    parser = argparse.ArgumentParser(description="A prefill and a decode process on one GPU.")
    parser.add_argument("--tokens", type=int, default=16384, help="of the prompt (default: 16384)")
    parser.add_argument("--layers", type=int, default=32, help="of the model (default: 32)")
    parser.add_argument("--rate", default="25Gbit", help="limit of the link (default: 25Gbit)")
    parser.add_argument("--lanes", type=int, default=4, help="connections (default: 4)")
    parser.add_argument("--page-tokens", type=int, default=2048, help="tokens of a page (default: 2048)")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens to decode (default: 32)")
    parser.add_argument("--codecs", nargs="+", default=["bf16", "int8", "int4", "lynx", "default"])
    options = parser.parse_args()
    if not device_count():
        print("gpu_pair: there is no CUDA device here, or CuPy is not installed", file=sys.stderr)
        return 1
    print("random weights: times are those of a model of this shape; text and acceptance mean nothing", flush=True)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_receiver, args=(there, options), daemon=True)
    process.start()
    there.close()
    try:
        asyncio.run(send(here.recv(), here, options))
    except (lynx_net.LynxError, EOFError) as error:
        print(f"gpu_pair: {error or 'the decode process ended'}", file=sys.stderr)
        return 1
    process.join()
    return process.exitcode or 0


if __name__ == "__main__":
    sys.exit(main())
