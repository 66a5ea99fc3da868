"""Credit: how many bytes of a stream may be in the air.

Both windows count payload bytes of one stream of one transfer from its beginning; limits only grow.
"""

from __future__ import annotations

from lynx_net.errors import FlowControlError, LocalProtocolError

__all__ = ["ReceiveWindow", "SendWindow", "patience_bytes"]


LEAST_GRANT_BYTES = 8 * 1024 * 1024
"""Large windows are granted in eighths, but not in less than this; small ones in halves. Twice as much together, up to
a quarter of a window, while less than that is held: the peer has plenty, and a message costs both what 100 KB do."""


class SendWindow:
    """What the peer allows us to send. Two integers: `limit` granted, `sent` used."""

    __slots__ = ("limit", "sent")

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.sent = 0

    @property
    def available(self) -> int:
        """Bytes that may be sent now."""
        return self.limit - self.sent

    def grant(self, limit: int) -> bool:
        """Take a grant; an older or repeated one changes nothing. True if the window was shut and is open now."""
        was_shut = self.available <= 0
        self.limit = max(self.limit, limit)
        return was_shut and self.available > 0

    def use(self, count: int) -> None:
        """Account for bytes handed to a lane."""
        if count > self.available:
            raise LocalProtocolError(f"{count} bytes to send with a credit of {self.available}")
        self.sent += count

    def unuse(self, count: int) -> None:
        """Bytes that were not handed to a lane after all."""
        self.sent -= count


def patience_bytes(window_bytes: int, segment_bytes: int) -> int:
    """How many bytes may wait for what comes behind them, while segments have at most so many.

    What is held makes grants smaller only beyond a whole window, and a grant comes when half of one is due, or earlier
    (`ReceiveWindow`): while no more than this waits the peer has credit for a segment more.
    """
    return window_bytes // 2 - segment_bytes


class ReceiveWindow:
    """What we granted the peer. Three integers: `limit` granted, `received`, and `held`, arrived but not consumed.

    No more than a window is in the air, and no more than two are in the air or held: a consumer that works on a window
    full of bytes keeps nobody waiting. The memory of all of it is reserved (grants.py); a window bounds what cannot be
    recalled. `most` is what the stream can have at all: who was granted that needs to hear no more.
    """

    __slots__ = ("held", "limit", "most", "received", "window")

    def __init__(self, window: int, limit: int = 0, most: int | None = None) -> None:
        self.window = window
        self.most = most
        self.limit = limit
        self.received = 0
        self.held = 0

    @property
    def outstanding(self) -> int:
        """Bytes granted that have not come yet."""
        return self.limit - self.received

    def receive(self, count: int) -> None:
        """Account for bytes whose arrival begins; raises FlowControlError beyond the grant."""
        if count > self.outstanding:
            raise FlowControlError(f"the peer sent {count - self.outstanding} bytes more than it was granted")
        self.received += count

    def unreceive(self, count: int) -> None:
        """Bytes that had begun to arrive were lost on the way; their sender still counts them as sent."""
        self.received -= count

    def hold(self, count: int) -> None:
        """Bytes that wait for their consumer; beyond a window they make the next grant smaller."""
        self.held += count

    def consume(self, count: int) -> None:
        """Bytes that their consumer is done with."""
        if count > self.held:
            raise LocalProtocolError("more bytes consumed than were held")
        self.held -= count

    @property
    def grant_due(self) -> bool:
        """Whether there is so much to grant that it is worth a message."""
        if self.most is not None and self.limit >= self.most:
            return False
        least = max(min(self.window // 2, LEAST_GRANT_BYTES), self.window // 8, 1)
        if self.held < self.window // 4:
            least = max(least, min(self.window // 4, 2 * LEAST_GRANT_BYTES))
        return self._most_limit - self.limit >= least

    @property
    def _most_limit(self) -> int:
        return self.received + min(self.window, 2 * self.window - self.held)

    def next_limit(self) -> int | None:
        """The limit to grant now, or None while there is too little."""
        if not self.grant_due:
            return None
        self.limit = self._most_limit
        return self.limit
