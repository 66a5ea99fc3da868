"""What settings a link refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pairkit import CONFIG

from lynx_net.errors import LocalProtocolError
from lynx_net.wire.config import LinkConfig


@pytest.mark.parametrize(
    "wrong",
    [
        {"deadline_s": 0},
        {"progress_timeout_s": -1},
        {"deadline_s": float("nan")},
        {"segment_bytes": 4095},
        {"segment_bytes": (1 << 24) + 1},
        {"anchor_window_bytes": 8191},
        {"residual_window_bytes": 8191},
        {"early_residual_bytes": -1},
        {"initial_credit_bytes": -1},
        {"memory_bytes": 0},
        {"kept_bytes": -1},
        {"max_pending_offers": 0},
        {"max_pending_requests": 0},
        {"send_queue_bytes": 0},
        {"lane_batch_bytes": 0},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        replace(CONFIG, **wrong)


def test_settings_for_devices_can_be_changed_one_by_one_and_are_checked_like_others() -> None:
    usual, changed = LinkConfig.for_devices(), LinkConfig.for_devices(deadline_s=9.0, segment_bytes=1 << 20)
    assert usual.segment_bytes > 2048 * 8 * 128 * 2, "a stream of a page is one segment, also in 16 bits"
    assert usual.residual_window_bytes > usual.anchor_window_bytes >= LinkConfig().anchor_window_bytes
    assert usual.send_queue_bytes < LinkConfig().send_queue_bytes, "what is queued lies in pinned memory"
    assert usual.lane_batch_bytes < LinkConfig().lane_batch_bytes, "lanes are not far apart, so batches are soon whole"
    assert not usual.urgent_lane
    assert (changed.deadline_s, changed.segment_bytes) == (9.0, 1 << 20)
    assert changed.residual_window_bytes == usual.residual_window_bytes
    with pytest.raises(LocalProtocolError, match="two segments"):
        LinkConfig.for_devices(anchor_window_bytes=1 << 20)
