"""`lynx-net store` as its users call it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import lynx_net
from lynx_net.__main__ import main
from lynx_net.errors import ConnectionLostError, HandshakeError
from lynx_net.store import ContextStore, LocalStorage, stored_as, wanted

if TYPE_CHECKING:
    from pathlib import Path


def fill(folder: Path, packed_cache: Any, count: int = 3) -> list[str]:
    with ContextStore(LocalStorage(folder)).open() as store:
        keys = [store.put("toy", range(number, number + 40), packed_cache(40, seed=number)) for number in range(count)]
        for number, key in enumerate(keys):
            os.utime(folder / "entries" / f"{key}.lynx", (1e9 + number, 1e9 + number))
    return keys


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_listing(tmp_path: Path, packed_cache: Any, capsys: pytest.CaptureFixture[str]) -> None:
    keys = fill(tmp_path, packed_cache)
    assert main(["store", "list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*keys, "3"]
    assert "40 tokens" in lines[0]
    assert lines[0].endswith("toy")
    assert main(["store", "list", str(tmp_path), "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["key"] for entry in entries] == keys
    assert {entry["codec"] for entry in entries} == {"lynx"}
    assert entries[2]["used_s"] == 1e9 + 2


def test_verifying(tmp_path: Path, packed_cache: Any, capsys: pytest.CaptureFixture[str]) -> None:
    keys = fill(tmp_path, packed_cache)
    assert main(["store", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "3 of 3 entries are what was written\n"
    damage(tmp_path / "entries" / f"{keys[1]}.lynx")
    with ContextStore(LocalStorage(tmp_path)).open():  # beside a server
        assert main(["store", "verify", str(tmp_path)]) == 1
        out = capsys.readouterr().out
        assert out.startswith(f"{keys[1]}  DAMAGED: the checksum of")
        assert out.endswith("2 of 3 entries are what was written\n")
        assert main(["store", "verify", str(tmp_path), keys[0]]) == 0
        assert main(["store", "verify", str(tmp_path), "0" * 32]) == 1
        assert "there is no such entry" in capsys.readouterr().out
        assert main(["store", "verify", str(tmp_path), "--quarantine"]) == 1
        assert "in use by another process" in capsys.readouterr().err
    assert main(["store", "verify", str(tmp_path), "--quarantine"]) == 1
    assert [file.name for file in (tmp_path / "quarantine").iterdir()] == [f"{keys[1]}.lynx"]
    assert main(["store", "verify", str(tmp_path)]) == 0


def test_evicting(tmp_path: Path, packed_cache: Any, capsys: pytest.CaptureFixture[str]) -> None:
    keys = fill(tmp_path, packed_cache, 5)
    size = (tmp_path / "entries" / f"{keys[0]}.lynx").stat().st_size
    assert main(["store", "evict", str(tmp_path), "--key", keys[3], "--key", "f" * 32]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == keys[3]
    assert f"there is no entry {'f' * 32}" in printed.err
    assert main(["store", "evict", str(tmp_path), "--max-bytes", f"{2 * size + 9}B"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == keys[:2]
    os.utime(tmp_path / "entries" / f"{keys[4]}.lynx")
    assert main(["store", "evict", str(tmp_path), "--max-age", "1h"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == keys[2]
    assert [entry.name for entry in (tmp_path / "entries").iterdir()] == [f"{keys[4]}.lynx"]
    with ContextStore(LocalStorage(tmp_path)).open():
        assert main(["store", "evict", str(tmp_path), "--max-age", "1h"]) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["list", "/nowhere/at/all"], "there is no store in /nowhere/at/all"),
        (["evict", "x"], "what to evict"),
        (["serve", "x", "--rate", "fast"], "fast"),
        (["serve", "/proc/nothing"], "cannot open the store in /proc/nothing"),
        (["serve", "x", "--key-file", "/nowhere/key"], "/nowhere/key"),
        (["serve", "x", "--listen", "tls://127.0.0.1:0"], "tls"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["store", *arguments]) == 1
    printed = capsys.readouterr().err.splitlines()
    assert printed[-1].startswith("lynx_net store: ")
    assert complaint in printed[-1]


@pytest.mark.parametrize("text", ["", "x", "3xb", "-1", "0", "inf", "1e999", "nan", "GB"])
def test_sizes_and_times_are_checked(text: str, tmp_path: Path) -> None:
    for option in ("--max-bytes", "--max-age"):
        with pytest.raises(SystemExit):
            main(["store", "evict", str(tmp_path), f"{option}={text}"])


def test_sizes_and_times_have_units() -> None:
    from lynx_net.store.cli import _age, _size

    assert [_size(text) for text in ("7", "1.5KB", "2MiB", "1gb")] == [7, 1500, 2 << 20, 10**9]
    assert [_age(text) for text in ("7", "1.5m", "2h", "1d")] == [7, 90, 7200, 86400]


async def test_serving_until_told_to_stop(tmp_path: Path, make_cache: Any) -> None:
    """Another process, a shared key, a limit, and an end by SIGTERM with a cache on its way."""
    key = bytes(range(32))
    (tmp_path / "key").write_text(key.hex() + "\n")
    folder = tmp_path / "store"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lynx_net", "store", "serve", str(folder), "--listen", "tcp://127.0.0.1:0"),
        *("--key-file", str(tmp_path / "key"), "--max-bytes", "1MB", "--max-age", "1d", "--rate", "1Gbit"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert (await process.stdout.readline()).decode() == f"0 entries, 0 bytes, in {folder}\n"
        url = (await process.stdout.readline()).decode().split()[-1]
        with pytest.raises(HandshakeError):
            async with lynx_net.connect(url):
                pass
        cache = make_cache(tokens=300)
        async with lynx_net.connect(url, key=key) as link:
            await cache.send_on(link, meta=stored_as("toy", range(300)))
            await (await link.request("r", wanted("toy", range(400)))).complete
            sending = link.send("s", cache.layout, codec="lynx", fine=cache.fine, meta=stored_as("toy", range(1, 301)))
            await sending.write(0, cache.arrays[0, "key"], cache.arrays[0, "value"])
            process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionLostError):
                await sending.delivered
        log = (await process.stderr.read()).decode()
        assert await process.wait() == 0, log
        assert "store: has " in log
        assert "Traceback" not in log
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert list((folder / "incoming").iterdir()) == []
    assert main(["store", "verify", str(folder)]) == 0
