"""Arrays of other libraries as addresses: nothing is copied, and nothing is imported that the caller has not."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

from lynx_codec import CodecError
from lynx_gpu.modules import cupy

__all__ = ["ITEM_BYTES", "DeviceView", "Layout", "current_stream", "device_view", "is_device_array", "paged_view"]

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Element types of pages. uint16 arrays hold the bits of bfloat16."""

Layout = Literal["b2thd", "2bthd", "bthd"]
"""Axes of a paged cache: block, keys and values, token, head, position in the head."""

_DTYPES = {"uint16": "bfloat16", **{name: name for name in ITEM_BYTES}}


@dataclass(frozen=True, slots=True)
class DeviceView:
    """Keys or values of one layer in device memory, [tokens, heads, head_size], perhaps in blocks that a table names.

    Attributes:
        pointer: address of the first element (of block 0).
        dtype: "float32", "float16" or "bfloat16".
        token_stride, head_stride: in elements; elements of a head lie one behind the other.
        device: number of the device.
        block_tokens: tokens of a block; 0 if the array is not paged.
        block_stride: elements from one block to the next.
        block_table: int32 CuPy array; logical block to block in memory. It is read when kernels run.
        owner: keeps the memory alive.
    """

    pointer: int
    dtype: str
    tokens: int
    heads: int
    head_size: int
    token_stride: int
    head_stride: int
    device: int
    block_tokens: int = 0
    block_stride: int = 0
    block_table: Any = None
    owner: Any = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(tokens, heads, head_size)."""
        return (self.tokens, self.heads, self.head_size)

    @property
    def aligned(self) -> bool:
        """Four neighbouring elements at a multiple of four can be read at once."""
        return self._begin_at(4 * ITEM_BYTES[self.dtype])

    @property
    def in_units(self) -> bool:
        """Heads of all tokens begin at multiples of 16 bytes."""
        return self._begin_at(16)

    def _begin_at(self, unit_bytes: int) -> bool:
        strides = (self.token_stride, self.head_stride, self.block_stride, self.head_size)
        item = ITEM_BYTES[self.dtype]
        return self.pointer % unit_bytes == 0 and all(stride * item % unit_bytes == 0 for stride in strides)


@dataclass(frozen=True, slots=True)
class _Array:
    """What there is to know of an array in device memory; strides in elements."""

    pointer: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int


def is_device_array(array: object) -> bool:
    """Whether `device_view` or `paged_view` would take it: in CUDA memory, by whatever library."""
    if isinstance(array, DeviceView):
        return True
    if _is_torch(array):
        return bool(array.is_cuda)  # type: ignore[attr-defined]
    if hasattr(array, "__cuda_array_interface__"):
        return True
    dlpack_device = getattr(array, "__dlpack_device__", None)
    return dlpack_device is not None and int(dlpack_device()[0]) in (2, 13)  # kDLCUDA, kDLCUDAManaged


def device_view(array: Any, *, dtype: str | None = None) -> DeviceView:
    """The view of [tokens, heads, head_size] of a torch tensor, CuPy array, or whatever speaks
    `__cuda_array_interface__` or DLPack. Nothing is copied; the view keeps the array alive.

    Args:
        array: float32, float16, bfloat16, or uint16, which holds the bits of bfloat16. A view is returned as it is.
        dtype: to read 16-bit elements as, where the array's own type does not say it.

    Raises:
        CodecError: another shape or type, heads that do not lie in one piece, or not in device memory.
        BackendMissingError: CuPy is not installed.
    """
    if isinstance(array, DeviceView):
        return array
    found = _array_of(array, dtype)
    if len(found.shape) != 3:
        raise CodecError(f"a device array of shape {found.shape}, needed is [tokens, heads, head_size]")
    tokens, heads, head_size = found.shape
    token_stride, head_stride, stride = found.strides
    _check_last(stride, head_size)
    return DeviceView(
        found.pointer, found.dtype, tokens, heads, head_size, token_stride, head_stride, found.device, owner=array
    )


def paged_view(
    cache: Any,
    kind: Literal["key", "value"],
    block_table: Any,
    tokens: int,
    *,
    layout: Layout,
    dtype: str | None = None,
) -> DeviceView:
    """The view of one request's keys or values in a paged cache.

    Args:
        cache: the whole cache of a layer, in device memory: [block, 2, tokens, heads, size] ("b2thd"),
            [2, block, tokens, heads, size] ("2bthd"), or keys or values alone, [block, tokens, heads, size] ("bthd").
        kind: keys are the first of two.
        block_table: blocks of this request in order: whole numbers on the host, or an int32 array on the cache's
            device, whose numbers are trusted.
        tokens: of the request; the last block may not be full.

    Raises:
        CodecError: another shape or type, a table that is too short, or a block that the cache has not.
    """
    found = _array_of(cache, dtype)
    axes = {"b2thd": (0, 2, 3, 4), "2bthd": (1, 2, 3, 4), "bthd": (0, 1, 2, 3)}.get(layout)
    if axes is None:
        raise CodecError(f"unknown layout {layout!r}; known are b2thd, 2bthd and bthd")
    both = len(layout) - 4
    if len(found.shape) != len(layout) or (both and found.shape[layout.index("2")] != 2):
        raise CodecError(f"a paged cache of shape {found.shape} is not laid out as {layout}")
    if kind not in ("key", "value"):
        raise CodecError(f"kind must be 'key' or 'value', not {kind!r}")
    blocks, block_tokens, heads, head_size = (found.shape[axis] for axis in axes)
    block_stride, token_stride, head_stride, stride = (found.strides[axis] for axis in axes)
    _check_last(stride, head_size)
    offset = found.strides[layout.index("2")] if both and kind == "value" else 0
    with cupy().cuda.Device(found.device):
        if is_device_array(block_table):
            table = cupy().asarray(block_table)
            if table.dtype != cupy().int32 or table.ndim != 1 or not table.flags.c_contiguous:
                raise CodecError("a block table in device memory must be one row of int32 in one piece")
        else:
            numbers = [int(block) for block in block_table]
            if any(not 0 <= block < blocks for block in numbers):
                raise CodecError(f"the block table names a block outside 0 to {blocks - 1}")
            table = cupy().array(numbers, dtype=cupy().int32)
    if tokens < 0 or len(table) * block_tokens < tokens:
        raise CodecError(f"{tokens} tokens do not fit into {len(table)} blocks of {block_tokens}")
    return DeviceView(
        pointer=found.pointer + offset * ITEM_BYTES[found.dtype],
        dtype=found.dtype,
        tokens=tokens,
        heads=heads,
        head_size=head_size,
        token_stride=token_stride,
        head_stride=head_stride,
        device=found.device,
        block_tokens=block_tokens,
        block_stride=block_stride,
        block_table=table,
        owner=cache,
    )


def current_stream(array: Any) -> int:
    """The stream on which the owner of the array works now, a `cudaStream_t`: what is read must wait for it."""
    if isinstance(array, DeviceView):
        return 0 if array.owner is None else current_stream(array.owner)
    if _is_torch(array):
        return int(sys.modules["torch"].cuda.current_stream(array.device).cuda_stream)
    if type(array).__module__.partition(".")[0] == "cupy":
        with array.device:
            return int(cupy().cuda.get_current_stream().ptr)
    interface = getattr(array, "__cuda_array_interface__", {})
    return int(interface.get("stream") or 0)


def _is_torch(array: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _array_of(array: Any, dtype: str | None) -> _Array:
    if not is_device_array(array):
        raise CodecError(f"{type(array).__name__} is no array in CUDA memory")
    if _is_torch(array):
        name = str(array.dtype).removeprefix("torch.")
        found = (array.data_ptr(), tuple(array.shape), tuple(array.stride()), array.device.index)
    else:
        if not hasattr(array, "__cuda_array_interface__"):
            array = cupy().from_dlpack(array)
        interface = array.__cuda_array_interface__
        name = _type_name(interface["typestr"])
        shape = tuple(interface["shape"])
        item = int(interface["typestr"][2:])
        strides = interface.get("strides")
        if strides is None:
            elements = _contiguous(shape)
        elif any(stride % item for stride in strides):
            raise CodecError("a device array whose strides are no whole elements")
        else:
            elements = tuple(stride // item for stride in strides)
        pointer = int(interface["data"][0])
        device = cupy().cuda.runtime.pointerGetAttributes(pointer).device if pointer else 0
        found = (pointer, shape, elements, device)
    wanted = dtype or _DTYPES.get(name)
    if wanted not in ITEM_BYTES or (dtype and ITEM_BYTES[wanted] != ITEM_BYTES.get(_DTYPES.get(name, ""), 0)):
        raise CodecError(f"device arrays must be {', '.join(ITEM_BYTES)} or uint16 (bfloat16 bits), not {name}")
    pointer, shape, strides, device = found
    return _Array(pointer, wanted, shape, strides, device)


def _type_name(typestr: str) -> str:
    return {"<f4": "float32", "<f2": "float16", "<u2": "uint16"}.get(typestr, typestr)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def _check_last(stride: int, head_size: int) -> None:
    if stride != 1 and head_size > 1:
        raise CodecError(f"elements of a head must lie one behind the other in device memory, not {stride} apart")
