"""What the doctor knows of a link when it judges it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from lynx_net.errors import LynxError

__all__ = ["ConnectionFacts", "DoctorError", "Facts", "HostFacts", "Run"]


class DoctorError(LynxError):
    """The doctor cannot measure; says why."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One of the two hosts, before anything is measured.

    Attributes:
        cores: that this process may use.
        load: processes that ran or wanted to, average of the last minute.
        checksum_bps: bits a second that one core checks.
        receive_limit_bytes: net.core.rmem_max, the most a receive buffer may be set to; None where it cannot be read.
        send_limit_bytes: third number of net.ipv4.tcp_wmem, the most that a send buffer grows to.
    """

    cores: int
    load: float
    checksum_bps: float
    receive_limit_bytes: int | None
    send_limit_bytes: int | None

    @classmethod
    def from_peer(cls, data: object) -> HostFacts:
        """Read what a peer says of its host; raises DoctorError where it is something else."""
        names = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or set(data) != names:
            raise DoctorError("the doctor at the other end is of another version: its facts have other fields")
        for name, value in data.items():
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float | None)
                or (value is not None and value < 0)
            ):
                raise DoctorError(f"the doctor at the other end says {name} = {value!r:.100}")
        if not data["cores"] or not data["checksum_bps"] or data["load"] is None:
            raise DoctorError("the doctor at the other end does not know its own host")
        return cls(**data)


@dataclass(frozen=True, slots=True)
class ConnectionFacts:
    """What the sender's kernel says of one lane (TCP_INFO) while it is busy; None where the kernel does not say it.

    Attributes:
        congestion: name of the congestion control.
        rtt_s: smoothed round trip now, with the queues that the traffic itself makes.
        min_rtt_s: the shortest one.
        mss_bytes, mtu_bytes: of the path.
        window_segments: congestion window.
        sent_segments, retransmitted_segments: packets since the connection began.
        delivery_rate_bps: the last the kernel measured.
        notsent_bytes: in the send buffer and not sent.
        busy_s: time with bytes to send.
        receiver_limited_s, buffer_limited_s: the parts of it in which the receiver's window, or the send buffer,
            was the limit.
    """

    congestion: str | None = None
    rtt_s: float | None = None
    min_rtt_s: float | None = None
    mss_bytes: int | None = None
    mtu_bytes: int | None = None
    window_segments: int | None = None
    sent_segments: int | None = None
    retransmitted_segments: int | None = None
    delivery_rate_bps: float | None = None
    notsent_bytes: int | None = None
    busy_s: float | None = None
    receiver_limited_s: float | None = None
    buffer_limited_s: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement over a number of lanes.

    Attributes:
        lanes: connections.
        bps: payload bits a second of lynx_net, checked and delivered.
        raw_bps: the same of blocking sockets that check nothing; None if they could not be measured.
        credit_share, idle_share: part of the lanes' time in which they waited for credit, or had nothing to send.
        cores_here, cores_there: CPU seconds a second of both processes.
        connections: one a lane.
    """

    lanes: int
    bps: float
    raw_bps: float | None
    credit_share: float
    idle_share: float
    cores_here: float
    cores_there: float
    connections: tuple[ConnectionFacts, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was measured of a link, in the direction from this host to the serving one.

    Attributes:
        url: where the serving side is.
        local: whether it is on this host.
        wanted_bps: the rate the link should have; None if nobody said.
        here, there: the two hosts.
        receive_buffer_bytes: what the serving side's kernel gave a lane: SO_RCVBUF, twice what was asked for.
        asked_receive_buffer_bytes: what was asked for; None leaves it to the kernel.
        anchor_window_bytes, residual_window_bytes: credit windows of the receiver.
        rtt_s: round trip of the kernels with the link idle; None where the kernel does not say it.
        small_transfer_s: median time from the offer of 4 KiB to their delivery.
        runs: one for each number of lanes, rising.
    """

    url: str
    local: bool
    wanted_bps: float | None
    here: HostFacts
    there: HostFacts
    receive_buffer_bytes: int
    asked_receive_buffer_bytes: int | None
    anchor_window_bytes: int
    residual_window_bytes: int
    rtt_s: float | None
    small_transfer_s: float
    runs: tuple[Run, ...]

    @property
    def best(self) -> Run:
        """The fastest run of lynx_net."""
        return max(self.runs, key=lambda run: run.bps)

    @property
    def raw_bps(self) -> float | None:
        """The fastest raw copy."""
        return max((run.raw_bps for run in self.runs if run.raw_bps is not None), default=None)

    @property
    def target_bps(self) -> float:
        """What the link is held against: the wanted rate, else the raw copy, else its own best."""
        return self.wanted_bps or self.raw_bps or self.best.bps

    @property
    def reaches(self) -> bool:
        """Whether the best run is within 5 % of the target."""
        return self.best.bps >= 0.95 * self.target_bps

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return asdict(self) | {"target_bps": self.target_bps, "reaches": self.reaches}
