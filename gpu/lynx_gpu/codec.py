"""The codecs on a device: batches of pages to streams and back, enqueued on a stream, waiting for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_codec import CodecError, PageShape
from lynx_codec.codecs import AffineCodec, Bfloat16Codec, LynxCodec, PageCodec
from lynx_codec.nested import NestedCodec
from lynx_gpu.driver import driver, launch
from lynx_gpu.exact import MAX_EXACT_VALUES, check_exact, decode_exact, decode_scratch, encode_exact, encode_scratch
from lynx_gpu.modules import cupy, kernel
from lynx_gpu.plan import FLAGS, LANE_CHANNELS, STATUS, BatchPlan, PageJob, padded, tiles_of
from lynx_gpu.variants import (
    WARP_LANES,
    block_of_warps,
    codec_defines,
    decoder_stages,
    fields_bytes_of,
    search_table,
    view_defines,
)
from lynx_gpu.views import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from lynx_codec import Codec
    from lynx_gpu.exact import Launch
    from lynx_gpu.views import DeviceView

__all__ = ["DeviceCodec", "has_kernels"]

_BLOCK_THREADS = 256

_WIDE_BLOCKS = 256
"""That look for pages that need 16-bit fields."""

_MAX_FIELDS_BYTES = 160 * 1024
"""Of a block: limits the chunks of a page that the encoder can hold."""

_CHECKSUM_THREADS = 288
"""That make the checksum of a stream."""

_MAX_PAGES = 65535
"""Of a batch: they are one axis of a grid."""

_MAX_BATCH_BYTES = 1 << 32
"""Of streams of codes: kernels know later rows of a page by 32-bit offsets from its first."""

_NOWHERE = np.uint64(0)
"""Address of a table that the codec has not."""


def has_kernels(codec: Codec, shape: PageShape | None = None) -> bool:
    """Whether `DeviceCodec` takes the codec, and pages of this shape.

    Composite codecs and those of other systems have no kernels; pages of very many chunks are too long for them.
    """
    if type(codec) not in (LynxCodec, AffineCodec, Bfloat16Codec, NestedCodec):
        return False
    assert isinstance(codec, PageCodec)
    if shape is None:
        return True
    too_large = bool(codec.variable_streams) and shape.coded_tokens * shape.channels > MAX_EXACT_VALUES
    return not too_large and fields_bytes_of(codec, shape) <= _MAX_FIELDS_BYTES


@dataclass(slots=True)
class _Function:
    """A kernel, and how much memory its blocks may share: to ask CuPy for that lets go of the interpreter lock."""

    kernel: Any
    most_shared_bytes: int


class DeviceCodec:
    """A codec on one device. Its bytes and floats are those of `codec`, bit for bit.

    Pages may be of any number of heads, any head size and any strides, float32, float16 or bfloat16. Kernels are
    compiled for a shape of heads and an element type when these are first met, and kept on disk by CuPy.

    Raises:
        CodecError: there are no kernels for the codec (`has_kernels`).
        BackendMissingError: CuPy is not installed.
    """

    def __init__(self, codec: Codec, device: int) -> None:
        if not has_kernels(codec):
            raise CodecError(f"there are no CUDA kernels for the codec {codec.name} with {codec.params()}")
        assert isinstance(codec, PageCodec)
        self.codec = codec
        self.device = device
        self._plan = lru_cache(maxsize=64)(self._make_plan)
        self._raw = isinstance(codec, Bfloat16Codec)
        self._constants: dict[str, tuple[np.uint64, Any]] = {}
        """Addresses of small tables on the device, and what keeps them."""
        self._functions: dict[tuple[Any, ...], _Function] = {}
        """By name, shape of heads and streams: the macros of a codec, all in one key, take longer than a launch."""
        # Small tables are uploaded here: nobody else's work is waited for.
        with cupy().cuda.Device(device) as chosen:
            self._shared_limit = int(chosen.attributes["MaxSharedMemoryPerBlockOptin"])
            self._multiprocessor_bytes = int(chosen.attributes["MaxSharedMemoryPerMultiprocessor"])
            self._uploads = cupy().cuda.Stream(non_blocking=True)

    def plan(self, jobs: Sequence[PageJob]) -> BatchPlan:
        """Where the streams of these pages lie in one piece of memory. Kept for equal jobs.

        Raises:
            CodecError: no page, too many, one that is too long for the kernels, or more than 4 GiB of codes.
        """
        return self._plan(tuple(jobs))

    def encode(
        self, view: DeviceView, plan: BatchPlan, fine: Any, out: int, stream: Any, *, checksums: bool = False
    ) -> None:
        """Enqueue the encoding of the plan's pages.

        Args:
            view: read when the kernels run, once for pages of up to 256 tokens.
            fine: int32 CuPy array, the positions of fine tokens in their pages, into which each job's `fine_at` points;
                None if no page has any.
            out: address of `plan.total_bytes` of device memory, a multiple of 256. Status is written first; what of
                it the host needs is in `plan.lengths`.
            stream: a CuPy stream of this device.
            checksums: make those of the streams, too, for `plan.checksums`.

        Buffers must stay as they are until the stream has done this; nothing is known of it before.
        """
        self._check(view, plan)
        if self.codec.variable_streams and view.dtype == "float32":
            raise CodecError("nested: an exact stream is for float16 and bfloat16 pages, not for float32")
        if fine is None and any(shape.fine for shape in plan.shapes) and len(self.codec.row_bits) > 1:
            raise CodecError("pages with fine tokens are encoded, but their positions are not given")
        common = self._common(view, plan)
        with self._current():
            if self._raw:
                self._zero(out, plan.checksums_at, stream)
                arguments = (*common, self._header(), np.uint64(out), np.uint64(out))
                self._launch(stream, "raw.cu", "encode_raw", view, self._raw_grid(view, plan), 0, arguments)
            else:
                self._encode_codes(view, plan, common, fine, out, stream)
            if checksums:
                self._make_checksums(plan, out, stream)

    def _encode_codes(
        self, view: DeviceView, plan: BatchPlan, common: tuple[Any, ...], fine: Any, out: int, stream: Any
    ) -> None:
        positions, at, blocks = map(np.uint64, (0 if fine is None else fine.data.ptr, out, out + plan.blocks_at))
        arguments = (*common, positions, self._header(), self._cells(), at, blocks, np.int32(view.in_units))
        fields = max(fields_bytes_of(self.codec, shape) for shape in plan.shapes)
        warps, shared = block_of_warps(ITEM_BYTES[view.dtype], fields, self._shared_limit)
        more, threads, pages = ("WARPS", warps), warps * WARP_LANES, len(plan.jobs)
        launch_encoder = partial(self._launch, stream, "encode.cu", threads=threads)
        launch_encoder("encode_pages", view, (tiles_of(plan.jobs[0].shape), pages), shared, arguments, more)
        again = (*arguments, at, np.int32(pages))
        launch_encoder("encode_wide_pages", view, (min(pages, _WIDE_BLOCKS),), shared, again, more)
        if self.codec.variable_streams:
            scratch = self._scratch(len(plan.jobs) * encode_scratch(plan), stream)
            encode_exact(self._exact_launch(view, stream), plan, common, out, scratch.data.ptr)

    def _make_checksums(self, plan: BatchPlan, out: int, stream: Any) -> None:
        lengths = self._kept(plan.lengths_on_device, plan.lengths_table)
        at = np.uint64(out)
        arguments = (self._kept(plan.on_device, plan.table), lengths, at, at, np.uint64(out + plan.checksums_at))
        function = kernel(self.device, "checksum.cu", "sum_streams", ())
        grid = len(plan.jobs), len(self.codec.stream_names)
        launch(self.device, function, grid, _CHECKSUM_THREADS, 0, arguments, stream)

    def decode(
        self, plan: BatchPlan, hosts: Sequence[Sequence[memoryview]], data: int, view: DeviceView, stream: Any
    ) -> int:
        """Enqueue the decoding of the plan's pages into the view, in place: `check`, then `decode_checked`.

        Returns:
            Bytes of status, as `decode_checked` does.

        Raises:
            CodecError: the bytes are no pages of this codec and these shapes; nothing was enqueued.
        """
        known = self.check(plan, hosts)
        exact_bytes = [len(streams[-1]) for streams in hosts]
        return self.decode_checked(plan, known, data, view, stream, exact_bytes=exact_bytes)

    def check(self, plan: BatchPlan, hosts: Sequence[Sequence[memoryview]]) -> int:
        """What the host can check of received pages: lengths, headers, positions of fine tokens.

        Args:
            hosts: for every page the first streams, as many for all, in host memory.

        Returns:
            How many streams of each page there are.

        Raises:
            CodecError: the bytes are no pages of this codec and these shapes.
        """
        known = len(hosts[0])
        if len(hosts) != len(plan.jobs) or {*map(len, hosts)} != {known}:
            raise CodecError("the same number of streams of every page is needed")
        exact = known - 1 in self.codec.variable_streams
        for page in range(len(hosts)) if exact else self._unlike(plan, hosts):
            self.codec.check_streams(hosts[page], plan.jobs[page].shape)
            if exact:
                check_exact(hosts[page][-1], plan.jobs[page].shape)
        return known

    def _unlike(self, plan: BatchPlan, hosts: Sequence[Sequence[memoryview]]) -> list[int]:
        """Pages that must be looked at one by one: one of many that have the same shape, header and lengths, and those
        with fine tokens, whose positions may be anything."""
        plain = plan.plain
        if not plain:
            return list(range(len(hosts)))
        header_bytes = self.codec.header_bytes
        headers = {hosts[page][0][:header_bytes].tobytes() for page in plain}
        lengths = {tuple(map(len, hosts[page])) for page in plain}
        if len(headers) == len(lengths) == 1:
            return [plain[0], *plan.others]
        return list(range(len(hosts)))

    def decode_checked(
        self,
        plan: BatchPlan,
        known: int,
        data: int,
        view: DeviceView,
        stream: Any,
        *,
        exact_bytes: Sequence[int] = (),
    ) -> int:
        """Enqueue the decoding of bytes that `check` has seen.

        Args:
            known: streams of each page.
            data: address, a multiple of 256, of device memory where these bytes lie at `plan.spans`. Status is written
                to its beginning.
            view: written when the kernels run.
            stream: a CuPy stream of this device.
            exact_bytes: length of the last stream of each page, if that is the exact one.

        Returns:
            Bytes of status: copy so many of `data` to the host behind this, and give them to `plan.check`.
        """
        self._check(view, plan)
        common = self._common(view, plan)
        exact = known - 1 in self.codec.variable_streams
        by_page = self._raw or exact
        status_bytes = len(plan.jobs) * STATUS.itemsize if by_page else FLAGS.itemsize * prod(plan.decoder_grid)
        tail = (np.uint64(data), np.uint64(data))
        with self._current():
            if by_page:
                self._zero(data, status_bytes, stream)
            if self._raw:
                self._launch(stream, "raw.cu", "decode_raw", view, self._raw_grid(view, plan), 0, (*common, *tail))
            elif exact:
                scratch = self._scratch(len(plan.jobs) * decode_scratch(plan), stream)
                decode_exact(self._exact_launch(view, stream), plan, exact_bytes, common, data, scratch.data.ptr)
            else:
                arguments = (*common, self._full(), *tail)
                stages, shared = decoder_stages(
                    self.codec.row_bits[:known], self.codec.chunk_tokens, self._multiprocessor_bytes
                )
                more = ("KNOWN", known), ("STAGES", stages)
                self._launch(stream, "decode.cu", "decode_pages", view, plan.decoder_grid, shared, arguments, *more)
        return status_bytes

    def _make_plan(self, jobs: tuple[PageJob, ...]) -> BatchPlan:
        if not 1 <= len(jobs) <= _MAX_PAGES:
            raise CodecError(f"a batch has 1 to {_MAX_PAGES} pages, not {len(jobs)}")
        for job in jobs:
            if not has_kernels(self.codec, job.shape):
                raise CodecError(f"a page of {job.shape.tokens} tokens is too long for the CUDA kernels")
        plan = BatchPlan.of(self.codec, jobs)
        if self.codec.row_bits and plan.total_bytes > _MAX_BATCH_BYTES:
            raise CodecError(f"a batch of {plan.total_bytes} bytes is too large for the CUDA kernels: 4 GiB are most")
        return plan

    def _check(self, view: DeviceView, plan: BatchPlan) -> None:
        if view.device != self.device:
            raise CodecError(f"an array on device {view.device} is given to the codec of device {self.device}")
        if plan.codec is not self.codec:
            raise CodecError("the plan is that of another codec")
        for shape in plan.shapes:
            if (shape.heads, shape.head_size) != (view.heads, view.head_size):
                raise CodecError(f"pages of {shape.heads} x {shape.head_size} in an array of shape {view.shape}")
        if plan.tokens.start < 0 or plan.tokens.stop > view.tokens:
            raise CodecError(
                f"pages of tokens {plan.tokens.start} to {plan.tokens.stop} in an array of shape {view.shape}"
            )

    def _common(self, view: DeviceView, plan: BatchPlan) -> tuple[Any, ...]:
        """What all kernels are told."""
        table = view.block_table
        return (
            np.uint64(view.pointer),
            *(np.int64(stride) for stride in (view.token_stride, view.head_stride, view.block_stride)),
            np.uint64(0 if table is None else table.data.ptr),
            np.int32(view.block_tokens),
            self._kept(plan.on_device, plan.table),
        )

    def _kept(self, kept: dict[int, Any], table: np.ndarray[Any, Any]) -> np.uint64:
        """Address of a table of a plan on this device, where it is kept with the plan."""
        if self.device not in kept:
            kept[self.device] = self._upload(table.view(np.uint8))
        return np.uint64(kept[self.device].data.ptr)

    def _current(self) -> AbstractContextManager[Any]:
        calls = driver(self.device)
        return cupy().cuda.Device(self.device) if calls is None else calls.current

    def _zero(self, target: int, size_bytes: int, stream: Any) -> None:
        calls = driver(self.device)
        if calls is None:
            cupy().cuda.runtime.memsetAsync(target, 0, size_bytes, stream.ptr)
        else:
            calls.zero(target, size_bytes, stream.ptr)

    def _scratch(self, size_bytes: int, stream: Any) -> Any:
        """Memory of the pool, which is the stream's to use until it is given to it again."""
        with stream:
            return cupy().empty(size_bytes, np.uint8)

    def _launch(
        self,
        stream: Any,
        file: str,
        name: str,
        view: DeviceView,
        grid: tuple[int, ...],
        shared_bytes: int,
        arguments: tuple[Any, ...],
        *more: tuple[str, int],
        threads: int = _BLOCK_THREADS,
    ) -> None:
        defines = view_defines(view)
        found = self._functions.get((name, defines, more))
        if found is None:
            function = kernel(self.device, file, name, (*defines, *codec_defines(self.codec), *more))
            found = _Function(function, function.max_dynamic_shared_size_bytes)
            self._functions[name, defines, more] = found
        if shared_bytes > found.most_shared_bytes:
            found.kernel.max_dynamic_shared_size_bytes = found.most_shared_bytes = shared_bytes
        launch(self.device, found.kernel, grid, threads, shared_bytes, arguments, stream)

    def _exact_launch(self, view: DeviceView, stream: Any) -> Launch:
        def launch(
            file: str, name: str, grid: tuple[int, int], threads: int, shared_bytes: int, arguments: tuple[Any, ...]
        ) -> None:
            self._launch(stream, file, name, view, grid, shared_bytes, arguments, threads=threads)

        return launch

    def _raw_grid(self, view: DeviceView, plan: BatchPlan) -> tuple[int, int]:
        tokens = max(shape.tokens for shape in plan.shapes)
        groups = tokens * view.heads * padded(view.head_size) // LANE_CHANNELS
        return max(-(-groups // _BLOCK_THREADS), 1), len(plan.jobs)

    def _header(self) -> np.uint64:
        return self._constant("header", lambda: np.frombuffer(self.codec.header(PageShape(0, 1, 1)), np.uint8))

    def _cells(self) -> np.uint64:
        codec = self.codec
        if not isinstance(codec, LynxCodec):
            return _NOWHERE
        # Four times each entry: what a thread of the encoder reads and writes at once.
        return self._constant("cells", lambda: search_table(codec).repeat(4))

    def _full(self) -> np.uint64:
        codec = self.codec
        return self._constant("full", lambda: codec.tables.full) if isinstance(codec, LynxCodec) else _NOWHERE

    def _constant(self, name: str, make: Callable[[], np.ndarray[Any, Any]]) -> np.uint64:
        """Address of a table, which is made when it is first needed."""
        found = self._constants.get(name)
        if found is None:
            copy = self._upload(np.ascontiguousarray(make()).view(np.uint8))
            found = self._constants[name] = np.uint64(copy.data.ptr), copy
        return found[0]

    def _upload(self, values: np.ndarray[Any, Any]) -> Any:
        """A copy on the device that is there when this returns."""
        with cupy().cuda.Device(self.device), self._uploads:
            copy = cupy().empty(values.shape, values.dtype)
            copy.set(values, stream=self._uploads)
            self._uploads.synchronize()
        return copy
