"""What the transfers of an endpoint share of CUDA: pinned memory, and of each device streams and staging memory."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec import PAGE_TOKENS, PageShape
from lynx_codec.plan import DEFAULT_PLAN
from lynx_gpu.ring import PinnedRing, Staging, ordinary_memory
from lynx_net.errors import LocalProtocolError
from lynx_net.serdes.backend import Backend, CudaBackend
from lynx_net.serdes.receive_pool import ReceivePool
from lynx_net.wire.pool import BufferPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from lynx_codec import Codec
    from lynx_gpu.codec import DeviceCodec

__all__ = ["BACKEND", "DeviceBuffers", "DeviceSide", "Devices"]

BACKEND: Backend = CudaBackend()
"""Who answers for device memory; tests put something else here."""

logger = logging.getLogger("lynx_net")

NOTES_BYTES = 1024 * 1024
KEPT_CODECS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBuffers:
    """Bounds of the memory that transfers from and to devices use, for an endpoint. Nothing is used without them.

    Attributes:
        send_pinned_bytes: pinned host memory for what is to be sent. A sender that finds it full waits a while for the
            link to let go of something, which it does once the receiver has confirmed it.
        overflow_bytes: ordinary memory that is kept for what has to make room there: residuals, which wait behind all
            anchors, and what has waited for too long. What does not fit here is allocated each time, which is slow.
        receive_pinned_bytes: pinned host memory for what has arrived; what does not fit lies in ordinary memory, from
            which it gets to the device more slowly.
        staging_bytes: memory of each device beside the caches, for both directions together.
        group_bytes: what is encoded at once has about so many bytes in its first stream, which does not wait to be
            sent, and at most a third of the staging memory in all. A group costs the interpreter much the same,
            whatever its size; but the fewer bytes are under way, the more of them are in the cache when they are sent.
        checksums: the device makes those of what it encodes, where a stream of a page is one segment; else the threads
            that send do, which reads all of it once more.
        prepare: devices for which all of this is allocated when the endpoint opens, and the default codecs are loaded;
            else that happens in the first transfers, which then take longer.
    """

    send_pinned_bytes: int = 1024 * 1024 * 1024
    overflow_bytes: int = 4 * 1024 * 1024 * 1024
    receive_pinned_bytes: int = 1024 * 1024 * 1024
    staging_bytes: int = 128 * 1024 * 1024
    group_bytes: int = 20 * 1024 * 1024
    checksums: bool = True
    prepare: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        least = min(self.send_pinned_bytes, self.staging_bytes, self.group_bytes)
        if least < 1 or min(self.receive_pinned_bytes, self.overflow_bytes) < 0:
            raise LocalProtocolError(f"buffers for devices must have positive sizes: {self}")


@dataclass(frozen=True, slots=True)
class _Receiving:
    """Where received bytes lie, and the thread that makes more of it pinned."""

    ring: PinnedRing
    pool: ReceivePool
    pinning: ThreadPoolExecutor


class Devices:
    """Of one endpoint. Costs nothing until a device array is met; all but `receive_pool` is for the codec thread."""

    def __init__(self, buffers: DeviceBuffers) -> None:
        self.buffers = buffers
        self.backend = BACKEND
        self._sides: dict[int, DeviceSide] = {}
        self._lock = threading.Lock()
        self._ring: PinnedRing | None = None
        self._overflow = PinnedRing(buffers.overflow_bytes, ordinary_memory)
        self._receiving: _Receiving | None = None

    def holds(self, array: object) -> bool:
        """Whether an array is in device memory."""
        return not isinstance(array, np.ndarray) and array is not None and self.backend.is_device_array(array)

    def side(self, device: int) -> DeviceSide:
        """What there is for one device.

        Raises:
            BackendMissingError: there is no CuPy or no such device.
        """
        with self._lock:
            if device not in self._sides:
                self._sides[device] = DeviceSide(self.backend, device, self.buffers)
            return self._sides[device]

    def ring(self, device: int) -> PinnedRing:
        """Pinned memory for what is sent, from any device; `device` is one that exists."""
        if self._ring is None:
            self._ring = PinnedRing(self.buffers.send_pinned_bytes, self.side(device).runtime.pinned)
        return self._ring

    def overflow_room(self, size_bytes: int) -> memoryview:
        """Ordinary memory for what does not stay in the ring, or has not found room there; used again and again."""
        room = self._overflow.take(size_bytes)
        if room is None and self._overflow.grow():  # at no cost: pages are there once they are written to
            room = self._overflow.take(size_bytes)
        return memoryview(bytearray(size_bytes)) if room is None else room

    def receive_pool(self, device: int, need_bytes: int) -> ReceivePool:
        """Buffers for what arrives for any device, pinned as far as there is pinned memory by then.

        More of it is allocated in a thread of its own if `need_bytes` are worth it: nobody waits for that.
        """
        if self._receiving is None:
            limit = self.buffers.receive_pinned_bytes
            ring = PinnedRing(limit, self.side(device).runtime.pinned)
            pinning = ThreadPoolExecutor(1, thread_name_prefix="lynx_net-pin")
            self._receiving = _Receiving(ring, ReceivePool(ring), pinning)
        self._receiving.pinning.submit(_grow_to, self._receiving.ring, need_bytes)
        return self._receiving.pool

    def prepare(self) -> None:
        """Allocate now, up to the bounds, what `DeviceBuffers.prepare` asks for. Blocks for a second or so."""
        for device in self.buffers.prepare:
            side = self.side(device)
            for codec in DEFAULT_PLAN.table(1).codecs:
                side.codec(codec, PageShape(PAGE_TOKENS, 1, 1))
            ring = self.ring(device)
            while ring.grow():
                pass
            self.receive_pool(device, self.buffers.receive_pinned_bytes)
        if self._receiving is not None:
            self._receiving.pinning.submit(int).result()

    def close(self) -> None:
        """The endpoint has closed: what is allocated goes when nothing uses it any more."""
        if self._receiving is not None:
            self._receiving.pinning.shutdown(wait=False, cancel_futures=True)
        self._ring = self._receiving = None
        self._sides = {}


class DeviceSide:
    """One device of an endpoint: a stream for each thing that overlaps, and staging memory."""

    def __init__(self, backend: Backend, device: int, buffers: DeviceBuffers) -> None:
        self.runtime = backend.runtime(device)
        self.device = device
        self.staging = Staging(buffers.staging_bytes, self.runtime.memory)
        self.encoding: Any = self.runtime.stream()
        self.leaving: Any = self.runtime.stream()
        self.arriving: Any = self.runtime.stream()
        self.decoding: Any = self.runtime.stream()
        results = PinnedRing(NOTES_BYTES, self.runtime.pinned)
        results.grow()
        self.notes = BufferPool(NOTES_BYTES, _pinned_or_ordinary(results))
        """What goes with a batch: where its pieces lie, and how its pages have fared. Pinned, but for bytearrays."""
        self._backend = backend
        self._codecs: OrderedDict[str, DeviceCodec] = OrderedDict()
        self._warned: set[tuple[str, int]] = set()

    def codec(self, codec: Codec, shape: PageShape) -> DeviceCodec | None:
        """The codec on this device, kept for others like it; None if it has no kernels for pages of this shape."""
        if not self._backend.has_kernels(codec, shape):
            self._warn_of(codec, shape)
            return None
        key = f"{codec.name} {codec.params()}"
        if key not in self._codecs:
            self._codecs[key] = self._backend.codec(codec, self.device)
        self._codecs.move_to_end(key)
        if len(self._codecs) > KEPT_CODECS:
            self._codecs.popitem(last=False)
        return self._codecs[key]

    def _warn_of(self, codec: Codec, shape: PageShape) -> None:
        """Say once that pages have no kernels for their length alone: nobody expects that."""
        if (codec.name, shape.tokens) in self._warned:
            return
        self._warned.add((codec.name, shape.tokens))
        short = dataclasses.replace(shape, raw_head=0, raw_tail=0, fine=0)
        while short.tokens > 1 and not self._backend.has_kernels(codec, short):
            short = dataclasses.replace(short, tokens=short.tokens // 2)
        if short.tokens > 1:
            logger.warning(
                "pages of %d tokens are too long for the kernels of the codec %s: they are coded on the host, which is "
                "many times slower; pages of %d tokens (page_tokens of the layout) would not be",
                *(shape.tokens, codec.name, short.tokens),
            )


def _pinned_or_ordinary(ring: PinnedRing) -> Callable[[int], memoryview]:
    def allocate(size: int) -> memoryview:
        piece = ring.take(size) if size else None
        return memoryview(bytearray(size)) if piece is None else piece

    return allocate


def _grow_to(ring: PinnedRing, need_bytes: int) -> None:
    while ring.allocated_bytes < need_bytes and ring.grow():
        pass
