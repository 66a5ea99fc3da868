"""The doctor's judgement: for each cause facts that show it, and facts just short of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lynx_net.doctor.cli import report_lines
from lynx_net.doctor.facts import ConnectionFacts, Facts, HostFacts, Run
from lynx_net.doctor.findings import RULES, diagnose, size, speed

HOST = HostFacts(cores=16, load=0.5, checksum_bps=200e9, receive_limit_bytes=16 << 20, send_limit_bytes=64 << 20)
CONNECTION = ConnectionFacts(
    congestion="cubic",
    rtt_s=0.0012,
    min_rtt_s=0.001,
    mss_bytes=8948,
    mtu_bytes=9000,
    window_segments=400,
    sent_segments=1_000_000,
    retransmitted_segments=10,
    delivery_rate_bps=5e9,
    notsent_bytes=0,
    busy_s=1.0,
    receiver_limited_s=0.01,
    buffer_limited_s=0.01,
)
RUN = Run(
    lanes=2,
    bps=10e9,
    raw_bps=10.2e9,
    credit_share=0.0,
    idle_share=0.0,
    cores_here=2.0,
    cores_there=2.5,
    connections=(CONNECTION, CONNECTION),
)
GOOD = Facts(
    url="tcp://there:7000",
    local=False,
    wanted_bps=10e9,
    here=HOST,
    there=HOST,
    receive_buffer_bytes=4 << 20,
    asked_receive_buffer_bytes=2 << 20,
    anchor_window_bytes=32 << 20,
    residual_window_bytes=4 << 20,
    rtt_s=0.001,
    small_transfer_s=0.003,
    runs=(RUN,),
)


def facts(run: dict[str, Any] | None = None, connection: dict[str, Any] | None = None, **changes: Any) -> Facts:
    """The good link with some things changed, in its run and in every connection of it too."""
    changed = replace(CONNECTION, **(connection or {}))
    runs = (replace(RUN, **({"connections": (changed, changed)} | (run or {}))),)
    return replace(GOOD, **({"runs": runs} | changes))


SLOW = {"bps": 9e9}
"""Below the rate, but not so far below the raw copy that lynx_net itself would be the reason."""

CASES: list[tuple[str, Facts, Facts]] = [
    # key, facts that show the cause, facts just short of it
    ("network", facts(run={"raw_bps": 9e9}), facts(run={"raw_bps": 9.6e9})),
    # 10 Gbit/s x 1 ms over 2 lanes is 625,000 bytes a lane; the kernel's figure counts twice
    ("receive-buffer", facts(receive_buffer_bytes=1_240_000), facts(receive_buffer_bytes=1_260_000)),
    (
        "receiver",
        facts(run=SLOW, connection={"receiver_limited_s": 0.3}),
        facts(run=SLOW, connection={"receiver_limited_s": 0.1}),
    ),
    (
        "send-buffer",
        facts(here=replace(HOST, send_limit_bytes=1_200_000)),
        facts(here=replace(HOST, send_limit_bytes=1_300_000)),
    ),
    ("loss", facts(connection={"retransmitted_segments": 1100}), facts(connection={"retransmitted_segments": 900})),
    ("congestion-control", facts(connection={"congestion": "reno"}), facts(connection={"congestion": "bbr"})),
    ("mtu", facts(connection={"mtu_bytes": 1500}), facts(connection={"mtu_bytes": 1500}, wanted_bps=5e9)),
    ("cores", facts(run={"cores_there": 14.0}), facts(run={"cores_there": 13.0})),
    ("load", facts(here=replace(HOST, load=12.0)), facts(here=replace(HOST, load=11.0))),
    (
        "checksum",
        facts(there=replace(HOST, checksum_bps=19e9)),
        facts(there=replace(HOST, checksum_bps=21e9)),
    ),
    (
        "lanes",
        facts(runs=(replace(RUN, lanes=1, bps=8.6e9), RUN)),
        facts(runs=(replace(RUN, lanes=1, bps=8.8e9), RUN)),
    ),
    (
        "credit",
        facts(run=SLOW | {"credit_share": 0.3}),
        facts(run=SLOW | {"credit_share": 0.1}),
    ),
    ("residual-window", facts(residual_window_bytes=1_200_000), facts(residual_window_bytes=1_260_000)),
    ("overhead", facts(run={"bps": 8e9}), facts(run={"bps": 8.3e9})),
    ("small-transfers", facts(small_transfer_s=0.0071), facts(small_transfer_s=0.0069)),
    ("queueing", facts(connection={"rtt_s": 0.0061}), facts(connection={"rtt_s": 0.0059})),
]


def keys(of: Facts) -> list[str]:
    return [finding.key for finding in diagnose(of)]


def test_a_good_link_has_no_finding() -> None:
    assert GOOD.reaches
    assert keys(GOOD) == []
    assert report_lines(GOOD, [])[-1] == "nothing found that limits it"


@pytest.mark.parametrize(("key", "shown", "short"), CASES, ids=[key for key, _, _ in CASES])
def test_each_cause_alone(key: str, shown: Facts, short: Facts) -> None:
    assert keys(shown) == [key]
    assert keys(short) == []


def test_the_document_lists_every_finding() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "observability.md").read_text("utf-8")
    _, _, table = text.partition("| name | shown by |")
    assert re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE) == [
        finding.key for rule in RULES for _, shown, _ in CASES if (finding := rule(shown)) is not None
    ]


def test_every_rule_has_its_case() -> None:
    found = {finding.key for _, shown, _ in CASES for finding in diagnose(shown)}
    assert len(found) == len(CASES) == len(RULES)


@pytest.mark.parametrize(("key", "shown", "_"), CASES, ids=[key for key, _, _ in CASES])
def test_findings_are_whole_sentences_with_figures(key: str, shown: Facts, _: Facts) -> None:
    (finding,) = diagnose(shown)
    assert all((finding.what, finding.why, finding.advice))
    assert key == "congestion-control" or any(letter.isdigit() for letter in finding.measured)
    text = "\n".join(report_lines(shown, [finding]))
    for part in (finding.what, finding.measured, finding.why, finding.advice, f"[{key}]"):
        assert part in text


def test_the_advice_for_a_receive_buffer_names_the_size_and_the_kernels_limit() -> None:
    """80 ms at 10 Gbit/s are 100 MB on the way, 50 MB a lane: the next power of two is more than the kernel allows."""
    (finding, *_) = diagnose(facts(rtt_s=0.08, anchor_window_bytes=1 << 30, residual_window_bytes=1 << 30))
    assert finding.key == "receive-buffer"
    assert f"receive_buffer_bytes={64 << 20}" in finding.advice
    assert f"net.core.rmem_max={64 << 20}" in finding.advice
    (finding,) = diagnose(facts(receive_buffer_bytes=1_000_000))
    assert "sysctl" not in finding.advice


def test_a_buffer_left_to_the_kernel_is_not_judged() -> None:
    assert keys(facts(receive_buffer_bytes=100_000, asked_receive_buffer_bytes=None)) == []


def test_the_bound_of_loss_is_that_of_mathis() -> None:
    """MSS 1460, 100 ms, 1 % loss: 1460 x 8 / 0.1 x sqrt(150) = 1.43 Mbit/s; bbr has no such bound."""
    lossy = {"retransmitted_segments": 10_000, "mss_bytes": 1460}
    found = {finding.key: finding for finding in diagnose(facts(connection=lossy, rtt_s=0.1))}
    assert "1.4 Mbit/s" in found["loss"].measured
    assert "bbr" in found["loss"].advice
    found = {finding.key: finding for finding in diagnose(facts(connection=lossy | {"congestion": "bbr"}))}
    assert "about" not in found["loss"].measured
    assert "bbr" not in found["loss"].advice


def test_the_send_buffer_shows_in_the_kernels_times_too() -> None:
    assert keys(facts(run=SLOW)) == []
    connection = replace(CONNECTION, buffer_limited_s=0.3)
    assert keys(facts(run=SLOW | {"connections": (connection, connection)})) == ["send-buffer"]


def test_one_host_has_its_cores_once() -> None:
    """Both processes use 8 of 16 cores: enough apart, all of them together."""
    run = {"cores_here": 8.0, "cores_there": 8.0}
    assert keys(facts(run=run)) == []
    assert keys(facts(run=run, local=True)) == ["cores"]
    assert keys(facts(connection={"mtu_bytes": 1500, "congestion": "reno"}, local=True)) == []


def test_the_target() -> None:
    """The wanted rate; without it the raw copy; without that nothing but itself."""
    assert GOOD.target_bps == 10e9
    assert facts(wanted_bps=None).target_bps == 10.2e9
    alone = facts(run={"raw_bps": None}, wanted_bps=None)
    assert alone.target_bps == 10e9
    assert alone.reaches
    assert not facts(run={"bps": 9.4e9}).reaches
    assert facts(run={"bps": 9.6e9}).reaches


def test_a_kernel_that_says_nothing_is_no_finding() -> None:
    silent = replace(
        facts(run={"connections": (ConnectionFacts(), ConnectionFacts())}, rtt_s=None),
        here=replace(HOST, receive_limit_bytes=None, send_limit_bytes=None),
        there=replace(HOST, receive_limit_bytes=None, send_limit_bytes=None),
    )
    assert keys(silent) == []
    assert "unknown" in "\n".join(report_lines(silent, []))


def test_figures_for_people() -> None:
    assert [speed(bps) for bps in (1e6, 999e6, 12.34e9)] == ["1.0 Mbit/s", "999.0 Mbit/s", "12.34 Gbit/s"]
    assert [size(count) for count in (2048, 3 << 20)] == ["2 KiB", "3.0 MiB"]
