"""Compiles CUDA kernels for the CPU and runs them: see emulator/cuda_emulator.h."""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["EmulatorError", "Library", "compile_kernels", "compile_text"]

EMULATOR = Path(__file__).parent / "emulator"
COMPILER = (
    "g++",
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fPIC",
    "-U_FORTIFY_SOURCE",
    "-fno-gnu-unique",
)
DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\]\s*;")
KERNEL = re.compile(r"__global__\s+void\s+(\w+)\s*\(")


class EmulatorError(Exception):
    """A kernel does not compile, or does what no kernel may do."""


class Library:
    """The kernels of some .cu files."""

    def __init__(self, path: Path, kernels: frozenset[str]) -> None:
        self.kernels = kernels
        self._library = ctypes.CDLL(str(path))

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        *,
        shared_bytes: int = 0,
        order: int = 0,
    ) -> None:
        """Run a kernel to its end.

        Raises:
            EmulatorError: unknown kernel, other arguments than it takes, or an error inside it.
        """
        if kernel not in self.kernels:
            raise EmulatorError(f"there is no kernel {kernel!r}, only {sorted(self.kernels)}")
        shape = (ctypes.c_uint * 6)(*_three(grid), *_three(block))
        values = [_value(argument) for argument in args]
        pointers = (ctypes.c_void_p * len(values))(*[value.ctypes.data for value in values])
        sizes = (ctypes.c_uint * len(values))(*[value.nbytes for value in values])
        function = self._library[f"lynx_launch_{kernel}"]
        function.restype = ctypes.c_char_p
        problem = function(shape, shared_bytes, order, pointers, sizes, len(values))
        if problem:
            raise EmulatorError(f"{kernel}: {problem.decode()}")

    def memory(self, name: str, dtype: Any, count: int) -> np.ndarray:
        """A global `__device__` or `__constant__` array of extern "C" name, as CuPy's RawModule.get_global."""
        size = np.dtype(dtype).itemsize * count
        return np.frombuffer((ctypes.c_char * size).in_dll(self._library, name), dtype=dtype)


def compile_kernels(sources: Sequence[Path | str], defines: Mapping[str, object] | None = None) -> Library:
    """Kernels of CUDA files, which must be extern "C"; files that they include are found in their folders.

    Raises:
        EmulatorError: with what the compiler says.
    """
    with tempfile.TemporaryDirectory(prefix="cuda-emulator-") as folder:
        return _compile(Path(folder), sources, defines or {})


def compile_text(text: str, defines: Mapping[str, object] | None = None) -> Library:
    """Kernels of one CUDA text without includes of its own."""
    with tempfile.TemporaryDirectory(prefix="cuda-emulator-") as folder:
        source = Path(folder) / "text.cu"
        source.write_text(text)
        return compile_kernels([source], defines)


def _compile(folder: Path, sources: Sequence[Path | str], defines: Mapping[str, object]) -> Library:
    paths = [Path(source).resolve() for source in sources]
    lines = []
    for number, parent in enumerate(dict.fromkeys(path.parent for path in paths)):
        (folder / str(number)).mkdir()
        for file in (*parent.glob("*.cu"), *parent.glob("*.cuh"), *parent.glob("*.h")):
            text = DYNAMIC.sub(r"\1 *const \2 = reinterpret_cast<\1 *>(emulator::dynamic);", file.read_text())
            (folder / str(number) / file.name).write_text(text)
        lines += [f'#include "{folder / str(number) / path.name}"' for path in paths if path.parent == parent]
    options = [f"-D{name}={value}" for name, value in defines.items()]
    options += [f"-I{EMULATOR}", "-include", str(EMULATOR / "cuda_emulator.h")]
    whole, library = folder / "kernels.cpp", folder / "kernels.so"
    whole.write_text("\n".join(lines) + "\n")
    kernels = frozenset(KERNEL.findall(_run(*COMPILER, "-E", "-P", "-DLYNX_EMULATOR_LIST", *options, str(whole))))
    parameters = "const unsigned *shape, unsigned shared, unsigned order, void **arguments, const unsigned *sizes"
    for kernel in sorted(kernels):
        lines.append(
            f'extern "C" const char *lynx_launch_{kernel}({parameters}, unsigned count) {{ '
            f"return emulator::launch({kernel}, shape, shared, order, arguments, sizes, count); }}"
        )
    whole.write_text("\n".join(lines) + "\n")
    _run(*COMPILER, "-shared", *options, str(whole), "-o", str(library))
    return Library(library, kernels)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(done.stderr)
    return done.stdout


def _three(shape: int | Sequence[int]) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    return (*sizes, *(1,) * (3 - len(sizes)))


def _value(argument: Any) -> np.ndarray:
    """The bytes of one argument, as an array."""
    if isinstance(argument, np.generic):
        return np.frombuffer(argument.tobytes(), dtype=np.uint8)
    if isinstance(argument, np.ndarray) and argument.dtype.names:
        return argument
    if isinstance(argument, np.ndarray):
        return np.array([argument.ctypes.data], dtype=np.uint64)
    if isinstance(argument, int) and not isinstance(argument, bool):
        return np.array([argument & (1 << 64) - 1], dtype=np.uint64)
    raise EmulatorError(f"{type(argument).__name__} is no argument for a kernel")
