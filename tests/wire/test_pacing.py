"""Pacing: the long-run rate is exact, whatever the sizes of sends and the lateness of timers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynx_net.errors import LocalProtocolError
from lynx_net.wire.pacing import BURST_SECONDS, TokenBucket, parse_rate


def send_for(bucket: TokenBucket, start_s: float, sends: int, sizes: random.Random, late_s: float) -> tuple[int, float]:
    """Send as fast as allowed with timers up to `late_s` late; bytes sent, and when the next send may start."""
    now = start_s
    total = 0
    for _ in range(sends):
        while (ready := bucket.ready_at(now)) > now:
            now = ready + sizes.random() * late_s
        size = sizes.choice((48, 1500, 65536, 262144))
        bucket.spend(size, now)
        total += size
    return total, max(bucket.ready_at(now), now)


@given(
    rate_bps=st.sampled_from([1e6, 1e8, 1e9, 1e10, 4e11]),
    seed=st.integers(0, 1000),
    start_s=st.sampled_from([0.0, 12345.678, 1e7]),
    late=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_the_long_run_rate_is_exact(rate_bps: float, seed: int, start_s: float, late: float) -> None:
    bucket = TokenBucket(rate_bps, start_s)
    total, end_s = send_for(bucket, start_s, 2000, random.Random(seed), late * BURST_SECONDS)
    # The last send has been paid for at end_s; lateness may have left at most a burst unspent.
    assert total * 8 / rate_bps == pytest.approx(end_s - start_s, rel=1e-3, abs=2 * BURST_SECONDS * (late > 0) + 1e-6)


def test_a_timer_later_than_the_burst_costs_only_what_is_beyond_it() -> None:
    bucket = TokenBucket(8e6, 0.0)
    assert bucket.ready_at(10.0) == 10.0
    bucket.spend(int(1e6 * BURST_SECONDS), 10.0)
    assert bucket.ready_at(10.0) == 10.0
    bucket.spend(1_000_000, 10.0)
    assert bucket.ready_at(10.0) == pytest.approx(11.0)


@given(st.floats(1e3, 1e11), st.floats(0, 1e8), st.integers(1, 1 << 24))
def test_asking_at_the_time_given_is_never_asked_to_wait_again(rate_bps: float, now: float, size: int) -> None:
    """A virtual clock jumps exactly to the time given; it must not jump for ever."""
    bucket = TokenBucket(rate_bps, now)
    bucket.spend(size, now)
    ready = now
    for _ in range(3):
        if bucket.ready_at(ready) <= ready:
            break
        ready = bucket.ready_at(ready)
    assert bucket.ready_at(ready) <= ready


def test_a_change_of_rate_keeps_the_debt() -> None:
    bucket = TokenBucket(8e6, 0.0)
    bucket.spend(1_000_000, 0.0)
    bucket.set_rate(16e6, 0.5)
    assert bucket.rate_bps == 16e6
    assert bucket.ready_at(0.5) == pytest.approx(0.75)
    bucket.set_rate(8e5, 0.5)
    assert bucket.ready_at(0.5) == pytest.approx(5.5)


def test_a_clock_that_steps_back_gives_nothing() -> None:
    bucket = TokenBucket(8e6, 10.0)
    bucket.spend(1_000_000, 10.0)
    bucket.ready_at(5.0)
    assert bucket.ready_at(10.5) == pytest.approx(11.0)


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan"), 10**400], ids=lambda rate: str(rate)[:5])
def test_an_impossible_rate(rate: float) -> None:
    with pytest.raises(LocalProtocolError):
        parse_rate(rate)
    if rate != 10**400:
        with pytest.raises(LocalProtocolError):
            TokenBucket(rate, 0.0)
        with pytest.raises(LocalProtocolError):
            TokenBucket(1.0, 0.0).set_rate(rate, 0.0)


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        (None, None),
        (1000, 1000.0),
        (2.5e9, 2.5e9),
        ("100bit", 100.0),
        ("100kbit", 1e5),
        ("100Mbit", 1e8),
        ("10Gbit", 1e10),
        ("10 Gbit/s", 1e10),
        ("10Gbps", 1e10),
        ("10Gbitps", 1e10),
        ("1Tbit", 1e12),
        ("1.25GB/s", 1e10),
        ("1.25GBps", 1e10),
        ("5B/s", 40.0),
        (" 3kB/s ", 24e3),
        ("0.5Mbps", 5e5),
    ],
)
def test_rates_as_people_write_them(text: Any, bps: float | None) -> None:
    assert parse_rate(text) == bps


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "10",
        "10G",
        "10GB",
        "-1Mbit",
        "1e9bit",
        "10 Gbit per s",
        "1.Mbit",
        ".5Mbit",
        "10gbit",
        "0Mbit",
        "9" * 400 + "bit",
        True,
    ],
    ids=lambda text: str(text)[:8],
)
def test_rates_that_could_mean_anything_are_refused(text: Any) -> None:
    with pytest.raises(LocalProtocolError):
        parse_rate(text)
