"""The decode side: take every KV cache that is offered and write the answer, starting on the anchors.

    python examples/decode.py 127.0.0.1:7000

and then examples/prefill.py with the same address. 0.0.0.0:7000 listens to other hosts as well; do that only
in a network whose hosts you trust.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from contextlib import aclosing

import lynx_net
from lynx_net.integrations import smollm2
from lynx_net.integrations.transformers import ProgressiveCache, TransformersModel
from lynx_net.speculation import Commit, Done, Draft, Retract, decode


async def answer(loaded: smollm2.LoadedModel, transfer: lynx_net.IncomingTransfer, new_tokens: int) -> None:
    """Decode from one transfer and print drafts and commits as they come."""
    assert isinstance(transfer.target, ProgressiveCache)  # what `allocate` below returned
    model = TransformersModel(loaded.model, transfer.target)
    stop = loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert isinstance(stop, int)
    prompt_tail = transfer.offer.meta["prompt_tail"]
    events = decode(model, transfer, prompt_tail=prompt_tail, max_new_tokens=new_tokens, stop_tokens=[stop])
    print(f"\n{transfer.offer.layout.tokens} tokens arriving as {transfer.offer.codec}")
    async with aclosing(events):
        async for event in events:
            match event:
                case Draft(token=token):
                    print(f"  draft    {loaded.tokenizer.decode([token])!r}")
                case Retract(count=count):
                    print(f"  retract  {count}")
                case Commit(tokens=tokens, accepted=accepted):
                    print(f"  commit   {loaded.tokenizer.decode(list(tokens))!r} ({accepted} of them drafts)")
                case Done(tokens=tokens, drafted=drafted, accepted=accepted):
                    print(loaded.tokenizer.decode(list(tokens), skip_special_tokens=True))
                    print(f"({accepted} of {drafted} drafts accepted)", flush=True)


async def serve(address: str, new_tokens: int) -> None:
    """Serve until interrupted. A transfer that fails is reported and does not end the server."""
    loaded = smollm2.load()
    gc.freeze()  # the collector need not look at the model while transfers are on their way

    def allocate(offer: lynx_net.Offer) -> ProgressiveCache:
        return ProgressiveCache(offer.layout, room=new_tokens + 1)

    async with lynx_net.serve(f"tcp://{address}", allocate=allocate) as server:
        print(f"listening on {server.url}", flush=True)
        async for transfer in server:
            try:
                await answer(loaded, transfer, new_tokens)
            except lynx_net.LynxError as error:
                print(f"transfer {transfer.offer.request_id} failed: {error}", file=sys.stderr, flush=True)


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description="Receive KV caches and decode from them.")
    parser.add_argument("address", metavar="HOST:PORT", help="where to listen, e.g. 127.0.0.1:7000")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to decode at most (default: 64)")
    arguments = parser.parse_args()
    try:
        asyncio.run(serve(arguments.address, arguments.new_tokens))
    except lynx_net.LynxError as error:
        print(f"decode: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
