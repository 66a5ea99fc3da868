"""Anchors of eight senders come before the residuals of any, on a real bottleneck."""

from __future__ import annotations

from typing import Any

from perf.incast import MIB, SENDERS, Incast, measure
from perf.netem import network


def test_anchors_of_all_senders_come_first(namespaces: Any) -> None:
    rate_bps = 200e6  # slow enough for a machine that is busy
    with network(SENDERS + 1, rate=rate_bps) as net:
        figures = measure(net, rate_bps, Incast(anchor_bytes=2 * MIB, residual_bytes=2 * MIB, rounds=1))
    assert 1.0 < figures["anchor_ratio"] <= 1.3
    assert figures["residual_early_share"] <= 0.05
    assert figures["total_ratio"] <= 1.3
    assert namespaces() == set()
