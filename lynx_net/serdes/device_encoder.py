"""Encoding in device memory: groups of pages are encoded, copied to pinned memory and sent, all three at once.

For each group, on the streams of its device: the encoding stream waits for what the caller's stream has, then the
kernels write the streams of all pages into staging memory; the leaving stream waits for them and copies that to a
piece of the pinned ring; an event tells the thread, which sleeps in it, and the piece is cut into views of each
page's streams. While one group is copied the next one is being encoded and the one before is on the wire.

A view keeps its piece of the ring until the link needs it no more: until the receiver has confirmed the frame, or the
transfer has ended. Residuals wait behind the anchors of all layers, so when the ring is rather full they are moved to
ordinary memory: anchors never wait for room that residuals take. A sender that finds no room all the same waits a
while.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_gpu.ring import BufferTooLargeError
from lynx_net.aio.offload import run_blocking
from lynx_net.errors import CodecError, LocalProtocolError, NonFiniteError
from lynx_net.serdes.encoder import EncodedPage, check_shape, encode_page, fine_positions, groups_of

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
    from lynx_net.serdes.device import Devices, DeviceSide
    from lynx_net.serdes.encoder import Outlet
    from lynx_net.wire.layout import CacheLayout, Kind, PageRef

__all__ = ["DeviceEncoder"]

IN_FLIGHT = 2
"""Groups that the device works on at once: one is encoded while the other is copied."""

FIRST_SHARE = 8
"""The first group of a transfer is so much smaller, so that the wire has something soon."""

RESIDUALS_MOVE = 0.6
"""Share of the pinned ring in use from which on residuals are moved to ordinary memory."""

RING_WAIT_S = 0.1
"""So long a sender waits for room in the ring. Without an end it might wait for bytes that the receiver has, but need
not confirm before it gets more."""

_VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


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

    group: list[PageRef]
    source: _Source
    plan: BatchPlan
    later_at: int
    first: memoryview
    later: memoryview | None

    def stream(self, number: int, offset: int, length: int) -> memoryview:
        """The bytes of a stream that lies there in the plan's piece."""
        if number == 0 or self.later is None:
            return self.first[offset : offset + length]
        return self.later[offset - self.later_at : offset - self.later_at + length]


class DeviceEncoder:
    """Of one transfer. Arrays may lie on different devices."""

    def __init__(
        self,
        codecs: CodecTable,
        fine: NDArray[np.int64],
        layout: CacheLayout,
        devices: Devices,
        executor: Executor | None,
    ) -> None:
        self._codecs = codecs
        self._fine = fine
        self._devices = devices
        self._executor = executor
        self._group_values = max(devices.buffers.group_bytes // _VALUE_BYTES[layout.dtype], 1)
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

    async def encode(self, pages: Sequence[PageRef], arrays: Mapping[Kind, Any], outlet: Outlet) -> None:
        if not pages:
            return
        # Here, since what is current for this thread is not for another.
        callers: dict[Kind, int] = {kind: self._devices.backend.current_stream(array) for kind, array in arrays.items()}
        sources = await run_blocking(self._executor, self._sources, pages, arrays, callers)
        started: deque[tuple[_Job, Event]] = deque()
        try:
            small = self._group_values // FIRST_SHARE if not self._plans else None
            for group in groups_of(pages, self._group_values, apart=lambda page: page.kind, first_values=small):
                source = sources[group[0].kind]
                await outlet.wait_for_room()
                if source.codec is None:
                    while started:
                        outlet.put(await run_blocking(self._executor, self._finish, started))
                    outlet.put(await run_blocking(self._executor, self._encode_on_host, group, source))
                    continue
                plan = self._plan(source.codec, group)
                later_at = min((spans[1][0] for spans in plan.spans if len(spans) > 1), default=plan.total_bytes)
                first, *later = await self._pieces(source, [later_at, plan.total_bytes - later_at])
                job = _Job(group, source, plan, later_at, first, later[0] if later else None)
                encoded = await run_blocking(self._executor, self._step, job, started)
                outlet.put(encoded)
            while started:
                outlet.put(await run_blocking(self._executor, self._finish, started))
        finally:
            if started:  # an error or a cancellation: the device still reads the arrays and writes to the ring
                await run_blocking(self._executor, _wait_for_all, started)

    def _sources(
        self, pages: Sequence[PageRef], arrays: Mapping[Kind, Any], callers: Mapping[Kind, int]
    ) -> dict[Kind, _Source]:
        """Views of the arrays; what is encoded from now on waits for the callers' streams."""
        backend = self._devices.backend
        sources: dict[Kind, _Source] = {}
        for kind, array in arrays.items():
            view = backend.view(array)
            side = self._devices.side(view.device)
            side.runtime.after_caller(side.encoding, callers[kind])
            first = next(page for page in pages if page.kind == kind)  # no page is longer
            codec = side.codec(self._codecs.own(first.layer, kind), first.shape)
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

    async def _pieces(self, source: _Source, sizes: Sequence[int]) -> list[memoryview]:
        """Room in the pinned ring, once there is some; if that takes long, in ordinary memory, which is slower."""
        ring = source.ring
        wanted = [size for size in sizes if size]
        if not ring.contended and (at_once := ring.take_all(wanted)) is not None:
            return at_once
        try:
            async with asyncio.timeout(RING_WAIT_S):
                return await ring.take_when_free(wanted, lambda: run_blocking(self._executor, ring.grow))
        except BufferTooLargeError as error:
            raise LocalProtocolError(f"{error}; give more send_pinned_bytes, or smaller pages") from error
        except TimeoutError:
            return [self._devices.overflow_room(size) for size in wanted]

    def _step(self, job: _Job, started: deque[tuple[_Job, Event]]) -> list[EncodedPage]:
        """Start one group, and finish the oldest if that makes too many. In the codec thread."""
        started.append((job, self._start(job)))
        return self._finish(started) if len(started) >= IN_FLIGHT else []

    def _start(self, job: _Job) -> Event:
        side, plan, codec = job.source.side, job.plan, job.source.codec
        assert codec is not None
        staging = side.staging.take(plan.total_bytes)
        try:
            codec.encode(job.source.view, plan, self._fine_on(side), staging, side.encoding)
            side.runtime.after(side.leaving, side.runtime.record(side.encoding))
            side.runtime.to_host(address_of(job.first), staging, job.later_at, side.leaving)
            if job.later is not None:
                side.runtime.to_host(address_of(job.later), staging + job.later_at, job.later.nbytes, side.leaving)
        except BaseException:  # what was launched all the same reads the array and writes to the piece
            side.runtime.record(side.encoding).wait()
            side.runtime.record(side.leaving).wait()
            raise
        finally:
            copied = side.runtime.record(side.leaving)
            side.staging.give(staging, copied)
        return copied

    def _fine_on(self, side: DeviceSide) -> Any:
        """Positions of the fine tokens, each in its page, on the device; None if there are none."""
        if not len(self._fine):
            return None
        if side.device not in self._uploaded:
            self._uploaded[side.device] = self._devices.backend.upload(self._positions, side.device, side.encoding)
        return self._uploaded[side.device]

    def _finish(self, started: deque[tuple[_Job, Event]]) -> list[EncodedPage]:
        """Wait for the oldest group and cut its piece into streams. In the codec thread."""
        job, copied = started.popleft()
        copied.wait()
        try:
            lengths = job.plan.lengths(job.first)
        except NonFiniteError:
            self._encode_on_host(job.group, job.source)  # raises the same, and knows the page
            raise
        first = job.group[0]
        places = self._codecs.places(first.layer, first.kind)
        ring = job.source.ring
        encoded = []
        for page, spans, of_page in zip(job.group, job.plan.spans, lengths, strict=True):
            streams = [memoryview(b"")] * len(self._codecs.stream_names)
            for number, (place, (offset, _), length) in enumerate(zip(places, spans, of_page, strict=True)):
                streams[place] = job.stream(number, offset, length)
            encoded.append(EncodedPage(page, streams))
        return encoded if ring.used_bytes < RESIDUALS_MOVE * ring.limit_bytes else self._moved(encoded)

    def _moved(self, encoded: Sequence[EncodedPage]) -> list[EncodedPage]:
        """The same with the later streams in ordinary memory."""
        total = sum(stream.nbytes for _, streams in encoded for stream in streams[1:])
        if not total:
            return list(encoded)
        room = self._devices.overflow_room(total)
        at = 0
        moved = []
        for page, streams in encoded:
            copies = []
            for stream in streams[1:]:
                copies.append(room[at : at + stream.nbytes])
                if stream.nbytes:
                    np.copyto(np.frombuffer(copies[-1], np.uint8), np.frombuffer(stream, np.uint8))
                at += stream.nbytes
            moved.append(EncodedPage(page, [streams[0], *copies]))
        return moved

    def _encode_on_host(self, group: Sequence[PageRef], source: _Source) -> list[EncodedPage]:
        """A codec without kernels: the pages are copied to the host and encoded there. In the codec thread."""
        encoded = []
        for page in group:
            array = self._devices.backend.fetch(source.view, page.start, page.stop, source.side.encoding)
            codec = self._codecs.codec(page.layer, page.kind)
            encoded.append(encode_page(codec, page, array, fine_positions(self._fine, page)))
        return encoded


def _wait_for_all(started: deque[tuple[_Job, Event]]) -> None:
    while started:
        started.popleft()[1].wait()


def address_of(view: memoryview) -> int:
    """Where the bytes of a view lie, which is writable and not empty."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
