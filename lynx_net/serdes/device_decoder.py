"""Decoding in device memory: pages are copied there and decoded in place while more of them arrive.

For each batch, on the streams of its device: the arriving stream copies the pages' bytes into staging memory, from the
buffers in which they were received; the decoding stream waits for that, writes the values in place and copies the
status of the batch to the host; an event tells the thread, which sleeps in it. Only then is anybody told that the pages
are decoded: whoever reads what a readiness event has announced never sees a page that is half written.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec import PageShape
from lynx_net.errors import CodecError, LocalProtocolError
from lynx_net.serdes.decoder import decode_page
from lynx_net.serdes.device_encoder import address_of
from lynx_net.serdes.encoder import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lynx_codec import Codec
    from lynx_codec.plan import CodecTable
    from lynx_gpu.codec import DeviceCodec
    from lynx_gpu.events import Event
    from lynx_gpu.plan import BatchPlan
    from lynx_gpu.views import DeviceView
    from lynx_net.serdes.backend import Backend
    from lynx_net.serdes.decoder import ArrayDecoder, Arrived, Started
    from lynx_net.serdes.device import Devices, DeviceSide
    from lynx_net.wire.layout import Kind, PageRef
    from lynx_net.wire.pool import BufferPool

__all__ = ["DeviceDecoders"]

KEPT_PLANS = 256
"""Of arrays that are alike; the small table of each stays on the device."""

PLANNED_PAGES = 32
"""Pages of one batch at most: what is staged for a batch is bounded by it."""


class DeviceDecoders:
    """Makes the decoders of one transfer for those arrays of its target that are in device memory."""

    def __init__(self, devices: Devices, codecs: CodecTable, page_tokens: int, need_bytes: int) -> None:
        self._devices = devices
        self._page_tokens = page_tokens
        self._plans: dict[tuple[int, Kind], _Plans] = {}
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
        longest = PageShape(min(shape[0], self._page_tokens), *shape[1:])
        on_device = side.codec(self._codecs.own(layer, kind), longest)
        if on_device is None:
            return _ByHost(backend, side, self._codecs.codec(layer, kind), view)
        plans = self._plans.setdefault((id(on_device), kind), _Plans(on_device, backend))
        return _OnDevice(side, on_device, plans, view, self._codecs.places(layer, kind))


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


class _Plans:
    """Plans of arrays that are alike: those of all layers' keys, say. The pages of a batch are those that have come."""

    def __init__(self, codec: DeviceCodec, backend: Backend) -> None:
        self._codec = codec
        self._job = backend.job
        self._plans: OrderedDict[tuple[int, ...], BatchPlan] = OrderedDict()

    def of(self, pages: Sequence[PageRef]) -> BatchPlan:
        """The plan for these pages of an array."""
        key = tuple(page.start for page in pages)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._codec.plan([self._job(page.start, page.shape) for page in pages])
            if len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan


class _OnDevice:
    """With kernels."""

    def __init__(
        self, side: DeviceSide, codec: DeviceCodec, plans: _Plans, view: DeviceView, places: Sequence[int]
    ) -> None:
        self._side = side
        self._plans = plans
        self._codec = codec
        self._view = view
        self._places = places

    def start(self, pages: Sequence[Arrived]) -> Started:
        started = _Batches()
        ordered = sorted(pages, key=lambda arrived: arrived[0].start)
        try:
            for first in range(0, len(ordered), PLANNED_PAGES):
                started.add(self._begin(ordered[first : first + PLANNED_PAGES]))
        except BaseException:
            started.wait()
            raise
        return started

    def _begin(self, pages: Sequence[Arrived]) -> _Batch:
        side, runtime = self._side, self._side.runtime
        plan = self._plans.of([page for page, _ in pages])
        streams = [self._own(page, of_page) for page, of_page in pages]
        status = side.statuses.take(plan.status_bytes)
        staging = side.staging.take(plan.total_bytes)
        try:
            for spans, of_page in zip(plan.spans, streams, strict=True):
                for (offset, most_bytes), stream in zip(spans, of_page, strict=False):
                    if stream.nbytes > most_bytes:
                        raise CodecError(f"a stream of {stream.nbytes} bytes, {most_bytes} at most are a page's")
                    if stream.nbytes:
                        runtime.to_device(staging + offset, address_of(stream), stream.nbytes, side.arriving)
            runtime.after(side.decoding, runtime.record(side.arriving))
            self._codec.decode(plan, streams, staging, self._view, side.decoding)
            runtime.to_host(address_of(status), staging, plan.status_bytes, side.decoding)
        except BaseException:  # the copies that were launched all the same read the streams
            runtime.record(side.arriving).wait()
            side.statuses.give(status)
            raise
        finally:
            runtime.after(side.decoding, runtime.record(side.arriving))
            decoded = runtime.record(side.decoding)
            side.staging.give(staging, decoded)
        return _Batch(side, plan, decoded, status)

    def _own(self, page: PageRef, streams: Sequence[memoryview]) -> list[memoryview]:
        """Those streams of the transfer that are the codec's; the others are empty."""
        for number, stream in enumerate(streams):
            if number not in self._places and stream.nbytes:
                raise CodecError(f"stream {number} of page {page.index} is not the codec's, but bytes of it came")
        return [streams[place] for place in self._places if place < len(streams)]


class _Batch:
    """Pages that the device decodes."""

    def __init__(self, side: DeviceSide, plan: BatchPlan, decoded: Event, status: memoryview) -> None:
        self._side = side
        self._plan = plan
        self._decoded = decoded
        self._status = status

    def wait(self) -> None:
        self._decoded.wait()

    def check(self) -> None:
        try:
            self._plan.check(self._status)
        finally:
            self._side.statuses.give(self._status)


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

    def __init__(self, backend: Backend, side: DeviceSide, codec: Codec, view: DeviceView) -> None:
        self._backend = backend
        self._side = side
        self._codec = codec
        self._view = view

    def start(self, pages: Sequence[Arrived]) -> Started:
        for page, streams in pages:
            out = np.empty(page.shape.array_shape, DTYPES[self._view.dtype])
            decode_page(self._codec, page, streams, out)
            self._backend.store(self._view, page.start, out, self._side.decoding)
        return _Copied(self._side)


class _Copied:
    def __init__(self, side: DeviceSide) -> None:
        self._copied = side.runtime.record(side.decoding)

    def finish(self) -> None:
        self._copied.wait()
