"""Page streams of odd sizes, over memory and TCP: every byte in its place, and sizes of nothing cost nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from faultkit import byte_endpoint, content, send_bytes

URLS = ["memory://sizes", "tcp://127.0.0.1:0"]
KIB64 = 64 * 1024
SIZES = [0, 1, 511, 512, 513, KIB64 - 1, KIB64, KIB64 + 1]


async def _exchange(url: str, pages: int, sizes: list[list[int]], lanes: int = 1, **config: Any) -> Any:
    receiver, sender = byte_endpoint(**config), byte_endpoint(**config)
    server = await receiver.serve(url)
    link = await sender.connect(server.url, lanes=lanes)
    sending = asyncio.create_task(send_bytes(link, "r", pages, sizes))
    transfer = await anext(aiter(server))
    async with asyncio.timeout(10):
        await transfer.complete
        await sending
    await sender.close()
    await server.close()
    return transfer


def _check(transfer: Any, pages: int, sizes: list[list[int]]) -> None:
    expected = {
        (page, stream): content(page, stream, size)[:size]
        for page in range(pages)
        for stream, size in enumerate(sizes[page % len(sizes)])
    }
    assert transfer.got == expected


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("size", SIZES)
async def test_one_page_stream_of_an_odd_size(size: int, url: str) -> None:
    transfer = await _exchange(url, 1, [[size]])
    _check(transfer, 1, [[size]])
    assert transfer.stats.total_bytes == size


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("segment_bytes", [4096, 65_536, 1 << 20])
async def test_all_odd_sizes_in_one_transfer(url: str, segment_bytes: int) -> None:
    """Every pair of neighbouring sizes in three streams, over three lanes, with segments larger and smaller."""
    sizes = [[SIZES[(page + shift) % len(SIZES)] for shift in (0, 1, 5)] for page in range(len(SIZES))]
    transfer = await _exchange(url, 3 * len(SIZES), sizes, lanes=3, segment_bytes=segment_bytes)
    _check(transfer, 3 * len(SIZES), sizes)


@pytest.mark.parametrize("url", URLS)
async def test_a_transfer_of_empty_streams(url: str) -> None:
    """Pages without a byte: complete, and nothing hangs for want of a segment."""
    transfer = await _exchange(url, 20, [[0, 0]])
    _check(transfer, 20, [[0, 0]])


@pytest.mark.parametrize("around", [-1, 0, 1])
async def test_sizes_around_the_windows(around: int) -> None:
    """A page as large as the initial credit, a window, or a segment, give or take a byte."""
    config = {"segment_bytes": 4096, "initial_credit_bytes": 8192, "anchor_window_bytes": 16_384}
    sizes = [[4096 + around, 8192 + around, 16_384 + around], [16_384 + around, 4096 + around, 8192 + around]]
    transfer = await _exchange("tcp://127.0.0.1:0", 6, sizes, **config, residual_window_bytes=8192)
    _check(transfer, 6, sizes)
