"""UCX lanes: the shipped suite, a real transfer, deaths of processes, and the error when ucxx is missing."""

import importlib.util
import socket

import pytest

from lynx_net.testing.conformance import TransportConformance

needs_ucxx = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed (extra: ucx)")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@needs_ucxx
class TestUcx(TransportConformance):
    url = "ucx://127.0.0.1:0"
    free_url = f"ucx://127.0.0.1:{_free_port()}"
