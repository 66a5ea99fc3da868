"""Both servers in this process, or as docs/http.md starts them, and what their answers must be."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENT = ROOT / "docs" / "http.md"
BLOCK = re.compile(r"^```(?P<language>sh|python)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)

SHIMS = {
    # Nothing is installed: that the requirements are named right and fit together is all that can be tested here.
    "pip": """[ "$1" = install ] || exit 2
shift
exec "{python}" -m pip install --quiet --dry-run --no-index --no-build-isolation "${{@/#.\\[/{package}[}}"
""",
    "lynx-net": """model="--model-name {model} --model-served-name smollm2"
case "$1" in
  prefill-server) flags="--http-port {prefill} --link-rate 40Mbit $model" ;;
  decode-server) flags="--http-port {decode} --cache-url tcp://127.0.0.1:{cache} --prefill-url {prefill_url} $model" ;;
  store) flags="--listen tcp://127.0.0.1:{store}" ;;
esac
exec "{python}" -m lynx_net "$@" $flags 2>>"$1.log"
""",
}
"""What stands in for programs of the document, so that it can be run with a tiny model, on free ports, offline."""

PACKAGE = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md", "lynx_net", "codec", "gpu")
"""What a wheel is built from; pip builds a copy of it, since the C extension is compiled among the sources."""


class Walk:
    """The commands of the document's walk, in one shell, which starts and ends both servers."""

    def __init__(self, folder: Path, model: Path) -> None:
        section = DOCUMENT.read_text("utf-8").partition("\n## From nothing")[2].partition("\n## ")[0]
        found = [(match["language"], match["body"]) for match in BLOCK.finditer(section)]
        assert [language for language, _ in found] == ["sh", "python", "sh"]
        drafts = DOCUMENT.read_text("utf-8").partition("\n### Drafts")[2].partition("\n## ")[0]
        with_store = DOCUMENT.read_text("utf-8").partition("\n## With a context store")[2].partition("\n## ")[0]
        [self.with_store] = [match["body"] for match in BLOCK.finditer(with_store)]
        [self.drafts_program] = [match["body"] for match in BLOCK.finditer(drafts)]
        self.first, self.program, self.last = (body for _, body in found)
        self.commands = [*self.first.splitlines(), *self.last.splitlines()]
        self._ports = dict(zip(("prefill", "decode", "cache", "store"), free_ports(4), strict=True))
        self.url, self.prefill_url = (f"http://127.0.0.1:{self._ports[name]}" for name in ("decode", "prefill"))
        self.folder = folder
        programs, package = folder / "programs", folder / "package"
        programs.mkdir()
        copy_package(package)
        for name, text in SHIMS.items():
            values = {"python": sys.executable, "package": package, "model": model, "prefill_url": self.prefill_url}
            (programs / name).write_text("#!/usr/bin/env bash\n" + text.format(**values, **self._ports))
            (programs / name).chmod(0o755)
        paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "codec", "gpu"))
        self._shell = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def at_our_ports(self, text: str) -> str:
        """A command or program of the document, for the ports that its decode server and its store have here."""
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{self._ports['decode']}")
        return text.replace("127.0.0.1:7100", f"127.0.0.1:{self._ports['store']}")

    def run(self, command: str, timeout_s: float = 240.0) -> str:
        """Run a command of the document; returns what it printed."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{self.at_our_ports(command)}\necho; echo ended with $?\n")
        self._shell.stdin.flush()
        lines: list[str] = []
        deadline_s = time.monotonic() + timeout_s
        while not (lines and lines[-1].startswith("ended with ")):
            line = self._lines.get(timeout=max(deadline_s - time.monotonic(), 0.01))
            assert line is not None, f"the shell ended; {lines}, {self.logs()}"
            lines.append(line)
        assert lines[-1] == "ended with 0", f"{command}: {lines}, {self.logs()}"
        return "\n".join(lines[:-1])

    def logs(self) -> str:
        """What the servers have logged."""
        return "".join(file.read_text() for file in sorted(self.folder.glob("*.log")))

    def end(self) -> None:
        """End the shell, and the servers if they still run."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        with contextlib.suppress(ProcessLookupError):  # all of its group have ended
            os.killpg(self._shell.pid, signal.SIGTERM)
        self._shell.wait(30)
        self._reader.join()

    def _read(self) -> None:
        assert self._shell.stdout is not None
        with self._shell.stdout as lines:
            for line in lines:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)


def copy_package(target: Path) -> None:
    target.mkdir()
    for name in PACKAGE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, target / name)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


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
        self._known: dict[str, list[int]] = {}

    def tokens(self, prompt: Sequence[int], count: int, **coding: Any) -> list[int]:
        """Greedy tokens after a prompt, with the coding of the prefill server (the library's default)."""
        key = repr((list(prompt), count, coding))
        if key not in self._known:  # many tests ask the same
            self._known[key] = asyncio.run(self._tokens(list(prompt), count, coding))
        return self._known[key]

    def text(self, prompt: str | list[dict[str, str]], count: int, **coding: Any) -> str:
        """The text after a prompt or a conversation."""
        served = self.served
        tokens = served.encode(prompt) if isinstance(prompt, str) else served.encode_chat(prompt)
        return served.decode(self.tokens(tokens, count, **coding))

    def text_from(self, stored: str, prompt: str, count: int, **coding: Any) -> str:
        """The text after a prompt whose first tokens are taken from the cache of another one, and the rest computed."""
        computed, whole = self.served.encode(stored)[:-1], self.served.encode(prompt)
        common = next((i for i, (a, b) in enumerate(zip(computed, whole, strict=False)) if a != b), len(computed))
        common = min(common, len(whole) - 1)
        tokens = asyncio.run(self._tokens(self.served.encode(stored), count, coding, (common, whole[common:])))
        return self.served.decode(tokens)

    async def _tokens(
        self, prompt: list[int], count: int, coding: dict[str, Any], other: tuple[int, list[int]] | None = None
    ) -> list[int]:
        import lynx_net
        from lynx_net.integrations.scores import SCORE_QUERIES
        from lynx_net.integrations.transformers import ProgressiveCache, TransformersModel, prefill
        from lynx_net.speculation import decode_plain

        model = self.served.model
        made = prefill(model, prompt, score_queries=SCORE_QUERIES)
        layout = self.served.layout(len(prompt) - 1)
        assert made.scores is not None
        coding = {"fine": lynx_net.fine_tokens(layout, made.scores[:, :-1]), **coding}
        kept, rest = other or (layout.tokens, prompt[-1:])
        cache = ProgressiveCache(layout, room=count + len(rest))
        async with (
            lynx_net.serve("memory://reference", allocate=lambda offer: cache) as server,
            lynx_net.connect(server.url) as link,
            link.send("reference", layout, **coding) as transfer,
        ):
            for layer, (keys, values) in enumerate(zip(made.keys, made.values, strict=True)):
                await transfer.write(layer, keys[:-1], values[:-1])
        stop = self.served.stop_tokens
        cache.truncate(kept)
        return decode_plain(TransformersModel(model, cache), rest, max_new_tokens=count, stop_tokens=stop)
