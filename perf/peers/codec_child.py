"""Codecs of another project on a cache: `python -m perf.peers.codec_child IN.npz NAME:BITS:AXIS ...`.

Runs in the environment of the project. IN has "keys" and "values", bits of bfloat16 as uint16 [layers, tokens, heads,
size], and "raw_head": so many first tokens are not coded but counted with 16 bits, as for the codecs of this
project. What was measured goes to standard output as a line of JSON, for every codec bits a value of everything the
decoder needs, the speed of coding, and a file beside IN with keys and values as float32, decoded; or why it failed.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

Coded = tuple[np.ndarray, int, float]
"""Decoded float32 [tokens, heads, size], bytes, seconds of coding."""


def torch_view(bits: np.ndarray) -> Any:
    """[1, heads, tokens, size] in bfloat16, as transformers has it."""
    torch = importlib.import_module("torch")
    return torch.from_numpy(np.ascontiguousarray(bits.transpose(1, 0, 2))).view(torch.bfloat16)[None]


def numpy_of(tensor: Any) -> np.ndarray:
    """Back to float32 [tokens, heads, size]."""
    found: np.ndarray = tensor[0].float().numpy().transpose(1, 0, 2)
    return found


def tensor_bytes(tensor: Any) -> int:
    """Bytes of a tensor, or of all tensors that a wrapper around some holds."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        return sum(tensor_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.numel() * tensor.element_size())


def quanto(bits: np.ndarray, count: int, axis: int) -> Coded:
    """`QuantizedCache` of transformers with its quanto backend, groups of 64."""
    layers = importlib.import_module("transformers.cache_utils")
    layer = layers.QuantoQuantizedLayer(nbits=count, axis_key=axis, axis_value=axis, q_group_size=64)
    more = -len(bits) % 64  # it takes whole groups only: the last token again and again, not counted
    tensor = torch_view(np.concatenate([bits, np.repeat(bits[-1:], more, axis=0)]))
    began_s = time.perf_counter()
    coded = layer._quantize(tensor, axis=axis)
    took_s = time.perf_counter() - began_s
    share = len(bits) / (len(bits) + more)
    return numpy_of(layer._dequantize(coded))[: len(bits)], round(tensor_bytes(coded) * share), took_s * share


def hqq(bits: np.ndarray, count: int, axis: int) -> Coded:
    """HQQ's own quantiser, as `QuantizedCache` calls it, groups of 64."""
    quantizer = importlib.import_module("hqq.core.quantize").Quantizer
    torch = importlib.import_module("torch")
    tensor = torch_view(bits)
    began_s = time.perf_counter()
    coded, meta = quantizer.quantize(
        tensor, axis=axis, device="cpu", compute_dtype=torch.bfloat16, nbits=count, group_size=64
    )
    took_s = time.perf_counter() - began_s
    meta["compute_dtype"] = torch.bfloat16
    size = tensor_bytes(coded) + sum(tensor_bytes(meta[name].to(torch.bfloat16)) for name in ("scale", "zero"))
    return numpy_of(quantizer.dequantize(coded, meta)), size, took_s


def turboquant(bits: np.ndarray, count: int, axis: int) -> Coded:
    """The quantiser of `TurboQuantCache`; its codes are counted packed, though it keeps a byte each."""
    del axis
    core = importlib.import_module("turboquant.core")
    tensor = torch_view(bits)
    made = core.TurboQuantMSE(tensor.shape[-1], bits=count, device="cpu")
    began_s = time.perf_counter()
    indices, norms = made.quantize(tensor)
    took_s = time.perf_counter() - began_s
    vectors = tensor.numel() // tensor.shape[-1]
    size = int(core.compute_memory_bytes(tensor.shape[-1], count, vectors)["total_bytes"])
    return numpy_of(made.dequantize(indices, norms)), size, took_s


def zipnn(bits: np.ndarray, count: int, axis: int) -> Coded:
    """Lossless."""
    del count, axis
    made = importlib.import_module("zipnn").ZipNN(bytearray_dtype="bfloat16", threads=1)
    data = bytearray(np.ascontiguousarray(bits).tobytes())  # it writes into its input
    began_s = time.perf_counter()
    coded = made.compress(data)
    took_s = time.perf_counter() - began_s
    back = np.frombuffer(made.decompress(coded), np.uint16).reshape(bits.shape)
    return (back.astype(np.uint32) << np.uint32(16)).view(np.float32), len(coded), took_s


CODECS: dict[str, Callable[[np.ndarray, int, int], Coded]] = {
    "quanto": quanto,
    "hqq": hqq,
    "turboquant": turboquant,
    "zipnn": zipnn,
}


def main(name: str, count: int, axis: int, source: Path, out: Path) -> dict[str, Any]:
    """Code a whole cache, layer by layer."""
    with np.load(source) as held:
        arrays, raw = {kind: held[kind] for kind in ("keys", "values")}, int(held["raw_head"])
    total_bytes, seconds, coded_values = 0, 0.0, 0
    decoded = {}
    for kind, stored in arrays.items():
        parts = []
        for layer in stored:
            found, size, took_s = CODECS[name](layer[raw:], count, axis)
            head = (layer[:raw].astype(np.uint32) << np.uint32(16)).view(np.float32)
            parts.append(np.concatenate([head, found]))
            total_bytes += size + 2 * layer[:raw].size
            seconds += took_s
            coded_values += layer[raw:].size
        decoded[kind] = np.stack(parts)
    np.savez(out, **decoded)
    values = sum(stored.size for stored in arrays.values())
    return {"bits": 8 * total_bytes / values, "encode_mvalues_s": coded_values / seconds / 1e6, "out": str(out)}


def told(job: str, number: int, source: Path) -> dict[str, Any]:
    """What is said of one job; one that fails leaves the others alone."""
    name, count, axis = job.split(":")
    try:
        return main(name, int(count), int(axis), source, source.with_name(f"out-{number}.npz"))
    except Exception as error:  # whatever the library of others raises is what is reported
        return {"failure": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    given = Path(sys.argv[1])
    print(json.dumps([told(job, number, given) for number, job in enumerate(sys.argv[2:])]))
