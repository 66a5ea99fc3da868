"""What a context store is worth, and what kill -9 does to it: `python -m perf.store --json FILE`.

Time to the first valid token of a prompt of SmolLM2, in turn: computed here (prefill); with the cache of all but the
last token from a store, a process of its own that reads it from the disk (the page cache is told to drop the file
before) and sends it over a link paced to `--rate`; and with a store that has only the first three quarters, where the
rest is computed here when the residuals are in. The first token counts as valid when it was computed, if verification
agrees, else when verification has named the right one. Loading the model is in none of the times.

`--kills N`: processes that write entries, and servers that receive them, are killed with SIGKILL until N of each were
in the middle of a write; see `perf/store_kills.py`. `--rounds 0` leaves the first part out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lynx_net
from lynx_net.demo.process import limit_threads, warm_up_codecs
from lynx_net.demo.prompts import DEFAULT_QUESTION, build_prompt, default_document
from lynx_net.demo.results import machine_facts
from lynx_net.speculation import Done, decode
from lynx_net.store import stored_as, wanted
from perf.store_kills import kill_servers, kill_writers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from lynx_net.integrations.smollm2 import LoadedModel

MODEL = "smollm2-135m-instruct-f32"
PACKAGES = ("numpy", "torch", "transformers")


@contextlib.asynccontextmanager
async def store_process(folder: Path, rate: str) -> AsyncIterator[str]:
    """`lynx-net store serve`; yields its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lynx_net", "store", "serve", str(folder)),
        *("--listen", "tcp://127.0.0.1:0", "--rate", rate),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        while not (line := (await process.stdout.readline()).decode()).startswith("serving on "):
            if not line:
                raise RuntimeError("the store did not start")
        yield line.split()[-1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def drop_from_memory(folder: Path) -> None:
    """The entries are read from the disk next time."""
    for file in (folder / "entries").iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Bench:
    """The model and what is done with it."""

    def __init__(self, prompt_tokens: int) -> None:
        import torch

        from lynx_net.integrations import smollm2

        torch.set_num_threads(1)
        self.loaded: LoadedModel = smollm2.load()
        warm_up_codecs()
        prompt = build_prompt(self.loaded.tokenizer, default_document(), DEFAULT_QUESTION, prompt_tokens)
        self.prompt = prompt.tokens

    def compute(self) -> tuple[float, int]:
        """Seconds to the first token by prefill, and the token."""
        from lynx_net.integrations.transformers import prefill

        started_s = time.monotonic()
        token = int(prefill(self.loaded.model, self.prompt).logits.argmax())
        return time.monotonic() - started_s, token

    async def fill(self, url: str, tokens: int) -> dict[str, float]:
        """Compute the cache of the first tokens and store it; seconds of storing it, and its bytes."""
        from lynx_net.integrations.scores import SCORE_QUERIES
        from lynx_net.integrations.transformers import layout_of, prefill

        made = prefill(self.loaded.model, self.prompt[:tokens], score_queries=SCORE_QUERIES)
        layout = layout_of(self.loaded.model.config, tokens, dtype="float32")
        fine = lynx_net.fine_tokens(layout, made.scores)
        started_s = time.monotonic()
        async with lynx_net.connect(url) as link:
            meta = stored_as(MODEL, self.prompt[:tokens])
            async with link.send("fill", layout, fine=fine, meta=meta) as sending:
                for layer, arrays in enumerate(zip(made.keys, made.values, strict=True)):
                    await sending.write(layer, *arrays)
        return {"store_s": time.monotonic() - started_s, "bytes": float(sending.stats.total_bytes)}

    async def fetch(self, url: str) -> dict[str, Any]:
        """Ask a store for as much of the prompt as it has, and decode one token."""
        from lynx_net.integrations.transformers import ProgressiveCache, TransformersModel

        caches: list[ProgressiveCache] = []

        def allocate(offer: lynx_net.Offer) -> lynx_net.KVTarget:
            room = len(self.prompt) - offer.layout.tokens + 8
            caches.append(ProgressiveCache(offer.layout, room=room, dtype="float32"))
            return caches[-1]

        async with lynx_net.connect(url, allocate=allocate) as link:
            started_s = time.monotonic()
            transfer = await link.request("ttft", wanted(MODEL, self.prompt[:-1]))
            model = TransformersModel(self.loaded.model, caches[0])
            tail = self.prompt[transfer.offer.layout.tokens :]
            if len(tail) > 1:
                await transfer.residual_ready  # else the tail would be computed twice
            done: Done | None = None
            async for event in decode(model, transfer, prompt_tail=tail, max_new_tokens=1):
                done = event if isinstance(event, Done) else done
            await transfer.complete
            line = transfer.timeline()
        assert done is not None
        assert line.residual_ready_s is not None
        return {
            "ttft_s": done.token_times_s[0] - started_s,
            "anchor_s": (line.anchor_ready_s or 0) - started_s,
            "residual_s": line.residual_ready_s - started_s,
            "stored_tokens": transfer.offer.layout.tokens,
            "token": done.tokens[0],
            "draft_stood": done.accepted == 1 or done.drafted == 0,
        }


async def measure(folder: Path, rounds: int, rate: str, prompt_tokens: int) -> dict[str, Any]:
    """The three variants in turn."""
    bench = Bench(prompt_tokens)
    part = prompt_tokens * 3 // 4
    async with store_process(folder / "whole", rate) as whole, store_process(folder / "part", rate) as partly:
        filled = await bench.fill(whole, len(bench.prompt) - 1)
        await bench.fill(partly, part)
        await bench.fetch(whole)  # touch everything once
        samples = []
        for number in range(rounds):
            computed_s, token = bench.compute()
            found = {}
            for name, url in (("whole", whole), ("part", partly)):
                drop_from_memory(folder / name)
                found[name] = await bench.fetch(url)
            samples.append({"computed_s": computed_s, "token": token, **found})
            print(
                f"{number + 1}/{rounds}: computed {computed_s:.2f} s, from the store {found['whole']['ttft_s']:.3f} s, "
                f"three quarters from the store {found['part']['ttft_s']:.2f} s",
                flush=True,
            )
    return {
        "rate": rate,
        "prompt_tokens": len(bench.prompt),
        "stored": filled,
        "computed_s": statistics.median(one["computed_s"] for one in samples),
        "whole_s": statistics.median(one["whole"]["ttft_s"] for one in samples),
        "part_s": statistics.median(one["part"]["ttft_s"] for one in samples),
        "whole_ratio": statistics.median(one["whole"]["ttft_s"] / one["computed_s"] for one in samples),
        "part_ratio": statistics.median(one["part"]["ttft_s"] / one["computed_s"] for one in samples),
        "samples": samples,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code, 1 if an entry was lost or wrong."""
    parser = argparse.ArgumentParser(prog="python -m perf.store", description=__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5, metavar="N", help="of the times (default: %(default)s)")
    add("--rate", default="1Gbit", help="of the link (default: %(default)s)")
    add("--prompt-tokens", type=int, default=2048, metavar="N", help="(default: %(default)s)")
    add("--kills", type=int, default=0, metavar="N", help="of writers, and as many of servers (default: none)")
    add("--seed", type=int, default=0, help="of the moments of the kills (default: %(default)s)")
    add("--folder", type=Path, metavar="FOLDER", help="where the stores lie (default: one for temporary files)")
    add("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    limit_threads()
    arguments = parser.parse_args(argv)
    figures: dict[str, Any] = {"machine": machine_facts(PACKAGES)}
    outcomes = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        if arguments.kills:
            outcomes = [
                kill_writers(folder / "writers", arguments.kills, arguments.seed),
                asyncio.run(kill_servers(folder / "servers", arguments.kills, arguments.seed)),
            ]
            for what, outcome in zip(("writers", "servers"), outcomes, strict=True):
                figures[what] = {name: value for name, value in asdict(outcome).items() if name != "examined"}
                print(f"{what}: {figures[what]}", flush=True)
        if arguments.rounds:
            work = measure(folder, arguments.rounds, arguments.rate, arguments.prompt_tokens)
            figures["ttft"] = asyncio.run(work)
            print(json.dumps({key: value for key, value in figures["ttft"].items() if key != "samples"}, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if any(outcome.lost or outcome.wrong or outcome.wrong_received for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
