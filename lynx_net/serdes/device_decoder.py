"""Decoding in device memory: pages are copied there and decoded in place while more of them arrive.

For each batch, on the streams of its device: the arriving stream copies the pages' bytes into staging memory, from the
buffers in which they were received, in one launch where these are pinned (kernels/gather.cu); the decoding stream waits
for that, writes the values in place and copies the status of the batch to the host; an event tells the thread, which
sleeps in it. Only then is anybody told that the pages are decoded: whoever reads what a readiness event has announced
never sees a page that is half written.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lynx_codec import PageShape
from lynx_gpu.events import SPAN
from lynx_net.errors import CodecError, LocalProtocolError
from lynx_net.serdes.decoder import decode_page
from lynx_net.serdes.device_encoder import address_of
from lynx_net.serdes.encoder import DTYPES
from lynx_net.serdes.receive_pool import pinned_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lynx_codec import Codec
    from lynx_codec.plan import CodecTable
    from lynx_gpu.codec import DeviceCodec
    from lynx_gpu.events import Event
    from lynx_gpu.plan import BatchPlan
    from lynx_gpu.views import DeviceView
    from lynx_net.serdes.backend import Backend
    from lynx_net.serdes.decoder import ArrayDecoder, Arrived, Started
    from lynx_net.serdes.device import Devices, DeviceSide
    from lynx_net.wire.layout import Kind
    from lynx_net.wire.pool import BufferPool

__all__ = ["DeviceDecoders"]

KEPT_PLANS = 256
"""Of arrays that are alike; the small table of each stays on the device."""

STAGED_SHARE = 3
"""A batch is staged in such a part of the staging memory at most, so that two are under way and one is being copied."""

NOTES_UNIT_BYTES = 4096


class DeviceDecoders:
    """Makes the decoders of one transfer for those arrays of its target that are in device memory."""

    def __init__(self, devices: Devices, codecs: CodecTable, page_tokens: int, need_bytes: int) -> None:
        self._devices = devices
        self._page_tokens = page_tokens
        self._plans: dict[tuple[int, int, Kind], _Plans | None] = {}
        """Of a device, codec and kind; None where there are no kernels."""
        self._codecs = codecs
        self._need_bytes = need_bytes
        self._waited_for: set[tuple[int, int]] = set()
        self.pool: BufferPool | None = None
        """Where received bytes should lie, once a decoder has been made."""

    def make(self, layer: int, kind: Kind, array: Any, shape: tuple[int, int, int]) -> ArrayDecoder:
        """The decoder of an array; what it does waits for what the stream of the array's owner has now.

        Raises:
            LocalProtocolError: the array has another shape or dtype than is needed.
            BackendMissingError: no CuPy, or no such device.
        """
        backend = self._devices.backend
        view = _checked(backend, array, shape)
        side = self._devices.side(view.device)
        caller = backend.current_stream(array)
        if (view.device, caller) not in self._waited_for:
            self._waited_for.add((view.device, caller))
            side.runtime.after_caller(side.decoding, caller)
        if self.pool is None:
            self.pool = self._devices.receive_pool(view.device, self._need_bytes)
        codec = self._codecs.own(layer, kind)
        key = view.device, id(codec), kind
        if key not in self._plans:
            longest = PageShape(min(shape[0], self._page_tokens), *shape[1:])
            on_device = side.codec(codec, longest)
            self._plans[key] = None
            if on_device is not None:
                page_bytes = sum(on_device.codec.stream_bytes(longest, wide=True))
                most_pages = max(self._devices.buffers.staging_bytes // STAGED_SHARE // max(page_bytes, 1), 1)
                self._plans[key] = _Plans(on_device, backend, most_pages)
        plans = self._plans[key]
        if plans is None:
            return _ByHost(backend, side, layer, self._codecs.codec(layer, kind), view)
        streams = len(self._codecs.stream_names)
        return _OnDevice(side, plans, view, self._codecs.places(layer, kind), streams)


def _checked(backend: Backend, array: Any, shape: tuple[int, int, int]) -> DeviceView:
    """What a target gave, if pages can be decoded into it."""
    try:
        view = backend.view(array)
    except CodecError as error:
        raise LocalProtocolError(f"the target: {error}") from error
    given = (view.tokens, view.heads, view.head_size)
    if given != shape or view.dtype not in DTYPES:
        raise LocalProtocolError(
            f"the target gave device memory of shape {given} and dtype {view.dtype}, "
            f"needed is {shape} of {', '.join(DTYPES)}"
        )
    return view


class _Pieces(NamedTuple):
    """Page streams that come together, page by page: their lengths, and where they lie in the piece of the plan."""

    lengths: list[int]
    sizes: NDArray[np.uint64]
    offsets: NDArray[np.uint64]
    most_bytes: int


class _Plan:
    """A plan, and what was last found of the streams that came for it: mostly they are as long as those before."""

    def __init__(self, batch: BatchPlan) -> None:
        self.batch = batch
        spans = np.array(batch.spans, np.uint64)
        self._offsets, self._most_bytes = spans[..., 0], spans[..., 1]
        self._last: dict[int, _Pieces] = {}

    def pieces(self, lengths: list[int], known: int) -> _Pieces:
        """What there is to know of the first `known` streams of each page.

        Raises:
            CodecError: one is longer than any that a page can have.
        """
        last = self._last.get(known)
        if last is None or last.lengths != lengths:
            sizes = np.array(lengths, np.uint64)
            if (sizes.reshape(-1, known) > self._most_bytes[:, :known]).any():
                most_bytes = self._most_bytes.max()
                raise CodecError(f"a stream of {max(lengths)} bytes, {most_bytes} at most are a page's")
            last = _Pieces(lengths, sizes, self._offsets[:, :known].ravel(), max(lengths))
            self._last[known] = last
        return last


class _Plans:
    """Plans of arrays that are alike: those of all layers' keys, say. The pages of a batch are those that have come."""

    def __init__(self, codec: DeviceCodec, backend: Backend, most_pages: int) -> None:
        self.codec = codec
        self.most_pages = most_pages
        self._job = backend.job
        self._plans: OrderedDict[tuple[int, ...], _Plan] = OrderedDict()

    def of(self, pages: Sequence[Arrived]) -> _Plan:
        """The plan for these pages of an array."""
        key = tuple([page.start for page, _ in pages])
        plan = self._plans.get(key)
        if plan is None:
            batch = self.codec.plan([self._job(page.start, page.shape) for page, _ in pages])
            plan = self._plans[key] = _Plan(batch)
            if len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan


class _OnDevice:
    """With kernels."""

    def __init__(self, side: DeviceSide, plans: _Plans, view: DeviceView, places: Sequence[int], streams: int) -> None:
        self._side = side
        self._plans = plans
        self._view = view
        self._places = places
        self._others = [number for number in range(streams) if number not in places]

    def start(self, pages: Sequence[Arrived]) -> Started:
        started = _Batches()
        parts = -(-len(pages) // self._plans.most_pages)
        most_pages = -(-len(pages) // max(parts, 1))
        try:
            for first in range(0, len(pages), most_pages):
                started.add(self._begin(pages[first : first + most_pages]))
        except BaseException:
            started.wait()
            raise
        return started

    def _begin(self, pages: Sequence[Arrived]) -> _Batch:
        side, runtime = self._side, self._side.runtime
        planned = self._plans.of(pages)
        plan, streams = planned.batch, self._own(pages)
        pieces = [stream for of_page in streams for stream in of_page]
        about = planned.pieces([*map(len, pieces)], len(streams[0]))
        table_bytes = len(pieces) * SPAN.itemsize
        notes = side.notes.take(-(-(plan.status_bytes + table_bytes) // NOTES_UNIT_BYTES) * NOTES_UNIT_BYTES)
        staging = side.staging.take(plan.total_bytes)
        with runtime.here():
            try:
                table = np.frombuffer(notes, np.uint64, 3 * len(pieces), plan.status_bytes).reshape(-1, 3)
                table[:, 1] = about.offsets + np.uint64(staging)
                table[:, 2] = about.sizes
                at = address_of(notes)
                notes_pinned = not isinstance(notes.obj, bytearray)
                self._copy(pieces, table, about.most_bytes, at + plan.status_bytes if notes_pinned else None)
                runtime.after(side.decoding, runtime.record(side.arriving))
                status_bytes = self._plans.codec.decode(plan, streams, staging, self._view, side.decoding)
                back = runtime.to_pinned if notes_pinned else runtime.to_host
                back(at, staging, status_bytes, side.decoding)
            except BaseException:  # the copies that were launched all the same read the streams
                copied = runtime.record(side.arriving)
                runtime.after(side.decoding, copied)
                copied.wait()
                side.notes.give(notes)
                raise
            finally:
                decoded = runtime.record(side.decoding)
                side.staging.give(staging, decoded)
        return _Batch(side, plan, decoded, notes, status_bytes)

    def _copy(self, pieces: Sequence[memoryview], table: NDArray[np.uint64], most_bytes: int, at: int | None) -> None:
        """Copy these to where the table says on the device; it lies at `at` in pinned memory, unless that is None."""
        side, runtime = self._side, self._side.runtime
        addresses = [0] * len(pieces)
        for number, piece in enumerate(pieces):
            address = pinned_address(piece) if at is not None else None
            if address is not None:
                addresses[number] = address
                continue
            if piece.nbytes:
                runtime.to_device(int(table[number, 1]), address_of(piece), piece.nbytes, side.arriving)
            table[number, 2] = 0
        table[:, 0] = addresses
        if at is not None and any(addresses):
            runtime.gather(at, len(table), most_bytes, side.arriving)

    def _own(self, pages: Sequence[Arrived]) -> list[list[memoryview]]:
        """Of each page those streams of the transfer that are the codec's; the others are empty."""
        if not self._others:
            return [streams for _, streams in pages]
        known = len(pages[0][1])
        others = [number for number in self._others if number < known]
        own = [place for place in self._places if place < known]
        for page, streams in pages:
            for number in others:
                if streams[number].nbytes:
                    raise CodecError(f"stream {number} of page {page.index} is not the codec's, but bytes of it came")
        return [[streams[place] for place in own] for _, streams in pages]


class _Batch:
    """Pages that the device decodes."""

    def __init__(self, side: DeviceSide, plan: BatchPlan, decoded: Event, notes: memoryview, status_bytes: int) -> None:
        self._side = side
        self._plan = plan
        self._decoded = decoded
        self._notes = notes
        self._status_bytes = status_bytes

    def wait(self) -> None:
        self._decoded.wait()

    def check(self) -> None:
        try:
            self._plan.check(self._notes[: self._status_bytes])
        finally:
            self._side.notes.give(self._notes)


class _Batches:
    """All that one `start` began."""

    def __init__(self) -> None:
        self._batches: list[_Batch] = []

    def add(self, batch: _Batch) -> None:
        self._batches.append(batch)

    def wait(self) -> None:
        for batch in self._batches:
            batch.wait()

    def finish(self) -> None:
        self.wait()
        while self._batches:
            self._batches.pop(0).check()


class _ByHost:
    """A codec without kernels: pages are decoded on the host and copied to the device."""

    def __init__(self, backend: Backend, side: DeviceSide, layer: int, codec: Codec, view: DeviceView) -> None:
        self._layer = layer
        self._backend = backend
        self._side = side
        self._codec = codec
        self._view = view

    def start(self, pages: Sequence[Arrived]) -> Started:
        for page, streams in pages:
            out = np.empty(page.shape.array_shape, DTYPES[self._view.dtype])
            decode_page(self._codec, self._layer, page, streams, out)
            self._backend.store(self._view, page.start, out, self._side.decoding)
        return _Copied(self._side)


class _Copied:
    def __init__(self, side: DeviceSide) -> None:
        with side.runtime.here():
            self._copied = side.runtime.record(side.decoding)

    def finish(self) -> None:
        self._copied.wait()
