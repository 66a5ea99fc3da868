"""A CUDA of the mind: device memory is host memory, and streams are threads that take their time.

Everything is as asynchronous as on a device: what a stream is given happens later, in order, and nothing but events
says when. Codecs are those of the CPU.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from lynx_codec import Codec, CodecError, NonFiniteError, PageShape
from lynx_gpu.ring import ordinary_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from lynx_gpu.events import Memory

_NAMES = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}


class FakeEvent:
    def __init__(self, error: list[BaseException]) -> None:
        self.reached = threading.Event()
        self._errors = error

    def done(self) -> bool:
        return self.reached.is_set()

    def wait(self) -> None:
        assert self.reached.wait(10)
        if self._errors:
            raise self._errors[0]


class FakeStream:
    """Ends with `close`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)


class FakeRuntime:
    def __init__(self, cuda: FakeCuda, device: int) -> None:
        self._cuda = cuda
        self.device = device

    def pinned(self, size_bytes: int) -> Memory:
        self._cuda.pinned_bytes += size_bytes
        return ordinary_memory(size_bytes)

    def memory(self, size_bytes: int) -> Memory:
        self._cuda.device_bytes[self.device] = self._cuda.device_bytes.get(self.device, 0) + size_bytes
        return ordinary_memory(size_bytes)

    def stream(self) -> FakeStream:
        return self._cuda.stream()

    def record(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent(stream.errors)
        stream.put(event.reached.set)
        return event

    def after(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.put(event.wait)

    def after_caller(self, stream: FakeStream, caller: int) -> None:
        if caller:
            stream.put(self.record(self._cuda.callers[caller]).wait)

    @contextmanager
    def here(self) -> Iterator[None]:
        yield

    def to_pinned(self, target: int, source: int, size_bytes: int, stream: FakeStream) -> None:
        self._copy(target, source, size_bytes, stream)

    def gather(self, table: int, count: int, most_bytes: int, stream: FakeStream) -> None:
        def copy() -> None:
            time.sleep(self._cuda.copy_s)
            for source, target, size_bytes in np.frombuffer(_bytes_at(table, 24 * count), np.uint64).reshape(-1, 3):
                assert size_bytes <= most_bytes
                ctypes.memmove(int(target), int(source), int(size_bytes))

        self._cuda.gathered += count
        stream.put(copy)

    def to_host(self, target: int, source: int, size_bytes: int, stream: FakeStream) -> None:
        self._copy(target, source, size_bytes, stream)

    def to_device(self, target: int, source: int, size_bytes: int, stream: FakeStream) -> None:
        self._copy(target, source, size_bytes, stream)

    def _copy(self, target: int, source: int, size_bytes: int, stream: FakeStream) -> None:
        def copy() -> None:
            time.sleep(self._cuda.copy_s)
            ctypes.memmove(target, source, size_bytes)

        stream.put(copy)


class FakeArray:
    """An array in device memory; `values` is what lies there."""

    def __init__(self, values: NDArray[Any], device: int = 0, caller: int = 0) -> None:
        self.values = values
        self.shape = values.shape
        self.device = device
        self.caller = caller


@dataclass
class FakeView:
    array: FakeArray

    def __post_init__(self) -> None:
        self.tokens, self.heads, self.head_size = self.array.values.shape
        self.dtype = _NAMES[str(self.array.values.dtype)]
        self.device = self.array.device


@dataclass(frozen=True)
class FakeJob:
    start: int
    shape: PageShape
    fine_at: int = 0


class FakePlan:
    """Status: whether a page was none, then what could not be encoded, then lengths of each stream of each page, then
    their checksums."""

    def __init__(self, codec: Codec, jobs: Sequence[FakeJob]) -> None:
        self.jobs = tuple(jobs)
        streams = len(codec.stream_names)
        self._checksums_at = 64 + 8 * streams * len(jobs)
        self.status_bytes = self._checksums_at + 8 * streams * len(jobs)
        at = self.status_bytes
        self.spans: list[list[tuple[int, int]]] = [[] for _ in jobs]
        for stream in range(streams):  # first all first streams, as in the plans of lynx_gpu
            for job, spans in zip(jobs, self.spans, strict=True):
                spans.append((at, codec.stream_bytes(job.shape, wide=True)[stream]))
                at += spans[-1][1]
        self.total_bytes = at

    def lengths(self, memory: memoryview) -> list[tuple[int, ...]]:
        status = np.frombuffer(memory, np.int64, self.status_bytes // 8)
        if status[1]:
            raise NonFiniteError(float("nan"), *(int(n) for n in status[2:5]))
        return [tuple(int(n) for n in row) for row in status[8 : self._checksums_at // 8].reshape(len(self.jobs), -1)]

    def checksums(self, memory: memoryview) -> list[list[int]]:
        made = np.frombuffer(memory, np.uint64, (self.status_bytes - self._checksums_at) // 8, self._checksums_at)
        found: list[list[int]] = made.reshape(len(self.jobs), -1).tolist()
        return found

    def check(self, memory: memoryview) -> None:
        if np.frombuffer(memory, np.int64, 1)[0]:
            raise CodecError("the fake kernel says that a page is none")


class FakeCodec:
    def __init__(self, cuda: FakeCuda, codec: Codec, device: int) -> None:
        self._cuda = cuda
        self._device = device
        self.codec = codec

    def plan(self, jobs: Sequence[FakeJob]) -> FakePlan:
        return FakePlan(self.codec, jobs)

    def encode(
        self, view: FakeView, plan: FakePlan, fine: Any, out: int, stream: FakeStream, *, checksums: bool = False
    ) -> None:
        assert view.device == self._device

        self._cuda.batches.append(len(plan.jobs))

        def kernel() -> None:
            time.sleep(self._cuda.kernel_s)
            piece = _bytes_at(out, plan.total_bytes)
            status = np.frombuffer(piece, np.int64, plan.status_bytes // 8)
            status[:] = 0
            rows, of_pages = status[8:].reshape(2, len(plan.jobs), -1)
            for row, summed, job, spans in zip(rows, of_pages.view(np.uint64), plan.jobs, plan.spans, strict=True):
                values = np.array(view.array.values[job.start : job.start + job.shape.tokens])
                self._cuda.encoded.append((self._device, job.start))
                chosen = None if fine is None else fine[job.fine_at : job.fine_at + job.shape.fine]
                outs = [piece[offset : offset + size] for offset, size in spans]
                try:
                    row[:] = self.codec.encode(values, job.shape, outs, chosen)
                except NonFiniteError as error:
                    status[1:5] = 1, error.token, error.head, error.channel
                    continue
                if checksums:
                    self._cuda.summed_pages += 1
                    summed[:] = [
                        xxhash.xxh3_64_intdigest(data[:length]) ^ self._cuda.bad_sums
                        for data, length in zip(outs, row, strict=True)
                    ]

        stream.put(kernel)

    def decode(
        self, plan: FakePlan, hosts: Sequence[Sequence[memoryview]], data: int, view: FakeView, stream: FakeStream
    ) -> int:
        if self._cuda.bad_header:
            raise CodecError("the fake header is bad")
        lengths = [[stream.nbytes for stream in of_page] for of_page in hosts]

        def kernel() -> None:
            time.sleep(self._cuda.kernel_s)
            piece = _bytes_at(data, plan.total_bytes)
            np.frombuffer(piece, np.int64, 1)[0] = self._cuda.bad_pages
            for job, spans, of_page in zip(plan.jobs, plan.spans, lengths, strict=True):
                streams = [piece[at : at + size] for (at, _), size in zip(spans, of_page, strict=False)]
                self.codec.decode(streams, job.shape, view.array.values[job.start : job.start + job.shape.tokens])
                self._cuda.decoded.append((self._device, job.start, len(streams)))

        stream.put(kernel)
        return np.dtype(np.int64).itemsize


@dataclass
class FakeCuda:
    """A `Backend`, with switches for what may go wrong and counts of what was done."""

    devices: int = 2
    kernel_s: float = 0.0
    copy_s: float = 0.0
    bad_header: bool = False
    bad_pages: int = 0
    bad_sums: int = 0
    """Bits that are wrong in the checksums of all encoded streams."""
    summed_pages: int = 0
    without_kernels: tuple[str, ...] = ()
    longest_page: int = 1 << 16
    pinned_bytes: int = 0
    device_bytes: dict[int, int] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    """Pages of each batch that was encoded."""
    encoded: list[tuple[int, int]] = field(default_factory=list)
    decoded: list[tuple[int, int, int]] = field(default_factory=list)
    gathered: int = 0
    fetched: int = 0
    stored: int = 0
    callers: dict[int, FakeStream] = field(default_factory=dict)
    _streams: list[FakeStream] = field(default_factory=list)

    def stream(self) -> FakeStream:
        self._streams.append(FakeStream(self))
        return self._streams[-1]

    def caller(self) -> int:
        """A stream of the application, by number."""
        number = len(self.callers) + 1
        self.callers[number] = self.stream()
        return number

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    # What `lynx_net.serdes.backend.Backend` asks for.

    def is_device_array(self, array: object) -> bool:
        return isinstance(array, FakeArray)

    def view(self, array: FakeArray) -> FakeView:
        return FakeView(array)

    def current_stream(self, array: FakeArray) -> int:
        """Streams are current for a thread, in torch as in CuPy: in others it is the default one."""
        return array.caller if threading.current_thread() is threading.main_thread() else 0

    def runtime(self, device: int) -> FakeRuntime:
        assert device < self.devices
        return FakeRuntime(self, device)

    def has_kernels(self, codec: Codec, shape: PageShape) -> bool:
        return codec.name not in self.without_kernels and shape.tokens <= self.longest_page

    def codec(self, codec: Codec, device: int) -> FakeCodec:
        return FakeCodec(self, codec, device)

    def job(self, start: int, shape: PageShape, fine_at: int = 0) -> FakeJob:
        return FakeJob(start, shape, fine_at)

    def upload(self, numbers: NDArray[np.int32], device: int, stream: FakeStream) -> NDArray[np.int32]:
        return numbers.copy()

    def fetch(self, view: FakeView, start: int, stop: int, stream: FakeStream) -> NDArray[Any]:
        done = threading.Event()
        stream.put(done.set)
        assert done.wait(10)
        self.fetched += 1
        return np.array(view.array.values[start:stop])

    def store(self, view: FakeView, start: int, values: NDArray[Any], stream: FakeStream) -> None:
        self.stored += 1

        def copy() -> None:
            view.array.values[start : start + len(values)] = values

        stream.put(copy)


def _bytes_at(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")
