"""What checksums of encoded streams must be."""

from __future__ import annotations

import xxhash

from lynx_gpu.plan import UNSUMMED_BYTES

__all__ = ["check_sums"]


def check_sums(streams: list[list[bytes]], sums: list[list[int]]) -> None:
    """[page][stream]; those of short streams are not looked at."""
    for of_page, known in zip(streams, sums, strict=True):
        for data, found in zip(of_page, known, strict=True):
            if len(data) > UNSUMMED_BYTES:
                assert found == xxhash.xxh3_64_intdigest(data)
