"""All that serdes asks of `lynx_gpu`, imported when the first device array is met."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from lynx_net.errors import BackendMissingError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lynx_codec import Codec, PageShape
    from lynx_gpu.codec import DeviceCodec
    from lynx_gpu.events import Runtime
    from lynx_gpu.plan import PageJob
    from lynx_gpu.views import DeviceView

__all__ = ["Backend", "CudaBackend"]


class Backend(Protocol):
    """What there is to know and to do about device memory."""

    def is_device_array(self, array: object) -> bool:
        """Whether it is memory of a device: an array of any library, or a `DeviceView`."""
        ...

    def view(self, array: Any) -> DeviceView:
        """The array as a view; no copy."""
        ...

    def current_stream(self, array: Any) -> int:
        """The stream (cudaStream_t) on which whoever made the array works now."""
        ...

    def runtime(self, device: int) -> Runtime:
        """The device with this number."""
        ...

    def has_kernels(self, codec: Codec, shape: PageShape) -> bool:
        """Whether pages of the codec and of this shape can be coded on a device."""
        ...

    def codec(self, codec: Codec, device: int) -> DeviceCodec:
        """The codec on a device."""
        ...

    def job(self, start: int, shape: PageShape, fine_at: int = 0) -> PageJob:
        """A page of a batch."""
        ...

    def upload(self, numbers: NDArray[np.int32], device: int, stream: Any) -> Any:
        """These numbers on the device; the array as `DeviceCodec.encode` takes it."""
        ...

    def fetch(self, view: DeviceView, start: int, stop: int, stream: Any) -> NDArray[Any]:
        """A copy of tokens `start` to `stop` in host memory, after what the stream has now; waits for it."""
        ...

    def store(self, view: DeviceView, start: int, values: NDArray[Any], stream: Any) -> None:
        """Copy these tokens from host memory to where `start` is; done, or waiting on the stream, on return."""
        ...


class CudaBackend:
    """CuPy and the kernels of `lynx_gpu`."""

    def is_device_array(self, array: object) -> bool:
        from lynx_gpu.views import is_device_array

        return is_device_array(array)

    def view(self, array: Any) -> DeviceView:
        from lynx_gpu import BackendMissingError as NoCupyError
        from lynx_gpu.views import device_view

        try:
            return device_view(array)
        except NoCupyError as error:
            raise _missing() from error

    def current_stream(self, array: Any) -> int:
        from lynx_gpu.views import current_stream

        return current_stream(array)

    def runtime(self, device: int) -> Runtime:
        from lynx_gpu import device_count
        from lynx_gpu.events import Runtime

        if device >= device_count():
            raise _missing()
        return Runtime(device)

    def has_kernels(self, codec: Codec, shape: PageShape) -> bool:
        from lynx_gpu.codec import has_kernels

        return has_kernels(codec, shape)

    def codec(self, codec: Codec, device: int) -> DeviceCodec:
        from lynx_gpu.codec import DeviceCodec

        return DeviceCodec(codec, device)

    def job(self, start: int, shape: PageShape, fine_at: int = 0) -> PageJob:
        from lynx_gpu.plan import PageJob

        return PageJob(start, shape, fine_at)

    def upload(self, numbers: NDArray[np.int32], device: int, stream: Any) -> Any:
        from lynx_gpu.hostcopy import upload

        return upload(numbers, device, stream)

    def fetch(self, view: DeviceView, start: int, stop: int, stream: Any) -> NDArray[Any]:
        from lynx_gpu.hostcopy import fetch

        return fetch(view, start, stop, stream)

    def store(self, view: DeviceView, start: int, values: NDArray[Any], stream: Any) -> None:
        from lynx_gpu.hostcopy import store

        store(view, start, values, stream)


def _missing() -> BackendMissingError:
    return BackendMissingError("CuPy with a CUDA device, which arrays in device memory need,", "gpu")
