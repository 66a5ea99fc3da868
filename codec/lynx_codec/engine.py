"""What a codec asks of the arithmetic: numpy (reference.py) and compiled code (compiled.py) both do it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lynx_codec.base import PageShape
    from lynx_codec.tables import LynxTables

__all__ = ["Engine"]


class Engine(Protocol):
    """One implementation of the arithmetic. All implementations agree bit for bit.

    `page` and `out` are [tokens, heads, head_size] of any strides and of the three dtypes; streams are uint8 [bytes] of
    exactly the length of the page. `base` is the length of the header.
    """

    def warm_up(self, codec_id: int) -> None:
        """Compile, or load from a cache, what the first call for this codec would have to wait for."""

    def store_raw(self, page: NDArray[Any], shape: PageShape, first: int, stop: int, out: NDArray[np.uint8]) -> None:
        """Write tokens [first, stop) as 16-bit floats, at least one."""

    def load_raw(
        self, data: NDArray[np.uint8], float16: bool, shape: PageShape, first: int, stop: int, out: NDArray[Any]
    ) -> None:
        """Read what `store_raw` wrote into tokens [first, stop) of `out`."""

    def encode_lynx(
        self,
        page: NDArray[Any],
        shape: PageShape,
        anchor: NDArray[np.uint8],
        residual: NDArray[np.uint8],
        base: int,
        tables: LynxTables,
        places: NDArray[np.int32],
    ) -> bool:
        """Write metadata and nibbles of the coded tokens, at least one; true if the page escaped.

        `anchor` has the wide size; `places` is what `row_places` gives.
        """
        ...

    def decode_lynx(
        self,
        anchor: NDArray[np.uint8],
        residual: NDArray[np.uint8] | None,
        shape: PageShape,
        base: int,
        wide: bool,
        coarse: NDArray[np.float32],
        full: NDArray[np.float32],
        places: NDArray[np.int32],
        out: NDArray[Any],
    ) -> None:
        """Read the coded tokens: `coarse` [16] is for the anchor alone, `full` [256] for both streams."""

    def encode_affine(self, page: NDArray[Any], shape: PageShape, out: NDArray[np.uint8], base: int, bits: int) -> bool:
        """Write metadata and codes of 4 or 8 bits of the coded tokens, at least one; true if the page escaped."""
        ...

    def decode_affine(
        self, data: NDArray[np.uint8], shape: PageShape, base: int, wide: bool, bits: int, out: NDArray[Any]
    ) -> None:
        """Read the coded tokens."""

    def encode_codes(
        self, page: NDArray[Any], shape: PageShape, chunk: int, out: NDArray[np.uint8], base: int
    ) -> tuple[NDArray[np.uint8], bool]:
        """Write metadata of the coded tokens, at least one; returns codes [token, channel], and if the page escaped."""
        ...

    def decode_codes(
        self,
        data: NDArray[np.uint8],
        codes: NDArray[np.uint8],
        shape: PageShape,
        chunk: int,
        base: int,
        wide: bool,
        tables: NDArray[np.float32],
        places: NDArray[np.int32],
        out: NDArray[Any],
    ) -> None:
        """Write values: `tables` [2, 256] has the position of each code, of ordinary tokens and of fine ones."""

    def pack(
        self,
        codes: NDArray[np.uint8],
        tokens: NDArray[np.int32],
        shape: PageShape,
        shift: int,
        bits: int,
        out: NDArray[np.uint8],
    ) -> None:
        """Write the `bits` bits above bit `shift` of the codes [token, channel] of `tokens` as rows of planes."""

    def unpack(
        self,
        data: NDArray[np.uint8],
        tokens: NDArray[np.int32],
        shape: PageShape,
        shift: int,
        bits: int,
        codes: NDArray[np.uint8],
    ) -> None:
        """Inverse of `pack`; sets bits in codes that have none of these."""

    def encode_exact(
        self,
        bits: NDArray[np.uint16],
        codes: NDArray[np.uint8],
        base: NDArray[np.float32],
        length: NDArray[np.float32],
        starts: NDArray[np.int64],
        out: NDArray[np.uint8],
        *,
        float16: bool,
    ) -> int:
        """`lynx_codec.exact.encode_exact`; all arrays are C-contiguous."""
        ...

    def decode_exact(
        self,
        data: NDArray[np.uint8],
        codes: NDArray[np.uint8],
        base: NDArray[np.float32],
        length: NDArray[np.float32],
        starts: NDArray[np.int64],
        out: NDArray[np.uint16],
        *,
        float16: bool,
    ) -> None:
        """`lynx_codec.exact.decode_exact`; all arrays are C-contiguous."""
