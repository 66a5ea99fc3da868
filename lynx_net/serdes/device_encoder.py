"""Encoding in device memory: groups of pages are encoded, copied to pinned memory and sent, all three at once.

For each group, on the streams of its device: the encoding stream waits for what the caller's stream has, then the
kernels write the streams of all pages into staging memory; the leaving stream waits for them and copies that to a
piece of the pinned ring; an event tells the thread, which sleeps in it, and the piece is cut into views of each
page's streams, whose checksums the device has made, too. While one group is copied the next one is being encoded and
the one before is on the wire.

A view keeps its piece of the ring until the link needs it no more: until the receiver has confirmed the frame, or the
transfer has ended. Residuals wait behind the anchors of all layers, so when the ring is rather full they are moved to
ordinary memory: anchors never wait for room that residuals take. A sender that finds no room all the same waits a
while.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_gpu.plan import SHORT_STREAM_BYTES
from lynx_gpu.ring import BufferTooLargeError
from lynx_net.aio.offload import run_blocking
from lynx_net.errors import CodecError, LocalProtocolError, NonFiniteError
from lynx_net.serdes.encoder import EncodedGroup, check_shape, encode_page, fine_positions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from lynx_codec.plan import CodecTable
    from lynx_gpu.codec import DeviceCodec
    from lynx_gpu.events import Event
    from lynx_gpu.plan import BatchPlan
    from lynx_gpu.ring import PinnedRing
    from lynx_gpu.views import DeviceView
    from lynx_net.serdes.device import DeviceBuffers, Devices, DeviceSide
    from lynx_net.serdes.encoder import Outlet
    from lynx_net.wire.layout import CacheLayout, Kind, PageRef

__all__ = ["DeviceEncoder"]

IN_FLIGHT = 2
"""Groups that the device works on at once: one is encoded while the other is copied."""

FIRST_SHARE = 16
"""The first group of a transfer is so much smaller, so that the wire has something soon."""

RESIDUALS_MOVE = 0.75
"""Share of the pinned ring in use from which on residuals are moved to ordinary memory."""

RING_WAIT_S = 0.1
"""So long a sender waits for room in the ring. Without an end it might wait for bytes that the receiver has, but need
not confirm before it gets more."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Keys or values of the layer that is being encoded."""

    view: DeviceView
    side: DeviceSide
    ring: PinnedRing
    codec: DeviceCodec | None


@dataclass(frozen=True, slots=True)
class _Job:
    """A group whose pages have places to go to: their first streams together, and all others."""

    layer: int
    group: list[PageRef]
    source: _Source
    plan: BatchPlan
    later_at: int
    first: memoryview
    later: memoryview | None
    pinned: bool


@dataclass(slots=True)
class _Work:
    """A layer that is being encoded: what is left of it, and where it goes."""

    layer: int
    arrays: Mapping[Kind, Any]
    callers: Mapping[Kind, int]
    groups: deque[list[PageRef]]
    outlet: Outlet
    loop: asyncio.AbstractEventLoop
    loop_thread: int
    sources: dict[Kind, _Source] = field(default_factory=dict)
    started: deque[tuple[_Job, Event]] = field(default_factory=deque)
    wants: tuple[PinnedRing, list[int]] | None = None
    """Pieces for the next group that there were not."""
    pieces: tuple[list[memoryview], bool] | None = None
    """These, now that there are, and whether they are pinned."""
    error: Exception | None = None
    """Of the outlet."""

    def put(self, encoded: EncodedGroup) -> None:
        """Have the event loop put this into the outlet: in order, and before it hears that the visit is over."""
        if threading.get_ident() == self.loop_thread:
            self._put(encoded)
        else:
            self.loop.call_soon_threadsafe(self._put, encoded)

    def _put(self, encoded: EncodedGroup) -> None:
        if self.error is None:
            try:
                self.outlet.put(encoded)
            except Exception as error:  # for who waits in `encode`
                self.error = error


class DeviceEncoder:
    """Of one transfer. Arrays may lie on different devices."""

    def __init__(
        self,
        codecs: CodecTable,
        fine: NDArray[np.int64],
        layout: CacheLayout,
        pages: Sequence[PageRef],
        devices: Devices,
        executor: Executor | None,
        *,
        segment_bytes: int,
    ) -> None:
        self._segment_bytes = segment_bytes if devices.buffers.checksums else 0
        """What has more bytes needs no checksum of the device: each of its segments has one."""
        self._codecs = codecs
        self._fine = fine
        self._devices = devices
        self._executor = executor
        self._first_groups, self._groups = (
            _groups_of(pages, codecs, layout.layers, devices.buffers, soon=soon) for soon in (True, False)
        )
        self._longest = {page.kind: page for page in reversed(pages)}
        self._positions = (fine % layout.page_tokens).astype(np.int32)
        self._uploaded: dict[int, Any] = {}
        self._plans: dict[tuple[int, int, int, Kind], BatchPlan] = {}

    def check(self, kind: Kind, array: Any, layout: CacheLayout) -> None:
        try:
            view = self._devices.backend.view(array)
        except CodecError as error:
            raise LocalProtocolError(f"{kind}s: {error}") from error
        check_shape(kind, (view.tokens, view.heads, view.head_size), layout)
        if view.dtype != layout.dtype:
            raise LocalProtocolError(f"{kind}s are {view.dtype}, the layout says {layout.dtype}")

    async def encode(self, layer: int, arrays: Mapping[Kind, Any], outlet: Outlet) -> None:
        if not self._groups:
            return
        # Here, since what is current for this thread is not for another.
        callers: dict[Kind, int] = {kind: self._devices.backend.current_stream(array) for kind, array in arrays.items()}
        groups = deque(self._groups if self._plans else self._first_groups)
        work = _Work(layer, arrays, callers, groups, outlet, asyncio.get_running_loop(), threading.get_ident())
        try:
            while work.groups:
                await outlet.wait_for_room()
                if work.wants is not None:
                    work.pieces = await self._pieces(*work.wants)
                await run_blocking(self._executor, self._visit, work)
                if work.error is not None:
                    raise work.error
        finally:
            if work.started:  # an error: the device still reads the arrays and writes to the ring
                await run_blocking(self._executor, _wait_for_all, work.started)

    def _visit(self, work: _Work) -> None:
        """Encode groups as long as there is room for them; what is finished goes to the outlet. In the codec thread.

        All of a layer in one visit, if it can be: the event loop is told to queue what is finished, but not waited for.
        When this returns nothing is started any more, and nothing is left, or pieces are wanted, or the outlet is full.
        """
        if not work.sources:
            work.sources = self._sources(work.layer, work.arrays, work.callers)
        started = work.started
        while work.groups and work.error is None:
            group = work.groups[0]
            source = work.sources[group[0].kind]
            if source.codec is None:
                while started:
                    work.put(self._finish(started))
                work.put(self._encode_on_host(work.layer, group, source))
            else:
                job = self._job(work, group, source)
                if job is None:
                    break
                started.append((job, self._start(job)))
                if len(started) >= IN_FLIGHT:
                    work.put(self._finish(started))
            work.groups.popleft()
            if not work.outlet.has_room():
                break
        while started:
            work.put(self._finish(started))

    def _job(self, work: _Work, group: list[PageRef], source: _Source) -> _Job | None:
        """A group with places to go to, or None if there are none now."""
        assert source.codec is not None
        plan = self._plan(source.codec, group)
        later_at = min((spans[1][0] for spans in plan.spans if len(spans) > 1), default=plan.total_bytes)
        sizes = [size for size in (later_at, plan.total_bytes - later_at) if size]
        pieces = work.pieces or _pieces_at_once(source.ring, sizes)
        work.pieces = None
        work.wants = (source.ring, sizes) if pieces is None else None
        if pieces is None:
            return None
        (first, *later), pinned = pieces
        return _Job(work.layer, group, source, plan, later_at, first, later[0] if later else None, pinned)

    def _sources(self, layer: int, arrays: Mapping[Kind, Any], callers: Mapping[Kind, int]) -> dict[Kind, _Source]:
        """Views of the arrays; what is encoded from now on waits for the callers' streams."""
        backend = self._devices.backend
        sources: dict[Kind, _Source] = {}
        for kind, array in arrays.items():
            view = backend.view(array)
            side = self._devices.side(view.device)
            side.runtime.after_caller(side.encoding, callers[kind])
            codec = side.codec(self._codecs.own(layer, kind), self._longest[kind].shape)
            sources[kind] = _Source(view, side, self._devices.ring(view.device), codec)
        return sources

    def _plan(self, codec: DeviceCodec, group: Sequence[PageRef]) -> BatchPlan:
        """All layers are cut into the same groups."""
        key = (id(codec), group[0].start, len(group), group[0].kind)
        if key not in self._plans:
            fine_at = np.searchsorted(self._fine, [page.start for page in group])
            job = self._devices.backend.job
            self._plans[key] = codec.plan(
                [job(page.start, page.shape, int(at)) for page, at in zip(group, fine_at, strict=True)]
            )
        return self._plans[key]

    async def _pieces(self, ring: PinnedRing, sizes: Sequence[int]) -> tuple[list[memoryview], bool]:
        """Room in the pinned ring, once there is some; if that takes long, in ordinary memory, which is slower.

        Returns also whether it is pinned.
        """
        try:
            async with asyncio.timeout(RING_WAIT_S):
                return await ring.take_when_free(sizes, lambda: run_blocking(self._executor, ring.grow)), True
        except BufferTooLargeError as error:
            raise LocalProtocolError(f"{error}; give more send_pinned_bytes, or smaller pages") from error
        except TimeoutError:
            return [self._devices.overflow_room(size) for size in sizes], False

    def _start(self, job: _Job) -> Event:
        side, plan, codec = job.source.side, job.plan, job.source.codec
        assert codec is not None
        runtime = side.runtime
        to_host = runtime.to_pinned if job.pinned else runtime.to_host
        staging = side.staging.take(plan.total_bytes)
        with runtime.here():
            try:
                fine, wanted = self._fine_on(side), self._wants_checksums(plan)
                codec.encode(job.source.view, plan, fine, staging, side.encoding, checksums=wanted)
                runtime.after(side.leaving, runtime.record(side.encoding))
                to_host(address_of(job.first), staging, job.later_at, side.leaving)
                if job.later is not None:
                    to_host(address_of(job.later), staging + job.later_at, job.later.nbytes, side.leaving)
            except BaseException:  # what was launched all the same reads the array and writes to the piece
                runtime.record(side.encoding).wait()
                runtime.record(side.leaving).wait()
                raise
            finally:
                copied = runtime.record(side.leaving)
                side.staging.give(staging, copied)
        return copied

    def _wants_checksums(self, plan: BatchPlan) -> bool:
        return 0 < self._segment_bytes >= min(most_bytes for _, most_bytes in plan.spans[0])

    def _fine_on(self, side: DeviceSide) -> Any:
        """Positions of the fine tokens, each in its page, on the device; None if there are none."""
        if not len(self._fine):
            return None
        if side.device not in self._uploaded:
            self._uploaded[side.device] = self._devices.backend.upload(self._positions, side.device, side.encoding)
        return self._uploaded[side.device]

    def _finish(self, started: deque[tuple[_Job, Event]]) -> EncodedGroup:
        """Wait for the oldest group and cut its pieces into streams. In the codec thread."""
        job, copied = started.popleft()
        copied.wait()
        try:
            lengths = job.plan.lengths(job.first)
        except NonFiniteError:
            self._encode_on_host(job.layer, job.group, job.source)  # raises the same, and knows the page
            raise
        later = job.later
        ring = job.source.ring
        if later is not None and job.pinned and ring.used_bytes >= RESIDUALS_MOVE * ring.limit_bytes:
            room = self._devices.overflow_room(later.nbytes)
            np.copyto(np.frombuffer(room, np.uint8), np.frombuffer(later, np.uint8))
            later = room
        streams: list[list[memoryview]] = [[memoryview(b"")] * len(job.group) for _ in self._codecs.stream_names]
        checksums: list[list[int | None]] = [[None] * len(job.group) for _ in streams]
        made = job.plan.checksums(job.first) if self._wants_checksums(job.plan) else None
        for number, place in enumerate(self._codecs.places(job.layer, job.group[0].kind)):
            piece, before = (job.first, 0) if number == 0 or later is None else (later, job.later_at)
            streams[place] = [
                piece[(begin := spans[number][0] - before) : begin + of_page[number]]
                for spans, of_page in zip(job.plan.spans, lengths, strict=True)
            ]
            if made is not None:
                checksums[place] = [
                    of_page[number] if data.nbytes > SHORT_STREAM_BYTES else None
                    for of_page, data in zip(made, streams[place], strict=True)
                ]
        return EncodedGroup(job.layer, job.group, streams, checksums)

    def _encode_on_host(self, layer: int, group: Sequence[PageRef], source: _Source) -> EncodedGroup:
        """A codec without kernels: the pages are copied to the host and encoded there. In the codec thread."""
        encoded = []
        for page in group:
            array = self._devices.backend.fetch(source.view, page.start, page.stop, source.side.encoding)
            codec = self._codecs.codec(layer, page.kind)
            encoded.append(encode_page(codec, page, array, fine_positions(self._fine, page)))
        return EncodedGroup(layer, group, list(zip(*encoded, strict=True)))


def _groups_of(
    pages: Sequence[PageRef], codecs: CodecTable, layers: int, buffers: DeviceBuffers, *, soon: bool
) -> list[list[PageRef]]:
    """Pages of one kind whose first streams have about `group_bytes`, as many in each group; fewer in the first if
    something is to be sent soon."""
    groups: list[list[PageRef]] = []
    for kind, of_kind in itertools.groupby(pages, key=lambda page: page.kind):
        left = list(of_kind)
        usual = left[len(left) // 2].shape
        own = {id(codec): codec for codec in (codecs.codec(layer, kind) for layer in range(layers))}
        first_bytes = max(*(codec.stream_bytes(usual)[0] for codec in own.values()), 1)
        all_bytes = max(*(sum(codec.stream_bytes(usual, wide=True)) for codec in own.values()), 1)
        room_bytes = buffers.staging_bytes // (IN_FLIGHT + 1)  # pieces have gaps between them
        most = max(min(buffers.group_bytes // first_bytes, room_bytes // all_bytes), 1)
        if soon and not groups:
            few = max(most // FIRST_SHARE, 1)
            groups.append(left[:few])
            left = left[few:]
        count = -(-len(left) // most)
        size = -(-len(left) // max(count, 1))
        groups += [left[begin : begin + size] for begin in range(0, len(left), size or 1)]
    return groups


def _pieces_at_once(ring: PinnedRing, sizes: Sequence[int]) -> tuple[list[memoryview], bool] | None:
    """Room in the pinned ring if there is some now, and nobody waits for it. In the codec thread."""
    if ring.contended:
        return None
    pieces = ring.take_all(sizes)
    return None if pieces is None else (pieces, True)


def _wait_for_all(started: deque[tuple[_Job, Event]]) -> None:
    while started:
        started.popleft()[1].wait()


def address_of(view: memoryview) -> int:
    """Where the bytes of a view lie, which is writable and not empty."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
