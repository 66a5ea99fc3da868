"""Segments received into lent buffers and segments received one by one: the same bytes come to the same end."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lendkit import (
    CONFIG,
    SEGMENT_BYTES,
    SIZES,
    STREAMS,
    Outcome,
    Receiver,
    burst_of,
    content_of,
    offer_of,
    segment_of,
    segments_of,
    size_of,
)

from hatch_build import SOURCE, compile_lanes, find_compiler
from lynx_net.aio import lane_io
from lynx_net.wire.frames import SegmentHeader, pack_control
from lynx_net.wire.messages import Abort, Ping, encode_message

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = {2: 40, 4: 20}
"""Of each transfer, by its id."""
BREAKS = ("", "payload", "header", "page", "offset", "length", "stream_bytes", "stream", "parity", "cut")


@pytest.fixture(scope="session")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The extension, built from the source that stands here."""
    target = tmp_path_factory.mktemp("lanes") / "_lanes.abi3.so"
    if problem := compile_lanes(ROOT / SOURCE, target):
        assert find_compiler() is None or "stable ABI" in problem or "Linux" in problem, problem
        pytest.skip(problem)
    spec = importlib.util.spec_from_file_location("lynx_net.aio._lanes", target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stream_of(seed: int, breaks: str, *, repeats: int, aborts: bool) -> bytes:
    """What a peer sends: two transfers with their segments in any order and in bursts, some twice, and one broken."""
    rng = random.Random(seed)
    distance = rng.choice((1, 4, 100))
    streams = [(transfer, page, stream) for transfer in PAGES for stream in range(STREAMS) for page in range(PAGES[transfer])]
    ordered = sorted((place + rng.random() * distance, one) for place, one in enumerate(streams))
    segments = [segment for _, one in ordered for segment in segments_of(*one)]
    for _ in range(repeats):
        segments.insert(rng.randrange(len(segments) + 1), rng.choice(segments))
    at = rng.randrange(len(segments))
    segments[at] = broken(rng, breaks, *segments[at])
    frames = [offer_of(transfer, pages) for transfer, pages in PAGES.items()]
    while segments:
        count = rng.choice((1, 1, 2, 5, 9))
        frames.append(burst_of(segments[:count]))
        del segments[:count]
        if rng.random() < 0.1:
            frames.append(pack_control(encode_message(Ping())))
    if aborts:
        frames.insert(rng.randrange(3, len(frames) + 1), pack_control(encode_message(Abort(4, 1, "enough"))))
    if breaks == "header":
        at = rng.randrange(2, len(frames))
        frames[at] = frames[at][:20] + bytes([frames[at][20] ^ 1]) + frames[at][21:]
    stream = b"".join(frames)
    return stream[: rng.randrange(len(stream))] if breaks == "cut" else stream


def broken(rng: random.Random, how: str, header: SegmentHeader, payload: bytes) -> tuple[SegmentHeader, bytes]:
    match how:
        case "payload" if payload:
            at = rng.randrange(len(payload))
            return header, payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
        case "page":
            return header._replace(page=rng.choice((header.page + 4, PAGES[header.transfer], 1 << 31))), payload
        case "offset":
            return header._replace(offset=1, stream_bytes=header.stream_bytes + 1), payload
        case "length" if payload:
            return header._replace(length=header.length - 1), payload[:-1]
        case "stream_bytes":
            grown = header.stream_bytes + rng.choice((1, SEGMENT_BYTES))
            return header._replace(stream_bytes=grown), payload
        case "stream":
            return header._replace(stream=rng.choice((1 - header.stream, STREAMS, 255))), payload
        case "parity":
            return header._replace(transfer=rng.choice((1, 3, 5))), payload
    return header, payload


async def _receive(io: lane_io.LaneIo, stream: bytes, cuts: list[int]) -> Outcome:
    async with Receiver(io) as receiver:
        feeding = asyncio.create_task(receiver.feed(0, stream, cuts))
        while not feeding.done() and receiver.owner.error is None:
            await asyncio.sleep(0.001)
        if receiver.owner.error is not None:
            receiver.ends[0].shutdown(2)
        await feeding
        return await receiver.outcome()


lent_ever: list[int] = []


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    breaks=st.sampled_from(BREAKS),
    repeats=st.sampled_from((0, 0, 3)),
    aborts=st.booleans(),
    cuts=st.lists(st.floats(0, 1), max_size=3),
)
def test_the_same_bytes_come_to_the_same_end(
    lanes: ModuleType, seed: int, breaks: str, repeats: int, aborts: bool, cuts: list[float]
) -> None:
    stream = stream_of(seed, breaks, repeats=repeats, aborts=aborts)
    places = [int(cut * len(stream)) for cut in cuts]
    plain = asyncio.run(_receive(lane_io.PYTHON, stream, places))
    lent = asyncio.run(_receive(lane_io.native(lanes), stream, places))
    assert not plain.lent_segments
    lent_ever.append(lent.lent_segments)
    assert lent.error == plain.error
    for outcome in (plain, lent):
        for (transfer, page), streams in outcome.pages.items():
            assert streams == [content_of(transfer, page, stream) for stream in range(len(streams))]
    # More or fewer pages of a transfer that fails may have been decoded before. Headers of a burst are looked at before
    # its payloads here, after them there.
    whole = [
        {key: streams for key, streams in outcome.pages.items() if key[0] not in outcome.failed} for outcome in (plain, lent)
    ]
    if plain.error:
        assert whole[0].items() <= whole[1].items()
    else:
        assert whole[0] == whole[1]
        assert replace(lent, pages={}) == replace(plain, pages={})


def test_lent_buffers_were_used() -> None:
    assert sum(lent_ever) > 20 * len(lent_ever)


async def test_bulk_is_received_in_lent_buffers(lanes: ModuleType) -> None:
    """All but the first pages of each size, whatever the bursts."""
    async with Receiver(lane_io.native(lanes)) as receiver:
        stream = [offer_of(2, 400)]
        wanted = [page for page in range(400) if size_of(page, 0) >= 33_000]
        stream += [burst_of([segment_of(2, page, 0)]) for page in wanted if size_of(page, 0) <= SEGMENT_BYTES]
        await receiver.feed(0, b"".join(stream))
        outcome = await receiver.outcome()
        assert not outcome.error
        assert outcome.lent_segments > len(wanted) * 3 // 5
        assert len(outcome.pages) == len(stream) - 1
