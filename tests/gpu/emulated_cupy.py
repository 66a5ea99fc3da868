"""As much of CuPy as lynx_gpu uses, on the CPU: kernels run in the emulator, "device memory" is numpy's."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import numpy as np
from cuda_emulator import Library, compile_text

from lynx_gpu import modules

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["EmulatedArray", "emulated_cupy"]

_GUARD_BYTES = 256
_GUARD = 0xC7
STATIC_SHARED_BYTES = 48 << 10
"""Dynamic shared memory that a kernel may have without asking for more."""


class EmulatedArray:
    """An array in "device memory", with guards at both ends."""

    def __init__(self, values: np.ndarray) -> None:
        self._whole = np.full(values.nbytes + 2 * _GUARD_BYTES + 256, _GUARD, np.uint8)
        first = -self._whole.ctypes.data % 256 + _GUARD_BYTES
        self._first, self._stop = first, first + values.nbytes
        self.host = self._whole[first : self._stop].view(values.dtype).reshape(values.shape)
        self.host[...] = values
        self.shape, self.dtype, self.ndim = values.shape, values.dtype, values.ndim
        self.data = SimpleNamespace(ptr=self.host.ctypes.data)
        self.flags = SimpleNamespace(c_contiguous=True)
        self.device = SimpleNamespace(id=0)
        strides = None
        self.__cuda_array_interface__ = {
            "shape": values.shape,
            "typestr": values.dtype.str,
            "data": (self.data.ptr, False),
            "strides": strides,
            "version": 3,
        }

    def __len__(self) -> int:
        return int(self.shape[0])

    def get(self) -> np.ndarray:
        """A host copy; all that kernels wrote beside the array is found here."""
        assert np.all(self._whole[: self._first] == _GUARD), "a kernel wrote before the array"
        assert np.all(self._whole[self._stop :] == _GUARD), "a kernel wrote behind the array"
        return self.host.copy()

    def set(self, values: np.ndarray, stream: object = None) -> None:
        """Copy from the host."""
        self.host[...] = values


def _array(values: Any, dtype: Any = None) -> EmulatedArray:
    return values if isinstance(values, EmulatedArray) else EmulatedArray(np.ascontiguousarray(values, dtype=dtype))


class _Context:
    """A device or stream: nothing to wait for here."""

    ptr = 0
    compute_capability = "90"
    attributes: ClassVar = {
        "MaxSharedMemoryPerBlockOptin": 227 << 10,
        "MaxSharedMemoryPerMultiprocessor": 228 << 10,
    }

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self) -> _Context:
        return self

    def __exit__(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...


class _Event(_Context):
    done = True


class _Pinned:
    def __init__(self, size_bytes: int, flags: int) -> None:
        self._memory = np.empty(size_bytes + 256, np.uint8)
        self.ptr = self._memory.ctypes.data + -self._memory.ctypes.data % 256


class _Function:
    def __init__(self, library: Library, name: str, order: int) -> None:
        self.max_dynamic_shared_size_bytes = STATIC_SHARED_BYTES
        self._library, self._name, self._order = library, name, order

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0) -> None:
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        told = [np.uint64(a.data.ptr) if isinstance(a, EmulatedArray) else a for a in args]
        self._library.launch(self._name, grid, block, told, shared_bytes=shared_mem, order=self._order)


def _compile(text: str, options: Sequence[str], arch: None, name: str) -> tuple[bytes, None]:
    """ "Machine code": all that a compiler is told. It is compiled where it is loaded."""
    return json.dumps([text, *options]).encode(), None


@lru_cache(maxsize=64)
def _library(code: str) -> Library:
    text, *options = json.loads(code)
    return compile_text(text, dict(option[2:].split("=", 1) for option in options if option.startswith("-D")))


@contextmanager
def emulated_cupy(order: int = 0) -> Iterator[Any]:
    """`import cupy` gives this within the context; threads run in the emulator's `order`."""
    module: Any = ModuleType("cupy")
    module.uint8, module.int32 = np.uint8, np.int32
    module.asarray = module.array = _array
    module.empty = lambda shape, dtype: EmulatedArray(np.full(shape, 0xA5, np.uint8).astype(dtype))
    module.full = lambda shape, value, dtype: EmulatedArray(np.full(shape, value, dtype))
    module.RawModule = lambda *, path: SimpleNamespace(
        get_function=lambda name: _Function(_library(Path(path).read_text()), name, order)
    )
    module.cuda = SimpleNamespace(
        Device=_Context,
        Stream=_Context,
        get_current_stream=_Context,
        nvrtc=SimpleNamespace(getVersion=lambda: ("emulator",)),
        compiler=SimpleNamespace(compile_using_nvrtc=_compile),
        Event=_Event,
        PinnedMemory=_Pinned,
        runtime=SimpleNamespace(
            hostAllocPortable=1,
            eventRecord=lambda *_: None,
            memsetAsync=lambda at, value, size, stream: ctypes.memset(at, value, size),
            getDeviceCount=lambda: 1,
            pointerGetAttributes=lambda pointer: SimpleNamespace(device=0),
            CUDARuntimeError=RuntimeError,
        ),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"LYNX_NET_CACHE": folder}),
        mock.patch.dict(sys.modules, {"cupy": module}),
    ):
        _forget()
        try:
            yield module
        finally:
            _forget()


def _forget() -> None:
    modules.kernel.cache_clear()
    modules._module.cache_clear()
