"""Many clients at the HTTP pair, a third of them leaving in mid-way: `python -m perf.http_pair --json FILE`.

Both servers run as processes, the clients are those of the `openai` package (extra `dev`). Three kinds of rounds take
turns:

    alone     only the clients that stay
    leaving   the same, and a third more that leave: in the queue, at the prefill server, in mid-transfer, in
              mid-answer; those that stream ask for as much as the model gives
    staying   all of them, and nobody leaves

`leaving / alone` is what those who leave cost the others, `leaving / staying` what their going gives back. The texts of
all rounds must be equal, and afterwards both servers must hold nothing: the figures of their metrics are those before
the first round, after a warm-up, and after the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lynx_net.demo.results import machine_facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import openai

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. "
HELD = ("lynx_net_http_tasks", "process_open_fds", "process_threads", "process_resident_memory_bytes")
EMPTY = (
    "lynx_net_http_requests_running",
    "lynx_net_http_requests_queued",
    "lynx_net_http_caches",
    'lynx_net_transfers{direction="incoming"}',
    'lynx_net_transfers{direction="outgoing"}',
)
KINDS = ("alone", "leaving", "staying")
SETTINGS = ("clients", "rounds", "new_tokens", "prompt_chars", "rate", "at_once")
START_S = 180.0
SETTLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one client got."""

    text: str
    ttft_s: float
    total_s: float


class Servers:
    """Both processes; use `running`."""

    def __init__(self, decode: str, prefill: str) -> None:
        self.decode = decode
        self.prefill = prefill

    @classmethod
    @contextlib.contextmanager
    def running(cls, model: str, rate: str, at_once: int) -> Iterator[Servers]:
        """Start them on free ports; leaving the block ends them, and fails if either does not end well."""
        common = ("--model-name", model, "--http-port", "0", "--log-level", "warning")
        with server_process("prefill-server", *common, "--link-rate", rate) as prefill:
            own = ("--cache-url", "tcp://127.0.0.1:0", "--prefill-url", prefill, "--limits-running", str(at_once))
            with server_process("decode-server", *common, *own) as decode:
                deadline_s = time.monotonic() + START_S
                while not is_ready(decode):
                    if time.monotonic() > deadline_s:
                        raise SystemExit(f"the servers are not ready after {START_S:g} s")
                    time.sleep(0.1)
                yield cls(decode, prefill)

    def settled(self) -> dict[str, dict[str, float]]:
        """Metrics of both once nothing is under way."""
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            found = {"decode": metrics_of(self.decode), "prefill": metrics_of(self.prefill)}
            left = {
                f"{side} {name}": metrics[name]
                for side, metrics in found.items()
                for name in EMPTY
                if metrics.get(name, 0)
            }
            if not left:
                return {side: {name: metrics[name] for name in HELD} for side, metrics in found.items()}
            if time.monotonic() > deadline_s:
                raise SystemExit(f"something is left behind: {left}")
            time.sleep(0.1)


@contextlib.contextmanager
def server_process(*arguments: str) -> Iterator[str]:
    """A server process and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lynx_net", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if " listens on " not in line:
            raise SystemExit(f"{arguments[0]} does not start")
        yield line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SETTLE_S)
    if process.returncode != 0:
        raise SystemExit(f"{arguments[0]} ended with code {process.returncode}")


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
            return True
    except OSError:
        return False


def metrics_of(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


class Crowd:
    """The clients of all rounds."""

    def __init__(self, url: str, model: str, clients: int, new_tokens: int, prompt_chars: int) -> None:
        self._url = url
        self._model = model
        self._clients = clients
        self._new_tokens = new_tokens
        self._prompt = (TEXT * (prompt_chars // len(TEXT) + 1))[:prompt_chars]
        self.leaving = frozenset(range(0, clients, 3))

    async def round(self, kind: str, seed: int) -> dict[int, Answer]:
        """All clients of a round at once; the answers of those that stayed."""
        import openai

        rng = random.Random(seed)
        numbers = [number for number in range(self._clients) if kind != "alone" or number not in self.leaving]
        async with openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0, timeout=600) as client:
            asks = [
                self._leave(client, number, rng)
                if kind == "leaving" and number in self.leaving
                else self._stay(client, number)
                for number in numbers
            ]
            answers = await asyncio.gather(*asks)
        return {number: answer for number, answer in zip(numbers, answers, strict=True) if answer is not None}

    def _fields(self, number: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"{number}. {self._prompt}"}]
        return {"model": self._model, "messages": messages, "temperature": 0, "stream": True}

    async def _stay(self, client: openai.AsyncOpenAI, number: int) -> Answer:
        began_s = time.monotonic()
        pieces: list[str] = []
        ttft_s = 0.0
        stream = await client.chat.completions.create(**self._fields(number), max_tokens=self._new_tokens)
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                ttft_s = ttft_s or time.monotonic() - began_s
                pieces.append(chunk.choices[0].delta.content)
        return Answer("".join(pieces), ttft_s, time.monotonic() - began_s)

    async def _leave(self, client: openai.AsyncOpenAI, number: int, rng: random.Random) -> None:
        """Half of them after some time, whatever happens until then, half after some pieces."""
        if number % 2:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0, 1)):
                    await self._stay(client, number)
            return
        wanted = rng.randrange(1, self._new_tokens)
        async with await client.chat.completions.create(**self._fields(number)) as stream:
            async for chunk in stream:
                wanted -= bool(chunk.choices and chunk.choices[0].delta.content)
                if wanted <= 0:
                    return


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def ratios(of: dict[str, float], to: dict[str, float]) -> dict[str, float]:
    """Each figure of one kind of round over that of another."""
    return {name: value / to[name] for name, value in of.items()}


async def measure(arguments: argparse.Namespace, servers: Servers, model: str) -> dict[str, Any]:
    """All rounds."""
    crowd = Crowd(servers.decode, model, arguments.clients, arguments.new_tokens, arguments.prompt_chars)
    expected = await crowd.round("staying", 0)  # the warm-up
    await crowd.round("leaving", 0)
    before = servers.settled()
    figures: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    wrong = 0
    for number in range(arguments.rounds):
        for kind in KINDS:
            answers = await crowd.round(kind, number + 1)
            wrong += sum(answer.text != expected[client].text for client, answer in answers.items())
            stayed = [answer for client, answer in answers.items() if client not in crowd.leaving]
            figures[kind].append(
                {
                    f"{name}_{label}_s": percentile([getattr(answer, f"{name}_s") for answer in stayed], share)
                    for name in ("ttft", "total")
                    for label, share in (("p50", 0.5), ("p99", 0.99))
                }
            )
    after = servers.settled()
    medians = {
        kind: {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        for kind, rounds in figures.items()
    }
    return {
        "machine": machine_facts(),
        "settings": {
            name: getattr(arguments, name) for name in ("clients", "rounds", "new_tokens", "prompt_chars", "rate")
        },
        "model": model,
        "medians": medians,
        "leaving_over_alone": {name: medians["leaving"][name] / medians["alone"][name] for name in medians["alone"]},
        "leaving_over_staying": {
            name: medians["leaving"][name] / medians["staying"][name] for name in medians["alone"]
        },
        "rounds": figures,
        "wrong_texts": wrong,
        "held_before": before,
        "held_after": after,
    }


def main() -> int:
    """Run, print, and write the figures; the exit code is 1 if a text was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5, help="of each kind (default 5)")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of an answer (default 32)")
    parser.add_argument("--prompt-chars", type=int, default=700, help="characters of a prompt (default 700)")
    parser.add_argument("--rate", default="100Mbit", help="of the link (default 100Mbit)")
    parser.add_argument("--at-once", type=int, default=8, help="requests that the decode server runs (default 8)")
    parser.add_argument("--model", help="smollm2, gemma3 or a folder (default: a tiny one of random weights)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended too
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model is None:
            from perf.tiny_model import make_model

            model = str(make_model(Path(folder) / "tiny"))
        with Servers.running(model, arguments.rate, arguments.at_once) as servers:
            result = asyncio.run(measure(arguments, servers, Path(model).name))
    for kind in KINDS:
        figures = "  ".join(f"{name} {value:.3f}" for name, value in result["medians"][kind].items())
        print(f"{kind:8} {figures}")
    for name in ("leaving_over_alone", "leaving_over_staying"):
        print(f"{name}: " + "  ".join(f"{key} {value:.2f}" for key, value in result[name].items()))
    print(f"wrong texts: {result['wrong_texts']}")
    for side in ("decode", "prefill"):
        held = ((name, result["held_before"][side][name], result["held_after"][side][name]) for name in HELD)
        print(f"{side}: " + "  ".join(f"{name} {was:g} -> {now:g}" for name, was, now in held))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["wrong_texts"] else 0


if __name__ == "__main__":
    sys.exit(main())
