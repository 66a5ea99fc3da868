"""The other process of the UCX tests: `python ucx_child.py MODE URL`."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

import lynx_net
from lynx_net.errors import ConnectionLostError
from lynx_net.transport import Address, SocketOptions, transport_for

PATTERN = bytes(range(256)) * 4096
"""What "flood" sends over and over."""


async def send_cache(url: str) -> None:
    """Send the tests' random cache over a link of two lanes."""
    file = Path(__file__).parent.parent / "conftest.py"
    spec = importlib.util.spec_from_file_location("cache_maker", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cache_maker"] = module
    spec.loader.exec_module(module)
    async with lynx_net.connect(url, lanes=2) as link:
        await module.make_cache(layers=4, tokens=1000).send_on(link)


async def flood(url: str) -> None:
    """Send on one lane until it is lost, in buffers of several sizes."""
    address = Address.parse(url)
    lane = await transport_for(address).connect(address, SocketOptions())
    try:
        while True:
            await lane.send([PATTERN[:48], PATTERN[48:300_000], PATTERN[300_000:]])
    except ConnectionLostError:
        pass


async def idle(url: str) -> None:
    """Open a link and do nothing."""
    async with lynx_net.connect(url):
        await asyncio.sleep(60)


async def last_words(url: str) -> None:
    """Send, close, and end at once."""
    address = Address.parse(url)
    lane = await transport_for(address).connect(address, SocketOptions())
    await lane.send([PATTERN[:200_000]])
    lane.close()


async def send_device_memory(url: str) -> None:
    """Send arrays that a busy CUDA stream is still filling, and send back what comes."""
    import cupy

    address = Address.parse(url)
    lane = await transport_for(address).connect(address, SocketOptions())
    with cupy.cuda.Stream(non_blocking=True):
        grid = cupy.ones((4096, 4096), cupy.float32)
        for _ in range(40):
            grid = grid @ grid / 4096
        array = (cupy.arange(1 << 20, dtype=cupy.int32) + grid[0, 0].astype(cupy.int32)).reshape(1024, 1024)
        await lane.send([array])
        echo = cupy.zeros_like(array)
        view = memoryview(bytearray(1))
        assert await lane.receive_into([view]) == 1
        filled = 0
        while filled < echo.nbytes:
            filled += await lane.receive_into([echo.reshape(-1).view(cupy.uint8)[filled:]])
        await lane.send([echo])
    await lane.receive_into([view])


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](sys.argv[2]))
