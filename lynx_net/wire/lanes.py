"""What is known of one lane across all the connections it has had: the basis of resuming it.

Rules:

1. Both sides count the frames of a lane, each direction by itself, from its first connection on; a segment of a burst
   counts by itself, the handshake does not count.
2. A receiver confirms its count now and then, and states it when the lane is re-opened. What a sender has sent beyond
   that count was lost with the connection, and is sent again, in order, before anything new on this lane.
3. A frame of a transfer that has ended meanwhile is replaced by a ping, since its buffer may be in use again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from lynx_net.errors import RemoteProtocolError
from lynx_net.wire.bursts import SendBytes
from lynx_net.wire.frames import pack_control
from lynx_net.wire.messages import Ping, encode_message

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CONFIRM_EVERY_BYTES", "CONFIRM_EVERY_FRAMES", "LaneRecord"]

CONFIRM_EVERY_FRAMES = 64
"""A sender remembers about as many frames; fewer would cost more control frames."""

CONFIRM_EVERY_BYTES = 16 << 20
"""It keeps their bytes, perhaps in memory of which there is little: few large frames are confirmed early, too. After
half of that they are where a message is sent anyway, since each that comes alone wakes its receiver."""

_INSTEAD = SendBytes(pack_control(encode_message(Ping())))


class LaneRecord:
    """Counts and unconfirmed frames of one lane."""

    def __init__(self) -> None:
        self.received = 0
        """Whole frames received."""
        self.resend: deque[SendBytes] = deque()
        """To be sent again; they are in the log as well."""
        self._told = 0
        self._told_bytes = 0
        self._log: deque[SendBytes] = deque()
        self._transfers: deque[int | None] = deque()
        """Whose each frame of the log is, so that those of one are found at once."""
        self._confirmed = 0

    def sent(self, frame: SendBytes) -> None:
        """A frame was handed to the connection for the first time."""
        self._log.append(frame)
        self._transfers.append(frame.transfer)

    def sent_more(self, frames: Sequence[SendBytes]) -> None:
        """The same of several, in order."""
        self._log.extend(frames)
        self._transfers.extend([frame.transfer for frame in frames])

    def not_sent(self, frames: int) -> None:
        """So many, the last ones, were not handed to the connection after all."""
        for _ in range(frames):
            self._log.pop()
            self._transfers.pop()

    def count(self, frames: int, received_bytes: int = 0, *, along: bool = False) -> bool:
        """Frames were received; True if the peer should be told how many by now.

        `received_bytes` have come on the lane since the link began; `along` says that a message waits to be sent.
        """
        self.received += frames
        new = self.received - self._told
        enough_bytes = CONFIRM_EVERY_BYTES // 2 if along else CONFIRM_EVERY_BYTES
        if not new or (new < CONFIRM_EVERY_FRAMES and received_bytes - self._told_bytes < enough_bytes):
            return False
        self._told, self._told_bytes = self.received, received_bytes
        return True

    def confirm(self, frames: int) -> None:
        """The peer has received so many; fewer than before is old news that was sent again.

        Raises:
            RemoteProtocolError: more than were sent.
        """
        for _ in range(self._new(frames)):
            self._log.popleft()
            self._transfers.popleft()
            self._confirmed += 1

    def reopen(self, peer_received: int) -> int:
        """The lane has a new connection and the peer this count; returns how many frames go again (rule 2).

        Raises:
            RemoteProtocolError: fewer than it has confirmed, or more than were sent.
        """
        if self._new(peer_received) < 0:
            raise RemoteProtocolError(f"the peer has {peer_received} frames of a lane and confirmed {self._confirmed}")
        self.confirm(peer_received)
        self.resend = deque(self._log)
        self._told = self.received
        return len(self.resend)

    def _new(self, frames: int) -> int:
        """Frames that this count confirms first."""
        new = frames - self._confirmed
        sent = len(self._log) - len(self.resend)
        if new > sent:
            raise RemoteProtocolError(
                f"the peer confirms {frames} frames of a lane on which {self._confirmed + sent} were sent"
            )
        return new

    def forget(self, transfer: int) -> None:
        """Rule 3; afterwards no buffer of the transfer is held here."""
        at = 0
        for _ in range(self._transfers.count(transfer)):
            at = self._transfers.index(transfer, at)
            self._transfers[at] = None
            self._log[at] = _INSTEAD
        for index in [index for index, frame in enumerate(self.resend) if frame.transfer == transfer]:
            self.resend[index] = _INSTEAD
