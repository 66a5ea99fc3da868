"""Options as the kernel reports them on both sides, as packets carry them, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lynx_net
from lynx_net import Keepalive, PerClass, SocketOptions
from lynx_net.aio.pump import LoopPump
from lynx_net.aio.threads import ThreadPump
from lynx_net.errors import ConnectionFailedError, LocalProtocolError
from lynx_net.transport import Address, setup, tcp, transport_for
from lynx_net.transport.setup import ClassMarks, unpace_local
from lynx_net.transport.tcp import SocketLane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

TCP = socket.IPPROTO_TCP
DSCP = PerClass(control=48, anchor=46, residual=10, later=8)
PRIORITY = PerClass(control=6, anchor=5, residual=1, later=2)
SO_ATTACH_FILTER = 26
SOL_PACKET, PACKET_STATISTICS = 263, 6
BY_STREAM = [(None, "control"), (0, "anchor"), (1, "residual"), (2, "later"), (7, "later"), (0, "anchor")]

both_versions = pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "tcp://[::1]:0"])
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="reading packets needs CAP_NET_RAW")


@contextlib.asynccontextmanager
async def _lanes(url: str, options: SocketOptions) -> AsyncIterator[tuple[SocketLane, SocketLane]]:
    """A connected pair, with the same options on both sides."""
    transport = transport_for(Address.parse(url))
    listener = await transport.listen(Address.parse(url), options)
    try:
        left = await transport.connect(Address.parse(listener.url), options)
        right = await listener.accept()
    finally:
        listener.close()
    assert isinstance(left, SocketLane)
    assert isinstance(right, SocketLane)
    try:
        yield left, right
    finally:
        left.close()
        right.close()


@pytest.mark.parametrize(("lanes", "asked", "lies"), [(1, None, 192), (2, None, 96), (1, 80, 80), (2, 80, 80)])
async def test_more_may_lie_unsent_on_the_only_lane_of_a_link(lanes: int, asked: int | None, lies: int) -> None:
    options = SocketOptions(notsent_lowat_bytes=None if asked is None else asked * 1024)
    async with (
        lynx_net.serve("tcp://127.0.0.1:0", sockets=options) as server,
        lynx_net.connect(server.url, lanes=lanes, sockets=options) as link,
    ):
        for side in (link, await server.accept()):
            for lane in side.lanes:
                sock = lane.plain_socket
                assert sock is not None
                assert sock.getsockopt(TCP, getattr(socket, "TCP_NOTSENT_LOWAT", 25)) == lies * 1024


@both_versions
async def test_the_kernel_has_every_option_on_both_sides(url: str) -> None:
    options = SocketOptions(
        notsent_lowat_bytes=48 * 1024,
        receive_buffer_bytes=96 * 1024,
        send_buffer_bytes=160 * 1024,
        congestion_control="reno",
        keepalive=Keepalive(idle_s=21, interval_s=7, count=4),
        user_timeout_s=12.5,
        kernel_rate="80Mbit",
    )
    async with _lanes(url, options) as lanes:
        for lane in lanes:
            sock = lane.plain_socket
            # The kernel reports buffers with its bookkeeping, which is as much again.
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 2 * 96 * 1024
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * 160 * 1024
            assert sock.getsockopt(TCP, getattr(socket, "TCP_NOTSENT_LOWAT", 25)) == 48 * 1024
            assert _congestion(sock) == "reno"
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            probes = [sock.getsockopt(TCP, x) for x in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)]
            assert probes == [21, 7, 4]
            assert sock.getsockopt(TCP, socket.TCP_USER_TIMEOUT) == 12_500
            assert sock.getsockopt(socket.SOL_SOCKET, 47) == 10_000_000


def _congestion(sock: socket.socket) -> str:
    return sock.getsockopt(TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


async def test_nothing_is_set_that_was_not_asked_for() -> None:
    """But Reno for BBR, since both ends are on this machine."""
    with socket.socket() as untouched:
        congestion = _congestion(untouched)
    async with _lanes("tcp://127.0.0.1:0", SocketOptions(receive_buffer_bytes=None)) as lanes:
        for lane in lanes:
            lane.mark(0)
            sock = lane.plain_socket
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
            assert sock.getsockopt(TCP, socket.TCP_USER_TIMEOUT) == 0
            assert _congestion(sock) == ("reno" if congestion == "bbr" else congestion)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 0
            assert sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 0


@contextlib.contextmanager
def _connection(congestion: str, target: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection from 127.0.0.1 whose ends have this congestion control."""
    with socket.create_server(("127.0.0.1" if target == "127.0.0.1" else "", 0)) as server, socket.socket() as sock:
        for one in (server, sock):
            try:
                one.setsockopt(TCP, socket.TCP_CONGESTION, congestion.encode())
            except OSError:
                pytest.skip(f"this machine has no {congestion}")
        sock.bind(("127.0.0.1", 0))
        sock.connect((target, server.getsockname()[1]))
        accepted = server.accept()[0]
        with accepted:
            yield sock, accepted


@pytest.mark.parametrize(("before", "after"), [("bbr", "reno"), ("cubic", "cubic"), ("reno", "reno")])
def test_no_lane_is_paced_within_a_machine(before: str, after: str) -> None:
    with _connection(before) as ends:
        for sock in ends:
            assert _congestion(sock) == before
            unpace_local(sock)
            assert _congestion(sock) == after


class _Told:
    """A socket that says of itself what a test wants, on any machine."""

    def __init__(self, congestion: str, rtt_us: int, peer: str) -> None:
        self.congestion, self._rtt_us, self._peer = congestion, rtt_us, peer

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.1", 7000

    def getpeername(self) -> tuple[str, int]:
        return self._peer, 7001

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert level == TCP
        if option == setup.TCP_INFO:
            return struct.pack("=68xI", self._rtt_us)[:size]
        return self.congestion.encode().ljust(size, b"\0")

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        assert (level, option) == (TCP, setup.TCP_CONGESTION)
        self.congestion = value.decode()


@pytest.mark.parametrize(
    ("before", "rtt_us", "peer", "after"),
    [
        ("bbr", 40, "10.0.0.1", "reno"),
        ("bbr", 1000, "10.0.0.1", "bbr"),
        ("bbr", 40, "10.0.0.2", "bbr"),
        ("cubic", 40, "10.0.0.1", "cubic"),
    ],
)
def test_which_connections_leave_bbr(before: str, rtt_us: int, peer: str, after: str) -> None:
    sock: Any = _Told(before, rtt_us, peer)
    unpace_local(sock)
    assert sock.congestion == after


@pytest.mark.parametrize(("asked", "lanes_looked_at"), [(None, 2), ("reno", 0)])
async def test_who_names_a_congestion_control_has_it(
    asked: str | None, lanes_looked_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[socket.socket] = []
    monkeypatch.setattr(tcp, "unpace_local", looked_at.append)
    async with _lanes("tcp://127.0.0.1:0", SocketOptions(congestion_control=asked)):
        assert len(looked_at) == lanes_looked_at


def test_bbr_stays_between_two_addresses() -> None:
    with _connection("bbr", "127.0.0.2") as ends:
        for sock in ends:
            unpace_local(sock)
            assert _congestion(sock) == "bbr"


def test_bbr_stays_where_a_network_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round trip that no machine has within itself."""
    monkeypatch.setattr(setup, "_LOCAL_RTT_US", 0)
    with _connection("bbr") as ends:
        for sock in ends:
            unpace_local(sock)
            assert _congestion(sock) == "bbr"


@both_versions
async def test_bbr_stays_where_it_was_asked_for(url: str) -> None:
    if "bbr" not in _sysctl("ipv4/tcp_available_congestion_control").split():
        pytest.skip("this machine has no bbr")
    async with _lanes(url, SocketOptions(congestion_control="bbr")) as lanes:
        assert [_congestion(lane.plain_socket) for lane in lanes] == ["bbr", "bbr"]


async def test_the_kernel_paces_a_lane() -> None:
    """A lower bound only. The kernel does not pace the first ten packets, of at most 64 KiB each."""
    size = 1_300_000
    loop = asyncio.get_running_loop()
    async with _lanes("tcp://127.0.0.1:0", SocketOptions(kernel_rate="16Mbit")) as (left, right):
        started_s = loop.time()
        sending = asyncio.create_task(left.send([bytes(size)]))
        view = memoryview(bytearray(65536))
        count = 0
        while count < size:
            count += await right.receive_into([view])
        await sending
    assert loop.time() - started_s > 0.2


# ---- marks


@both_versions
async def test_marks_alternate_with_the_class(url: str) -> None:
    async with _lanes(url, SocketOptions(dscp=DSCP, priority=PRIORITY)) as lanes:
        for lane in lanes:
            assert _mark(lane.plain_socket) == (DSCP.control, PRIORITY.control), "the greeting is control"
            for stream, name in BY_STREAM:
                lane.mark(stream)
                assert _mark(lane.plain_socket) == (getattr(DSCP, name), getattr(PRIORITY, name))


def _mark(sock: socket.socket) -> tuple[int, int]:
    if sock.family == socket.AF_INET6:
        traffic_class = sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
    else:
        traffic_class = sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)
    return traffic_class >> 2, sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)


def test_an_unchanged_class_costs_no_system_call() -> None:
    class Counting(socket.socket):
        calls = 0

        def setsockopt(self, *arguments: Any) -> None:
            self.calls += 1
            super().setsockopt(*arguments)

    with Counting() as sock:
        # The residual has the marks of the anchor, so that going from one to the other changes nothing either.
        options = SocketOptions(dscp=PerClass(anchor=46, residual=46), priority=PerClass(anchor=3, residual=3))
        marks = ClassMarks.of(sock, options)
        assert marks is not None
        marks.set(0)
        assert sock.calls == 2
        for stream in (0, 1, 1, 0):
            marks.set(stream)
        assert sock.calls == 2
        marks.set(None)
        assert sock.calls == 4


class Packets:
    """The packets that leave one TCP port of the loopback interface, while the block lasts."""

    def __init__(self, port: int) -> None:
        self._sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM)
        # In the kernel: what other tests send meanwhile would fill the buffer.
        program = b"".join(struct.pack("=HBBI", *step) for step in leaving(port))
        kept = ctypes.create_string_buffer(program)
        which = struct.pack("HP", len(program) // 8, ctypes.addressof(kept))
        self._sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, which)
        self._sock.bind(("lo", 3))  # ETH_P_ALL
        self._sock.setblocking(False)

    def __enter__(self) -> Packets:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Code point and TCP payload of those that carry any, in order."""
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = self._sock.recv(1 << 17)
                if packet[0] >> 4 == 4:
                    traffic_class, header = packet[1], 4 * (packet[0] & 15)
                else:
                    traffic_class, header = (int.from_bytes(packet[:2], "big") >> 4) & 255, 40
                tcp = packet[header:]
                payload = tcp[4 * (tcp[12] >> 4) :]
                if payload:
                    yield traffic_class >> 2, payload
        _, dropped = struct.unpack("II", self._sock.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        assert not dropped


def leaving(port: int) -> list[tuple[int, int, int, int]]:
    """A filter of classic BPF (operation, how far to jump if so, if not, value): what goes out from this TCP port."""
    load_byte, load_half, equal, jump, give = 0x30, 0x28, 0x15, 0x05, 0x06
    return [
        (load_byte, 0, 0, 0xFFFFF004),  # the kind of packet: everything on this interface is seen coming, too
        (equal, 0, 13, socket.PACKET_OUTGOING),
        (load_byte, 0, 0, 0),
        (0x74, 0, 0, 4),  # shifted right: the version
        (equal, 0, 5, 4),
        (load_byte, 0, 0, 9),
        (equal, 0, 8, TCP),
        (0xB1, 0, 0, 0),  # the length of a header of version 4 is the index,
        (0x48, 0, 0, 0),  # the half word there the port
        (jump, 0, 0, 3),
        (load_byte, 0, 0, 6),
        (equal, 0, 3, TCP),
        (load_half, 0, 0, 40),
        (equal, 0, 1, port),
        (give, 0, 0, 1 << 17),
        (give, 0, 0, 0),
    ]


@needs_root
@both_versions
async def test_packets_carry_the_code_point_of_their_class(url: str) -> None:
    async with _lanes(url, SocketOptions(dscp=DSCP)) as (left, right):
        with Packets(left.plain_socket.getsockname()[1]) as packets:
            for stream, name in BY_STREAM:
                lane_bytes = name.encode()
                left.mark(stream)
                await left.send([lane_bytes])
                got = bytearray(16)
                assert await right.receive_into([memoryview(got)]) == len(lane_bytes)
            assert list(packets.read()) == [(getattr(DSCP, name), name.encode()) for _, name in BY_STREAM]


@needs_root
@pytest.mark.parametrize("pump", [ThreadPump, LoopPump])
async def test_a_link_marks_what_it_sends(pump: Any, make_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of each code point on the wire are those of the class; pacing keeps the kernel's queue empty between."""
    if pump is LoopPump:
        monkeypatch.setattr("lynx_net.aio.link.ThreadPump", LoopPump)
    sockets = SocketOptions(dscp=DSCP, priority=PRIORITY)
    cache = make_cache(tokens=600)
    async with lynx_net.serve("tcp://127.0.0.1:0", sockets=sockets) as server:
        port = int(server.url.rpartition(":")[2])
        async with lynx_net.connect(server.url, sockets=sockets, rate="40Mbit") as link:
            (client_port,) = {local[1] for local in _connected_from(port)}
            with Packets(client_port) as packets, Packets(port) as answers:
                sending = await cache.send_on(link)
                marked: Counter[int] = Counter()
                for code_point, payload in packets.read():
                    marked[code_point] += len(payload)
                answered = {code_point for code_point, _ in answers.read()}
    anchor_bytes, residual_bytes = sending.stats.stream_bytes[:2]
    assert set(marked) == {DSCP.control, DSCP.anchor, DSCP.residual}
    assert marked[DSCP.anchor] == pytest.approx(anchor_bytes, rel=0.15)
    assert marked[DSCP.residual] == pytest.approx(residual_bytes, rel=0.15)
    assert answered == {DSCP.control}


@needs_root
async def test_classes_that_are_ready_at_the_same_time_are_marked_apart(make_cache: Any, same: Any) -> None:
    """A thread sends all it can get together, but not under one mark."""
    sockets = SocketOptions(dscp=DSCP)
    cache = make_cache(tokens=100)
    async with lynx_net.serve("tcp://127.0.0.1:0") as server, lynx_net.connect(server.url, sockets=sockets) as link:
        ((_, client_port),) = _connected_from(int(server.url.rpartition(":")[2]))
        async with link.send("r", cache.layout, codec="lynx", fine=cache.fine) as sending:
            await sending.write(0, cache.arrays[0, "key"], cache.arrays[0, "value"])
            transfer = await anext(aiter(server))
            await transfer.layer_ready(0)
            await asyncio.sleep(0.1)  # by now the first layer has left, and there is credit for residuals
            with Packets(client_port) as packets:
                with link.lock:  # no thread takes anything before both classes are there
                    await sending.write(1, cache.arrays[1, "key"], cache.arrays[1, "value"])
                await transfer.complete
                marks = [code_point for code_point, _ in packets.read()]
    assert same(transfer.target, cache.decoded("lynx"))
    assert {DSCP.anchor, DSCP.residual} <= set(marks)
    assert marks.index(DSCP.anchor) < marks.index(DSCP.residual)


# ---- local addresses


def _connected_from(port: int) -> list[tuple[str, int]]:
    """Local addresses of this machine's connections to an IPv4 port, as the kernel lists them."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote, state = line.split()[1:4]
        if int(remote[-4:], 16) == port and state == "01":
            host = socket.inet_ntoa(struct.pack("=I", int(local[:8], 16)))
            found.append((host, int(local[-4:], 16)))
    return found


async def test_lanes_take_the_local_addresses_in_turn(make_cache: Any) -> None:
    sockets = SocketOptions(local_addresses=["127.0.0.2", "127.0.0.3"])
    async with (
        lynx_net.serve("tcp://127.0.0.1:0") as server,
        lynx_net.connect(server.url, lanes=3, sockets=sockets) as link,
    ):
        hosts = [host for host, _ in _connected_from(int(server.url.rpartition(":")[2]))]
        assert sorted(hosts) == ["127.0.0.2", "127.0.0.2", "127.0.0.3"]
        assert (await server.accept()).peer.startswith("tcp://127.0.0.2:")
        await make_cache(tokens=20).send_on(link)


async def test_a_local_address_of_another_machine() -> None:
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        with pytest.raises(ConnectionFailedError, match=r"198\.51\.100\.7 is not an address of this machine"):
            async with lynx_net.connect(server.url, sockets=SocketOptions(local_addresses=["198.51.100.7"])):
                pass


async def test_a_local_address_of_the_other_ip_version() -> None:
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        with pytest.raises(ConnectionFailedError, match="from ::1: no address of the same IP version"):
            async with lynx_net.connect(server.url, sockets=SocketOptions(local_addresses=["::1"])):
                pass


# ---- what the kernel refuses


async def _refused(sockets: SocketOptions, match: str) -> None:
    """Both ways of using the options fail at once and say why."""
    with pytest.raises(LocalProtocolError, match=match):
        async with lynx_net.serve("tcp://127.0.0.1:0", sockets=sockets):
            pass
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        with pytest.raises(LocalProtocolError, match=match):
            async with lynx_net.connect(server.url, sockets=sockets):
                pass


def _sysctl(name: str) -> str:
    return Path("/proc/sys/net", name).read_text()


async def test_a_congestion_control_that_is_not_allowed() -> None:
    available = _sysctl("ipv4/tcp_available_congestion_control").split()
    barred = set(available) - set(_sysctl("ipv4/tcp_allowed_congestion_control").split())
    if not barred:
        pytest.skip("everybody may use every congestion control of this machine")
    with _unprivileged():
        await _refused(SocketOptions(congestion_control=barred.pop()), "TCP_CONGESTION .*does not list it")


async def test_an_unknown_congestion_control() -> None:
    await _refused(SocketOptions(congestion_control="tortoise"), "TCP_CONGESTION 'tortoise'.*this machine has .*cubic")


@pytest.mark.parametrize("name", ["send_buffer_bytes", "receive_buffer_bytes"])
async def test_a_buffer_larger_than_the_machine_allows(name: str) -> None:
    await _refused(SocketOptions(**{name: 1 << 30}), r"SO_(SND|RCV)BUF 1073741824: it allows \d+ \(sysctl net.core")


async def test_the_default_receive_buffer_may_be_cut() -> None:
    """It is what the library would like; a machine with small limits is no error."""
    limit = int(_sysctl("core/rmem_max"))
    async with _lanes("tcp://127.0.0.1:0", SocketOptions()) as (left, _):
        got = left.plain_socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        assert got == 2 * min(1024 * 1024, limit)


@contextlib.contextmanager
def _unprivileged() -> Iterator[None]:
    """Drop CAP_NET_ADMIN and CAP_NET_RAW from what this thread may do now, and take them back."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("=Ii", 0x20080522, 0)
    before = ctypes.create_string_buffer(24)
    assert libc.capget(header, before) == 0
    words = list(struct.unpack("=6I", before.raw))
    words[0] &= ~(1 << 12 | 1 << 13)
    assert libc.capset(header, struct.pack("=6I", *words)) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


async def test_a_priority_that_needs_a_privilege() -> None:
    with _unprivileged():
        await _refused(
            SocketOptions(priority=PerClass(anchor=7)),
            "SO_PRIORITY 7 of anchor: .*not permitted; above 6 it needs CAP_NET_ADMIN",
        )
        await _refused(
            SocketOptions(priority=PerClass(later=9), dscp=DSCP), "DSCP 8 and SO_PRIORITY 9 of later streams"
        )


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: SocketOptions(notsent_lowat_bytes=0), "notsent_lowat_bytes must be a whole number of 1"),
        (lambda: SocketOptions(receive_buffer_bytes=0), "receive_buffer_bytes"),
        (lambda: SocketOptions(send_buffer_bytes=1.5), "send_buffer_bytes"),  # type: ignore[arg-type]
        (lambda: SocketOptions(send_buffer_bytes=1 << 40), "send_buffer_bytes"),
        (lambda: SocketOptions(congestion_control=""), "congestion_control ''"),
        (lambda: SocketOptions(congestion_control="a_name_of_16_let"), "congestion_control"),
        (lambda: SocketOptions(congestion_control=b"cubic"), "congestion_control"),  # type: ignore[arg-type]
        (lambda: Keepalive(idle_s=0), "keepalive idle_s must be a whole number of 1 to 32767, not 0"),
        (lambda: Keepalive(interval_s=32768), "keepalive interval_s"),
        (lambda: Keepalive(count=128), "keepalive count must be a whole number of 1 to 127"),
        (lambda: SocketOptions(user_timeout_s=0), "user_timeout_s"),
        (lambda: SocketOptions(user_timeout_s=float("nan")), "user_timeout_s"),
        (lambda: SocketOptions(user_timeout_s="5"), "user_timeout_s"),  # type: ignore[arg-type]
        (lambda: SocketOptions(local_addresses="127.0.0.2"), "local_addresses must be a sequence"),
        (lambda: SocketOptions(local_addresses=["eth0"]), "'eth0' is no IP address"),
        (lambda: SocketOptions(dscp=PerClass(anchor=64)), "dscp of anchor must be a whole number of 0 to 63, not 64"),
        (lambda: SocketOptions(dscp=PerClass(later=-1)), "dscp of later"),
        (lambda: SocketOptions(priority=PerClass(control=True)), "priority of control"),
        (lambda: SocketOptions(kernel_rate="40Gbit"), "32-bit number of bytes per second.*34.36 Gbit/s"),
        (lambda: SocketOptions(kernel_rate=1), "kernel_rate 1 does not fit"),
        (lambda: SocketOptions(kernel_rate="fast"), "cannot read the rate 'fast'"),
        (lambda: SocketOptions(unix_mode=0o1777), "unix_mode"),
    ],
)
def test_impossible_values(make: Any, match: str) -> None:
    with pytest.raises(LocalProtocolError, match=match):
        make()


@pytest.mark.parametrize(
    ("url", "sockets", "match"),
    [
        (
            "tcp://127.0.0.1:0",
            SocketOptions(local_addresses=["127.0.0.2"]),
            "local_addresses .*apply to listening on tcp",
        ),
        ("tcp://127.0.0.1:0", SocketOptions(unix_mode=0o660), "unix_mode .*apply to listening on tcp"),
        ("unix://@lynx-test-useless", SocketOptions(dscp=DSCP), "dscp .*apply to listening on unix"),
        ("unix://@lynx-test-useless", SocketOptions(unix_mode=0o660), "unix_mode .*apply to listening on unix://@"),
        (
            "memory://useless",
            SocketOptions(congestion_control="cubic"),
            "congestion_control .*apply to listening on memory",
        ),
    ],
)
async def test_options_that_would_do_nothing(url: str, sockets: SocketOptions, match: str) -> None:
    with pytest.raises(LocalProtocolError, match=match):
        async with lynx_net.serve(url, sockets=sockets):
            pass


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "unix://@lynx-test-useless", "memory://useless"])
async def test_options_that_would_do_nothing_when_connecting(url: str) -> None:
    sockets = SocketOptions(unix_mode=0o660)
    async with lynx_net.serve(url) as server:
        with pytest.raises(LocalProtocolError, match=r"unix_mode .*does not apply to connecting to"):
            async with lynx_net.connect(server.url, sockets=sockets):
                pass
