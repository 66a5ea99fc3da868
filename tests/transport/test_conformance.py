"""Every transport passes the shipped suite, on asyncio's loop and on uvloop."""

import asyncio
import os
import socket
import tempfile

import pytest
import uvloop

from lynx_net.testing.conformance import TransportConformance


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class TestMemory(TransportConformance):
    url = "memory://conformance"
    free_url = "memory://nobody"


class TestTcp(TransportConformance):
    url = "tcp://127.0.0.1:0"
    free_url = f"tcp://127.0.0.1:{_free_port()}"


class TestTcpIpv6(TransportConformance):
    url = "tcp://[::1]:0"
    free_url = f"tcp://[::1]:{_free_port()}"


class TestUnix(TransportConformance):
    url = f"unix://{tempfile.gettempdir()}/lynx-conformance-{os.getpid()}.sock"
    free_url = f"unix://{tempfile.gettempdir()}/lynx-nobody-{os.getpid()}.sock"


class TestUnixAbstract(TransportConformance):
    url = f"unix://@lynx-conformance-{os.getpid()}"
    free_url = f"unix://@lynx-nobody-{os.getpid()}"


SUITE = [name for name in dir(TransportConformance) if name.startswith("test_")]


@pytest.mark.parametrize("suite", [TestTcp, TestTcpIpv6, TestUnix])
@pytest.mark.parametrize("name", SUITE)
def test_on_uvloop(name: str, suite: type[TransportConformance]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(getattr(suite(), name)())
