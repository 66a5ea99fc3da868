"""Two network cards, as docs/sockets.md sets them up: two hosts in namespaces with two cables between them."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

DECODE_HOST = """
import asyncio, subprocess, sys
import lynx_net

print("ready for cables", flush=True)
sys.stdin.readline()
for network in (1, 2):
    subprocess.run(["ip", "address", "add", f"10.77.{network}.2/24", "dev", f"far{network}"], check=True)
    subprocess.run(["ip", "link", "set", f"far{network}", "up"], check=True)

async def main():
    async with lynx_net.serve("tcp://0.0.0.0:7000") as server:
        print("serving", flush=True)
        async for transfer in server:
            await transfer.complete
            await (await server.accept()).closed()
            break

asyncio.run(main())
"""

PREFILL_HOST = """
import asyncio, subprocess, sys
import numpy as np
import lynx_net

def ip(*words):
    subprocess.run(["ip", *words], check=True)

def sent_bytes():
    with open("/proc/net/dev") as file:
        rows = dict(line.split(":") for line in file if ":" in line)
    return [int(rows[name].split()[8]) for name in sorted(rows) if name.strip().startswith("card")]

async def send(sockets):
    layout = lynx_net.CacheLayout(layers=2, tokens=2000, heads=2, key_size=64, value_size=64)
    array = np.random.default_rng(0).standard_normal(layout.array_shape("key"), np.float32)
    # Paced, so that every lane is free for its turn.
    async with lynx_net.connect("tcp://10.77.1.2:7000", lanes=4, rate="50Mbit", sockets=sockets) as link:
        async with link.send("r", layout) as sending:
            for layer in range(layout.layers):
                await sending.write(layer, array, array)

server = subprocess.Popen(
    ["unshare", "--net", sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
try:
    server.stdout.readline()
    for network in (1, 2):
        card, far = f"card{network}", f"far{network}"
        ip("link", "add", card, "type", "veth", "peer", "name", far, "netns", str(server.pid))
        ip("address", "add", f"10.77.{network}.5/24", "dev", card)
        ip("link", "set", card, "up")
        ip("route", "add", "default", "via", f"10.77.{network}.2", "dev", card, "table", f"10{network}")
        ip("rule", "add", "from", f"10.77.{network}.5", "table", f"10{network}")
    server.stdin.write("go\\n")
    server.stdin.flush()
    server.stdout.readline()
    before = sent_bytes()
    asyncio.run(send(lynx_net.SocketOptions(local_addresses=["10.77.1.5", "10.77.2.5"])))
    print(*(after - start for after, start in zip(sent_bytes(), before)))
    server.wait(20)
finally:
    server.kill()
"""


def _own_network(*command: str) -> list[str]:
    return ["unshare", "--map-root-user", "--net", *command]


@pytest.mark.skipif(
    shutil.which("ip") is None
    or shutil.which("unshare") is None
    or subprocess.run(_own_network("ip", "link", "add", "card1", "type", "veth"), capture_output=True).returncode != 0,
    reason="needs network namespaces and veth",
)
def test_lanes_leave_by_both_cards() -> None:
    command = _own_network(sys.executable, "-c", PREFILL_HOST, DECODE_HOST)
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    first_bytes, second_bytes = map(int, done.stdout.split())
    # 2 x 2 x 2000 x 128 values of about a byte: either card carries a good part of them.
    assert first_bytes + second_bytes > 1_000_000
    assert min(first_bytes, second_bytes) > 150_000
