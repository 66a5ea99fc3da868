"""Settings come from a file and from flags, typed, and every wrong one is named."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from lynx_net.errors import LocalProtocolError
from lynx_net.integrations.http.config import (
    ConfigError,
    DecodeConfig,
    PrefillConfig,
    add_flags,
    read_config,
    read_key,
    read_secrets,
)


def read(config, *flags):
    parser = argparse.ArgumentParser()
    add_flags(parser, config)
    return read_config(config, parser.parse_args(flags))


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "settings.toml"
        path.write_text(text)
        return str(path)

    return write


def test_nothing_given_is_the_default():
    assert read(DecodeConfig) == DecodeConfig()
    assert read(PrefillConfig) == PrefillConfig()
    assert PrefillConfig().http.port != DecodeConfig().http.port


def test_flags_win_over_the_file(file):
    path = file('[http]\nport = 1\nhost = "::1"\ngrace_s = 5\n[limits]\nrunning = 3\n[watch]\nenabled = false\n')
    config = read(DecodeConfig, "--config", path, "--http-port", "2", "--limits-queued", "0")
    assert (config.http.port, config.http.host, config.http.grace_s) == (2, "::1", 5.0)
    assert (config.limits.running, config.limits.queued) == (3, 0)
    assert not config.watch.enabled


def test_lists_and_optional_values(file):
    path = file('[link]\ntargets = ["tcp://10.0.0.*:7000"]\nrate = "1Gbit"\n')
    assert read(PrefillConfig, "--config", path).link.targets == ("tcp://10.0.0.*:7000",)
    flagged = read(PrefillConfig, "--config", path, "--link-targets", "tcp://a:*", "tcp://b:*")
    assert flagged.link.targets == ("tcp://a:*", "tcp://b:*")
    assert flagged.link.rate == "1Gbit"


@pytest.mark.parametrize("config", [DecodeConfig, PrefillConfig])
def test_every_field_has_a_flag_and_a_sentence(config, capsys):
    with pytest.raises(SystemExit):
        read(config, "--help")
    text = capsys.readouterr().out
    for section in dataclasses.fields(config):
        for field in dataclasses.fields(getattr(config(), section.name)):
            assert f"--{section.name}-{field.name.replace('_', '-')} " in text
            assert field.metadata["help"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[htp]\n", "unknown section [htp]"),
        ("[http]\nprot = 1\n", "unknown setting prot in [http]"),
        ('[http]\nport = "8000"\n', "http.port must be a whole number"),
        ("[http]\nport = true\n", "http.port must be a whole number"),
        ("[http]\nport = 70000\n", "http.port must be 0 to 65535"),
        ("http = 5\n", "[http]"),
        ("[limits]\nrunning = 0\n", "limits.running"),
        ("[watch]\nenabled = 1\n", "watch.enabled must be true or false"),
        ("[http\n", "is not TOML"),
        ('[cache]\ncertificate = "x"\n', "ca_file"),
        ('[model]\ndtype = "int8"\n', "model.dtype"),
        ('[log]\nlevel = "loud"\n', "log.level"),
        ('[prefill]\nurl = "prefill:8001"\n', "prefill.url"),
        ("[limits]\nnew_tokens = 0\n", "limits.new_tokens"),
        ("[http]\nstall_s = 0\n", "http.stall_s"),
    ],
)
def test_what_is_wrong_is_named(file, text, says):
    with pytest.raises(ConfigError) as refusal:
        read(DecodeConfig, "--config", file(text))
    assert says in str(refusal.value)


def test_wrong_flags_and_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="--http-port: 'x' is not a whole number"):
        read(DecodeConfig, "--http-port", "x")
    with pytest.raises(ConfigError, match="--watch-enabled"):
        read(DecodeConfig, "--watch-enabled", "maybe")
    with pytest.raises(ConfigError, match=r"cannot read .*missing"):
        read(DecodeConfig, "--config", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="codec_params"):
        read(PrefillConfig, "--link-codec-params", "{}")


def test_a_server_has_no_setting_that_does_nothing_there():
    with pytest.raises(ConfigError, match="unknown setting"):
        read_config(PrefillConfig, argparse.Namespace(config=None, **{"http.stall_s": "1"}))
    with pytest.raises(LocalProtocolError, match="rate"):
        read(PrefillConfig, "--link-rate", "fast")


def test_keys_come_from_files(tmp_path):
    file = tmp_path / "keys"
    file.write_text("aabb\nccdd\n")
    assert read_secrets(str(file)) == ("aabb", "ccdd")
    assert read_key(str(file)) == b"\xaa\xbb"
    assert (read_secrets(None), read_key(None)) == ((), None)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_secrets(str(file))
    file.write_text("no hexadecimal")
    with pytest.raises(ConfigError, match="hexadecimal"):
        read_key(str(file))
