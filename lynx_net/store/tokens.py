"""Prompts by their tokens: a chain of hashes over blocks, which equal prefixes share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lynx_net.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["BLOCK_TOKENS", "DIGEST_BYTES", "MAX_WHOLE_TOKENS", "TokenPath"]

BLOCK_TOKENS = 128
"""Tokens of a block of the chain."""

DIGEST_BYTES = 16

MAX_WHOLE_TOKENS = 32768
"""Longer prompts travel as their chain and their last tokens: a control message holds 256 KiB."""

MAX_TOKEN = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class TokenPath:
    """The first `count` tokens of a prompt of one model, as far as somebody has told them.

    Attributes:
        model: name of the model; prompts of different models have nothing in common.
        count: tokens.
        chain: digests of the full blocks, 16 bytes each: blake2b over the digest before and the tokens of the block
            (u32, little-endian); before the first block that of the model's name. Equal digests mean equal
            prefixes.
        tail: the last tokens, u32 little-endian: those behind the last full block, or all.
    """

    model: str
    count: int
    chain: bytes
    tail: bytes

    def __post_init__(self) -> None:
        known = len(self.tail) // 4
        blocks = self.count // BLOCK_TOKENS
        if not self.model or len(self.model) > 1000:
            raise LocalProtocolError("the name of a model has 1 to 1000 characters")
        if self.count < 1:
            raise LocalProtocolError("a prompt to store or look for needs at least one token")
        if len(self.chain) != blocks * DIGEST_BYTES:
            raise LocalProtocolError(f"a chain of {len(self.chain)} bytes for {self.count} tokens")
        if len(self.tail) % 4 or known not in (self.count, self.count % BLOCK_TOKENS):
            raise LocalProtocolError(f"{len(self.tail)} bytes of last tokens for {self.count} tokens")

    @classmethod
    def of(cls, model: str, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> TokenPath:
        """The path of these tokens.

        Raises:
            LocalProtocolError: no tokens, or numbers that are no token ids.
        """
        array = np.asarray(tokens)
        integers = array.ndim == 1 and (not array.size or array.dtype.kind in "iu")
        if not integers or (array.size and not 0 <= int(array.min()) <= int(array.max()) <= MAX_TOKEN):
            raise LocalProtocolError("tokens must be a list of integers from 0 to 2^32 - 1")
        return cls.of_bytes(model, array.astype("<u4").tobytes())

    @classmethod
    def of_bytes(cls, model: str, tokens: bytes) -> TokenPath:
        """The same of tokens as u32, little-endian."""
        if len(tokens) % 4:
            raise LocalProtocolError(f"tokens are 4 bytes each, not {len(tokens)} bytes in all")
        return cls(model, len(tokens) // 4, b"".join(_chain(model, tokens)), tokens)

    @property
    def blocks(self) -> int:
        """Full blocks."""
        return self.count // BLOCK_TOKENS

    def digest(self, blocks: int) -> bytes:
        """The digest of the first so many blocks."""
        if blocks == 0:
            return model_digest(self.model)
        return self.chain[(blocks - 1) * DIGEST_BYTES : blocks * DIGEST_BYTES]

    @property
    def end(self) -> bytes:
        """What stands for all tokens, those behind the last block included."""
        behind = self.tail[len(self.tail) - self.count % BLOCK_TOKENS * 4 :]
        return _digest(self.digest(self.blocks), behind)

    def short(self) -> TokenPath:
        """Without the tokens that the chain stands for."""
        return TokenPath(
            self.model, self.count, self.chain, self.tail[len(self.tail) - self.count % BLOCK_TOKENS * 4 :]
        )

    def common_tokens(self, other: TokenPath) -> int:
        """How many of the first tokens are the same, as far as both sides know."""
        if self.model != other.model:
            return 0
        blocks = common_blocks(self.chain, other.chain)
        same = blocks * BLOCK_TOKENS
        mine, its = self._from(same), other._from(same)
        if mine is None or its is None:
            return same
        length = min(len(mine), len(its))
        differ = np.flatnonzero(mine[:length] != its[:length])
        return same + (int(differ[0]) if len(differ) else length)

    def _from(self, token: int) -> NDArray[np.uint32] | None:
        """The tokens from this one on, if they are known."""
        first = self.count - len(self.tail) // 4
        if first > token:
            return None
        return np.frombuffer(self.tail, dtype="<u4")[token - first :]


def common_blocks(chain: bytes, other: bytes) -> int:
    """Blocks that two chains have in common: equal digests mean equal prefixes, so the first difference is searched."""
    low, high = 0, min(len(chain), len(other)) // DIGEST_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * DIGEST_BYTES, middle * DIGEST_BYTES)
        if chain[at] == other[at]:
            low = middle
        else:
            high = middle - 1
    return low


def model_digest(model: str) -> bytes:
    """Where the chain of a model begins."""
    return _digest(b"lynx_net store 1", model.encode())


def _digest(before: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(before + data, digest_size=DIGEST_BYTES).digest()


def _chain(model: str, tokens: bytes) -> list[bytes]:
    chain, last = [], model_digest(model)
    block_bytes = 4 * BLOCK_TOKENS
    for start in range(0, len(tokens) - len(tokens) % block_bytes, block_bytes):
        last = _digest(last, tokens[start : start + block_bytes])
        chain.append(last)
    return chain
