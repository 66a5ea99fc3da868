"""Which entry has the longest prefix of a prompt."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from lynx_net.store.tokens import TokenPath

__all__ = ["PrefixIndex"]

COMPARED = 64
"""Entries that are compared token by token, at most."""

T = TypeVar("T", bound="Hashable")


class PrefixIndex(Generic[T]):
    """Entries by the digests of their blocks; an entry shorter than a block by the digest of its model alone.

    Looking up takes one step for each time the number of blocks can be halved, then one for each entry that shares the
    deepest block found. Not for several threads at once.
    """

    def __init__(self) -> None:
        self._paths: dict[T, TokenPath] = {}
        self._by_digest: dict[bytes, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def add(self, entry: T, path: TokenPath) -> None:
        """Take up an entry; once."""
        self._paths[entry] = path
        for digest in _digests(path):
            self._by_digest.setdefault(digest, {})[entry] = None

    def remove(self, entry: T) -> None:
        """Forget an entry."""
        for digest in _digests(self._paths.pop(entry)):
            held = self._by_digest[digest]
            del held[entry]
            if not held:
                del self._by_digest[digest]

    def longest(self, path: TokenPath, wanted: Callable[[T], bool] = lambda entry: True) -> list[tuple[int, T]]:
        """Entries that begin as this prompt does, with the number of tokens they have in common, the longest first.

        Those that share the longest prefix of whole blocks which any wanted entry has with the prompt; if there is
        none, those shorter than a block. Of many that differ inside the next block only the newest are compared.
        """
        exact = [(path.count, one) for one in self._by_digest.get(path.end, {}) if wanted(one)]
        if exact:
            return exact
        for blocks in range(self._deepest(path), -1, -1):
            held = filter(wanted, reversed(self._by_digest.get(path.digest(blocks), {})))
            compared = [(path.common_tokens(self._paths[one]), one) for one in itertools.islice(held, COMPARED)]
            if found := [pair for pair in compared if pair[0]]:
                return sorted(found, key=lambda pair: -pair[0])
        return []

    def _deepest(self, path: TokenPath) -> int:
        """Blocks of the prompt that some entry has."""
        low, high = 0, path.blocks
        while low < high:
            middle = (low + high + 1) // 2
            if path.digest(middle) in self._by_digest:
                low = middle
            else:
                high = middle - 1
        return low


def _digests(path: TokenPath) -> list[bytes]:
    return [*(path.digest(blocks) for blocks in range(min(path.blocks, 1), path.blocks + 1)), path.end]
