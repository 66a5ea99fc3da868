"""The file of an entry, normative in docs/store.md: head, page streams, index, trailer. Pure: bytes in, values out.

Every byte of a file is under a checksum: the head and the index under their own, each page stream under one in the
index, and the trailer, which is written last, under its own. A file is whole if its trailer is.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import xxhash

from lynx_codec.plan import PLAN, CodecTable
from lynx_codec.registry import CodecBuilder
from lynx_net.errors import CodecError, EntryDamagedError, LocalProtocolError
from lynx_net.store.tokens import TokenPath
from lynx_net.wire.layout import CacheLayout
from lynx_net.wire.messages import MAX_STREAMS

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "FIXED_BYTES",
    "INDEX_RECORD",
    "TRAILER_BYTES",
    "EntryHead",
    "Trailer",
    "checksum",
    "pack_head",
    "pack_tail",
    "read_fixed",
    "read_head",
    "read_index",
    "read_trailer",
]

MAGIC = b"LynxStor"
VERSION = 1
MAX_HEAD_BYTES = 1 << 28

_FIXED = struct.Struct("<8sIIQQ")
FIXED_BYTES = _FIXED.size
_TRAILER = struct.Struct("<QQQQQ")
TRAILER_BYTES = _TRAILER.size

INDEX_RECORD = np.dtype([("offset", "<u8"), ("bytes", "<u4"), ("sum", "<u8")])
"""Of a page stream, 20 bytes: where it begins in the file, its bytes, their xxh3-64."""


def checksum(data: bytes | memoryview) -> int:
    """xxh3-64, seed 0."""
    return xxhash.xxh3_64_intdigest(data)


@dataclass(frozen=True, slots=True)
class EntryHead:
    """What an entry is: the cache of which tokens, and how it is encoded.

    Attributes:
        path: model and tokens.
        layout: of the cache; its tokens are those of the path.
        codec, codec_params: as in an offer.
        streams: of the codec.
        meta: of the application that made it.
        created_s: seconds since 1970.
    """

    path: TokenPath
    layout: CacheLayout
    codec: str
    codec_params: dict[str, Any]
    streams: int
    meta: dict[str, Any] = field(default_factory=dict)
    created_s: float = 0.0

    def __post_init__(self) -> None:
        if self.layout.tokens != self.path.count:
            raise LocalProtocolError(
                f"a cache of {self.layout.tokens} tokens cannot be stored under {self.path.count} tokens"
            )
        if not 1 <= self.streams <= MAX_STREAMS:
            raise LocalProtocolError(f"a cache has 1 to {MAX_STREAMS} streams, not {self.streams}")

    @property
    def key(self) -> str:
        """Content address, 32 hexadecimal digits: of the tokens, the model, the codec and how pages are cut."""
        layout = self.layout
        shape = (layout.layers, layout.heads, layout.key_size, layout.value_size, layout.page_tokens, layout.raw_head)
        kind = _packed([self.codec, _sorted(self.codec_params), layout.dtype, list(shape)])
        return hashlib.blake2b(self.path.end + kind, digest_size=16).hexdigest()

    def table(self) -> CodecTable:
        """The codecs of its arrays.

        Raises:
            CodecError: one that this side does not have.
        """
        layers, kinds = self.layout.layers, self.layout.kinds
        if self.codec == PLAN:
            table = CodecTable.from_params(self.codec_params, layers, kinds)
        else:
            table = CodecTable.uniform(CodecBuilder().build(self.codec, self.codec_params), layers, kinds)
        if len(table.stream_names) != self.streams:
            raise CodecError(f"codec {self.codec} has {len(table.stream_names)} streams, not {self.streams}")
        return table


def _packed(value: Any) -> bytes:
    try:
        return bytes(msgpack.packb(value) or b"")
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"what describes a cache cannot be packed: {error}") from error


def _sorted(value: Any) -> Any:
    """The same value with the keys of its maps in order, so that equal parameters have equal bytes."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted(one) for one in value]
    return value


def pack_head(head: EntryHead) -> bytes:
    """The first bytes of a file: what comes before its page streams."""
    path = head.path
    body = _packed(
        {
            "model": path.model,
            "count": path.count,
            "chain": path.chain,
            "tail": path.tail,
            "layout": head.layout.to_wire(),
            "codec": head.codec,
            "codec_params": head.codec_params,
            "streams": head.streams,
            "meta": head.meta,
            "created_s": head.created_s,
        }
    )
    if len(body) > MAX_HEAD_BYTES:
        raise LocalProtocolError(f"the head of an entry has {len(body)} bytes, at most {MAX_HEAD_BYTES}")
    fixed = _FIXED.pack(MAGIC, VERSION, len(body), checksum(body), 0)[:-8]
    return fixed + checksum(fixed).to_bytes(8, "little") + body


def read_fixed(data: bytes) -> tuple[int, int]:
    """From the first FIXED_BYTES of a file: bytes of the head behind them, and their checksum.

    Raises:
        EntryDamagedError: these are not the first bytes of an entry.
    """
    if len(data) != FIXED_BYTES:
        raise EntryDamagedError(f"{len(data)} bytes, an entry begins with {FIXED_BYTES}")
    magic, version, length, head_sum, own = _FIXED.unpack(data)
    if checksum(data[:-8]) != own or magic != MAGIC:
        raise EntryDamagedError("it does not begin as an entry does")
    if version != VERSION:
        raise EntryDamagedError(f"version {version} of the format; this is version {VERSION}")
    if length > MAX_HEAD_BYTES:
        raise EntryDamagedError(f"a head of {length} bytes")
    return length, head_sum


def read_head(body: bytes, head_sum: int) -> EntryHead:
    """The head.

    Raises:
        EntryDamagedError: it is not what was written.
    """
    if checksum(body) != head_sum:
        raise EntryDamagedError("the checksum of the head does not match")
    try:
        found = msgpack.unpackb(body)
        path = TokenPath(found["model"], found["count"], found["chain"], found["tail"])
        layout = CacheLayout.from_wire(found["layout"])
        return EntryHead(
            path,
            layout,
            found["codec"],
            found["codec_params"],
            found["streams"],
            found["meta"],
            found["created_s"],
        )
    except (ValueError, TypeError, KeyError, LocalProtocolError, msgpack.UnpackException) as error:
        raise EntryDamagedError(f"its head makes no sense: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last bytes of a file.

    Attributes:
        index_offset, index_bytes, index_sum: where the index lies.
        head_sum: that of the head, so that both ends belong together.
    """

    index_offset: int
    index_bytes: int
    index_sum: int
    head_sum: int


def pack_tail(index: NDArray[Any], offset: int, head_sum: int) -> bytes:
    """Index and trailer, which end a file; the index begins at `offset`."""
    body = index.tobytes()
    fields = _TRAILER.pack(offset, len(body), checksum(body), head_sum, 0)[:-8]
    return body + fields + checksum(fields).to_bytes(8, "little")


def read_trailer(data: bytes, size_bytes: int, head_end: int, head_sum: int) -> Trailer:
    """From the last TRAILER_BYTES of a file of so many bytes whose page streams begin at `head_end`.

    Raises:
        EntryDamagedError: the file is cut off or was changed.
    """
    if len(data) != TRAILER_BYTES:
        raise EntryDamagedError(f"a file of {size_bytes} bytes is too short for an entry")
    offset, length, index_sum, own_head_sum, own = _TRAILER.unpack(data)
    if checksum(data[:-8]) != own:
        raise EntryDamagedError("the trailer is missing or damaged")
    if own_head_sum != head_sum or offset < head_end or offset + length + TRAILER_BYTES != size_bytes:
        raise EntryDamagedError("the trailer belongs to another file")
    return Trailer(offset, length, index_sum, own_head_sum)


def read_index(body: bytes, trailer: Trailer, head: EntryHead, head_end: int) -> NDArray[Any]:
    """The index, [streams, pages] of INDEX_RECORD; its page streams fill the file between head and index.

    Raises:
        EntryDamagedError: it is not what was written.
    """
    if len(body) != trailer.index_bytes or checksum(body) != trailer.index_sum:
        raise EntryDamagedError("the checksum of the index does not match")
    pages = head.layout.page_count
    if len(body) != head.streams * pages * INDEX_RECORD.itemsize:
        raise EntryDamagedError(f"an index of {len(body)} bytes for {head.streams} streams of {pages} pages")
    index = np.frombuffer(body, dtype=INDEX_RECORD)
    # Between pieces without a gap, nothing in the file is out of sight of a checksum.
    order = np.lexsort((index["bytes"], index["offset"]))
    offsets = index["offset"][order]
    starts = np.append(offsets, np.uint64(trailer.index_offset))
    ends = np.insert(offsets + index["bytes"][order], 0, np.uint64(head_end))
    if not np.array_equal(starts, ends):
        raise EntryDamagedError("its page streams do not lie one behind the other")
    return index.reshape(head.streams, pages)
