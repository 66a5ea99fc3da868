"""`lynx-net store`: serve a store, list what is in it, verify it, evict from it."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lynx_net.errors import EntryDamagedError, LynxError, StoreError
from lynx_net.store.server import serve_store
from lynx_net.store.storage import storage_for
from lynx_net.store.store import NO_ENTRY, ContextStore
from lynx_net.transport import TlsConfig
from lynx_net.wire.pacing import parse_rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from lynx_net.store.store import EntryInfo

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = """\
Keeps encoded caches on a disk and gives each asker the longest prefix of its prompt that is there.

  lynx-net store serve FOLDER --listen tcp://0.0.0.0:7100 --max-bytes 200GB --max-age 7d
  lynx-net store list FOLDER
  lynx-net store verify FOLDER
  lynx-net store evict FOLDER --max-bytes 100GB

FOLDER is a local folder, or a URL that fsspec knows (s3://bucket/folder; extra `store`). One process at a time writes
to a local folder; `list` and `verify` change nothing and may run beside it."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_TIMES = {"": 1, "S": 1, "M": 60, "H": 3600, "D": 86400}


def _quantity(units: dict[str, int], what: str) -> Callable[[str], float]:
    """An argparse type: a number with one of these units."""

    def parse(text: str) -> float:
        number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        unit = units.get(text[len(number) :].upper())
        try:
            value = float(number) * (unit or 0)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}, such as {'100GB' if what == 'size' else '7d'}")
        return value

    return parse


_size = _quantity(_UNITS, "size")
_age = _quantity(_TIMES, "time")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the commands and their options."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, work: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.add_argument(
            "folder", metavar="FOLDER", help="where the entries lie: a folder, or a URL that fsspec knows"
        )
        added.set_defaults(work=work)
        return added

    serve = command("serve", _serve, "take caches and give them to those who ask, until SIGTERM or Ctrl-C")
    add = serve.add_argument
    add("--listen", metavar="URL", default="tcp://127.0.0.1:7100", help="address to serve on (default: %(default)s)")
    add("--max-bytes", type=_size, metavar="SIZE", help="of all entries; the least recently used ones go")
    add("--max-age", type=_age, metavar="TIME", help="entries that were not used for so long go")
    add("--rate", help="pace each link, for example 10Gbit")
    add("--key-file", type=Path, metavar="FILE", help="shared key of all peers, in hexadecimal digits")
    add("--tls-cert", metavar="FILE", help="this side's certificate, for tls://")
    add("--tls-key", metavar="FILE", help="its private key")
    add("--tls-ca", metavar="FILE", help="authorities of the clients' certificates")
    listing = command("list", _list, "list the entries, the least recently used first")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")
    verify = command("verify", _verify, "read every byte and compare it with its checksum; exit code 1 if one is wrong")
    verify.add_argument("keys", nargs="*", metavar="KEY", help="entries to verify (default: all)")
    verify.add_argument("--quarantine", action="store_true", help="put damaged entries aside; not beside a server")
    evict = command("evict", _evict, "remove entries, the least recently used first; not beside a server")
    evict.add_argument("--max-bytes", type=_size, metavar="SIZE", help="until so much is left")
    evict.add_argument("--max-age", type=_age, metavar="TIME", help="those that were not used for so long")
    evict.add_argument("--key", action="append", default=[], metavar="KEY", help="this one; may be given again")


def run(arguments: argparse.Namespace) -> int:
    """Run a command and return its exit code: 0, or 1 after an error."""
    try:
        code: int = arguments.work(arguments)
    except LynxError as error:
        print(f"lynx_net store: {error}", file=sys.stderr, flush=True)
        return 1
    except OSError as error:
        print(f"lynx_net store: {error.filename or 'operating system'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code


def _serve(arguments: argparse.Namespace) -> int:
    parse_rate(arguments.rate)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    max_bytes = None if arguments.max_bytes is None else int(arguments.max_bytes)
    store = ContextStore(storage_for(arguments.folder), max_bytes=max_bytes, max_age_s=arguments.max_age)
    with store.open(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve_until_told(arguments, store))
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # no uvloop for this platform
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _serve_until_told(arguments: argparse.Namespace, store: ContextStore) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tls = None
    if arguments.tls_ca is not None:
        tls = TlsConfig(certificate=arguments.tls_cert, private_key=arguments.tls_key, ca_file=arguments.tls_ca)
    key = None if arguments.key_file is None else _read_key(arguments.key_file)
    async with serve_store(arguments.listen, store, rate=arguments.rate, tls=tls, key=key) as server:
        entries = store.entries()
        print(f"{len(entries)} entries, {store.total_bytes} bytes, in {store.storage}", flush=True)
        print(f"serving on {server.url}", flush=True)
        await stop.wait()


def _read_key(file: Path) -> bytes:
    try:
        return bytes.fromhex(file.read_text())
    except ValueError:
        raise StoreError(f"{file} does not hold a key in hexadecimal digits") from None


def _list(arguments: argparse.Namespace) -> int:
    with ContextStore(storage_for(arguments.folder)).open(readonly=True) as store:
        entries = store.entries()
        if arguments.json:
            for entry in entries:
                print(json.dumps(_fields(entry)))
        else:
            for entry in entries:
                head = entry.head
                print(
                    f"{entry.key}  {head.path.count:9} tokens {entry.size_bytes:14} bytes  {head.codec:10} "
                    f"used {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(entry.used_s))}  {head.path.model}"
                )
            print(f"{len(entries)} entries, {store.total_bytes} bytes")
        for key, reason in store.damaged.items():
            print(f"{key}  DAMAGED: {reason}", file=sys.stderr)
    return 0


def _fields(entry: EntryInfo) -> dict[str, object]:
    head = entry.head
    return {
        "key": entry.key,
        "model": head.path.model,
        "tokens": head.path.count,
        "bytes": entry.size_bytes,
        "codec": head.codec,
        "layers": head.layout.layers,
        "created_s": head.created_s,
        "used_s": entry.used_s,
    }


def _verify(arguments: argparse.Namespace) -> int:
    with ContextStore(storage_for(arguments.folder)).open(readonly=not arguments.quarantine) as store:
        damaged = dict(store.damaged)
        known = [entry.key for entry in store.entries()]
        for key in arguments.keys or known:
            reason = store.verify(key)
            if reason is None or (reason == NO_ENTRY and not arguments.keys):
                continue  # one that a server has evicted meanwhile is not missed
            if key not in damaged:
                damaged[key] = reason
                if arguments.quarantine:
                    store.damage(key, EntryDamagedError(reason))
    if arguments.keys:
        damaged = {key: reason for key, reason in damaged.items() if key in arguments.keys}
    for key, reason in damaged.items():
        print(f"{key}  DAMAGED: {reason}")
    total = len(arguments.keys or {*known, *damaged})
    print(f"{total - len(damaged)} of {total} entries are what was written")
    return 1 if damaged else 0


def _evict(arguments: argparse.Namespace) -> int:
    max_bytes, max_age_s = arguments.max_bytes, arguments.max_age
    if max_bytes is None and max_age_s is None and not arguments.key:
        raise StoreError("what to evict: --max-bytes, --max-age or --key")
    with ContextStore(storage_for(arguments.folder)).open() as store:
        gone = [key for key in arguments.key if store.remove(key)]
        missing = [key for key in arguments.key if key not in gone]
        gone += store.evict(max_bytes=None if max_bytes is None else int(max_bytes), max_age_s=max_age_s)
        for key in gone:
            print(key)
        print(f"{len(gone)} entries evicted, {len(store.entries())} left, {store.total_bytes} bytes")
    for key in missing:
        print(f"lynx_net store: there is no entry {key}", file=sys.stderr)
    return 1 if missing else 0
