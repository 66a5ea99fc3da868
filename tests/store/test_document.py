"""docs/store.md says what is so: a reader written from it alone, and the tests and numbers that it names."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import xxhash

from lynx_net.store import index, messages, tokens
from lynx_net.store.storage import SYNC_EVERY_BYTES

if TYPE_CHECKING:
    from lynx_net.store import ContextStore

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "store.md").read_text("utf-8")


def xxh3(data: bytes) -> int:
    return int(xxhash.xxh3_64(data).intdigest())


def blake(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def read_by_the_document(data: bytes) -> tuple[dict[str, Any], dict[tuple[int, int], bytes]]:
    magic, version, length, head_sum, own_sum = struct.unpack_from("<8sIIQQ", data)
    assert (magic, version, own_sum) == (b"LynxStor", 1, xxh3(data[:24]))
    body = data[32 : 32 + length]
    assert head_sum == xxh3(body)
    offset, index_bytes, index_sum, again, end_sum = struct.unpack_from("<QQQQQ", data, len(data) - 40)
    assert (again, end_sum) == (head_sum, xxh3(data[-40:-8]))
    packed = data[offset : offset + index_bytes]
    assert index_sum == xxh3(packed)
    assert offset + index_bytes + 40 == len(data)
    head = msgpack.unpackb(body)
    records = list(struct.iter_unpack("<QIQ", packed))
    pages = len(records) // head["streams"]
    streams = {}
    at = 32 + length
    for number, (start, size, checksum) in sorted(enumerate(records), key=lambda one: one[1][:2]):
        assert start == at
        at += size
        stream, page = divmod(number, pages)
        streams[page, stream] = data[start:at]
        assert checksum == xxh3(data[start:at])
    assert at == offset
    return head, streams


def test_a_file_is_read_by_what_the_document_says(store: ContextStore, packed_cache: Any, tmp_path: Path) -> None:
    cache = packed_cache(150)
    key = store.put("a model", range(7, 157), cache, meta={"x": 1})
    head, streams = read_by_the_document((tmp_path / "store" / "entries" / f"{key}.lynx").read_bytes())
    assert len(streams) == 2 * 2 * 2 * 10
    assert streams[3, 1] == cache.arrays[0, "key"][0].pages[3].streams[1]
    layout = head["layout"]
    told = struct.pack("<150I", *range(7, 157))
    assert head["tail"] == told
    first = blake(blake(b"lynx_net store 1" + b"a model") + told[: 4 * 128])
    assert head["chain"] == first
    shape = [layout[name] for name in ("layers", "heads", "key_size", "value_size", "page_tokens", "raw_head")]
    kind = msgpack.packb([head["codec"], dict(sorted(head["codec_params"].items())), layout["dtype"], shape])
    assert key == blake(blake(first + told[4 * 128 :]) + kind).hex()


def test_every_promise_names_tests_that_exist() -> None:
    defined = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)
    }
    rows = TEXT.partition("| proven by |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(rows) >= 9
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.split("|")[2])
        assert named, row
        assert set(named) <= defined, set(named) - defined


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"blocks of {tokens.BLOCK_TOKENS}." in TEXT
    assert f"{tokens.DIGEST_BYTES} bytes of digest" in TEXT
    assert f"above {tokens.MAX_WHOLE_TOKENS:,} tokens" in TEXT
    assert f"more than {index.COMPARED} the newest {index.COMPARED} are" in TEXT
    assert f"no more than\n{SYNC_EVERY_BYTES >> 20} MiB" in TEXT
    assert f'`meta["{messages.FIELD}"]`' in TEXT
