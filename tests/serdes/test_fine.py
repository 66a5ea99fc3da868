"""Which tokens are fine, and that they arrive at full precision with the first stream."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import lynx_net
from lynx_net import CacheLayout, fine_tokens
from lynx_net.errors import LocalProtocolError
from lynx_net.testing.clock import run_virtual

LAYOUT = CacheLayout(layers=2, tokens=60, heads=1, key_size=4, value_size=4, raw_head=2, raw_tail=1)


def test_the_fine_tokens_are_those_of_most_attention_and_the_last() -> None:
    scores = np.zeros((2, 60), np.float32)
    scores[0, [0, 5, 9]] = 3, 2, 1  # token 0 is raw
    scores[1, 30] = 2.5
    before = scores.copy()
    recent = range(43, 59)
    assert fine_tokens(LAYOUT, scores, share=18 / 60, least=0).tolist() == [5, 30, *recent]
    assert fine_tokens(LAYOUT, scores[0], share=18 / 60, least=0).tolist() == [5, 9, *recent]
    assert fine_tokens(LAYOUT, scores, share=0, least=19).tolist() == [5, 9, 30, *recent]
    assert fine_tokens(LAYOUT, scores, share=0, least=0).tolist() == []
    assert fine_tokens(LAYOUT, scores).tolist() == list(range(2, 59))
    np.testing.assert_array_equal(scores, before)


def test_without_scores_they_are_the_last() -> None:
    assert fine_tokens(LAYOUT, share=0.1, least=0).tolist() == list(range(53, 59))


@pytest.mark.parametrize(
    ("scores", "share"),
    [(np.zeros(59), 0.1), (np.zeros((2, 61)), 0.1), (np.full(60, np.nan), 0.1), (None, -0.1), (None, 1.1)],
)
def test_bad_scores_and_shares(scores: Any, share: float) -> None:
    with pytest.raises(LocalProtocolError):
        fine_tokens(LAYOUT, scores, share=share)


def test_fine_tokens_are_at_full_precision_when_the_anchors_are_in(make_cache: Any) -> None:
    cache = make_cache(tokens=600, page_tokens=256)
    fine = np.array([7, 100, 255, 256, 511, 599])
    coarse: dict[Any, Any] = {}
    targets: list[Any] = []

    async def run() -> None:
        async with lynx_net.serve("memory://fine") as server, lynx_net.connect(server.url, rate="1Mbit") as link:
            sending = asyncio.create_task(cache.send_on(link, fine=fine))
            transfer = await anext(aiter(server))
            await transfer.anchor_ready
            coarse.update({key: transfer.target.view(*key).copy() for key in cache.arrays})
            assert not transfer.residual_ready.done()
            await transfer.complete
            await sending
            targets.append(transfer.target)

    run_virtual(run())
    for key, early in coarse.items():
        unchanged = (early == targets[0].view(*key)).all(axis=(1, 2))
        assert unchanged[fine].all()
        assert unchanged[:4].all()  # raw
        assert unchanged.sum() < 20
