"""A tiny model in a folder, real server processes with it, and what their answers must be."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent.parent
EOS = 1
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def make_model(folder: Path, *, layers: int = 2, seed: int = 11) -> Path:
    """A Llama of random weights whose tokens are characters, saved as transformers saves models."""
    import tokenizers
    import torch
    import transformers

    vocabulary = {"<unk>": 0, "<eos>": EOS, **{text: 2 + number for number, text in enumerate(CHARACTERS)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.25)
        model.lm_head.weight[EOS] = 0  # answers are to have the length that a test asks for
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class ServerProcess:
    """`lynx-net prefill-server` or `decode-server` in a process of its own."""

    def __init__(self, command: str, *flags: str) -> None:
        paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "codec", "gpu"))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lynx_net", command, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []
        self.log: list[str] = []
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.lines)),
            threading.Thread(target=self._read, args=(self.process.stderr, self.log)),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, into: list[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    into.append(line.rstrip("\n"))
                    self._changed.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        """A line of standard output."""
        return self._wait_for(self.lines, pattern, timeout_s)

    def wait_for_log(self, pattern: str, timeout_s: float = 20.0) -> re.Match[str]:
        """A line of the log."""
        return self._wait_for(self.log, pattern, timeout_s)

    def _wait_for(self, lines: list[str], pattern: str, timeout_s: float) -> re.Match[str]:
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for line in lines:
                    if found := re.search(pattern, line):
                        return found
                if self.process.poll() is not None or time.monotonic() > deadline_s:
                    raise AssertionError(f"{pattern!r} did not come; lines {self.lines}, log {self.log[-20:]}")
                self._changed.wait(0.1)

    @property
    def url(self) -> str:
        return self.wait_for(r"listens on (\S+)")[1]

    def wait_until_ready(self) -> None:
        self.wait_for("is ready")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def ended(self, timeout_s: float = 20.0) -> int:
        """Exit code, once the process has ended by itself."""
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join()
        return code

    def stop(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.terminate()
            try:
                self.ended(10.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.ended()


@dataclass
class Pair:
    """Both servers, ready."""

    prefill: ServerProcess
    decode: ServerProcess

    @property
    def url(self) -> str:
        return self.decode.url


@contextlib.contextmanager
def running_pair(
    model: Path | str, *, prefill_flags: Sequence[str] = (), decode_flags: Sequence[str] = ()
) -> Iterator[Pair]:
    """Start both servers on free ports."""
    common = ("--model-name", str(model), "--http-port", "0")
    prefill = ServerProcess("prefill-server", *common, *prefill_flags)
    try:
        url = prefill.url
        decode = ServerProcess(
            "decode-server", *common, "--cache-url", "tcp://127.0.0.1:0", "--prefill-url", url, *decode_flags
        )
        try:
            prefill.wait_until_ready()
            decode.wait_until_ready()
            yield Pair(prefill, decode)
        finally:
            decode.terminate()
            prefill.terminate()
            decode.stop()
    finally:
        prefill.stop()


@dataclass
class LocalPair:
    """Both servers in this process, for tests that look inside."""

    prefill: Any
    decode: Any
    url: str
    prefill_url: str


@contextlib.asynccontextmanager
async def local_pair(
    model: Path, *, prefill: dict[str, dict[str, Any]] | None = None, decode: dict[str, dict[str, Any]] | None = None
) -> AsyncIterator[LocalPair]:
    """Start both in the running loop; `prefill` and `decode` change settings, by section."""
    from lynx_net.integrations.http.config import DecodeConfig, PrefillConfig
    from lynx_net.integrations.http.decode_app import DecodeServer
    from lynx_net.integrations.http.prefill_app import PrefillServer
    from lynx_net.integrations.http.serving import drain, serving

    common = {"http": {"port": 0}, "model": {"name": str(model)}}
    async with contextlib.AsyncExitStack() as stack:
        computing = PrefillServer(changed(PrefillConfig(), common, prefill or {}))
        prefill_url = await stack.enter_async_context(serving(computing))
        await stack.enter_async_context(computing.started())
        computing.service.state = "ready"
        where = {"prefill": {"url": prefill_url}, "cache": {"url": "tcp://127.0.0.1:0"}}
        decoding = DecodeServer(changed(DecodeConfig(), common, where, decode or {}))
        url = await stack.enter_async_context(serving(decoding))
        await stack.enter_async_context(decoding.started())
        decoding.service.state = "ready"
        yield LocalPair(computing, decoding, url, prefill_url)
        await drain(decoding)
        await drain(computing)


def changed(config: Any, *changes: dict[str, dict[str, Any]]) -> Any:
    """A configuration with other values in some sections."""
    for sections in changes:
        fields = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
        config = dataclasses.replace(config, **fields)
    return config


def get(url: str) -> str:
    """The body of an answer."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: str = answer.read().decode()
        return body


class Reference:
    """Answers by plain decoding on the cache that arrives whole: what every answer of the servers must equal."""

    def __init__(self, folder: Path) -> None:
        from lynx_net.integrations.http.config import ModelConfig
        from lynx_net.integrations.http.models import load_model

        self.served = load_model(ModelConfig(name=str(folder)), None)

    def tokens(self, prompt: Sequence[int], count: int, **coding: Any) -> list[int]:
        """Greedy tokens after a prompt, with the coding of the prefill server (the library's default)."""
        return asyncio.run(self._tokens(list(prompt), count, coding))

    def text(self, prompt: str | list[dict[str, str]], count: int, **coding: Any) -> str:
        """The text after a prompt or a conversation."""
        served = self.served
        tokens = served.encode(prompt) if isinstance(prompt, str) else served.encode_chat(prompt)
        return served.decode(self.tokens(tokens, count, **coding))

    async def _tokens(self, prompt: list[int], count: int, coding: dict[str, Any]) -> list[int]:
        import lynx_net
        from lynx_net.integrations.scores import SCORE_QUERIES
        from lynx_net.integrations.transformers import ProgressiveCache, TransformersModel, prefill
        from lynx_net.speculation import decode_plain

        model = self.served.model
        made = prefill(model, prompt, score_queries=SCORE_QUERIES)
        layout = self.served.layout(len(prompt) - 1)
        assert made.scores is not None
        coding = {"fine": lynx_net.fine_tokens(layout, made.scores[:, :-1]), **coding}
        cache = ProgressiveCache(layout, room=count + 1)
        async with (
            lynx_net.serve("memory://reference", allocate=lambda offer: cache) as server,
            lynx_net.connect(server.url) as link,
            link.send("reference", layout, **coding) as transfer,
        ):
            for layer, (keys, values) in enumerate(zip(made.keys, made.values, strict=True)):
                await transfer.write(layer, keys[:-1], values[:-1])
        stop = self.served.stop_tokens
        return decode_plain(TransformersModel(model, cache), prompt[-1:], max_new_tokens=count, stop_tokens=stop)
