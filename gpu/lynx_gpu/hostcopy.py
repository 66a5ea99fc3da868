"""Tokens of a view copied to host memory and back, for codecs that have no kernels."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lynx_gpu.views import DeviceView

__all__ = ["fetch", "store", "upload"]

_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def upload(numbers: NDArray[np.int32], device: int, stream: Any) -> Any:
    """The numbers as a CuPy array of the device; there when this returns."""
    cupy = import_module("cupy")
    with cupy.cuda.Device(device), stream:
        array = cupy.asarray(numbers)
        stream.synchronize()
    return array


def fetch(view: DeviceView, start: int, stop: int, stream: Any) -> NDArray[Any]:
    """Tokens `start` to `stop` as an array [tokens, heads, head_size]; there when this returns.

    bfloat16 comes as uint16 that holds its bits.
    """
    cupy = import_module("cupy")
    with cupy.cuda.Device(view.device), stream:
        memory, rows = _memory(cupy, view, start, stop)
        array: NDArray[Any] = cupy.asnumpy(memory[rows], stream=stream)
    return array


def store(view: DeviceView, start: int, values: NDArray[Any], stream: Any) -> None:
    """Write an array [tokens, heads, head_size] of the view's dtype to the tokens from `start` on, on the stream."""
    cupy = import_module("cupy")
    with cupy.cuda.Device(view.device), stream:
        memory, rows = _memory(cupy, view, start, start + len(values))
        memory[rows] = cupy.asarray(values)
        stream.synchronize()  # the pool may hand out the copy's memory again when this returns


def _memory(cupy: Any, view: DeviceView, start: int, stop: int) -> tuple[Any, Any]:
    """All memory of the view as an array [..., heads, size], and the index of these tokens in it."""
    dtype = np.dtype(_DTYPES[view.dtype])
    if view.block_tokens:
        blocks = int(view.block_table.max()) + 1
        shape: tuple[int, ...] = (blocks, view.block_tokens, view.heads, view.head_size)
        strides: tuple[int, ...] = (view.block_stride, view.token_stride, view.head_stride, 1)
        tokens = cupy.arange(start, stop)
        rows: Any = (view.block_table[tokens // view.block_tokens], tokens % view.block_tokens)
    else:
        shape = (view.tokens, view.heads, view.head_size)
        strides = (view.token_stride, view.head_stride, 1)
        rows = slice(start, stop)
    size = (sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1) * dtype.itemsize
    owner = cupy.cuda.UnownedMemory(view.pointer, size, view.owner, view.device)
    pointer = cupy.cuda.MemoryPointer(owner, 0)
    return cupy.ndarray(shape, dtype, pointer, [stride * dtype.itemsize for stride in strides]), rows
