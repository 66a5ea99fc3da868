"""Device memory over UCX lanes: needs a CUDA device, cupy and ucxx."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lynx_net.errors import LocalProtocolError
from lynx_net.transport import Address, SocketOptions, transport_for

CHILD = Path(__file__).parent / "ucx_child.py"


@pytest.mark.gpu
@pytest.mark.parametrize("environment", [{"UCX_TLS": "tcp,cuda_copy"}, {}], ids=["tcp", "best"])
async def test_device_arrays_between_processes(environment: dict[str, str]) -> None:
    """Host to device, device to host, device to device, from streams that are still at work."""
    cupy = pytest.importorskip("cupy")
    pytest.importorskip("ucxx")
    address = Address.parse("ucx://127.0.0.1:0")
    listener = await transport_for(address).listen(address, SocketOptions())
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, str(CHILD), "send_device_memory", listener.url], env=os.environ | environment
    )
    try:
        lane = await listener.accept()
        expected = cupy.arange(1 << 20, dtype=cupy.int32) + 1
        array = cupy.zeros(1 << 20, cupy.int32)
        filled = 0
        while filled < array.nbytes:
            filled += await lane.receive_into([array.view(cupy.uint8)[filled:]])
        assert bool((array == expected).all())
        await lane.send([b"!", cupy.asnumpy(array).view("u1")])
        back = memoryview(bytearray(array.nbytes))
        filled = 0
        while filled < back.nbytes:
            filled += await lane.receive_into([back[filled:]])
        assert bytes(back) == cupy.asnumpy(expected).tobytes()
        await lane.send([b"."])
        lane.close()
        assert await asyncio.to_thread(process.wait, 20) == 0
    finally:
        process.kill()
        process.wait()
        listener.close()


@pytest.mark.gpu
async def test_a_device_view_must_hold_the_next_message() -> None:
    """It is refused before a byte is taken, and the lane goes on."""
    cupy = pytest.importorskip("cupy")
    pytest.importorskip("ucxx")
    address = Address.parse("ucx://127.0.0.1:0")
    listener = await transport_for(address).listen(address, SocketOptions())
    bound = Address.parse(listener.url)
    left, right = await asyncio.gather(transport_for(bound).connect(bound, SocketOptions()), listener.accept())
    await left.send([bytes(range(200))])
    with pytest.raises(LocalProtocolError, match="200"):
        await right.receive_into([cupy.zeros(100, cupy.uint8)])
    array = cupy.zeros(300, cupy.uint8)
    assert await right.receive_into([array]) == 200
    assert cupy.asnumpy(array[:200]).tobytes() == bytes(range(200))
    for closeable in (left, right, listener):
        closeable.close()
