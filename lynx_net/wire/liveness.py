"""The rules of time of one link: whose silence ends what, and what is said so that nobody takes us for dead.

Rules (`now` is an argument everywhere):

1. Whatever arrives, one byte suffices, proves that the peer lives. Silence for `deadline_s` ends the link.
2. Whoever has sent nothing for a tenth of the smaller of both deadlines sends a Ping, so that a peer which falls silent
   is found between 0.9 and 1.0 deadlines later.
3. A transfer that holds credit and gets no byte for `progress_timeout_s` is aborted by its receiver; so is one whose
   bytes are here while nothing at all was decoded for that time. It is not its sender's fault, and the time does not
   run, while bytes of an earlier stream arrive on the link, or credit is withheld for those of another link.
4. A transfer that can send nothing before its receiver says something, and hears nothing of it for
   `progress_timeout_s`, is aborted by its sender. A receiver that withholds credit on purpose (grants rules 1 and 2)
   or whose decoder moves therefore repeats a Credit three times in a deadline.
5. These times do not run while a lane is down: when it is back, they begin anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lynx_net.wire.messages import MAX_STREAMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lynx_net.wire.frames import SegmentHeader
    from lynx_net.wire.receiving import ReceiveState

__all__ = ["MIN_PING_S", "Liveness"]

MIN_PING_S = 0.01
"""A peer with an absurd deadline does not make us send more often than this."""


class Liveness:
    """When things were last heard, sent and seen to move, and what follows from it.

    Args:
        deadline_s, progress_timeout_s: this side's settings.
        peer_deadline_s: from the peer's Hello.
        now: the current time, seconds.
    """

    def __init__(self, *, deadline_s: float, peer_deadline_s: float, progress_timeout_s: float, now: float) -> None:
        shorter_s = min(peer_deadline_s, deadline_s)
        self.deadline_s = deadline_s
        self.progress_timeout_s = progress_timeout_s
        self._ping_every_s = max(shorter_s / 10, MIN_PING_S)
        self._reassure_every_s = max(min(shorter_s, progress_timeout_s) / 3, MIN_PING_S)
        self.heard_at_s = now
        self.sent_at_s = now
        self.sending: dict[int, float] = {}
        """Outgoing transfer -> when something was last sent or heard of it."""
        self.receiving: dict[int, float] = {}
        """Accepted or waiting incoming transfer -> when its last byte came."""
        self._stream_heard_s = [now] * MAX_STREAMS
        self._reassured_at_s = now
        self._decoded_pages_seen = 0
        self._decoder_moved_at_s = now

    def heard(self, now: float, segment: SegmentHeader | None = None) -> None:
        """Bytes arrived on any lane that complete nothing yet; `segment` is the one being read there, if any.

        Without it a segment that takes longer than the progress timeout would look like a stall.
        """
        self.heard_at_s = now
        if segment is not None and segment.transfer in self.receiving:
            self.receiving[segment.transfer] = now
            if segment.stream < MAX_STREAMS:
                self._stream_heard_s[segment.stream] = now

    def heard_segment(self, transfer: int, stream: int, now: float) -> None:
        """The same of a segment that has a place."""
        self.heard_at_s = now
        self.receiving[transfer] = now
        self._stream_heard_s[stream] = now

    def lane_reopened(self, now: float) -> None:
        """Rule 5."""
        self.heard_at_s = self._decoder_moved_at_s = now
        for times in (self.receiving, self.sending):
            for transfer in times:
                times[transfer] = now

    def is_silent(self, now: float) -> bool:
        """Rule 1: nothing was heard of the peer for the deadline."""
        # The sum that `next_timer` gives: a difference may be rounded to less than the deadline.
        return now >= self.heard_at_s + self.deadline_s

    def next_timer(self) -> float:
        """When one of these rules may want something next."""
        due = [self.sent_at_s + self._ping_every_s, self.heard_at_s + self.deadline_s]
        if self.receiving:
            due.append(self._reassured_at_s + self._reassure_every_s)
        for times in (self.receiving, self.sending):
            if times:
                due.append(min(times.values()) + self.progress_timeout_s)
        return min(due)

    def ping_due(self, now: float) -> bool:
        """Rule 2: something should be sent now; the next answer of True comes after another such time."""
        if now < self.sent_at_s + self._ping_every_s:
            return False
        self.sent_at_s = now
        return True

    def reassurance_due(self, now: float) -> bool:
        """Rule 4, as the receiver: who waits on purpose should be told now; True once in that time."""
        if now < self._reassured_at_s + self._reassure_every_s:
            return False
        self._reassured_at_s = now
        return True

    def decoder_moved(self, decoded_pages: int, now: float) -> bool:
        """Whether any page was decoded on any link since this was asked before; so many were in all."""
        if decoded_pages == self._decoded_pages_seen:
            return False
        self._decoded_pages_seen = decoded_pages
        self._decoder_moved_at_s = now
        return True

    def stalled_incoming(
        self, now: float, states: Mapping[int, ReceiveState], is_behind: Callable[[int], bool]
    ) -> list[tuple[int, str]]:
        """Rule 3: the transfers that stalled, and what did not happen.

        `is_behind` says of a class whether credit is withheld for that of another link.
        """
        stalled: list[tuple[int, str]] = []
        for transfer, since_s in self.receiving.items():
            if now >= since_s + self.progress_timeout_s:
                since_s, what = self._stalled_since(states[transfer], since_s, now, is_behind)
                self.receiving[transfer] = since_s
                if now >= since_s + self.progress_timeout_s:
                    stalled.append((transfer, f"{what} for {self.progress_timeout_s:g} s"))
        return stalled

    def _stalled_since(
        self, state: ReceiveState, since_s: float, now: float, is_behind: Callable[[int], bool]
    ) -> tuple[float, str]:
        """Since when a transfer could have moved and did not, and what did not happen."""
        if state.accepted:
            for stream, window in enumerate(state.windows):
                if window.held:
                    return max(since_s, self._decoder_moved_at_s), "this receiver decoded nothing"
                if state.owes(stream):
                    class_ = state.classes[stream]
                    if not window.outstanding or is_behind(class_):
                        break
                    return max(
                        [since_s, *self._stream_heard_s[:class_]]
                    ), f"no byte of transfer {state.transfer} arrived"
        return now, ""

    def stalled_outgoing(self, now: float, waits_for_peer: Callable[[int], bool]) -> list[tuple[int, str]]:
        """Rule 4, as the sender: the transfers of which the receiver says nothing, and that in words.

        `waits_for_peer` says of a transfer whether it can send nothing before that.
        """
        stalled: list[tuple[int, str]] = []
        for transfer, since_s in self.sending.items():
            if now >= since_s + self.progress_timeout_s:
                if waits_for_peer(transfer):
                    reason = f"the receiver said nothing about transfer {transfer} for {self.progress_timeout_s:g} s"
                    stalled.append((transfer, reason))
                else:
                    self.sending[transfer] = now
        return stalled
