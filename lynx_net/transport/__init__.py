"""Byte movers behind one small interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lynx_net.errors import LocalProtocolError
from lynx_net.transport.base import Address, Lane, Listener, SocketOptions, Transport
from lynx_net.transport.memory import MemoryTransport
from lynx_net.transport.options import Keepalive, PerClass
from lynx_net.transport.tcp import TcpTransport
from lynx_net.transport.tls import TlsConfig, TlsTransport
from lynx_net.transport.ucx import UcxTransport
from lynx_net.transport.unix import UnixTransport

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Address",
    "Keepalive",
    "Lane",
    "Listener",
    "PerClass",
    "SocketOptions",
    "TlsConfig",
    "Transport",
    "transport_for",
]

_SCHEMES: dict[str, Callable[[], Transport]] = {
    "memory": MemoryTransport,
    "tcp": TcpTransport,
    "ucx": UcxTransport,
    "unix": UnixTransport,
}


def transport_for(address: Address, tls: TlsConfig | None = None) -> Transport:
    """The transport of an address.

    Raises:
        LocalProtocolError: the scheme is unknown, or there are certificates without tls:// or the other way round.
        BackendMissingError: what it needs is not installed.
    """
    if address.scheme == "tls":
        if tls is None:
            raise LocalProtocolError(f"{address} needs certificates: tls=TlsConfig(...)")
        return TlsTransport(tls)
    if tls is not None:
        raise LocalProtocolError(f"{address} would carry everything in clear; with certificates write tls://")
    make = _SCHEMES.get(address.scheme)
    if make is None:
        raise LocalProtocolError(
            f"unknown scheme {address.scheme!r}; known are {', '.join(sorted([*_SCHEMES, 'tls']))}"
        )
    return make()
