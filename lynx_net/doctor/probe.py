"""Measures a link from the sending side; everything here runs against `serving`."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from typing import TYPE_CHECKING

from lynx_net.doctor.facts import DoctorError, Facts, HostFacts, Run
from lynx_net.doctor.kernel import connection_facts, host_facts
from lynx_net.doctor.raw import copy
from lynx_net.doctor.serving import FACTS_ID, doctor_endpoint, open_bytes
from lynx_net.errors import TransferAbortedError
from lynx_net.transport import Address
from lynx_net.transport.setup import is_local

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from typing import Any

    from lynx_net.aio.endpoint import Endpoint
    from lynx_net.aio.link import Link
    from lynx_net.aio.transfer import OutgoingTransfer
    from lynx_net.doctor.facts import ConnectionFacts

__all__ = ["measure", "self_test_server"]

ANSWER_S = 5.0
SMALL_BYTES = 4096
SMALL_TRANSFERS = 20
PAGE_BYTES = 1 << 20
CHUNK_S = 0.1
"""Each transfer of a run takes about so long."""
IN_FLIGHT = 3
"""Transfers of a run that are open at once, so that the link is never without work between two."""
SOURCE = memoryview(bytes(PAGE_BYTES))
START_S = 30.0


async def measure(
    url: str,
    *,
    wanted_bps: float | None,
    lane_counts: Sequence[int],
    seconds: float,
    step: Callable[[str], None],
) -> Facts:
    """Measure towards the doctor that serves at `url`.

    Args:
        url: "tcp://host:port".
        wanted_bps: the rate the link should have, for the judgement; nothing is paced.
        lane_counts: rising; each is measured, raw and with lynx_net.
        seconds: of each measurement.
        step: is told what begins.

    Raises:
        DoctorError: nobody answers as a doctor does.
        LynxError: the link cannot be made, or failed.
    """
    step("this host")
    here = await asyncio.to_thread(host_facts)
    endpoint = doctor_endpoint()
    try:
        step("small transfers")
        link = await endpoint.connect(url)
        told = await _ask(link, url)
        small_s = await _small_transfers(link)
        sock = link.lanes[0].plain_socket
        if sock is None:
            raise DoctorError(f"{url} is not reached through TCP sockets, and those are what the doctor knows")
        idle, local = connection_facts(sock), is_local(sock)
        await link.close()
        runs = []
        for lanes in lane_counts:
            step(f"raw copy over {lanes} lane{'s' * (lanes > 1)}")
            raw_bps = await _raw(url, told.raw_port, lanes, seconds, step)
            step(f"lynx_net over {lanes} lane{'s' * (lanes > 1)}")
            runs.append(await _run(endpoint, url, lanes, seconds, raw_bps))
    finally:
        await endpoint.close()
    return Facts(
        url=url,
        local=local,
        wanted_bps=wanted_bps,
        here=here,
        there=told.host,
        receive_buffer_bytes=told.number("receive_buffer"),
        asked_receive_buffer_bytes=told.number("asked_receive_buffer") or None,
        anchor_window_bytes=told.number("anchor_window"),
        residual_window_bytes=told.number("residual_window"),
        rtt_s=idle.min_rtt_s if idle.min_rtt_s is not None else idle.rtt_s,
        small_transfer_s=small_s,
        runs=tuple(runs),
    )


class _Told:
    """What the serving side says of itself, checked."""

    def __init__(self, meta: dict[str, Any]) -> None:
        self._meta = meta
        self.host = HostFacts.from_peer(meta.get("host"))
        self.raw_port = self.number("raw_port")
        self.cpu_s = float(meta["cpu_s"]) if isinstance(meta.get("cpu_s"), float) else 0.0

    def number(self, name: str) -> int:
        """A number that is not negative; 0 for None."""
        value = self._meta.get(name)
        if value is None:
            return 0
        if type(value) is not int or value < 0:
            raise DoctorError(f"the doctor at the other end says {name} = {value!r:.100}")
        return value


async def _ask(link: Link, url: str) -> _Told:
    """Ask the serving side for its facts; tells an ordinary server from a doctor by a transfer of one byte."""
    try:
        probe = open_bytes(link, 1, 1, "are you a doctor?")
        probe.submit(0, 0, memoryview(b"\0"))
        async with asyncio.timeout(ANSWER_S):
            await probe.delivered
            answer = await link.request(f"{FACTS_ID} {time.monotonic_ns()}")
            await answer.complete
    except (TransferAbortedError, TimeoutError) as error:
        raise DoctorError(
            f"{url} speaks lynx_net, but is no doctor; run there: lynx-net doctor --serve tcp://0.0.0.0:7000, "
            f"and measure against that ({error or 'no answer'})"
        ) from error
    return _Told(answer.offer.meta)


async def _small_transfers(link: Link) -> float:
    """Median time of a transfer of `SMALL_BYTES` on a warm link."""
    times = []
    for _ in range(SMALL_TRANSFERS):
        began_s = time.monotonic()
        await _transfer(link, 1, SMALL_BYTES).delivered
        times.append(time.monotonic() - began_s)
    return statistics.median(times)


def _transfer(link: Link, pages: int, page_bytes: int) -> OutgoingTransfer:
    transfer = open_bytes(link, pages, page_bytes)
    for page in range(pages):
        transfer.submit(page, 0, SOURCE[:page_bytes])
    return transfer


async def _raw(url: str, port: int, lanes: int, seconds: float, step: Callable[[str], None]) -> float | None:
    """The reference, or None where a firewall lets only the link through."""
    try:
        return await asyncio.to_thread(copy, Address.parse(url).host, port, lanes, seconds)
    except DoctorError as error:
        step(f"no reference: {error}")
        return None


async def _run(endpoint: Endpoint[Link], url: str, lanes: int, seconds: float, raw_bps: float | None) -> Run:
    """One transfer after the other for some seconds, a few at a time."""
    link = await endpoint.connect(url, lanes=lanes)
    try:
        began_s = time.monotonic()
        await _transfer(link, 1, PAGE_BYTES).delivered
        pages = max(1, min(256, round(CHUNK_S / (time.monotonic() - began_s))))
        before, cpu_s = await _ask(link, url), time.process_time()
        waited = _waited(link)
        began_s = time.monotonic()
        connections: tuple[ConnectionFacts, ...] = ()
        open_transfers: list[OutgoingTransfer] = []
        moved_pages = 0
        while open_transfers or not moved_pages:
            elapsed_s = time.monotonic() - began_s
            while elapsed_s < seconds and len(open_transfers) < IN_FLIGHT:
                open_transfers.append(_transfer(link, pages, PAGE_BYTES))
            if elapsed_s > seconds / 2 and not connections:
                connections = _connections(link)
            await open_transfers.pop(0).delivered
            moved_pages += pages
        elapsed_s = time.monotonic() - began_s
        cores_here = (time.process_time() - cpu_s) / elapsed_s
        credit_s, idle_s = (after - earlier for after, earlier in zip(_waited(link), waited, strict=True))
        after = await _ask(link, url)
        return Run(
            lanes=lanes,
            bps=moved_pages * PAGE_BYTES * 8 / elapsed_s,
            raw_bps=raw_bps,
            credit_share=credit_s / elapsed_s / lanes,
            idle_share=idle_s / elapsed_s / lanes,
            cores_here=cores_here,
            cores_there=(after.cpu_s - before.cpu_s) / elapsed_s,
            connections=connections or _connections(link),
        )
    finally:
        await link.close()


def _waited(link: Link) -> tuple[float, float]:
    now = link.clock()
    return (
        sum(lane.waited_s("credit", now) for lane in link.lane_stats),
        sum(lane.waited_s("idle", now) for lane in link.lane_stats),
    )


def _connections(link: Link) -> tuple[ConnectionFacts, ...]:
    return tuple(connection_facts(lane.plain_socket) for lane in link.lanes if lane.plain_socket is not None)


@contextlib.asynccontextmanager
async def self_test_server() -> AsyncIterator[str]:
    """A doctor in a process of its own on a loopback port, for the time of a block; yields its address.

    Raises:
        DoctorError: it does not start.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lynx_net.doctor.serving", "tcp://127.0.0.1:0"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is ours; the child ends when its standard input does
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            url = (await process.stdout.readline()).decode().strip()
        if not url:
            raise DoctorError("the serving process of the self-test did not start")
        yield url
    except TimeoutError as error:
        raise DoctorError(f"the serving process of the self-test did not start in {START_S:g} s") from error
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(1):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
