"""Settings of both servers: frozen, typed, from a TOML file and from flags.

A field `port` of the section `http` is `port = 8000` under `[http]` in the file and `--http-port 8000` on the command
line; flags win. Every field of every section below works both ways, and no other does.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lynx_net.errors import LocalProtocolError
from lynx_net.transport import TlsConfig
from lynx_net.wire.pacing import parse_rate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

__all__ = [
    "CacheConfig",
    "ConfigError",
    "DecodeConfig",
    "DecodeHttpConfig",
    "DecodeLimitsConfig",
    "HttpConfig",
    "LimitsConfig",
    "LogConfig",
    "ModelConfig",
    "PeerConfig",
    "PrefillConfig",
    "ReadStoreConfig",
    "SendConfig",
    "StoreConfig",
    "UpstreamConfig",
    "WatchConfig",
    "WriteStoreConfig",
    "add_flags",
    "read_config",
    "read_key",
    "read_secrets",
    "tls_of",
]

ConfigT = TypeVar("ConfigT")

_SCHEMES = ("tcp://", "tls://", "unix://", "memory://")
DTYPES = ("float32", "bfloat16", "float16")


class ConfigError(LocalProtocolError):
    """A setting is unknown, has the wrong type, or makes no sense."""


def _field(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """The HTTP side of a server."""

    host: str = _field("127.0.0.1", "address to listen on")
    port: int = _field(8000, "port to listen on; 0 takes a free one")
    certificate: str | None = _field(None, "PEM file: serve HTTPS with this certificate and its chain")
    private_key: str | None = _field(None, "PEM file: its key, if it is not in the same file")
    api_key_file: str | None = _field(None, "file with a key on each line; clients must send one as a bearer token")
    max_body_bytes: int = _field(4 << 20, "larger request bodies are refused")
    grace_s: float = _field(120.0, "after SIGTERM, time for accepted requests to finish")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeHttpConfig(HttpConfig):
    """The HTTP side of the server."""

    stall_s: float = _field(30.0, "a client that takes none of its answer for so long is given up")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model; both servers must have the same."""

    name: str = _field("smollm2", "smollm2, gemma3, or a folder with a model and a tokenizer of transformers")
    served_name: str | None = _field(None, "what clients call it; by default the name, or the last part of the folder")
    dtype: str = _field("float32", f"of weights and cache: {', '.join(DTYPES)}")
    threads: int = _field(1, "threads of torch for one forward pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """What every lynx_net link of the servers has: who may be at its other end."""

    key_file: str | None = _field(None, "file with the key, in hexadecimal, that both sides of a link prove to have")
    certificate: str | None = _field(None, "PEM file, for tls://: certificate and chain")
    private_key: str | None = _field(None, "PEM file: its key, if it is not in the same file")
    ca_file: str | None = _field(None, "PEM file, for tls://: the authorities whose certificates are believed")
    deadline_s: float = _field(5.0, "a peer that is silent for so long is given up")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(PeerConfig):
    """Where the decode server takes caches over lynx_net."""

    url: str = _field("tcp://127.0.0.1:7000", "address to listen on: tcp://, tls:// or unix://")
    advertise: str | None = _field(None, "what the prefill server is told to connect to; by default the address itself")


@dataclass(frozen=True, slots=True, kw_only=True)
class SendConfig(PeerConfig):
    """How the prefill server sends caches."""

    codec: str = _field("default", "the library's default, auto, or a codec by name (docs/codec.md)")
    codec_params: str | None = _field(None, "parameters of a codec by name, as JSON: '{\"exact\": true}'")
    rate: str | None = _field(None, 'limit of each link, e.g. "10Gbit"')
    lanes: int = _field(1, "connections of each link")
    targets: tuple[str, ...] = _field(
        ("tcp://127.0.0.1:*", "tcp://localhost:*", "tcp://[[]::1]:*"),
        "patterns of the addresses that caches may be sent to",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(PeerConfig):
    """The context store (docs/store.md)."""

    url: str | None = _field(None, "address of the store: tcp://, tls:// or unix://; without it none is used")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStoreConfig(StoreConfig):
    """The context store, whose prefixes are taken."""

    answer_s: float = _field(0.5, "a store that has not answered by then is passed over")
    arrive_s: float = _field(5.0, "a prefix that is not here whole by then is given up; the prefill server is asked")
    rest_tokens: int = _field(
        256, "tokens behind a stored prefix that are computed here; more go to the prefill server"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStoreConfig(StoreConfig):
    """The context store, which gets the caches that are computed."""

    rate: str | None = _field(None, 'limit of the link to the store, e.g. "1Gbit"')
    waiting: int = _field(2, "computed caches that may wait for being stored; more are not stored")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamConfig:
    """The prefill server, as the decode server sees it."""

    url: str = _field("http://127.0.0.1:8001", "its address: http:// or https://")
    api_key_file: str | None = _field(None, "file whose first line is the key to send")
    ca_file: str | None = _field(None, "PEM file, for https://: its authority, if the system does not know it")
    timeout_s: float = _field(600.0, "a cache that has not been offered by then will not come")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """How much a server takes on."""

    running: int = _field(8, "requests at once, each with a cache in memory")
    queued: int = _field(128, "requests that may wait for their turn; more are answered with 429")
    context_tokens: int | None = _field(None, "of a prompt and its answer; by default what the model allows")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimitsConfig(LimitsConfig):
    """How much the server takes on."""

    new_tokens: int = _field(1024, "tokens of one answer at most")
    drafts: int = _field(64, "drafts of one request at most; 0 switches speculation off")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The log, on standard error."""

    format: str = _field("json", "json or text")
    level: str = _field("info", "debug, info, warning or error")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """What is kept of requests for those who watch: /events and /debug."""

    enabled: bool = _field(True, "serve /events and /debug, which show prompts and answers to whoever may connect")
    requests: int = _field(256, "ended requests that are kept")
    events: int = _field(50_000, "events of ended requests that are kept")
    queue_events: int = _field(1000, "events that may wait for one slow watcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """All settings of `lynx-net decode-server`."""

    http: DecodeHttpConfig = DecodeHttpConfig()
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    prefill: UpstreamConfig = UpstreamConfig()
    store: ReadStoreConfig = ReadStoreConfig()
    limits: DecodeLimitsConfig = DecodeLimitsConfig()
    watch: WatchConfig = WatchConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        _check_common(self.http, self.model, self.limits, self.log)
        tls_of(self.cache)
        _check_store(self.store)
        _check(
            (self.store.answer_s > 0 and self.store.arrive_s > 0, "store.answer_s and store.arrive_s must be positive"),
            (self.store.rest_tokens >= 1, "store.rest_tokens must be 1 or more"),
            (self.http.stall_s > 0, "http.stall_s must be positive"),
            (
                self.limits.new_tokens >= 1 and self.limits.drafts >= 0,
                "limits.new_tokens must be 1 or more, limits.drafts 0 or more",
            ),
            (
                min(self.watch.requests, self.watch.events, self.watch.queue_events) >= 1,
                "limits of watch must be 1 or more",
            ),
            (self.prefill.url.startswith(("http://", "https://")), "prefill.url must begin with http:// or https://"),
            (self.cache.deadline_s > 0 and self.prefill.timeout_s > 0, "times of cache and prefill must be positive"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """All settings of `lynx-net prefill-server`."""

    http: HttpConfig = HttpConfig(port=8001)
    model: ModelConfig = ModelConfig()
    link: SendConfig = SendConfig()
    store: WriteStoreConfig = WriteStoreConfig()
    limits: LimitsConfig = LimitsConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        _check_common(self.http, self.model, self.limits, self.log)
        tls_of(self.link)
        _check_store(self.store)
        _check(
            (self.store.waiting >= 1, "store.waiting must be 1 or more"),
            (self.link.deadline_s > 0, "link.deadline_s must be positive"),
            (self.link.lanes >= 1, "link.lanes must be 1 or more"),
        )
        parse_rate(self.link.rate)
        parse_rate(self.store.rate)
        if self.link.codec_params is not None and self.link.codec in ("default", "auto"):
            raise ConfigError("link.codec_params needs a codec by name")


def _check_common(http: HttpConfig, model: ModelConfig, limits: LimitsConfig, log: LogConfig) -> None:
    _check(
        (0 <= http.port < 65536, "http.port must be 0 to 65535"),
        (http.private_key is None or http.certificate is not None, "http.private_key needs http.certificate"),
        (http.max_body_bytes > 0 and http.grace_s >= 0, "http.max_body_bytes and http.grace_s must be positive"),
        (model.dtype in DTYPES, f"model.dtype must be one of {', '.join(DTYPES)}"),
        (model.threads >= 1, "model.threads must be 1 or more"),
        (limits.running >= 1 and limits.queued >= 0, "limits.running must be 1 or more, limits.queued 0 or more"),
        (limits.context_tokens is None or limits.context_tokens >= 2, "limits.context_tokens must be 2 or more"),
        (log.format in ("json", "text"), "log.format must be json or text"),
        (log.level in ("debug", "info", "warning", "error"), "log.level must be debug, info, warning or error"),
    )


def _check_store(store: StoreConfig) -> None:
    tls_of(store)
    _check(
        (store.url is None or store.url.startswith(_SCHEMES), "store.url must begin with tcp://, tls:// or unix://"),
        (store.deadline_s > 0, "store.deadline_s must be positive"),
    )


def _check(*checks: tuple[bool, str]) -> None:
    for holds, sentence in checks:
        if not holds:
            raise ConfigError(sentence)


# ---- reading


def add_flags(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """A flag for every field of every section, and --config."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same settings; flags win over it")
    defaults = config()
    for section in dataclasses.fields(config):
        values = getattr(defaults, section.name)
        group = parser.add_argument_group(section.name, (type(values).__doc__ or "").rstrip("."))
        for one in dataclasses.fields(values):
            default = getattr(values, one.name)
            shown = (
                "" if default is None else f" (default: {' '.join(default) if isinstance(default, tuple) else default})"
            )
            group.add_argument(
                f"--{section.name}-{one.name.replace('_', '-')}",
                dest=f"{section.name}.{one.name}",
                metavar="VALUE",
                nargs="+" if isinstance(default, tuple) else None,
                help=(one.metadata["help"] + shown).replace("%", "%%"),
            )


def read_config(config: type[ConfigT], arguments: argparse.Namespace) -> ConfigT:
    """The settings of a file and of parsed flags.

    Raises:
        ConfigError: the file cannot be read, or a setting is wrong; the sentence names it.
    """
    sections: dict[str, dict[str, Any]] = {}
    if arguments.config is not None:
        try:
            text = Path(arguments.config).read_text("utf-8")
            sections = tomllib.loads(text)
        except OSError as error:
            raise ConfigError(f"cannot read {arguments.config}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{arguments.config} is not TOML: {error}") from error
    flags: dict[str, dict[str, Any]] = {}
    for name, value in vars(arguments).items():
        section, dot, key = name.partition(".")
        if dot and value is not None:
            flags.setdefault(section, {})[key] = value
    defaults = config()
    known = {one.name: getattr(defaults, one.name) for one in dataclasses.fields(defaults)}  # type: ignore[arg-type]
    unknown = set(sections) - set(known)
    if unknown:
        raise ConfigError(f"unknown section [{min(unknown)}]; there are {', '.join(known)}")
    made = {}
    for name, default in known.items():
        given = sections.get(name, {})
        if not isinstance(given, dict):
            raise ConfigError(f"{name} must be a section: [{name}]")
        made[name] = _section(name, default, given, flags.get(name, {}))
    return config(**made)


def _section(name: str, default: Any, given: Mapping[str, Any], flags: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(type(default))
    changes: dict[str, Any] = {}
    for key, value in given.items():
        if key not in hints:
            raise ConfigError(f"unknown setting {key} in [{name}]; there are {', '.join(hints)}")
        changes[key] = _converted(f"{name}.{key}", hints[key], value, parse=False)
    for key, value in flags.items():
        if key not in hints:
            raise ConfigError(f"unknown setting {key} in [{name}]; there are {', '.join(hints)}")
        changes[key] = _converted(f"--{name}-{key.replace('_', '-')}", hints[key], value, parse=True)
    return dataclasses.replace(default, **changes)


def _converted(name: str, hint: Any, value: Any, *, parse: bool) -> Any:
    """A value of the type that a field has; from the command line it is a string."""
    wanted = next(one for one in typing.get_args(hint) if one is not type(None)) if _is_union(hint) else hint
    if typing.get_origin(wanted) is tuple:
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return tuple(value)
        raise ConfigError(f"{name} must be a list of strings")
    if parse:
        try:
            return _WORDS[value.lower()] if wanted is bool else wanted(value)
        except (KeyError, ValueError):
            raise ConfigError(f"{name}: {value!r} is not {_NAMES[wanted]}") from None
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise ConfigError(f"{name} must be {_NAMES[wanted]}, not {value!r}")
    return value


_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def read_secrets(file: str | None) -> tuple[str, ...]:
    """The keys of a file, one a line; none without a file.

    Raises:
        ConfigError: it cannot be read, or holds no key.
    """
    if file is None:
        return ()
    try:
        lines = Path(file).read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys in {file}: {error}") from error
    if not lines:
        raise ConfigError(f"{file} holds no key")
    return tuple(lines)


def read_key(file: str | None) -> bytes | None:
    """The key of a lynx_net link, written in hexadecimal; None without a file."""
    if file is None:
        return None
    try:
        return bytes.fromhex(read_secrets(file)[0])
    except ValueError:
        raise ConfigError(f"{file} must hold a key in hexadecimal digits") from None


def tls_of(section: PeerConfig) -> TlsConfig | None:
    """The certificates of a lynx_net side; None if there are none."""
    if section.certificate is None and section.private_key is None and section.ca_file is None:
        return None
    if section.ca_file is None or section.certificate is None:
        raise ConfigError("tls:// needs both certificate and ca_file")
    return TlsConfig(certificate=section.certificate, private_key=section.private_key, ca_file=section.ca_file)
