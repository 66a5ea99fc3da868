"""Requests for caches: what this side has asked of its peer, and what the peer asks of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from lynx_net.errors import LocalProtocolError, LynxError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lynx_net.aio.link import Link
    from lynx_net.aio.transfer import IncomingTransfer

__all__ = ["Asked", "IncomingRequest"]


class IncomingRequest:
    """The peer asks for a cache: answer with a transfer of the same request id, or refuse."""

    def __init__(self, link: Link, request_id: str, meta: dict[str, Any]) -> None:
        self.link = link
        self.id = request_id
        self.meta = meta

    def refuse(self, reason: str) -> None:
        """Say no; the asking side gets RequestRefusedError with this reason."""
        self.link.refuse(self.id, reason)


class Asked:
    """What the peer has not answered yet, whether or not somebody still waits for it. All of it in the event loop."""

    def __init__(self) -> None:
        self._answers: dict[str, asyncio.Future[IncomingTransfer]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    async def ask(self, request_id: str, send: Callable[[], None]) -> IncomingTransfer:
        """Call `send`, then wait for the answer; `Link.request` says what is raised and what cancelling does."""
        if request_id in self._answers:
            raise LocalProtocolError(f"request {request_id!r} is already waiting for an answer")
        send()
        answer: asyncio.Future[IncomingTransfer] = asyncio.get_running_loop().create_future()
        self._answers[request_id] = answer
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result().cancel("nobody waits for it any more")  # offered in the turn that cancelled the waiting
            raise

    def offered(self, incoming: IncomingTransfer) -> bool:
        """A transfer was offered; whether it is an answer. One that nobody waits for any more is cancelled."""
        answer = self._answers.pop(incoming.offer.request_id, None)
        if answer is None:
            return False
        if answer.cancelled():
            incoming.cancel("nobody waits for it any more")
        else:
            answer.set_result(incoming)
        return True

    def failed(self, request_id: str, error: LynxError) -> None:
        """There will be no transfer for this request; nothing happens if it was not asked for."""
        answer = self._answers.pop(request_id, None)
        if answer is not None and not answer.done():
            answer.set_exception(error)

    def all_failed(self, error: LynxError) -> None:
        """The link has ended."""
        for request_id in list(self._answers):
            self.failed(request_id, error)
