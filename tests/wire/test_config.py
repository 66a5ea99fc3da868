"""What settings a link refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pairkit import CONFIG

from lynx_net.errors import (
    LocalProtocolError,
)


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
        {"max_pending_offers": 0},
        {"max_pending_requests": 0},
        {"send_queue_bytes": 0},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        replace(CONFIG, **wrong)
