"""Pieces of host memory get to where the table says, whatever their sizes and places, and nothing else is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lynx_gpu.events import SPAN, Runtime

PART_BYTES = 32 * 1024


@pytest.mark.parametrize(
    ("sizes", "shifts"),
    [
        ([1, 3, 16, 255, 4096], (0, 0)),
        ([PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 77], (0, 0)),
        ([5000, 0, 70_000], (4, 12)),
        ([5000, 0, 40_000], (1, 2)),
    ],
    ids=["small", "parts", "words", "bytes"],
)
def test_pieces(cupy: Any, sizes: list[int], shifts: tuple[int, int]) -> None:
    runtime = Runtime(0)
    room = -(-(max(sizes) + 16) // 256) * 256
    source = runtime.pinned(room * len(sizes))
    held = np.frombuffer(_at(source.address, source.size_bytes), np.uint8)
    held[:] = np.random.default_rng(1).integers(0, 256, held.size, np.uint8)
    target = cupy.asarray(np.full(room * len(sizes), 0x5A, np.uint8))
    notes = runtime.pinned(SPAN.itemsize * len(sizes))
    table = np.frombuffer(_at(notes.address, notes.size_bytes), SPAN)
    wanted = np.full(room * len(sizes), 0x5A, np.uint8)
    for number, size in enumerate(sizes):
        begin, to = number * room + shifts[0], number * room + shifts[1]
        table[number] = source.address + begin, target.data.ptr + to, size
        wanted[to : to + size] = held[begin : begin + size]
    stream = runtime.stream()
    with runtime.here():
        runtime.gather(notes.address, len(sizes), max(sizes), stream)
        runtime.record(stream).wait()
    assert np.array_equal(target.get(), wanted)


def _at(address: int, size_bytes: int) -> Any:
    import ctypes

    return (ctypes.c_ubyte * size_bytes).from_address(address)
