"""Where a received cache goes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from lynx_net.errors import BackendMissingError, LocalProtocolError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from lynx_net.wire.layout import CacheLayout, Kind

__all__ = ["DeviceCache", "HostCache", "KVTarget"]


class KVTarget(Protocol):
    """Memory that a transfer is decoded into, in place: first from anchors, then refined, layer by layer."""

    def view(self, layer: int, kind: Kind) -> Any:
        """The writable keys or values of a layer: [tokens, heads, size], any strides.

        A numpy array of float32, float16 or uint16 (bfloat16 bits); or device memory of these types: an array of torch
        or CuPy, what has the CUDA array interface or DLPack, or a `lynx_gpu.DeviceView`. Called once per layer and kind
        when the transfer is offered. A decoder thread, or its device, writes to the array until the transfer has
        ended (`await transfer.closed()`).
        """
        ...


class DeviceCache:
    """A cache in the memory of a CUDA device, zero until something is decoded into it.

    Args:
        layout: of the cache.
        dtype: "float32", "float16" or "bfloat16"; that of the layout by default. CuPy has no bfloat16: its arrays
            are uint16 and hold the bits.
        device: number of the device.
        library: whose arrays `view` gives.

    Raises:
        BackendMissingError: the library is not installed.
    """

    def __init__(
        self,
        layout: CacheLayout,
        dtype: str | None = None,
        *,
        device: int = 0,
        library: Literal["cupy", "torch"] = "cupy",
    ) -> None:
        self.layout = layout
        self.dtype = dtype or layout.dtype
        if self.dtype not in ("float32", "float16", "bfloat16"):
            raise LocalProtocolError(f"cache dtype must be float32, float16 or bfloat16, not {self.dtype!r}")
        if library not in ("cupy", "torch"):
            raise LocalProtocolError(f"library must be cupy or torch, not {library!r}")
        try:
            module: Any = import_module(library)
        except ImportError as error:
            raise BackendMissingError(f"{library}, which holds the cache,", _EXTRAS[library]) from error
        make = _cupy_zeros if library == "cupy" else _torch_zeros
        self._arrays = {
            (layer, kind): make(module, layout.array_shape(kind), self.dtype, device)
            for layer in range(layout.layers)
            for kind in layout.kinds
        }

    def view(self, layer: int, kind: Kind) -> Any:
        """The array [tokens, heads, size] of a layer's keys or values, not a copy."""
        return self._arrays[layer, kind]


_EXTRAS = {"cupy": "gpu", "torch": "torch"}


def _cupy_zeros(cupy: Any, shape: tuple[int, ...], dtype: str, device: int) -> Any:
    with cupy.cuda.Device(device):
        return cupy.zeros(shape, "uint16" if dtype == "bfloat16" else dtype)


def _torch_zeros(torch: Any, shape: tuple[int, ...], dtype: str, device: int) -> Any:
    return torch.zeros(shape, dtype=getattr(torch, dtype), device=f"cuda:{device}")


class HostCache:
    """A cache in plain numpy arrays, zero until something is decoded into it."""

    def __init__(self, layout: CacheLayout, dtype: DTypeLike = np.float32) -> None:
        self.layout = layout
        self._arrays = {
            (layer, kind): np.zeros(layout.array_shape(kind), dtype)
            for layer in range(layout.layers)
            for kind in layout.kinds
        }

    def view(self, layer: int, kind: Kind) -> NDArray[Any]:
        """The array [tokens, heads, size] of a layer's keys or values, not a copy."""
        return self._arrays[layer, kind]
