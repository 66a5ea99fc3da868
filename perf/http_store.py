"""What a context store is worth to a client of the HTTP pair: `python -m perf.http_store --json FILE`.

A store, a prefill server and a decode server run as processes; both links are paced to `--rate`. Each round has a
prompt of its own and asks for it three times, by /v1/completions:

    computed  the store does not have it: the prefill server computes it, and stores it behind the answer
    stored    the same prompt again: all but its last token comes from the store
    longer    the same prompt with `--rest` other tokens in the place of its last one, which the decode server computes

Before each the pair is idle and the page cache is told to drop the store's files. The times are those of the client,
from its request to the first piece of final text. `stored` must give the same text as `computed`, and each request must
have found in the store what it should have: else the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lynx_net.demo.process import limit_threads
from lynx_net.demo.prompts import default_document
from lynx_net.demo.results import machine_facts
from perf.http_pair import START_S, is_ready, metrics_of, server_process
from perf.store import drop_from_memory, store_process

if TYPE_CHECKING:
    from collections.abc import Sequence

    import openai

KINDS = {"computed": "miss", "stored": "hit", "longer": "hit"}
PACKAGES = ("numpy", "torch", "transformers", "aiohttp", "openai")
SETTLE_S = 120.0
LOOKUPS = "lynx_net_http_store_lookups_total"


def prompts_of(model: str, rounds: int, tokens: int, rest: int) -> list[dict[str, list[int]]]:
    """Token ids by kind, for each round: pieces of one document that begin differently."""
    from lynx_net.integrations.http.config import ModelConfig
    from lynx_net.integrations.http.models import load_model

    body = load_model(ModelConfig(name=model), None).encode(default_document())
    body *= 1 + (tokens + rest + 16 * (rounds + 1)) // len(body)
    made = []
    for number in range(rounds):
        first = 16 * number
        prompt = body[first : first + tokens + 1]
        longer = [*prompt[:-1], *reversed(body[first : first + rest])]
        made.append({"computed": prompt, "stored": prompt, "longer": longer})
    return made


async def ask(client: openai.AsyncOpenAI, model: str, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """One streamed answer: its text, and when its first piece and its end came."""
    began_s = time.monotonic()
    text, ttft_s = "", None
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=new_tokens, temperature=0, stream=True
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            ttft_s = ttft_s or time.monotonic() - began_s
            text += chunk.choices[0].text
    return {"ttft_s": ttft_s, "total_s": time.monotonic() - began_s, "text": text}


def settle(decode: str, prefill: str) -> dict[str, float]:
    """Wait until both are idle and everything is stored; the decode server's metrics."""
    deadline_s = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_s:
        ours, theirs = metrics_of(decode), metrics_of(prefill)
        busy = ours["lynx_net_http_requests_running"] + theirs["lynx_net_http_requests_running"]
        if not busy and not theirs["lynx_net_http_store_puts_waiting"]:
            return ours
        time.sleep(0.1)
    raise SystemExit("the servers do not come to rest")


async def measure(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """All rounds."""
    import openai

    prompts = prompts_of(model, arguments.rounds + 1, arguments.prompt_tokens, arguments.rest)
    samples: list[dict[str, Any]] = []
    wrong = 0
    async with store_process(folder, arguments.rate) as store:
        common = ("--model-name", model, "--http-port", "0", "--log-level", "warning", "--store-url", store)
        with (
            server_process("prefill-server", *common, "--link-rate", arguments.rate) as prefill,
            server_process(
                *("decode-server", *common, "--cache-url", "tcp://127.0.0.1:0", "--prefill-url", prefill),
                *("--store-rest-tokens", str(arguments.rest), "--store-answer-s", "60", "--store-arrive-s", "60"),
            ) as decode,
        ):
            deadline_s = time.monotonic() + START_S
            while not await asyncio.to_thread(is_ready, decode):
                if time.monotonic() > deadline_s:
                    raise SystemExit(f"the servers are not ready after {START_S:g} s")
                await asyncio.sleep(0.1)
            name = Path(model).name
            async with openai.AsyncOpenAI(
                base_url=f"{decode}/v1", api_key="none", max_retries=0, timeout=600
            ) as client:
                for number, prompt in enumerate(prompts):
                    found: dict[str, dict[str, Any]] = {}
                    for kind, outcome in KINDS.items():
                        before = await asyncio.to_thread(settle, decode, prefill)
                        drop_from_memory(folder)
                        found[kind] = await ask(client, name, prompt[kind], arguments.new_tokens)
                        after = await asyncio.to_thread(settle, decode, prefill)
                        label = f'{LOOKUPS}{{outcome="{outcome}"}}'
                        if after[label] != before.get(label, 0) + 1:
                            wrong += 1
                            print(f"round {number}, {kind}: no {outcome}", file=sys.stderr)
                    wrong += found["computed"].pop("text") != found["stored"].pop("text")
                    del found["longer"]["text"]
                    if number:  # the first round warms up
                        samples.append(found)
                        times = ", ".join(f"{kind} {one['ttft_s']:.3f} s" for kind, one in found.items())
                        print(f"{number}/{arguments.rounds}: {times}", flush=True)
    return {
        "rate": arguments.rate,
        "prompt_tokens": arguments.prompt_tokens,
        "rest_tokens": arguments.rest,
        "ttft_s": {kind: statistics.median(one[kind]["ttft_s"] for one in samples) for kind in KINDS},
        "ratios": {
            kind: statistics.median(one[kind]["ttft_s"] / one["computed"]["ttft_s"] for one in samples)
            for kind in ("stored", "longer")
        },
        "wrong": wrong,
        "samples": samples,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write the figures; the exit code is 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="of the times (default %(default)s)")
    add("--rate", default="1Gbit", help="of both links (default %(default)s)")
    add("--prompt-tokens", type=int, default=2048, help="tokens that are stored of a prompt (default %(default)s)")
    add("--rest", type=int, default=64, help="tokens behind them in `longer` (default %(default)s)")
    add("--new-tokens", type=int, default=8, help="tokens of an answer (default %(default)s)")
    add("--model", default="smollm2", help="smollm2, gemma3 or a folder (default %(default)s)")
    add("--folder", type=Path, help="where the store lies (default: one for temporary files)")
    add("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended too
    limit_threads()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        result = asyncio.run(measure(arguments, arguments.model, Path(name)))
    print(json.dumps({name: value for name, value in result.items() if name != "samples"}, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine_facts(PACKAGES), **result}, indent=1) + "\n")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
