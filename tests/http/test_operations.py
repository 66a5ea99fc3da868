"""docs/operations.md and scripts/deploy say what is there, and nothing else."""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.error
import zipfile
from pathlib import Path

import pytest
from httpkit import ROOT, changed

from lynx_net.__main__ import main
from lynx_net.integrations.http import cli
from lynx_net.integrations.http import serving as service
from lynx_net.integrations.http.config import DecodeConfig, PrefillConfig
from lynx_net.integrations.http.decode_app import DecodeServer
from lynx_net.integrations.http.metrics import HTTP_METRICS
from lynx_net.integrations.http.notify import notify
from lynx_net.integrations.http.serving import run_service, serving
from lynx_net.observe.metrics import METRICS

DOCUMENT = ROOT / "docs" / "operations.md"
DEPLOY = ROOT / "scripts" / "deploy"
UNIT = DEPLOY / "lynx-net@.service"
TEXT = DOCUMENT.read_text("utf-8")
KNOWN = {metric.name: metric for metric in (*HTTP_METRICS, *METRICS)}


async def exposed(config):
    """Names and types in /metrics of a server that has done nothing."""
    server = DecodeServer(config)
    async with serving(server):
        return dict(re.findall(r"^# TYPE (\w+) (\w+)$", server.service.metrics.text(), re.MULTILINE))


async def test_every_metric_is_documented_and_no_other():
    rows = re.findall(r"^\| `((?:lynx_net|process)_\w+)` \| (\w+) \|([^|]*)\|([^|]*)\| (.+) \|$", TEXT, re.MULTILINE)
    documented = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _, _ in rows}
    assert len(documented) == len(rows)
    assert documented == {name: (metric.kind, metric.labels) for name, metric in KNOWN.items()}
    for name, kind, _, unit, _ in rows:
        assert name.endswith("_total") == (kind == "counter")
        assert ("_seconds" in name) == (unit.strip() == "seconds")
    given = await exposed(changed(DecodeConfig(), {"http": {"port": 0}}))
    assert given == {name: kind for name, (kind, _) in documented.items()}


def test_expressions_name_metrics_and_labels_that_exist():
    found = list(
        re.finditer(r"\b((?:lynx_net_(?:http|lane|link|transfer|anchor)|process)_[a-z_]+)\b(?:\{(\w+)[=!])?", TEXT)
    )
    assert len(found) > len(HTTP_METRICS)
    for match in found:
        name, label = match[1], match[2]
        metric = KNOWN.get(name) or KNOWN.get(re.sub(r"_(bucket|sum|count)$", "", name))
        assert metric is not None, name
        assert label is None or label in metric.labels, match[0]


def test_every_setting_is_documented_with_its_default_and_no_other():
    rows = re.findall(r"^\| `(\w+\.\w+)` \| (both|decode|prefill) \|([^|]*)\| (.+) \|$", TEXT, re.MULTILINE)
    documented = {}
    for key, who, default, _ in rows:
        values = [read_default(one) for one in re.findall(r"`([^`]*)`", default)] or [None]
        servers = ("decode", "prefill") if who == "both" else (who,)
        for index, server in enumerate(servers):
            documented[server, key] = values[index if len(values) > 1 else 0]
    assert documented == {
        (server, f"{section.name}.{one.name}"): getattr(getattr(config, section.name), one.name)
        for server, config in (("decode", DecodeConfig()), ("prefill", PrefillConfig()))
        for section in dataclasses.fields(config)
        for one in dataclasses.fields(getattr(config, section.name))
    }


def read_default(text):
    value = tomllib.loads(f"value = {text}")["value"]
    return tuple(value) if isinstance(value, list) else value


def test_files_and_sections_that_it_names_exist():
    named = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([\w-]+))?\)", TEXT)
    assert len(named) > 8
    for name, section in named:
        file = DOCUMENT.parent / name
        assert file.is_file(), name
        headings = {
            re.sub(r"\W+", "-", one.lower()) for one in re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
        }
        assert not section or section in headings, section
    for name in re.findall(r"`((?:scripts|tests|examples)/[\w./@-]+)`", TEXT):
        assert (ROOT / name).exists(), name


def unit_settings():
    """Of the unit: a list of values for each (section, name)."""
    settings, section = {}, ""
    for line in UNIT.read_text("utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert equals, line
            settings.setdefault((section, name), []).append(value)
    return settings


def test_the_unit_runs_what_there_is_and_waits_for_its_end(capsys):
    settings = unit_settings()
    [command] = settings["Service", "ExecStart"]
    with pytest.raises(SystemExit):
        main(["--help"])
    help_text = capsys.readouterr().out
    assert command == "/opt/lynx_net/bin/lynx-net %i --config /etc/lynx_net/%i.toml"
    for server in ("decode-server", "prefill-server"):
        assert server in help_text
        assert f"lynx-net@{server}" in UNIT.read_text("utf-8")
    [stop_s] = settings["Service", "TimeoutStopSec"]
    assert int(stop_s) > max(DecodeConfig().http.grace_s, PrefillConfig().http.grace_s)
    assert settings["Service", "Type"] == ["notify"]
    assert settings["Service", "User"] == ["lynx_net"]
    assert ("Service", "MemoryDenyWriteExecute") not in settings  # numba and torch compile


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here; the unit is only parsed")
def test_the_unit_is_one_for_systemd(tmp_path):
    file = tmp_path / "lynx-net@decode-server.service"
    file.write_text(UNIT.read_text("utf-8").replace("/opt/lynx_net/bin/lynx-net", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_service_manager_is_told(tmp_path, monkeypatch, caplog):
    notify("READY=1")  # nobody asks
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(5)
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify("READY=1")
        assert manager.recv(100) == b"READY=1"
    name = f"lynx-net-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(5)
        manager.bind("\0" + name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        notify("STOPPING=1")
        assert manager.recv(100) == b"STOPPING=1"
    notify("STOPPING=1")
    assert "cannot tell the service manager" in caplog.text


class Quick(DecodeServer):
    """A decode server without a model."""

    @contextlib.asynccontextmanager
    async def started(self):
        yield "nothing to load"


async def test_a_server_says_when_it_is_ready_and_when_it_ends(tmp_path, monkeypatch, capsys):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.setblocking(False)
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        loop = asyncio.get_running_loop()
        server, states = Quick(changed(DecodeConfig(), {"http": {"port": 0}})), []
        running = asyncio.create_task(run_service("decode server", server, lambda: states.append(server.service.state)))
        async with asyncio.timeout(20):
            assert await loop.sock_recv(manager, 100) == b"READY=1"
            assert states == ["starting"], "told before requests are taken"
            assert capsys.readouterr().out.endswith("decode server is ready\n")
            os.kill(os.getpid(), signal.SIGTERM)
            assert await loop.sock_recv(manager, 100) == b"STOPPING=1"
            await running


@pytest.mark.parametrize("command", ["prefill", "decode"])
def test_what_a_server_process_has_loaded_is_not_collected_again(command, monkeypatch):
    given = []

    async def run_service(name, parts, when_loaded):
        given.append((name, when_loaded))

    monkeypatch.setattr(service, "run_service", run_service)
    monkeypatch.setattr(cli, "set_up_logging", lambda log: None)
    monkeypatch.setattr(cli, "_ENVIRONMENT", {})
    parser = argparse.ArgumentParser()
    {"prefill": cli.add_prefill_arguments, "decode": cli.add_decode_arguments}[command](parser)
    assert {"prefill": cli.run_prefill, "decode": cli.run_decode}[command](parser.parse_args([])) == 0
    ((name, when_loaded),) = given
    assert name == f"{command} server"
    assert gc.get_freeze_count() == 0
    when_loaded()
    try:
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


# ---- the image


def instructions():
    """Of the Dockerfile: (word, rest), with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text("utf-8"))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line and not line.startswith("#")]


def test_the_image_has_the_files_that_a_wheel_needs_and_no_root():
    made = instructions()
    copied = {
        name for word, rest in made if word == "COPY" and not rest.startswith("--from") for name in rest.split()[:-1]
    }
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    wanted = {path.split("/")[0] for path in needed["wheel"]["packages"]} | {
        path.strip("/") for path in needed["sdist"]["include"]
    }
    assert copied == wanted | {"pyproject.toml"}
    allowed = {
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    assert allowed == copied
    assert all((ROOT / name).exists() for name in copied)
    words = [word for word, _ in made]
    assert dict(made)["USER"] == "10001"
    assert words.index("USER") > max(index for index, word in enumerate(words) if word == "RUN")
    assert json.loads(dict(made)["ENTRYPOINT"]) == ["lynx-net"]
    assert json.loads(dict(made)["CMD"])[0] == "decode-server"


def hadolint():
    """The linter of extra `dev`; LYNX_NET_HADOLINT names another."""
    beside = Path(sys.executable).with_name("hadolint")
    return os.environ.get("LYNX_NET_HADOLINT") or shutil.which("hadolint") or (beside.exists() and str(beside)) or None


@pytest.mark.skipif(hadolint() is None, reason="there is no hadolint for this platform")
def test_the_linter_of_dockerfiles_has_nothing_to_say():
    command = [hadolint(), "--no-color", "--failure-threshold", "style", DEPLOY / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_what_the_image_copies_makes_a_wheel_that_its_pip_can_install(tmp_path):
    """As the image builds it, but without the network: what pip would fetch has to be here already."""
    source = tmp_path / "source"
    source.mkdir()
    runs = [rest for word, rest in instructions() if word == "RUN"]
    assert any("pip wheel" in run and run.endswith("--wheel-dir /wheels .") for run in runs)
    [install] = [run for run in runs if run.startswith("pip install")]
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for name in rest.split()[:-1]:
                if (ROOT / name).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.nb?")
                    shutil.copytree(ROOT / name, source / name, ignore=ignored)
                else:
                    shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=source, check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    assert {"lynx_net/integrations/http/page/page.js", "lynx_codec/__init__.py"} <= names
    command = re.match(r'pip install --no-cache-dir "\$\(echo /wheels/\*\.whl\)\[\$\{EXTRAS\}\]"', install)
    assert command is not None
    [extras] = [rest.partition("=")[2] for word, rest in instructions() if word == "ARG" and rest.startswith("EXTRAS=")]
    dry = ["--dry-run", "--no-index", "--quiet", "--ignore-installed", "--no-deps"]
    subprocess.run([sys.executable, "-m", "pip", "install", *dry, f"{wheel}[{extras}]"], check=True, timeout=60)
    assert set(extras.split(",")) <= set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )


async def test_the_images_health_check(monkeypatch):
    [check] = [rest for word, rest in instructions() if word == "HEALTHCHECK"]
    command = json.loads(check[check.index("[") :])
    assert command[:2] == ["python", "-c"]
    program = compile(ast.parse(command[2]), "HEALTHCHECK", "exec")
    async with serving(DecodeServer(changed(DecodeConfig(), {"http": {"port": 0}}))) as url:
        monkeypatch.setenv("LYNX_NET_HEALTH_URL", f"{url}/health/live")
        await asyncio.to_thread(exec, program, {})
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(exec, program, {})


ENGINE = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"{calls}"
case "$1" in {fails}) exit 1 ;; esac
"""


@pytest.mark.parametrize(
    ("engines", "code", "said"),
    [
        ({}, 1, "there is no engine (docker, podman or buildah)"),
        ({"docker": "info"}, 1, "docker is here but does not work"),
        ({"docker": "info", "podman": "none"}, 0, "podman"),
        ({"buildah": "pull"}, 1, "buildah cannot pull python:3.12-slim"),
    ],
)
def test_whether_the_image_can_be_built(tmp_path, engines, code, said):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "sed", "dirname", "basename"):
        (programs / name).symlink_to(shutil.which(name))
    for name, fails in engines.items():
        (programs / name).write_text(ENGINE.format(calls=tmp_path / "calls", fails=fails))
        (programs / name).chmod(0o755)
    environment = {"PATH": str(programs)}
    bash = str(programs / "bash")
    script = str(DEPLOY / "build-image")
    done = subprocess.run([bash, script, "--check"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    if code == 0:
        subprocess.run([bash, script, "--tag", "mine", "--no-cache"], env=environment, check=True, capture_output=True)
        calls = (tmp_path / "calls").read_text().splitlines()
        assert calls[-1] == "podman build --file scripts/deploy/Dockerfile --tag mine --no-cache ."
