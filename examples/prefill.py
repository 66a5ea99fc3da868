"""The prefill side: compute the KV cache of a prompt and send it to the process that decodes.

Start examples/decode.py first, on this host or another, then for example:

    python examples/prefill.py 127.0.0.1:7000 "Why is the sky blue?"
    python examples/prefill.py --rate 100Mbit 192.0.2.7:7000 - < question.txt
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import uuid

import lynx_net
from lynx_codec.plan import DEFAULT_PLAN
from lynx_net.integrations import smollm2
from lynx_net.integrations.scores import SCORE_QUERIES
from lynx_net.integrations.transformers import layout_of, prefill


async def send(address: str, prompt: str, codec: str | None, rate: str | None, lanes: int) -> None:
    """Prefill `prompt` and transfer its cache; returns when the other side has all of it."""
    loaded = smollm2.load()
    gc.freeze()  # the collector need not look at the model while transfers are on their way
    message = [{"role": "user", "content": prompt}]
    text = loaded.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    token_ids = loaded.tokenizer(str(text), add_special_tokens=False)["input_ids"]
    # The receiver feeds the last token itself, so that it has scores to begin with.
    layout = layout_of(loaded.model.config, len(token_ids) - 1, dtype="float32")

    async with lynx_net.connect(f"tcp://{address}", rate=rate, lanes=lanes) as link:
        # In a thread, so that the link can answer its peer while the model computes.
        made = await asyncio.to_thread(prefill, loaded.model, token_ids, score_queries=SCORE_QUERIES)
        # What attention leans on comes whole with the anchors.
        fine = lynx_net.fine_tokens(layout, None if made.scores is None else made.scores[:, :-1])
        request_id, meta = uuid.uuid4().hex, {"prompt_tail": token_ids[-1:]}
        async with link.send(request_id, layout, codec=codec or DEFAULT_PLAN, fine=fine, meta=meta) as transfer:
            for layer, (keys, values) in enumerate(zip(made.keys, made.values, strict=True)):
                await transfer.write(layer, keys[:-1], values[:-1])
    megabytes = transfer.stats.total_bytes / 1e6
    print(f"sent the cache of {layout.tokens} tokens as {transfer.offer.codec}, {megabytes:.2f} MB")


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description="Prefill a prompt and send its KV cache.")
    parser.add_argument("address", metavar="HOST:PORT", help="where examples/decode.py listens")
    parser.add_argument("prompt", help="the question, or - to read it from standard input")
    parser.add_argument("--codec", help="nested, lynx, int8, int4 or bf16 (default: the library's)")
    parser.add_argument("--rate", help="limit of the link, e.g. 100Mbit (default: none)")
    parser.add_argument("--lanes", type=int, default=1, help="connections to open (default: 1)")
    arguments = parser.parse_args()
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    try:
        asyncio.run(send(arguments.address, prompt, arguments.codec, arguments.rate, arguments.lanes))
    except lynx_net.LynxError as error:
        print(f"prefill: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
