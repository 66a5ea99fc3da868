"""The choice of a split: the expected time, what the link knows of its rate, and `codec="auto"` end to end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lynx_net
from lynx_codec import get_codec
from lynx_net.errors import CodecError, LocalProtocolError
from lynx_net.serdes.split import (
    SPLITS,
    SURVIVAL,
    Situation,
    auto_params,
    choose_split,
    expected_time_s,
    stream_totals,
    survival,
)
from lynx_net.testing.clock import run_virtual

CERTAIN = dict.fromkeys(range(1, 9), (1.0, 1.0))
HOPELESS = {bits: (0.0, 0.0) for bits in range(1, 8)} | {8: (1.0, 1.0)}


def situation(**changes: Any) -> Situation:
    return Situation(**{"rate_bps": 8e6, "decode_token_s": 0.25, "tokens": 4, **changes})


def test_one_stream_is_its_time_on_the_link_and_plain_decoding() -> None:
    assert expected_time_s((8,), [1_000_000], situation()) == pytest.approx(1.0 + 4 * 0.25)


def test_certain_drafts_count_when_they_are_made() -> None:
    halves = [1_000_000, 2_000_000]
    assert expected_time_s((4, 4), halves, situation(), CERTAIN) == pytest.approx(1.0 + 4 * 0.25)
    # Only two drafts may be made: they stand, the pass at 3 s yields the third token.
    assert expected_time_s((4, 4), halves, situation(max_drafts=2), CERTAIN) == pytest.approx(3.0 + 0.25 + 0.25)


def test_drafts_that_never_stand_cost_what_they_delay() -> None:
    halves = [1_000_000, 900_000]  # the draft that begins at 1.75 s ends at 2.0 s, the residual is in at 1.9 s
    expected = 2.0 + 0.5 + 3 * 0.25  # the pass of half a second yields the first token
    assert expected_time_s((4, 4), halves, situation(verify_s=0.5), HOPELESS) == pytest.approx(expected)


def test_middle_streams_make_later_drafts_better() -> None:
    """Two drafts on 2 bits, two on 4: 0.5 of the first ones stand, all others do."""
    table = HOPELESS | {2: (0.5, 0.5), 4: (1.0, 1.0)}
    sizes = [1_000_000, 500_000, 500_000]  # 1.0, 1.5, 2.0 s
    cases = {0: 0.5, 1: 0.25, 4: 0.25}
    times = {0: 2.25 + 3 * 0.25, 1: 2.25 + 2 * 0.25, 4: 2.0}
    expected = sum(share * times[accepted] for accepted, share in cases.items())
    assert expected_time_s((2, 2, 4), sizes, situation(), table) == pytest.approx(expected)


@given(
    rate_bps=st.floats(1e5, 1e12),
    decode_s=st.floats(1e-4, 10),
    tokens=st.integers(1, 100),
    total=st.integers(1, 10**9),
)
def test_the_choice_is_the_least_and_never_later_than_waiting_for_everything(
    rate_bps: float, decode_s: float, tokens: int, total: int
) -> None:
    sizes = {bits: [total * width // 8 for width in bits] for bits in SPLITS}
    where = Situation(rate_bps=rate_bps, decode_token_s=decode_s, tokens=tokens)
    times = {bits: expected_time_s(bits, sizes[bits], where) for bits in SPLITS}
    chosen = choose_split(sizes, where)
    assert times[chosen] == min(times.values())
    assert times[chosen] <= sum(sizes[8,]) * 8 / rate_bps + tokens * decode_s + 1e-9


def test_a_slow_link_gets_drafts_that_stand_and_a_fast_one_an_early_start() -> None:
    """With little time to draft few bits suffice; with much of it, fewer drafts must fall."""
    sizes = {bits: [width * 1_000_000 for width in bits] for bits in SPLITS}
    first = {
        rate_bps: choose_split(sizes, Situation(rate_bps=rate_bps, decode_token_s=0.05))[0] for rate_bps in (5e6, 1e9)
    }
    assert first[5e6] > first[1e9]
    assert choose_split(sizes, Situation(rate_bps=5e6, decode_token_s=0.05), HOPELESS) == (8,)


def test_more_bits_never_stand_less() -> None:
    for number in (0, 63):
        chances = [survival(bits, number) for bits in sorted(SURVIVAL)]
        assert chances == sorted(chances)
        assert chances[-1] == 1.0
    assert sorted(SURVIVAL) == list(range(1, 9))


def test_stream_totals_are_the_bytes_that_are_sent(make_cache: Any) -> None:
    cache = make_cache(layers=3, tokens=300)

    async def run() -> list[int]:
        async with lynx_net.serve("memory://totals") as server, lynx_net.connect(server.url) as link:
            sending = asyncio.create_task(cache.send_on(link, codec="nested", codec_params={"bits": [3, 5]}))
            transfer = await anext(aiter(server))
            totals = stream_totals(get_codec("nested", bits=[3, 5]), transfer.offer.layout)
            await sending
            assert transfer.stats.stream_bytes == totals
            return totals

    assert len(run_virtual(run())) == 2


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"bits": [4, 4]}, CodecError),
        ({"alpha": 1}, CodecError),
        ({"chunk": 5}, CodecError),
        ({"decode_token_s": 0}, LocalProtocolError),
        ({"decode_token_s": "fast"}, LocalProtocolError),
        ({"rate_bps": float("inf")}, LocalProtocolError),
        ({"verify_s": -1.0}, LocalProtocolError),
        ({"tokens": 0}, LocalProtocolError),
        ({"max_drafts": 1.5}, LocalProtocolError),
    ],
)
def test_parameters_that_cannot_be(params: dict[str, Any], error: type[Exception], make_cache: Any) -> None:
    with pytest.raises(error):
        auto_params(make_cache().layout, params, rate_bps=1e9, asked={})


def test_the_request_says_how_fast_the_receiver_is(make_cache: Any) -> None:
    """And the caller's word counts more."""
    layout = make_cache(layers=8, tokens=1024, heads=4, key_size=64, value_size=64).layout

    def bits(params: dict[str, Any], asked: dict[str, Any]) -> list[int]:
        return list(auto_params(layout, params, rate_bps=50e6, asked=asked)["bits"])

    slow, fast = {"decode_token_s": 2.0}, {"decode_token_s": 0.001}
    assert bits(slow, {}) == bits({}, slow) == bits(slow, fast)
    assert bits(fast, {}) == bits({}, fast) == bits(fast, slow)
    assert bits(slow, {}) != bits(fast, {})


@pytest.mark.parametrize("nonsense", [0, -1.0, float("nan"), float("inf"), "fast", None, True, [1]])
def test_nonsense_of_a_peer_counts_as_nothing_said(nonsense: Any, make_cache: Any) -> None:
    layout = make_cache().layout
    usual = auto_params(layout, {}, rate_bps=50e6, asked={})
    assert auto_params(layout, {}, rate_bps=50e6, asked={"decode_token_s": nonsense}) == usual


def test_the_rate_of_a_link() -> None:
    """What was moved while there was something to move, however long the link was idle; before that, what is set."""

    async def run() -> None:
        layout = lynx_net.CacheLayout(layers=4, tokens=1024, heads=4, key_size=128, value_size=128)
        make = lynx_net.HostCache(layout)
        async with (
            lynx_net.serve("memory://rates") as server,
            lynx_net.connect(server.url, rate="40Mbit", lanes=2) as link,
        ):
            accepted = await server.accept()
            assert link.rate_bps == 40e6
            assert accepted.rate_bps is None
            await asyncio.sleep(30)

            async def send() -> None:
                async with link.send("r", layout, codec="bf16") as sending:
                    for layer in range(4):
                        await sending.write(layer, make.view(layer, "key"), make.view(layer, "value"))
                await asyncio.sleep(10)

            await send()
            await send()
            link.set_rate("100Mbit")
            assert link.rate_bps == pytest.approx(40e6, rel=0.05)
            await send()
            assert link.rate_bps == pytest.approx(100e6, rel=0.05)
            link.set_rate("10Mbit")
            assert link.rate_bps == 10e6

    run_virtual(run())


def test_auto_chooses_by_the_rate_of_the_link(make_cache: Any) -> None:
    """The same cache over a slow and over a fast link: other splits."""
    cache = make_cache(layers=8, tokens=512, heads=4, key_size=64, value_size=64)

    async def run(rate: str) -> list[int]:
        async with (
            lynx_net.serve("memory://auto") as server,
            lynx_net.connect(server.url, rate=rate) as link,
        ):
            params = {"decode_token_s": 0.05, "chunk": 64}
            sending = asyncio.create_task(cache.send_on(link, codec="auto", codec_params=params))
            transfer = await anext(aiter(server))
            await transfer.complete
            await sending
            assert transfer.offer.codec == "nested"
            assert transfer.offer.codec_params["chunk"] == 64
            bits = transfer.offer.codec_params["bits"]
            assert len(transfer.stats.stream_bytes) == len(bits)
            assert sum(bits) == 8
            return list(bits)

    chosen = [run_virtual(run(rate)) for rate in ("2Mbit", "10Gbit")]
    assert chosen[0] != chosen[1]
    assert all(tuple(bits) in SPLITS for bits in chosen)
