"""Setting `SocketOptions` on sockets, with errors that name option and value."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from lynx_net.errors import LocalProtocolError
from lynx_net.transport.options import DEFAULT_RECEIVE_BUFFER_BYTES

if TYPE_CHECKING:
    from lynx_net.transport.options import SocketOptions

__all__ = [
    "TCP_CONGESTION",
    "TCP_INFO",
    "ClassMarks",
    "is_local",
    "set_low_water_mark",
    "set_send_buffer",
    "set_tcp_options",
    "unpace_local",
]

TCP_INFO = getattr(socket, "TCP_INFO", 11)
TCP_CONGESTION = getattr(socket, "TCP_CONGESTION", 13)
"""Of Linux, where this Python does not name them."""

_SO_MAX_PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47)
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_RTT_US = struct.Struct("=68xI")
"""tcpi_rtt in struct tcp_info of linux/tcp.h."""
_LOCAL_RTT_US = 1000
_CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")

_CLASS_NAMES = ("control", "anchor", "residual", "later streams")


def set_tcp_options(sock: socket.socket, options: SocketOptions) -> None:
    """Set everything on a TCP socket that neither connects nor listens yet; what it accepts inherits it.

    Buffers have to be set this early, since the window that is announced follows from them.

    Raises:
        LocalProtocolError: the kernel refuses an option.
    """
    tcp = socket.IPPROTO_TCP
    _set_receive_buffer(sock, options.receive_buffer_bytes)
    set_send_buffer(sock, options.send_buffer_bytes)
    if options.congestion_control is not None:
        name = options.congestion_control
        _set(sock, tcp, TCP_CONGESTION, name.encode(), f"TCP_CONGESTION {name!r}")
    if options.keepalive is not None:
        keepalive = options.keepalive
        _set(sock, socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1, "SO_KEEPALIVE")
        _set(sock, tcp, socket.TCP_KEEPIDLE, keepalive.idle_s, f"TCP_KEEPIDLE {keepalive.idle_s}")
        _set(sock, tcp, socket.TCP_KEEPINTVL, keepalive.interval_s, f"TCP_KEEPINTVL {keepalive.interval_s}")
        _set(sock, tcp, socket.TCP_KEEPCNT, keepalive.count, f"TCP_KEEPCNT {keepalive.count}")
    if options.user_timeout_s is not None:
        milliseconds = round(options.user_timeout_s * 1000)
        _set(sock, tcp, socket.TCP_USER_TIMEOUT, milliseconds, f"TCP_USER_TIMEOUT {milliseconds} ms")
    if options.kernel_rate is not None:
        rate = options.kernel_rate_bytes_per_s
        _set(sock, socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("@I", rate), f"SO_MAX_PACING_RATE {rate} B/s")
    marks = ClassMarks.of(sock, options)
    if marks is not None:
        marks.try_all()


def set_low_water_mark(sock: socket.socket, unsent_bytes: int) -> None:
    """TCP_NOTSENT_LOWAT, where the kernel has it; without it more bytes are beyond recall, nothing else changes."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, unsent_bytes)


def is_local(sock: socket.socket) -> bool:
    """Whether both ends of a connection have the same address."""
    return bool(sock.getsockname()[0] == sock.getpeername()[0])


def unpace_local(sock: socket.socket) -> None:
    """Take a connection within this machine from BBR to Reno, which every Linux has.

    BBR spaces packets by a timer, so that no queue builds in a network. Here there is none, and the sender sleeps for
    nothing (docs/sockets.md has the figures). Where the round trip is longer, somebody emulates one: BBR stays then.
    """
    with contextlib.suppress(OSError):  # another system, or Reno is not allowed: slower, and nothing else
        control = sock.getsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, 16).rstrip(b"\0")
        if control != b"bbr" or not is_local(sock):
            return
        (rtt_us,) = _RTT_US.unpack(sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, _RTT_US.size))
        if rtt_us < _LOCAL_RTT_US:
            sock.setsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, b"reno")


def set_send_buffer(sock: socket.socket, wanted_bytes: int | None) -> None:
    """SO_SNDBUF; raises LocalProtocolError if the kernel allows less."""
    if wanted_bytes is None:
        return
    got_bytes = _set_buffer(sock, socket.SO_SNDBUF, wanted_bytes)
    if got_bytes < wanted_bytes:
        raise LocalProtocolError(
            f"the kernel refuses SO_SNDBUF {wanted_bytes}: it allows {got_bytes} (sysctl net.core.wmem_max)"
        )


def _set_receive_buffer(sock: socket.socket, wanted_bytes: int | None) -> None:
    if wanted_bytes is None:
        return
    got_bytes = _set_buffer(sock, socket.SO_RCVBUF, wanted_bytes)
    if got_bytes < wanted_bytes and wanted_bytes != DEFAULT_RECEIVE_BUFFER_BYTES:
        raise LocalProtocolError(
            f"the kernel refuses SO_RCVBUF {wanted_bytes}: it allows {got_bytes} (sysctl net.core.rmem_max)"
        )


def _set_buffer(sock: socket.socket, option: int, wanted_bytes: int) -> int:
    sock.setsockopt(socket.SOL_SOCKET, option, wanted_bytes)
    # The kernel cuts without an error, and counts twice, for its own bookkeeping.
    return sock.getsockopt(socket.SOL_SOCKET, option) // 2


class ClassMarks:
    """Code point and priority of the bytes that a socket sends next.

    The kernel knows both per socket only, so they are changed between sends. A packet carries what holds when it
    leaves: bytes still unsent at a change (TCP_NOTSENT_LOWAT bounds them) and retransmissions carry the new mark.
    """

    @classmethod
    def of(cls, sock: socket.socket, options: SocketOptions) -> ClassMarks | None:
        """None where nothing is configured."""
        return None if options.dscp is None and options.priority is None else cls(sock, options)

    def __init__(self, sock: socket.socket, options: SocketOptions) -> None:
        self._sock = sock
        dscp = (None,) * 4 if options.dscp is None else options.dscp.by_class()
        priority = (None,) * 4 if options.priority is None else options.priority.by_class()
        self._marks = tuple(zip(dscp, priority, strict=True))
        self._set: tuple[int | None, int | None] | None = None

    def set(self, stream: int | None) -> None:
        """Mark what is sent from now on as a stream's, or as control (None). Costs nothing if that changes nothing.

        Raises:
            OSError: as setsockopt does.
        """
        mark = self._marks[0 if stream is None else min(stream, 2) + 1]
        if mark == self._set:
            return
        dscp, priority = mark
        if dscp is not None:
            traffic_class = dscp << 2  # the kernel keeps the two bits of ECN to itself
            self._sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, traffic_class)
            if self._sock.family == socket.AF_INET6:  # which may carry IPv4 as well
                self._sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, traffic_class)
        if priority is not None:
            # After IP_TOS, which derives a priority of its own.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
        self._set = mark

    def try_all(self) -> None:
        """Set the mark of each class once and leave that of control, so that a refusal is known at once.

        Raises:
            LocalProtocolError: the kernel refuses one.
        """
        for stream in (2, 1, 0, None):
            try:
                self.set(stream)
            except OSError as error:
                index = 0 if stream is None else stream + 1
                named = zip(("DSCP", "SO_PRIORITY"), self._marks[index], strict=True)
                marks = " and ".join(f"{name} {value}" for name, value in named if value is not None)
                raise _refused(f"{marks} of {_CLASS_NAMES[index]}", error) from error


def _set(sock: socket.socket, level: int, option: int, value: int | bytes, what: str) -> None:
    try:
        sock.setsockopt(level, option, value)
    except OSError as error:
        raise _refused(what, error) from error


def _refused(what: str, error: OSError) -> LocalProtocolError:
    hint = ""
    if what.startswith("TCP_CONGESTION") and error.errno == errno.ENOENT:
        with contextlib.suppress(OSError):
            hint = f"; this machine has {_CONGESTION_CONTROLS.read_text().strip()}"
    elif what.startswith("TCP_CONGESTION") and error.errno == errno.EPERM:
        hint = "; sysctl net.ipv4.tcp_allowed_congestion_control does not list it"
    elif "SO_PRIORITY" in what and error.errno == errno.EPERM:
        hint = "; above 6 it needs CAP_NET_ADMIN"
    return LocalProtocolError(f"the kernel refuses {what}: {error.strerror or error}{hint}")
