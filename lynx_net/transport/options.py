"""What operators set on sockets: checked when it is made, set by `lynx_net.transport.setup`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Self

from lynx_net.errors import LocalProtocolError
from lynx_net.wire.pacing import parse_rate

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["DEFAULT_RECEIVE_BUFFER_BYTES", "Keepalive", "PerClass", "SocketOptions"]

DEFAULT_RECEIVE_BUFFER_BYTES = 1024 * 1024
"""The only size the kernel may cut without an error, since nobody asked for it."""

NOTSENT_LOWAT_BYTES = 96 * 1024
LONE_NOTSENT_LOWAT_BYTES = 192 * 1024
"""Linux packs 64 KiB at a time: less than two of these, and of the only lane of a link less than four. Then sender and
receiver of a loopback link find in their caches what the other has just written (docs/sockets.md)."""

MAX_BUFFER_BYTES = 1 << 30
MAX_PACING_BYTES_PER_S = (1 << 32) - 2
"""SO_MAX_PACING_RATE is a 32-bit number of bytes, whose largest value means no pacing."""

_CONGESTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,15}")
MIN_USER_TIMEOUT_S = 0.001
MAX_USER_TIMEOUT_S = ((1 << 31) - 1) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PerClass:
    """A number for each class of bytes.

    Attributes:
        control: control frames: offers, grants, pings, and the handshake.
        anchor: stream 0 of every transfer.
        residual: stream 1.
        later: streams 2 and up.
    """

    control: int = 0
    anchor: int = 0
    residual: int = 0
    later: int = 0

    def by_class(self) -> tuple[int, int, int, int]:
        """Control, then streams 0, 1 and later."""
        return (self.control, self.anchor, self.residual, self.later)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """TCP keepalive (SO_KEEPALIVE): the kernel probes a connection on which nothing moves.

    Attributes:
        idle_s: silence before the first probe (TCP_KEEPIDLE), 1 to 32767 whole seconds.
        interval_s: between probes (TCP_KEEPINTVL), 1 to 32767 whole seconds.
        count: probes without an answer after which the connection is dropped (TCP_KEEPCNT), 1 to 127.
    """

    idle_s: int = 30
    interval_s: int = 10
    count: int = 3

    def __post_init__(self) -> None:
        _check_int("keepalive idle_s", self.idle_s, 1, 32767)
        _check_int("keepalive interval_s", self.interval_s, 1, 32767)
        _check_int("keepalive count", self.count, 1, 127)


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """What a transport sets on the connections of one side; the peers need not agree.

    An option that the kernel refuses, or that means nothing to the address, is an error of `connect` and `serve` at
    once. Only TCP_NOTSENT_LOWAT may be missing, and only the default receive buffer may be cut by the kernel.

    Attributes:
        notsent_lowat_bytes: bytes the kernel may hold unsent on a lane (TCP_NOTSENT_LOWAT); they are ahead of
            everything urgent. None is 96 KiB, and 192 KiB on the only lane of a link. TCP only.
        receive_buffer_bytes: bytes the kernel may hold unread on a lane (SO_RCVBUF); they are ahead of everything
            urgent, too. It must cover rate times round trip of a lane; None lets the kernel choose and grow it.
            TCP only.
        send_buffer_bytes: bytes the kernel may hold unsent or unacknowledged on a lane (SO_SNDBUF); None lets it
            choose and grow. On Unix sockets it bounds what the peer has not read.
        congestion_control: name of the algorithm (TCP_CONGESTION), for example "cubic" or "bbr". None leaves the
            system's, but for BBR on connections within this machine, which use "reno" instead: nothing paces there.
        keepalive: probes on a silent connection; None sends none. The link has pings of its own
            (`LinkConfig.deadline_s`).
        user_timeout_s: seconds that sent bytes may stay unacknowledged before the kernel drops the connection
            (TCP_USER_TIMEOUT, whole milliseconds), also when the link has closed it already; None leaves it to the
            kernel's retries.
        local_addresses: IP addresses of this machine; lane i leaves from address i modulo their number. Connecting
            sides only.
        dscp: differentiated services code point of each class, 0 to 63 (IP_TOS, IPV6_TCLASS; RFC 2474).
        priority: SO_PRIORITY of each class, for the queueing discipline of this machine; above 6 it needs
            CAP_NET_ADMIN (or, in newer kernels, CAP_NET_RAW). Where it is None, the kernel derives one from `dscp`.
        kernel_rate: the kernel paces each lane to this (SO_MAX_PACING_RATE): "10Gbit", "1.25GB/s", or bits per second
            as a number; at most 34.36 Gbit/s. It knows no classes; `rate` of `connect` and `serve` does.
        unix_mode: permission bits of the file of a listening Unix socket; None is 0o600, this user only.
    """

    notsent_lowat_bytes: int | None = None
    receive_buffer_bytes: int | None = DEFAULT_RECEIVE_BUFFER_BYTES
    send_buffer_bytes: int | None = None
    congestion_control: str | None = None
    keepalive: Keepalive | None = None
    user_timeout_s: float | None = None
    local_addresses: Sequence[str] = ()
    dscp: PerClass | None = None
    priority: PerClass | None = None
    kernel_rate: str | float | None = None
    unix_mode: int | None = None

    def __post_init__(self) -> None:
        if self.notsent_lowat_bytes is not None:
            _check_int("notsent_lowat_bytes", self.notsent_lowat_bytes, 1, MAX_BUFFER_BYTES)
        if self.receive_buffer_bytes is not None:
            _check_int("receive_buffer_bytes", self.receive_buffer_bytes, 1, MAX_BUFFER_BYTES)
        if self.send_buffer_bytes is not None:
            _check_int("send_buffer_bytes", self.send_buffer_bytes, 1, MAX_BUFFER_BYTES)
        if self.unix_mode is not None:
            _check_int("unix_mode", self.unix_mode, 0, 0o777)
        timeout_s = self.user_timeout_s
        if timeout_s is not None and not (
            isinstance(timeout_s, int | float) and MIN_USER_TIMEOUT_S <= timeout_s <= MAX_USER_TIMEOUT_S
        ):
            raise LocalProtocolError(f"user_timeout_s must be 0.001 to {MAX_USER_TIMEOUT_S:.0f}, not {timeout_s!r}")
        name = self.congestion_control
        if name is not None and not (isinstance(name, str) and _CONGESTION_NAME.fullmatch(name)):
            raise LocalProtocolError(f"congestion_control {name!r} is not 1 to 15 letters, digits, '_' or '-'")
        _check_classes("dscp", self.dscp, 63)
        _check_classes("priority", self.priority, (1 << 31) - 1)
        self._check_local_addresses()
        if not 1 <= self.kernel_rate_bytes_per_s <= MAX_PACING_BYTES_PER_S:
            raise LocalProtocolError(
                f"kernel_rate {self.kernel_rate!r} does not fit: SO_MAX_PACING_RATE is a 32-bit number of bytes per "
                f"second, so that a lane is paced to 8 bit/s to {MAX_PACING_BYTES_PER_S * 8 / 1e9:.2f} Gbit/s; "
                "take more lanes, or pace the link with `rate`"
            )

    @property
    def kernel_rate_bytes_per_s(self) -> int:
        """The value of SO_MAX_PACING_RATE; the largest one where nothing is configured."""
        rate_bps = parse_rate(self.kernel_rate)
        return MAX_PACING_BYTES_PER_S if rate_bps is None else round(rate_bps / 8)

    def for_lane(self, lane: int) -> Self:
        """The options of one lane: with its local address alone."""
        count = len(self.local_addresses)
        return self if count < 2 else replace(self, local_addresses=(self.local_addresses[lane % count],))

    def check_usable(self, what: str, usable: Collection[str]) -> None:
        """Refuse options that would do nothing.

        Args:
            what: completes "... does not apply to", for example "connecting to unix:///run/lynx".
            usable: the names of the optional fields that are used.

        Raises:
            LocalProtocolError: another one is set.
        """
        for field in fields(self):
            if field.name in ("notsent_lowat_bytes", "receive_buffer_bytes") or field.name in usable:
                continue
            value = getattr(self, field.name)
            if value != field.default:
                raise LocalProtocolError(f"the socket option {field.name} ({value}) does not apply to {what}")

    def _check_local_addresses(self) -> None:
        if isinstance(self.local_addresses, str):
            raise LocalProtocolError(f"local_addresses must be a sequence of texts, not {self.local_addresses!r}")
        for address in self.local_addresses:
            try:
                ipaddress.ip_address(address)
            except ValueError as error:
                raise LocalProtocolError(f"local_addresses: {address!r} is no IP address") from error
        # A list of the caller's could change later.
        object.__setattr__(self, "local_addresses", tuple(self.local_addresses))


def _check_classes(name: str, classes: PerClass | None, high: int) -> None:
    if classes is not None:
        for field, value in zip(fields(classes), classes.by_class(), strict=True):
            _check_int(f"{name} of {field.name}", value, 0, high)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise LocalProtocolError(f"{name} must be a whole number of {low} to {high}, not {value!r}")
