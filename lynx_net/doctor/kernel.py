"""What the kernel and the host say of themselves. Linux says the most; what it does not say is None."""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

from lynx_net.doctor.facts import ConnectionFacts, HostFacts
from lynx_net.transport.setup import TCP_CONGESTION, TCP_INFO
from lynx_net.wire.frames import checksum

__all__ = ["connection_facts", "host_facts", "parse_tcp_info"]

_CHECKSUM_BYTES = 1 << 20
_CHECKSUM_S = 0.03

_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")


def host_facts() -> HostFacts:
    """This host; takes some hundredths of a second of processor time for the checksum."""
    buffers = _numbers("/proc/sys/net/ipv4/tcp_wmem")
    limits = _numbers("/proc/sys/net/core/rmem_max")
    return HostFacts(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=os.getloadavg()[0],
        checksum_bps=_checksum_bps(),
        receive_limit_bytes=limits[0] if limits else None,
        send_limit_bytes=buffers[2] if len(buffers) == 3 else None,
    )


def connection_facts(sock: socket.socket) -> ConnectionFacts:
    """One connected TCP socket."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 512)
        name = sock.getsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, 16)
    except OSError:  # not Linux
        return ConnectionFacts()
    return parse_tcp_info(info, name.rstrip(b"\0").decode("ascii", "replace") or None)


def parse_tcp_info(info: bytes, congestion: str | None) -> ConnectionFacts:
    """Read struct tcp_info of linux/tcp.h, which has only ever grown at its end; older kernels give less of it."""

    def number(offset: int, form: struct.Struct = _U32) -> int | None:
        return form.unpack_from(info, offset)[0] if offset + form.size <= len(info) else None

    def seconds(offset: int, form: struct.Struct = _U32) -> float | None:
        value = number(offset, form)
        return None if value is None else value / 1e6

    min_rtt_us, rate = number(148), number(160, _U64)
    return ConnectionFacts(
        congestion=congestion,
        rtt_s=seconds(68),
        # All ones until a round trip was measured.
        min_rtt_s=None if min_rtt_us in (None, 0xFFFFFFFF) else min_rtt_us / 1e6,
        mss_bytes=number(16),
        mtu_bytes=number(60),
        window_segments=number(80),
        sent_segments=number(156),
        retransmitted_segments=number(100),
        delivery_rate_bps=None if rate is None else rate * 8.0,
        notsent_bytes=number(144),
        busy_s=seconds(168, _U64),
        receiver_limited_s=seconds(176, _U64),
        buffer_limited_s=seconds(184, _U64),
    )


def _numbers(file: str) -> list[int]:
    try:
        return [int(word) for word in Path(file).read_text().split()]
    except (OSError, ValueError):  # another system, or a container that hides it
        return []


def _checksum_bps() -> float:
    """The best of several short looks: a core that was taken away in between says nothing of the checksum."""
    data = bytes(_CHECKSUM_BYTES)
    best_s, until_s = 1.0, time.perf_counter() + _CHECKSUM_S
    while (began_s := time.perf_counter()) < until_s:
        checksum(data)
        best_s = min(best_s, time.perf_counter() - began_s)
    return _CHECKSUM_BYTES * 8 / best_s
