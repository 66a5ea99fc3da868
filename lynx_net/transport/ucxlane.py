"""UCX lanes: bulk bytes as tagged UCX messages, beside a TCP connection that says who is there and what was taken.

A lane is a byte stream, UCX moves messages, so:

1. A lane begins as a TCP connection to the given address. Both sides send a fixed greeting with the address of their
   UCX worker, the tag they receive on, and a window; from then on it carries only notes (`ucxnotes.py`).
2. Bytes go as messages of at most `MESSAGE_BYTES` and a quarter of the peer's window. Small neighbouring buffers
   share one.
3. A receiver looks at the length of the next message first. If it fits into the caller's view it is received there,
   else into a buffer of one message, from which the views are filled.
4. The receiver notes how many bytes it has taken in all. A sender is never more than a window ahead of that, which
   bounds both what UCX keeps for a slow reader and what can no longer be recalled.
5. A closing side notes how many bytes it has sent in all, stays until they have been taken, and then goes. A TCP
   connection that ends without that note, or an endpoint that UCX loses, is a lost lane.

TCP also makes the port, its errors, and the death of a process the kernel's business, whatever UCX moves the bytes
over.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from lynx_net.errors import ConnectionLostError, HandshakeError, LocalProtocolError, RemoteProtocolError
from lynx_net.transport.base import Lane
from lynx_net.transport.ucxbuffers import DeviceSpan, messages, settle_streams, spans
from lynx_net.transport.ucxnotes import Notes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lynx_net.errors import LynxError
    from lynx_net.transport.ucxnotes import Hello
    from lynx_net.transport.ucxworker import UcxWorker

__all__ = ["MESSAGE_BYTES", "UcxLane"]

logger = logging.getLogger("lynx_net")

MESSAGE_BYTES = 256 * 1024
"""The largest message, and with it the largest buffer a lane keeps for one that does not fit into a view."""

_LINGER_S = 2.0
"""How long a closed lane waits for its peer to take what was sent."""
_GRACE_S = 0.2
"""When the peer has gone, bytes that UCX still holds may be read for so long."""
_SETTLE_S = 0.1
"""How long a cancelled or closed call waits for messages that are on their way from or to the caller's memory."""


class UcxLane(Lane):
    """One end of a connection.

    `send` and `receive_into` also take C-contiguous device arrays (`__cuda_array_interface__`). The stream that such
    an array names is synchronised before UCX touches the memory; if it names none, the caller has done that. When a
    call returns, UCX is through with the memory. A device view must have room for the whole next message.

    A cancelled or closed call waits, at most 0.1 s and without the event loop, for messages that are moving from or to
    the caller's memory. What a cancelled `receive_into` got that way is kept for the next call; if the peer stops in
    the middle of a message, or the memory is a device's, the lane is lost instead.
    """

    def __init__(self, worker: UcxWorker, peer: str, ours: Hello, theirs: Hello) -> None:
        self.peer = peer
        self._worker = worker
        self._tag_in = worker.api.tag(ours.tag)
        self._tag_out = worker.api.tag(theirs.tag)
        self._window_bytes = theirs.window_bytes
        self._message_bytes = min(MESSAGE_BYTES, theirs.window_bytes // 4)
        self._note_every_bytes = ours.window_bytes // 4
        self.notes = Notes(self._notes_changed)
        self._sent_bytes = 0
        self._received_bytes = 0
        self._noted_bytes = 0
        self._staging: memoryview | None = None
        self._staged = memoryview(b"")
        self._moving: list[tuple[Any, Any]] = []
        """Requests that UCX may not have completed, each with the memory it uses."""
        self._closed = False
        self._gone = False
        self._problem: LynxError | None = None
        self._grace: asyncio.TimerHandle | None = None
        worker.acquire()
        try:
            self._endpoint: Any = worker.connect(theirs.worker_address, self._peer_gone)
        except worker.api.error as error:
            worker.release()
            raise HandshakeError(f"{peer}: its UCX worker cannot be reached from here: {error}") from error

    # ---- sending

    async def send(self, buffers: Sequence[Any]) -> None:
        views = spans(buffers)
        await settle_streams(views)
        requests: list[Any] = []
        try:
            for part in messages(views, self._message_bytes):
                size = part.nbytes
                await self._worker.until(lambda size=size: self._may_send(size))  # type: ignore[misc]
                request = self._endpoint.tag_send(self._worker.api.array(part), self._tag_out)
                requests.append(self._posted(request, part))
                self._sent_bytes += size
                self._worker.kick()
            await self._worker.until(lambda: self._all_done(requests))
        except BaseException:
            self._settle()  # the caller may change its buffers now
            raise

    def _may_send(self, size: int) -> bool:
        self._check()
        if self._gone or self.notes.ended or self.notes.peer_sent_bytes is not None:
            raise self._lost()
        return self._sent_bytes + size - self.notes.peer_took_bytes <= self._window_bytes

    # ---- receiving

    async def receive_into(self, views: Sequence[Any]) -> int:
        targets = spans(views)
        await settle_streams(targets)
        await self._worker.until(self._can_read)
        if self._staged:
            return self._hand_out(targets)
        requests, count = self._fetch_into(targets)
        if not requests:
            if not await self._fetch_into_staging(targets):
                return 0
            return self._hand_out(targets)
        try:
            await self._worker.until(lambda: self._all_done(requests))
        except asyncio.CancelledError:
            self._keep(requests, targets, count)
            raise
        self._took(count)
        return count

    def _can_read(self) -> bool:
        if self._closed:
            raise self._closed_here()
        if self._staged or self._worker.waiting_bytes(self._tag_in) is not None:
            return True
        if self._received_bytes == self.notes.peer_sent_bytes:
            return True
        self._check()
        return False

    def _hand_out(self, targets: Sequence[memoryview | DeviceSpan]) -> int:
        total = 0
        for target in targets:
            if isinstance(target, DeviceSpan):
                if total:
                    break
                raise LocalProtocolError("the next bytes are in host memory; receive them into a host buffer")
            count = min(target.nbytes, self._staged.nbytes)
            target[:count] = self._staged[:count]
            self._staged = self._staged[count:]
            total += count
        return total

    def _next_bytes(self) -> int:
        """Length of the next message, 0 if there is none; a length that no lane sends loses this one."""
        count = self._worker.waiting_bytes(self._tag_in)
        if count is None:
            return 0
        if not 0 < count <= MESSAGE_BYTES:
            reason = f"{self.peer} sent a message of {count} bytes; a lane sends 1 to {MESSAGE_BYTES}"
            self._break(RemoteProtocolError(reason))
            self._check()
        return count

    def _fetch_into(self, targets: Sequence[memoryview | DeviceSpan]) -> tuple[list[Any], int]:
        """Begin to receive the messages that are there and fit, straight into the views."""
        requests: list[Any] = []
        total = 0
        for target in targets:
            filled = 0
            while filled < target.nbytes:
                count = self._next_bytes()
                if not count or count > target.nbytes - filled:
                    return requests, total
                part = target[filled : filled + count]
                requests.append(self._posted(self._worker.fetch(self._tag_in, part), part))
                filled += count
                total += count
        return requests, total

    async def _fetch_into_staging(self, targets: Sequence[memoryview | DeviceSpan]) -> bool:
        """Receive one message that no view has room for; False at the end of the stream."""
        count = self._next_bytes()
        if not count:
            return False
        if isinstance(targets[0], DeviceSpan):
            raise LocalProtocolError(f"a device buffer of {targets[0].nbytes} bytes for a message of {count}")
        if self._staging is None:
            self._staging = memoryview(bytearray(MESSAGE_BYTES))
        part = self._staging[:count]
        request = self._posted(self._worker.fetch(self._tag_in, part), part)
        try:
            await self._worker.until(lambda: self._all_done([request]))
        except asyncio.CancelledError:
            self._keep([request], [part], count)
            raise
        self._took(count)
        self._staged = part
        return True

    def _keep(self, requests: Sequence[Any], targets: Sequence[memoryview | DeviceSpan], count: int) -> None:
        """A receive was cancelled while bytes were landing: have them for the next one, or lose the lane."""
        if not self._settle() or not self._all_done(requests):
            return
        if any(isinstance(target, DeviceSpan) for target in targets):
            reason = "a receive into device memory was cancelled half-way"
            self._break(ConnectionLostError(f"connection to {self.peer} given up: {reason}"))
            return
        landed = b"".join(target for target in targets if isinstance(target, memoryview))
        self._staged = memoryview(landed[:count])
        self._took(count)

    def _took(self, count: int) -> None:
        self._received_bytes += count
        if self._received_bytes - self._noted_bytes >= self._note_every_bytes:
            self._note()
        else:
            self._note_the_last()

    def _note(self) -> None:
        self._noted_bytes = self._received_bytes
        self.notes.taken(self._received_bytes)

    def _note_the_last(self) -> None:
        """The peer that has finished waits to hear that everything was taken."""
        if self._received_bytes == self.notes.peer_sent_bytes and self._noted_bytes < self._received_bytes:
            self._note()

    # ---- requests

    def _posted(self, request: Any, memory: Any) -> Any:
        self._moving = [(one, used) for one, used in self._moving if not one.completed]
        if not request.completed:
            self._moving.append((request, memory))
        return request

    def _all_done(self, requests: Sequence[Any]) -> bool:
        if self._closed:
            raise self._closed_here()
        done = all(request.completed for request in requests)
        if not done:
            self._check()
            return False
        try:
            for request in requests:
                request.check_error()
        except self._worker.api.error as error:
            raise self._lost(error) from error
        return True

    def _settle(self) -> bool:
        """Let go of the callers' memory: wait for what moves, or lose the lane."""
        if self._endpoint is None:
            return False
        if self._worker.progress_until(lambda: all(request.completed for request, _ in self._moving), _SETTLE_S):
            return True
        self._break(ConnectionLostError(f"connection to {self.peer} lost: it stopped in the middle of a message"))
        return False

    # ---- the end

    def close(self) -> None:
        if self._closed:
            return
        self._settle()
        self._closed = True
        self._worker.recheck()
        if self._problem is None and not self._gone:
            self.notes.finished(self._sent_bytes)
            if self.notes.peer_took_bytes < self._sent_bytes:
                self._worker.spawn(self._linger())
                return
        self._release()

    async def _linger(self) -> None:
        try:
            async with asyncio.timeout(_LINGER_S):
                await self._worker.until(self._peer_needs_nothing)
        except TimeoutError:
            logger.debug("%s did not take the last bytes", self.peer)
        finally:
            self._release()

    def _peer_needs_nothing(self) -> bool:
        return self._gone or self.notes.ended or self.notes.peer_took_bytes >= self._sent_bytes

    def _peer_gone(self) -> None:
        """UCX or TCP has lost the peer; what has arrived may still be read for a moment."""
        if not self._gone:
            self._gone = True
            if not self._closed:
                self._grace = asyncio.get_running_loop().call_later(_GRACE_S, self._break, None)
            self._worker.recheck()

    def _notes_changed(self) -> None:
        if self.notes.ended:
            self._peer_gone()
        self._note_the_last()
        self._worker.recheck()

    def _break(self, problem: LynxError | None) -> None:
        """Lose the connection; afterwards UCX touches no memory of a caller."""
        if self._endpoint is None:
            return
        if self._problem is None:
            self._problem = problem or self._lost()
        self._gone = True
        if self._grace is not None:
            self._grace.cancel()
        endpoint, self._endpoint = self._endpoint, None
        endpoint.remove_close_callback()
        endpoint.close_blocking()
        self.notes.close(abort=not self._closed)
        self._worker.recheck()

    def _release(self) -> None:
        self._break(self._closed_here())
        self._moving.clear()
        self._worker.discard(self._tag_in, MESSAGE_BYTES)
        self._worker.release()

    def _check(self) -> None:
        if self._closed:
            raise self._closed_here()
        if self._problem is not None:
            raise self._problem

    def _closed_here(self) -> ConnectionLostError:
        return ConnectionLostError(f"the connection to {self.peer} was closed on this side")

    def _lost(self, error: Exception | None = None) -> ConnectionLostError:
        return ConnectionLostError(f"connection to {self.peer} lost" + (f": {error}" if error else ""))
