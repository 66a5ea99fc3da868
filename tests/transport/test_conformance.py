"""Every transport passes the shipped suite, on asyncio's loop and on uvloop."""

import asyncio
import os
import socket
import tempfile
from typing import Any

import pytest
import uvloop

from lynx_net.testing.conformance import TransportConformance
from lynx_net.transport import Address, Transport, transport_for


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


class TestTls(TransportConformance):
    url = "tls://127.0.0.1:0"
    free_url = f"tls://127.0.0.1:{_free_port()}"

    @pytest.fixture(autouse=True)
    def _certificates(self, certificates: Any) -> None:
        self.tls = certificates.config()

    def transport(self, address: Address) -> Transport:
        return transport_for(address, self.tls)


SUITE = [name for name in dir(TransportConformance) if name.startswith("test_")]


@pytest.mark.parametrize("suite", [TestTcp, TestTcpIpv6, TestUnix])
@pytest.mark.parametrize("name", SUITE)
def test_on_uvloop(name: str, suite: type[TransportConformance]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(getattr(suite(), name)())


@pytest.mark.parametrize("name", SUITE)
def test_tls_on_uvloop(name: str, certificates: Any) -> None:
    suite = TestTls()
    suite.tls = certificates.config()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(getattr(suite, name)())
