from __future__ import annotations

import pytest

from lynx_net.speculation import Action, Limits, next_action

LIMITS = Limits(max_new_tokens=4, max_drafts=2, stop_tokens=frozenset({9}))


@pytest.mark.parametrize(
    ("committed", "drafts", "ready", "on_full", "expected"),
    [
        ([], [], False, False, Action.DRAFT),
        ([], [1], False, False, Action.DRAFT),
        ([], [1, 2], False, False, Action.WAIT),  # max_drafts
        ([], [9], False, False, Action.WAIT),  # a drafted stop token
        ([1, 2, 3], [5], False, False, Action.WAIT),  # max_new_tokens
        ([1, 2, 3], [], False, False, Action.DRAFT),
        ([], [1], True, False, Action.VERIFY),
        ([], [1, 9], True, False, Action.VERIFY),
        ([], [], True, False, Action.DECODE),  # ready before the first draft
        ([1], [], True, True, Action.DECODE),
        ([1, 9], [], True, True, Action.FINISH),
        ([9], [], False, False, Action.FINISH),  # the first token of the offer can be a stop token
        ([1, 2, 3, 4], [], True, True, Action.FINISH),
    ],
)
def test_rules(committed, drafts, ready, on_full, expected):
    assert next_action(LIMITS, committed, drafts, residual_ready=ready, on_full=on_full) is expected


def test_no_drafts_allowed_waits():
    assert next_action(Limits(4, max_drafts=0), [], [], residual_ready=False, on_full=False) is Action.WAIT
