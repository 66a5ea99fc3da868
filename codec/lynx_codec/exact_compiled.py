"""The compiled twin of exact.py: the same functions over the kernels of exact_kernels.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lynx_codec import exact_kernels as kernels
from lynx_codec.errors import CodecError
from lynx_codec.exact import (
    BFLOAT16_FORMAT,
    CLOSED,
    EXACT_HEADER_BYTES,
    FLOAT16_FORMAT,
    OPEN,
    PLAIN,
    exact_bound,
    read_exact_header,
    write_exact_header,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    U8 = NDArray[np.uint8]
    U16 = NDArray[np.uint16]
    I64 = NDArray[np.int64]

__all__ = ["decode_exact", "encode_exact"]

_REASONS = {
    kernels.TOO_SHORT: "the exact stream is too short for the page",
    kernels.TOO_LONG: "the exact stream is longer than the page takes",
    kernels.BAD_KIND: "the exact stream names an unknown kind of flat channel",
    kernels.LEFT_CELL: "the exact stream leaves the cell of a code",
}


def encode_exact(
    bits: U16, codes: U8, base: F32, length: F32, starts: I64, out: U8, *, float16: bool = False
) -> int:
    """As `exact.encode_exact`. All arrays are C-contiguous."""
    bound = exact_bound(bits.size)
    for mode in (CLOSED, OPEN):
        first_bytes, all_bytes = kernels.encode_cells(
            bits, codes, base, length, starts, float16, mode, out[:bound], EXACT_HEADER_BYTES
        )
        if first_bytes == kernels.NO_ROOM:
            break
        if first_bytes != kernels.OUTSIDE:
            write_exact_header(out, mode, first_bytes)
            return int(EXACT_HEADER_BYTES + all_bytes)
    write_exact_header(out, PLAIN, 0)
    out[EXACT_HEADER_BYTES:bound].view(np.uint16)[:] = bits.reshape(-1)
    return bound


def decode_exact(
    data: U8, codes: U8, base: F32, length: F32, starts: I64, out: U16, *, float16: bool = False
) -> None:
    """As `exact.decode_exact`. All arrays are C-contiguous."""
    mode, cut = read_exact_header(data, out.size)
    if mode == PLAIN:
        out[...] = data[cut:].view(np.uint16).reshape(out.shape)
    else:
        status = kernels.decode_cells(
            data, EXACT_HEADER_BYTES, cut, codes, base, length, starts, float16, mode, out
        )
        if status:
            raise CodecError(_REASONS[status])
    form = FLOAT16_FORMAT if float16 else BFLOAT16_FORMAT
    if kernels.largest(out) > form.largest:
        raise CodecError("the exact stream holds a value that is not finite")
