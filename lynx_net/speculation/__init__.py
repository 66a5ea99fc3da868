"""Decode on the anchors, verify on Q_full (Lynx sections 4.2 and 4.3). Needs numpy only.

async for event in decode(model, transfer, prompt_tail=[last_prompt_token], max_new_tokens=64):
    match event:
        case Draft(token): ...            # tentative
        case Retract(count): ...          # the last `count` drafts are void
        case Commit(tokens, accepted): ...  # final; the first `accepted` of them were shown as drafts
        case Done(tokens): ...
"""

from lynx_net.speculation.events import Commit, Done, Draft, Event, Retract
from lynx_net.speculation.loop import decode
from lynx_net.speculation.plain import decode_plain
from lynx_net.speculation.policy import Action, Limits, next_action
from lynx_net.speculation.protocols import DecodeModel, ProgressiveTransfer, Readiness
from lynx_net.speculation.sampling import draw, probabilities
from lynx_net.speculation.verify import Verdict, verify_greedy, verify_sampled

__all__ = [
    "Action",
    "Commit",
    "DecodeModel",
    "Done",
    "Draft",
    "Event",
    "Limits",
    "ProgressiveTransfer",
    "Readiness",
    "Retract",
    "Verdict",
    "decode",
    "decode_plain",
    "draw",
    "next_action",
    "probabilities",
    "verify_greedy",
    "verify_sampled",
]
