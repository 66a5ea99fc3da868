"""Memory that a receiver keeps for transfers to come."""

from __future__ import annotations

import pytest

from perf.bytelevel import endpoint, open_bytes

PAGES, PAGE_BYTES = 24, 70_000
ANCHORS_BYTES = PAGES * PAGE_BYTES


@pytest.mark.parametrize("kept_bytes", [0, 5 * PAGE_BYTES, 1 << 30])
async def test_a_receiver_keeps_what_it_may(kept_bytes: int) -> None:
    receiver = endpoint(kept_bytes=kept_bytes)
    server = await receiver.serve("tcp://127.0.0.1:0")
    sender = endpoint()
    link = await sender.connect(server.url)
    transfers = aiter(server)
    pages = [bytes([page]) * PAGE_BYTES for page in range(PAGES)]
    for _ in range(2):
        sending = open_bytes(link, PAGES, (PAGE_BYTES, PAGE_BYTES))
        sending.submit_all((page, 0, pages[page], (), None) for page in range(PAGES))
        transfer = await anext(transfers)
        await transfer.stream_ready(0)  # nothing of what follows can free an anchor before all are held
        sending.submit_all((page, 1, pages[page], (), None) for page in range(PAGES))
        await transfer.complete
        await sending.delivered
    kept = receiver._book.pool.kept_bytes
    assert kept <= kept_bytes
    assert kept >= min(kept_bytes, ANCHORS_BYTES)
    await sender.close()
    await server.close()
