"""What checksums of encoded streams must be."""

from __future__ import annotations

import xxhash

from lynx_gpu.plan import SHORT_STREAM_BYTES

__all__ = ["check_checksums"]


def check_checksums(streams: list[list[bytes]], made: list[list[int]]) -> None:
    """[page][stream]; those of short streams are not looked at."""
    for of_page, known in zip(streams, made, strict=True):
        for data, found in zip(of_page, known, strict=True):
            if len(data) > SHORT_STREAM_BYTES:
                assert found == xxhash.xxh3_64_intdigest(data)
