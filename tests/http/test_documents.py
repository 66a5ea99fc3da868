"""docs/http.md says what is there, and nothing else."""

from __future__ import annotations

import argparse
import re
import tomllib

import pytest
from httpkit import DOCUMENT, ROOT

from lynx_net.integrations.http.config import DecodeConfig, PrefillConfig, add_flags, read_config

TEXT = DOCUMENT.read_text("utf-8")


def test_the_example_files_are_settings(tmp_path):
    blocks = re.findall(r"^```toml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    configs = {"# decode": DecodeConfig, "# prefill": PrefillConfig, "[http]": DecodeConfig}
    for body in blocks:
        config = next(one for start, one in configs.items() if body.startswith(start))
        file = tmp_path / "settings.toml"
        file.write_text(body)
        parser = argparse.ArgumentParser()
        add_flags(parser, config)
        read = read_config(config, parser.parse_args(["--config", str(file)]))
        for section, values in tomllib.loads(body).items():
            for name, value in values.items():
                had = getattr(getattr(read, section), name)
                assert had == (tuple(value) if isinstance(value, list) else value)
    assert len(blocks) == 3


@pytest.mark.parametrize("pattern", [r"\]\((?!https?:|#)([^)#]+)", r"`((?:examples|tests|lynx_net|perf)/[\w./]+)`"])
def test_files_that_it_names_exist(pattern):
    named = re.findall(pattern, TEXT)
    assert named
    missing = [name for name in named if not (ROOT / name).exists() and not (DOCUMENT.parent / name).exists()]
    assert missing == []


def test_settings_that_it_names_exist():
    sections = {name for config in (DecodeConfig, PrefillConfig) for name in config.__dataclass_fields__}
    named = set(re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_]+)`", TEXT))
    assert len(named) > 8
    for name in named:
        section, _, field = name.partition(".")
        owners = [getattr(config(), section) for config in (DecodeConfig, PrefillConfig) if hasattr(config(), section)]
        assert any(hasattr(owner, field) for owner in owners), name
