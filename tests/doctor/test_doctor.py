"""The doctor's edges: the kernel's words, the raw copy, its serving side, and the command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

import lynx_net
from lynx_net.__main__ import main
from lynx_net.doctor.facts import ConnectionFacts, DoctorError, HostFacts
from lynx_net.doctor.kernel import connection_facts, host_facts, parse_tcp_info
from lynx_net.doctor.probe import measure
from lynx_net.doctor.raw import RawSink, copy
from lynx_net.doctor.serving import doctor_endpoint, open_bytes, serving
from lynx_net.errors import ConnectionFailedError, RequestRefusedError, TransferAbortedError
from lynx_net.transport.setup import is_local

if TYPE_CHECKING:
    from pathlib import Path

QUICK = {"lane_counts": (1, 2), "seconds": 0.1}


def _ignore(step: str) -> None:
    assert step


# ---- the kernel


def test_what_this_kernel_says_of_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        peer, _ = server.accept()
        with peer:
            sock.sendall(bytes(100_000))
            assert len(peer.recv(100_000, socket.MSG_WAITALL)) == 100_000
            facts = connection_facts(sock)
            assert is_local(sock)
    assert facts.congestion
    assert facts.sent_segments is not None
    assert facts.mss_bytes is not None
    assert facts.sent_segments * facts.mss_bytes >= 100_000
    assert facts.retransmitted_segments is not None
    assert facts.rtt_s is not None
    assert facts.min_rtt_s is not None
    assert 0 < facts.min_rtt_s <= facts.rtt_s < 1
    assert facts.window_segments


def test_tcp_info_field_by_field() -> None:
    """Every field of the struct holds its own offset; a shorter struct of an older kernel gives less, and no error."""
    info = b"".join(
        [
            bytes(8),
            *(offset.to_bytes(4, sys.byteorder) for offset in range(8, 104, 4)),
            *(offset.to_bytes(8, sys.byteorder) for offset in range(104, 136, 8)),
            *(offset.to_bytes(4, sys.byteorder) for offset in range(136, 160, 4)),
            *(offset.to_bytes(8, sys.byteorder) for offset in range(160, 192, 8)),
        ]
    )
    facts = parse_tcp_info(info, "cubic")
    assert facts == ConnectionFacts(
        congestion="cubic",
        rtt_s=68e-6,
        min_rtt_s=148e-6,
        mss_bytes=16,
        mtu_bytes=60,
        window_segments=80,
        sent_segments=156,
        retransmitted_segments=100,
        delivery_rate_bps=160 * 8,
        notsent_bytes=144,
        busy_s=168e-6,
        receiver_limited_s=176e-6,
        buffer_limited_s=184e-6,
    )
    old = parse_tcp_info(info[:104], None)
    assert (old.mtu_bytes, old.retransmitted_segments) == (60, 100)
    assert old.sent_segments is old.min_rtt_s is old.busy_s is None


def test_what_a_host_says_passes_to_the_other_side() -> None:
    facts = host_facts()
    assert facts.cores >= 1
    assert facts.checksum_bps > 1e9
    assert HostFacts.from_peer(json.loads(json.dumps(asdict(facts)))) == facts


@pytest.mark.parametrize(
    "change", [{"cores": 0}, {"cores": "many"}, {"load": -1.0}, {"load": None}, {"checksum_bps": True}, {"more": 1}]
)
def test_a_host_that_says_nonsense_is_refused(change: dict[str, Any]) -> None:
    good = asdict(HostFacts(2, 0.1, 1e9, None, None))
    with pytest.raises(DoctorError, match="other end"):
        HostFacts.from_peer(good | change)
    with pytest.raises(DoctorError):
        HostFacts.from_peer("facts")


# ---- the raw copy


def test_the_raw_copy_counts_what_arrives() -> None:
    threads = threading.active_count()
    with RawSink("127.0.0.1") as sink:
        assert copy("127.0.0.1", sink.port, 2, 0.05) > 0
        with socket.create_connection(("127.0.0.1", sink.port)) as sock:
            sock.sendall(bytes(1234))
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(8, socket.MSG_WAITALL) == (1234).to_bytes(8, "little")
        idle = socket.create_connection(("127.0.0.1", sink.port))
    with idle, contextlib.suppress(ConnectionResetError):  # it was accepted already, or it was not
        assert idle.recv(9, socket.MSG_WAITALL) in (b"", bytes(8))
    assert threading.active_count() == threads
    with pytest.raises(DoctorError, match="no raw copy"):
        copy("127.0.0.1", sink.port, 1, 0.05)


def test_a_raw_copy_that_is_cut_is_no_figure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def cut() -> None:
            peer, _ = server.accept()
            peer.recv(100_000)
            peer.close()

        thread = threading.Thread(target=cut)
        thread.start()
        with pytest.raises(DoctorError, match="lost its connection"):
            copy("127.0.0.1", server.getsockname()[1], 1, 5)
        thread.join()


# ---- measuring


async def test_a_measurement_over_loopback() -> None:
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    async with serving("tcp://127.0.0.1:0") as url:
        facts = await measure(url, wanted_bps=1e6, step=_ignore, **QUICK)
        assert [run.lanes for run in facts.runs] == [len(run.connections) for run in facts.runs] == [1, 2]
        for run in facts.runs:
            assert run.bps > 0
            assert run.raw_bps is not None
            assert 0 <= run.credit_share + run.idle_share <= 1.01
            assert run.cores_here > 0
            assert run.cores_there > 0
        assert facts.local
        assert facts.reaches
        assert facts.small_transfer_s > 0
        assert facts.rtt_s is not None
        # The kernel doubles what the link asked for.
        assert facts.asked_receive_buffer_bytes == lynx_net.SocketOptions().receive_buffer_bytes
        assert facts.receive_buffer_bytes >= facts.asked_receive_buffer_bytes
    await asyncio.sleep(0.1)
    assert len(os.listdir("/proc/self/fd")) <= files + 1  # the loop's executor may have come
    assert threading.active_count() <= threads + 8
    assert not [thread for thread in threading.enumerate() if "doctor" in thread.name]


async def test_an_ordinary_server_is_no_doctor_and_hears_so() -> None:
    async with lynx_net.serve("tcp://127.0.0.1:0") as server:
        with pytest.raises(DoctorError, match="is no doctor; run there: lynx-net doctor --serve"):
            await measure(server.url, wanted_bps=None, step=_ignore, **QUICK)


async def test_nobody_listens() -> None:
    with pytest.raises(ConnectionFailedError):
        await measure("tcp://127.0.0.1:1", wanted_bps=None, step=_ignore, **QUICK)


async def test_a_doctor_takes_no_caches_and_no_nonsense(make_cache: Any) -> None:
    """What it declines costs the offer only: the same link is measured afterwards."""
    endpoint = doctor_endpoint()
    async with serving("tcp://127.0.0.1:0") as url:
        async with lynx_net.connect(url) as link:
            with pytest.raises(TransferAbortedError, match="takes no caches"):
                await make_cache().send_on(link)
            with pytest.raises(RequestRefusedError, match="facts only"):
                await link.request("a cache, please")
        link = await endpoint.connect(url)
        for size in (0, 1 << 25):
            with pytest.raises(TransferAbortedError, match="page_bytes"):
                await open_bytes(link, 1, size).delivered
        transfer = open_bytes(link, 1, 5)
        transfer.submit(0, 0, memoryview(b"12345"))
        await transfer.delivered
        await endpoint.close()


async def test_without_the_second_port_there_is_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that lets only the link through."""
    steps: list[str] = []

    def refuse(*_: Any) -> float:
        raise DoctorError("no raw copy to port 7001: timed out")

    monkeypatch.setattr("lynx_net.doctor.probe.copy", refuse)
    async with serving("tcp://127.0.0.1:0") as url:
        facts = await measure(url, wanted_bps=None, lane_counts=(1,), seconds=0.05, step=steps.append)
    assert facts.raw_bps is None
    assert replace(facts, wanted_bps=1.0).reaches
    assert "no reference: no raw copy to port 7001: timed out" in steps


# ---- the command


def test_the_self_test(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without an address: a child process serves, and is gone afterwards."""
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--lanes", "2", "--seconds", "0.1", "--rate", "1Mbit", "--json", str(file)]) == 0
    out = capfd.readouterr().out
    assert "the wanted rate, 1.0 Mbit/s, is reached" in out
    data = json.loads(file.read_text())
    assert set(data) == {"machine", "facts", "findings"}
    assert data["facts"]["reaches"] is True
    assert [run["lanes"] for run in data["facts"]["runs"]] == [1, 2]
    for finding in data["findings"]:
        assert f"[{finding['key']}]" in out


def test_serving_and_measuring_from_another_process(capfd: pytest.CaptureFixture[str]) -> None:
    """`--serve` until Ctrl-C, which is a clean end."""
    command = [sys.executable, "-m", "lynx_net", "doctor", "--serve", "tcp://127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[2].rstrip(";")
            assert main(["doctor", url, "--lanes", "1", "--seconds", "0.1"]) == 0
            server.send_signal(signal.SIGINT)
            _, errors = server.communicate(timeout=10)
        finally:
            server.kill()
    assert server.returncode == 0
    assert errors == ""
    assert f"link to {url}" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tcp://127.0.0.1:1"], "cannot connect"),
        (["memory://here"], "tcp:// only"),
        (["nonsense"], "is not an address"),
        (["--serve", "memory://here"], "tcp:// only"),
        (["tcp://127.0.0.1:1", "--serve", "tcp://127.0.0.1:0"], "either measure an address or serve one"),
        (["--lanes", "0"], "--lanes"),
        (["--seconds", "0"], "--seconds"),
        (["--rate", "fast"], "cannot read the rate"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 1
    errors = capfd.readouterr().err.splitlines()
    assert errors[-1].startswith("lynx_net doctor: ")
    assert said in errors[-1]


def test_the_help_says_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    text = capsys.readouterr().out
    assert "an ordinary server declines" in text
    assert "lynx-net doctor --serve" in text
