from __future__ import annotations

import pytest

from lynx_net.speculation import Action, Limits, next_action

LIMITS = Limits(max_new_tokens=4, max_drafts=2, stop_tokens=frozenset({9}))


@pytest.mark.parametrize(
    ("committed", "drafts", "ready", "expected"),
    [
        ([], [], False, Action.DRAFT),
        ([], [1], False, Action.DRAFT),
        ([], [1, 2], False, Action.WAIT),  # max_drafts
        ([], [9], False, Action.WAIT),  # a drafted stop token
        ([1, 2, 3], [5], False, Action.WAIT),  # max_new_tokens
        ([1, 2, 3], [], False, Action.DRAFT),
        ([], [1], True, Action.VERIFY),
        ([], [1, 9], True, Action.VERIFY),
        ([], [], True, Action.DECODE),  # ready before the first draft
        ([1], [], True, Action.DECODE),
        ([1, 9], [], True, Action.FINISH),
        ([9], [], False, Action.FINISH),  # the first token of the offer can be a stop token
        ([1, 2, 3, 4], [], True, Action.FINISH),
    ],
)
def test_rules(committed, drafts, ready, expected):
    assert next_action(LIMITS, committed, drafts, verify_ready=ready) is expected


def test_no_drafts_allowed_waits():
    assert next_action(Limits(4, max_drafts=0), [], [], verify_ready=False) is Action.WAIT
