"""Caches to send, and what must come out at the other end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import lynx_codec
from lynx_net import CacheLayout, HostCache, KVLink, Sending
from lynx_net.serdes.fine import fine_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

# A shell that runs the tests in the background ignores SIGINT, and the processes that tests interrupt would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Cache:
    """A random cache with its layout; `fine` names its fine tokens."""

    layout: CacheLayout
    arrays: dict[tuple[int, str], NDArray[Any]]
    fine: NDArray[Any]

    async def write_to(self, sending: Sending) -> None:
        for layer in range(self.layout.layers):
            await sending.write(layer, self.arrays.get((layer, "key")), self.arrays.get((layer, "value")))

    async def send_on(self, link: KVLink, request_id: str = "r", **options: Any) -> Sending:
        async with link.send(request_id, self.layout, **{"codec": "lynx", "fine": self.fine, **options}) as sending:
            await self.write_to(sending)
        return sending

    def decoded(self, codec_name: str, streams: int | None = None) -> HostCache:
        """What a receiver must hold, computed without any network, by the reference codec."""
        codec = lynx_codec.get_codec(codec_name, implementation="reference")
        target = HostCache(self.layout)
        for page in self.layout.pages():
            buffers = [memoryview(bytearray(size)) for size in codec.stream_bytes(page.shape, wide=True)]
            array = self.arrays[page.layer, page.kind][page.start : page.stop]
            fine = self.fine[(self.fine >= page.start) & (self.fine < page.stop)] - page.start
            lengths = codec.encode(array, page.shape, buffers, fine)
            encoded = [buffer[:length] for buffer, length in zip(buffers, lengths, strict=True)]
            out = target.view(page.layer, page.kind)[page.start : page.stop]
            codec.decode(encoded[:streams], page.shape, out)
        return target


def make_cache(seed: int = 0, **fields: Any) -> Cache:
    layout = CacheLayout(**({"layers": 2, "tokens": 300, "heads": 2, "key_size": 16, "value_size": 16} | fields))
    rng = np.random.default_rng(seed)
    arrays: dict[tuple[int, str], NDArray[Any]] = {}
    for layer in range(layout.layers):
        for kind in layout.kinds:
            array = rng.standard_normal(layout.array_shape(kind), dtype=np.float32) * (layer + 1)
            if layout.dtype == "float16":
                array = array.astype(np.float16)
            elif layout.dtype == "bfloat16":
                array = (array.view(np.uint32) >> 16).astype(np.uint16)
            arrays[layer, kind] = array
    fine = fine_tokens(layout, least=0)  # else small caches would have nothing to refine
    return Cache(layout.with_fine(fine.tolist()), arrays, fine)


def same(left: HostCache, right: HostCache) -> bool:
    """Bit for bit the same cache."""
    layout = left.layout
    return layout == right.layout and all(
        left.view(layer, kind).tobytes() == right.view(layer, kind).tobytes()
        for layer in range(layout.layers)
        for kind in layout.kinds
    )


@pytest.fixture(name="make_cache")
def _make_cache() -> Any:
    return make_cache


@pytest.fixture(name="same")
def _same() -> Any:
    return same


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Throwaway authorities and certificates; see tests/tlskit.py."""
    sys.path.insert(0, str(Path(__file__).parent))
    from tlskit import Certificates

    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels() -> None:
    """Imported and loaded before the first test, so that no deadline of a test pays for it."""
    for name in lynx_codec.codec_names():
        lynx_codec.get_codec(name).warm_up()


ROOT = Path(__file__).resolve().parent.parent
FUZZ_TEST = "test_a_minute_of_fuzzing_beside_the_other_tests"
FUZZ_COMMANDS = (("fuzz_frames.py", "30"), ("fuzz_links.py", "30"))
"""Each for half a minute of CPU time: a minute in all, however busy the machine is."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that waits for the fuzzing comes last; one processor is idle in most tests."""
    items.sort(key=lambda item: item.name == FUZZ_TEST)


@pytest.fixture(scope="session", autouse=True)
def fuzz_minute(request: pytest.FixtureRequest) -> Iterator[list[subprocess.Popen[str]]]:
    """Fuzzing that runs at the lowest priority beside all tests, if the test that waits for it was asked for."""
    running: list[subprocess.Popen[str]] = []
    if any(item.name == FUZZ_TEST for item in request.session.items):
        paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "codec", "gpu"))
        for script, seconds in FUZZ_COMMANDS:
            running.append(
                subprocess.Popen(
                    [sys.executable, str(ROOT / "fuzz" / script), "--seconds", seconds, "--seed", str(os.getpid())],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=os.environ | {"PYTHONPATH": paths},
                    preexec_fn=_lowest_priority,
                )
            )
    yield running
    for one in running:
        one.kill()
        one.wait()
        assert one.stdout is not None
        one.stdout.close()


def _lowest_priority() -> None:
    os.nice(19)
