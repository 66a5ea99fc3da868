"""The benchmark against other systems measures, and says what it could not measure."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lynx_net import LynxError
from perf.peers import codec_child, codecs, lynx_peer
from perf.peers import transport as peers
from perf.peers.environments import Environment
from perf.peers.harness import Side

if TYPE_CHECKING:
    from pathlib import Path


def test_what_runs_is_measured_and_what_does_not_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    sizes = [peers.MIB, 4 * peers.MIB]
    measured = peers.measure(["raw", "lynx", "lynx-open", "nixl"], sizes, rounds=1, repeats=1)
    found = peers.figures(measured["runs"], measured["failures"], sizes)
    assert found["nixl"] == {"failure": "not installed; run: python -m perf.peers --setup"}
    for name in ("raw", "lynx", "lynx-open"):
        assert set(found[name]) == {"1", "4"}
        assert all(one["gbytes_per_s"] > 0 and one["lynx_speed_ratio"] > 0 for one in found[name].values())
    assert found["lynx"]["4"]["lynx_speed_ratio"] == 1


def test_a_system_that_breaks_says_its_last_words() -> None:
    with pytest.raises(peers.Failure, match=r"the receiver does not start: .*(Memory|memory)"):
        peers.run_once("raw", [1 << 60], 1, {})


async def test_a_receiver_hears_that_its_open_transfer_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lynx_peer, "ONE_TRANSFER", True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = socket.create_connection(server.getsockname()), server.accept()[0]
    with ends[0], ends[1]:
        sender, receiver = lynx_peer.Lynx(1 << 20), lynx_peer.Lynx(1 << 20)
        sides = [Side(end, blocking=False) for end in ends]
        await asyncio.gather(sender.start_sender(sides[0]), receiver.start_receiver(sides[1]))
        await receiver.expect(1 << 20)
        waiting = asyncio.create_task(receiver.receive(1 << 20))
        await sender.stop()
        with pytest.raises(LynxError):
            async with asyncio.timeout(10):
                await waiting
        await receiver.stop()


def test_what_a_receiver_says_last_is_told_beside_its_sender(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'if [ "$3" = receive ]; then echo 1; echo "RuntimeError: no more" >&2; exit 1; fi\n'
        'echo "ConnectionError: the other process ended" >&2; exit 1\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(peers, "python_of", lambda _: str(python))
    with pytest.raises(peers.Failure, match=r"the other process ended; the receiver: RuntimeError: no more"):
        peers.run_once("raw", [peers.MIB], 1, {})


def test_a_codec_that_fails_leaves_the_others_of_its_process_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = Environment("here", ())
    python = tmp_path / "here" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # Not a link: behind one Python does not know that it is that of a virtual environment.
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "here" / "whole").touch()
    names = {
        "one": codecs.PeerCodec(module="nothing", environment=here, settings=""),
        "two": codecs.PeerCodec(module="nothing", environment=Environment("absent", ()), settings=""),
    }
    monkeypatch.setattr(codecs, "CODECS", names)
    cache = np.zeros((1, 8, 1, 4), np.uint16)
    found = {
        name: (str(told), decoded) for name, told, decoded in codecs.run_codecs(["one", "two"], cache, cache, tmp_path)
    }
    assert found["one"] == ("it failed: KeyError: 'nothing'", None)
    assert found["two"][0].startswith("not installed")


def test_a_child_decodes_all_that_it_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def halved(bits: np.ndarray, count: int, axis: int) -> codec_child.Coded:
        assert (count, axis) == (3, -1)
        return np.full(bits.shape, 0.5, np.float32), bits.size, 0.1

    monkeypatch.setitem(codec_child.CODECS, "halved", halved)
    keys = np.full((2, 12, 1, 4), 0x3F80, np.uint16)  # ones
    np.savez(tmp_path / "in.npz", keys=keys, values=keys, raw_head=4)
    told = codec_child.told("halved:3:-1", 0, tmp_path / "in.npz")
    assert told["bits"] == pytest.approx((8 * 8 + 4 * 16) / 12)
    with np.load(told["out"]) as decoded:
        assert (decoded["keys"][:, :4] == 1).all()
        assert (decoded["values"][:, 4:] == 0.5).all()
