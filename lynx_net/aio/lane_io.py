"""Bursts on and off a blocking socket: in C where the extension was built, in Python otherwise; the same bytes.

The extension (aio/_lanes.c) does a whole burst - checksums, headers, system calls - in one call without the interpreter
lock, which threads of several lanes otherwise hand to one another several times a segment.
"""

from __future__ import annotations

import contextlib
import select
import socket
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lynx_net.wire.bursts import BURST_BYTES, seal_bursts
from lynx_net.wire.frames import HEADER_BYTES, MAX_BURST, checksum, headers_following

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from lynx_net.aio import _lanes
    from lynx_net.wire.bursts import SendBytes

__all__ = ["IN_USE", "PYTHON", "LaneIo", "describe", "native", "send_all", "send_now"]

NEVER = bytearray(1)
"""The stop byte of what is sent whole."""

_MAX_BUFFERS = 512
"""Of one system call."""

_WAIT_ALL_BYTES = 32 * 1024
"""Above this much missing payload a receive waits for all of it; below, it takes what is there and the next header."""

_WAIT_ALL_MOST_BYTES = 1024 * 1024
"""Payloads received at once: what came before can be checked while the next ones arrive."""


def python_send(
    sock: socket.socket, batch: list[SendBytes], must: int = 0, stop: bytearray = NEVER, last: bool = False
) -> int:
    """`send_batch` without the extension."""
    sent = done = waiting_bytes = 0
    waiting: list[memoryview] = []
    for count, buffers in seal_bursts(batch, last):
        done += count
        waiting += map(memoryview, buffers)
        waiting_bytes += sum([len(one.data) for one in batch[done - count : done]])
        if waiting_bytes >= BURST_BYTES or done == len(batch):
            send_all(sock, waiting)
            sent, waiting_bytes = done, 0
            if sent >= must and stop[0]:
                break
    return sent


def send_all(sock: socket.socket, views: list[memoryview]) -> None:
    """Send all views, as many at a time as the kernel takes. Uses up the list."""
    while views:
        _cut(views, sock.sendmsg(views[:_MAX_BUFFERS]))


def send_now(sock: socket.socket, buffers: Sequence[bytes | memoryview]) -> list[memoryview]:
    """Send what the kernel takes without waiting and return the rest.

    A broken connection takes nothing: whoever sends the rest gets the error.
    """
    views = [memoryview(buffer) for buffer in buffers]
    with contextlib.suppress(OSError):
        _cut(views, sock.sendmsg(views, [], socket.MSG_DONTWAIT))
    return views


def _cut(views: list[memoryview], sent: int) -> None:
    while views and sent >= views[0].nbytes:
        sent -= views.pop(0).nbytes
    if sent:
        views[0] = views[0][sent:]


def python_receive(
    sock: socket.socket, payloads: list[memoryview], tail: memoryview, more: memoryview, wait_s: float
) -> tuple[int, list[int]]:
    """`receive_payloads` without the extension."""
    together = _some(payloads, _WAIT_ALL_MOST_BYTES)
    if together:
        count = sock.recvmsg_into(together, 0, socket.MSG_WAITALL)[0]
    else:
        try:
            count = sock.recvmsg_into([*payloads, tail], 0, socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            # Not in the receive itself: the kernel wakes that for every byte that is sent on the socket, too.
            readable = select.poll()
            readable.register(sock, select.POLLIN)
            readable.poll(wait_s * 1000)
            count = sock.recvmsg_into([*payloads, tail], 0, socket.MSG_DONTWAIT)[0]
    sums: list[int] = []
    missing = count
    for view in payloads:
        missing -= len(view)
        if missing < 0:
            break
        sums.append(checksum(view))
    if len(more) and missing == len(tail) == HEADER_BYTES and (following := headers_following(tail)):
        with contextlib.suppress(BlockingIOError):
            count += sock.recv_into(more[: HEADER_BYTES * following], 0, socket.MSG_DONTWAIT)
    return count, sums


def _some(views: list[memoryview], most_bytes: int) -> list[memoryview]:
    """The first views, up to `most_bytes` but one at least; none if they are not worth a wait."""
    total = count = 0
    while count < len(views) and (not count or total + len(views[count]) <= most_bytes):
        total += len(views[count])
        count += 1
    return views[:count] if total > _WAIT_ALL_BYTES else []


class SendBatch(Protocol):
    """`LaneIo.send_batch`."""

    def __call__(
        self, sock: socket.socket, batch: list[SendBytes], must: int = ..., stop: bytearray = ..., last: bool = ..., /
    ) -> int: ...


class LaneIo(NamedTuple):
    """One implementation of what the threads of a lane do with their blocking socket."""

    name: str
    """What the log and a report call it."""

    send_batch: SendBatch
    """Put these on the socket, sealed; returns when the kernel has all of it, and how many these are: all, but where
    the stop byte is set, which is looked at once in `BURST_BYTES`, and the first `must` are sent. Raises OSError.

    `last` goes into the header of the last of them."""

    receive_payloads: Callable[[socket.socket, list[memoryview], memoryview, memoryview, float], tuple[int, list[int]]]
    """Fill `payloads` in order, waiting for them, then what is there of `tail`; without payloads wait for that.

    If `tail` holds a whole header and that is a segment's which others follow, what is there of their headers goes to
    `more`: room for any burst, or nothing (`FrameReader.header_room`).
    `wait_s` bounds a wait in which nothing comes, together with the socket's SO_RCVTIMEO, which must be set. Returns
    the bytes received, 0 at the end of the stream, and the checksum of every payload that was filled; it may come back
    with fewer payloads than asked for. Raises OSError, BlockingIOError if nothing came.
    """

    make_stock: Callable[[], _lanes.Stock] | None = None
    """Makes a place for buffers that are lent to the lanes of a link (wire/lending.py); None where they cannot be."""


PYTHON = LaneIo("Python", python_send, python_receive)


def native(lanes: ModuleType) -> LaneIo:
    """The implementation of the built extension `lynx_net.aio._lanes`."""

    def send_batch(
        sock: socket.socket, batch: list[SendBytes], must: int = 0, stop: bytearray = NEVER, last: bool = False
    ) -> int:
        sent: int = lanes.send(sock.fileno(), batch, MAX_BURST, BURST_BYTES, must, stop, last)
        return sent

    def receive_payloads(
        sock: socket.socket, payloads: list[memoryview], tail: memoryview, more: memoryview, wait_s: float
    ) -> tuple[int, list[int]]:
        result: tuple[int, list[int]] = lanes.receive(sock.fileno(), payloads, tail, more, wait_s)
        return result

    return LaneIo("C", send_batch, receive_payloads, lanes.Stock)


_why_python = ""
try:
    from lynx_net.aio import _lanes
except ImportError as error:
    _why_python = str(error)
    IN_USE = PYTHON
else:
    IN_USE = native(_lanes)


def describe() -> str:
    """Which implementation moves bursts here, and why if it is the slower one."""
    return f"lanes run in {IN_USE.name}" + (f": {_why_python}" if _why_python else "")
