"""Caches to send, and what must come out at the other end."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import lynx_codec
from lynx_net import CacheLayout, HostCache, KVLink, Sending
from lynx_net.serdes.fine import fine_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))

from beside import BesideTests, outcomes

# A shell that runs the tests in the background ignores SIGINT, and the processes that tests interrupt would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)


# No test depends on how fast the machine is, and hypothesis measures wall time.
settings.register_profile("lynx_net", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lynx_net")


@dataclass
class Cache:
    """A random cache with its layout; `fine` names its fine tokens."""

    layout: CacheLayout
    arrays: dict[tuple[int, str], NDArray[Any]]
    fine: NDArray[Any]

    async def write_to(self, sending: Sending, layers: range | None = None) -> None:
        for layer in range(self.layout.layers) if layers is None else layers:
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
    from tlskit import Certificates

    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels() -> None:
    """Imported and loaded before the first test, so that no deadline of a test pays for it."""
    for name in lynx_codec.codec_names():
        lynx_codec.get_codec(name).warm_up()
    lynx_codec.get_codec("nested", exact=True).warm_up()


FUZZ_TEST = "test_a_minute_of_fuzzing_beside_the_other_tests"
FUZZ_COMMANDS = tuple(
    (f"fuzz/{name}.py", "--seconds", "30", "--seed", str(os.getpid())) for name in ("fuzz_frames", "fuzz_links")
)
"""Each for half a minute of CPU time: a minute in all, however busy the machine is."""

LONG_FILES = (
    "demo/test_faults.py",
    "http/test_pair.py",
    "gpu/test_codecs.py",
    "test_distribution.py",
    "demo/test_demo.py",
)
"""They come first, that no worker of several has one left when the others are done."""

_FUZZ = pytest.StashKey[Path]()
_BESIDE = pytest.StashKey[BesideTests]()


def _urgency(item: pytest.Item) -> tuple[bool, int]:
    """The test that waits for the fuzzing comes last; one processor is idle in most tests."""
    place = [number for number, name in enumerate(LONG_FILES) if item.path.as_posix().endswith(name)]
    return item.name == FUZZ_TEST, place[0] if place else len(LONG_FILES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_urgency)


def pytest_configure(config: pytest.Config) -> None:
    """The folder of the fuzzing's outcome: that of the process that has started this one, if it is a worker."""
    given: str | None = getattr(config, "workerinput", {}).get("fuzz")
    config.stash[_FUZZ] = Path(given or tempfile.mkdtemp(prefix="lynx-net-tests-"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["fuzz"] = str(node.config.stash[_FUZZ])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    _start_fuzzing(node.config, ids)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput") and not session.config.option.collectonly:
        _start_fuzzing(session.config, [item.nodeid for item in session.items])


def _start_fuzzing(config: pytest.Config, asked_for: list[str]) -> None:
    """If the test that waits for it was asked for; once for all workers."""
    if _BESIDE not in config.stash and any(name.endswith(FUZZ_TEST) for name in asked_for):
        config.stash[_BESIDE] = BesideTests(config.stash[_FUZZ], FUZZ_COMMANDS)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        if _BESIDE in config.stash:
            config.stash[_BESIDE].end()
        shutil.rmtree(config.stash[_FUZZ])


@pytest.fixture
def fuzz_minute(request: pytest.FixtureRequest) -> list[tuple[int, str]]:
    """How the fuzzing that runs beside all tests ended, and what it printed."""
    return outcomes(request.config.stash[_FUZZ], len(FUZZ_COMMANDS), 390.0)
