"""Memory that UCX can read and write: host views, and device arrays by `__cuda_array_interface__`.

Device memory is never read before the work that fills it: an array that names a stream has the stream synchronised
first (CUDA array interface, version 3). Nothing here imports CUDA until a device array comes.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

from lynx_net.errors import BackendMissingError, LynxError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["DeviceSpan", "messages", "settle_streams", "spans"]

_SMALL_BYTES = 8 * 1024
"""Host buffers up to this size are copied together; a message of its own would cost more than the copy."""


class DeviceSpan:
    """A run of bytes in device memory; keeps the array it belongs to alive."""

    def __init__(self, owner: Any, pointer: int, nbytes: int, stream: int | None) -> None:
        self.owner = owner
        self.pointer = pointer
        self.nbytes = nbytes
        self.stream = stream

    @classmethod
    def of(cls, array: Any) -> DeviceSpan:
        """All bytes of a device array; raises ValueError unless it is C-contiguous."""
        facts = array.__cuda_array_interface__
        item_bytes = int(facts["typestr"][2:])
        nbytes = item_bytes
        for size in facts["shape"]:
            nbytes *= size
        expected, step = [], item_bytes
        for size in reversed(facts["shape"]):
            expected.append(step)
            step *= size
        strides = facts.get("strides")
        if strides is not None and nbytes and tuple(strides) != tuple(reversed(expected)):
            raise ValueError("a device array must be C-contiguous")
        return cls(array, int(facts["data"][0]), nbytes, facts.get("stream"))

    def __getitem__(self, part: slice) -> DeviceSpan:
        start, stop, _ = part.indices(self.nbytes)
        return DeviceSpan(self.owner, self.pointer + start, max(stop - start, 0), self.stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "strides": None,
            "typestr": "|u1",
            "data": (self.pointer, False),
            "version": 3,
            "stream": None,
        }


def spans(buffers: Sequence[Any]) -> list[memoryview | DeviceSpan]:
    """Every buffer that is not empty, as something with `nbytes` that can be cut.

    Raises:
        TypeError, ValueError: not contiguous bytes of host or device memory.
    """
    found: list[memoryview | DeviceSpan] = []
    for buffer in buffers:
        if hasattr(buffer, "__cuda_array_interface__"):
            view: memoryview | DeviceSpan = DeviceSpan.of(buffer)
        else:
            view = memoryview(buffer).cast("B")
        if view.nbytes:
            found.append(view)
    return found


def messages(views: Sequence[memoryview | DeviceSpan], limit_bytes: int) -> Iterator[memoryview | DeviceSpan]:
    """The same bytes in the same order in pieces of at most `limit_bytes`; small host views are joined."""
    small: list[memoryview] = []
    small_bytes = 0
    for view in views:
        if isinstance(view, memoryview) and view.nbytes <= min(_SMALL_BYTES, limit_bytes):
            if small_bytes + view.nbytes > limit_bytes:
                yield memoryview(b"".join(small))
                small, small_bytes = [], 0
            small.append(view)
            small_bytes += view.nbytes
            continue
        if small:
            yield small[0] if len(small) == 1 else memoryview(b"".join(small))
            small, small_bytes = [], 0
        for start in range(0, view.nbytes, limit_bytes):
            yield view[start : start + limit_bytes]
    if small:
        yield small[0] if len(small) == 1 else memoryview(b"".join(small))


async def settle_streams(views: Sequence[memoryview | DeviceSpan]) -> None:
    """Wait for the streams that device arrays name, without blocking the loop; make their context this thread's."""
    devices = [view for view in views if isinstance(view, DeviceSpan)]
    if not devices:
        return
    for view in devices:
        if view.stream is not None:
            await asyncio.to_thread(_synchronise, view.pointer, view.stream)
    _enter_context(devices[0].pointer)


def _synchronise(pointer: int, stream: int) -> None:
    _enter_context(pointer)
    _cuda_call("cuStreamSynchronize", stream)


def _enter_context(pointer: int) -> None:
    """Make the primary context of the memory's device this thread's; UCX copies device memory in that of its caller."""
    driver = _cuda()
    _cuda_call("cuInit", 0)
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    device = _cuda_call("cuDeviceGet", int(_cuda_call("cuPointerGetAttribute", attribute, pointer)))
    # Retained for good: UCX may use it until the process ends.
    if int(device) not in _contexts:
        _contexts[int(device)] = _cuda_call("cuDevicePrimaryCtxRetain", device)
    _cuda_call("cuCtxSetCurrent", _contexts[int(device)])


_contexts: dict[int, Any] = {}


def _cuda() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise BackendMissingError("the CUDA driver interface (cuda-bindings)", "ucx") from error


def _cuda_call(name: str, *arguments: Any) -> Any:
    status, *result = getattr(_cuda(), name)(*arguments)
    if int(status):
        raise LynxError(f"{name} failed: {status.name}")
    return result[0] if result else None
